"""The scores that this machine made beside those that a commit holds: what `make reproduce` ends with."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import DETAILS_FILE, read_json
from ..core.statistics import share_interval
from .records import find_score_interval


class Score(NamedTuple):
    """A score in percent of one record: that which the commit holds, its 95 % interval, and what this machine made.

    The interval is that over the seeds; where there is one seed, that of a share of the held-out images (Wilson). A
    score of detection or segmentation with one seed has none. `made` is None where the record is missing here.
    """

    record: str
    name: str
    held: float
    interval: tuple[float, float] | None
    made: float | None

    @property
    def has_left(self) -> bool:
        """Whether what was made lies outside the interval of what is held, or is missing."""
        if self.made is None or self.interval is None or self.made == self.held:
            return self.made is None
        low, high = self.interval
        return not low <= self.made <= high


def list_scores(paths: Paths, stages: Iterable[str], commit: str) -> list[Score]:
    """The scores of the trainings of these stages under results/ that a commit holds, in the order of their paths.

    Raises:
        UserError: no Git repository, no such commit, or one that holds no scores.
    """
    scores = []
    for file in _git(paths.root, "ls-tree", "-r", "--name-only", commit, "--", "results").splitlines():
        path = Path(file)
        if len(path.parts) != 4 or path.parts[1] not in stages or path.name != DETAILS_FILE:
            continue
        path = path.with_name("metrics.json")
        held = json.loads(_git(paths.root, "show", f"{commit}:{path.as_posix()}"))
        details = json.loads(_git(paths.root, "show", f"{commit}:{file}"))["metrics"]
        here = paths.root / path
        made = read_json(here) if here.is_file() else {}
        for name, value in held.items():
            interval = find_score_interval(details, name) or _find_share_interval(name, value, details)
            scores.append(Score(path.parent.as_posix(), name, value, interval, made.get(name)))
    if not scores:
        raise UserError(f"verify: {commit}: holds no scores of the pipeline")
    return scores


def describe_scores(scores: list[Score], commit: str) -> list[str]:
    """Lines: how many scores are equal to the last digit, then each that is not, by how much, and whether it stays in
    its interval.
    """
    other = [score for score in scores if score.made != score.held]
    lines = [f"{len(scores) - len(other)} of {len(scores)} scores are equal to those of {commit}, to the last digit"]
    for score in other:
        known = f"{score.record}: {score.name} {score.held:.2f}"
        if score.made is None:
            lines.append(f"{known}: missing here")
            continue
        if score.interval is None:
            judged = "one seed, no interval"
        else:
            low, high = score.interval
            judged = f"{'outside' if score.has_left else 'inside'} its interval {low:.2f} to {high:.2f}"
        lines.append(f"{known} -> {score.made:.2f} ({score.made - score.held:+.2f}), {judged}")
    return lines


def _find_share_interval(name: str, value: float, details: dict[str, Any]) -> tuple[float, float] | None:
    is_share = name.startswith("top") and len(details["seeds"]) == 1
    return share_interval(value, details["held_out_images"]) if is_share else None


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise UserError(f"verify: git cannot be run: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UserError(f"verify: {said[-1] if said else 'git failed'}; it compares with what a commit holds")
    return done.stdout
