"""How verdicts and numbers are written, on every page alike."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from .claims import Status, Verdict, decimals

KINDS = {
    "count": "parameters, FLOPs",
    "accuracy": "accuracy (Top-1, AP, mIoU)",
    "speed": "speed, memory",
    "statement": "statements, formulas",
    "setting": "settings, definitions",
    "data": "sizes of data sets",
}
MARKS: dict[Status, str] = {"matched": "✓", "differs": "≠", "not measured": "–", "paper inconsistent": "⚠"}
_NUMBER = re.compile(r"[*]*[−+-]?\d[\d.,]*(?: ?[%×²]| – [\d.,]+)?[*]*")


def grid(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; columns that are mostly numbers are set right."""
    lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    columns = [[cell for cell in column if cell not in ("", "–")] for column in zip(*lines)] or [[]] * len(header)
    numeric = [2 * sum(bool(_NUMBER.fullmatch(cell)) for cell in column) > len(column) for column in columns]
    rule = ["---:" if right else "---" for right in numeric]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(line)} |" for line in lines)])


def ours(verdict: Verdict) -> str:
    """Our number, or whether the statement holds for ours."""
    if verdict.ours is None:
        return "–"
    if isinstance(verdict.ours, bool):
        return "holds" if verdict.ours else "does not hold"
    return digits(verdict.ours, verdict)


def marks(verdict: Verdict) -> str:
    """The status, and for a contradiction also how ours compares."""
    if verdict.ours is None:
        return MARKS[verdict.status]
    compared = "✓ᵗ" if verdict.how == "truncation" else "✓" if verdict.how else "≠"
    if compared == "≠" and verdict.delta is not None:
        compared = f"≠ ({signed(verdict.delta, verdict)})"
    return f"⚠ {compared}" if verdict.status == "paper inconsistent" else compared


def signed(delta: float, verdict: Verdict) -> str:
    """ours - paper, with as many places as ours is written with."""
    text = digits(abs(delta), verdict, like=verdict.ours)
    return f"{'−' if delta < 0 else '+'}{text}"


def digits(value: float, verdict: Verdict, like: float | None = None) -> str:
    """Four significant digits, or one more than the paper prints, whichever shows more."""
    shown = abs(like if like is not None else value)
    leading = 3 - math.floor(math.log10(shown)) if shown else 0
    text = f"{value:.{max(decimals(verdict.entry.printed) + 1, leading)}f}"
    return text.rstrip("0").rstrip(".") if float(value).is_integer() else text


def significant(value: float | None) -> str:
    """Three significant digits, never in exponent form."""
    if value is None:
        return "–"
    places = max(2 - math.floor(math.log10(abs(value))), 0) if value else 0
    return f"{value:.{places}f}"
