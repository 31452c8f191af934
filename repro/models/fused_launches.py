"""A block of Vittt on a GPU by some ten launches; for inference also one operator, `vision_ttt::vittt_block_launches`.

The module works on tensors alone. `fused_block` arranges the weights of the layers, and decides when the launches run.

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

# for each branch the factors (B,1,1) of its samples, in the products' dtype; None if no sample is dropped
Masks = tuple[Tensor, Tensor] | None


class BlockWeights(NamedTuple):
    """The weights of a block, in the shapes of its layers.

    grid_weight (D,1,3,3), in_weight (5D,D), rates_weight (H,D), k_weight and q_weight (2D,1,4), out_weight (D,D);
    gate_weight and value_weight (F,D) of SwiGLU, down_weight (D,F). Some differ from the layers: token_scale
    (2,chunk_size) includes the base of the learning rates, and W0 (2,H,d,d), b0, gamma and mu (2,H,d) have both
    directions.
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
    """The weights of a block as the launches read them, made from its `BlockWeights`.

    Attributes:
        in_weight, in_bias: (5D+P,D) and (5D+P,): rows of gate, keys, values and learning rates, then zeros up to a
            multiple of d.
        token_scale: (2,chunk_size), multiplied by the base of the learning rates.
        up_weight, up_bias: (2F,D) and (2F,): both input layers of SwiGLU.
        down_weight: (D,F+8), with the bias in column F and zeros after it.
        W0, b0, gamma, mu: of both directions, in fp32.
        grid_weight, k_weight, q_weight: (D,3,3), (2D,4) and (2D,4), of the convolutions. `arrange_taps` lays them out
            as their kernels read them.

    The others are as the layers have them; out_weight (D,D) is that of `out_proj`.
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


def join_projections(w: BlockWeights, multiple: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join the layers that read the same input: `in_weight`, `in_bias`, `up_weight` and `up_bias` of the constants.

    The projection to gate, keys, values and learning rates gets rows of zeros up to a multiple. `in_proj` has no bias,
    so its rows get a bias of zero.
    """
    missing = -(len(w.in_weight) + len(w.rates_weight)) % multiple
    in_weight = F.pad(torch.cat([w.in_weight, w.rates_weight]), (0, 0, 0, missing))
    in_bias = F.pad(w.rates_bias, (len(w.in_weight), missing))
    up_weight, up_bias = torch.cat([w.gate_weight, w.value_weight]), torch.cat([w.gate_bias, w.value_bias])
    return in_weight, in_bias, up_weight, up_bias


def arrange(weights: BlockWeights) -> LaunchConstants:
    """Arrange a block's weights for the launches, by operations that autograd can follow."""
    w = weights
    in_weight, in_bias, up_weight, up_bias = join_projections(w, w.b0.shape[-1])
    # SwiGLU's hidden units end with columns of ones: the product with the first of them adds the bias
    down_weight = F.pad(torch.cat([w.down_weight, w.down_bias[:, None]], 1), (0, ONES - 1))
    state = (each.float().contiguous() for each in (w.W0, w.b0, w.gamma, w.mu))
    taps = (each.squeeze(1) for each in (w.grid_weight, w.k_weight, w.q_weight))
    made = in_weight, in_bias, w.token_scale, up_weight, up_bias, down_weight, *state, *taps
    norms = w.norm1_weight, w.norm1_bias, w.post_norm_weight, w.post_norm_bias
    return LaunchConstants(*made, w.k_bias, w.q_bias, *norms, w.out_weight, w.norm2_weight, w.norm2_bias)


def arrange_taps(known: LaunchConstants) -> LaunchConstants:
    """Lay out the weights of the convolutions in memory as their kernels read them: the channels of a tap together.

    Shapes and values stay; only strides change. The launches take either layout, but copy another one at each call.
    """
    grid = known.grid_weight.flatten(1).T.contiguous().T.unflatten(1, (3, 3))
    k, q = torch.stack([known.k_weight.T, known.q_weight.T]).mT
    return known._replace(grid_weight=grid, k_weight=k, q_weight=q)


class Operators(NamedTuple):
    """The steps of a block as operators, which autograd, compilers and transforms can follow.

    `fused_training` has the same steps as plain launches that keep their tensors; `run_steps` takes either.
    """

    backend: str

    def conv_norm(self, given: ConvNorm) -> tuple[Tensor, Tensor]:
        """Return the stream and its norm, both (B,T,D)."""
        stream, x = CONV_NORM(given, self.backend).unbind(0)
        return stream, x

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return gate, sources of keys and queries, values and learning rates (B,T,5D+P), see `split`."""
        return F.linear(x, weight, bias)

    def scan_convs(self, given: ScanConvs) -> Tensor:
        """Return keys and queries, (2,B,T,2D)."""
        return SCAN_CONVS(given, self.backend)

    def scan(self, given: Arguments) -> Tensor:
        """Return the learner's output (B,T,2,H,d)."""
        return TTT_LINEAR(given, self.backend)

    def gated_norm(self, given: GatedNorm) -> Tensor:
        """Return the input of the output projection (B,T,D)."""
        return GATED_NORM(given, self.backend)

    def norm(self, stream: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Return the LayerNorm of the stream (B,T,D) in the dtype of the products.

        Without gradients this launches Triton whatever the backend, so only a block that runs on Triton may call it then.
        """
        if torch.compiler.is_compiling() or not may_be_opaque([stream]):
            return F.layer_norm(stream, weight.shape, weight, bias, eps).to(dtype)
        from kernels.around.triton_fwd import norm

        return norm(stream, weight, bias, eps, dtype)

    def gated_linear(self, given: GatedLinear) -> Tensor:
        """Return SwiGLU's hidden units, and columns of ones (B,T,F+8)."""
        return GATED_LINEAR(given, self.backend)

    def add_product(self, stream: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
        """Return stream + mask · x Wᵀ, written to the stream if no gradient is wanted."""
        return add_product(stream, x, weight, mask, in_place=not torch.is_grad_enabled())


def add_product(stream: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None, in_place: bool) -> Tensor:
    """Return stream + mask · x Wᵀ (B,T,D).

    This is one launch, which writes to the stream if `in_place`. If there is a mask, or the dtypes differ, it is a
    product and a sum, which write to a new tensor.
    """
    if mask is not None or x.dtype != stream.dtype or x.dtype != weight.dtype:
        product = F.linear(x, weight)
        return stream + (product if mask is None else product * mask)
    add = Tensor.addmm_ if in_place else torch.addmm
    return add(stream.flatten(0, 1), x.flatten(0, 1), weight.T).view_as(stream)


def run_launches(
    tokens_BTD: Tensor,
    constants: Sequence[Tensor],
    height: int,
    eps: Sequence[float],
    masks: Masks = None,
    backend: str = "triton",
) -> Tensor:
    """Compute a block of tokens (B,T,D) by its `LaunchConstants` and the eps of norm1, learner, post_norm and norm2.

    The operators do not check these arguments, because checks would take the host as long as the launches.
    """
    return run_steps(Operators(backend), tokens_BTD, LaunchConstants(*constants), height, eps, masks)


def run_steps(
    steps: Any, tokens_BTD: Tensor, known: LaunchConstants, height: int, eps: Sequence[float], masks: Masks
) -> Tensor:
    """Compute a block like `run_launches`, where `steps` has the methods of `Operators`."""
    (eps1, learner_eps, post_eps, eps2), (first, second) = eps, masks or (None, None)
    stream, x = steps.conv_norm(gather_conv_norm(known, tokens_BTD, height, eps1))
    y = _mix(steps, known, x, learner_eps, post_eps)
    stream = steps.add_product(stream, y, known.out_weight, first)
    del y
    x = steps.norm(stream, known.norm2_weight, known.norm2_bias, eps2, x.dtype)
    hidden = steps.gated_linear(GatedLinear(x, known.up_weight, known.up_bias))
    return steps.add_product(stream, hidden, known.down_weight, second)


def _mix(steps: Any, known: LaunchConstants, x_BTD: Tensor, eps: float, post_eps: float) -> Tensor:
    """Return the input of the output projection.

    It is a function so that its intermediate results, most of a block's memory, are freed when it returns: the steps
    after it need as much again.
    """
    projected = steps.project(x_BTD, known.in_weight, known.in_bias)
    z = _scan(steps, known, projected, eps)
    return steps.gated_norm(gather_gated_norm(known, z, projected, post_eps))


def _scan(steps: Any, known: LaunchConstants, projected: Tensor, eps: float) -> Tensor:
    """Return the learner's output (B,T,2,H,d); a function for the same reason as `_mix`."""
    _, shared, _, rates = split(known, projected)
    lr = torch.sigmoid(rates[..., : known.b0.shape[1]].float())
    k, q = steps.scan_convs(gather_scan_convs(known, shared)).unflatten(-1, known.b0.shape).unbind(0)
    return steps.scan(gather_scan(known, q, k, projected, lr, eps))


def split(known: LaunchConstants, projected: Tensor) -> tuple[Tensor, ...]:
    """Split the projection (B,T,5D+P) into views.

    These are the gate (B,T,D), the source of keys and queries (B,T,2D), the values (B,T,2D), and the rest (B,T,P),
    whose first H columns are the logits of the learning rates.
    """
    D, N = known.out_weight.shape[0], projected.shape[-1]
    return projected.split_with_sizes([D, 2 * D, 2 * D, N - 5 * D], -1)


def gather_conv_norm(known: LaunchConstants, tokens: Tensor, height: int, eps: float) -> ConvNorm:
    """Collect the arguments of the convolution and norm1, for tokens (B,T,D) on a grid of `height` rows.

    The backward pass of `fused_training` takes the results of this function and of the next three, too.
    """
    return ConvNorm(tokens, known.grid_weight, known.norm1_weight, known.norm1_bias, height, eps)


def gather_scan_convs(known: LaunchConstants, shared: Tensor) -> ScanConvs:
    """Collect the arguments of the causal convolutions, which read the same source (B,T,2D) for keys and queries."""
    return ScanConvs(shared, known.k_weight, known.k_bias, known.q_weight, known.q_bias)


def gather_scan(known: LaunchConstants, q: Tensor, k: Tensor, projected: Tensor, lr: Tensor, eps: float) -> Arguments:
    """Collect the learner's arguments: q and k (B,T,2,H,d), v from the projection, and rates `lr` (B,T,H)."""
    v = split(known, projected)[2].unflatten(-1, known.b0.shape)
    state, scale = (known.W0, known.b0, known.gamma, known.mu), known.token_scale
    return Arguments(q, k, v, lr, scale, *state, scale.shape[1], [False, True], eps)


def gather_gated_norm(known: LaunchConstants, z: Tensor, projected: Tensor, eps: float) -> GatedNorm:
    """Collect the arguments of post_norm and gate: z (B,T,2,H,d), and the gate from the projection."""
    return GatedNorm(z.flatten(3), split(known, projected)[0], known.post_norm_weight, known.post_norm_bias, eps)


def _measure(shapes: list[Any]) -> tuple[int, int, int]:
    """Return heads, chunk size and hidden units by the shapes of `LaunchConstants`; see `define_operator`."""
    known = LaunchConstants(*shapes)
    return known.b0[1], known.token_scale[1], known.down_weight[1] - ONES


OPERATOR = define_operator("vittt_block_launches", run_launches, _measure)
