"""A sweep of models over resolutions: which rows, in which order, within which time, and what they say together.

Rows are those of `speed.measure`. Nothing here needs torch.
"""

import difflib
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .speed import RowSpec

GRID = (224, 384, 512, 640, 768, 896, 1024, 1152, 1280)
PATCH = 16
SIZES = {"T": "tiny", "S": "small", "B": "base"}
# name -> model of a size, kind of attention; in the order that rows are measured in
FAMILIES: dict[str, tuple[str, str | None]] = {
    "vittt": ("vittt_{}_patch16_224", None),
    "deit": ("deit_{}_patch16_224", "unfused"),
    "deit_fused": ("deit_{}_patch16_224", "fused"),
    "vim": ("vim_{}_patch16_224", None),
    "vrwkv": ("vrwkv_{}_patch16_224", None),
    "vit3": ("vit3_{}_patch16_224", None),
}
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?::(\d+))?")
# a step grows a little faster than its multiply-adds where caches and memory begin to matter
_MARGIN = 1.3
_START_S = 6.0  # of a process, until the first row says better


def parse_resolutions(text: str) -> tuple[int, ...]:
    """`224..1280` (our grid, clipped), `224..1280:128` (every 128 pixels from 224 on), `224,512`, or several of these by commas.

    Raises:
        ValueError: no such resolutions, or one that is not a multiple of the patch.
    """
    found: set[int] = set()
    for part in text.split(","):
        part = part.strip()
        if match := _RANGE.fullmatch(part):
            first, last, step = int(match[1]), int(match[2]), match[3]
            if first > last:
                raise ValueError(f"{part}: begins above its end; write {last}..{first}")
            if step is not None and int(step) < 1:
                raise ValueError(f"{part}: a step of {step} leads nowhere; write one of at least {PATCH}")
            sides = range(first, last + 1, int(step)) if step else [side for side in GRID if first <= side <= last]
            if not sides:
                raise ValueError(f"{part}: holds none of {', '.join(map(str, GRID))}; give single numbers, or a step as in 64..192:32")
            found |= set(sides)
        elif part.isdigit():
            found.add(int(part))
        else:
            raise ValueError(f"{part!r}: no resolution; write 224, 224,512, 224..1280 or 224..1280:128")
    if odd := sorted(side for side in found if side < PATCH or side % PATCH):
        near = max(PATCH, round(odd[0] / PATCH) * PATCH)
        raise ValueError(f"{odd[0]}: not a positive multiple of the patch, {PATCH} pixels; the nearest is {near}")
    return tuple(sorted(found))


def parse_names(text: str, known: Iterable[str], what: str) -> tuple[str, ...]:
    """Names separated by commas, each one of `known`, in the order of that.

    Raises:
        ValueError: an unknown name, with the one that was probably meant.
    """
    known = tuple(known)
    given = [name.strip() for name in text.split(",")]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"{name!r}: no such {what}; " + (f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"))
    return tuple(name for name in known if name in given)


def specs_of(families: Sequence[str], sizes: Sequence[str], resolutions: Sequence[int], **shared: Any) -> list[RowSpec]:
    """The rows, resolution by resolution; what is compared runs close in time, so a drifting machine meets it alike.

    Args:
        shared: further arguments of every `RowSpec`.
    """
    return [
        RowSpec(model=FAMILIES[family][0].format(SIZES[size]), attention=FAMILIES[family][1], resolution=(side, side), **shared)
        for side in importance(resolutions)
        for size in sizes
        for family in families
    ]


def importance(resolutions: Sequence[int]) -> list[int]:
    """The smallest, the largest, half of that (a quarter of its tokens), then again and again the middle of the widest gap:
    whatever time allows is spread evenly."""
    left = sorted(resolutions)
    order = list(dict.fromkeys((left[0], left[-1], *(side for side in left if 2 * side == left[-1]))))
    while len(order) < len(left):
        done = sorted(order)
        gaps = [[side for side in left if low < side < high] for low, high in itertools.pairwise(done)]
        gap = max(gaps, key=lambda inside: (inside[-1] / inside[0], len(inside)) if inside else (0, 0))
        order.append(gap[(len(gap) - 1) // 2])
    return order


def key_of(row: Mapping[str, Any]) -> tuple:
    """What makes two rows the same measurement; the backend that ran is not among it."""
    names = ("model", "attention", "batch", "dtype", "mode", "compile")
    return (*(row[name] for name in names), tuple(sorted(row["options"].items())), tuple(row["resolution"]))


def spec_key(spec: RowSpec) -> tuple:
    """`key_of` the row that this spec will become."""
    return key_of(
        {name: getattr(spec, name) for name in ("model", "attention", "batch", "dtype", "mode", "compile", "options", "resolution")}
    )


class Plan:
    """Rows in the order of importance, for as long as the time lasts.

    The first resolution is measured whatever it takes. Each further one is measured if all its rows are expected to fit into what
    is left; else it is left out as a whole, so that what is there can be compared.

    Args:
        specs: see `specs_of`.
        macs_g: (model, options, resolution) -> multiply-adds of one image in units of 1e9.
        budget_s: wall-clock seconds for all rows; None for as long as it takes.
        clock: seconds.
    """

    def __init__(
        self,
        specs: Sequence[RowSpec],
        macs_g: Callable[[RowSpec], float],
        budget_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._groups = [list(group) for _, group in itertools.groupby(specs, key=lambda spec: spec.resolution)]
        self._macs_g, self._budget_s, self._clock = macs_g, budget_s, clock
        self._seconds_per_gmac: dict[tuple, float] = {}
        self._start_s: list[float] = []
        self.left_out: list[tuple[RowSpec, float]] = []  # with the seconds that its resolution was expected to take

    def __iter__(self) -> Iterator[tuple[RowSpec, float | None]]:
        """Each row to be measured, with the seconds expected for all that will still be tried; call `note` before the next."""
        began = self._clock()
        for number, group in enumerate(self._groups):
            remaining = None if self._budget_s is None else self._budget_s - (self._clock() - began)
            needed = sum(map(self._expected, group)) if number else 0.0
            if remaining is not None and needed > remaining:
                self.left_out += [(spec, needed) for spec in group]
                continue
            for place, spec in enumerate(group):
                ahead = [*group[place:], *itertools.chain(*self._groups[number + 1 :])]
                expected = sum(map(self._expected, ahead)) if self._seconds_per_gmac else None
                if expected is not None and self._budget_s is not None:
                    expected = min(expected, max(self._budget_s - (self._clock() - began), 0.0))
                yield spec, expected

    def note(self, spec: RowSpec, row: Mapping[str, Any], seconds: float | None = None) -> None:
        """What a row took, of an earlier call without `seconds`; later ones of the same kind are expected accordingly."""
        if row["status"] != "ok":
            return
        self._seconds_per_gmac[self._kind(spec)] = row["latency_ms"] / 1e3 / (self._macs_g(spec) * spec.batch)
        if seconds is not None:
            stepping_s = sum(row["samples_ms"]) / 1e3 * (1 + spec.warmup / len(row["samples_ms"]))
            self._start_s.append(max(seconds - stepping_s, 0.0))

    def _expected(self, spec: RowSpec) -> float:
        start_s = sum(self._start_s) / len(self._start_s) if self._start_s else _START_S
        rate = self._seconds_per_gmac.get(self._kind(spec))
        if rate is None:  # its smaller one failed: this one will, too, and soon
            return start_s
        step_s = _MARGIN * rate * self._macs_g(spec) * spec.batch
        steps = spec.warmup + spec.steps if step_s <= 2 else 4
        return min(start_s + max(steps * step_s, 1.0), spec.budget_s)

    @staticmethod
    def _kind(spec: RowSpec) -> tuple:
        return spec.model, spec.attention


def crossover(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[str, float | None]:
    """From which resolution on ours is faster, by latencies over the side in pixels.

    Between two measured sides both latencies are taken as straight lines in logarithmic axes.

    Returns:
        (`always` | `never` | `from` | `until` | `several`, the side in pixels where there is one).
    """
    sides = sorted(ours.keys() & theirs.keys())
    ahead = [theirs[side] / ours[side] for side in sides]
    if not sides:
        return "never", None
    if all(ratio > 1 for ratio in ahead):
        return "always", None
    if all(ratio <= 1 for ratio in ahead):
        return "never", None
    changes = [i for i in range(len(sides) - 1) if (ahead[i] > 1) != (ahead[i + 1] > 1)]
    if len(changes) > 1:
        return "several", None
    i = changes[0]
    before, after = math.log(ahead[i]), math.log(ahead[i + 1])
    share = before / (before - after)
    side = math.exp(math.log(sides[i]) + share * (math.log(sides[i + 1]) - math.log(sides[i])))
    return ("from" if after > before else "until"), side


def exponent(values: Mapping[int, float]) -> float | None:
    """p of value ~ tokens^p by least squares in logarithmic axes, tokens being the square of the side; None for fewer than 2 sides."""
    points = [(2 * math.log(side), math.log(value)) for side, value in values.items() if value > 0]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def overlap_percent(first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]]) -> float | None:
    """Of the rows measured twice, the share whose 95 % intervals of the median overlap; None where none has two."""
    intervals = [{key_of(row): row["latency_ms_ci95"] for row in rows if row.get("latency_ms_ci95")} for rows in (first, second)]
    both = intervals[0].keys() & intervals[1].keys()
    if not both:
        return None
    agreeing = sum(max(a[0], b[0]) <= min(a[1], b[1]) for a, b in ((intervals[0][key], intervals[1][key]) for key in both))
    return 100 * agreeing / len(both)
