"""Comparison of our numbers with printed ones, and the functions that every paper's ledger may call."""

import math
from collections.abc import Callable
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction

Number = int | float | Fraction


def agreement(ours: Number, printed: str, *, exact: bool = False) -> str | None:
    """Return how our number agrees with a printed one: by `rounding`, by `truncation`, or None for not at all.

    Args:
        ours: the number at full precision.
        printed: the paper's digits, e.g. `1.4` or `102`. Ours is rounded or truncated to as many decimals.
        exact: compare without rounding, for settings; the result is then `equality` or None.
    """
    target = Decimal(printed)
    value = Decimal(f"{float(ours):.12g}")  # 0.44 may be stored as 0.43999999999999995, which truncates to 0.43
    if exact:
        return "equality" if value == target else None
    step = Decimal(1).scaleb(int(target.as_tuple().exponent))
    for name, mode in (("rounding", ROUND_HALF_UP), ("truncation", ROUND_DOWN)):
        if value.quantize(step, rounding=mode) == target:
            return name
    return None


def decimals(printed: str) -> int:
    """Count the decimals of a printed number: 2 for `1.44`, 3 for `1e-3`."""
    return max(-int(Decimal(printed).as_tuple().exponent), 0)


def divide(a: Number, b: Number) -> Number:
    """Return a / b, as an exact fraction unless one of them is a float.

    b = 0 raises a ZeroDivisionError, which `claims` turns into `Missing` where the numbers are ours.
    """
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a, b)


def saved(ours: Number, baseline: Number) -> Number:
    """Return the reduction from `baseline` to `ours` in percent."""
    return 100 * (1 - divide(ours, baseline))


def near(a: Number, b: Number, percent: Number) -> bool:
    """Tell whether a differs from b by at most `percent` percent of b."""
    return abs(a - b) <= abs(b) * percent / 100


# what calls none but these is arithmetic: `claims` gives it the status `declared`, so none may read a record or a model
FUNCTIONS: dict[str, Callable] = {"ceil": math.ceil, "min": min, "max": max, "saved": saved, "near": near}
