"""A block of Vittt with gradients on a GPU, as one node of autograd.

It launches what the operators of `fused_launches` launch, but a host pays for one node in place of twenty, and a gradient
is written where the next product reads it: none is copied to be stacked. A compiler, a transform or a mode takes the
operators; second derivatives take their formulas.

Shape suffixes: B batch, T tokens, D width, H heads, d head dimension.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.around.reference import ConvNorm, GatedLinear, GatedNorm, ScanConvs
from kernels.dispatch import no_autocast
from kernels.ttt_linear.reference import Arguments

from .fused_launches import BlockWeights, LaunchConstants, Masks, arrange, arrange_taps, run_launches


class _Kept(NamedTuple):
    """What the operators took and gave, for the way back."""

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
    """Compute a block that autograd knows as one node.

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
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # type: ignore[override]
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
        tokens, *saved = ctx.saved_tensors
        parts: list[Any] = []
        for kind in (BlockWeights, LaunchConstants, _Kept):
            parts.append(kind(*saved[: len(kind._fields)]))
            saved = saved[len(kind._fields) :]
        weights, known, kept = parts
        masks, needed = tuple(saved) or None, ctx.needs_input_grad[-1 - len(weights) :]
        with no_autocast(g.device.type):
            if torch.is_grad_enabled():  # for a second derivative, which launches do not have
                out = run_launches(tokens, arrange(weights), *ctx.settings, masks, "reference")
                wanted = [x for x, is_needed in zip((tokens, *weights), needed, strict=True) if is_needed]
                found = iter(torch.autograd.grad(out, wanted, g, create_graph=True))
                gradients: Iterable[Tensor | None] = [next(found) if is_needed else None for is_needed in needed]
            else:
                gradients = run_backward(g.contiguous(), tokens, weights, known, *ctx.settings, masks, kept)
        return None, None, None, None, *gradients


def _cast(known: LaunchConstants, dtype: torch.dtype) -> LaunchConstants:
    """The same with the weights of products in their dtype."""
    names = "in_weight", "in_bias", "up_weight", "up_bias", "out_weight", "down_weight"
    return known._replace(**{name: getattr(known, name).to(dtype) for name in names})


def run_forward(
    tokens: Tensor, known: LaunchConstants, height: int, eps: Sequence[float], masks: Masks, keep_states: bool
) -> tuple[Tensor, _Kept]:
    """The result, and what `run_backward` takes of the way to it."""
    from kernels.around import triton_fwd as around
    from kernels.ttt_linear import triton_phases as scan

    w, dtype = known, known.in_weight.dtype
    first, second = masks or (None, None)
    stream, x = torch.empty_like(tokens), torch.empty_like(tokens, dtype=dtype)
    around.write_conv_norm(_gather_conv_norm(w, tokens, height, eps[0]), stream, x)
    projected = F.linear(x, w.in_weight, w.in_bias)
    _, shared, _, rates = _split(projected, w)
    lr = torch.sigmoid(rates[..., : w.b0.shape[1]].float())
    k, q = around.scan_convs(_gather_scan_convs(w, shared)).unflatten(-1, w.b0.shape).unbind(0)
    z, states = scan.forward(_gather_scan(w, q, k, projected, lr, eps[1]), keep_states)
    y = around.gated_norm(_gather_gated_norm(w, z, projected, eps[2]))
    if first is None and stream.dtype == dtype:
        stream.flatten(0, 1).addmm_(y.flatten(0, 1), w.out_weight.T)
    else:
        stream += _mask(F.linear(y, w.out_weight), first)
    normed = around.norm(stream, w.norm2_weight, w.norm2_bias, eps[3], dtype)
    hidden = around.gated_linear(GatedLinear(normed, w.up_weight, w.up_bias))
    if second is None and stream.dtype == dtype:
        out = torch.addmm(stream.flatten(0, 1), hidden.flatten(0, 1), w.down_weight.T).view_as(tokens)
    else:
        out = stream + _mask(F.linear(hidden, w.down_weight), second)
    return out, _Kept(x, projected, k, q, lr, z, states, y, stream, normed, hidden)


def run_backward(
    g: Tensor,
    tokens: Tensor,
    weights: BlockWeights,
    known: LaunchConstants,
    height: int,
    eps: Sequence[float],
    masks: Masks,
    kept: _Kept,
) -> tuple[Tensor, ...]:
    """The gradients of the tokens and of all weights, from that of the result (B,T,D)."""
    from kernels.around import triton_bwd as around
    from kernels.ttt_linear import triton_bwd as scan

    w, (units, D), H = known, weights.gate_weight.shape, known.b0.shape[1]
    dtype, (first, second) = w.in_weight.dtype, masks or (None, None)

    d = _mask(g.to(dtype), second).flatten(0, 1)
    down, d = d.T @ kept.hidden.flatten(0, 1), (d @ w.down_weight).view_as(kept.hidden)
    d, up_weight, up_bias = around.gated_linear(d, GatedLinear(kept.normed, w.up_weight, w.up_bias))
    g, norm2 = around.sum_norm(g, d, kept.stream, w.norm2_weight, eps[3])

    d = _mask(g.to(dtype), first).flatten(0, 1)
    out_weight, d = d.T @ kept.y.flatten(0, 1), (d @ w.out_weight).view_as(kept.y)
    dprojected = torch.empty_like(kept.projected)
    dgate, dshared, dv, drates = _split(dprojected, w)
    d, post_norm = around.sum_gated_norm(d, _gather_gated_norm(w, kept.z, kept.projected, eps[2]), dgate)
    given = _gather_scan(w, kept.q, kept.k, kept.projected, kept.lr, eps[1])
    dq, dk, from_scan, dlr, *learner = scan.backward(d.view_as(kept.z), kept.states, given)
    dv.copy_(from_scan.flatten(2))
    drates.zero_()[..., :H] = torch.ops.aten.sigmoid_backward(dlr, kept.lr)
    convs = _gather_scan_convs(w, _split(kept.projected, w)[1])
    taps = around.sum_scan_convs(dk.flatten(2), dq.flatten(2), convs, dshared)

    flat = dprojected.flatten(0, 1)
    in_weight, d = flat.T @ kept.x.flatten(0, 1), (flat @ w.in_weight).view_as(kept.x)
    dtokens, grid, norm1 = around.sum_conv_norm(g, d, _gather_conv_norm(w, tokens, height, eps[0]))
    k_taps, q_taps, (k_bias, q_bias) = taps.split([4, 4, 2])
    gates, values = zip(up_weight.split(units), up_bias.split(units), strict=True)
    in_weight, rates_weight, _ = in_weight.split([5 * D, H, len(in_weight) - 5 * D - H])
    before = grid.T.view_as(weights.grid_weight), *norm1.unbind(0), in_weight, rates_weight, drates[..., :H].sum((0, 1))
    convs = k_taps.T[:, None], k_bias, q_taps.T[:, None], q_bias
    after = *post_norm.unbind(0), out_weight, *norm2.unbind(0), *gates, *values, down[:, :units], down[:, units]
    found = BlockWeights(*before, *convs, *learner, *after)
    return dtokens, *(each.to(weight.dtype) for each, weight in zip(found, weights, strict=True))


def _split(projected_BTN: Tensor, w: LaunchConstants) -> tuple[Tensor, ...]:
    """Gate, what keys and queries are made of, values, and the rest with the rates' logits first, as views."""
    (_, D), N = w.out_weight.shape, projected_BTN.shape[-1]
    return projected_BTN.split_with_sizes([D, 2 * D, 2 * D, N - 5 * D], -1)


def _gather_conv_norm(w: LaunchConstants, tokens: Tensor, height: int, eps: float) -> ConvNorm:
    return ConvNorm(tokens, w.grid_weight, w.norm1_weight, w.norm1_bias, height, eps)


def _gather_scan_convs(w: LaunchConstants, shared: Tensor) -> ScanConvs:
    return ScanConvs(shared, w.k_weight, w.k_bias, w.q_weight, w.q_bias)


def _gather_scan(w: LaunchConstants, q: Tensor, k: Tensor, projected: Tensor, lr: Tensor, eps: float) -> Arguments:
    v = _split(projected, w)[2].unflatten(-1, w.b0.shape)
    state, scale = (w.W0, w.b0, w.gamma, w.mu), w.token_scale
    return Arguments(q, k, v, lr, scale, *state, scale.shape[1], [False, True], eps)


def _gather_gated_norm(w: LaunchConstants, z: Tensor, projected: Tensor, eps: float) -> GatedNorm:
    return GatedNorm(z.flatten(3), _split(projected, w)[0], w.post_norm_weight, w.post_norm_bias, eps)


def _mask(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask
