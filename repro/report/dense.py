"""Comparison of trainings on dense tasks with a method that learns nothing: scores, learning curves and confusions."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..core.figures import STYLES, new_figure, save_png
from ..core.record import CURVE_SCORES
from .claims import Report
from .markdown import bullets, code, join, number, table
from .measured import format_scores
from .paper import Drawings
from .records import (
    Source,
    average_curves,
    describe_origin,
    describe_seeds,
    find_score_interval,
    group_by,
    keep_best,
    read_curves,
)
from .results import Missing, Results

_AHEAD, _BEHIND, _UNDECIDED = "ahead of it", "behind it", "not separated from it"
# (stage, data set, scores without learning as text) -> the records with these reference scores
_Runs = dict[tuple[str, str, str], list[Source]]
_LINES = {"pretrained": "-", "random": "--"}  # initial weights -> line style


def _find_compared_runs(results: Results) -> _Runs:
    """Group the records that hold the scores of a method without learning, see `_Runs`.

    A run outside the pipeline has no stage, so the first score tells the task, `detect` or `segment`, of ablations too.
    """
    runs: _Runs = {}
    for source in results.score_sources:
        m = source.metrics
        if reference := m.get("without_learning"):
            stage = next(name for name, labels in results.scores.items() if labels and next(iter(labels)) in m)
            scores = format_scores(reference, results.scores[stage])
            runs.setdefault((stage, m["data"], scores), []).append(source)
    return runs


def _name_first_weights(source: Source) -> str:
    """Return `pretrained` or `random`, by a training's initial weights.

    These are keys of `_LINES`, and `_compare_first_weights` needs them in this alphabetical order.
    """
    return "pretrained" if source.metrics.get("init") else "random"


def compare_without_learning(report: Report) -> str:
    """Return tables of each run's scores next to those of the method without learning, one per stage and data set.

    scenes.md calls it by name.

    Raises:
        Missing: no record has the scores of such a method.
    """
    results = report.results
    runs = _find_compared_runs(results)
    if not runs:
        raise Missing("nothing is recorded yet", "repro detect")
    blocks = []
    for (stage, data, _), own in runs.items():
        labels = results.scores[stage]
        reference = own[0].metrics["without_learning"]
        rows = []
        for source in own:
            m = source.metrics
            about = [code(source.place), _name_first_weights(source), m["epochs"], source.most_seeds]
            scores = (format_scores(m, {key: ""}, 1) for key in labels)
            rows.append([*about, m["held_out_images"], *scores, describe_origin([source])])
        rows.append(["without learning", *["–"] * 4, *(format_scores(reference, {key: ""}, 1) for key in labels), "–"])
        header = [f"{stage}, {data}", "first weights", "epochs", "seeds", "held-out images", *labels.values()]
        header.append("measured on")
        against = bullets(_against(source, reference, labels) for source in own)
        blocks += [table(header, rows), against, _compare_first_weights(own, labels), _class_scores(own)]
    return join(blocks)


def plan_dense(report: Report) -> Drawings:
    """Plan two pictures per data set: learning curves, and the confusions of the pipeline's runs at their first seed.

    A picture is the same for every paper, and is planned for a paper if the paper's page shows one of its models. The
    curves show one training per model, task and initial weights: that with most seeds, and among equals the longest.
    """
    learned: dict[str, dict[str, list[Source]]] = {}  # data set -> task -> trainings
    confused: dict[str, list[Source]] = {}
    for (stage, data, _), runs in _find_compared_runs(report.results).items():
        drawable = [source for source in runs if source.most_seeds and read_curves(source)]
        drawable.sort(key=lambda source: -source.metrics["epochs"])
        if best := keep_best(drawable, lambda source: (source.metrics["model"], _name_first_weights(source))):
            learned.setdefault(data, {}).setdefault(stage, best)
        confused.setdefault(data, []).extend(
            source for source in runs if source.stage and source.metrics["by_seed"][0].get("confusion")
        )
    drawn = {}
    for data, tasks in learned.items():
        draw = partial(_draw_curves, tasks=tasks, results=report.results)
        drawn[f"learning_{data}.png"] = [source for best in tasks.values() for source in best], draw
    for data, runs in confused.items():
        drawn[f"confusion_{data}.png"] = runs, partial(_draw_confusion, sources=runs)

    stands_on = partial(report.results.stands_on, report.paper)
    return {
        name: (sources, draw)
        for name, (sources, draw) in drawn.items()
        if any(stands_on(source.metrics["model"]) for source in sources)
    }


def _draw_curves(path: Path, tasks: Mapping[str, Sequence[Source]], *, results: Results) -> Path:
    """Draw a row of panels for each task, one per score.

    Thin lines show the seeds, a thick line their mean, and a star the reported score.

    Args:
        path: the PNG file.
        tasks: stage -> its trainings, all on one data set.
        results: has the labels of the scores.
    """
    figure, axes = new_figure(CURVE_SCORES, len(tasks))
    handles: dict[str, Any] = {}
    for (stage, sources), panels in zip(tasks.items(), axes.reshape(len(tasks), CURVE_SCORES), strict=True):
        labels = list(results.scores[stage].items())[:CURVE_SCORES]
        for spare in panels[len(labels) :]:  # of a task with fewer scores
            spare.remove()
        for panel, (key, label) in zip(panels, labels, strict=False):
            for place, source in enumerate(sources):
                _draw_curve(panel, source, key, place / len(sources))
            reference = sources[0].metrics["without_learning"][key]
            panel.axhline(reference, color="black", linestyle=":", linewidth=1.2, label="without learning")
            panel.set(xlabel="epoch", ylabel=f"{stage}: {label} (%)", ylim=(0, None))
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.grid(True, axis="y", linewidth=0.4, alpha=0.5)
        of_panel, names = panels[0].get_legend_handles_labels()
        handles |= dict(zip(names, of_panel, strict=True))
    columns = 2
    rows = math.ceil(len(handles) / columns)
    figure.legend(handles.values(), handles, loc="lower center", ncols=columns, frameon=False, fontsize=9)
    shown = [source for sources in tasks.values() for source in sources]
    first = shown[0].metrics
    # a training evaluates `tune` in every epoch, and `test` once
    split = f"curves on {'tune' if first['split'] == 'test' else first['split']}"
    interval = ", with its 95 % interval over seeds" if any(source.most_seeds > 1 for source in shown) else ""
    figure.suptitle(f"{first['data']}: {split}; star: {first['split']}{interval}", fontsize=11)
    # below the panels, room in inches for the rows of the legend
    figure.tight_layout(rect=(0, (0.12 + 0.2 * rows) / figure.get_figheight(), 1, 1))
    return save_png(figure, path)


def _draw_curve(panel: Any, source: Source, key: str, shift: float) -> None:
    """Draw a training's curves in its family's colour, and its star `shift / 2` epochs after the last epoch.

    `key` names the score; the shift, from 0 to 1, keeps the stars of several trainings apart.
    """
    m, first = source.metrics, _name_first_weights(source)
    family = m["model"].split("_")[0]
    _, colour, marker, _ = STYLES.get(family, (family, "black", "x", "-"))
    of_seed = read_curves(source, key)
    for points in of_seed.values() if len(of_seed) > 1 else ():
        panel.plot(list(points), list(points.values()), color=colour, linewidth=0.6, alpha=0.35)
    means = average_curves(of_seed)
    label = f"{m['model']}, {first} weights, {describe_seeds([source])}"
    style = {"color": colour, "linestyle": _LINES[first], "marker": marker, "linewidth": 1.8, "markersize": 4}
    panel.plot(list(means), list(means.values()), **style, label=label)
    interval = find_score_interval(m, key)
    spread = None if interval is None else [[m[key] - interval[0]], [interval[1] - m[key]]]
    style = {"color": colour, "markeredgecolor": "black", "markersize": 11, "capsize": 3, "zorder": 3}
    panel.errorbar(m["epochs"] + shift / 2, m[key], yerr=spread, fmt="*", **style)


def _draw_confusion(path: Path, sources: Sequence[Source]) -> Path:
    """Draw each training's confusion matrix as shares; each row, a true class, adds up to 100 %."""
    matrices: list[Mapping[str, Any]] = [source.metrics["by_seed"][0]["confusion"] for source in sources]
    figure, panels = new_figure(len(sources))
    side = 1.6 + 0.42 * max(len(each["classes"]) for each in matrices)
    figure.set_size_inches((side + 0.6) * len(sources), side)
    for panel, source, matrix in zip(panels, sources, matrices, strict=True):
        names, counts = matrix["classes"], matrix["counts"]
        shares = [[100 * count / max(sum(row), 1) for count in row] for row in counts]
        image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        for y, row in enumerate(shares):
            for x, share in enumerate(row):
                if share >= 0.5:  # smaller ones would print as 0
                    colour = "white" if share > 55 else "black"
                    panel.text(x, y, f"{share:.0f}", ha="center", va="center", fontsize=8, color=colour)
        panel.set_xticks(range(len(names)), names, rotation=90)
        panel.set_yticks(range(len(names)), [f"{name} ({sum(row)})" for name, row in zip(names, counts, strict=True)])
        panel.set(xlabel="found", ylabel="truth (how many)")
        about = f"{source.stage}, {source.metrics['model']} on {source.metrics['data']}, {source.metrics['split']}"
        panel.set_title(f"{about}:\n{matrix['of']}, % of each row", fontsize=10)
        figure.colorbar(image, ax=panel, fraction=0.046)
    figure.tight_layout()
    return save_png(figure, path)


def _against(source: Source, reference: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Name the scores in which a run is ahead of the method without learning, behind it, or not separated from it.

    Its 95 % interval decides, or the score alone where it has none.
    """
    m = source.metrics
    said: dict[str, list[str]] = {_AHEAD: [], _BEHIND: [], _UNDECIDED: []}
    for key, label in labels.items():
        low, high = find_score_interval(m, key) or (m[key], m[key])
        word = _AHEAD if low > reference[key] else _BEHIND if high < reference[key] else _UNDECIDED
        said[word].append(f"{label} ({m[key] - reference[key]:+.1f} points)")
    parts = []
    for word, (*others, last) in ((word, names) for word, names in said.items() if names):
        parts.append(f"{word} in {', '.join(others)} and {last}" if others else f"{word} in {last}")
    seeds = describe_seeds([source])
    return f"{code(source.place)}, against the method without learning: {'; '.join(parts)} ({seeds})."


def _compare_first_weights(sources: Sequence[Source], labels: Mapping[str, str]) -> str:
    """Return the gain of pretrained over random initial weights in the first score, at equal model, options and recipe.

    A model without an interval over seeds for both is left out; the text is empty where none is left.
    """
    key, label = next(iter(labels.items()))
    runs = [source for source in sources if find_score_interval(source.metrics, key)]
    lines = []
    for (model, epochs, *_), alike in sorted(group_by(runs, _name_training).items()):
        best = keep_best(alike, _name_first_weights)
        if len(best) == 2:
            pretrained, random = (source.metrics for source in sorted(best, key=_name_first_weights))
            (low, high), (low_random, high_random) = (find_score_interval(m, key) for m in (pretrained, random))
            met = "meet" if low <= high_random and low_random <= high else "do not meet"
            gained = f"{pretrained[key] - random[key]:+.1f} points of {label} by pretrained first weights"
            lines.append(
                f"`{model}` after {epochs} epochs, {describe_seeds(best)}: {gained}; the 95 % intervals {met}."
            )
    return bullets(lines)


def _name_training(source: Source) -> tuple[Any, ...]:
    """Return what a model with pretrained first weights and one with random ones must have in common.

    `_compare_first_weights` sorts by it and reads the model and the epochs from its first two places.
    """
    m = source.metrics
    options = json.dumps(m["options"], sort_keys=True)
    return m["model"], m["epochs"], m["steps"], m["batch_size"], options, bool(m.get("freeze")), *source.scored_on


def _class_scores(sources: Sequence[Source]) -> str:
    """Return a table of each class's IoU as the mean over a run's seeds; empty where no run has it."""
    key = "class_iou_percent"
    names, rows = [], []
    for source in sources:
        runs = [run[key] for run in source.metrics["by_seed"] if key in run]
        if not runs:
            continue
        # a class that is in no image has None, and beside it the reason
        names = names or [name for name in runs[0] if not name.endswith("_reason")]
        scores = [[run[name] for run in runs if isinstance(run.get(name), int | float)] for name in names]
        rows.append([code(source.place), *(number(statistics.fmean(each) if each else None, ".1f") for each in scores)])
    return table(["IoU (%) by class", *names], rows) if rows else ""
