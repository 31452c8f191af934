"""Helpers to check equations of the papers numerically; both sides of an equation are tensors."""

from collections.abc import Mapping
from typing import Any


def find_error(found: Any, stated: Any) -> float:
    """Return max |found − stated| / max |stated|."""
    return ((found - stated).abs().max() / stated.abs().max()).item()


def choose(known: Mapping[str, Any], name: str, kind: str) -> Any:
    """Return the value of a name; raise a `ValueError` that lists the known names for another one."""
    if name not in known:
        raise ValueError(f"{name!r}: no {kind}; they are {', '.join(known)}")
    return known[name]
