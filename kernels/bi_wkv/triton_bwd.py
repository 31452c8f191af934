"""Triton backward pass of Bi-WKV, by recomputation from the kept logarithms L of the denominators.

Token i has the weight p_ti = e^{s_ti − L_t} in output t, and with g the gradient of out

    dv_i = Σ_t p_ti g_t        dk_i = v_i dv_i − Σ_t p_ti g_t out_t        du = Σ_t p_tt g_t (v_t − out_t)

These are sums of the same kind as the output's, over adjoint tokens with the exponents −L_t and the values g_t and g_t
out_t. They need no maximum beyond the running ones, since p ≤ 1. A token c between i and t stands for one of the |t−i|
− 1 factors e^{−w} of that pair,

    dw = −Σ_c e^{−w} (a G' − b H' + a' G − b' H)

with the states (a, b) of the tokens before c, (a', b') of those behind it, and (G, H), (G', H') of the adjoint tokens.

The kernel goes through the tokens as the forward kernel does, with two states in each direction and 24 bytes of scratch
memory for a block and channel. Like it, it cuts a long sequence into segments. Every program writes its own sums of dw
and du, and torch adds them up. There are no atomics: two runs give the same bits. Shape letters as in `triton_fwd`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_fwd
from .reference import Arguments
from .triton_blocks import (
    LOG2E,
    add_block,
    load_decay,
    load_sums,
    load_tokens,
    nothing,
    ones,
    states_behind,
    step,
    store_sums,
)


@triton.jit(do_not_specialize=["T", "bucket"])
def backward_kernel(
    dout_ptr,
    out_ptr,
    lse_ptr,
    w_ptr,
    u_ptr,
    k_ptr,
    v_ptr,
    dw_ptr,
    du_ptr,
    dk_ptr,
    dv_ptr,
    behind_ptr,
    ends_ptr,
    adjoint_ends_ptr,
    T,
    bucket,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Write dk and dv, and dw and du of each image and segment.

    With SEGMENT a program has that many tokens, and starts from the states at their ends; else it has all tokens.
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = c < C
    w = load_decay(w_ptr, c, there, T)  # with T of the whole sequence, which is cut to a segment below
    u = tl.load(u_ptr + c, mask=there, other=0.0) * LOG2E
    part = tl.program_id(0).to(tl.int64)
    start = part * T * C + c
    if SEGMENT:
        start += tl.program_id(2).to(tl.int64) * (SEGMENT * C)
        part = part * tl.num_programs(2) + tl.program_id(2)
        T = tl.minimum(T - tl.program_id(2) * SEGMENT, SEGMENT)
        behind_ptr += part * (SEGMENT // BLOCK_T * 6 * C) + c
        ends_ptr += part * (6 * C) + c
        adjoint_ends_ptr += part * (6 * C) + c
    else:
        behind_ptr += part * tl.cdiv(T, BLOCK_T) * (6 * C) + c
    blocks = tl.cdiv(T, BLOCK_T)
    one = ones(w, BLOCK_T)

    m, a, b = nothing(BLOCK_C)
    e, G, H = nothing(BLOCK_C)
    if SEGMENT:
        m, a, b = load_sums(ends_ptr + 3 * C, there, C)
        e, G, H = load_sums(adjoint_ends_ptr + 3 * C, there, C)
    for done in tl.range(0, blocks):
        i = blocks - 1 - done
        to = behind_ptr + i * (6 * C)
        store_sums(to, there, C, m, a, b)
        store_sums(to + 3 * C, there, C, e, G, H)
        at, left = start + i * (BLOCK_T * C), T - i * BLOCK_T
        k, v, _ = load_tokens(k_ptr + at, v_ptr + at, out_ptr + at, left, there, one, C, BLOCK_T, False)
        m, a, b = add_block(w, m, a, b, k, v, one)
        minus_L, g, g_out = load_tokens(lse_ptr + at, dout_ptr + at, out_ptr + at, left, there, one, C, BLOCK_T, True)
        e, G, H = add_block(w, e, G, H, minus_L, g, g_out)

    m, a, b = nothing(BLOCK_C)
    e, G, H = nothing(BLOCK_C)
    if SEGMENT:
        m, a, b = load_sums(ends_ptr, there, C)
        e, G, H = load_sums(adjoint_ends_ptr, there, C)
    dw = tl.zeros((BLOCK_C,), tl.float32)
    du = tl.zeros((BLOCK_C,), tl.float32)
    for i in tl.range(0, blocks):
        at, left = start + i * (BLOCK_T * C), T - i * BLOCK_T
        k, v, _ = load_tokens(k_ptr + at, v_ptr + at, out_ptr + at, left, there, one, C, BLOCK_T, False)
        minus_L, g, g_out = load_tokens(lse_ptr + at, dout_ptr + at, out_ptr + at, left, there, one, C, BLOCK_T, True)
        source = behind_ptr + i * (6 * C)
        m_behind, a_behind, b_behind = load_sums(source, there, C)
        right = states_behind(w, m_behind, a_behind, b_behind, k, v, one)
        m_behind, a_behind, b_behind = load_sums(source + 3 * C, there, C)
        adjoint_right = states_behind(w, m_behind, a_behind, b_behind, minus_L, g, g_out)

        for j in tl.static_range(BLOCK_T):
            e_right, G_right, H_right = adjoint_right[j][0], adjoint_right[j][1], adjoint_right[j][2]
            dw -= tl.exp2(m + e_right - w) * (a * G_right - b * H_right)
            dw -= tl.exp2(right[j][0] + e - w) * (right[j][1] * G - right[j][2] * H)
            from_left = tl.exp2(k[j] + e)
            from_right = tl.exp2(k[j] + e_right)
            from_own = tl.exp2(k[j] + u + minus_L[j])
            dv = from_left * G + from_right * G_right + from_own * g[j]
            dk = v[j] * dv - (from_left * H + from_right * H_right + from_own * g_out[j])
            du += from_own * (v[j] * g[j] - g_out[j])
            inside = there & (j < left)
            tl.store(dv_ptr + at + j * C, dv, mask=inside)
            tl.store(dk_ptr + at + j * C, dk, mask=inside)
            m, a, b = step(w, m, a, b, k[j], v[j], one[j])
            e, G, H = step(w, e, G, H, minus_L[j], g[j], g_out[j])

    tl.store(dw_ptr + part * C + c, dw, mask=there)
    tl.store(du_ptr + part * C + c, du, mask=there)


def backward(
    dout: Tensor, out: Tensor, states: Tensor, x: Arguments, config: triton.Config | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of w, u, k, v, each in its input's shape and dtype.

    `dout` is (B,T,C); `out` and `states` are `forward`'s results. `config` is one of `triton_fwd.configs`; None tunes.
    """
    B, T, C = x.k.shape
    segments = triton_fwd.count_segments(T)
    arguments = triton_fwd.shared_arguments(x)
    k, v = arguments["k_ptr"], arguments["v_ptr"]
    dout, out, lse = dout.to(x.k.dtype).contiguous(), out.contiguous(), states.contiguous()
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dw, du = (x.k.new_empty((B * segments, C), dtype=torch.float32) for _ in range(2))
    # with SEGMENT 0 the kernel reads no ends: any pointer will do
    split = {"ends_ptr": lse, "adjoint_ends_ptr": lse, "SEGMENT": 0}
    if segments > 1:
        ends = triton_fwd.scan_ends(arguments, k, v, out, config)
        adjoint = triton_fwd.scan_ends(arguments, lse, dout, out, config, adjoint=True)
        split = {"ends_ptr": ends, "adjoint_ends_ptr": adjoint, "SEGMENT": triton_fwd.SEGMENT}
    arguments |= {"dout_ptr": dout, "out_ptr": out, "lse_ptr": lse}
    arguments |= {"dw_ptr": dw, "du_ptr": du, "dk_ptr": dk, "dv_ptr": dv} | split
    triton_fwd.launch_segments(backward_kernel, arguments, 6, x, config, segments)
    return dw.sum(0).to(x.w.dtype), du.sum(0).to(x.u.dtype), dk, dv
