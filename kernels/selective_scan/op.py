"""The public operator selective scan: argument checks, choice of a backend, FLOP count.

The custom op has a direction axis of length 1 or 2. Shape letters as in `reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import dispatch
from ..custom_op import CustomOp
from . import torch_path
from .reference import Arguments, selective_scan_recurrence

# multiply-adds of one state: Δ·A, Δu·B, exp(ΔA)·h with the addition, and C·h with the sum
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
    """The selective scan of Mamba in one direction, with its gate. For each channel e and state n, from h = 0:

        Δ_t = softplus(delta_t + delta_bias),  h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t u_t
        y_t[e] = Σ_n C_t[n] h_t[e,n] + D[e] u_t[e],  out_t = y_t · SiLU(z_t)

    State and accumulators are fp32 (fp64 for fp64 inputs). Inputs are not written to and may be strided; NaN propagates.
    Every tensor argument has a gradient. Second derivatives need the reference backend.

    Args:
        u, delta: (B,T,E), of one dtype: fp64, fp32, bf16 or fp16.
        A: (E,N), below 0 for a state that decays; fp32 or u's dtype, as D and delta_bias.
        B, C: (B,T,N), u's dtype.
        D: (E,). delta_bias: (E,).
        z: (B,T,E), u's dtype; None leaves the gate out.
        reverse: scan from t = T−1 to 0: the same as flipping u, delta, B, C and z along T, scanning forward, and flipping the output.
        backend: `auto`, `triton`, `torch` or `reference`; see `selected_backend`.

    Returns:
        out (B,T,E) in u's dtype.

    Raises:
        TypeError: an argument has a wrong type or dtype. ValueError: a wrong shape, device or value. Both name the argument.
    """
    _check("selective_scan", 1, u, delta, A, B, C, D, z, delta_bias)
    if not isinstance(reverse, bool):
        raise TypeError(f"selective_scan: reverse is {reverse!r}, expected True or False")
    u, delta, B, C = (x.unsqueeze(2) for x in (u, delta, B, C))
    A, D, delta_bias = (x.unsqueeze(0) for x in (A, D, delta_bias))
    return CUSTOM_OP(Arguments(u, delta, A, B, C, D, z, delta_bias, [reverse]), backend).squeeze(2)


def selective_scan_bidir(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, delta_bias: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Both directions at once, as a Vim layer calls it: direction 0 scans forward, direction 1 backward, each with parameters of its own.

    It equals `selective_scan` on each index of the direction axis, the second one with reverse=True, both with the same z.
    Arguments and errors are the same except for these shapes.

    Args:
        u, delta: (B,T,2,E). B, C: (B,T,2,N).
        A: (2,E,N). D, delta_bias: (2,E).
        z: (B,T,E), shared by both directions, or None.

    Returns:
        out (B,T,2,E) in u's dtype, both directions in the order of the input.
    """
    _check("selective_scan_bidir", 2, u, delta, A, B, C, D, z, delta_bias)
    return CUSTOM_OP(Arguments(u, delta, A, B, C, D, z, delta_bias, [False, True]), backend)


def one_direction(inputs: Sequence[Tensor | None], r: int = 0) -> list[Tensor | None]:
    """The tensors of `selective_scan` for index r of the direction axis, from those of `selective_scan_bidir`."""
    u, delta, A, B, C, D, z, delta_bias = inputs
    return [u[:, :, r], delta[:, :, r], A[r], B[:, :, r], C[:, :, r], D[r], z, delta_bias[r]]


def selected_backend(backend: str, device: torch.device | str, *, state_dim: int = 16, dtype: torch.dtype = torch.float32) -> str:
    """The backend that will run for a request, `triton`, `torch` or `reference`; every result records it.

    `triton` is one kernel for the forward pass and one for the backward pass, for NVIDIA GPUs from sm_80 on (and, slowly, for the CPU
    under Triton's interpreter). `torch` is batched PyTorch operations with a hand-written backward pass, for any device and any size.
    `reference` is the recurrence under autograd: slower, and with the memory that autograd needs. `auto` takes `triton` on a GPU
    that can run these sizes, else `torch`.
    `state_dim` and `dtype` are N and u's dtype. Errors are those of `dispatch.choose_backend`.
    """
    return dispatch.choose_backend(backend, device, "u", _load_triton, int(state_dim), dtype)


def _load_triton():
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


def _reference(x: Arguments) -> Tensor:
    outs = [selective_scan_recurrence(*one_direction(x[:8], r), reverse=flag) for r, flag in enumerate(x.reverse)]
    return torch.stack(outs, 2)


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


def forward_flops(shape: Sequence[int], state_dim: int) -> int:
    """For u of shape (B,T,R,E): 2 for each of the `MACS_PER_STATE` multiply-adds of every state at every token.

    Per direction these are the 4·T·E·N multiply-adds of the Vim paper. softplus, the skip D·u and the gate are element-wise and
    count as free, as do all operations of the reference backend in PyTorch's counter.
    """
    B, T, R, E = shape
    return 2 * MACS_PER_STATE * B * T * R * E * state_dim


def backward_flops(shape: Sequence[int], state_dim: int) -> int:
    """Two products for each of the forward pass; the repeated forward scan is not counted."""
    return 2 * forward_flops(shape, state_dim)


CUSTOM_OP = CustomOp(
    "selective_scan",
    Arguments,
    leading="u",
    select=lambda backend, x: selected_backend(backend, x.u.device, state_dim=x.A.shape[-1], dtype=x.u.dtype),
    reference=_reference,
    torch_path=torch_path,
    load_triton=_load_triton,
    result_shapes=lambda module, x, keep_states: (x.u.shape, module.states_shape(x.u.shape, x.A.shape[-1], keep_states)),
    forward_flops=lambda x: forward_flops(x.u, x.A[-1]),
    backward_flops=lambda x: backward_flops(x.u, x.A[-1]),
)
