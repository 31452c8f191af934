"""Marks for cases of parametrised tests that only `make test-all` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Make a case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def first(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Mark all cases but the first `count` as slow; each is a value, a tuple of values, or a `pytest.param`."""
    cases = list(cases)
    return [*cases[:count], *map(_make_slow, cases[count:])]


def _make_slow(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return slow(*case) if isinstance(case, tuple) else slow(case)
