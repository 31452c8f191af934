"""Comparison of this machine's scores with those of a commit, the last step of `make reproduce`."""

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import DETAILS_FILE, read_record
from ..core.statistics import Interval, share_interval
from .records import find_score_interval


class Score(NamedTuple):
    """A score of one record in percent: the commit's as `held`, this machine's as `made`, None where it is missing.

    The 95 % intervals are over the seeds. With one seed they are over the held-out images (Wilson) for a score that is
    a share of them, else None.
    """

    record: str
    name: str
    held: float
    interval: Interval | None
    made: float | None
    made_interval: Interval | None

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the new score is missing, or its interval does not overlap the old one (by chance 1 in 180).

        A score that is here and lacks one of the intervals is never beyond chance.
        """
        if self.made is None or self.interval is None or self.made_interval is None:
            return self.made is None
        (low, high), (made_low, made_high) = self.interval, self.made_interval
        return made_high < low or high < made_low


def list_scores(paths: Paths, stages: Iterable[str], commit: str) -> list[Score]:
    """Return a commit's scores of the trainings of these stages, next to this machine's.

    Raises:
        UserError: the commit holds no such scores, or git fails.
    """
    scores = []
    for file in _git(paths.root, "ls-tree", "-r", "--name-only", commit, "--", "results").splitlines():
        parts = file.split("/")  # results, stage, cell, name
        if len(parts) != 4 or parts[1] not in stages or parts[3] != DETAILS_FILE:
            continue
        folder = file.removesuffix(f"/{DETAILS_FILE}")
        scored = f"{folder}/metrics.json"
        held = json.loads(_git(paths.root, "show", f"{commit}:{scored}"))  # the scores alone
        details = json.loads(_git(paths.root, "show", f"{commit}:{file}"))["metrics"]
        here = paths.root / scored
        made = read_record(here)["metrics"] if here.is_file() else {}
        for name, value in held.items():
            interval = _find_interval(name, {**details, name: value})
            scores.append(Score(folder, name, value, interval, made.get(name), _find_interval(name, made)))
    if not scores:
        raise UserError(f"verify: {commit}: holds no scores of the pipeline")
    return scores


def describe_scores(scores: list[Score], commit: str) -> list[str]:
    """Return lines: the count of scores equal to the last digit, then each other score, within or beyond chance."""
    other = [score for score in scores if score.made != score.held]
    lines = [f"{len(scores) - len(other)} of {len(scores)} scores are equal to those of {commit}, to the last digit"]
    for score in other:
        known = f"{score.record}: {score.name} {score.held:.2f}"
        if score.made is None:
            lines.append(f"{known}: missing here")
            continue
        judged = "one seed, no interval"
        if score.interval is not None:
            low, high = score.interval
            judged = f"{'beyond' if score.is_beyond_chance else 'within'} chance, {low:.2f} to {high:.2f}"
        lines.append(f"{known} -> {score.made:.2f} ({score.made - score.held:+.2f}), {judged}")
    return lines


def _find_interval(name: str, metrics: Mapping[str, Any]) -> Interval | None:
    """Return the 95 % interval of a score in a record, see `Score`; None for a record without the score."""
    if name not in metrics:
        return None
    interval = find_score_interval(metrics, name)
    if interval is None and name.startswith("top") and len(metrics["seeds"]) == 1:
        return share_interval(metrics[name], metrics["held_out_images"])
    return interval


def _git(root: Path, *arguments: str) -> str:
    """Run git in the checkout and return its output; a failure is a `UserError` with the last line of its message."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise UserError(f"verify: git cannot be run: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UserError(f"verify: {said[-1] if said else 'git failed'}; it compares with what a commit holds")
    return done.stdout
