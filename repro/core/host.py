"""Whose time a row of speed has: on a GPU a step may take as long as its host needs to launch the kernels, whatever
their work is.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .noise import find_interval

Row = Mapping[str, Any]
MORE_WORK = 8.0  # how many times the work of a row, pixels times batch, another one has at least that is set beside it
AS_LONG = 1.25  # how many times as long it takes at most where both times are the host's
HOST = "the host's time"
UNKNOWN = "host's share not known"
COMMAND = "repro efficiency --graphs"  # what measures the GPU's time
_ALIKE = ("model", "options", "attention", "dtype", "mode", "compile", "device", "backend")


def mark_host(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The same rows, each with `host`: empty for a time of the device itself, else `HOST` or `UNKNOWN`.

    The time of a row on a GPU is the host's where a row of the same model and conditions has `MORE_WORK` or as much
    less, and neither takes over `AS_LONG` times as long as the other. Of another row on a GPU the host's share is not
    known, but for one through CUDA graphs, whose launches cost nothing.
    """
    listed = list(rows)
    return [{**row, "host": _find_host(row, listed)} for row in listed]


def bound_ratio(ours: Row, theirs: Row) -> tuple[float, float, float] | None:
    """How many times as fast a marked row is as another one, at their medians, at least and at most.

    None where one has no time, or the host's. Other work can only slow a step, so that a row that is noisy by its load
    or its place among the others may take any time below its own; the ratio is then at least 0, or at most infinite.
    """
    if not (ours["latency_ms"] and theirs["latency_ms"]) or HOST in (ours["host"], theirs["host"]):
        return None
    (shortest, longest), (least, most) = map(_find_bounds, (ours, theirs))
    return theirs["latency_ms"] / ours["latency_ms"], least / longest, most / shortest if shortest else float("inf")


def describe_time(row: Row) -> str:
    """What stands behind the time of a marked row in a table: ` (noisy)`, ` (host)` and ` (host?)`, or nothing."""
    marks = {"noisy": row["noisy"], "host": row.get("host") == HOST, "host?": row.get("host") == UNKNOWN}
    words = [word for word, holds in marks.items() if holds]
    return f" ({', '.join(words)})" if words else ""


def _find_bounds(row: Row) -> tuple[float, float]:
    low, high = find_interval(row) or (row["latency_ms"],) * 2
    return (0.0 if {"load", "order"} & {*row["noisy"]} else low), high


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
