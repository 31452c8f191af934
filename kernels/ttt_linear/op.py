"""The public op TTT-Linear: argument checks, backends, autograd, FLOP count.

The fast backends are one operator over a direction axis of length 1 or 2, with a fake kernel, a backward that is an operator
itself, and FLOP formulas, so that torch.compile(fullgraph=True), inference mode, autocast, checkpointing and FlopCounterMode
see one opaque operation. Which of the two runs is settled inside it, from the device and the sizes: the Triton files, and
Triton with them, are imported nowhere else. The reference backend is plain operations under autograd.

Shape letters: B images, T tokens, R directions, H heads, D head width.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import dispatch
from . import torch_path
from .reference import ttt_linear_dual


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    token_scale: Tensor,
    W0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    chunk_size: int = 16,
    reverse: bool = False,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """The inner learner of Vision-TTT in one direction: a linear map with LayerNorm that learns along the tokens.

    For every chunk of n ≤ chunk_size consecutive tokens, starting from W = W0, β = b0, with ℓ = ½‖LN(Z) − (V − K)‖²:

        Z = KW + β,  G = dℓ/dZ,  A = tril(c[:n] lrᵀ) ⊙ (QKᵀ + 1),  O = QW + β − AG,  out = Q + γ ⊙ norm(O) + μ
        W ← W − Kᵀ(c[n−1] lr ⊙ G),  β ← β − Σ_t c[n−1] lr_t G_t

    State, statistics and accumulators are fp32 (fp64 for fp64 inputs); so are products, but for the triton backend, which rounds
    their operands to q's dtype. Inputs are not written to; NaN propagates.
    Differentiable in every tensor argument, once (the reference backend: as often as one likes).

    Args:
        q, k, v: (B,T,H,D), one dtype of fp64, fp32, bf16, fp16. The tensors below are fp32 or of that dtype.
        lr: (B,T,H), inner learning rates.
        token_scale: (chunk_size,), c of the equations.
        W0: (H,D,D), start weight, row-vector convention.
        b0, ln_weight, ln_bias: (H,D), start bias, γ and μ.
        chunk_size: tokens per inner gradient step; may exceed T. The last chunk may be shorter.
        reverse: scan from t = T−1 to 0, chunks cut from that end: flip q, k, v, lr along T, run forward, flip out.
        eps: of the LayerNorms, above 0.
        backend: `auto`, `triton`, `torch` or `reference`; see `selected_backend`.

    Returns:
        out (B,T,H,D) in q's dtype.

    Raises:
        TypeError: an argument of a wrong type or dtype. ValueError: a wrong shape, device or value. Both name the argument.
    """
    parameters = token_scale, W0, b0, ln_weight, ln_bias
    _check("ttt_linear", 1, (q, k, v, lr, *parameters), chunk_size, eps)
    if not isinstance(reverse, bool):
        raise TypeError(f"ttt_linear: reverse is {reverse!r}, expected True or False")
    dispatch.check_backend(backend)
    if backend == "reference":
        return _reference(q, k, v, lr, *parameters, chunk_size, reverse, eps)
    q, k, v = q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2)
    return _run(q, k, v, lr, *(x.unsqueeze(0) for x in parameters), chunk_size, [reverse], eps, backend).squeeze(2)


def ttt_linear_bidir(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    token_scale: Tensor,
    W0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    chunk_size: int = 16,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """Both directions at once, what a Vittt layer calls: direction 0 scans forth, direction 1 back, each with own parameters.

    Equals `ttt_linear` on each index of the direction axis, the second one with reverse=True; arguments and errors are the
    same but for the shapes.

    Args:
        q, k, v: (B,T,2,H,D).
        lr: (B,T,H), shared by both directions.
        token_scale: (2,chunk_size). W0: (2,H,D,D). b0, ln_weight, ln_bias: (2,H,D).

    Returns:
        out (B,T,2,H,D) in q's dtype, both directions in the order of the input.
    """
    parameters = token_scale, W0, b0, ln_weight, ln_bias
    _check("ttt_linear_bidir", 2, (q, k, v, lr, *parameters), chunk_size, eps)
    dispatch.check_backend(backend)
    if backend == "reference":
        outs = [_reference(q[:, :, r], k[:, :, r], v[:, :, r], lr, *(x[r] for x in parameters), chunk_size, r == 1, eps) for r in (0, 1)]
        return torch.stack(outs, 2)
    return _run(q, k, v, lr, *parameters, chunk_size, [False, True], eps, backend)


def selected_backend(
    backend: str, device: torch.device | str, *, head_dim: int = 64, chunk_size: int = 16, dtype: torch.dtype = torch.float32
) -> str:
    """The backend that will run for a request, `triton`, `torch` or `reference`; it is recorded with every result.

    `triton` is one kernel for the forward pass and one for the backward pass, for NVIDIA GPUs from sm_80 on (and for the CPU
    under Triton's interpreter, slowly). `torch` is batched PyTorch operations with a hand-written backward, for any device and
    any size. `reference` is the dual form under autograd: the same function and FLOP count, slower, with the memory that
    autograd needs. `auto` takes `triton` on a GPU where it can run these sizes, else `torch`.

    Args:
        backend: the request.
        device: where the tensors are.
        head_dim, chunk_size, dtype: D and the dtype of q, and the chunk size.

    Raises:
        ValueError: an unknown backend, or one that cannot run there.
    """
    return dispatch.choose_backend(backend, device, lambda there: _triton_obstacle(there, int(head_dim), int(chunk_size), dtype))


@functools.cache
def _triton_obstacle(device: torch.device, head_dim: int, chunk_size: int, dtype: torch.dtype) -> str | None:
    """What keeps the Triton kernels from running there, or None."""
    if obstacle := dispatch.package_obstacle():
        return obstacle
    from . import triton_fwd

    if obstacle := dispatch.device_obstacle("q", device, triton_fwd.INTERPRETED):
        return obstacle
    properties = dispatch.device_properties(device)
    shared_kib = properties and properties.shared_memory_per_block_optin // 1024
    return triton_fwd.unsupported(head_dim, chunk_size, dtype, shared_kib)


def _reference(q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps):
    with dispatch.no_autocast(q.device.type):
        return ttt_linear_dual(q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size=chunk_size, reverse=reverse, eps=eps)


def _run(q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps, backend):
    inputs = q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias
    keep_states = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return _forward_op(*inputs, chunk_size, reverse, eps, backend, keep_states)[0]


def _selected_for(q: Tensor, chunk_size: int, backend: str) -> str:
    """As `selected_backend`, for a call's own q (B,T,R,H,D)."""
    try:
        return selected_backend(backend, q.device, head_dim=q.shape[-1], chunk_size=chunk_size, dtype=q.dtype)
    except ValueError as error:
        B, T, R, H, D = q.shape
        shape = (B, T, H, D) if R == 1 else (B, T, R, H, D)
        raise ValueError(f"ttt_linear: q has shape {shape}: {error}") from None


def _passes(backend: str):
    """The modules of a selected backend: with `forward`, with `backward`."""
    if backend == "torch":
        return torch_path, torch_path
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


def _check(op, directions, arguments, chunk_size, eps):
    """Raise a TypeError or ValueError that names the argument, what it is and what is expected."""
    tensors = dict(zip(("q", "k", "v", "lr", "token_scale", "W0", "b0", "ln_weight", "ln_bias"), arguments, strict=True))
    dispatch.check_are_tensors(op, tensors)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, torch.SymInt)):
        raise TypeError(f"{op}: chunk_size is {chunk_size!r}, expected an integer")
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size is {chunk_size}, expected at least 1")
    if not isinstance(eps, (float, int)) or not 0 < eps < math.inf:
        raise ValueError(f"{op}: eps is {eps!r}, expected a number above 0")

    q = tensors["q"]
    letters, R = ("(B,T,H,D)", ()) if directions == 1 else ("(B,T,2,H,D)", (2,))
    dispatch.check_leading(op, "q", q, letters, (None, None, *R, None, None))
    (B, T), (H, D) = q.shape[:2], q.shape[-2:]
    head = (*R, H, D)
    expected = {"lr": (B, T, H), "token_scale": (*R, chunk_size), "W0": (*head, D)}
    expected |= dict.fromkeys(("q", "k", "v"), tuple(q.shape)) | dict.fromkeys(("b0", "ln_weight", "ln_bias"), head)
    dispatch.check_others(op, "q", tensors, expected, ("q", "k", "v"), f" and chunk_size {chunk_size}")


@torch.library.custom_op("vision_ttt::ttt_linear", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    token_scale: Tensor,
    W0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    chunk_size: int,
    reverse: Sequence[bool],
    eps: float,
    backend: str,
    keep_states: bool,
) -> tuple[Tensor, Tensor]:
    module, _ = _passes(_selected_for(q, chunk_size, backend))
    with dispatch.no_autocast(q.device.type):
        return module.forward(q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps, keep_states)


@_forward_op.register_fake
def _(q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps, backend, keep_states):
    module, _ = _passes(_selected_for(q, chunk_size, backend))
    shape = module.states_shape(q.shape, chunk_size, keep_states)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=dispatch.compute_dtype(q.dtype))


@torch.library.custom_op("vision_ttt::ttt_linear_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    token_scale: Tensor,
    W0: Tensor,
    b0: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    chunk_size: int,
    reverse: Sequence[bool],
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, module = _passes(_selected_for(q, chunk_size, backend))
    with dispatch.no_autocast(q.device.type):
        return module.backward(dout, states, q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps)


@_backward_op.register_fake
def _(dout, states, *inputs_and_options):
    return tuple(x.new_empty(x.shape) for x in inputs_and_options[:9])


def _save_for_backward(ctx, inputs, output):
    *tensors, chunk_size, reverse, eps, backend, _ = inputs
    states = output[1]
    ctx.mark_non_differentiable(states)
    ctx.save_for_backward(states, *tensors)
    ctx.options = chunk_size, reverse, eps, backend


def _differentiate(ctx, dout, _):
    gradients = _backward_op(dout, *ctx.saved_tensors, *ctx.options)
    wanted = ctx.needs_input_grad[: len(gradients)]
    return *(g if needed else None for g, needed in zip(gradients, wanted, strict=True)), None, None, None, None, None


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError("ttt_linear: this backend has no second derivative; backend='reference' has")


_forward_op.register_autograd(_differentiate, setup_context=_save_for_backward)
_backward_op.register_autograd(_refuse_second_derivative)


def forward_flops(shape: Sequence[int], chunk_size: int) -> int:
    """For q of shape (B,T,R,H,D): 2 for each multiply-add of the products KW, QW, QKᵀ, AG, KᵀG, over the chunks' true lengths."""
    B, T, R, H, D = shape
    lengths = [min(chunk_size, T - start) for start in range(0, T, chunk_size)]
    return 2 * B * R * H * sum(3 * n * D * D + 2 * n * n * D for n in lengths)


def backward_flops(shape: Sequence[int], chunk_size: int) -> int:
    """Two products for each of the forward pass but the last state update, which no output depends on.

    It is what autograd runs on the dual form when every input needs a gradient; the repeated forward scan is not counted.
    """
    B, T, R, H, D = shape
    last = T % chunk_size or chunk_size
    return 2 * forward_flops(shape, chunk_size) - 2 * 2 * B * R * H * last * D * D


@register_flop_formula(torch.ops.vision_ttt.ttt_linear)
def _(q_shape, *inputs_and_options, out_shape=None) -> int:
    return forward_flops(q_shape, inputs_and_options[8])


@register_flop_formula(torch.ops.vision_ttt.ttt_linear_backward)
def _(dout_shape, states_shape, *inputs_and_options, out_shape=None) -> int:
    return backward_flops(dout_shape, inputs_and_options[9])
