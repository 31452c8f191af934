"""What code writes of our measurements into pages that people write."""

import statistics
from collections.abc import Mapping, Sequence

from ..core.noise import find_spread
from .claims import Report
from .dense import find_compared_runs, name_first_weights
from .document import Block, Bullets, Line, Piece, code, number, prose, table
from .gallery import describe_origin
from .measured import format_scores
from .records import Source, describe_seeds, find_score_interval
from .results import Missing
from .verdicts import STATUSES

AHEAD, BEHIND, UNDECIDED = "ahead of it", "behind it", "not separated from it"


def describe_statuses(report: Report) -> list[Block]:
    """What an entry of a ledger can be, a sentence for each status."""
    return [Bullets([(code(status), f": {status.means}.") for status in STATUSES])]


def compare_without_learning(report: Report) -> list[Block]:
    """The runs on embedded data beside a method that learns nothing: who is ahead, by which score."""
    results = report.results
    runs = find_compared_runs(results)
    if not runs:
        raise Missing("nothing is recorded yet", "repro detect")
    blocks: list[Block] = []
    for (stage, data, _), own in runs.items():
        labels = results.scores[stage]
        reference = own[0].metrics["without_learning"]
        rows = []
        for source in own:
            m = source.metrics
            counts = (number(count, ".0f") for count in (m["epochs"], source.most_seeds, m["held_out_images"]))
            scores = (format_scores(m, {key: ""}, 1) for key in labels)
            origin = describe_origin([source], report.named)
            rows.append([_name(source), name_first_weights(source), *counts, *scores, origin])
        rows.append(["without learning", *["–"] * 4, *(format_scores(reference, {key: ""}, 1) for key in labels), "–"])
        header = [f"{stage}, {data}", "first weights", "epochs", "seeds", "held-out images"]
        header += [*labels.values(), "measured on"]
        against = Bullets([_against(source, reference, labels) for source in own])
        blocks += [table(header, rows), against, *_class_scores(own)]
    return blocks


def count_noisy_rows(report: Report) -> list[Block]:
    """How many rows of each device were noisy, and how often two measurements of a row agree."""
    results, rows = report.results, []
    for group, found in results.speed_rows.items():
        spreads = {"quiet": [0.0], "noisy": [0.0]}
        for row, _ in found:
            spreads["noisy" if row["noisy"] else "quiet"].append(100 * (find_spread(row) or 0.0))
        noisy = sum(bool(row["noisy"]) for row, _ in found)
        widest = (number(f"{max(each):.0f} %") if len(each) > 1 else "–" for each in spreads.values())
        rows.append([f"{group}, {group.mode}", number(len(found)), number(noisy), *widest])
    if not rows:
        return [prose("No row is measured yet: `repro efficiency`.")]
    header = ["rows of", "rows", "noisy", "widest interval of a quiet row", "of a noisy one"]
    blocks: list[Block] = [table(header, rows)]
    for source in results.sources:
        repeated = source.metrics.get("repeated") or {}
        if repeated.get("overlap_percent") is not None:
            twice = f": {repeated['rows']} rows were measured twice; of those with intervals, {repeated['overlap_percent']:.0f} % overlap."
            blocks.append((code(source.path), f" ({source.origin})", twice))
    return blocks


def _against(source: Source, reference: Mapping[str, float], labels: Mapping[str, str]) -> Line:
    """A sentence: by which scores a run is ahead of the method without learning."""
    m = source.metrics
    said: dict[str, list[str]] = {AHEAD: [], BEHIND: [], UNDECIDED: []}
    for key, label in labels.items():
        interval = find_score_interval(m, key) or [m[key]] * 2
        word = AHEAD if interval[0] > reference[key] else BEHIND if interval[1] < reference[key] else UNDECIDED
        said[word].append(f"{label} ({m[key] - reference[key]:+.1f} points)")
    joined = ((word, " and ".join(filter(None, (", ".join(of[:-1]), *of[-1:])))) for word, of in said.items())
    parts = [f"{word} in {names}" for word, names in joined if names]
    return _name(source), f", against the method without learning: {'; '.join(parts)} ({describe_seeds([source])})."


def _class_scores(sources: Sequence[Source]) -> list[Block]:
    """The IoU of each class, the mean over a run's seeds; nothing where no run has it."""
    key = "class_iou_percent"
    found = [(source, [run[key] for run in source.metrics["by_seed"] if key in run]) for source in sources]
    names: list[str] = []
    rows = []
    for source, runs in ((source, runs) for source, runs in found if runs):
        names = names or [name for name in runs[0] if not name.endswith("_reason")]
        scores = [[run[name] for run in runs if isinstance(run.get(name), int | float)] for name in names]
        rows.append([_name(source), *(number(statistics.fmean(each) if each else None, ".1f") for each in scores)])
    return [table(["IoU (%) by class", *names], rows)] if rows else []


def _name(source: Source) -> Piece:
    return code(source.folder.removeprefix("results/"))
