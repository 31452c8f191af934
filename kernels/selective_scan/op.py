"""The public op selective scan: argument checks, backends, autograd, FLOP count.

The fast backends are one operator over a direction axis of length 1 or 2, with a fake kernel, a backward that is an operator
itself, and FLOP formulas, so that torch.compile(fullgraph=True), inference mode, autocast, checkpointing and FlopCounterMode
see one opaque operation. Which of the two runs is settled inside it, from the device and the sizes: the Triton files, and
Triton with them, are imported nowhere else. The reference backend is plain operations under autograd.

Shape letters: B images, T tokens, R directions, E channels, N states of a channel; the tensors B, C and D are those of the
equations.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import dispatch
from . import torch_path
from .reference import selective_scan_recurrence

# Multiplications of one state: Δ·A, Δu·B, exp(ΔA)·h with the addition, and C·h with the sum.
MACS_PER_STATE = 4


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
    *,
    reverse: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The selective scan of Mamba in one direction, with its gate: for each channel e and state n, from h = 0,

        Δ_t = softplus(delta_t + delta_bias),  h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t u_t
        y_t[e] = Σ_n C_t[n] h_t[e,n] + D[e] u_t[e],  out_t = y_t · SiLU(z_t)

    State and accumulators are fp32 (fp64 for fp64 inputs). Inputs are not written to and may be strided; NaN propagates.
    Differentiable in every tensor argument, once (the reference backend: as often as one likes).

    Args:
        u, delta: (B,T,E), one dtype of fp64, fp32, bf16, fp16.
        A: (E,N), below 0 for a state that decays; fp32 or u's dtype, as D and delta_bias.
        B, C: (B,T,N), u's dtype.
        D: (E,). delta_bias: (E,).
        z: (B,T,E), u's dtype; None leaves the gate out.
        reverse: scan from t = T−1 to 0: flip u, delta, B, C, z along T, run forward, flip out.
        backend: `auto`, `triton`, `torch` or `reference`; see `selected_backend`.

    Returns:
        out (B,T,E) in u's dtype.

    Raises:
        TypeError: an argument of a wrong type or dtype. ValueError: a wrong shape, device or value. Both name the argument.
    """
    _check("selective_scan", 1, u, delta, A, B, C, D, z, delta_bias)
    if not isinstance(reverse, bool):
        raise TypeError(f"selective_scan: reverse is {reverse!r}, expected True or False")
    dispatch.check_backend(backend)
    if backend == "reference":
        return _reference(u, delta, A, B, C, D, z, delta_bias, reverse)
    u, delta, B, C = (x.unsqueeze(2) for x in (u, delta, B, C))
    A, D, delta_bias = (x.unsqueeze(0) for x in (A, D, delta_bias))
    return _run(u, delta, A, B, C, D, z, delta_bias, [reverse], backend).squeeze(2)


def selective_scan_bidir(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, delta_bias: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Both directions at once, what a Vim layer calls: direction 0 scans forth, direction 1 back, each with own parameters.

    Equals `selective_scan` on each index of the direction axis, the second one with reverse=True, both with the same z;
    arguments and errors are the same but for the shapes.

    Args:
        u, delta: (B,T,2,E). B, C: (B,T,2,N).
        A: (2,E,N). D, delta_bias: (2,E).
        z: (B,T,E), shared by both directions, or None.

    Returns:
        out (B,T,2,E) in u's dtype, both directions in the order of the input.
    """
    _check("selective_scan_bidir", 2, u, delta, A, B, C, D, z, delta_bias)
    dispatch.check_backend(backend)
    if backend == "reference":
        outs = [_reference(u[:, :, r], delta[:, :, r], A[r], B[:, :, r], C[:, :, r], D[r], z, delta_bias[r], r == 1) for r in (0, 1)]
        return torch.stack(outs, 2)
    return _run(u, delta, A, B, C, D, z, delta_bias, [False, True], backend)


def selected_backend(backend: str, device: torch.device | str, *, state_dim: int = 16, dtype: torch.dtype = torch.float32) -> str:
    """The backend that will run for a request, `triton`, `torch` or `reference`; it is recorded with every result.

    `triton` is one kernel for the forward pass and one for the backward pass, for NVIDIA GPUs from sm_80 on (and for the CPU
    under Triton's interpreter, slowly). `torch` is batched PyTorch operations with a hand-written backward, for any device and
    any size. `reference` is the recurrence under autograd: slower, with the memory that autograd needs. `auto` takes `triton`
    on a GPU where it can run these sizes, else `torch`.

    Args:
        backend: the request.
        device: where the tensors are.
        state_dim, dtype: N, and the dtype of u.

    Raises:
        ValueError: an unknown backend, or one that cannot run there.
    """
    return dispatch.choose_backend(backend, device, lambda there: _triton_obstacle(there, int(state_dim), dtype))


@functools.cache
def _triton_obstacle(device: torch.device, state_dim: int, dtype: torch.dtype) -> str | None:
    """What keeps the Triton kernels from running there, or None."""
    if obstacle := dispatch.package_obstacle():
        return obstacle
    from . import triton_fwd

    return dispatch.device_obstacle("u", device, triton_fwd.INTERPRETED) or triton_fwd.unsupported(state_dim, dtype)


def _reference(u, delta, A, B, C, D, z, delta_bias, reverse):
    with dispatch.no_autocast(u.device.type):
        return selective_scan_recurrence(u, delta, A, B, C, D, z, delta_bias, reverse=reverse)


def _run(u, delta, A, B, C, D, z, delta_bias, reverse, backend):
    inputs = u, delta, A, B, C, D, z, delta_bias
    keep_states = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _forward_op(*inputs, reverse, backend, keep_states)[0]


def _selected_for(u: Tensor, A: Tensor, backend: str) -> str:
    """As `selected_backend`, for a call's own u (B,T,R,E) and A (R,E,N)."""
    try:
        return selected_backend(backend, u.device, state_dim=A.shape[-1], dtype=u.dtype)
    except ValueError as error:
        B, T, R, E = u.shape
        shape = (B, T, E) if R == 1 else (B, T, R, E)
        raise ValueError(f"selective_scan: u has shape {shape}: {error}") from None


def _passes(backend: str):
    """The modules of a selected backend: with `forward`, with `backward`."""
    if backend == "torch":
        return torch_path, torch_path
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


def _check(op, directions, u, delta, A, B, C, D, z, delta_bias):
    """Raise a TypeError or ValueError that names the argument, what it is and what is expected."""
    tensors = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "delta_bias": delta_bias}
    if z is not None:
        tensors["z"] = z
    dispatch.check_are_tensors(op, tensors)
    letters, R = ("(B,T,E)", ()) if directions == 1 else ("(B,T,2,E)", (2,))
    dispatch.check_leading(op, "u", u, letters, (None, None, *R, None))
    tokens, E = u.shape[:2], u.shape[-1]
    if A.dim() != len(R) + 2 or A.shape[-1] < 1:
        letters = "(E,N)" if directions == 1 else "(2,E,N)"
        raise ValueError(f"{op}: A has shape {tuple(A.shape)}, expected {letters} with N at least 1")
    N = A.shape[-1]
    expected = {"u": tuple(u.shape), "delta": tuple(u.shape), "A": (*R, E, N), "D": (*R, E), "delta_bias": (*R, E)}
    expected |= {"z": (*tokens, E)} | dict.fromkeys(("B", "C"), (*tokens, *R, N))
    dispatch.check_others(op, "u", tensors, expected, ("u", "delta", "B", "C", "z"), f" and N {N}")


@torch.library.custom_op("vision_ttt::selective_scan", mutates_args=())
def _forward_op(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
    reverse: Sequence[bool],
    backend: str,
    keep_states: bool,
) -> tuple[Tensor, Tensor]:
    module, _ = _passes(_selected_for(u, A, backend))
    with dispatch.no_autocast(u.device.type):
        return module.forward(u, delta, A, B, C, D, z, delta_bias, reverse, keep_states)


@_forward_op.register_fake
def _(u, delta, A, B, C, D, z, delta_bias, reverse, backend, keep_states):
    module, _ = _passes(_selected_for(u, A, backend))
    shape = module.states_shape(u.shape, A.shape[-1], keep_states)
    return u.new_empty(u.shape), u.new_empty(shape, dtype=dispatch.compute_dtype(u.dtype))


@torch.library.custom_op("vision_ttt::selective_scan_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    states: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
    reverse: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Without a gate, the gradient of z is empty."""
    _, module = _passes(_selected_for(u, A, backend))
    with dispatch.no_autocast(u.device.type):
        du, ddelta, dA, dB, dC, dD, dz, dbias = module.backward(dout, states, u, delta, A, B, C, D, z, delta_bias, reverse)
    return du, ddelta, dA, dB, dC, dD, u.new_empty(0) if dz is None else dz, dbias


@_backward_op.register_fake
def _(dout, states, *inputs_and_options):
    u = inputs_and_options[0]
    return tuple(u.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs_and_options[:8])


def _save_for_backward(ctx, inputs, output):
    *tensors, reverse, backend, _ = inputs
    states = output[1]
    ctx.mark_non_differentiable(states)
    ctx.save_for_backward(states, *tensors)
    ctx.options = reverse, backend


def _differentiate(ctx, dout, _):
    gradients = _backward_op(dout, *ctx.saved_tensors, *ctx.options)
    wanted = ctx.needs_input_grad[: len(gradients)]
    return *(g if needed else None for g, needed in zip(gradients, wanted, strict=True)), None, None, None


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError("selective_scan: this backend has no second derivative; backend='reference' has")


_forward_op.register_autograd(_differentiate, setup_context=_save_for_backward)
_backward_op.register_autograd(_refuse_second_derivative)


def forward_flops(shape: Sequence[int], state_dim: int) -> int:
    """For u of shape (B,T,R,E): 2 for each of the `MACS_PER_STATE` multiply-adds of every state at every token.

    Per direction it is the 4·T·E·N of the paper of Vim. softplus, the skip D·u and the gate are element-wise and free, as are all
    operations of the reference backend to PyTorch's counter.
    """
    B, T, R, E = shape
    return 2 * MACS_PER_STATE * B * T * R * E * state_dim


@register_flop_formula(torch.ops.vision_ttt.selective_scan)
def _(u_shape, delta_shape, A_shape, *inputs_and_options, out_shape=None) -> int:
    return forward_flops(u_shape, A_shape[-1])


@register_flop_formula(torch.ops.vision_ttt.selective_scan_backward)
def _(dout_shape, states_shape, u_shape, delta_shape, A_shape, *inputs_and_options, out_shape=None) -> int:
    """Two products for each of the forward pass; the repeated forward scan is not counted."""
    return 2 * forward_flops(u_shape, A_shape[-1])
