"""The verdict on a ledger's entry: its status, its text on every page, and its fields in claims.csv."""

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self

from ..core.statistics import Interval
from .arithmetic import decimals
from .ledger import Entry
from .markdown import bullets
from .results import SpeedGroup


class Status(enum.StrEnum):
    """A status of an entry: its word in claims.csv, its mark in a table, and its meaning."""

    MATCHED = "matched", "✓", "ours, rounded to the paper's printed digits, is the paper's number"
    TRUNCATED = "matched, truncated", "✓", "ours is the paper's number when its further digits are cut off"
    FITTED = "fitted", "≈", "ours agrees by a convention that was fitted to such rows, so that it is no evidence"
    DECLARED = (
        "declared",
        "≈",
        "a setting that was copied from the paper, or trivial arithmetic; it agrees, and is no evidence",
    )
    EXPLAINED = (
        "differs, explained",
        "≠ᵉ",
        "ours is another number (ours − paper is in parentheses), and a computation or a source shows why",
    )
    UNEXPLAINED = "differs, unexplained", "≠", "ours is another number, and nobody has shown why"
    INCONSISTENT = (
        "paper inconsistent",
        "⚠",
        "the paper contradicts itself, and no rounding of its numbers explains it; the page lists the evidence",
    )
    NOT_MEASURABLE = (
        "not measurable as described",
        "–",
        "nobody can have measured this under the conditions that the paper names; the page lists the computation",
    )
    NOT_MEASURED = (
        "not measured",
        "–",
        "we have no number under the paper's conditions, and the page lists reasons and commands",
    )
    OUT_OF_SCOPE = (
        "out of scope",
        "○",
        "it needs a model of another field than vision, which this project does not build",
    )

    def __new__(cls, word: str, mark: str, means: str) -> Self:
        status = str.__new__(cls, word)
        status._value_, status.mark, status.means = word, mark, means
        return status


STATUSES = tuple(Status)
# the columns of claims.csv that are fields of a verdict as they stand
_FOUND = ("ours", "status", "compared", "how", "delta", "explanation", "evidence", "reason", "command")
# kind of an entry -> its heading on the pages, in their order
KIND_MEANINGS = {
    "count": "parameters, FLOPs",
    "accuracy": "accuracy (Top-1, AP, mIoU)",
    "speed": "speed, memory",
    "statement": "statements, formulas",
    "setting": "settings, definitions",
    "data": "sizes of data sets",
}


OPEN = "not separated"  # a statement that the ranges of its speeds neither confirm nor refute


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A claim on speed or memory, evaluated on another device than the paper's or under other conditions."""

    group: SpeedGroup  # the rows behind the value
    # the paper's quantity, or whether the statement holds, or `OPEN`; against the baseline's unfused attention
    value: float | bool | str
    # the quantity's bounds by the ranges over processes; None where a row has one process
    ends: Interval | None
    failing: int  # the measured comparisons of a statement that do not hold
    # `value` against the fused attention that users run; None where the claim has no baseline, or without such a row
    fused: float | bool | str | None
    fused_ends: Interval | None
    fused_failing: int
    baseline: str  # the baseline's name
    unit: str  # the quantity's unit
    parts: tuple[int, int]  # (measured comparisons of a statement, all of them)

    @property
    def found(self) -> str:
        """`value` in words, with its range or the share of a statement's comparisons that were measured."""
        return self._format(self.value, self.ends, self.failing)

    def _format(self, value: float | bool | str, ends: Interval | None, failing: int) -> str:
        """Write a value with its ends, see the class; a statement's share is that of its measured comparisons.

        A statement that fails in some of them alone says in how many: the others may hold.
        """
        if isinstance(value, bool | str):
            measured, there_are = self.parts
            scope = "" if measured == there_are else f" in the {measured} of {there_are} measured"
            if 0 < failing < measured:
                scope = f" in {failing} of the {measured} measured ({there_are} in all)"
            return (value if isinstance(value, str) else _format_bool(value)) + scope
        interval = f" ({ends[0]:.3g} to {ends[1]:.3g})" if ends else ""
        return f"{value:.4g}{self.unit if self.unit in '×%' else ''}{interval}"  # other units need a space

    @property
    def found_fused(self) -> str:
        """`fused` in words as `found`; empty for None."""
        return "" if self.fused is None else self._format(self.fused, self.fused_ends, self.fused_failing)

    def __str__(self) -> str:
        fused = f"; against fused {self.baseline} {self.found_fused}" if self.found_fused else ""
        return f"{self.found} ({self.group}{fused}{self.group.caveat})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one entry of a ledger."""

    entry: Entry
    status: Status  # a contradiction within the paper takes precedence over `compared`
    # the status by comparing ours with the paper's; None where nothing was measured
    compared: Status | None = None
    # our number, or whether the statement holds for our numbers; None where nothing was measured
    ours: float | bool | None = None
    # `rounding`, `truncation`, `equality`, or `holds` for a statement; None where ours does not agree
    how: str | None = None
    delta: float | None = None  # ours − paper; None for statements and where nothing was measured
    explanation: str | None = None  # why ours differs
    evidence: str | None = None  # why the paper contradicts itself, or why the number cannot have been measured
    reason: str | None = None  # why nothing was measured
    command: str | None = None  # the command that would measure it
    elsewhere: tuple[Elsewhere, ...] = ()  # values under other conditions than the paper's, shown but not compared
    sources: tuple[str, ...] = ()  # the records that ours was read from
    # for a count by a convention that was chosen for its row: whether our own convention agrees as well
    plainly: bool | None = None
    checks: int = 0  # the relations to the paper's own numbers that could be decided
    violations: int = 0  # the checks that do not hold


def describe_statuses(_: object) -> str:
    """Return a list of all statuses, a sentence on each; a paper's passage, so it gets a report."""
    return bullets(f"`{status}`: {status.means}." for status in STATUSES)


def count_statuses(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Return status -> number of the verdicts that have it; a status is its own word as text."""
    return Counter(verdict.status for verdict in verdicts)


def count_alone(verdicts: Iterable[Verdict]) -> int:
    """Return how many entries have no counterpart of ours, whatever the reason; contradictions have evidence instead."""
    counts = count_statuses(verdicts)
    return counts[Status.NOT_MEASURED] + counts[Status.NOT_MEASURABLE] + counts[Status.OUT_OF_SCOPE]


def format_counts(verdicts: Iterable[Verdict]) -> str:
    """Return the count of each status that occurs, such as `47 matched; 8 differs, explained`."""
    counts = count_statuses(verdicts)
    return "; ".join(f"{counts[word]} {word}" for word in STATUSES if counts[word])


def format_ours(verdict: Verdict) -> str:
    """Return our number for a page, or whether the statement holds for it; `–` where nothing was measured.

    claims.csv has the number unrounded.
    """
    ours = verdict.ours
    if ours is None:
        return "–"
    return _format_bool(ours) if isinstance(ours, bool) else _format_like(ours, verdict)


def format_delta(verdict: Verdict) -> str:
    """Return ours − paper with the decimals of ours; empty where there is no difference of numbers."""
    if verdict.delta is None:
        return ""
    return f"{'−' if verdict.delta < 0 else '+'}{_format_like(abs(verdict.delta), verdict)}"


def status_line(verdict: Verdict) -> str:
    """Return the mark of the status, with ours − paper where they differ, such as `≠ (+0.3)`.

    After a contradiction within the paper, the mark of `compared` follows. `html` parses this form.
    """
    if verdict.compared is None:
        return verdict.status.mark
    compared = verdict.compared.mark
    if verdict.how is None and verdict.delta is not None:
        compared += f" ({format_delta(verdict)})"
    return compared if verdict.status == verdict.compared else f"{verdict.status.mark} {compared}"


def significant(value: float | None) -> str:
    """Format a number with three significant digits, never in exponent form; `–` for None."""
    if value is None:
        return "–"
    rounded = float(f"{value:.2e}")  # 9.996 becomes 10.0, which has a decimal less
    places = max(2 - math.floor(math.log10(abs(rounded))), 0) if rounded else 0
    return f"{value:.{places}f}"


def format_ratio(times: float, ends: Sequence[float] | None) -> str:
    """Format a factor with the ends of its range over processes, or with `one process` where it has none."""
    return f"{significant(times)}×" + (
        f" ({significant(ends[0])} to {significant(ends[1])})" if ends else " (one process)"
    )


def export_rows(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Return all entries as rows of claims.csv, with each list joined to one text."""
    rows = []
    for verdict in verdicts:
        entry = verdict.entry
        about = {name: getattr(entry, name) for name in ("id", "kind", "place", "says", "unit")}
        found = {name: getattr(verdict, name) for name in _FOUND}
        lists = {name: "; ".join(map(str, getattr(verdict, name))) for name in ("elsewhere", "sources")}
        rows.append({**about, "paper": entry.printed, **found, **lists})
    return rows


def _format_bool(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def _format_like(value: float, verdict: Verdict) -> str:
    """Format `value` with the decimals that ours needs for four digits, and at least one more than the paper's."""
    leading = 3 - math.floor(math.log10(abs(verdict.ours))) if verdict.ours else 0
    text = f"{value:.{max(decimals(verdict.entry.printed) + 1, leading)}f}"
    return text.rstrip("0").rstrip(".") if float(value).is_integer() else text
