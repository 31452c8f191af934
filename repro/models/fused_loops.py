"""A block of Vittt on CPUs by numba loops, for inference: the operator `vision_ttt::vittt_block_loops`.

The module works on tensors alone. `fused_block` arranges the weights of the layers, and decides when the loops run.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.threads import lay_flat
from kernels.ttt_linear.reference import states_shape

from .block_operator import define_operator

ALIGNED = 16  # numbers; a product on a CPU takes half as long again if the length of its rows is no multiple
_ROWS = 512  # tokens per step after the scan, few enough to keep the hidden units in the cache


class LoopConstants(NamedTuple):
    """The weights of a block in the layouts of the numba loops.

    Attributes:
        in_weight, in_bias: (5D+P,D) and (5D+P,): gate, keys, values and learning rates, with P rows up to a multiple of
            `ALIGNED`: the learning rates' H, then zeros.
        token_scale: (2,chunk_size), multiplied by the base of the learning rates.
        up_weight, up_bias: (2F,D) and (2F,): both input layers of SwiGLU.
        inner_weight, inner_bias: (2,H,d): γ and μ of the inner LayerNorm.
        state, taps, tap_biases, grid_taps: (2,H,d+1,d), (2,2,H,4,d), (2,2,H,d) and (3,3,D), as the modules of the loops
            lay them out.
        out_weight: (D,D), of `out_proj`.
        down_weight, down_bias: (D,F) and (D,), of SwiGLU's `fc2`.

    The norms are as the layers have them, (D,). The weights and biases of `PRODUCTS` have the model's dtype; what the
    loops read has their compute dtype, which is fp32 for a model in bf16 or fp16.
    """

    in_weight: Tensor
    in_bias: Tensor
    token_scale: Tensor
    up_weight: Tensor
    up_bias: Tensor
    inner_weight: Tensor
    inner_bias: Tensor
    state: Tensor
    taps: Tensor
    tap_biases: Tensor
    grid_taps: Tensor
    norm1_weight: Tensor
    norm1_bias: Tensor
    post_norm_weight: Tensor
    post_norm_bias: Tensor
    out_weight: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor


# the constants that matrix products read, which stay in the model's dtype
PRODUCTS = "in_weight", "in_bias", "up_weight", "up_bias", "out_weight", "down_weight", "down_bias"


def run_loops(tokens_BTD: Tensor, constants: list[Tensor], height: int, eps: list[float]) -> Tensor:
    """Compute a block for tokens (B,T,D) on a grid of `height` rows: (B,T,D).

    `constants` are the fields of `LoopConstants`; `eps` are those of norm1, the learner, post_norm and norm2. The
    output projection and SwiGLU run on a few tokens at a time, so that the hidden units stay in the cache. In a bf16 or
    fp16 model only the products have that dtype, and the stream within the block is in fp32.
    """
    from kernels.around import numba_path as around
    from kernels.ttt_linear import numba_path as learner

    known, (eps1, learner_eps, post_eps, eps2) = LoopConstants(*constants), eps
    (B, T, D), (_, H, _, d) = tokens_BTD.shape, known.state.shape
    dtype, wide = known.in_weight.dtype, known.state.dtype
    norm1 = known.grid_taps, known.norm1_weight, known.norm1_bias
    stream, x = around.run_conv_norm(tokens_BTD.to(wide).contiguous(), *norm1, height, eps1).unbind(0)
    projected = F.linear(x.to(dtype), known.in_weight, known.in_bias).to(wide)
    gate, shared, v, rates, _ = projected.split([D, 2 * D, 2 * D, H, projected.shape[-1] - 5 * D - H], -1)
    shared, v = (lay_flat(each.unflatten(-1, (2, H, d))) for each in (shared, v))
    rate, state = torch.sigmoid(rates).contiguous(), (known.state, known.inner_weight, known.inner_bias)
    given = shared, shared, v, rate, known.token_scale, *state, known.taps, known.tap_biases
    options = learner.find_options(T, known.token_scale.shape[1], (False, True), known.state, learner_eps)
    z, _ = learner.run_learn(given, options, (B, T, 2, H, d), states_shape((B, T, 2, H, d), 1, False))
    y = around.run_gated_norm(z.flatten(3), gate, known.post_norm_weight, known.post_norm_bias, post_eps)
    for tokens, part in zip(stream.flatten(0, 1).split(_ROWS), y.flatten(0, 1).split(_ROWS), strict=True):
        if dtype == wide:
            tokens.addmm_(part, known.out_weight.T)
        else:
            tokens += F.linear(part.to(dtype), known.out_weight)
        x = F.layer_norm(tokens, (D,), known.norm2_weight, known.norm2_bias, eps2).to(dtype)
        hidden, linear = F.linear(x, known.up_weight, known.up_bias).chunk(2, -1)
        tokens += F.linear(F.silu(hidden, inplace=True).mul_(linear), known.down_weight, known.down_bias)
    return stream.to(tokens_BTD.dtype)


def _measure(shapes: list[Any]) -> tuple[int, int, int]:
    """Return heads, chunk size and hidden units by the shapes of `LoopConstants`; see `define_operator`."""
    known = LoopConstants(*shapes)
    return known.state[1], known.token_scale[1], known.down_weight[1]


OPERATOR = define_operator("vittt_block_loops", run_loops, _measure)
