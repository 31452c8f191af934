"""Comparisons of rows of speed: speed-ups, memory saved, crossovers, growth with the number of tokens."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .op_rate import RATED_OPERATORS
from .pooling import COMMAND, HOST, ONE_PROCESS, bound_ratio, find_slow_operator, mark_host, pool_runs
from .sweep import BASIS, GROUP_KEYS, SIZES, family_rows, group_rows

Row = Mapping[str, Any]
# name of an exponent in `growth` -> the field of a row that it is fitted to
_QUANTITIES = {"macs": "macs_g", "latency": "latency_ms", "memory": "peak_memory_mib"}
_FEWEST_SIDES = 4  # with fewer image sizes, no crossover is stated
_GROWTH_FROM = 512  # pixels; in smaller images, constant costs hide the growth with the tokens


def conclude(rows: Sequence[Row]) -> dict[str, Any]:
    """Compare rows of `bench.rows.read_rows`, pooled over their processes, and fit their growth.

    Only rows of one batch size, dtype, mode and compilation are compared. A row that is bound by the host does not show
    the GPU's time (`pooling.mark_host`), so it gives no ratio.

    Returns:
        `compared`: a list of {batch_size, dtype, mode, compile, size, against, image_size, speedup, speedup_ends,
            memory_saved_percent, macs_times, crossover, crossover_image_size, faster_at, slower_at, open_at}. Each
            compares the family `BASIS` with one other family at the largest image size where both ran. `speedup_ends`
            follow from the ranges over the processes of both rows. `macs_times` is the other's multiply-adds over ours,
            since models of one size may differ in work. `faster_at`, `slower_at` and `open_at` are the image sizes where
            these ends lie above 1, below 1, or on both sides; for the crossover see `crossover`. A number is None, with
            a reason, if there is no common size, if the other family's speed cannot be trusted, if a time is the
            host's, or, for the ends, if a row has one process.
        `growth`: a list of {batch_size, dtype, mode, compile, model, attention, image_sizes, left_out_image_sizes,
            macs_exponent, latency_exponent, memory_exponent, latency_1280_over_640}. Each quantity grows as tokens to
            the power of its exponent, fitted from 512 pixels on. The fit of the time omits rows bound by the host,
            whose sides are in `left_out_image_sizes`.
    """
    pooled = mark_host(pool_runs(rows))
    compared, growth = [], []
    for values, group in group_rows(pooled).items():
        about = dict(zip(GROUP_KEYS, values, strict=True))
        for size in SIZES:
            families = family_rows(group, size)
            ours = families.pop(BASIS, [])
            for family, theirs in families.items() if ours else ():
                compared.append({**about, "size": size, "against": family, **_compare(family, ours, theirs)})
        for model, attention in dict.fromkeys((row["model"], row["attention"]) for row in group):
            own = [row for row in group if (row["model"], row["attention"], row["status"]) == (model, attention, "ok")]
            growth.append({**about, "model": model, "attention": attention or "none", **_fit_growth(own)})
    return {"compared": compared, "growth": growth}


def crossover(ends: Mapping[int, tuple[float, float]]) -> tuple[str | None, int | None]:
    """Find the image size from which on ours is faster.

    Args:
        ends: side in pixels -> (least, most) speed-up of ours.

    Returns:
        (`always` | `never` | `from` | `open`, the smallest side from which on ours is faster at every measured side, or
        None). The word is None for fewer than `_FEWEST_SIDES` sides.
    """
    sides = sorted(ends)
    if len(sides) < _FEWEST_SIDES:
        return None, None
    if all(most < 1 for _, most in ends.values()):
        return "never", None
    start = next((side for side in sides if all(ends[each][0] > 1 for each in sides if each >= side)), None)
    return ("open" if start is None else "always" if start == sides[0] else "from"), start


def exponent(values: Mapping[int, float]) -> float | None:
    """Fit p of value ~ tokens^p by least squares in logarithmic axes; None for fewer than two positive values.

    `values` maps the side in pixels, whose square is proportional to the tokens, to the value.
    """
    points = [(2 * math.log(side), math.log(value)) for side, value in values.items() if value > 0]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None


def _compare(family: str, ours: Sequence[Row], theirs: Sequence[Row]) -> dict[str, Any]:
    """Compare the family `BASIS` with another one at a size; return `compared` of `conclude` from `image_size` on."""
    our_rows, their_rows = (
        {row["image_size"][0]: row for row in rows if row["status"] == "ok"} for rows in (ours, theirs)
    )
    both = sorted(our_rows.keys() & their_rows.keys())
    reason = _withhold(family, theirs) or (None if both else "there is no image size at which both ran")
    numbers = ("image_size", "speedup", "speedup_ends", "memory_saved_percent", "crossover", "crossover_image_size")
    found: dict[str, Any] = dict.fromkeys((*numbers, "macs_times")) | {"faster_at": [], "slower_at": [], "open_at": []}
    if reason is not None:
        return {**found, "reason": reason}
    ratios = {side: bound_ratio(our_rows[side], their_rows[side]) for side in both}
    ends = {side: ratio.ends for side, ratio in ratios.items() if ratio is not None and ratio.ends is not None}
    last = found["image_size"] = both[-1]
    pair = our_rows[last], their_rows[last]
    found["macs_times"] = pair[1]["macs_g"] / pair[0]["macs_g"]
    our_peak, their_peak = (row["peak_memory_mib"] for row in pair)
    if our_peak and their_peak:
        found["memory_saved_percent"] = 100 * (1 - our_peak / their_peak)
    why = {"memory_saved_percent": "a peak is not known", "speedup_ends": ONE_PROCESS}
    if (largest := ratios[last]) is None:
        whose = " and ".join(row["model"] for row in pair if row["host"] == HOST)
        why["speedup"] = why["speedup_ends"] = f"at {last}² it is {HOST} for {whose}; `{COMMAND}` shows the GPU's"
    else:
        found |= {"speedup": largest.times, "speedup_ends": largest.ends and list(largest.ends)}
    if unsure := sorted({row["host"] for side in both for row in (our_rows[side], their_rows[side]) if row["host"]}):
        why["crossover"] = " and ".join(unsure)
    else:
        for side, (least, most) in ends.items():
            found["faster_at" if least > 1 else "slower_at" if most < 1 else "open_at"].append(side)
        if len(ends) == len(both):
            found["crossover"], found["crossover_image_size"] = crossover(ends)
            why["crossover"] = f"{len(both)} image sizes, and {_FEWEST_SIDES} are required"
        else:
            why["crossover"] = ONE_PROCESS
    why["crossover_image_size"] = found["crossover"] or why["crossover"]
    return found | {f"{name}_reason": why[name] for name in numbers if found[name] is None}


def _withhold(family: str, theirs: Sequence[Row]) -> str | None:
    """Return the reason to give no ratio against a family; None if there is no such reason."""
    if family in RATED_OPERATORS and all(row.get("op_share_of_copy_percent") is None for row in theirs):
        return "the speed of its operator was not measured at this batch size and dtype"
    if slow := next(filter(None, map(find_slow_operator, theirs)), None):
        return slow
    if family == "deit_fused" and any(row["status"] == "ok" and row["attention_kernel"] == "none" for row in theirs):
        return "PyTorch chose no fused attention kernel for it"
    return None


def _fit_growth(rows: Sequence[Row]) -> dict[str, Any]:
    """Fit the rows of one model; return `growth` of `conclude` from `image_sizes` on."""
    by_side = {row["image_size"][0]: row for row in rows if row["image_size"][0] >= _GROWTH_FROM}
    timed = {side: row for side, row in by_side.items() if not row["host"]}
    left_out = sorted(by_side.keys() - timed.keys())
    found: dict[str, Any] = {"image_sizes": sorted(by_side), "left_out_image_sizes": left_out}
    for name, key in _QUANTITIES.items():
        of_fit = timed if key == "latency_ms" else by_side
        found[f"{name}_exponent"] = exponent({side: row[key] for side, row in of_fit.items() if row[key] is not None})
    ratio = timed[1280]["latency_ms"] / timed[640]["latency_ms"] if {640, 1280} <= timed.keys() else None
    found["latency_1280_over_640"] = ratio
    if None in found.values():
        found["reason"] = "too few image sizes were measured, or too few whose time is the device's"
    return found
