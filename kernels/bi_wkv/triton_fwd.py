"""Bi-WKV in Triton: the forward pass, and what it shares with the backward pass.

One program walks through one image and 32 channels for each of its warps, a channel to a thread, BLOCK_T tokens at a time. The
tokens of a block are a tuple of rows: a scan over them is straight-line code on a thread's own registers. Its latency is hidden by
the two directions, by the loads of a block, which are all in flight at once, and by the other programs.

Everything is in powers of two. A state (m, a, b) stands for the sums 2^m a and 2^m b, where m is a running maximum of exponents. This
is right for any k, w and u. The kernel goes through the tokens twice. Backward, it adds up blocks to the state behind each block,
which goes to scratch memory, 12 bytes for a block and channel. Forward, it has the state before the block in registers, fetches the
one behind it, and goes from both through the block. k and v are thus read twice, and little else is moved.

Where the weights change little over a block, |BLOCK_T w| + |u| ≤ GENTLE, as they do if both are divided by T, one exponent for each
direction serves a whole block: the token or state that it comes from has a weight of at least 2^−GENTLE in all outputs of the block,
and what is too small for a float beside it does not matter, whatever k is. That saves a fifth of the instructions, which are what
limits this kernel. Otherwise every token has its own maximum. Shape letters as in `reference`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import dtype_obstacle, launch
from .reference import Arguments

INTERPRETED = bool(triton.knobs.runtime.interpret)
DTYPES = torch.float32, torch.float16, torch.bfloat16
LOG2E = tl.constexpr(1.4426950408889634)
GENTLE = tl.constexpr(40.0)
FLOOR = tl.constexpr(-1e30)  # the exponent of an empty sum: finite, so that the difference of two is 0


@triton.jit
def step(w, m, a, b, exponent, x, y):
    """The state (m, a, b) after one more token, 2^exponent (x, y)."""
    before = m - w
    apart = tl.exp2(-tl.abs(before - exponent))
    of_state = tl.where(before >= exponent, 1.0, apart)
    of_token = tl.where(before >= exponent, apart, 1.0)
    return tl.maximum(before, exponent), a * of_state + x * of_token, b * of_state + y * of_token


@triton.jit
def add_block(w, m, a, b, exponents, xs, ys):
    """The state in front of a block, from the state (m, a, b) behind it. Unlike in `step`, no power waits for another."""
    BLOCK: tl.constexpr = len(exponents)
    top = m - BLOCK * w
    for j in tl.static_range(BLOCK):
        top = tl.maximum(top, exponents[j] - j * w)
    of_state = tl.exp2(m - BLOCK * w - top)
    a *= of_state
    b *= of_state
    for j in tl.static_range(BLOCK):
        of_token = tl.exp2(exponents[j] - j * w - top)
        a += xs[j] * of_token
        b += ys[j] * of_token
    return top, a, b


@triton.jit
def load_rows(pointer, left, there, C: tl.constexpr, BLOCK: tl.constexpr):
    """A tuple of BLOCK tokens in fp32; zeros from the `left`-th on."""
    rows = ()
    for j in tl.static_range(BLOCK):
        rows = rows + (tl.load(pointer + j * C, mask=there & (j < left), other=0.0).to(tl.float32),)
    return rows


@triton.jit
def exponents_of(rows, scale, left):
    """scale times the rows; from the `left`-th on an exponent that adds nothing."""
    exponents = ()
    for j in tl.static_range(len(rows)):
        exponents = exponents + (tl.where(j < left, rows[j] * scale, 2 * FLOOR),)
    return exponents


@triton.jit
def largest(rows, start):
    """The largest of `start` and the rows."""
    for j in tl.static_range(len(rows)):
        start = tl.maximum(start, rows[j])
    return start


@triton.jit
def powers_of(exponents, reference):
    """2^(exponent − reference), row by row."""
    rows = ()
    for j in tl.static_range(len(exponents)):
        rows = rows + (tl.exp2(exponents[j] - reference),)
    return rows


@triton.jit
def products(xs, ys):
    """Rows times rows."""
    rows = ()
    for j in tl.static_range(len(xs)):
        rows = rows + (xs[j] * ys[j],)
    return rows


@triton.jit
def sums_behind(decay, state, xs):
    """At each token the sum of the rows behind it, times `decay` for each token in between; `state` is the sum behind the block."""
    sums = ()
    for j in tl.static_range(len(xs) - 1, -1, -1):
        sums = (state,) + sums
        state = state * decay + xs[j]
    return sums


@triton.jit
def is_gentle(w, u, BLOCK: tl.constexpr):
    """Whether one exponent serves a whole block, for all channels of the program."""
    return tl.max(tl.abs(w) * BLOCK + tl.abs(u), 0) <= GENTLE


@triton.jit
def states_behind(w, m, a, b, exponents, xs, ys):
    """The state at each token of a block, from the tokens behind it; (m, a, b) is the state behind the block."""
    states = ()
    for j in tl.static_range(len(exponents) - 1, -1, -1):
        states = ((m, a, b),) + states
        m, a, b = step(w, m, a, b, exponents[j], xs[j], ys[j])
    return states


@triton.jit
def nothing(BLOCK_C: tl.constexpr):
    """The state before any token."""
    zero = tl.zeros((BLOCK_C,), tl.float32)
    return zero + FLOOR, zero, zero


@triton.jit
def load_state(pointer, there, C: tl.constexpr):
    """(m, a, b) from memory, where they are C apart."""
    m = tl.load(pointer, mask=there, other=FLOOR)
    return m, tl.load(pointer + C, mask=there, other=0.0), tl.load(pointer + 2 * C, mask=there, other=0.0)


@triton.jit
def store_state(pointer, there, C: tl.constexpr, m, a, b):
    """The reverse of `load_state`. Between the two, one program needs no barrier: a channel belongs to one thread."""
    tl.store(pointer, m, mask=there)
    tl.store(pointer + C, a, mask=there)
    tl.store(pointer + 2 * C, b, mask=there)


@triton.jit
def ones(like, BLOCK: tl.constexpr):
    """A tuple of BLOCK rows of ones in the shape of `like`."""
    rows = ()
    for j in tl.static_range(BLOCK):
        rows = rows + (tl.full(like.shape, 1.0, tl.float32),)
    return rows


@triton.jit(do_not_specialize=["T", "bucket"])
def forward_kernel(
    w_ptr,
    u_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    behind_ptr,
    T,
    bucket,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Write out and, with KEEP, the binary logarithm of the denominator. `bucket` is a key for tuning.

    The compiler knows C, and the rows' addresses become one address and constants: a third of the instructions fewer.
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = c < C
    w = tl.load(w_ptr + c, mask=there, other=0.0) * LOG2E
    u = tl.load(u_ptr + c, mask=there, other=0.0) * LOG2E
    blocks = tl.cdiv(T, BLOCK_T)
    start = tl.program_id(0).to(tl.int64) * T * C + c
    behind_ptr += tl.program_id(0).to(tl.int64) * blocks * (3 * C) + c
    one = ones(w, BLOCK_T)

    m, a, b = nothing(BLOCK_C)
    for done in tl.range(0, blocks):
        i = blocks - 1 - done
        store_state(behind_ptr + tl.cast(i, tl.int64) * (3 * C), there, C, m, a, b)
        at, left = start + tl.cast(i, tl.int64) * (BLOCK_T * C), T - i * BLOCK_T
        k = exponents_of(load_rows(k_ptr + at, left, there, C, BLOCK_T), LOG2E, left)
        v = load_rows(v_ptr + at, left, there, C, BLOCK_T)
        m, a, b = add_block(w, m, a, b, k, v, one)

    m, a, b = nothing(BLOCK_C)
    if is_gentle(w, u, BLOCK_T):
        decay = tl.exp2(-w)
        bonus = tl.exp2(u)
        k_ahead = load_rows(k_ptr + start, T, there, C, BLOCK_T)
        v_ahead = load_rows(v_ptr + start, T, there, C, BLOCK_T)
        for i in tl.range(0, blocks):
            at, left = start + tl.cast(i, tl.int64) * (BLOCK_T * C), T - i * BLOCK_T
            m_right, a_right, b_right = load_state(behind_ptr + tl.cast(i, tl.int64) * (3 * C), there, C)
            k = exponents_of(k_ahead, LOG2E, left)
            v = v_ahead
            k_ahead = load_rows(k_ptr + at + BLOCK_T * C, left - BLOCK_T, there, C, BLOCK_T)
            v_ahead = load_rows(v_ptr + at + BLOCK_T * C, left - BLOCK_T, there, C, BLOCK_T)

            m_block = largest(k, 2 * FLOOR)
            m_left = tl.maximum(m, m_block)
            a *= tl.exp2(m - m_left)
            b *= tl.exp2(m - m_left)
            m_both = tl.maximum(m_left, m_right)
            m_right_block = tl.maximum(m_right, m_block)
            x = powers_of(k, m_right_block)
            to_block = tl.exp2(m_right - m_right_block)
            b_rights = sums_behind(decay, b_right * to_block, x)
            a_rights = sums_behind(decay, a_right * to_block, products(x, v))
            of_left = tl.exp2(m_left - m_both)
            of_right = tl.exp2(m_right_block - m_both)
            of_own = of_left * bonus
            x = powers_of(k, m_left)
            m = m - BLOCK_T * w
            for j in tl.static_range(BLOCK_T):
                y = x[j] * v[j]
                total = b * of_left + b_rights[j] * of_right + x[j] * of_own
                mean = (a * of_left + a_rights[j] * of_right + y * of_own) / total
                tl.store(out_ptr + at + j * C, mean.to(out_ptr.dtype.element_ty), mask=there & (j < left))
                if KEEP:
                    tl.store(lse_ptr + at + j * C, m_both + tl.log2(total), mask=there & (j < left))
                a = a * decay + y
                b = b * decay + x[j]
                m = tl.maximum(m, k[j] - (BLOCK_T - 1 - j) * w)
            a *= tl.exp2(m_left - m)
            b *= tl.exp2(m_left - m)
    else:
        for i in tl.range(0, blocks):
            at, left = start + tl.cast(i, tl.int64) * (BLOCK_T * C), T - i * BLOCK_T
            k = exponents_of(load_rows(k_ptr + at, left, there, C, BLOCK_T), LOG2E, left)
            v = load_rows(v_ptr + at, left, there, C, BLOCK_T)
            m_right, a_right, b_right = load_state(behind_ptr + tl.cast(i, tl.int64) * (3 * C), there, C)
            right = states_behind(w, m_right, a_right, b_right, k, v, one)
            for j in tl.static_range(BLOCK_T):
                own = k[j] + u
                m_both = tl.maximum(tl.maximum(m, right[j][0]), own)
                of_left = tl.exp2(m - m_both)
                of_right = tl.exp2(right[j][0] - m_both)
                of_own = tl.exp2(own - m_both)
                total = b * of_left + right[j][2] * of_right + of_own
                mean = (a * of_left + right[j][1] * of_right + v[j] * of_own) / total
                tl.store(out_ptr + at + j * C, mean.to(out_ptr.dtype.element_ty), mask=there & (j < left))
                if KEEP:
                    tl.store(lse_ptr + at + j * C, m_both + tl.log2(total), mask=there & (j < left))
                m, a, b = step(w, m, a, b, k[j], v[j], one[j])


def unsupported(dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run k of this dtype, or None where they can."""
    return dtype_obstacle("k", dtype, DTYPES)


def states_shape(shape: Sequence[int], keep_states: bool) -> tuple[int, ...]:
    """The shape of `forward`'s states for k of shape (B,T,C): a logarithm for each output, or none. Takes symbolic sizes."""
    return tuple(shape) if keep_states else (0,)


def configs(dtype: torch.dtype | None = None) -> list[triton.Config]:
    """The candidates of both kernels, for k of any dtype; the first is the default, which runs untuned."""
    return [config_of(8, 1), config_of(8, 2), config_of(8, 4), config_of(4, 1)]


def config_of(tokens: int, warps: int) -> triton.Config:
    """A thread has one channel: the number of warps follows from the channels of a program."""
    return triton.Config({"BLOCK_T": tokens, "BLOCK_C": 32 * warps}, num_warps=warps, num_stages=1)


def shared_arguments(x: Arguments) -> dict[str, object]:
    """The arguments that both kernels take: contiguous k and v, w and u in fp32, and the sizes.

    `bucket` has the powers of two of T and of the number of channels in all images: the best config depends on how full the device is.
    """
    B, T, C = x.k.shape
    return {
        "w_ptr": x.w.float().contiguous(),
        "u_ptr": x.u.float().contiguous(),
        "k_ptr": x.k.contiguous(),
        "v_ptr": x.v.contiguous(),
        "T": T,
        "C": C,
        "bucket": 64 * (B * C).bit_length() + T.bit_length(),
    }


def run(kernel, arguments: dict[str, object], states: int, x: Arguments, config: triton.Config | None) -> None:
    """Launch either kernel, with memory for `states` numbers of each block of a sequence.

    The blocks are those of the config with the most of them if it is not yet known which one will run.
    """
    B, T, C = x.k.shape
    blocks = max(triton.cdiv(T, one.kwargs["BLOCK_T"]) for one in ([config] if config else configs()))
    behind = x.k.new_empty((B, blocks, states, C), dtype=torch.float32)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return B, triton.cdiv(C, meta["BLOCK_C"])

    launch(kernel, configs, (x.k.dtype,), grid, arguments | {"behind_ptr": behind}, x.k.device, config)


def forward(x: Arguments, keep_states: bool, config: triton.Config | None = None) -> tuple[Tensor, Tensor]:
    """out (B,T,C) in k's dtype and states of shape `states_shape`, fp32. `config` is one of `configs`; None tunes."""
    arguments = shared_arguments(x)
    out = torch.empty_like(arguments["k_ptr"])
    states = out.new_empty(states_shape(out.shape, keep_states), dtype=torch.float32)
    run(forward_kernel, arguments | {"out_ptr": out, "lse_ptr": states, "KEEP": keep_states}, 3, x, config)
    return out, states
