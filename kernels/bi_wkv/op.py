"""The public op Bi-WKV: argument checks, backends, autograd, FLOP count.

The fast backends are one operator with a fake kernel, a backward that is an operator itself, and FLOP formulas, so that
torch.compile(fullgraph=True), inference mode, autocast, checkpointing and FlopCounterMode see one opaque operation. The Triton
files, and Triton with them, are imported nowhere else. The reference backend is plain operations under autograd.

Shape letters: B images, T tokens, C channels.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import dispatch
from . import torch_path
from .reference import bi_wkv_formula


def bi_wkv(w: Tensor, u: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto") -> Tensor:
    """The bidirectional token mixing of Vision-RWKV: a softmax over all tokens, channel by channel, in linear time.

        out_t = [Σ_{i≠t} e^{k_i − (|t−i| − 1) w} v_i + e^{k_t + u} v_t] / [the same without v]

    w and u come ALREADY DIVIDED BY T, as the equation has them here; a model divides its decay and bonus itself. This is the
    paper's equation; the official CUDA kernel deviates from it, see `reference.bi_wkv_formula` for how and by how much.

    Sums and their exponents are fp32 (fp64 for fp64 inputs), whatever the dtype. Any size and sign of w, u and k will do: the
    relative error is about 1e-7 times the largest exponent that matters. Inputs are not written to; NaN in a channel of an image
    fills that channel. Differentiable in every argument, once (the reference backend: as often as one likes).

    Args:
        w: (C,), the decay per token; may be negative, then far tokens weigh more.
        u: (C,), the bonus of the token itself. w and u are fp32 or of k's dtype.
        k, v: (B,T,C), one dtype of fp64, fp32, bf16, fp16.
        backend: `auto`, `triton`, `torch` or `reference`; see `selected_backend`.

    Returns:
        out (B,T,C) in k's dtype.

    Raises:
        TypeError: an argument of a wrong type or dtype. ValueError: a wrong shape, device or value. Both name the argument.
    """
    tensors = {"w": w, "u": u, "k": k, "v": v}
    dispatch.check_are_tensors("bi_wkv", tensors)
    dispatch.check_leading("bi_wkv", "k", k, "(B,T,C)", (None, None, None))
    shapes = {"w": (k.shape[2],), "u": (k.shape[2],), "k": tuple(k.shape), "v": tuple(k.shape)}
    dispatch.check_others("bi_wkv", "k", tensors, shapes, ("k", "v"))
    dispatch.check_backend(backend)
    if backend == "reference":
        with dispatch.no_autocast(k.device.type):
            return bi_wkv_formula(w, u, k, v)
    keep_states = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    return _forward_op(w, u, k, v, backend, keep_states)[0]


def selected_backend(backend: str, device: torch.device | str, *, dtype: torch.dtype = torch.float32) -> str:
    """The backend that will run for a request, `triton`, `torch` or `reference`; it is recorded with every result.

    `triton` is one kernel for the forward pass and one for the backward pass, for NVIDIA GPUs from sm_80 on (and for the CPU
    under Triton's interpreter, slowly). `torch` is batched PyTorch operations with a hand-written backward, for any device.
    `reference` is the equation over all pairs of tokens under autograd. `auto` takes `triton` on a GPU where it can run, else
    `torch`.

    Args:
        backend: the request.
        device: where the tensors are.
        dtype: that of k.

    Raises:
        ValueError: an unknown backend, or one that cannot run there.
    """
    return dispatch.choose_backend(backend, device, lambda there: _triton_obstacle(there, dtype))


@functools.cache
def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the Triton kernels from running there, or None."""
    if obstacle := dispatch.package_obstacle():
        return obstacle
    from . import triton_fwd

    return dispatch.device_obstacle("k", device, triton_fwd.INTERPRETED) or triton_fwd.unsupported(dtype)


def _selected_for(k: Tensor, backend: str) -> str:
    """As `selected_backend`, for a call's own k."""
    try:
        return selected_backend(backend, k.device, dtype=k.dtype)
    except ValueError as error:
        raise ValueError(f"bi_wkv: k has shape {tuple(k.shape)}: {error}") from None


def _passes(k: Tensor, backend: str):
    """The modules that run for a call's own k: with `forward`, with `backward`."""
    if _selected_for(k, backend) == "torch":
        return torch_path, torch_path
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


@torch.library.custom_op("vision_ttt::bi_wkv", mutates_args=())
def _forward_op(w: Tensor, u: Tensor, k: Tensor, v: Tensor, backend: str, keep_states: bool) -> tuple[Tensor, Tensor]:
    module, _ = _passes(k, backend)
    with dispatch.no_autocast(k.device.type):
        return module.forward(w, u, k, v, keep_states)


@_forward_op.register_fake
def _(w, u, k, v, backend, keep_states):
    module, _ = _passes(k, backend)
    states = k.new_empty(module.states_shape(k.shape, keep_states), dtype=dispatch.compute_dtype(k.dtype))
    return k.new_empty(k.shape), states


@torch.library.custom_op("vision_ttt::bi_wkv_backward", mutates_args=())
def _backward_op(
    dout: Tensor, out: Tensor, states: Tensor, w: Tensor, u: Tensor, k: Tensor, v: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, module = _passes(k, backend)
    with dispatch.no_autocast(k.device.type):
        return module.backward(dout, out, states, w, u, k, v)


@_backward_op.register_fake
def _(dout, out, states, w, u, k, v, backend):
    return w.new_empty(w.shape), u.new_empty(u.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.backend, _ = inputs
    out, states = output
    ctx.mark_non_differentiable(states)
    ctx.save_for_backward(out, states, *tensors)


def _differentiate(ctx, dout, _):
    gradients = _backward_op(dout, *ctx.saved_tensors, ctx.backend)
    wanted = ctx.needs_input_grad[: len(gradients)]
    return *(g if needed else None for g, needed in zip(gradients, wanted, strict=True)), None, None


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError("bi_wkv: this backend has no second derivative; backend='reference' has")


_forward_op.register_autograd(_differentiate, setup_context=_save_for_backward)
_backward_op.register_autograd(_refuse_second_derivative)


def forward_flops(shape: Sequence[int]) -> int:
    """2 for each of the 6 multiply-adds of a token and channel: e^{−w} times the state plus the token, of numerator and
    denominator in two directions, and the token itself with e^u. The paper's own count is 29 per token and channel.
    """
    B, T, C = shape
    return 2 * 6 * B * T * C


def backward_flops(shape: Sequence[int]) -> int:
    """2 for each of the 17 multiply-adds of a token and channel; the repeated forward pass is not counted.

    6 for the adjoint sums as for the forward pass, 2 for the adjoint token, 1 for dv, 2 for dk, 2 for du, 4 for dw.
    """
    B, T, C = shape
    return 2 * 17 * B * T * C


@register_flop_formula(torch.ops.vision_ttt.bi_wkv)
def _(w_shape, u_shape, k_shape, *args, out_shape=None) -> int:
    return forward_flops(k_shape)


@register_flop_formula(torch.ops.vision_ttt.bi_wkv_backward)
def _(dout_shape, *args, out_shape=None) -> int:
    return backward_flops(dout_shape)
