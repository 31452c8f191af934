"""Triton forward pass of the selective scan, and the parts that it shares with the backward pass.

One program, a single warp, scans 32 channels of one image on one route. A thread holds all states of a channel in fp32
registers, and the sum over the states needs no exchange and no barrier. All routes are one launch: a route that scans
backward counts its tokens from the end, and a route finds its sequence of u by its number. The next AHEAD tokens are
loaded while these are computed: one where a token has work enough for its loads, several where a channel has a single
state.

With few images there would be few programs, and a token of one program takes as long as its loads and its chain of
operations. Then the tokens are cut into segments of SEGMENT, in three launches. The first finds the state at the end of
each segment but the last, from h = 0, with the sum of its Δ. From these the second finds the state at the start of each
but the first; exp(A ΣΔ) is the decay of a whole segment. The third scans all segments at once, each from its start.

exp(Δ A) is 2^(Δ A log₂e), one instruction of the special function unit, which limits the kernel in two-byte elements.

u, delta, B, C and z are read by their own strides, as long as channels and states lie side by side: they may be slices
of a projection's output. Shape letters as in `reference`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import INTERPRETED as INTERPRETED  # callers find it here, as in any forward module
from ..triton_launch import ceil_div, direction_bits, dtype_obstacle, launch
from ..triton_math import LOG2E, invert, load_fp32, sigmoid
from .reference import Arguments

STATE_DIMS = 1, 8, 16, 32  # each has an entry in _AHEAD_OF_ENDS, which is read for long sequences of few images alone
DTYPES = torch.float32, torch.float16, torch.bfloat16
BLOCK = 32  # channels of a program
# tokens from one kept state to the next: N / 64 of the memory of an fp32 activation. It is a multiple of `ahead` and of
# the backward pass's `span`: the kernels go through a group in steps of these
GROUP = 64
# tokens that are loaded at once, see `ahead`: where N is 1; and by N with ENDS, where only the state at the end is
# computed; more tokens would spill registers
_AHEAD_OF_ONE_STATE, _AHEAD_OF_ENDS = 8, {1: 8, 8: 4, 16: 4, 32: 2}
SEGMENT = 256  # tokens, a multiple of GROUP and of what is loaded at once
FEW = 512  # programs, one for each scheduler of a large GPU; with more, a second one runs while the first one waits
AT_ONCE = 8  # segments whose states are loaded at once

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def place(T, R, E, reverse, BLOCK: tl.constexpr):
    """Return this program's image (int64), route and first channel, and the first token and the step of its scan."""
    program, blocks = tl.program_id(0), tl.cdiv(E, BLOCK)
    r, b = (program // blocks) % R, (program // (blocks * R)).to(tl.int64)
    back = (reverse >> r) & 1
    return b, r, program % blocks * BLOCK, back * (T - 1), 1 - 2 * back


@triton.jit
def softplus(x):
    """Return log(1 + eˣ) = max(x, 0) + log(1 + e), e = e^−|x|.

    With w the rounded 1 + e, log(1 + e) is log w + (e − (w − 1)) / w: the second term restores the rounding of w.
    """
    e = tl.exp2(tl.abs(x) * -LOG2E)
    w = 1.0 + e
    # `tl.maximum` drops NaN by default
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + (tl.log2(w) * LN2 + (e - (w - 1.0)) * invert(w))


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
    edges_ptr,
    steps_ptr,
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
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GATE: tl.constexpr,
    AHEAD: tl.constexpr,
    KEEP: tl.constexpr,
    SEGMENT: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Write out and, with KEEP, the state before every GROUP tokens except the first. `x_b`, `x_t`, `x_r`: x's strides.

    With SEGMENT a program has that many tokens, and starts from its state in edges (B,R,S−1,E,N), the first one from
    zero. With ENDS it writes only the state at its end, to edges, and the sum of its Δ, to steps (B,R,S−1,E); these
    segments are full. Edges are laid out as A is: otherwise Triton gives h another layout than the decays.
    """
    b, r, channel, first, step = place(T, R, E, reverse, BLOCK)
    segment = tl.program_id(1) if SEGMENT else 0
    tokens = T
    if SEGMENT:
        first += step * segment * SEGMENT
        tokens = tl.minimum(T - segment * SEGMENT, SEGMENT)
    e, n = channel + tl.arange(0, BLOCK), tl.arange(0, N)
    inside = e < E
    u_ptr += b * u_b + (r % K if K else r) * u_r + first.to(tl.int64) * u_t
    delta_ptr += b * delta_b + r * delta_r + first.to(tl.int64) * delta_t
    B_ptr += b * B_b + r * B_r + first.to(tl.int64) * B_t
    C_ptr += b * C_b + r * C_r + first.to(tl.int64) * C_t
    out_ptr += ((b * T + first) * R + r) * E
    if GATE:
        z_ptr += b * z_b + first.to(tl.int64) * z_t
    groups = (T + GROUP - 1) // GROUP
    states_ptr += (b * R + r) * (groups - 1) * N * E
    tile = e[None, :] * N + n[:, None]
    if SEGMENT:
        states_ptr += tl.maximum(segment * (SEGMENT // GROUP) - 1, 0).to(tl.int64) * N * E
        edge = (b * R + r) * (tl.cdiv(T, SEGMENT) - 1) + segment

    exponent = tl.load(A_ptr + r * E * N + tile, mask=inside[None, :], other=0.0) * LOG2E
    skip = tl.load(D_ptr + r * E + e, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + r * E + e, mask=inside, other=0.0)
    h = tl.zeros((N, BLOCK), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if SEGMENT and not ENDS:
        h = tl.load(edges_ptr + (edge - 1) * E * N + tile, mask=inside[None, :] & (segment > 0), other=0.0)
    us = (tl.load(u_ptr + e, mask=inside, other=0.0),)
    deltas = (tl.load(delta_ptr + e, mask=inside, other=0.0),)
    Bs = (tl.load(B_ptr + n),)
    Cs = (tl.load(C_ptr + n),)
    for k in tl.static_range(1, AHEAD):
        u_ptr += step * u_t
        delta_ptr += step * delta_t
        B_ptr += step * B_t
        C_ptr += step * C_t
        us += (tl.load(u_ptr + e, mask=inside & (k < tokens), other=0.0),)
        deltas += (tl.load(delta_ptr + e, mask=inside & (k < tokens), other=0.0),)
        # n >= 0 is always true: it gives the condition on the token, a scalar, the shape of a mask
        Bs += (tl.load(B_ptr + n, mask=(n >= 0) & (k < tokens), other=0.0),)
        Cs += (tl.load(C_ptr + n, mask=(n >= 0) & (k < tokens), other=0.0),)
    for i in tl.range(0, tokens, AHEAD):
        if KEEP:
            if (segment + i > 0) & (i % GROUP == 0):
                tl.store(states_ptr + n[:, None] * E + e[None, :], h, mask=inside[None, :])
                states_ptr += N * E
        next_us, next_deltas, next_Bs, next_Cs = (), (), (), ()
        for k in tl.static_range(AHEAD):
            more = i + (AHEAD + k) < tokens
            u_ptr += step * u_t
            delta_ptr += step * delta_t
            B_ptr += step * B_t
            C_ptr += step * C_t
            next_us += (tl.load(u_ptr + e, mask=inside & more, other=0.0),)
            next_deltas += (tl.load(delta_ptr + e, mask=inside & more, other=0.0),)
            next_Bs += (tl.load(B_ptr + n, mask=(n >= 0) & more, other=0.0),)
            next_Cs += (tl.load(C_ptr + n, mask=(n >= 0) & more, other=0.0),)
        for k in tl.static_range(AHEAD):
            here = inside if k == 0 else inside & (i + k < tokens)
            u, delta, B, C = us[k], deltas[k], Bs[k], Cs[k]
            if GATE:
                z = load_fp32(z_ptr + e, here)
                z_ptr += step * z_t

            size = softplus(delta.to(tl.float32) + bias)
            h = tl.exp2(exponent * size[None, :]) * h + B.to(tl.float32)[:, None] * (size * u.to(tl.float32))[None, :]
            if ENDS:
                total += size
            else:
                y = tl.sum(C.to(tl.float32)[:, None] * h, 0) + skip * u.to(tl.float32)
                if GATE:
                    y = y * (z * sigmoid(z))
                tl.store(out_ptr + e, y, mask=here)
                out_ptr += step * R * E
        us, deltas, Bs, Cs = next_us, next_deltas, next_Bs, next_Cs
    if ENDS:
        tl.store(edges_ptr + edge * E * N + tile, h, mask=inside[None, :])
        tl.store(steps_ptr + edge * E + e, total, mask=inside)


@triton.jit(do_not_specialize=["segments", "R", "E"])
def starts_kernel(
    A_ptr, steps_ptr, ends_ptr, starts_ptr, segments, R, E, N: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Write the states behind each segment to starts (B,R,segments,E,N).

    They follow from the states of each segment alone, `ends`, and the sums of its Δ, `steps` (B,R,segments,E). A thread
    has one state of a channel.
    """
    route, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < E * N
    exponent = tl.load(A_ptr + route % R * E * N + place, mask=inside, other=0.0) * LOG2E
    steps_ptr += route.to(tl.int64) * segments * E + place // N
    ends_ptr += route.to(tl.int64) * segments * E * N + place
    starts_ptr += route.to(tl.int64) * segments * E * N + place
    h = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, segments, AT_ONCE):
        steps, ends = (), ()
        for k in tl.static_range(AT_ONCE):
            there = inside & (first + k < segments)
            steps += (tl.load(steps_ptr + k * E, mask=there, other=0.0),)
            ends += (tl.load(ends_ptr + k * E * N, mask=there, other=0.0),)
        for k in tl.static_range(AT_ONCE):
            h = tl.exp2(exponent * steps[k]) * h + ends[k]
            tl.store(starts_ptr + k * E * N, h, mask=inside & (first + k < segments))
        steps_ptr += AT_ONCE * E
        ends_ptr += AT_ONCE * E * N
        starts_ptr += AT_ONCE * E * N


def unsupported(state_dim: int, dtype: torch.dtype) -> str | None:
    """Return why these kernels cannot run A with `state_dim` states and u of `dtype`, or None."""
    if state_dim not in STATE_DIMS:
        return f"A's last axis N is {state_dim}, expected one of {', '.join(map(str, STATE_DIMS))}"
    return dtype_obstacle("u", dtype, DTYPES)


def states_shape(shape: Sequence[int], state_dim: int, keep_states: bool) -> tuple[int, int, int, int, int]:
    """Return the shape of `forward`'s states for delta (B,T,R,E), one per group except the first.

    Takes symbolic sizes.
    """
    images, T, R, E = shape
    return images, R, (T + GROUP - 1) // GROUP - 1 if keep_states else 0, state_dim, E


def ahead(state_dim: int, ends: bool = False) -> int:
    """Return how many tokens the forward kernel loads at once; `ends` is its ENDS."""
    return _AHEAD_OF_ENDS[state_dim] if ends else _AHEAD_OF_ONE_STATE if state_dim == 1 else 1


def constants(state_dim: int, gate: bool, shared: int) -> dict[str, int]:
    """Return the compile-time constants of both kernels.

    `shared` is K where routes share sequences, 0 if each has its own.
    """
    return {"N": state_dim, "K": shared, "BLOCK": BLOCK, "GROUP": GROUP, "GATE": gate}


def shared_arguments(x: Arguments) -> dict[str, object]:
    """Return the arguments that both kernels take: activations, their strides, parameters in fp32, and the sizes."""
    activations = {"u": x.u, "delta": x.delta, "B": x.B, "C": x.C}
    # the kernels compute a route times its stride in int32
    activations = {
        name: tensor if tensor.stride(-1) == 1 and tensor.stride(2) * tensor.shape[2] < 2**31 else tensor.contiguous()
        for name, tensor in activations.items()
    }
    arguments = {f"{name}_ptr": tensor for name, tensor in activations.items()}
    arguments |= {
        f"{name}_{axis}": tensor.stride(i) for name, tensor in activations.items() for i, axis in enumerate("btr")
    }
    gate = x.u if x.z is None else x.z if x.z.stride(-1) == 1 else x.z.contiguous()
    arguments |= {"z_ptr": gate, "z_b": gate.stride(0), "z_t": gate.stride(1)}
    arguments |= {
        f"{name}_ptr": tensor.float().contiguous() for name, tensor in (("A", x.A), ("D", x.D), ("bias", x.delta_bias))
    }
    _, T, R, E = x.delta.shape
    K = x.u.shape[2]
    arguments |= {"T": T, "R": R, "E": E, "reverse": direction_bits(x.reverse)}
    return arguments | constants(x.A.shape[-1], x.z is not None, K if K < R else 0)


def programs(shape: Sequence[int]) -> int:
    """Return how many programs a launch has for delta of shape (B,T,R,E)."""
    images, _, R, E = shape
    return images * R * -(-E // BLOCK)


def count_segments(shape: Sequence[int]) -> int:
    """Return how many segments the tokens are cut into for delta of shape (B,T,R,E).

    One where there are more than `FEW` programs, since every token is then scanned twice for nothing; and one where
    there would be less than three segments, which save less time than two more launches take.
    """
    tokens = shape[1]
    return 1 if programs(shape) > FEW or tokens < 3 * SEGMENT else ceil_div(tokens, SEGMENT)


def configs(dtype: torch.dtype | None = None) -> list[triton.Config]:
    """Return the one config of both kernels, a warp for each program: without tuning every run gives the same bits."""
    return [triton.Config({}, num_warps=1, num_stages=1)]


def forward(x: Arguments, keep_states: bool, config: triton.Config | None = None) -> tuple[Tensor, Tensor]:
    """Return out (B,T,R,E) in `x.out_dtype`, and states in fp32, of shape `states_shape`.

    It takes all sizes that are not `unsupported`.
    """
    shape, N = x.delta.shape, x.A.shape[-1]
    images, _, R, E = shape
    config = config or configs()[0]

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.u.device)

    def run(kernel: triton.JITFunction, grid: tuple[int, ...], **arguments: object) -> None:
        launch(kernel, configs, (), grid, arguments, x.u.device, config)

    out, states = torch.empty(shape, dtype=x.out_dtype, device=x.u.device), fp32(*states_shape(shape, N, keep_states))
    given = shared_arguments(x) | {"out_ptr": out, "states_ptr": states}
    count, segments = programs(shape), count_segments(shape)
    # with SEGMENT 0 the kernel reads neither: any pointer will do
    split = {"edges_ptr": states, "steps_ptr": states, "SEGMENT": 0}
    if segments > 1:
        ends, starts = (fp32(images, R, segments - 1, E, N) for _ in range(2))
        split = {"edges_ptr": ends, "steps_ptr": fp32(images, R, segments - 1, E), "SEGMENT": SEGMENT}
        run(forward_kernel, (count, segments - 1), **given | split, KEEP=False, ENDS=True, AHEAD=ahead(N, True))
        shared = {name: given[name] for name in ("A_ptr", "R", "E", "N", "BLOCK")}
        of_edges = {"steps_ptr": split["steps_ptr"], "ends_ptr": ends, "starts_ptr": starts, "segments": segments - 1}
        run(starts_kernel, (images * R, ceil_div(E * N, BLOCK)), **shared | of_edges, AT_ONCE=AT_ONCE)
        split["edges_ptr"] = starts
    run(forward_kernel, (count, segments), **given | split, KEEP=keep_states, ENDS=False, AHEAD=ahead(N))
    return out, states
