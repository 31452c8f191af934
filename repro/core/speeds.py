"""Rows of speed combined: the processes of one measurement, host time against device time, and ratios of two rows."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
# rows that share these differ in their image and batch size alone
_ALIKE = ("model", "options", "attention", "dtype", "mode", "compile", "device", "backend")
MORE_WORK = 8.0  # least factor in work, pixels times batch, between two rows that are compared for `mark_host`
AS_LONG = 1.25  # largest factor in time at which both count as the host's
# quantity of a row -> its least and largest value over the processes, in a row of `pool_runs`
RANGES = {"latency_ms": "latency_range_ms", "peak_memory_mib": "peak_memory_range_mib"}
HOST = "the host's time"
UNKNOWN = "host's share not known"
COMMAND = "repro efficiency --graphs"  # measures the GPU's time
# the share of a copy's bandwidth that a family's operator must reach before a ratio against the family is given
REQUIRED_SHARE_PERCENT = {"cpu": 20, "cuda": 30}
ONE_PROCESS = "one process, no interval"


class Ratio(NamedTuple):
    """The speedup of one row over another: by their medians, and by the ends of both ranges where they have them."""

    times: float
    ends: tuple[float, float] | None


def pool_runs(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row for all processes of a measurement, by the same code and the same PyTorch.

    Its latency and its peak are the medians over the processes, `processes` is their number, and `RANGES` has the least
    and the largest of each; a range is None where there is one process, whose steps say nothing of what another process
    takes. Where rows of several commits measure the same, those of the commit with the most processes count,
    among equals the last ones measured.
    """
    groups: dict[tuple, dict[tuple, list[Row]]] = {}
    for row in rows:
        what = *(str(row.get(key)) for key in _ALIKE), row["batch_size"], *row["image_size"]
        code = row.get("commit"), row.get("torch_version")
        groups.setdefault(what, {}).setdefault(code, []).append(row)
    return [_pool(max(by_code.values(), key=_rank_runs)) for by_code in groups.values()]


def _rank_runs(runs: Sequence[Row]) -> tuple[int, str]:
    return len(runs), max(row.get("measured") or "" for row in runs)


def _pool(runs: Sequence[Row]) -> dict[str, Any]:
    measured = [row for row in runs if row["status"] == "ok"]
    first = (measured or runs)[0]
    if not measured:
        return {**first, "processes": len(runs), **dict.fromkeys(RANGES.values())}
    values = {key: [row[key] for row in measured] for key in RANGES}
    known = {key: None not in found for key, found in values.items()}
    medians = {key: statistics.median(found) if known[key] else None for key, found in values.items()}
    ends = {key: (min(found), max(found)) if known[key] and len(found) > 1 else None for key, found in values.items()}
    return {
        **first,
        "processes": len(measured),
        **medians,
        **{RANGES[key]: found for key, found in ends.items()},
        "throughput_img_per_s": first["batch_size"] * 1e3 / medians["latency_ms"],
    }


def mark_host(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The same rows, each with `host`: empty for a time of the device itself, else `HOST` or `UNKNOWN`.

    On a GPU a step may take as long as its host needs to launch the kernels, however small that is. The time of a row
    is the host's where a row of the same model and conditions has `MORE_WORK` or as much less, and neither takes over
    `AS_LONG` times as long as the other. Of another row on a GPU the host's share is not known, but for one through CUDA
    graphs, whose launches cost nothing.
    """
    listed = list(rows)
    return [{**row, "host": _find_host(row, listed)} for row in listed]


def bound_ratio(ours: Row, theirs: Row, key: str = "latency_ms") -> Ratio | None:
    """The speedup of one row of `mark_host` over another, or the saving by another key of `RANGES`; None where one has
    no such number, or the host's time.
    """
    if not (ours[key] and theirs[key]) or (key == "latency_ms" and HOST in (ours["host"], theirs["host"])):
        return None
    ranges, ends = [row[RANGES[key]] for row in (ours, theirs)], None
    if None not in ranges:
        (shortest, longest), (least, most) = ranges
        ends = least / longest, most / shortest
    return Ratio(theirs[key] / ours[key], ends)


def find_slow_operator(row: Row) -> str | None:
    """The reason to give no ratio, or None: our operator is slower than it could be, which makes its family slow."""
    share, required = row.get("op_share_of_copy_percent"), REQUIRED_SHARE_PERCENT[row["device"].partition(":")[0]]
    if share is None or share >= required:
        return None
    return f"its operator reaches {share:.0f} % of the bandwidth of a copy, and {required} % are required"


def describe_time(row: Row) -> str:
    """The suffix of a marked row's time in a table: ` (host)`, ` (host?)`, or nothing."""
    return {HOST: " (host)", UNKNOWN: " (host?)"}.get(row.get("host", ""), "")


def _find_host(row: Row, rows: Sequence[Row]) -> str:
    if not row.get("latency_ms") or not str(row.get("device")).startswith("cuda") or row.get("compile") == "graphs":
        return ""

    def is_partner(other: Row) -> bool:
        if not other.get("latency_ms") or any(other.get(key) != row.get(key) for key in _ALIKE):
            return False
        (less, more), (shorter, longer) = map(
            sorted, zip(*((_count_work(each), each["latency_ms"]) for each in (row, other)), strict=True)
        )
        return more >= MORE_WORK * less and longer <= AS_LONG * shorter

    return HOST if any(map(is_partner, rows)) else UNKNOWN


def _count_work(row: Row) -> int:
    height, width = row["image_size"]
    return row["batch_size"] * height * width
