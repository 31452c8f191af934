"""Device functions of Bi-WKV's Triton kernels on a block of tokens, which is a tuple of rows; see `triton_fwd`."""

import triton
import triton.language as tl

from ..triton_math import LOG2E
from . import reference

GENTLE = tl.constexpr(40.0)  # bound of |BLOCK_T w| + |u| for one exponent per block, see `triton_fwd`
FLOOR = tl.constexpr(reference.EMPTY)
LARGEST = tl.constexpr(reference.LARGEST)


@triton.jit
def load_decay(w_ptr, c, there, T):
    """Load w in powers of two. It is NaN, which fills the channel, where `reference.check_decay` would refuse it."""
    w = tl.load(w_ptr + c, mask=there, other=0.0)
    return tl.where(tl.abs(w) * T > LARGEST, float("nan"), w) * LOG2E


@triton.jit
def load_tokens(
    k_ptr,
    v_ptr,
    out_ptr,
    left,
    there,
    one,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ADJOINT: tl.constexpr,
    WHOLE: tl.constexpr = 0,
):
    """Load a block's tokens as exponents and two values: k, v and 1; or with ADJOINT −L, g and g·out.

    Then `k_ptr` and `v_ptr` are those of L and g; else `out_ptr` is not read. `one`: rows of ones. `left`, `there` and
    WHOLE: see `load_rows`.
    """
    rows = load_rows(k_ptr, left, there, C, BLOCK, WHOLE)
    x = load_rows(v_ptr, left, there, C, BLOCK, WHOLE)
    if ADJOINT:
        y = products(x, load_rows(out_ptr, left, there, C, BLOCK, WHOLE))
        exponents = exponents_of(rows, -1.0, left, WHOLE)
    else:
        y = one
        exponents = exponents_of(rows, LOG2E, left, WHOLE)
    return exponents, x, y


@triton.jit
def step(w, m, a, b, exponent, x, y):
    """Return the state one token further on, from (m, a, b), w and the token 2^exponent (x, y).

    A state stands for the sums 2^m a and 2^m b, see `triton_fwd`.
    """
    before = m - w
    # one of the two powers is always 1: a single exp2 serves both
    apart = tl.exp2(-tl.abs(before - exponent))
    of_state = tl.where(before >= exponent, 1.0, apart)
    of_token = tl.where(before >= exponent, apart, 1.0)
    return tl.maximum(before, exponent), a * of_state + x * of_token, b * of_state + y * of_token


@triton.jit
def add_block(w, m, a, b, exponents, xs, ys):
    """Return the state in front of a block, from the state (m, a, b) behind it.

    The maximum comes first. Unlike in `step`, no power then waits for another.
    """
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
def load_rows(pointer, left, there, C: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr = 0):
    """Load a tuple of BLOCK tokens in fp32, with zeros from the `left`-th on, in the channels that are `there`.

    WHOLE: 1 where all tokens exist, 2 where all channels do as well. Without a mask for each row, all loads are under
    way at once: there are few registers for masks, and a load waits for one until an earlier load has come back.
    """
    rows = ()
    for j in tl.static_range(BLOCK):
        if WHOLE == 2:
            row = tl.load(pointer + j * C)
        elif WHOLE == 1:
            row = tl.load(pointer + j * C, mask=there, other=0.0)
        else:
            row = tl.load(pointer + j * C, mask=there & (j < left), other=0.0)
        rows = rows + (row.to(tl.float32),)
    return rows


@triton.jit
def store_row(pointer, row, j, left, there, WHOLE: tl.constexpr):
    """Store row j of a block, with the masks of `load_rows`."""
    if WHOLE == 2:
        tl.store(pointer, row)
    elif WHOLE == 1:
        tl.store(pointer, row, mask=there)
    else:
        tl.store(pointer, row, mask=there & (j < left))


@triton.jit
def exponents_of(rows, scale, left, WHOLE: tl.constexpr = 0):
    """Return scale times the rows, and from the `left`-th on an exponent that adds nothing."""
    exponents = ()
    for j in tl.static_range(len(rows)):
        exponent = rows[j] * scale
        if WHOLE == 0:
            exponent = tl.where(j < left, exponent, 2 * FLOOR)
        exponents = exponents + (exponent,)
    return exponents


@triton.jit
def largest(rows, start):
    """Return the element-wise maximum of `start` and the rows."""
    for j in tl.static_range(len(rows)):
        start = tl.maximum(start, rows[j])
    return start


@triton.jit
def powers_of(exponents, reference):
    """Return 2^(exponent − reference), row by row."""
    rows = ()
    for j in tl.static_range(len(exponents)):
        rows = rows + (tl.exp2(exponents[j] - reference),)
    return rows


@triton.jit
def products(xs, ys):
    """Multiply rows by rows."""
    rows = ()
    for j in tl.static_range(len(xs)):
        rows = rows + (xs[j] * ys[j],)
    return rows


@triton.jit
def sums_behind(decay, state, xs):
    """Return at each token the sum of the rows behind it, times `decay` for each token in between.

    `state` is the sum behind the block.
    """
    sums = ()
    for j in tl.static_range(len(xs) - 1, -1, -1):
        sums = (state,) + sums
        state = state * decay + xs[j]
    return sums


@triton.jit
def is_gentle(w, u, BLOCK: tl.constexpr):
    """Return whether one exponent serves a whole block, for all channels of the program."""
    return tl.max(tl.abs(w) * BLOCK + tl.abs(u), 0) <= GENTLE


@triton.jit
def states_behind(w, m, a, b, exponents, xs, ys):
    """Return the state at each token of a block, of the tokens behind it; (m, a, b) is the state behind the block."""
    states = ()
    for j in tl.static_range(len(exponents) - 1, -1, -1):
        states = ((m, a, b),) + states
        m, a, b = step(w, m, a, b, exponents[j], xs[j], ys[j])
    return states


@triton.jit
def nothing(BLOCK_C: tl.constexpr):
    """Return the state before any token."""
    zero = tl.zeros((BLOCK_C,), tl.float32)
    return zero + FLOOR, zero, zero


@triton.jit
def load_sums(pointer, there, C: tl.constexpr):
    """Load (m, a, b) from memory, where they are C apart."""
    m = tl.load(pointer, mask=there, other=FLOOR)
    return m, tl.load(pointer + C, mask=there, other=0.0), tl.load(pointer + 2 * C, mask=there, other=0.0)


@triton.jit
def store_sums(pointer, there, C: tl.constexpr, m, a, b):
    """Store (m, a, b) for `load_sums`.

    Between the two a program needs no barrier, since a channel belongs to one thread.
    """
    tl.store(pointer, m, mask=there)
    tl.store(pointer + C, a, mask=there)
    tl.store(pointer + 2 * C, b, mask=there)


@triton.jit
def ones(like, BLOCK: tl.constexpr):
    """Return a tuple of BLOCK rows of ones in the shape of `like`."""
    rows = ()
    for j in tl.static_range(BLOCK):
        rows = rows + (tl.full(like.shape, 1.0, tl.float32),)
    return rows


@triton.jit
def add_states(m, a, b, m_more, a_more, b_more):
    """Return the sum of two states."""
    top = tl.maximum(m, m_more)
    of_state, of_more = tl.exp2(m - top), tl.exp2(m_more - top)
    return top, a * of_state + a_more * of_more, b * of_state + b_more * of_more


@triton.jit
def sum_rows(w, offset, exponents, xs, ys):
    """Return the state that the rows make; row j has the exponent `exponents[j]` − (offset + j) w."""
    BLOCK: tl.constexpr = len(exponents)
    top = exponents[0] - offset * w
    for j in tl.static_range(1, BLOCK):
        top = tl.maximum(top, exponents[j] - (offset + j) * w)
    a, b = tl.zeros_like(w), tl.zeros_like(w)
    for j in tl.static_range(BLOCK):
        of_token = tl.exp2(exponents[j] - (offset + j) * w - top)
        a += xs[j] * of_token
        b += ys[j] * of_token
    return top, a, b


@triton.jit
def go_back(
    w, m, a, b, k_ptr, v_ptr, behind_ptr, i, T, there, one, C: tl.constexpr, BLOCK_T: tl.constexpr, WHOLE: tl.constexpr
):
    """Write the state (m, a, b) behind block i to scratch memory, and return the one in front of it."""
    at, left = i * (BLOCK_T * C), T - i * BLOCK_T
    k = load_rows(k_ptr + at, left, there, C, BLOCK_T, WHOLE)
    v = load_rows(v_ptr + at, left, there, C, BLOCK_T, WHOLE)
    store_sums(behind_ptr + i * (3 * C), there, C, m, a, b)
    return add_block(w, m, a, b, exponents_of(k, LOG2E, left, WHOLE), v, one)


@triton.jit
def go_gently(
    w,
    u,
    m,
    a,
    b,
    k_ptr,
    v_ptr,
    behind_ptr,
    out_ptr,
    lse_ptr,
    i,
    T,
    there,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    KEEP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write the outputs of block i from the state in front of it, and return the state behind it.

    One exponent for each direction serves the whole block.
    """
    at, left = i * (BLOCK_T * C), T - i * BLOCK_T
    k = load_rows(k_ptr + at, left, there, C, BLOCK_T, WHOLE)
    v = load_rows(v_ptr + at, left, there, C, BLOCK_T, WHOLE)
    m_right, a_right, b_right = load_sums(behind_ptr + i * (3 * C), there, C)
    k = exponents_of(k, LOG2E, left, WHOLE)
    decay = tl.exp2(-w)

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
    of_own = of_left * tl.exp2(u)
    x = powers_of(k, m_left)
    m = m - BLOCK_T * w
    for j in tl.static_range(BLOCK_T):
        y = x[j] * v[j]
        total = b * of_left + b_rights[j] * of_right + x[j] * of_own
        mean = (a * of_left + a_rights[j] * of_right + y * of_own) / total
        store_row(out_ptr + at + j * C, mean, j, left, there, WHOLE)
        if KEEP:
            store_row(lse_ptr + at + j * C, m_both + tl.log2(total), j, left, there, WHOLE)
        a = a * decay + y
        b = b * decay + x[j]
        m = tl.maximum(m, k[j] - (BLOCK_T - 1 - j) * w)
    shrunk = tl.exp2(m_left - m)
    return m, a * shrunk, b * shrunk


@triton.jit
def go_on(
    w,
    u,
    m,
    a,
    b,
    k_ptr,
    v_ptr,
    behind_ptr,
    out_ptr,
    lse_ptr,
    i,
    T,
    there,
    one,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    KEEP: tl.constexpr,
):
    """As `go_gently`, with an exponent for each token."""
    at, left = i * (BLOCK_T * C), T - i * BLOCK_T
    k = exponents_of(load_rows(k_ptr + at, left, there, C, BLOCK_T), LOG2E, left)
    v = load_rows(v_ptr + at, left, there, C, BLOCK_T)
    m_right, a_right, b_right = load_sums(behind_ptr + i * (3 * C), there, C)
    right = states_behind(w, m_right, a_right, b_right, k, v, one)
    for j in tl.static_range(BLOCK_T):
        own = k[j] + u
        m_both = tl.maximum(tl.maximum(m, right[j][0]), own)
        of_left = tl.exp2(m - m_both)
        of_right = tl.exp2(right[j][0] - m_both)
        of_own = tl.exp2(own - m_both)
        total = b * of_left + right[j][2] * of_right + of_own
        mean = (a * of_left + right[j][1] * of_right + v[j] * of_own) / total
        store_row(out_ptr + at + j * C, mean, j, left, there, 0)
        if KEEP:
            store_row(lse_ptr + at + j * C, m_both + tl.log2(total), j, left, there, 0)
        m, a, b = step(w, m, a, b, k[j], v[j], one[j])
    return m, a, b
