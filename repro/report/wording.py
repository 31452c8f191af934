"""How verdicts and numbers are written, on every page alike."""

import math

from .arithmetic import decimals
from .claims import Verdict
from .document import Line, Piece, mark, number
from .statuses import DIFFERS, INCONSISTENT, MATCHED, STATUSES

TRUNCATED = mark(MATCHED, "✓ᵗ", "matched by truncation")


def format_ours(verdict: Verdict) -> str:
    """Our number, or whether the statement holds for ours."""
    if verdict.ours is None:
        return "–"
    if isinstance(verdict.ours, bool):
        return "holds" if verdict.ours else "does not hold"
    return _format_like(verdict.ours, verdict.ours, verdict)


def ours_piece(verdict: Verdict) -> Piece:
    """`format_ours` as a piece of a line: numbers are marked as such."""
    text = format_ours(verdict)
    return text if verdict.ours is None or isinstance(verdict.ours, bool) else number(text)


def status_line(verdict: Verdict) -> Line:
    """The mark of the status, how far ours is from the paper's where it differs; after a contradiction also how ours compares."""
    status = STATUSES[verdict.status]
    if verdict.ours is None:
        return (mark(status),)
    compared: Line
    if verdict.how:
        compared = (TRUNCATED,) if verdict.how == "truncation" else (mark(MATCHED),)
    else:
        compared = (mark(DIFFERS),) if verdict.delta is None else (mark(DIFFERS), f" ({format_delta(verdict)})")
    return (mark(status), " ", *compared) if status is INCONSISTENT else compared


def format_delta(verdict: Verdict) -> str:
    """Ours − paper, with as many decimals as ours is written with."""
    return f"{'−' if verdict.delta < 0 else '+'}{_format_like(abs(verdict.delta), verdict.ours, verdict)}"


def significant(value: float | None) -> str:
    """Three significant digits, never in exponent form."""
    if value is None:
        return "–"
    places = max(2 - math.floor(math.log10(abs(value))), 0) if value else 0
    return f"{value:.{places}f}"


def _format_like(value: float, ours: float, verdict: Verdict) -> str:
    """`value` with the decimals that `ours` needs for four significant digits, or one more than the paper prints if that is more."""
    leading = 3 - math.floor(math.log10(abs(ours))) if ours else 0
    text = f"{value:.{max(decimals(verdict.entry.printed) + 1, leading)}f}"
    return text.rstrip("0").rstrip(".") if float(value).is_integer() else text
