"""The sections of Vision-TTT's page besides the tables: FLOPs, the figures of interpretability in numbers, Fig. 7, and
the results of profiles/night.yaml, with a slot for each score and each pair that was named before the run.

page.md, night.md, claims.md.j2 and reproduction.md.j2 call most public functions by name.
"""

import functools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...core.config import load_yaml
from ...core.csvfile import parse_csv
from ...core.figures import STYLES, new_figure, save_png
from ...core.runtime import PEAK_TFLOPS
from ...data.kinds import IMAGENET_1K
from ...report.claims import Report
from ...report.ledger import Ledger
from ...report.markdown import join, number, show_p, strong, table
from ...report.measured import format_scores
from ...report.ordering import TOP1, Pair, compare_trainings
from ...report.power import detectable_difference
from ...report.records import Source, describe_origin
from ...report.results import Missing
from ...report.variants import Group, find_printed
from ..recipe import PAPER_HAS
from .recipe import SAID

COUNTERS_FILE = Path(__file__).with_name("flop_counters.csv")  # written by a search that is no longer in the code
_DESIGNS = ("Vanilla TTT", "+ Dual", "+ Conv2d")  # as Fig. 8 names them
_FAR = 10.0  # points of Top-1; a model so far below the best record of its kind has not learnt enough for its figure
_UTILISATION = 0.3  # assumed share of a GPU's peak that training reaches
_TURN = 30  # the epoch by which the paper's loss has turned (Fig. 11)
NOT_SEEN = "not seen in this small model"
BY_DESIGN = "by design, for any weights"
# (the paper's statement, our numbers, whether they agree). None: nothing can be said. `NOT_SEEN`: the small model could
# have confirmed the statement but cannot refute it. `BY_DESIGN`: it follows from which tokens the scans can reach.
_Finding = tuple[str, str, bool | str | None]


def find_counter(_: Report, key: str, counter: str | None = None) -> int:
    """Return a field of a FLOP counter that a search compared with the paper's FLOPs; of the first one by default."""
    rows = parse_csv(COUNTERS_FILE.read_text(encoding="utf-8"), COUNTERS_FILE.name)
    return next(row[key] for row in rows if counter in (None, row["counter"]))


def describe_models(report: Report) -> str:
    """Describe the models that the figures show: where they were trained, and their accuracies."""
    source = _find(report)
    m = source.metrics
    unlearnt, trained = _find_unlearnt(report), []
    for name, entry in m["receptive_fields"].items():
        record = _find_trained(report, entry)
        accuracy = format_scores(record.metrics, {TOP1: ""}, 1) if record else "unknown"
        trained.append(f"{name} {accuracy}{unlearnt.get(name, '')}")
    about = f"{m['model']} on {m['data']} ({describe_origin([source])}), {m['held_out_images']} held-out images."
    return f"{about} The receptive fields are of models with these accuracies: {'; '.join(trained)}."


def estimate_gpu_hours(report: Report) -> str:
    """Estimate the hours of an H100 to train Vittt-T, S and B on ImageNet-1K by Appendix D, at `_UTILISATION` of its peak.

    A multiply-add is two operations, and the backward pass has twice those of the forward pass. Loading of data is
    assumed to cost nothing.
    """
    counted = [report.verdicts[f"table1.vittt_{size}.macs_g"].ours for size in "tsb"]
    if None in counted:
        return "an unknown number of hours"
    macs_g = sum(map(float, counted))
    operations = 3 * 2e9 * macs_g * SAID[PAPER_HAS]["epochs"] * IMAGENET_1K.train
    hours = operations / (1e12 * PEAK_TFLOPS["H100"] * _UTILISATION) / 3600
    return f"{hours:.0f} hours of an H100 at {100 * _UTILISATION:.0f} % of its peak"


def list_findings(report: Report) -> str:
    """Tabulate the paper's statements on its interpretability figures, our trained models' numbers, and verdicts."""
    m = _find(report).metrics
    rows = []
    counts: Counter[str] = Counter()
    of_fields = _of_fields(m, _find_unlearnt(report))
    words = {True: "for the paper", False: "against the paper", None: "open", NOT_SEEN: NOT_SEEN, BY_DESIGN: BY_DESIGN}
    for place, findings in (("Fig. 3, 9, 10", _of_gradients(m)), ("Fig. 8", of_fields), ("Fig. 11", _of_losses(m))):
        for says, ours, agrees in findings:
            word = words[agrees]
            rows.append([place, says, ours, strong(word) if agrees is False else word])
            counts[word] += 1
    summary = "; ".join(f"{counts[word]} {word}" for word in words.values() if counts[word])
    return join([f"Of {len(rows)} findings: {summary}.", table(["", "the paper says", "ours", ""], rows)])


def _of_gradients(m: Mapping[str, Any]) -> list[_Finding]:
    """Judge the statements on the gradients' magnitude over the tokens, before and after training."""
    before, after = m["gradient_magnitude"]["before"], m["gradient_magnitude"]["after"]
    shares = [each["top30_share_percent"] for each in (before, after)]
    uniform = "the gradients are relatively uniform before training, and stand out after it"
    held = f"the top 30 % of the tokens hold {shares[0]:.0f} % of the gradient before, {shares[1]:.0f} % after"
    spread = uniform, held, shares[1] > shares[0] or NOT_SEEN
    semantic = "after training, the tokens with the largest gradients show the object"
    further = "and more so than before"
    # a record has this for digits alone, and only where some tokens lie after the first chunks
    if "later_percent" not in (after["ink"] or {}):
        return [spread, (semantic, "–", None), (further, "–", None)]
    ink = [each["ink"]["later_top30_percent"] for each in (before, after)]
    everywhere = after["ink"]["later_percent"]
    on_ink = f"{ink[1]:.0f} % of them lie on ink, which {everywhere:.0f} % of all later tokens do"
    # the blank border of an enlarged digit holds no gradient before the training either
    return [
        spread,
        (semantic, on_ink, ink[1] > everywhere),
        (further, f"{ink[0]:.0f} % lay on ink before", ink[1] > ink[0] or NOT_SEEN),
    ]


def _of_fields(m: Mapping[str, Any], unlearnt: Mapping[str, str]) -> list[_Finding]:
    """Judge the statements on the receptive fields; none before the fields of all `_DESIGNS` are known.

    The radii of `unlearnt` models (`_find_unlearnt`) are left out.
    """
    fields = m["receptive_fields"]
    known = {name for name, field in fields.items() if field.get("radius_90_px") is not None}
    if not known.issuperset(_DESIGNS):
        return []
    one, both, radial = (fields[name] for name in _DESIGNS)
    # the default run has no DeiT, but one with Vittt's convolution, by its own name
    shown = {name: name for name in ("DeiT", "DeiT + 3x3 conv", "Vim")} | {"Vittt": "+ Conv2d"}
    radii = {name: fields[key]["radius_90_px"] for name, key in shown.items() if key in known - unlearnt.keys()}
    side, ahead = radial["image_size"], one["share_ahead"]
    covered = ", ".join(f"{name} {radius:.0f}" for name, radius in radii.items())
    return [
        (
            "vanilla TTT sees one direction",
            f"{100 * ahead:.0f} % of its field lies ahead of the patch",
            ahead == 0 and BY_DESIGN,
        ),
        ("“+ Dual” sees both", f"{100 * both['share_ahead']:.0f} % lies ahead", both["share_ahead"] > 0 and BY_DESIGN),
        (
            "“+ Conv2d” is globally radial",
            f"anisotropy {radial['anisotropy']:.2f}, of “+ Dual” {both['anisotropy']:.2f} (0 is radial)",
            radial["anisotropy"] < both["anisotropy"],
        ),
        (
            "DeiT, Vim and Vittt cover all pixels",
            f"90 % of the field within {covered or 'none that has learnt'} pixels of {side}",
            None if not radii or min(radii.values()) > side / 4 else NOT_SEEN,
        ),
    ]


def _of_losses(m: Mapping[str, Any]) -> list[_Finding]:
    """Judge the statements on the inner reconstruction loss over the epochs whose weights were kept."""
    by_epoch = {int(name.removeprefix("epoch_")): found for name, found in m["reconstruction_loss"].items()}
    epochs = sorted(by_epoch)
    means = [statistics.fmean(by_epoch[epoch]["mean_by_layer"]) for epoch in epochs]
    path = ", ".join(f"{mean:.1f} at epoch {epoch}" for epoch, mean in zip(epochs, means, strict=True))
    smallest = by_epoch[epochs[-1]]["smallest"]
    falls: bool | str | None = None  # two snapshots cannot show a peak
    if between := means[1:-1]:
        is_peaked = means[0] < max(between) and means[-1] < max(between)
        falls = is_peaked or (NOT_SEEN if epochs[-1] < _TURN else False)
    return [
        ("the reconstruction loss rises, then falls", path, falls),
        ("it stays above zero", f"the smallest of a token and layer is {smallest:.1f}", smallest > 0),
    ]


def _find_unlearnt(report: Report) -> dict[str, str]:
    """Return model of a receptive field -> a clause, for models `_FAR` below the best record of model, options and data.

    The designs of Fig. 8 are options of one model, so a record of another design says nothing of theirs.
    """
    same = ("model", "options", "data")
    found = {}
    for name, entry in _find(report).metrics["receptive_fields"].items():
        if (source := _find_trained(report, entry)) is None:
            continue
        of_model = [
            each.metrics
            for each in report.results.score_sources
            if each.most_seeds and all(each.metrics.get(key) == source.metrics.get(key) for key in same)
        ]
        best = max(of_model, key=lambda m: m.get(TOP1, 0.0))
        if best[TOP1] > source.metrics[TOP1] + _FAR:
            found[name] = f" (left out: after {best['epochs']} epochs one has {best[TOP1]:.1f} %)"
    return found


def _find_trained(report: Report, entry: Mapping[str, Any]) -> Source | None:
    """Find the record of the training whose weights a figure shows; None for weights without one."""
    paths = report.results.paths
    record = paths.find_record(paths.root / entry.get("weights", ""))
    return record and report.results.find(record.relative_to(paths.root).as_posix())


def _find(report: Report) -> Source:
    """Return the record of the stage `visualize`."""
    asked = "nothing is drawn yet", "dvc repro visualize"
    return report.results.require(lambda source: source.stage == "visualize", *asked)[0]


@functools.cache
def load_questions() -> dict[str, Any]:
    """Read night.yaml."""
    return load_yaml(Path(__file__).with_name("night.yaml"))


def list_night_scores(report: Report) -> str:
    """Tabulate the Top-1 of every model of night.yaml on each data set; `–` for untrained models."""
    questions = load_questions()
    rows = []
    for name in questions["models"]:
        found = [_find_training(report, name, data) for data in questions["data"]]
        rows.append([name, *(format_scores(each.metrics, {TOP1: ""}) if each else "–" for each in found)])
    return table(["Top-1 (%) on test", *(about["name"] for about in questions["data"].values())], rows)


def list_night_power(report: Report) -> str:
    """Tabulate the smallest difference that the seeds and pairs of night.yaml can detect at each spread.

    A spread is the standard deviation of a model's Top-1 over its seeds, in points. Pairs that are hidden even at the
    smallest one are listed as `no_power` in night.yaml.
    """
    questions, rows = load_questions(), []
    for about in questions["data"].values():
        for place in about["tables"]:
            pairs = len(questions["pairs"][place])
            found = [number(detectable(about, place, spread), ".2f") for spread in questions["spreads"]]
            rows.append([about["name"], place, about["seeds"], pairs, *found])
    seen = [f"seen at a spread of {spread:g}, power {questions['power']:g}" for spread in questions["spreads"]]
    return table(["data", "", "seeds", "pairs", *seen], rows)


def detectable(about: Mapping[str, Any], place: str, spread: float) -> float:
    """Return the smallest difference in points that the seeds of a data set can detect among the pairs of a table.

    `spread` as in `list_night_power`; for the test see `detectable_difference`.
    """
    questions = load_questions()
    return detectable_difference(about["seeds"], len(questions["pairs"][place]), spread, power=questions["power"])


def list_night_pairs(report: Report) -> str:
    """Tabulate the pairs of each table on each data set with their verdicts; `–` if one of its models is untrained."""
    questions = load_questions()
    rows = []
    for data, about in questions["data"].items():
        for place in about["tables"]:
            pairs = questions["pairs"][place]
            judged = _judge(report, data, pairs)  # without those of no power: each pair makes the correction stricter
            for better, worse in (*pairs, *questions["no_power"].get(place, ())):
                pair = judged.get((better, worse))
                said = ["–", "–", "–" if [better, worse] in pairs else "no power"]
                if pair is not None:
                    said = [pair.show(2), show_p(pair.p), pair.word]
                printed = number(printed_difference(report.paper.ledger, better, worse), "+.1f")
                rows.append([place, about["name"], f"{better} > {worse}", printed, *said])
    header = ["", "data", "the paper's order", "the paper's difference", "ours (points) [95 %]", "p (Holm)", "verdict"]
    return table(header, rows)


def printed_difference(ledger: Ledger, better: str, worse: str) -> float:
    """Return the paper's Top-1 of one model of night.yaml minus that of another, in points on ImageNet-1K."""
    models = load_questions()["models"]
    first, second = (float(find_printed(ledger, models[name]["row"], TOP1)) for name in (better, worse))
    return first - second


def _judge(report: Report, data: str, pairs: list[list[str]]) -> dict[tuple[str, str], Pair]:
    """Return pair -> its verdict on a data set; empty before all models are trained.

    Raises:
        Missing: the models differ in their training or in the number of trials of their search.
    """
    questions = load_questions()
    names = dict.fromkeys(name for pair in pairs for name in pair)
    found = {name: _find_training(report, name, data) for name in names}
    if None in found.values():
        return {}
    alike = ("epochs", "image_size", "split", "held_out_images", "classes", "seeds")
    first, *others = ([source.metrics[key] for key in alike] for source in found.values())
    if any(other != first for other in others) or len(first[-1]) != questions["data"][data]["seeds"]:
        raise Missing(
            f"the models of a table differ on {data} in one of {', '.join(alike)}, or have other seeds than were named",
            "repro profile use night && dvc repro pretrain linearize",
        )
    searched = {}
    for name in names:
        place = f"tune/{questions['models'][name]['cell'].rpartition('/')[2]}_{data}"
        found_trials = [each.metrics.get("trials", ()) for each in report.results.sources if each.place == place]
        searched[name] = max(map(len, found_trials), default=0)  # the most of any machine
    if set(searched.values()) != {questions["trials"]}:
        counts = ", ".join(f"{name} {trials}" for name, trials in searched.items())
        why = f"the models of a table have not {questions['trials']} trials each on {data}: {counts}"
        raise Missing(why, "repro profile use night && dvc repro tune")
    compared = compare_trainings(found, [tuple(pair) for pair in pairs])
    return {(pair.better, pair.worse): pair for pair in compared}


def _find_training(report: Report, name: str, data: str) -> Source | None:
    """Find the pipeline's record of a model on a data set of night.yaml; None without one.

    `data`, a key of night.yaml, is the end of the cell's name and must be the kind of the record's data.
    """
    source = report.results.find(f"results/{load_questions()['models'][name]['cell']}_{data}/metrics.json")
    return source if source is not None and source.metrics["kind"] == data else None


# panel of Fig. 7, by its place in variants.yaml -> (variant -> label of its tick, label of the axis, the paper's
# statement on the panel)
PANELS = {
    "Fig. 7(a)": (
        {"chunk4": "4", "chunk8": "8", "conv2d": "16", "chunk32": "32", "chunk64": "64", "chunk_all": "all"},
        "chunk size b (tokens)",
        "falls sharply from 4, worst at 64, then grows slightly",
    ),
    "Fig. 7(b)": (
        {"w0_frozen": "0: frozen", "w0_shared": "1: shared", "conv2d": "2: per direction"},
        "learnable initial states",
        "more learnable states are better",
    ),
}


def draw_fig7(path: Path, groups: Mapping[str, Group], printed: Callable[[str | None, str], str]) -> Path:
    """Draw our accuracies with each seed, and the one number that the paper prints below the axis.

    The arguments are those of `repro.report.paper.DrawVariants`.
    """
    colour, top1 = STYLES["vittt"][1], printed("table3.conv2d", TOP1)
    figure, panels = new_figure(len(groups))
    for panel, (place, group) in zip(panels, groups.items(), strict=True):
        ticks, axis, note = PANELS[place]
        for x, name in enumerate(ticks):
            if name in group.variants:
                values = [run[TOP1] for run in group.variants[name].metrics["by_seed"]]
                spread = statistics.stdev(values) if len(values) > 1 else None
                panel.plot([x] * len(values), values, ".", color=colour, alpha=0.5)
                panel.errorbar(x, statistics.mean(values), yerr=spread, fmt="o", color=colour, capsize=4)
        m = group.common
        panel.set_title(f"{place}: {m['model'].split('_patch')[0]} on {m['data']}, {m['epochs']} epochs", fontsize=11)
        said = f"paper, Vittt-T on ImageNet-1K: {top1} % at {ticks['conv2d']};\n{note}"
        panel.set(xlabel=f"{axis}\n{said}", ylabel="Top-1 (%): mean ± standard deviation, seeds")
        panel.set_xticks(range(len(ticks)), list(ticks.values()))
        panel.set_xlim(-0.5, len(ticks) - 0.5)
        panel.grid(True, axis="y", linewidth=0.4, alpha=0.5)
    figure.tight_layout()
    return save_png(figure, path)
