"""A block of Vittt on a GPU by some ten launches; for inference also one operator, `vision_ttt::vittt_block_launches`.

It knows no layers: `fused_block` makes what it takes, and says when it runs.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.around.op import CONV_NORM, GATED_LINEAR, GATED_NORM, SCAN_CONVS
from kernels.around.reference import ONES, ConvNorm, GatedLinear, GatedNorm, ScanConvs
from kernels.custom_op import may_be_opaque
from kernels.ttt_linear.op import CUSTOM_OP as TTT_LINEAR
from kernels.ttt_linear.reference import Arguments

from .block_operator import define_operator

# for each branch (B,1,1) what its samples are multiplied by, in the products' dtype; None where none is dropped
Masks = tuple[Tensor, Tensor] | None


class BlockWeights(NamedTuple):
    """A block's weights as its layers have them.

    grid_weight (D,1,3,3), in_weight (5D,D), rates_weight (H,D), k_weight and q_weight (2D,1,4), out_weight (D,D);
    gate_weight and value_weight (F,D) of SwiGLU, down_weight (D,F). But for token_scale (2,chunk_size), with the base of
    the learning rates, and W0 (2,H,d,d), b0, gamma, mu (2,H,d), in which both directions have their own.
    """

    grid_weight: Tensor
    norm1_weight: Tensor
    norm1_bias: Tensor
    in_weight: Tensor
    rates_weight: Tensor
    rates_bias: Tensor
    k_weight: Tensor
    k_bias: Tensor
    q_weight: Tensor
    q_bias: Tensor
    token_scale: Tensor
    W0: Tensor
    b0: Tensor
    gamma: Tensor
    mu: Tensor
    post_norm_weight: Tensor
    post_norm_bias: Tensor
    out_weight: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    gate_weight: Tensor
    gate_bias: Tensor
    value_weight: Tensor
    value_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor


class LaunchConstants(NamedTuple):
    """What the launches take of a block's `BlockWeights`, each made once for these.

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


def arrange(weights: BlockWeights) -> LaunchConstants:
    """Make what the launches take."""
    w, missing = weights, -(len(weights.in_weight) + len(weights.rates_weight)) % weights.b0.shape[-1]
    in_weight = F.pad(torch.cat([w.in_weight, w.rates_weight]), (0, 0, 0, missing))
    in_bias = F.pad(w.rates_bias, (len(w.in_weight), missing))
    up_weight, up_bias = torch.cat([w.gate_weight, w.value_weight]), torch.cat([w.gate_bias, w.value_bias])
    down_weight = F.pad(torch.cat([w.down_weight, w.down_bias[:, None]], 1), (0, ONES - 1))
    state = (each.float().contiguous() for each in (w.W0, w.b0, w.gamma, w.mu))
    taps = (each.squeeze(1) for each in (w.grid_weight, w.k_weight, w.q_weight))
    made = in_weight, in_bias, w.token_scale, up_weight, up_bias, down_weight, *state, *taps
    norms = w.norm1_weight, w.norm1_bias, w.post_norm_weight, w.post_norm_bias
    return LaunchConstants(*made, w.k_bias, w.q_bias, *norms, w.out_weight, w.norm2_weight, w.norm2_bias)


def arrange_taps(known: LaunchConstants) -> LaunchConstants:
    """The same with the weights of the convolutions as their kernels read them."""
    grid = known.grid_weight.flatten(1).T.contiguous().T.unflatten(1, (3, 3))
    k, q = torch.stack([known.k_weight.T, known.q_weight.T]).mT
    return known._replace(grid_weight=grid, k_weight=k, q_weight=q)


def run_launches(
    tokens_BTD: Tensor,
    constants: Sequence[Tensor],
    height: int,
    eps: Sequence[float],
    masks: Masks = None,
    backend: str = "triton",
) -> Tensor:
    """Compute a block of tokens (B,T,D) by its `LaunchConstants` and the eps of norm1, learner, post_norm and norm2.

    The operators get what was made for them, unchecked: checks take a host as long as the launches.
    """
    known, (eps1, learner_eps, post_eps, eps2) = LaunchConstants(*constants), eps
    first, second = masks or (None, None)
    given = ConvNorm(tokens_BTD, known.grid_weight, known.norm1_weight, known.norm1_bias, height, eps1)
    stream, x = CONV_NORM(given, backend).unbind(0)
    y = _mix(known, x, learner_eps, post_eps, backend)
    stream = _add_product(stream, y, known.out_weight, first)
    del y
    x = _normalise(known, stream, x.dtype, eps2)
    hidden = GATED_LINEAR(GatedLinear(x, known.up_weight, known.up_bias), backend)
    return _add_product(stream, hidden, known.down_weight, second)


def _mix(known: LaunchConstants, x_BTD: Tensor, eps: float, post_eps: float, backend: str) -> Tensor:
    """What the mixer's output projection gets. Its intermediate results, most of a block's memory, end with it."""
    D = x_BTD.shape[-1]
    projected = F.linear(x_BTD, known.in_weight, known.in_bias)
    gate, shared, v, rates = projected.split([D, 2 * D, 2 * D, projected.shape[-1] - 5 * D], -1)
    z = _scan(known, shared, v, rates, eps, backend).flatten(3)
    return GATED_NORM(GatedNorm(z, gate, known.post_norm_weight, known.post_norm_bias, post_eps), backend)


def _scan(known: LaunchConstants, shared: Tensor, v: Tensor, rates: Tensor, eps: float, backend: str) -> Tensor:
    """(B,T,2,H,d), of what keys and queries are made of and v, both (B,T,2D), and the rates' logits (B,T,H or more)."""
    (_, H, d), scale = known.b0.shape, known.token_scale
    state = known.W0, known.b0, known.gamma, known.mu
    taps = known.k_weight, known.k_bias, known.q_weight, known.q_bias
    k, q = SCAN_CONVS(ScanConvs(shared, *taps), backend).unbind(0)
    q, k, v = (each.unflatten(-1, (2, H, d)) for each in (q, k, v))
    lr = torch.sigmoid(rates[..., :H].float())
    return TTT_LINEAR(Arguments(q, k, v, lr, scale, *state, scale.shape[1], [False, True], eps), backend)


def _add_product(stream_BTD: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    """stream + x Wᵀ: in one launch, in place, where no gradient is wanted.

    Else it is a copy and a product. It is a product and a sum where samples drop the branch, and where the stream is of
    a higher precision.
    """
    if mask is not None or x.dtype != stream_BTD.dtype or x.dtype != weight.dtype:
        product = F.linear(x, weight)
        return stream_BTD + (product if mask is None else product * mask)
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
