"""Helpers to check equations of the papers numerically; both sides of an equation are tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def find_error(found: Tensor, stated: Tensor) -> float:
    """Return max |found − stated| / max |stated|."""
    return ((found - stated).abs().max() / stated.abs().max()).item()


def apply_delta_rule(q: Tensor, k: Tensor, v: Tensor, W: Tensor) -> Tensor:
    """Run the delta rule W_t = W_{t−1} − k_tᵀ(k_t W_{t−1} − v_t), z_t = q_t W_t, on rows (T, d) from a state (d, d).

    It is written out, since the kernels are compared with it. Keys must be at most of length 1, or it diverges.
    """
    out = []
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        W = W - torch.outer(k_t, k_t @ W - v_t)
        out.append(q_t @ W)
    return torch.stack(out)


def choose(known: Mapping[str, Any], name: str, kind: str) -> Any:
    """Return the value of a name; raise a `ValueError` that lists the known names for another one."""
    if name not in known:
        raise ValueError(f"{name!r}: no {kind}; they are {', '.join(known)}")
    return known[name]
