"""Sections on measurements that no paper prints: speed, memory, runs on other data, larger images, rate searches.

page.md and runs.md call most of them by name.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..bench.pooling import ONE_PROCESS, Row, describe_time
from ..core.statistics import measure_rise
from .claims import Report
from .markdown import code, cross, join, number, table, tabulate
from .paper import ATTENTIONS
from .records import Source, find_score_interval, group_by, list_all, name_commits, read_curves
from .results import Missing, SpeedGroup
from .variants import find_shown
from .verdicts import format_ratio, significant

_RISE = 1.0  # points; a curve that gains less in its last quarter is flat


def list_speeds(report: Report) -> str:
    """Return every device's rows of speed and the conclusions of sweeps; empty on the page of a further paper.

    Raises:
        Missing: no speed is measured yet.
    """
    results = report.results
    if not report.paper.primary:
        return ""
    if not results.speed_rows:
        raise Missing("nothing is measured yet", "repro efficiency")
    blocks = []
    for group, rows in results.speed_rows.items():
        blocks.append(f"### {group}, {group.mode}, commit {name_commits(row for row, _ in rows)}")
        if listed := [row for row, source in rows if source.stage is not None]:
            blocks += [f"The default run: {ONE_PROCESS}.", tabulate(_SPEEDS, listed)]
        if swept := [(row, source) for row, source in rows if source.stage is None]:
            blocks += _list_sweep(group, swept)
    return join(blocks)


def list_spreads(report: Report) -> str:
    """Return a table of each device's rows: their processes, and the slowest's excess over the fastest in percent."""
    rows = []
    for group, found in report.results.speed_rows.items():
        counts = sorted({row["processes"] for row, _ in found})
        ranges = [row["latency_range_ms"] for row, _ in found if row["latency_range_ms"]]  # none for one process
        spreads = [100 * (slowest / fastest - 1) for fastest, slowest in ranges]
        shown = [f"{each(spreads):.0f} %" if spreads else "–" for each in (statistics.median, max)]
        rows.append([f"{group}, {group.mode}", len(found), " or ".join(map(str, counts)), *shown])
    if not rows:
        return "No row is measured yet: `repro efficiency`."
    header = ["rows of", "rows", "processes of a row", "slowest over fastest process: median", "largest"]
    return table(header, rows)


def list_runs(report: Report) -> str:
    """Return a table of the runs of this paper's models that no other section shows and no printed number matches.

    Raises:
        Missing: the primary paper has no such run; another paper's section is then empty.
    """
    results, paper, shown_elsewhere = report.results, report.paper, find_shown(report)
    # scores that are no percentage, such as a denoiser's loss, have a section of their own
    labels = {
        key: label for scores in results.scores.values() for key, label in scores.items() if key.endswith("_percent")
    }
    runs = [
        source
        for source in results.score_sources
        if source.path not in shown_elsewhere
        and not results.is_full(source)
        and results.stands_on(paper, source.metrics["model"])
        and labels.keys() & source.metrics.keys()
    ]
    if not runs and paper.primary:
        raise Missing("there are none yet", "repro pretrain")
    rows, unlearned = [], set()
    for source in sorted(runs, key=lambda each: -each.most_seeds):
        m, run = source.metrics, code(source.place)
        images = number(m.get("held_out_images"), ".0f")
        about = [m["data"], number(m.get("epochs")), number(source.most_seeds or None), images]
        score = next(key for key in labels if key in m)
        curve = _describe_curve(read_curves(source, score))
        rows.append([run, results.model_key(m, source.path), *about, format_scores(m, labels), curve, source.device])
        reference = format_scores(m.get("without_learning") or {}, labels)
        # all runs on the same data share the scores of the method without learning: they are listed once
        if reference and (m["data"], reference) not in unlearned:
            unlearned.add((m["data"], reference))
            method = "without learning: threshold, nearest example"
            rows.append([run, method, m["data"], "–", "–", images, reference, "–", "–"])
    header = ["run", "model", "data", "epochs", "seeds", "held-out images", "scores", "curve", "device"]
    legend = (
        f"A curve still rises where the best score of its last quarter exceeds the best before by {_RISE:.0f} point or more, "
        "as a mean over the seeds, on the split of the curve: such a run says what a model learns in so many epochs, not "
        "what it can learn. A run outside the pipeline lies in results/replications, in the folder of its device."
    )
    return join([table(header, rows), legend]) if rows else ""


def _describe_curve(curves: Mapping[int, Mapping[int, float]]) -> str:
    """Return `flat` or `rises` for a score at the end of a training, and the mean rise in points over the seeds.

    Args:
        curves: seed -> epoch -> score.
    """
    rises = [rise for rise in map(measure_rise, curves.values()) if rise is not None]
    if not rises:
        return "–"
    rise = statistics.mean(rises)
    return f"{'rises' if rise >= _RISE else 'flat'}, {rise:+.1f}"


def over_resolution(report: Report) -> str:
    """Return the section on classifiers at larger images than those of their training; empty without its record.

    The record comes from `repro resolution`. Only the primary paper's page has the section. A line is named by its model,
    so no two families may have one model.
    """
    sections = []
    for source in report.results.sources if report.paper.primary else ():
        m = source.metrics
        if "evaluated" not in m:
            continue
        # `_cell` expects the status of a speed row
        cells = {(row["model"], row["image_size"][0]): {**row, "status": "ok"} for row in m["evaluated"]}

        def name(size: int, trained: int = m["train_image_size"]) -> str:
            """Return a column's heading, with the size as a multiple of that of the training."""
            return f"{size}² ({size / trained:.2g}×)"

        accuracies = cross("model", cells, lambda row: number(row["top1_percent"], ".1f"), name)
        times = cross("model", cells, partial(_cell, key="latency_ms"), name)
        text = (
            f"The classifiers of the pipeline, trained at {m['train_image_size']}² pixels with one seed, on the {m['held_out_images']} "
            f"{m['split']} images of {m['data_set']} enlarged to other sizes; position embeddings are resampled. Whether a backbone that was "
            "trained at scale behaves likewise, these small models cannot say."
        )
        origin = f"`{source.path}`: {source.device}. Top-1 (%):"
        timed = "Time of a forward pass for each image (ms):"
        sections += ["## Beyond the image size of the training", text, origin, accuracies, timed, times]
    return join(sections)


def list_searches(report: Report) -> str:
    """Return a table of the searches for learning rates and warm-ups, a row per record; empty without `repro tune`.

    Only the primary paper's page has the table.
    """
    results = report.results
    listed = list_all(results.sources)
    found = [each for each in listed if each.metrics.get("split") == "tune" and "trials" in each.metrics]
    if not found or not report.paper.primary:
        return ""
    rows = []
    for source in found:
        m, chosen = source.metrics, source.metrics["chosen"]
        of_rate = group_by(m["trials"], lambda trial: trial["lr"])
        scores = []
        for lr, trials in sorted(of_rate.items()):
            best = max(trials, key=lambda trial: -1 if trial["diverged"] else trial[m["score"]])
            shown = ": diverged" if best["diverged"] else f" ({best['warmup_epochs']}): {best[m['score']]:.1f}"
            scores.append(f"{lr:g}{shown}")
        edge = ", at the edge" if chosen["lr"] in (min(of_rate), max(of_rate)) else ""
        # a cell may be trained otherwise than the search chose; then the profile states both numbers or one
        trained = chosen | ((results.profile_cells.get(m["cell"]) or {}).get("optim") or {})
        lr, warmup = (
            f", trained with {trained[name]:g}" if trained[name] != chosen[name] else ""
            for name in ("lr", "warmup_epochs")
        )
        numbers = number(chosen["lr"], "g", edge + lr), number(chosen["warmup_epochs"], "g", warmup)
        rows.append([code(m["cell"]), *numbers, "; ".join(scores), source.device])
    m = found[0].metrics
    rule = f"The trials are of seed {m['seed']}. The rule: {m['rule']}."
    header = ["cell", "rate", "warm-up (epochs)", "rate (its best warm-up): score on tune (%)", "device"]
    return join([rule, table(header, rows)])


def format_scores(metrics: Mapping[str, Any], labels: Mapping[str, str], places: int = 2) -> str:
    """Return scores as text, such as `top1 97.49 %, top5 100.00 %`, each with its interval over seeds.

    Args:
        metrics: a record's metrics; missing scores are left out.
        labels: key of a score -> its label.
        places: the decimals of a score.
    """
    shown = []
    for key, label in labels.items():
        value, interval = metrics.get(key), find_score_interval(metrics, key)
        # with five classes or fewer, every guess is among the first five
        if isinstance(value, (int, float)) and not (key == "top5_percent" and metrics.get("classes", 6) <= 5):
            spread = f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else ""
            shown.append(f"{label} {value:.{places}f} %{spread}".lstrip())
    return ", ".join(shown)


def _list_sweep(group: SpeedGroup, rows: Sequence[tuple[Row, Source]]) -> list[str]:
    """Return tables of each model's time and memory by image size, and the sweep's conclusions."""
    from ..bench.conclude import conclude  # loads PyTorch

    cells = {(_with_attention(row), row["image_size"][0]): row for row, _ in rows}
    blocks = []
    for key, label in (("latency_ms", "Step (ms)"), ("peak_memory_mib", "Peak memory (MiB)")):
        blocks += [f"{label}, by image size:", cross("model", cells, partial(_cell, key=key))]
    # a file may have rows of one processor with several numbers of threads, which are not compared
    concluded = conclude([row for row in rows[0][1].metrics["rows"] if row["device"] == group.device])
    if compared := [each for each in concluded["compared"] if SpeedGroup.of(each, group.device) == group]:
        header = ["size", "against", "pixels", "MACs, its / ours", "speed-up", "memory saved", "faster"]
        largest = "at the largest size where both ran, and at which sizes ours is faster:"
        blocks += [f"Ours against each other family {largest}", table(header, map(_compared_row, compared))]
    grown = [each for each in concluded["growth"] if SpeedGroup.of(each, group.device) == group]
    if grown := [each for each in grown if len(each["image_sizes"]) > 1]:
        exponents = {"multiply-adds": "macs_exponent", "time": "latency_exponent", "memory": "memory_exponent"}
        columns = {"model": _with_attention} | {name: partial(_show, key=key) for name, key in exponents.items()}
        text = "Growth with the number of tokens from 512 pixels on, as fitted exponents (1 is linear, 2 is quadratic):"
        blocks += [text, tabulate(columns, grown)]
    return blocks


def _cell(row: Row | None, key: str) -> str:
    """Write a quantity of a speed row, a time with its remark on the host; its status if the row failed."""
    if row is None:
        return "–"
    if row["status"] != "ok":
        return row["status"]
    is_speed = key in ("latency_ms", "throughput_img_per_s")
    return _show(row, key, describe_time(row) if is_speed else "")


def _show(row: Row, key: str, unit: str = "") -> str:
    """Write a number of a row or of a sweep's conclusion; `–` for None."""
    return number(significant(row[key]), unit=unit)


def _with_attention(row: Row) -> str:
    """Name a row's model, with the attention if it is a baseline that runs with either."""
    return f"{row['model']}, {row['attention']}" if row["attention"] in ATTENTIONS else row["model"]


def _compared_row(found: Row) -> list[str]:
    """Return the table row of one of `compared` of `bench.conclude.conclude`."""
    if "reason" in found:
        return [found["size"], found["against"], "–", "–", f"no ratio: {found['reason']}", "–", "–"]
    speedup = f"no ratio: {found.get('speedup_reason')}"
    if found["speedup"] is not None:
        speedup = format_ratio(found["speedup"], found["speedup_ends"])
    memory = "–" if found["memory_saved_percent"] is None else _show(found, "memory_saved_percent", " %")
    about = [found["size"], found["against"], f"{found['image_size']}²", _show(found, "macs_times")]
    return [*about, speedup, memory, _describe_sides(found)]


def _describe_sides(found: Row) -> str:
    """Return the image sizes at which ours is faster, slower or undecided.

    `always` or `never` stands for all sizes, with the smallest, only where they are enough for a crossover.
    """
    sides = {word: found[f"{word}_at"] for word in ("faster", "slower", "open")}
    if not any(sides.values()):
        return f"not known: {found['crossover_reason']}"
    listed = "; ".join(f"{word} at {', '.join(f'{side}²' for side in own)}" for word, own in sides.items() if own)
    least, relation = min(itertools.chain(*sides.values())), found["crossover"]
    if relation in ("always", "never"):
        return f"{relation} at {sum(map(len, sides.values()))} sizes from {least}² on"
    return f"from {found['crossover_image_size']}² on: {listed}" if relation == "from" else listed


# heading -> the cell of a row of the pipeline's own measurement
_SPEEDS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row["model"],
    "attention": lambda row: row["attention"] or "–",
    "pixels": lambda row: "{}×{}".format(*row["image_size"]),
    "images/s": partial(_cell, key="throughput_img_per_s"),
    "step (ms)": partial(_cell, key="latency_ms"),
    "peak memory (MiB)": partial(_show, key="peak_memory_mib"),
    "multiply-adds (G)": partial(_show, key="macs_g"),
}
