"""What the rooms share that measure equations of their papers, whose both sides are tensors."""

from collections.abc import Mapping
from typing import Any


def find_error(found: Any, stated: Any) -> float:
    """The largest difference, as a share of the largest value of what is stated."""
    return ((found - stated).abs().max() / stated.abs().max()).item()


def choose(known: Mapping[str, Any], name: str, kind: str) -> Any:
    """What a name means; a `ValueError` lists all names."""
    if name not in known:
        raise ValueError(f"{name!r}: no {kind}; they are {', '.join(known)}")
    return known[name]
