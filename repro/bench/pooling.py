"""Combination of rows of speed: several processes of one measurement, host and device time, ratios, medians."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
# rows that agree in these fields differ only in image and batch size
_ALIKE = ("model", "options", "attention", "dtype", "mode", "compile", "device", "backend")
_MORE_WORK = 8.0  # `mark_host` compares two rows whose work, pixels times batch, differs at least by this factor
_AS_LONG = 1.25  # if their times differ at most by this factor, both are the host's
# quantity of a row -> field of its range over the processes, in a row of `pool_runs`
RANGES = {"latency_ms": "latency_range_ms", "peak_memory_mib": "peak_memory_range_mib"}
HOST = "the host's time"
EMULATED = "emulated"  # status of a row whose dtype the processor has no units for
UNKNOWN = "host's share not known"
COMMAND = "repro efficiency --graphs"  # measures the GPU's time
# a family whose operator reaches less than this share of a copy's bandwidth is not compared
_REQUIRED_SHARE_PERCENT = {"cpu": 20, "cuda": 30}
ONE_PROCESS = "one process, no interval"
_MISSED = 1 - 0.95  # share of the intervals of the median that may miss it


class Ratio(NamedTuple):
    """The speed-up of one row over another by their medians, and its bounds by their ranges over several processes."""

    times: float
    ends: tuple[float, float] | None


def pool_runs(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Pool the rows of all processes of a measurement with the same code and the same PyTorch.

    Latency and peak of a pooled row are the medians over its processes, `processes` is their number, and the fields of
    `RANGES` have the least and the largest value. A range is None for one process, because the spread of its steps does
    not show that between processes. If several commits measured the same, the one with the most processes counts, and
    among equals the latest.
    """
    groups: dict[tuple, dict[tuple, list[Row]]] = {}
    for row in rows:
        what = *(str(row.get(key)) for key in _ALIKE), row["batch_size"], *row["image_size"]
        code = row.get("commit"), row.get("torch_version")
        groups.setdefault(what, {}).setdefault(code, []).append(row)
    return [_pool(max(by_code.values(), key=_rank_runs)) for by_code in groups.values()]


def _rank_runs(runs: Sequence[Row]) -> tuple[int, str]:
    """Return (number of processes, time of the last one), the order in which `pool_runs` prefers a commit's rows."""
    return len(runs), max(row.get("measured") or "" for row in runs)


def _pool(runs: Sequence[Row]) -> dict[str, Any]:
    """Pool rows of one commit. Failed ones count only if none was measured; fields without a range are the first's."""
    measured = [row for row in runs if row["status"] == "ok"]
    first = (measured or runs)[0]
    if not measured:
        return {**first, "processes": len(runs), **dict.fromkeys(RANGES.values())}
    pooled = {**first, "processes": len(measured)}
    for key, range_key in RANGES.items():
        values = [row[key] for row in measured]
        is_known = None not in values
        pooled[key] = statistics.median(values) if is_known else None
        pooled[range_key] = (min(values), max(values)) if is_known and len(values) > 1 else None
    pooled["throughput_img_per_s"] = pooled["batch_size"] * 1e3 / pooled["latency_ms"]
    return pooled


def mark_host(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Add `host` to each row: empty if its time is the device's, else `HOST` or `UNKNOWN`.

    `rows` must be all rows of a device, before they are grouped: the evidence may be a row of another batch size.

    A small step on a GPU takes as long as the host needs to launch its kernels. A row's time is the host's if another
    row of the same model and conditions differs in work by `_MORE_WORK` or more, and in time by `_AS_LONG` or less. For
    other rows on a GPU the host's share is unknown, except with CUDA graphs, whose launches cost nothing.
    """
    listed = list(rows)
    return [{**row, "host": _find_host(row, listed)} for row in listed]


def bound_ratio(ours: Row, theirs: Row, key: str = "latency_ms") -> Ratio | None:
    """Return the speed-up of one row of `mark_host` over another, or the saving in another key of `RANGES`.

    The result is None if a row lacks the number, or if a latency is the host's.
    """
    if not (ours[key] and theirs[key]) or (key == "latency_ms" and HOST in (ours["host"], theirs["host"])):
        return None
    ranges, ends = [row[RANGES[key]] for row in (ours, theirs)], None
    if None not in ranges:
        (shortest, longest), (least, most) = ranges
        ends = least / longest, most / shortest
    return Ratio(theirs[key] / ours[key], ends)


def find_slow_operator(row: Row) -> str | None:
    """Return the reason to give no ratio if our operator is so slow that it makes its family slow; else None."""
    share, required = row.get("op_share_of_copy_percent"), _REQUIRED_SHARE_PERCENT[row["device"].partition(":")[0]]
    if share is None or share >= required:
        return None
    return f"its operator reaches {share:.0f} % of the bandwidth of a copy, and {required} % are required"


def describe_time(row: Row) -> str:
    """Return the suffix of a marked row's time in a table: ` (host)`, ` (host?)`, or empty."""
    return {HOST: " (host)", UNKNOWN: " (host?)"}.get(row.get("host", ""), "")


def _find_host(row: Row, rows: Sequence[Row]) -> str:
    """Return a row's `host`, see `mark_host`; a row without a time has none."""
    if not row.get("latency_ms") or not str(row.get("device")).startswith("cuda") or row.get("compile") == "graphs":
        return ""

    def is_partner(other: Row) -> bool:
        """Tell whether a row of the same model has other work and yet takes as long."""
        if not other.get("latency_ms") or any(other.get(key) != row.get(key) for key in _ALIKE):
            return False
        (less, more), (shorter, longer) = map(
            sorted, zip(*((_count_work(each), each["latency_ms"]) for each in (row, other)), strict=True)
        )
        return more >= _MORE_WORK * less and longer <= _AS_LONG * shorter

    return HOST if any(map(is_partner, rows)) else UNKNOWN


def _count_work(row: Row) -> int:
    """Count the pixels of a step, to which its work is taken to be proportional."""
    height, width = row["image_size"]
    return row["batch_size"] * height * width


def median_interval(samples: list[float]) -> tuple[float, float] | None:
    """Return the distribution-free 95 % interval of the median: the k-th smallest and the k-th largest sample.

    k is the largest number with 2·P(Binomial(n, 1/2) < k) <= 5 %. For n = 10 these are the 2nd and the 9th sample. The
    result is None for fewer than 6 samples: between the smallest and the largest one, the median then lies with less
    than 95 %.
    """
    n = len(samples)
    tail, k = 0.0, 0
    while k < n // 2 and 2 * (tail + math.comb(n, k) / 2**n) <= _MISSED:
        tail += math.comb(n, k) / 2**n
        k += 1
    ordered = sorted(samples)
    return (ordered[k - 1], ordered[n - k]) if k else None
