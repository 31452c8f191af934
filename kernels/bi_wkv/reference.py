"""Arguments of Bi-WKV, and its equation over all pairs of tokens, against which every backend is tested.

Each token's largest exponent is subtracted before any power is taken. Plain PyTorch operations, differentiable by
autograd, in fp64 for fp64 inputs, else fp32; time and memory grow with T².

Shape letters: B images, T tokens, C channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import compute_dtype

# exponent of an empty sum: finite, since the difference of two must be 0 and not NaN. The bound of |u| and |k| in
# `op.bi_wkv` must stay well below its size. numba's cache ignores a change of it, see `cpu_loops.Loop`
EMPTY = -1e30
LARGEST = 1e7  # bound of |w| T, the largest difference of exponents: fp32 numbers up to it lie at most 1 apart


class Arguments(NamedTuple):
    """Arguments of every backend: w, u: (C,); k, v: (B,T,C), of one dtype.

    Backends take them by their places, and return the gradients in this order.
    """

    w: Tensor
    u: Tensor
    k: Tensor
    v: Tensor


def check_decay(w: Tensor, tokens: int) -> None:
    """Raise a ValueError for a w so large that exponents would be rounded to more than 1.

    NaN passes, and fills its channel.
    """
    largest = w.abs().nan_to_num(0).max().item() * tokens
    if largest > LARGEST:
        raise ValueError(
            f"bi_wkv: w: its largest size times the {tokens} tokens is {largest:.3g}, expected at most {LARGEST:.0e}"
        )


def bi_wkv_formula(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute Bi-WKV in each channel over all pairs of tokens.

        out_t = Σ_i e^{s_ti} v_i / Σ_i e^{s_ti}   with s_ti = k_i − (|t−i| − 1) w for i ≠ t and s_tt = k_t + u

    This is the paper's equation. The official CUDA kernel computes something else. It goes through chunks of ⌈T/32⌉
    tokens. With t0 the first token of t's chunk, it takes the exponent k_i − |t−i| w for i < t0 and for i > t, and adds
    (1 − e^w) e^{(t−i) w + k_i} to the sums for t0 < i ≤ t; its denominator has 1e-6 more, where the largest term is 1.
    For the w and u of models the outputs differ by up to 4 % of the largest one at T = 49, less in longer sequences.

    Args:
        w, u: (C,), decay and bonus, both already divided by T. If w is negative, far tokens weigh more.
        k, v: (B,T,C), any floating dtype.

    Returns:
        (B,T,C) in v's dtype.
    """
    dtype = compute_dtype(k.dtype)
    w, u, keys, values = (x.to(dtype) for x in (w, u, k, v))
    token = torch.arange(k.shape[1], device=k.device)
    between = (token[:, None] - token).abs() - 1  # −1 for a token and itself
    own = (between < 0)[..., None]
    exponents_TTC = torch.where(own, u, -between[..., None] * w)
    s_BTTC = exponents_TTC + keys[:, None]
    weights = (s_BTTC - s_BTTC.amax(2, keepdim=True)).exp()
    return ((weights * values[:, None]).sum(2) / weights.sum(2)).to(v.dtype)
