"""Conclusions from a sweep's rows: speed-ups, memory saved, crossovers, growth with tokens, agreement of runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.host import COMMAND, HOST, bound_ratio, mark_host
from ..core.noise import describe_noise, mark_noise, pool_runs
from .op_rate import OPERATORS
from .sweep import BASIS, GROUP_KEYS, SIZES, family_rows, group_rows, row_key

Row = Mapping[str, Any]
_QUANTITIES = {"macs": "macs_g", "latency": "latency_ms", "memory": "peak_memory_mib"}
FEWEST_SIDES = 4  # of so many image sizes a comparison says from which one on a family is faster
_GROWTH_FROM = 512  # pixels; below this, costs that do not grow with the tokens hide the growth


def conclude(rows: Sequence[Row], gates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the rows of `speed.measure`, pooled over their runs, and fit their growth; for the gates, see
    `op_rate.measure_gate`.

    Rows of one batch size, dtype, mode and compilation are compared. A time that is the host's says nothing of a GPU
    (`core.host`), and gives no ratio.

    Returns:
        `compared`: a list of {batch_size, dtype, mode, compile, size, against, image_size, speedup, speedup_ends,
            memory_saved_percent, crossover,
        crossover_image_size, faster_at, slower_at, open_at}: the first of the families against each other one at the
        largest image size where both ran, the ends by the intervals of both rows; see `crossover`, and at which image
        sizes the ratio lies on one side of 1 or on both. The numbers are None, with a reason, where there is no such size,
        where the other family is not known to be as fast as it should be, or where a time is the host's.
        `growth`: a list of {batch_size, dtype, mode, compile, model, attention, image_sizes, macs_exponent,
            latency_exponent,
        memory_exponent, latency_1280_over_640}: each quantity grows as tokens to the power of its exponent, fitted from
        512 pixels on; the time without rows that are noisy or the host's, whose sides are in `left_out_image_sizes`.
        `repeated`: {rows, overlap_percent} of the first two runs of the rows that were measured more than once.
    """
    pooled = mark_host(mark_noise(pool_runs(rows)))
    compared, growth = [], []
    for values, group in group_rows(pooled).items():
        about = dict(zip(GROUP_KEYS, values, strict=True))
        for size in SIZES:
            families = family_rows(group, size)
            ours = families.pop(BASIS, [])
            for family, theirs in families.items() if ours else ():
                compared.append({**about, "size": size, "against": family, **_compare(family, ours, theirs, gates)})
        for model, attention in dict.fromkeys((row["model"], row["attention"]) for row in group):
            own = [row for row in group if (row["model"], row["attention"], row["status"]) == (model, attention, "ok")]
            growth.append({**about, "model": model, "attention": attention or "none", **_fit_growth(own)})
    first, again = ([row for row in rows if row["run"] == run] for run in (1, 2))
    repeated = {"rows": len(again), "overlap_percent": overlap_percent(first, again)}
    if repeated["overlap_percent"] is None:
        repeated["reason"] = "nothing was measured twice; use --runs 2"
    return {"compared": compared, "growth": growth, "repeated": repeated}


def compare_at(image_size: int, pairs: Mapping[str, tuple[str, str]], rows: Sequence[Row]) -> dict[str, Any]:
    """Compare models with baselines at one image size, once with unfused and once with fused attention of the baseline.

    Args:
        image_size: the side of the square images in pixels.
        pairs: name of a pair -> (model, baseline with softmax attention).

    Returns:
        {speedup_at_<image_size>, memory_saved_at_<image_size>_percent}, both of them {name: {vs_deit_unfused,
        vs_deit_fused}}, where None comes with a reason. A row that is noisy, or the host's, gives no speed-up.
    """
    at_size = {
        (row["model"], row["attention"]): row
        for row in mark_host(mark_noise(rows))
        if row["image_size"] == [image_size, image_size]
    }
    speedup, saved = {}, {}
    for name, (model, baseline) in pairs.items():
        speedup[name], saved[name] = {}, {}
        for attention in ("unfused", "fused"):
            ours, theirs = at_size.get((model, None)), at_size.get((baseline, attention))
            ratios = (None, None)
            if ours and theirs:
                bounds = None if ours["noisy"] or theirs["noisy"] else bound_ratio(ours, theirs)
                ratios = bounds and bounds[0], _find_saved(ours, theirs)
            for found, ratio, key in zip(
                (speedup[name], saved[name]), ratios, ("latency_ms", "peak_memory_mib"), strict=True
            ):
                found[f"vs_deit_{attention}"] = ratio
                if ratio is None:
                    ends = [_describe(row, key) for row in (ours, theirs)]
                    found[f"vs_deit_{attention}_reason"] = f"at {image_size}: {model} {ends[0]}, {baseline} {ends[1]}"
    return {f"speedup_at_{image_size}": speedup, f"memory_saved_at_{image_size}_percent": saved}


def crossover(ends: Mapping[int, tuple[float, float]]) -> tuple[str | None, int | None]:
    """Say from which image size on ours is faster, of sides in pixels -> how many times as fast it is at least and most.

    Returns:
        (`always` | `never` | `from` | `open`, the least side from which on it is faster at every measured one; None
        where there is none). The first is None for fewer than `FEWEST_SIDES` sizes, which show no such thing.
    """
    sides = sorted(ends)
    if len(sides) < FEWEST_SIDES:
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
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def overlap_percent(first: Iterable[Row], second: Iterable[Row]) -> float | None:
    """The share of rows measured twice whose two 95 % intervals of the median overlap; None without such a row."""
    intervals = [
        {row_key(row): row["latency_ms_ci95"] for row in rows if row.get("latency_ms_ci95")} for rows in (first, second)
    ]
    both = intervals[0].keys() & intervals[1].keys()
    if not both:
        return None
    overlapping = sum(
        max(a[0], b[0]) <= min(a[1], b[1]) for a, b in ((intervals[0][key], intervals[1][key]) for key in both)
    )
    return 100 * overlapping / len(both)


def _describe(row: Row | None, key: str) -> str:
    """Say why a row gives no ratio: not in the params, noisy, ended otherwise than `ok`, or without the quantity."""
    if row is None:
        return "not in params"
    if key == "latency_ms" and (row["noisy"] or row["host"]):
        return describe_noise(row) or row["host"]
    return f"without {key}" if row["status"] == "ok" and not row[key] else row["status"]


def _find_saved(ours: Row, theirs: Row) -> float | None:
    """How many percent less memory ours takes; None where a peak is not known."""
    peaks = ours["peak_memory_mib"], theirs["peak_memory_mib"]
    return 100 * (1 - peaks[0] / peaks[1]) if all(peaks) else None


def _compare(
    family: str, ours: Sequence[Row], theirs: Sequence[Row], gates: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    our_rows, their_rows = (
        {row["image_size"][0]: row for row in rows if row["status"] == "ok"} for rows in (ours, theirs)
    )
    both = sorted(our_rows.keys() & their_rows.keys())
    reason = _withhold(family, theirs, gates) or (None if both else "there is no image size at which both ran")
    numbers = ("image_size", "speedup", "speedup_ends", "memory_saved_percent", "crossover", "crossover_image_size")
    found: dict[str, Any] = dict.fromkeys(numbers) | {"faster_at": [], "slower_at": [], "open_at": []}
    if reason is not None:
        return {**found, "reason": reason}
    at_largest = our_rows[both[-1]], their_rows[both[-1]]
    ratio = bound_ratio(*at_largest)
    found |= {"image_size": both[-1], "memory_saved_percent": _find_saved(*at_largest)}
    why = {"memory_saved_percent": "a peak is not known"}
    if ratio is None:
        whose = " and ".join(row["model"] for row in at_largest if row["host"] == HOST)
        why["speedup"] = why["speedup_ends"] = f"at {both[-1]}² it is {HOST} for {whose}; `{COMMAND}` shows the GPU's"
    elif math.isinf(ratio[2]):
        noisy = [f"{row['model']} at {both[-1]} is {describe_noise(row)}" for row in at_largest if row["noisy"]]
        why["speedup"] = why["speedup_ends"] = "; ".join(noisy)
    else:
        found |= {"speedup": ratio[0], "speedup_ends": list(ratio[1:])}
    if unsure := sorted({row["host"] for side in both for row in (our_rows[side], their_rows[side]) if row["host"]}):
        why["crossover"] = " and ".join(unsure)
    else:
        ends = {side: bound_ratio(our_rows[side], their_rows[side])[1:] for side in both}
        found["crossover"], found["crossover_image_size"] = crossover(ends)
        for side, (least, most) in ends.items():
            found["faster_at" if least > 1 else "slower_at" if most < 1 else "open_at"].append(side)
        why["crossover"] = f"{len(both)} image sizes, and {FEWEST_SIDES} are required"
    why["crossover_image_size"] = found["crossover"] or why["crossover"]
    return found | {f"{name}_reason": why[name] for name in numbers if found[name] is None}


def _withhold(family: str, theirs: Sequence[Row], gates: Sequence[Mapping[str, Any]]) -> str | None:
    """The reason why no ratio against a family may be given; None where there is none."""
    about = family, theirs[0]["batch_size"], theirs[0]["dtype"]
    gate = next((gate for gate in gates if (gate["family"], gate["batch_size"], gate["dtype"]) == about), None)
    if gate is None and family in OPERATORS:
        return "the speed of its operator was not measured at this batch size and dtype"
    if gate is not None and not gate["holds"]:
        reached = f"{gate['operator']} reaches {gate['share_of_copy_percent']:.0f} % of the bandwidth of a copy"
        return f"{reached}, {gate['at_least_percent']} % are required for a ratio"
    if family == "deit_fused" and any(row["status"] == "ok" and row["attention_kernel"] == "none" for row in theirs):
        return "PyTorch chose no fused attention kernel for it"
    return None


def _fit_growth(rows: Sequence[Row]) -> dict[str, Any]:
    by_side = {row["image_size"][0]: row for row in rows if row["image_size"][0] >= _GROWTH_FROM}
    quiet = {side: row for side, row in by_side.items() if not (row["noisy"] or row["host"])}
    left_out = sorted(by_side.keys() - quiet.keys())
    found: dict[str, Any] = {"image_sizes": sorted(by_side), "left_out_image_sizes": left_out}
    for name, key in _QUANTITIES.items():
        of_fit = quiet if key == "latency_ms" else by_side
        found[f"{name}_exponent"] = exponent({side: row[key] for side, row in of_fit.items() if row[key] is not None})
    ratio = quiet[1280]["latency_ms"] / quiet[640]["latency_ms"] if {640, 1280} <= quiet.keys() else None
    found["latency_1280_over_640"] = ratio
    if None in found.values():
        found["reason"] = "too few image sizes were measured, or too few of them without noise"
    return found
