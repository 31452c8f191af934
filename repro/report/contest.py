"""A paper's model against its baseline over the image size: the record, and its picture."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.figures import against_resolution
from ..core.noise import find_interval
from .claims import Report
from .paper import Contest, Drawings
from .records import Source, describe_age, group_by
from .results import Results, SpeedGroup

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one record in which the model and the baseline of a contest meet."""

    group: SpeedGroup
    source: Source
    rows: Mapping[tuple[str, str | None, int], Row]  # by registered name, attention and image size

    def find_ratios(self, contest: Contest) -> dict[str, dict[int, float]]:
        """Attention of the baseline -> image size -> how many times as fast the model is; a noisy row has no ratio, and
        neither has one that did not run.
        """
        found: dict[str, dict[int, float]] = {"unfused": {}, "fused": {}}
        for attention, size, ours, theirs in self._meet(contest):
            if not (ours["noisy"] or theirs["noisy"]):
                found[attention][size] = theirs["latency_ms"] / ours["latency_ms"]
        return found

    def find_slower(self, contest: Contest) -> dict[str, int]:
        """Attention of the baseline -> the largest image at which the model is slower; 0 where it is at none.

        A noisy row counts where the intervals of the two leave no doubt.
        """
        found = dict.fromkeys(("unfused", "fused"), 0)
        for attention, size, ours, theirs in self._meet(contest):
            (least, _), (_, most) = (find_interval(row) or (row["latency_ms"],) * 2 for row in (ours, theirs))
            is_known = least > most or not (ours["noisy"] or theirs["noisy"])
            if ours["latency_ms"] > theirs["latency_ms"] and is_known:
                found[attention] = max(found[attention], size)
        return found

    def _meet(self, contest: Contest) -> Iterator[tuple[str, int, Row, Row]]:
        """(attention of the baseline, image size, the model's row, the baseline's) where both ran."""
        for (name, attention, size), theirs in self.rows.items():
            ours = self.rows.get((contest.ours[0], None, size))
            if name == contest.theirs[0] and attention in ("unfused", "fused") and ours is not None:
                if ours["latency_ms"] and theirs["latency_ms"]:
                    yield attention, size, ours, theirs

    @property
    def scope(self) -> str:
        """Device and conditions, in words, and whether older code made the record."""
        return f"{self.group}, {self.group.mode}{describe_age([self.source])}"


def plan_contest(report: Report) -> Drawings:
    """The picture of a paper's contest, if its rows were measured."""
    contest = report.paper.contest
    if contest is None or (speeds := find_speeds(contest, report.results)) is None:
        return {}
    of_model = group_by(speeds.rows, lambda key: key[:2])
    series = {
        family: [speeds.rows[key] for key in of_model[model]]
        for family, model in contest.series.items()
        if model in of_model
    }
    title = f"{contest.title} ({speeds.group}, {speeds.group.mode})"

    def draw(path: Path) -> None:
        against_resolution(path.with_suffix(""), series, title, ("latency_ms", "peak_memory_mib"))

    return {contest.picture: ([speeds.source], draw)}


def find_speeds(contest: Contest, results: Results) -> Speeds | None:
    """The record with most of the contest's rows; among equals a fresh one, a GPU's, the one with most image sizes."""
    models = {(contest.ours[0], None), *((contest.theirs[0], attention) for attention in ("fused", "unfused"))}
    candidates: dict[tuple[SpeedGroup, str], Speeds] = {}
    for group, rows in results.speed_rows.items():
        for row, source in rows:
            key = (results.model_key(row, source.path), row["attention"])
            height, width = row["image_size"]
            if group.mode == "infer" and key in models and height == width:
                found = candidates.setdefault((group, source.path), Speeds(group, source, {}))
                found.rows[(*key, height)] = row
                if not source.is_fresh:
                    candidates[group, source.path] = dataclasses.replace(found, source=source)

    def rank(speeds: Speeds) -> tuple:
        wanted = sum((*model, size) in speeds.rows for model in models for size in contest.sizes)
        is_gpu = speeds.group.device.startswith("cuda")
        return wanted, speeds.source.is_fresh, is_gpu, len(speeds.rows), speeds.source.path

    names = {contest.ours[0], contest.theirs[0]}
    both = [speeds for speeds in candidates.values() if {name for name, _, _ in speeds.rows} == names]
    return max(both, key=rank, default=None)
