"""A sweep of models over image sizes: its rows, their order, and which fit into the time. It needs no torch.

The rows are measured by `speed.measure`; `conclude` draws conclusions from them.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .speed import RowSpec

IMAGE_SIZES = (224, 384, 512, 640, 768, 896, 1024, 1152, 1280)
PATCH_SIZE = 16
SIZES = {"T": "tiny", "S": "small", "B": "base"}
# family -> pattern of its models' names, fused or unfused attention; rows are measured in this order
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
BASIS = next(iter(FAMILIES))  # the family that every other one is compared with
# (model, attention) -> family and size
_MODELS = {
    (pattern.format(name), attention): (family, size)
    for family, (pattern, attention) in FAMILIES.items()
    for size, name in SIZES.items()
}
# the values that all rows of a comparison share
GROUP_KEYS = ("batch_size", "dtype", "mode", "compile")
_MARGIN = 1.3  # the time of a step grows a little faster than its multiply-adds once caches and memory matter
_START_S = 6.0  # assumed time to start a process, until a row has shown the real one


def order_by_importance(image_sizes: Sequence[int]) -> list[int]:
    """Sort image sizes such that any first few of them spread evenly over the range.

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
    """The family and the size (a key of `SIZES`) of a row, or of the `vars` of a spec; None for another model."""
    return _MODELS.get((row["model"], row["attention"]), (None, None))


def family_rows(rows: Sequence[Mapping[str, Any]], size: str) -> dict[str, list[Mapping[str, Any]]]:
    """Family -> the rows of its model of a size (a key of `SIZES`); families without rows are left out."""
    found = {family: [row for row in rows if find_family(row) == (family, size)] for family in FAMILIES}
    return {family: own for family, own in found.items() if own}


def group_rows(rows: Sequence[Mapping[str, Any]]) -> dict[tuple, list[Mapping[str, Any]]]:
    """Values of `GROUP_KEYS` -> the rows that share them and may therefore be compared."""
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in GROUP_KEYS), []).append(row)
    return groups


def row_key(row: Mapping[str, Any]) -> tuple:
    """The identity of a measurement: rows, or `vars` of a spec, with equal keys measure the same, on any backend."""
    return (
        row["model"],
        row["attention"],
        *(row[key] for key in GROUP_KEYS),
        tuple(sorted(row["options"].items())),
        *row["image_size"],
    )


class RowSchedule:
    """Iterates over rows, one image size after the other, for as long as the time lasts.

    The first image size is measured whatever it takes. Each further one is measured only if all its rows are expected
    to fit into the remaining time; otherwise it is left out as a whole, so that the measured rows stay comparable.

    Args:
        specs: the rows, those of one image size next to each other.
        macs_g: spec -> multiply-adds of one image in units of 1e9.
    """

    def __init__(
        self,
        specs: Sequence[RowSpec],
        macs_g: Callable[[RowSpec], float],
        budget_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._groups = [list(group) for _, group in itertools.groupby(specs, key=lambda spec: spec.image_size)]
        self._macs_g, self._budget_s, self._clock = macs_g, budget_s, clock
        self._seconds_per_gmac: dict[tuple, float] = {}
        self._start_s: list[float] = []
        self.left_out: dict[int, float] = {}  # height of the images -> seconds that their rows were expected to take

    def __iter__(self) -> Iterator[tuple[RowSpec, float | None]]:
        """Yield each row to measure, with the seconds expected for it and all later ones; `note` precedes the next."""
        end = self._clock() + self._budget_s
        for number, group in enumerate(self._groups):
            needed_s = sum(map(self.expect, group))
            if number and needed_s > end - self._clock():
                self.left_out[group[0].image_size[0]] = needed_s
                continue
            for place, spec in enumerate(group):
                ahead = [*group[place:], *itertools.chain(*self._groups[number + 1 :])]
                remaining_s = max(end - self._clock(), 0.0)
                yield spec, min(sum(map(self.expect, ahead)), remaining_s) if self._seconds_per_gmac else None

    def note(self, spec: RowSpec, row: Mapping[str, Any], seconds: float | None = None) -> None:
        """Learn from a measured row and its seconds (None: an earlier call) how long later rows of its model take."""
        if row["status"] != "ok":
            return
        self._seconds_per_gmac[spec.model, spec.attention] = (
            row["latency_ms"] / 1e3 / (self._macs_g(spec) * spec.batch_size)
        )
        if seconds is not None:  # a row of this call has its samples
            stepping_s = sum(row["samples_ms"]) / 1e3 * (1 + spec.warmup / len(row["samples_ms"]))
            self._start_s.append(max(seconds - stepping_s, 0.0))

    def expect(self, spec: RowSpec) -> float:
        """The seconds that a row is expected to take, its process included."""
        start_s = sum(self._start_s) / len(self._start_s) if self._start_s else _START_S
        rate = self._seconds_per_gmac.get((spec.model, spec.attention))
        if rate is None:  # a smaller row of this model failed, and this one is expected to fail as early
            return start_s
        step_s = _MARGIN * rate * self._macs_g(spec) * spec.batch_size
        steps = spec.warmup + spec.steps if step_s <= 2 else 4
        return min(start_s + max(steps * step_s, 1.0), spec.budget_s)
