"""A paper's model against its baseline over the image size: the record, and its picture."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..core.figures import against_resolution
from .claims import Report
from .paper import Contest, Drawings
from .records import Source, describe_age, group_by
from .results import Results, SpeedGroup

Row = Mapping[str, Any]
ATTENTIONS = "unfused", "fused"  # of the baseline


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one record in which the model and the baseline of a contest meet."""

    group: SpeedGroup
    source: Source
    rows: Mapping[tuple[str, str | None, int], Row]  # by registered name, attention and image size

    def find_ratios(self, contest: Contest) -> dict[str, dict[int, float]]:
        """Attention of the baseline -> image size -> how many times as fast the model is, of quiet rows."""
        found: dict[str, dict[int, float]] = {attention: {} for attention in ATTENTIONS}
        for (name, attention, size), theirs in self.rows.items():
            ours = self.rows.get((contest.ours[0], None, size))
            if name == contest.theirs[0] and attention in found and ours is not None:
                if all(row["latency_ms"] and not row["noisy"] for row in (ours, theirs)):
                    found[attention][size] = theirs["latency_ms"] / ours["latency_ms"]
        return found

    @property
    def is_gpu(self) -> bool:
        """Whether the device is one."""
        return self.group.device.startswith("cuda")

    @property
    def scope(self) -> str:
        """Device and conditions, in words, and whether older code made the record."""
        return f"{self.group}, {self.group.mode}{describe_age([self.source])}"


def plan_contest(report: Report) -> Drawings:
    """The picture of a paper's contest, if its rows were measured."""
    contest = report.paper.contest
    if contest is None or (speeds := find_speeds(contest, report.results)) is None:
        return {}
    rows = {line: [row for key, row in speeds.rows.items() if key[:2] == of] for line, of in contest.series.items()}
    series = {line: own for line, own in rows.items() if own}
    title = f"{contest.title} ({speeds.group}, {speeds.group.mode})"

    def draw(path: Path) -> None:
        against_resolution(path.with_suffix(""), series, title, ("latency_ms", "peak_memory_mib"))

    return {contest.picture: ([speeds.source], draw)}


def find_speeds(contest: Contest, results: Results) -> Speeds | None:
    """The record that a picture shows: the best of `find_all_speeds`, among equals a GPU's."""
    return max(find_all_speeds(contest, results), key=partial(_rank, contest), default=None)


def find_all_speeds(contest: Contest, results: Results) -> list[Speeds]:
    """The best record of inference for each kind of device and batch size: a GPU's first, then large batches.

    The best has most of the contest's image sizes; among equals it has most rows, is fresh.
    """
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
    return wanted, len(speeds.rows), not speeds.source.age, speeds.is_gpu, speeds.source.path
