"""A block of Vittt on a GPU by some ten launches; for inference also one operator, `vision_ttt::vittt_block_launches`.

It knows no layers: `fused_block` makes what it takes, and says when it runs.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.around.op import CONV_NORM, GATED_LINEAR, GATED_NORM, SCAN_CONVS
from kernels.around.reference import ONES, ConvNorm, GatedLinear, GatedNorm, ScanConvs
from kernels.custom_op import may_be_opaque
from kernels.ttt_linear.op import CUSTOM_OP as TTT_LINEAR
from kernels.ttt_linear.reference import Arguments

from .block_operator import define_operator

_BACKEND = "triton"


class LaunchConstants(NamedTuple):
    """What the launches take of a block's weights, each made once for these weights.

    in_weight (5D+P,D) and in_bias (5D+P,): rows of gate, keys, values and learning rates, and zeros up to a multiple of
    d; token_scale (2,chunk_size), with the base of the learning rates; up_weight (2F,D), up_bias (2F,): of SwiGLU;
    down_weight (D,F+8): with its bias in the first of the further columns; W0, b0, gamma, mu: of
    both directions, in fp32; grid_weight (D,3,3), k_weight and q_weight (2D,4): of the convolutions, which `freeze` lays
    out as their kernels read them; the others as the layers have them, out_weight (D,D) that of `out_proj`.
    """

    in_weight: Tensor
    in_bias: Tensor
    token_scale: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    W0: Tensor
    b0: Tensor
    gamma: Tensor
    mu: Tensor
    grid_weight: Tensor
    k_weight: Tensor
    q_weight: Tensor
    k_bias: Tensor
    q_bias: Tensor
    norm1_weight: Tensor
    norm1_bias: Tensor
    post_norm_weight: Tensor
    post_norm_bias: Tensor
    out_weight: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor


def run_launches(
    tokens_BTD: Tensor,
    constants: Sequence[Tensor],
    height: int,
    eps: Sequence[float],
    drop_path: nn.Module | None = None,
) -> Tensor:
    """Compute a block of tokens (B,T,D) by its `LaunchConstants` and the eps of norm1, learner, post_norm and norm2.

    The operators get what was made for them, unchecked: checks take a host as long as the launches. `drop_path` drops
    branches of samples, in training.
    """
    known, (eps1, learner_eps, post_eps, eps2) = LaunchConstants(*constants), eps
    given = ConvNorm(tokens_BTD, known.grid_weight, known.norm1_weight, known.norm1_bias, height, eps1)
    stream, x = CONV_NORM(given, _BACKEND).unbind(0)
    y = _mix(known, x, learner_eps, post_eps)
    stream = _add_product(stream, y, known.out_weight, drop_path)
    del y
    x = _normalise(known, stream, x.dtype, eps2)
    hidden = GATED_LINEAR(GatedLinear(x, known.up_weight, known.up_bias), _BACKEND)
    return _add_product(stream, hidden, known.down_weight, drop_path)


def _mix(known: LaunchConstants, x_BTD: Tensor, eps: float, post_eps: float) -> Tensor:
    """What the mixer's output projection gets. Its intermediate results, most of a block's memory, end with it."""
    D = x_BTD.shape[-1]
    projected = F.linear(x_BTD, known.in_weight, known.in_bias)
    gate, shared, v, rates = projected.split([D, 2 * D, 2 * D, projected.shape[-1] - 5 * D], -1)
    z = _scan(known, shared, v, rates, eps).flatten(3)
    return GATED_NORM(GatedNorm(z, gate, known.post_norm_weight, known.post_norm_bias, post_eps), _BACKEND)


def _scan(known: LaunchConstants, shared: Tensor, v: Tensor, rates: Tensor, eps: float) -> Tensor:
    """(B,T,2,H,d), of what keys and queries are made of and v, both (B,T,2D), and the rates' logits (B,T,H or more)."""
    (_, H, d), scale = known.b0.shape, known.token_scale
    state = known.W0, known.b0, known.gamma, known.mu
    taps = known.k_weight, known.k_bias, known.q_weight, known.q_bias
    k, q = SCAN_CONVS(ScanConvs(shared, *taps), _BACKEND).unbind(0)
    q, k, v = (each.unflatten(-1, (2, H, d)) for each in (q, k, v))
    lr = torch.sigmoid(rates[..., :H].float())
    return TTT_LINEAR(Arguments(q, k, v, lr, scale, *state, scale.shape[1], [False, True], eps), _BACKEND)


def _add_product(stream_BTD: Tensor, x: Tensor, weight: Tensor, drop_path: nn.Module | None) -> Tensor:
    """stream + x Wᵀ: in one launch, in place, where no gradient is wanted.

    Else it is a copy and a product. It is a product and a sum where samples drop the branch, and where the stream is of
    a higher precision.
    """
    if drop_path is not None or x.dtype != stream_BTD.dtype or x.dtype != weight.dtype:
        product = F.linear(x, weight)
        return stream_BTD + (product if drop_path is None else drop_path(product))
    rows = stream_BTD.flatten(0, 1)
    add = torch.addmm if torch.is_grad_enabled() else Tensor.addmm_
    return add(rows, x.flatten(0, 1), weight.T).view_as(stream_BTD)


def _normalise(known: LaunchConstants, tokens_BTD: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """LayerNorm in the dtype of the products."""
    weight, bias = known.norm2_weight, known.norm2_bias
    if torch.compiler.is_compiling() or not may_be_opaque([tokens_BTD]):
        return F.layer_norm(tokens_BTD, weight.shape, weight, bias, eps).to(dtype)
    from kernels.around.triton_fwd import norm

    return norm(tokens_BTD, weight, bias, eps, dtype)


def _measure(shapes: list[Any]) -> tuple[int, int, int]:
    known = LaunchConstants(*shapes)
    return known.b0[1], known.token_scale[1], known.down_weight[1] - ONES


OPERATOR = define_operator("vittt_block_launches", run_launches, _measure)
