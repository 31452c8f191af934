"""Whether other work on the machine disturbed a row of speed: by its own samples, the load before it, and the rows
around it.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# of the median; results/speed.md shows how wide the intervals of our rows are
TOLERANCE = 0.2
# threads that a quiet machine may want for itself
LOAD_TOLERANCE = 0.5
# rows that share these differ in their image size alone
_ALIKE = ("model", "options", "attention", "batch_size", "dtype", "mode", "compile", "device", "backend", "run")


# Student's t for a 95 % interval, by the number of processes; over fewer there is a range, and no interval. SciPy is
# not everywhere.
STUDENT = {5: 2.7764, 6: 2.5706, 7: 2.4469, 8: 2.3646, 9: 2.3060}


def pool_runs(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row for all runs of a measurement, each of which had a process of its own, by the same code and the same
    PyTorch.

    Its latency and its peak are the medians over its quiet runs, or over all if none is quiet; `processes` says how
    many these are, and `samples_ms` has the latency of each. `latency_ms_ci95` is then of the mean over processes in
    logarithms, where they are as many as in `STUDENT`. A row of one run is as it was measured. Where the code changed
    between runs, the rows of the first one count.
    """
    groups: dict[tuple, dict[tuple, list[Row]]] = {}
    for row in rows:
        what = *(str(row.get(key)) for key in _ALIKE if key != "run"), *row["image_size"]
        code = row.get("commit") or row.get("code_hash")  # rows of before 2026-12 name their code by its hash
        groups.setdefault(what, {}).setdefault((code, row.get("torch_version")), []).append(row)
    first = (
        min(by_code.values(), key=lambda runs: min(row.get("run", 1) for row in runs)) for by_code in groups.values()
    )
    return [_pool(sorted(runs, key=lambda row: row.get("run", 1))) for runs in first]


def _pool(runs: Sequence[Row]) -> dict[str, Any]:
    measured = [row for row in runs if row.get("status", "ok") == "ok" and row.get("latency_ms")]
    measured = [row for row in measured if not find_noise(row)] or measured
    if len(measured) < 2:
        return {**(measured or runs)[0], "run": 1}
    latencies = [row["latency_ms"] for row in measured]
    latency, peaks = statistics.median(latencies), [row["peak_memory_mib"] for row in measured]
    logs = list(map(math.log, latencies))
    half = STUDENT.get(len(logs), math.nan) * statistics.stdev(logs) / math.sqrt(len(logs))
    interval = [math.exp(statistics.fmean(logs) + side * half) for side in (-1, 1)]
    return {
        **measured[0],
        "run": 1,
        "processes": len(measured),
        "latency_ms": latency,
        "throughput_img_per_s": measured[0]["batch_size"] * 1e3 / latency,
        "peak_memory_mib": None if None in peaks else statistics.median(peaks),
        "samples_ms": latencies,
        "latency_ms_ci95": interval if len(logs) in STUDENT else None,
    }


def find_interval(row: Row) -> tuple[float, float] | None:
    """Between which milliseconds a row's median step lies: its 95 % interval, or the range of samples that are too few
    for one.

    None where the row has neither.
    """
    if row.get("latency_ms_ci95"):
        low, high = row["latency_ms_ci95"]
        return low, high
    samples = row.get("samples_ms") or ()
    return (min(samples), max(samples)) if len(samples) > 1 else None


def find_spread(row: Row) -> float | None:
    """The width of a row's interval as a share of its median; None where it has no interval."""
    interval = find_interval(row)
    return (interval[1] - interval[0]) / row["latency_ms"] if interval and row.get("latency_ms") else None


def find_noise(row: Row) -> list[str]:
    """Why a row alone is noisy, in alphabetical order; empty for a quiet row, and for one that was not measured.

    `load`: on a CPU, over the minute before the row, more threads wanted to run than there are cores. Among these threads,
    as many as the row's own are not counted against it, for they are those of the row before. `spread`: its steps
    differ too much.
    """
    if row.get("status") != "ok":
        return []
    found = []
    if str(row.get("device")).startswith("cpu") and row.get("load_average") is not None:
        free = max(row["cores"] - row["threads"], 0)
        if row["load_average"] - row["threads"] > free + LOAD_TOLERANCE:
            found.append("load")
    if (find_spread(row) or 0) > TOLERANCE:
        found.append("spread")
    return found


def mark_noise(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The same rows, each with `noisy`, its reasons: those of `find_noise`, and `order` where a larger image took less
    time, and the
    intervals of the two are apart. If two rows are in the wrong order, the slower one is noisy, since other work can
    only slow a step.
    """
    listed = list(rows)
    return [
        {**row, "noisy": sorted([*find_noise(row), *(["order"] if _is_out_of_order(row, listed) else [])])}
        for row in listed
    ]


def describe_noise(row: Row) -> str:
    """What is said in place of a number that a marked row does not give: `noisy: load, spread`; empty for a quiet row."""
    return f"noisy: {', '.join(row['noisy'])}" if row["noisy"] else ""


def _is_out_of_order(row: Row, rows: Iterable[Row]) -> bool:
    def is_faster(other: Row) -> bool:
        alike = other.get("status") == "ok" and all(other.get(key) == row.get(key) for key in _ALIKE)
        if not alike or _count_pixels(other) <= _count_pixels(row):
            return False
        lowest = (find_interval(row) or [row["latency_ms"]])[0]
        highest = (find_interval(other) or [other["latency_ms"]])[-1]
        return lowest > highest

    is_timed = row.get("status") == "ok" and bool(row.get("latency_ms")) and "image_size" in row
    return is_timed and any(map(is_faster, rows))


def _count_pixels(row: Row) -> int:
    height, width = row["image_size"]
    return height * width
