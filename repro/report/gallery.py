"""The paper's figures in its order, each with our pictures of it or the command that draws them; example pictures; and
the picture of its model against a baseline over the image size.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..core.figures import against_resolution
from ..core.noise import find_interval
from .claims import Report
from .dense import plan_dense
from .document import Block, Heading, Line, Picture, code, prose, table
from .paper import ATTENTIONS, Contest, Drawings
from .records import Source, describe_age, describe_origin, group_by
from .results import Results, SpeedGroup
from .variants import plan_figures
from .verdicts import format_counts, significant


def list_figures(report: Report) -> list[Block]:
    """The paper's figures and ours, and what the ledger says of each."""
    drawn = {each.place: find_pictures(report.results, each.files) for each in report.paper.figures}
    blocks: list[Block] = []
    drawings = list_drawings(report)
    for figure in report.paper.figures:
        if files := drawn[figure.place]:
            state = f"We have {'one picture' if len(files) == 1 else f'{len(files)} pictures'}."
        elif drawn.get(figure.shared_with):
            state = f"The pictures of {figure.shared_with} show it too."
        else:
            state = f"Not drawn yet: `{figure.command}`."
        entries = format_counts(verdict for verdict in report.all if figure.place in verdict.entry.places)
        about = prose(f"{state} Entries: {entries or 'none'}.")
        blocks += [Heading(figure.place), (f"The paper shows: {figure.shows}.",), about]
        for name in files:
            # what lies elsewhere was drawn by the stage that wrote the record in its folder
            is_ours = name.startswith("figures/")
            sources = drawings.get(Path(name).name, ([],))[0] if is_ours else _find_beside(name, report.results)
            blocks += picture_blocks(name, f"{figure.place}, ours: {Path(name).stem}", sources, report)
    return blocks


def list_examples(report: Report) -> list[Block]:
    """What trained models see in held-out images, a row of pictures for each run; then the pictures of dense tasks."""
    results = report.results
    blocks: list[Block] = []
    patterns = (f"{where}{stage}/*/examples/*.png" for stage in results.scores for where in ("", "measured/*/"))
    files = (name for pattern in patterns for name in find_pictures(results, pattern))
    for run, names in group_by(files, lambda name: name.rpartition("/examples/")[0]).items():
        beside = _find_beside(names[0], results)
        if all(results.stands_on(report.paper, source.metrics["model"]) for source in beside):
            pictures = [Picture(name, f"{run}, {Path(name).stem}") for name in names]
            origin = code(run), f": {describe_origin(beside, report.named)}"
            blocks += [origin, table([""] * len(pictures), [pictures])]
    for name, (sources, _) in plan_dense(report).items():
        blocks += picture_blocks(f"figures/{name}", Path(name).stem.replace("_", " "), sources, report)
    return blocks


def picture_blocks(name: str, alt: str, sources: Sequence[Source], report: Report) -> tuple[Line, Line]:
    """A picture, and below it the device and the profile of the records that it is drawn from."""
    return (Picture(name, alt),), (code(name), f": {describe_origin(sources, report.named)}")


def list_drawings(report: Report) -> Drawings:
    """All pictures that the report draws from records."""
    return {**plan_figures(report), **plan_contest(report), **plan_dense(report), **report.paper.drawings(report)}


def find_pictures(results: Results, pattern: str) -> list[str]:
    """The files of a pattern, sorted, as paths relative to results/."""
    root = results.paths.results
    return sorted(file.relative_to(root).as_posix() for file in root.glob(pattern))


def _find_beside(name: str, results: Results) -> list[Source]:
    """The records in a picture's folder or above it."""
    beside = {f"results/{folder}{end}" for folder in Path(name).parents for end in ("/metrics.json", ".json")}
    return [source for source in results.sources if source.path in beside]


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one record in which the model and the baseline of a contest meet."""

    group: SpeedGroup
    source: Source
    rows: Mapping[tuple[str, str | None, int], Mapping[str, Any]]  # by registered name, attention and image size

    def find_ratios(self, contest: Contest) -> dict[str, dict[int, str]]:
        """Attention of the baseline -> image size -> how many times as fast the model is, in words.

        Where steps or processes differ too much, with the ratios of the ends of their intervals; none where a row is
        noisy in another way.
        """
        found: dict[str, dict[int, str]] = {attention: {} for attention in ATTENTIONS}
        for (name, attention, size), theirs in self.rows.items():
            ours = self.rows.get((contest.ours[0], None, size))
            if name == contest.theirs[0] and attention in found and ours is not None:
                if ours["latency_ms"] and theirs["latency_ms"] and {*ours["noisy"], *theirs["noisy"]} <= {"spread"}:
                    found[attention][size] = _describe_ratio(ours, theirs)
        return found

    @property
    def is_gpu(self) -> bool:
        return self.group.device.startswith("cuda")

    @property
    def scope(self) -> str:
        """Device and conditions, in words, and whether older code made the record."""
        return f"{self.group}, {self.group.mode}{describe_age([self.source])}"


def _describe_ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    times = f"{significant(theirs['latency_ms'] / ours['latency_ms'])}×"
    if not (ours["noisy"] or theirs["noisy"]):
        return times
    (shortest, longest), (least, most) = (find_interval(row) or (row["latency_ms"],) * 2 for row in (ours, theirs))
    return f"{times} ({significant(least / longest)} to {significant(most / shortest)})"


def plan_contest(report: Report) -> Drawings:
    """The picture of a paper's contest, if its rows were measured."""
    contest = report.paper.contest
    if (speeds := find_speeds(contest, report.results)) is None:
        return {}
    rows = {line: [row for key, row in speeds.rows.items() if key[:2] == of] for line, of in contest.series.items()}
    series = {line: own for line, own in rows.items() if own}
    title = f"{contest.title} ({speeds.group}, {speeds.group.mode})"

    def draw(path: Path) -> None:
        against_resolution(path.with_suffix(""), series, title, ("latency_ms", "peak_memory_mib"))

    return {contest.picture: ([speeds.source], draw)}


def find_speeds(contest: Contest | None, results: Results) -> Speeds | None:
    """The record that a picture shows: the best of `find_all_speeds`, among equals a GPU's."""
    return max(find_all_speeds(contest, results), key=partial(_rank, contest), default=None)


def find_all_speeds(contest: Contest | None, results: Results) -> list[Speeds]:
    """The best record of inference for each kind of device and batch size: a GPU's first, then large batches.

    The best has most of the contest's image sizes; among equals a fresh one comes first, then the one with most rows.
    """
    if contest is None:
        return []
    models = set(contest.series.values())
    candidates: dict[tuple[SpeedGroup, str], Speeds] = {}
    for group, rows in results.speed_rows.items():
        for row, source in rows:
            key = (results.model_key(row, source.path), row["attention"])
            height, width = row["image_size"]
            if group.mode == "infer" and key in models and height == width:
                found = candidates.setdefault((group, source.path), Speeds(group, source, {}))
                found.rows[(*key, height)] = row
                if source.age:
                    candidates[group, source.path] = dataclasses.replace(found, source=source)
    names = {contest.ours[0], contest.theirs[0]}
    both = [speeds for speeds in candidates.values() if {name for name, _, _ in speeds.rows} == names]
    kinds = group_by(both, lambda speeds: (speeds.is_gpu, speeds.group.batch_size))
    return [max(kinds[kind], key=partial(_rank, contest)) for kind in sorted(kinds, reverse=True)]


def _rank(contest: Contest, speeds: Speeds) -> tuple:
    wanted = sum((*model, size) in speeds.rows for model in contest.series.values() for size in contest.sizes)
    return wanted, not speeds.source.age, len(speeds.rows), speeds.is_gpu, speeds.source.path
