"""Triton backward pass of the selective scan, by recomputation.

One program, a single warp as in `triton_fwd`, walks the channels of one image and route from the last group of tokens
to the first, with the gradient of the state in fp32 registers. A group is done in two loops:

 1. Forward from the group's kept state: the state at the start of every SPAN tokens goes to scratch memory, which is
     that of one group, whatever T is.
 2. Backward, span by span: the decays and states of a span again, all in registers, and then, with a_t = exp(Δ_t A), dy
     = dL/dy, g_t = dL/dh_t,

        g_t = C_t dy_t + a_{t+1} g_{t+1}        p_t = g_t a_t h_{t−1}
        dC_t = Σ_e dy_t h_t                     dB_t = Σ_e g_t Δ_t u_t               du_t = Δ_t Σ_n g_t B_t + D dy_t
        dΔ_t = u_t Σ_n g_t B_t + Σ_n p_t A      dA = Σ_t Δ_t p_t                     dD = Σ_t dy_t u_t

Sums over states and sums over channels are both needed here. A state tile has the shape (n1,e1,n2,e2), with four n2 and
eight e2: Triton then spreads these over the 32 threads, and each thread has all n1 and e1. A sum over states or over
channels thus takes two or three shuffles instead of five. Neighbours in memory are neighbours in n1 or e1: if they were
neighbours in e2, the wide loads would lead Triton to another layout. With a single state, every thread has a channel.

Every program writes its own part of dB, dC and the parameters' gradients, and of du where routes share a sequence, and
torch adds them up. There are no atomics: two runs give the same bits. A token beyond T has Δ = 0 and changes no state.
Shape letters as in `triton_fwd`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import launch
from ..triton_math import LOG2E, load_fp32, sigmoid
from .reference import Arguments
from .triton_fwd import configs, place, programs, shared_arguments, softplus

_SPAN_OF_ONE_STATE = 8  # tokens of a span where N is 1, see `span`


@triton.jit
def over_states(x):
    """Return Σ_n of a state tile: (n1,e1,n2,e2) -> (e1,e2), first within the threads, then between them."""
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit
def over_channels(x):
    """Return Σ_e of a state tile: (n1,e1,n2,e2) -> (n1,n2), first within the threads, then between them."""
    return tl.sum(tl.sum(x, 1), 2)


@triton.jit
def channels(x):
    """Broadcast (e1,e2) along the channels of a state tile."""
    return x[None, :, None, :]


@triton.jit
def states(x):
    """Broadcast (n1,n2) along the states of a state tile."""
    return x[:, None, :, None]


@triton.jit(do_not_specialize=["T", "R", "E", "reverse"])
def backward_kernel(
    dout_ptr,
    states_ptr,
    u_ptr,
    delta_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    z_ptr,
    bias_ptr,
    du_ptr,
    ddelta_ptr,
    dA_ptr,
    dB_ptr,
    dC_ptr,
    dD_ptr,
    dz_ptr,
    dbias_ptr,
    scratch_ptr,
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
    SPAN: tl.constexpr,
):
    """Write du, ddelta and dz of each route, and dB, dC, dA, dD and dbias of each program.

    `x_b`, `x_t`, `x_r` are x's strides.
    """
    b, r, channel, first, step = place(T, R, E, reverse, BLOCK)
    STATES: tl.constexpr = 4 if N > 1 else 1  # how many of the 32 threads lie along the states
    CHANNELS: tl.constexpr = 32 // STATES
    n = tl.arange(0, N // STATES)[:, None] + N // STATES * tl.arange(0, STATES)[None, :]
    c = tl.arange(0, BLOCK // CHANNELS)[:, None] + BLOCK // CHANNELS * tl.arange(0, CHANNELS)[None, :]
    e = channel + c
    inside = e < E
    tile = n[:, None, :, None] * E + channels(e)
    flat = n[:, None, :, None] * BLOCK + channels(c)
    start = first.to(tl.int64)
    u_ptr += b * u_b + (r % K if K else r) * u_r + start * u_t
    delta_ptr += b * delta_b + r * delta_r + start * delta_t
    B_ptr += b * B_b + r * B_r + start * B_t
    C_ptr += b * C_b + r * C_r + start * C_t
    row = (b * T + first) * R + r
    dout_ptr += row * E
    du_ptr += row * E
    ddelta_ptr += row * E
    blocks = tl.cdiv(E, BLOCK)
    share = row * blocks + channel // BLOCK
    dB_ptr += share * N
    dC_ptr += share * N
    if GATE:
        z_ptr += b * z_b + start * z_t
        dz_ptr += row * E
    groups = (T + GROUP - 1) // GROUP
    states_ptr += (b * R + r) * (groups - 1) * N * E
    scratch_ptr += tl.program_id(0).to(tl.int64) * (GROUP // SPAN * N * BLOCK)

    A = tl.load(A_ptr + (r * E + channels(e)) * N + states(n), mask=channels(inside), other=0.0)
    skip = tl.load(D_ptr + r * E + e, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + r * E + e, mask=inside, other=0.0)
    carry = tl.zeros_like(A)  # a_t g_t of the token after
    dA = tl.zeros_like(A)
    dD = tl.zeros_like(skip)
    dbias = tl.zeros_like(skip)
    for behind in tl.range(0, groups, disable_licm=True):
        group = groups - 1 - behind
        h = tl.load(
            states_ptr + (group - 1).to(tl.int64) * (N * E) + tile, mask=channels(inside) & (group > 0), other=0.0
        )
        spans = (tl.minimum(GROUP, T - group * GROUP) + SPAN - 1) // SPAN
        for j in tl.range(0, spans, disable_licm=True):
            tl.store(scratch_ptr + j * (N * BLOCK) + flat, h)
            if j + 1 < spans:
                for k in tl.static_range(SPAN):
                    at = step * (group * GROUP + j * SPAN + k).to(tl.int64)
                    u = load_fp32(u_ptr + at * u_t + e, inside)
                    delta = load_fp32(delta_ptr + at * delta_t + e, inside)
                    B = tl.load(B_ptr + at * B_t + n).to(tl.float32)
                    size = softplus(delta + bias)
                    h = tl.exp2(A * channels(size * LOG2E)) * h + states(B) * channels(size * u)
        tl.debug_barrier()  # other threads read what this one wrote to scratch memory

        for back in tl.range(0, spans, disable_licm=True):
            j = spans - 1 - back
            h = tl.load(scratch_ptr + j * (N * BLOCK) + flat)
            us, raws, Bs, Cs, douts, zs = (), (), (), (), (), ()
            for k in tl.static_range(SPAN):
                i = group * GROUP + j * SPAN + k
                at = step * i.to(tl.int64)
                here = inside & (i < T)
                some = (n >= 0) & (i < T)
                us = us + (load_fp32(u_ptr + at * u_t + e, here),)
                raws = raws + (load_fp32(delta_ptr + at * delta_t + e, here) + bias,)
                Bs = Bs + (load_fp32(B_ptr + at * B_t + n, some),)
                Cs = Cs + (load_fp32(C_ptr + at * C_t + n, some),)
                douts = douts + (load_fp32(dout_ptr + at * (R * E) + e, here),)
                if GATE:
                    zs = zs + (load_fp32(z_ptr + at * z_t + e, here),)

            sizes, decays, before, dys = (), (), (), ()
            for k in tl.static_range(SPAN):
                i = group * GROUP + j * SPAN + k
                at = step * i.to(tl.int64)
                size = tl.where(i < T, softplus(raws[k]), 0.0)
                decay = tl.exp2(A * channels(size * LOG2E))
                sizes, decays, before = sizes + (size,), decays + (decay,), before + (h,)
                h = decay * h + states(Bs[k]) * channels(size * us[k])
                dy = douts[k]
                if GATE:
                    z = zs[k]
                    opening = sigmoid(z)
                    dz = dy * (over_states(states(Cs[k]) * h) + skip * us[k]) * opening * (1.0 + z * (1.0 - opening))
                    tl.store(dz_ptr + at * (R * E) + e, dz, mask=inside & (i < T))
                    dy = dy * (z * opening)
                dys = dys + (dy,)
                tl.store(dC_ptr + at * (R * blocks * N) + n, over_channels(channels(dy) * h), mask=(n >= 0) & (i < T))

            for k in tl.static_range(SPAN - 1, -1, -1):
                i = group * GROUP + j * SPAN + k
                at = step * i.to(tl.int64)
                here = inside & (i < T)
                u, raw, size, dy = us[k], raws[k], sizes[k], dys[k]
                g = states(Cs[k]) * channels(dy) + carry
                carry = decays[k] * g
                dB = over_channels(g * channels(size * u))
                tl.store(dB_ptr + at * (R * blocks * N) + n, dB, mask=(n >= 0) & (i < T))
                p = carry * before[k]
                dinput = over_states(g * states(Bs[k]))
                ddelta = (dinput * u + over_states(p * A)) * sigmoid(raw)
                dA += p * channels(size)
                dbias += tl.where(i < T, ddelta, 0.0)
                dD += dy * u
                tl.store(du_ptr + at * (R * E) + e, dinput * size + dy * skip, mask=here)
                tl.store(ddelta_ptr + at * (R * E) + e, ddelta, mask=here)
        tl.debug_barrier()  # the next group overwrites the scratch memory

    tl.store(dA_ptr + (b * R + r) * N * E + tile, dA, mask=channels(inside))
    tl.store(dD_ptr + (b * R + r) * E + e, dD, mask=inside)
    tl.store(dbias_ptr + (b * R + r) * E + e, dbias, mask=inside)


def span(state_dim: int) -> int:
    """Return how many tokens have their decays and states in a program's registers at once.

    Triton before 3.7 gives more than one a layout that spills, and saves no instructions per token.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        return 1
    return max(1, 32 // state_dim) if state_dim > 1 else _SPAN_OF_ONE_STATE


def backward(
    dout: Tensor, states: Tensor, x: Arguments, config: triton.Config | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of u, delta, ... delta_bias, each in its input's shape and dtype.

    They are contiguous, as the fake kernels of `CustomOp` promise. `dout` is (B,T,R,E), `states` those of `forward`.
    `config` is one of `triton_fwd.configs`; None takes the only one.
    """
    u, z = x.u, x.z
    images, T, R, E = shape = x.delta.shape
    K, N = u.shape[2], x.A.shape[-1]
    arguments = shared_arguments(x)
    count, SPAN = programs(shape), span(N)
    blocks = count // (images * R)

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=u.device)

    du = torch.empty(shape, dtype=u.dtype, device=u.device) if K == R else fp32(*shape)
    ddelta = torch.empty(shape, dtype=u.dtype, device=u.device)
    dB, dC = (fp32(images, T, R, blocks, N) for _ in range(2))
    dA, dD, dbias = fp32(images, R, N, E), fp32(images, R, E), fp32(images, R, E)
    dz = fp32(0) if z is None else fp32(images, T, R, E)
    arguments |= {
        "dout_ptr": dout.to(x.out_dtype).contiguous(),
        "states_ptr": states.contiguous(),
        "du_ptr": du,
        "ddelta_ptr": ddelta,
    }
    arguments |= {"dA_ptr": dA, "dB_ptr": dB, "dC_ptr": dC, "dD_ptr": dD, "dz_ptr": dz, "dbias_ptr": dbias}
    arguments |= {"scratch_ptr": fp32(count, arguments["GROUP"] // SPAN, N, arguments["BLOCK"]), "SPAN": SPAN}
    launch(backward_kernel, configs, (), (count,), arguments, u.device, config or configs()[0])

    if K < R:
        du = du.unflatten(2, (R // K, K)).sum(2)
    sums = du, ddelta, dA.sum(0).mT, dB.sum(3), dC.sum(3), dD.sum(0), None if z is None else dz.sum(2), dbias.sum(0)
    return tuple(g if g is None else g.to(tensor.dtype).contiguous() for g, tensor in zip(sums, x[:8], strict=True))
