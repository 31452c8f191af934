"""Conclusions from a sweep's rows: speed-ups, memory saved, crossovers, growth with tokens, agreement of runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.noise import describe_noise, mark_noise, pool_runs
from .op_rate import OPERATORS
from .sweep import BASIS, GROUP_KEYS, SIZES, family_rows, group_rows, row_key

Row = Mapping[str, Any]
_QUANTITIES = {"macs": "macs_g", "latency": "latency_ms", "memory": "peak_memory_mib"}
_GROWTH_FROM = 512  # pixels; below this, costs that do not grow with the tokens hide the growth


def conclude(rows: Sequence[Row], gates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the rows of `speed.measure`, pooled over their runs, and fit their growth; for the gates, see
    `op_rate.measure_gate`.

    Rows of one batch size, dtype, mode and compilation are compared. A noisy row gives no time: see `core.noise`.

    Returns:
        `compared`: a list of {batch_size, dtype, mode, compile, size, against, image_size, speedup,
            memory_saved_percent, crossover,
        crossover_image_size}: the first of the families against each other one at the largest image size where both ran. The numbers are
        None, with a reason, where there is no such size, or where the other family is not known to be as fast as it
        should be. The speed-up is None, with speedup_reason, where one of its rows is noisy; the crossover is among the
        image sizes without a noisy row.
        `growth`: a list of {batch_size, dtype, mode, compile, model, attention, image_sizes, macs_exponent,
            latency_exponent,
        memory_exponent, latency_1280_over_640}: each quantity grows as tokens to the power of its exponent, fitted from
        512 pixels on; the time without its noisy rows, whose sides are in `noisy_image_sizes`.
        `repeated`: {rows, overlap_percent} of the first two runs of the rows that were measured more than once.
    """
    pooled = mark_noise(pool_runs(rows))
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
        vs_deit_fused}}, where None comes with a reason. A noisy row gives no speed-up.
    """
    at_size = {
        (row["model"], row["attention"]): row
        for row in mark_noise(rows)
        if row["image_size"] == [image_size, image_size]
    }
    speedup, saved = {}, {}
    for name, (model, baseline) in pairs.items():
        speedup[name], saved[name] = {}, {}
        for attention in ("unfused", "fused"):
            ours, theirs = at_size.get((model, None)), at_size.get((baseline, attention))
            ratios = compare_rows(ours, theirs) if ours and theirs else (None, None)
            for found, ratio, key in zip(
                (speedup[name], saved[name]), ratios, ("latency_ms", "peak_memory_mib"), strict=True
            ):
                found[f"vs_deit_{attention}"] = ratio
                if ratio is None:
                    ends = [_describe(row, key) for row in (ours, theirs)]
                    found[f"vs_deit_{attention}_reason"] = f"at {image_size}: {model} {ends[0]}, {baseline} {ends[1]}"
    return {f"speedup_at_{image_size}": speedup, f"memory_saved_at_{image_size}_percent": saved}


def compare_rows(ours: Row, theirs: Row) -> tuple[float | None, float | None]:
    """How many times as fast `ours` is as `theirs`, and how many percent less memory it takes, of rows with `noisy`.

    None where a row lacks the quantity, and no speed-up where one is noisy. Other work slows a step, not its memory.
    """
    is_known = ours["latency_ms"] and theirs["latency_ms"] and not (ours["noisy"] or theirs["noisy"])
    speedup = theirs["latency_ms"] / ours["latency_ms"] if is_known else None
    peaks = ours["peak_memory_mib"], theirs["peak_memory_mib"]
    return speedup, 100 * (1 - peaks[0] / peaks[1]) if all(peaks) else None


def crossover(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[str, float | None]:
    """Find the image size from which on ours is faster, of two mappings from sides in pixels to latencies.

    Between two measured sizes, latency over side is taken as a straight line in logarithmic axes.

    Returns:
        (`always` | `never` | `from` | `until` | `several`, the side in pixels where the two are equal; None where there
        is no such side, or several).
    """
    sides = sorted(ours.keys() & theirs.keys())
    ratios = [theirs[side] / ours[side] for side in sides]
    if all(ratio <= 1 for ratio in ratios):
        return "never", None
    if all(ratio > 1 for ratio in ratios):
        return "always", None
    changes = [i for i in range(len(sides) - 1) if (ratios[i] > 1) != (ratios[i + 1] > 1)]
    if len(changes) > 1:
        return "several", None
    i = changes[0]
    before, after = math.log(ratios[i]), math.log(ratios[i + 1])
    share = before / (before - after)
    side = math.exp(math.log(sides[i]) + share * (math.log(sides[i + 1]) - math.log(sides[i])))
    return ("from" if after > before else "until"), side


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
    if row["noisy"] and key == "latency_ms":
        return describe_noise(row)
    return f"without {key}" if row["status"] == "ok" and not row[key] else row["status"]


def _compare(
    family: str, ours: Sequence[Row], theirs: Sequence[Row], gates: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    our_rows, their_rows = (
        {row["image_size"][0]: row for row in rows if row["status"] == "ok"} for rows in (ours, theirs)
    )
    both = sorted(our_rows.keys() & their_rows.keys())
    reason = _withhold(family, theirs, gates) or (None if both else "there is no image size at which both ran")
    if reason is not None:
        empty = dict.fromkeys(("image_size", "speedup", "memory_saved_percent", "crossover", "crossover_image_size"))
        return {**empty, "reason": reason}
    at_largest = our_rows[both[-1]], their_rows[both[-1]]
    speedup, saved = compare_rows(*at_largest)
    found: dict[str, Any] = {"image_size": both[-1], "speedup": speedup, "memory_saved_percent": saved}
    if speedup is None:
        noisy = [f"{row['model']} at {both[-1]} is {describe_noise(row)}" for row in at_largest if row["noisy"]]
        found["speedup_reason"] = "; ".join(noisy)
    if saved is None:
        found["memory_saved_percent_reason"] = "a peak is not known"
    quiet = [side for side in both if not (our_rows[side]["noisy"] or their_rows[side]["noisy"])]
    if not quiet:
        found |= {"crossover": None, "crossover_image_size": None}
        return found | dict.fromkeys(
            ("crossover_reason", "crossover_image_size_reason"), "a row of each image size is noisy"
        )
    relation, side = crossover(*({side: rows[side]["latency_ms"] for side in quiet} for rows in (our_rows, their_rows)))
    found |= {"crossover": relation, "crossover_image_size": side}
    if side is None:
        scope = "the measured image sizes" if quiet == both else "the image sizes without a noisy row"
        found["crossover_image_size_reason"] = f"{relation} faster among {scope}"
    return found


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
    quiet = {side: row for side, row in by_side.items() if not row["noisy"]}
    found: dict[str, Any] = {"image_sizes": sorted(by_side), "noisy_image_sizes": sorted(by_side.keys() - quiet.keys())}
    for name, key in _QUANTITIES.items():
        of_fit = quiet if key == "latency_ms" else by_side
        found[f"{name}_exponent"] = exponent({side: row[key] for side, row in of_fit.items() if row[key] is not None})
    ratio = quiet[1280]["latency_ms"] / quiet[640]["latency_ms"] if {640, 1280} <= quiet.keys() else None
    found["latency_1280_over_640"] = ratio
    if None in found.values():
        found["reason"] = "too few image sizes were measured, or too few of them without noise"
    return found
