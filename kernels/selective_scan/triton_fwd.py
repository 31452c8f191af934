"""The selective scan in Triton: the forward pass, and what it shares with the backward pass.

One program, a single warp, scans 32 channels of one image in one direction. A thread holds all states of a channel in fp32
registers, and the sum over the states needs no exchange and no barrier. Both directions are one launch: a backward direction counts
its tokens from the end. The next token is loaded while this one is computed.

exp(Δ A) is 2^(Δ A log₂e), one instruction of the special function unit, which limits the kernel in two-byte elements.

u, delta, B, C and z are read by their own strides, as long as channels and states lie side by side: they may be slices of a
projection's output.

Shape letters: B images, T tokens, R directions, E channels, N states of a channel; the tensors B, C and D are those of the
equations.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
STATE_DIMS = 8, 16, 32
DTYPES = torch.float32, torch.float16, torch.bfloat16
BLOCK = 32  # channels of a program
GROUP = 64  # tokens from one kept state to the next: N / 64 of the memory of an fp32 activation

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def place(T, R, E, reverse, BLOCK: tl.constexpr):
    """This program's image (int64), direction and first channel, and the first token and the step of its scan."""
    program, blocks = tl.program_id(0), tl.cdiv(E, BLOCK)
    r, b = (program // blocks) % R, (program // (blocks * R)).to(tl.int64)
    back = (reverse >> r) & 1
    return b, r, program % blocks * BLOCK, back * (T - 1), 1 - 2 * back


@triton.jit
def softplus(x):
    """log(1 + eˣ) = max(x, 0) + log(1 + e), e = e^−|x|. With w the rounded 1 + e, log(1 + e) is log w + (e − (w − 1)) / w."""
    e = tl.exp2(tl.abs(x) * -LOG2E)
    w = 1.0 + e
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + (tl.log2(w) * LN2 + (e - (w - 1.0)) / w)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit(do_not_specialize=["T", "R", "E", "reverse"])
def forward_kernel(
    u_ptr,
    delta_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    z_ptr,
    bias_ptr,
    out_ptr,
    states_ptr,
    u_b,
    u_t,
    u_r,
    delta_b,
    delta_t,
    delta_r,
    B_b,
    B_t,
    B_r,
    C_b,
    C_t,
    C_r,
    z_b,
    z_t,
    T,
    R,
    E,
    reverse,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GATE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Write out and, with KEEP, the state at the start of every group of GROUP tokens except the first. `x_b`, `x_t`, `x_r`: x's strides."""
    b, r, channel, first, step = place(T, R, E, reverse, BLOCK)
    e, n = channel + tl.arange(0, BLOCK), tl.arange(0, N)
    inside = e < E
    u_ptr += b * u_b + r * u_r + first.to(tl.int64) * u_t
    delta_ptr += b * delta_b + r * delta_r + first.to(tl.int64) * delta_t
    B_ptr += b * B_b + r * B_r + first.to(tl.int64) * B_t
    C_ptr += b * C_b + r * C_r + first.to(tl.int64) * C_t
    out_ptr += ((b * T + first) * R + r) * E
    if GATE:
        z_ptr += b * z_b + first.to(tl.int64) * z_t
    groups = (T + GROUP - 1) // GROUP
    states_ptr += (b * R + r) * (groups - 1) * N * E

    exponent = tl.load(A_ptr + (r * E + e[None, :]) * N + n[:, None], mask=inside[None, :], other=0.0) * LOG2E
    skip = tl.load(D_ptr + r * E + e, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + r * E + e, mask=inside, other=0.0)
    h = tl.zeros((N, BLOCK), tl.float32)
    u = tl.load(u_ptr + e, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + e, mask=inside, other=0.0)
    B = tl.load(B_ptr + n)
    C = tl.load(C_ptr + n)
    for i in tl.range(0, T):
        if KEEP:
            if (i > 0) & (i % GROUP == 0):
                tl.store(states_ptr + n[:, None] * E + e[None, :], h, mask=inside[None, :])
                states_ptr += N * E
        more = i + 1 < T
        u_ptr += step * u_t
        delta_ptr += step * delta_t
        B_ptr += step * B_t
        C_ptr += step * C_t
        u_ahead = tl.load(u_ptr + e, mask=inside & more, other=0.0)
        delta_ahead = tl.load(delta_ptr + e, mask=inside & more, other=0.0)
        B_ahead = tl.load(B_ptr + n, mask=(n >= 0) & more, other=0.0)
        C_ahead = tl.load(C_ptr + n, mask=(n >= 0) & more, other=0.0)
        if GATE:
            z = tl.load(z_ptr + e, mask=inside, other=0.0).to(tl.float32)
            z_ptr += step * z_t

        size = softplus(delta.to(tl.float32) + bias)
        h = tl.exp2(exponent * size[None, :]) * h + B.to(tl.float32)[:, None] * (size * u.to(tl.float32))[None, :]
        y = tl.sum(C.to(tl.float32)[:, None] * h, 0) + skip * u.to(tl.float32)
        if GATE:
            y = y * (z * sigmoid(z))
        tl.store(out_ptr + e, y.to(out_ptr.dtype.element_ty), mask=inside)
        out_ptr += step * R * E
        u, delta, B, C = u_ahead, delta_ahead, B_ahead, C_ahead


def unsupported(state_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run A with `state_dim` states and u of `dtype`, or None where they can."""
    if state_dim not in STATE_DIMS:
        return f"A's last axis N is {state_dim}, expected one of {', '.join(map(str, STATE_DIMS))}"
    if dtype not in DTYPES:
        return f"u is {dtype}, expected one of {', '.join(map(str, DTYPES))}"
    if INTERPRETED and dtype == torch.bfloat16:
        return "u is torch.bfloat16, which Triton's interpreter does not have; expected torch.float32 or torch.float16"
    return None


def states_shape(shape: Sequence[int], state_dim: int, keep_states: bool) -> tuple[int, int, int, int, int]:
    """The shape of `forward`'s states for u of shape (B,T,R,E), one per group except the first. Takes symbolic sizes."""
    images, T, R, E = shape
    return images, R, (T + GROUP - 1) // GROUP - 1 if keep_states else 0, state_dim, E


def constants(state_dim: int, gate: bool) -> dict[str, int]:
    """The compile-time constants of both kernels."""
    return {"N": state_dim, "BLOCK": BLOCK, "GROUP": GROUP, "GATE": gate}


def shared_arguments(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, delta_bias: Tensor, reverse: Sequence[bool]
) -> dict[str, object]:
    """The arguments that both kernels take: activations with their strides, parameters in fp32, and the sizes."""
    activations = {"u": u, "delta": delta, "B": B, "C": C}
    activations = {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in activations.items()}
    arguments = {f"{name}_ptr": x for name, x in activations.items()}
    arguments |= {f"{name}_{axis}": x.stride(i) for name, x in activations.items() for i, axis in enumerate("btr")}
    gate = u if z is None else z if z.stride(-1) == 1 else z.contiguous()
    arguments |= {"z_ptr": gate, "z_b": gate.stride(0), "z_t": gate.stride(1)}
    arguments |= {f"{name}_ptr": x.float().contiguous() for name, x in (("A", A), ("D", D), ("bias", delta_bias))}
    sizes = {"T": u.shape[1], "R": u.shape[2], "E": u.shape[3], "reverse": sum(flag << r for r, flag in enumerate(reverse))}
    return arguments | sizes | constants(A.shape[-1], z is not None)


def programs(shape: Sequence[int]) -> int:
    """How many programs a launch has for u of shape (B,T,R,E)."""
    images, _, R, E = shape
    return images * R * -(-E // BLOCK)


def launch(kernel, count: int, arguments: dict[str, object], device: torch.device) -> None:
    """Run `count` programs of `kernel`, a warp each. There is one config: nothing is tuned, and every run gives the same bits."""
    here: AbstractContextManager = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with here:
        kernel[(count,)](**arguments, num_warps=1, num_stages=1)


def forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
    reverse: Sequence[bool],
    keep_states: bool,
) -> tuple[Tensor, Tensor]:
    """The output, and what the backward pass needs beside the inputs, for sizes that are not `unsupported`.

    Args:
        u, delta: (B,T,R,E) of one dtype. A: (R,E,N). B, C: (B,T,R,N). D, delta_bias: (R,E).
        z: (B,T,E), shared by the directions, or None.
        reverse: R flags; a direction with True is scanned from the last token.
        keep_states: whether `backward` will follow.

    Returns:
        out (B,T,R,E) in u's dtype; states in fp32, of shape `states_shape`.
    """
    arguments = shared_arguments(u, delta, A, B, C, D, z, delta_bias, reverse)
    out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    states = torch.empty(states_shape(u.shape, A.shape[-1], keep_states), dtype=torch.float32, device=u.device)
    arguments |= {"out_ptr": out, "states_ptr": states, "KEEP": keep_states}
    launch(forward_kernel, programs(u.shape), arguments, u.device)
    return out, states
