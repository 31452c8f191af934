"""A sweep of models over image sizes: its families, the order of its rows, and their fit into a time limit.

This module does not import torch. `speed.measure` measures the rows, and `conclude` compares them.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .speed import SLOW_STEP_S, SLOW_STEPS, WARM_UP_S, RowSpec

IMAGE_SIZES = (224, 384, 512, 640, 768, 896, 1024, 1152, 1280)
PATCH_SIZE = 16
SIZES = {"T": "tiny", "S": "small", "B": "base"}
# family -> (pattern of its models' names, kind of attention or None); rows are measured in this order. Figures need a
# style of each family in `core.figures.STYLES`
FAMILIES: dict[str, tuple[str, str | None]] = {
    "vittt": ("vittt_{}_patch16_224", None),
    "deit": ("deit_{}_patch16_224", "unfused"),
    "deit_fused": ("deit_{}_patch16_224", "fused"),
    "vim": ("vim_{}_patch16_224", None),
    "vrwkv": ("vrwkv_{}_patch16_224", None),
    "vit3": ("vit3_{}_patch16_224", None),
    "t5": ("t5_{}_patch16_224", None),
    "hvit3": ("hvit3_{}_224", None),
    "vmamba": ("vmamba_{}_224", None),
    "mambavision": ("mambavision_{}_224", None),
}
BASIS = next(iter(FAMILIES))  # the family with which every other one is compared
PAIR = ("vittt", "deit", "deit_fused")  # the paper's model and its baseline
# (model, attention) -> family and size
_MODELS = {
    (pattern.format(name), attention): (family, size)
    for family, (pattern, attention) in FAMILIES.items()
    for size, name in SIZES.items()
}
# rows may be compared only if they agree in these fields
GROUP_KEYS = ("batch_size", "dtype", "mode", "compile")
_MARGIN = 1.3  # a step's time grows a little faster than its multiply-adds once caches and bandwidth limit it
_START_S = 6.0  # assumed seconds to start a process, until a row has been measured
_GRACE = 1.1  # a running row is stopped after this multiple of the time limit


def order_by_importance(image_sizes: Sequence[int]) -> list[int]:
    """Sort image sizes so that every prefix of the list spreads evenly over the range.

    The smallest and the largest come first, then half of the largest (a quarter of its tokens), then repeatedly the
    middle of the widest gap.
    """
    remaining = sorted(image_sizes)
    order = list(
        dict.fromkeys((remaining[0], remaining[-1], *(side for side in remaining if 2 * side == remaining[-1])))
    )
    while len(order) < len(remaining):
        gaps = [[side for side in remaining if low < side < high] for low, high in itertools.pairwise(sorted(order))]
        widest = max(gaps, key=lambda inside: (inside[-1] / inside[0], len(inside)) if inside else (0, 0))
        order.append(widest[(len(widest) - 1) // 2])
    return order


def find_family(row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return (family, size), keys of `FAMILIES` and `SIZES`, of a row or of the `vars` of a spec; else (None, None).

    A model's options are not read, because rows of speed have none; a variant would count as its family.
    """
    return _MODELS.get((row["model"], row["attention"]), (None, None))


def family_rows(rows: Sequence[Mapping[str, Any]], size: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return family -> rows of its model of a size (a key of `SIZES`), without families that have no rows."""
    found = {family: [row for row in rows if find_family(row) == (family, size)] for family in FAMILIES}
    return {family: own for family, own in found.items() if own}


def group_rows(rows: Sequence[Mapping[str, Any]]) -> dict[tuple, list[Mapping[str, Any]]]:
    """Return values of `GROUP_KEYS` -> the rows that share them."""
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in GROUP_KEYS), []).append(row)
    return groups


def row_key(row: Mapping[str, Any]) -> tuple:
    """Return the key of a row or of the `vars` of a spec: equal keys measure the same, whatever the backend."""
    return (
        row["model"],
        row["attention"],
        *(row[key] for key in GROUP_KEYS),
        tuple(sorted(row["options"].items())),
        *row["image_size"],
    )


class RowSchedule:
    """A schedule of rows within a time limit, which predicts the time of a row from those measured before it.

    Once any row has been measured, the rows of an image size begin only if all of them are expected to fit into the
    remaining time. Otherwise all of them are left out, so that every measured image size can be compared. A row that
    runs at `_GRACE` times the limit is stopped and left out too.

    Args:
        macs_g: spec -> multiply-adds of one image in units of 1e9.
        budget_s: the limit in seconds.
        clock: a monotonic clock in seconds.
        started: the clock at the start of the limit; None: now.

    Attributes:
        left_out: the rows that did not fit, once for each pass.
    """

    def __init__(
        self,
        macs_g: Callable[[RowSpec], float],
        budget_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
    ):
        began = clock() if started is None else started
        self._macs_g, self._clock = macs_g, clock
        self._end, self._stop = began + budget_s, began + _GRACE * budget_s
        # (model, attention) -> multiply-adds (1e9) of a step -> seconds per 1e9 multiply-adds
        self._rates: dict[tuple, dict[float, float]] = {}
        self._statuses: dict[tuple, str] = {}  # (model, attention) -> status of its last failed row
        self._start_s: list[float] = []
        self.left_out: list[RowSpec] = []

    def walk(self, specs: Sequence[RowSpec], passes: int = 1) -> Iterator[tuple[RowSpec, float | None]]:
        """Yield each row to measure, with the seconds expected for it and all later ones, or None if unknown.

        The caller must pass each row's result to `note` before it asks for the next row.

        Args:
            specs: the rows, those of one image size next to each other.
            passes: how often these rows are still to be measured, including this time; each time gets an equal share of
                the remaining limit.
        """
        end = self._clock() + (self._end - self._clock()) / passes
        groups = [list(group) for _, group in itertools.groupby(specs, key=lambda spec: spec.image_size)]
        for number, group in enumerate(groups):
            if not self.fits(group, end):
                self.left_out += group
                continue
            for place, spec in enumerate(group):
                if self._is_over:
                    self.left_out.append(spec)
                    continue
                ahead = [*group[place:], *itertools.chain(*groups[number + 1 :])]
                remaining_s = max(end - self._clock(), 0.0)
                yield spec, min(sum(map(self.expect, ahead)), remaining_s) if self._rates else None

    def fits(self, specs: Sequence[RowSpec], end: float | None = None) -> bool:
        """Tell whether rows are expected to end by a time of the clock, or by the limit; unknown rows fit."""
        left_s = (self._end if end is None else end) - self._clock()
        return not (self._rates or self._statuses) or sum(map(self.expect, specs)) <= left_s

    def limit(self, spec: RowSpec) -> RowSpec:
        """Return the row with its budget cut such that it stops when the time is over."""
        return dataclasses.replace(spec, budget_s=min(spec.budget_s, max(self._stop - self._clock(), 0.0)))

    def note(self, spec: RowSpec, row: Mapping[str, Any], seconds: float | None = None) -> bool:
        """Update the predictions by a measured row and the seconds that it took (None: it is of an earlier call).

        Returns:
            Whether the row counts. If not, it was stopped because the time is over, and is left out.
        """
        if row["status"] == "timeout" and seconds is not None and self._is_over:
            self.left_out.append(spec)
            return False
        model = spec.model, spec.attention
        if row["status"] != "ok":  # `expect` assumes that the model's other rows end the same way
            self._statuses[model] = row["status"]
            return True
        work = self._macs_g(spec) * spec.batch_size
        self._rates.setdefault(model, {})[work] = row["latency_ms"] / 1e3 / work
        if seconds is not None:  # rows of earlier calls come from the file, which has no samples
            stepping_s = sum(row["samples_ms"]) / 1e3 * (1 + spec.warmup / len(row["samples_ms"]))
            self._start_s.append(max(seconds - stepping_s, 0.0))
        return True

    def expect(self, spec: RowSpec) -> float:
        """Predict the seconds of a row, including the start of its process.

        The seconds per multiply-add of a step are those of the model's row with the nearest number of multiply-adds. A
        model without a row is assumed to be as slow as the slowest row.
        """
        model = spec.model, spec.attention
        start_s = sum(self._start_s) / len(self._start_s) if self._start_s else _START_S
        work = self._macs_g(spec) * spec.batch_size
        if own := self._rates.get(model):
            rate = own[min(own, key=lambda known: abs(math.log(known / work)))]
        elif model in self._statuses or not self._rates:  # a failed row is expected to fail as early
            return spec.budget_s if self._statuses.get(model) == "timeout" else start_s
        else:
            rate = max(each for known in self._rates.values() for each in known.values())
        step_s = _MARGIN * rate * work
        steps = spec.warmup + spec.steps if step_s <= SLOW_STEP_S else SLOW_STEPS + 1
        return min(start_s + max(steps * step_s, WARM_UP_S), spec.budget_s)

    @property
    def _is_over(self) -> bool:
        return self._clock() >= self._stop - 1e-3  # a stopped row ends at _stop up to rounding
