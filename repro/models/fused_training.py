"""A block of Vittt with gradients on a GPU, as one node of autograd.

It launches the kernels of `fused_launches`, but the host pays for one node in place of twenty. Each gradient is written
where the next product reads it, so none is copied to be stacked. Compilers, transforms and modes get the operators of
`fused_launches` instead. Second derivatives are computed by the formulas of the reference. `fused_block` imports this
module only to run it, because it imports Triton.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.around import triton_bwd as around_bwd
from kernels.around import triton_fwd as around
from kernels.around.reference import ConvNorm, GatedLinear, GatedNorm, ScanConvs
from kernels.dispatch import no_autocast
from kernels.ttt_linear import triton_bwd as scan_bwd
from kernels.ttt_linear import triton_phases as scan
from kernels.ttt_linear.reference import Arguments

from .fused_launches import (
    BlockWeights,
    LaunchConstants,
    Masks,
    add_product,
    arrange,
    arrange_taps,
    gather_conv_norm,
    gather_gated_norm,
    gather_scan,
    gather_scan_convs,
    run_launches,
    run_steps,
    split,
)


class Kept(NamedTuple):
    """The tensors of the forward pass that the backward pass reads.

    Attributes:
        x, normed: (B,T,D), the outputs of the norms before the mixer and before the MLP.
        projected: (B,T,5D+P), the mixer's projection.
        k, q, z: (B,T,2,H,d), the learner's keys, queries and output.
        lr: (B,T,H), the learning rates.
        states: the learner's states, see `kernels.ttt_linear.triton_fwd.states_shape`.
        y: (B,T,D), the input of the output projection.
        stream: (B,T,D), the input of norm2.
        hidden: (B,T,F+8), SwiGLU's hidden units and columns of ones.
    """

    x: Tensor
    projected: Tensor
    k: Tensor
    q: Tensor
    lr: Tensor
    z: Tensor
    states: Tensor
    y: Tensor
    stream: Tensor
    normed: Tensor
    hidden: Tensor


def run_node(
    tokens_BTD: Tensor, weights: BlockWeights, height: int, eps: Sequence[float], dtype: torch.dtype, masks: Masks
) -> Tensor:
    """Compute a block as one node of autograd.

    Args:
        tokens_BTD: the stream.
        weights: of the block.
        height: rows of the grid.
        eps: of norm1, the learner, post_norm and norm2.
        dtype: of the products: the stream's own, or that of autocast.
        masks: see `run_launches`.

    Returns:
        (B,T,D) in the stream's dtype.
    """
    return _Node.apply(height, eps, dtype, masks, tokens_BTD.contiguous(), *weights)


class _Node(torch.autograd.Function):
    """The node of `run_node`, whose arguments are (height, eps, dtype, masks, tokens, *weights)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # type: ignore[override]
        """Return the block's result; save what `backward` reads if any argument wants a gradient."""
        count = len(BlockWeights._fields)
        height, eps, dtype, masks, tokens = given[:-count]
        weights, keep = BlockWeights(*given[-count:]), any(ctx.needs_input_grad)
        with no_autocast(tokens.device.type):
            known = _cast(arrange_taps(arrange(weights)), dtype)
            out, kept = run_forward(tokens, known, height, eps, masks, keep)
        if keep:
            ctx.settings = height, eps
            ctx.save_for_backward(tokens, *weights, *known, *kept, *(masks or ()))
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return a gradient for each argument of `forward`: None for the four that are no tensors."""
        tokens, *saved = ctx.saved_tensors
        parts: list[Any] = []
        for kind in (BlockWeights, LaunchConstants, Kept):
            parts.append(kind(*saved[: len(kind._fields)]))
            saved = saved[len(kind._fields) :]
        weights, known, kept = parts
        masks, needed = tuple(saved) or None, ctx.needs_input_grad[-1 - len(weights) :]
        with no_autocast(g.device.type):
            if torch.is_grad_enabled():  # for a second derivative, which the launches do not have
                out = run_launches(tokens, arrange(weights), *ctx.settings, masks, "reference")
                wanted = [x for x, is_needed in zip((tokens, *weights), needed, strict=True) if is_needed]
                found = iter(torch.autograd.grad(out, wanted, g, create_graph=True))
                gradients: Iterable[Tensor | None] = [next(found) if is_needed else None for is_needed in needed]
            else:
                gradients = run_backward(g.contiguous(), tokens, weights, known, *ctx.settings, masks, kept)
        return None, None, None, None, *gradients


def _cast(known: LaunchConstants, dtype: torch.dtype) -> LaunchConstants:
    """Cast the weights of the products to a dtype, and leave the others as they are."""
    names = "in_weight", "in_bias", "up_weight", "up_bias", "out_weight", "down_weight"
    return known._replace(**{name: getattr(known, name).to(dtype) for name in names})


def run_forward(
    tokens: Tensor, known: LaunchConstants, height: int, eps: Sequence[float], masks: Masks, keep_states: bool
) -> tuple[Tensor, Kept]:
    """Return a block's result (B,T,D), and the tensors for `run_backward`, which needs `keep_states`."""
    steps = _Launches(known.in_weight.dtype, keep_states)
    out = run_steps(steps, tokens, known, height, eps, masks)
    return out, Kept(**steps.kept)


class _Launches:
    """The steps of `fused_launches.Operators` as plain launches, which keep their tensors for the backward pass.

    `Operators` documents each step. `kept` collects the fields of `Kept` in the order of the steps.
    """

    def __init__(self, dtype: torch.dtype, keep_states: bool):
        self.dtype, self.keep_states = dtype, keep_states
        self.kept: dict[str, Tensor] = {}

    def conv_norm(self, given: ConvNorm) -> tuple[Tensor, Tensor]:
        stream, x = torch.empty_like(given.tokens), torch.empty_like(given.tokens, dtype=self.dtype)
        around.write_conv_norm(given, stream, x)
        self.kept["x"] = x
        return stream, x

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        self.kept["projected"] = projected = F.linear(x, weight, bias)
        return projected

    def scan_convs(self, given: ScanConvs) -> Tensor:
        return around.scan_convs(given)

    def scan(self, given: Arguments) -> Tensor:
        z, states = scan.forward(given, self.keep_states)
        self.kept |= {"q": given.q, "k": given.k, "lr": given.lr, "z": z, "states": states}
        return z

    def gated_norm(self, given: GatedNorm) -> Tensor:
        self.kept["y"] = y = around.gated_norm(given)
        return y

    def norm(self, stream: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        normed = around.norm(stream, weight, bias, eps, dtype)
        self.kept |= {"stream": stream, "normed": normed}
        return normed

    def gated_linear(self, given: GatedLinear) -> Tensor:
        self.kept["hidden"] = hidden = around.gated_linear(given)
        return hidden

    def add_product(self, stream: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
        # the second sum is a new tensor, because norm2's backward pass reads the stream before it
        return add_product(stream, x, weight, mask, in_place="stream" not in self.kept)


def run_backward(
    g: Tensor,
    tokens: Tensor,
    weights: BlockWeights,
    known: LaunchConstants,
    height: int,
    eps: Sequence[float],
    masks: Masks,
    kept: Kept,
) -> tuple[Tensor, ...]:
    """Return the gradients of the tokens and of all `BlockWeights`, from the gradient g (B,T,D) of the result.

    The steps of `run_forward` backwards: SwiGLU and norm2, then output projection and post_norm, learner, causal
    convolutions, input projection, norm1 and convolution. `g` is the stream's gradient, and `d` that of the branch.
    """
    w, (units, D), H = known, weights.gate_weight.shape, known.b0.shape[1]
    dtype, (first, second) = w.in_weight.dtype, masks or (None, None)

    d = _mask(g.to(dtype), second).flatten(0, 1)
    down, d = d.T @ kept.hidden.flatten(0, 1), (d @ w.down_weight).view_as(kept.hidden)
    d, up_weight, up_bias = around_bwd.gated_linear(d, GatedLinear(kept.normed, w.up_weight, w.up_bias))
    g, norm2 = around_bwd.sum_norm(g, d, kept.stream, w.norm2_weight, eps[3])

    d = _mask(g.to(dtype), first).flatten(0, 1)
    out_weight, d = d.T @ kept.y.flatten(0, 1), (d @ w.out_weight).view_as(kept.y)
    dprojected = torch.empty_like(kept.projected)  # filled by the steps below, each of which writes to its view
    dgate, dshared, dv, drates = split(w, dprojected)
    d, post_norm = around_bwd.sum_gated_norm(d, gather_gated_norm(w, kept.z, kept.projected, eps[2]), dgate)
    given = gather_scan(w, kept.q, kept.k, kept.projected, kept.lr, eps[1])
    dq, dk, from_scan, dlr, *learner = scan_bwd.backward(d.view_as(kept.z), kept.states, given)
    dv.copy_(from_scan.flatten(2))
    # the columns after the H rates belong to the weight's rows of zeros; what is in this memory could be NaN
    drates.zero_()[..., :H] = torch.ops.aten.sigmoid_backward(dlr, kept.lr)
    convs = gather_scan_convs(w, split(w, kept.projected)[1])
    taps = around_bwd.sum_scan_convs(dk.flatten(2), dq.flatten(2), convs, dshared)

    flat = dprojected.flatten(0, 1)
    in_weight, d = flat.T @ kept.x.flatten(0, 1), (flat @ w.in_weight).view_as(kept.x)
    dtokens, grid, norm1 = around_bwd.sum_conv_norm(g, d, gather_conv_norm(w, tokens, height, eps[0]))
    k_taps, q_taps, (k_bias, q_bias) = taps.split([4, 4, 2])
    # `arrange` joined these weights, so their gradients are split at the same places
    gates, values = zip(up_weight.split(units), up_bias.split(units), strict=True)
    in_weight, rates_weight, _ = in_weight.split([5 * D, H, len(in_weight) - 5 * D - H])
    before = grid.T.view_as(weights.grid_weight), *norm1.unbind(0), in_weight, rates_weight, drates[..., :H].sum((0, 1))
    convs = k_taps.T[:, None], k_bias, q_taps.T[:, None], q_bias
    after = *post_norm.unbind(0), out_weight, *norm2.unbind(0), *gates, *values, down[:, :units], down[:, units]
    found = BlockWeights(*before, *convs, *learner, *after)
    return dtokens, *(each.to(weight.dtype) for each, weight in zip(found, weights, strict=True))


def _mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Multiply a branch's gradient (B,T,D) by the factors (B,1,1) of stochastic depth, if there are any."""
    return x if mask is None else x * mask
