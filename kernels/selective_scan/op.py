"""Public operator selective scan: argument checks, choice of a backend, FLOP counts.

The custom op has a route axis of any length. Shape letters as in `reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import dispatch
from ..custom_op import CustomOp
from . import torch_path
from .reference import Arguments, selective_scan_recurrence


def _load_triton():
    """Import the modules of the backend `triton` when it runs: a CPU may have no Triton, see `dispatch.Load`."""
    from . import triton_bwd, triton_fwd

    return triton_fwd, triton_bwd


def _load_loops():
    """Import the module of the backend `numba` when it runs; it has both passes, see `dispatch.Load`."""
    from . import numba_path

    return numba_path, numba_path


# multiply-adds of one state and token: Δ·A, Δu·B, exp(ΔA)·h with the addition, and C·h with the sum
_MACS_PER_STATE = 4


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
    full_precision: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Run the selective scan of Mamba in one direction, with its gate. For each channel e and state n, from h = 0:

        Δ_t = softplus(delta_t + delta_bias),  h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t u_t
        y_t[e] = Σ_n C_t[n] h_t[e,n] + D[e] u_t[e],  out_t = y_t · SiLU(z_t)

    State and accumulators are fp32 (fp64 for fp64 inputs). Inputs are not written to and may be strided; NaN
    propagates. Every tensor argument has a gradient. Second derivatives need the reference backend.

    Args:
        u, delta: (B,T,E), of one dtype: fp64, fp32, bf16 or fp16.
        A: (E,N), below 0 for a state that decays. A, D and delta_bias are fp32 or of u's dtype.
        B, C: (B,T,N), u's dtype.
        D: (E,). delta_bias: (E,).
        z: (B,T,E), u's dtype; None leaves the gate out.
        reverse: scan from t = T−1 to 0: the same as flipping u, delta, B, C and z along T, scanning forward, and
            flipping the output.
        full_precision: return out in the dtype of the state instead of u's.
        backend: `auto`, `triton`, `numba`, `torch` or `reference`; see `selected_backend`.

    Returns:
        out (B,T,E) in u's dtype, or with `full_precision` in that of the state.

    Raises:
        TypeError: an argument has a wrong type or dtype. ValueError: a wrong shape, device or value. Both name it.
    """
    _check("selective_scan", (), (u, delta, A, B, C, D, z, delta_bias), full_precision)
    if not isinstance(reverse, bool):
        raise TypeError(f"selective_scan: reverse is {reverse!r}, expected True or False")
    u, delta, B, C = (x.unsqueeze(2) for x in (u, delta, B, C))
    A, D, delta_bias = (x.unsqueeze(0) for x in (A, D, delta_bias))
    return CUSTOM_OP(Arguments(u, delta, A, B, C, D, z, delta_bias, [reverse], full_precision), backend).squeeze(2)


def selective_scan_bidir(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
    *,
    full_precision: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Scan in both directions at once, for a Vim layer: index 0 forward, 1 backward, each with parameters of its own.

    It equals `selective_scan` on each index of the direction axis, the second one with reverse=True, both with the same
    z. Arguments and errors are the same except for these shapes.

    Args:
        u, delta: (B,T,2,E). B, C: (B,T,2,N).
        A: (2,E,N). D, delta_bias: (2,E).
        z: (B,T,E), shared by both directions, or None.

    Returns:
        out (B,T,2,E), both directions in the order of the input.
    """
    tensors = u, delta, A, B, C, D, z, delta_bias
    _check("selective_scan_bidir", (2,), tensors, full_precision)
    return CUSTOM_OP(Arguments(*tensors, [False, True], full_precision), backend)


def selective_scan_routes(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
    *,
    reverse: Sequence[bool],
    full_precision: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Run any number of scans at once, for a VMamba layer: each route has a direction and parameters of its own.

    Route r scans the sequence u[:, :, r mod K]: routes may share one. VMamba's four routes over a grid are the K = 2
    sequences of its rows and of its columns, each forward and backward: reverse=(False, False, True, True). The result
    equals `selective_scan` on each route, all with the same z. The other arguments and the errors are the same.

    Args:
        u: (B,T,K,E), where K divides R.
        delta: (B,T,R,E). B, C: (B,T,R,N).
        A: (R,E,N). D, delta_bias: (R,E).
        z: (B,T,E), shared by all routes, or None.
        reverse: R flags; a route with True is scanned from t = T−1 to 0.

    Returns:
        out (B,T,R,E), every route in the order of its sequence.
    """
    flags = list(reverse) if isinstance(reverse, Sequence) else []
    if not flags or not all(isinstance(flag, bool) for flag in flags):
        raise TypeError(
            f"selective_scan_routes: reverse is {reverse!r}, expected a flag, True or False, for each route"
        )
    tensors = u, delta, A, B, C, D, z, delta_bias
    _check("selective_scan_routes", (len(flags),), tensors, full_precision)
    return CUSTOM_OP(Arguments(*tensors, flags, full_precision), backend)


def one_direction(inputs: Sequence[Tensor | None], r: int = 0) -> list[Tensor | None]:
    """Return the tensors of `selective_scan` for route r, from those of `selective_scan_bidir` or `_routes`."""
    u, delta, A, B, C, D, z, delta_bias = inputs
    return [u[:, :, r % u.shape[2]], delta[:, :, r], A[r], B[:, :, r], C[:, :, r], D[r], z, delta_bias[r]]


def selected_backend(
    backend: str, device: torch.device | str, *, state_dim: int = 16, dtype: torch.dtype = torch.float32
) -> str:
    """Return the backend that will run, `triton`, `numba`, `torch` or `reference`; every result records it.

    `triton` is one kernel for the forward pass, or for few images of many tokens three launches, and one for the
    backward pass, for NVIDIA GPUs from sm_80 on (and, slowly, for the CPU under Triton's interpreter). `numba` is one
    loop for each pass, for CPUs. `torch` is batched PyTorch operations with a hand-written backward pass, for any
    device and any size. `reference` is the recurrence under autograd: slower, and with the memory that autograd needs.
    `auto` takes `triton` on a GPU that can run these sizes, `numba` on a CPU where it is installed, else `torch`.
    `state_dim` and `dtype` are N and u's dtype. Errors are those of `dispatch.choose_backend`.
    """
    return dispatch.choose_backend(backend, device, "u", _load_triton, int(state_dim), dtype, has_loops=True)


def _reference(x: Arguments) -> Tensor:
    """Return the output by the recurrence of each route."""
    outs = [
        selective_scan_recurrence(*one_direction(x[:8], r), reverse=flag, full_precision=x.full_precision)
        for r, flag in enumerate(x.reverse)
    ]
    return torch.stack(outs, 2)


def _check(op: str, routes: tuple[int, ...], tensors: Sequence[Tensor | None], full_precision: bool) -> None:
    """Raise a TypeError or ValueError that names the argument, its value and the expected one.

    `routes` is the shape of the route axis: (R,), or () for `selective_scan`, which has no such axis. `op` is the
    public name: for `selective_scan_routes` alone u may have fewer sequences than routes.
    """
    named = dict(zip(Arguments._fields, tensors, strict=False))  # the fields after the tensors are left out
    if named["z"] is None:
        del named["z"]
    dispatch.check_are_tensors(op, named)
    u, A = named["u"], named["A"]
    shared = op == "selective_scan_routes"
    letters = "".join(f"{size}," for size in routes)
    in_u = (None,) if shared else routes
    dispatch.check_leading(op, "u", u, "(B,T,K,E)" if shared else f"(B,T,{letters}E)", (None, None, *in_u, None))
    if shared and routes[0] % u.shape[2]:
        raise ValueError(
            f"{op}: u has {u.shape[2]} sequences, shape {tuple(u.shape)}, expected a divisor of the {routes[0]} routes of reverse"
        )
    tokens, E = u.shape[:2], u.shape[-1]
    if A.dim() != len(routes) + 2 or A.shape[-1] < 1:
        raise ValueError(f"{op}: A has shape {tuple(A.shape)}, expected ({letters}E,N) with N at least 1")
    if not isinstance(full_precision, bool):
        raise TypeError(f"{op}: full_precision is {full_precision!r}, expected True or False")
    N = A.shape[-1]
    expected = {
        "u": tuple(u.shape),
        "delta": (*tokens, *routes, E),
        "A": (*routes, E, N),
        "D": (*routes, E),
        "delta_bias": (*routes, E),
    }
    expected |= {"z": (*tokens, E)} | dict.fromkeys(("B", "C"), (*tokens, *routes, N))
    dispatch.check_others(op, "u", named, expected, ("u", "delta", "B", "C", "z"), N=N)


def forward_flops(shape: Sequence[int], state_dim: int) -> int:
    """Count the FLOPs for delta of shape (B,T,R,E): 2 for each multiply-add of every state at every token.

    A state has `_MACS_PER_STATE` of them; per route these are the 4·T·E·N multiply-adds of the Vim paper. softplus, the
    skip D·u and the gate are element-wise and count as free, as do all operations of the reference backend in PyTorch's
    counter.
    """
    B, T, R, E = shape
    return 2 * _MACS_PER_STATE * B * T * R * E * state_dim


def backward_flops(shape: Sequence[int], state_dim: int) -> int:
    """Count two products for each of the forward pass; the repeated forward scan is not counted."""
    return 2 * forward_flops(shape, state_dim)


CUSTOM_OP = CustomOp(
    "selective_scan",
    Arguments,
    leading="u",
    select=lambda backend, x: selected_backend(backend, x.u.device, state_dim=x.A.shape[-1], dtype=x.u.dtype),
    reference=_reference,
    torch_path=torch_path,
    load_triton=_load_triton,
    load_loops=_load_loops,
    result_shapes=lambda module, x, keep_states: (
        x.delta.shape,
        module.states_shape(x.delta.shape, x.A.shape[-1], keep_states),
    ),
    # for the counts of FLOPs `CustomOp` passes x with shapes in place of tensors
    forward_flops=lambda x: forward_flops(x.delta, x.A[-1]),
    backward_flops=lambda x: backward_flops(x.delta, x.A[-1]),
)
