"""The scans as loops that numba compiles for CPUs: one pass over memory where batched operations make many.

A loop reads a few tokens at a time into the cache, whole rows as memory likes to be read, and then goes through blocks of channels,
whose states stay in the cache. The innermost loops over channels are what LLVM vectorises, as long as they use few arrays, of which
it must see at run time that they do not overlap. Sums may be reassociated, but nothing is assumed about NaN and infinity. Tasks write
disjoint memory, and the result does not depend on how many threads share them.

All loops are in this one file, because numba's cache on disk looks at nothing but the file of the function that it keeps.
Arrays are contiguous, of one dtype, fp32 or fp64. Shape letters as in the operators' references.
"""

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload

BLOCK = 64  # channels that are scanned together
GROUP = 32  # tokens from one kept state to the next
FLOOR = -1e30  # the exponent of an empty sum: finite, so that the difference of two is 0
# a division by zero is what IEEE says, not an error, for which the loop would have to look
OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz", "arcp"}}
_INLINE = OPTIONS | {"forceinline": True}  # a loop with a call in it is not vectorised


def compile_loop(function: Callable) -> Callable:
    """The function compiled when first called, without Python's lock; kept on disk where there is a place for it."""
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return numba.njit(**OPTIONS)(function)


@intrinsic
def _float_of_bits(context: Any, bits: Any) -> Any:
    """The float of the same bits as an int32 or int64."""
    wide = bits == numba.types.int64
    result, kind = (numba.types.float64, ir.DoubleType()) if wide else (numba.types.float32, ir.FloatType())
    return result(bits), lambda context, builder, signature, values: builder.bitcast(values[0], kind)


def _kinds(x: Any) -> tuple[Any, Any, int, int] | None:
    """Of numba's type: the float, the integer of the same size, the bias of its exponent, and the bits of its mantissa."""
    known = {numba.types.float32: (np.float32, np.int32, 127, 23), numba.types.float64: (np.float64, np.int64, 1023, 52)}
    return known.get(x)


def _fit(function: Callable, low: float, high: float, degree: int, kind: Any) -> tuple[Any, ...]:
    """The coefficients of a polynomial, the highest first, that is near the best for the function on an interval."""
    fitted = np.polynomial.Chebyshev.interpolate(function, degree, (low, high)).convert(kind=np.polynomial.Polynomial)
    return tuple(kind(each) for each in fitted.coef[::-1])


def exp2(x: Any) -> Any:
    """2ˣ to rounding: a polynomial on [−½, ½] times a power of two. Below the normal numbers it is the smallest of them."""
    raise NotImplementedError("numba compiles it")


@overload(exp2, jit_options=_INLINE)
def _exp2(x: Any) -> Callable | None:
    if (kinds := _kinds(x)) is None:
        return None
    kind, integer, bias, mantissa = kinds
    lowest, highest, half, shift, offset = kind(1 - bias), kind(bias + 1), kind(0.5), integer(mantissa), integer(bias)
    coefficients = _fit(np.exp2, -0.5, 0.5, 6 if kind == np.float32 else 12, kind)

    def compute(x: Any) -> Any:
        x = lowest if x < lowest else x
        x = highest if x > highest else x
        whole = np.floor(x + half)
        rest = x - whole
        power = coefficients[0]
        for k in numba.literal_unroll(coefficients[1:]):
            power = power * rest + k
        return power * _float_of_bits(integer((integer(whole) + offset) << shift))

    return compute


def sigmoid(x: Any) -> Any:
    """1 / (1 + e⁻ˣ)."""
    raise NotImplementedError("numba compiles it")


@overload(sigmoid, jit_options=_INLINE)
def _sigmoid(x: Any) -> Callable | None:
    if (kinds := _kinds(x)) is None:
        return None
    one, log2e = kinds[0](1), kinds[0](-1 / math.log(2))

    def compute(x: Any) -> Any:
        return one / (one + exp2(x * log2e))

    return compute


def softplus(x: Any) -> Any:
    """log(1 + eˣ) = max(x, 0) + log(1 + e), e = e^−|x|, with a polynomial for log(1 + e) / e on [0, 1]."""
    raise NotImplementedError("numba compiles it")


@overload(softplus, jit_options=_INLINE)
def _softplus(x: Any) -> Callable | None:
    if (kinds := _kinds(x)) is None:
        return None
    kind = kinds[0]
    nothing, log2e = kind(0), kind(-1 / math.log(2))
    coefficients = _fit(lambda e: np.log1p(e) / e, 0.0, 1.0, 9 if kind == np.float32 else 20, kind)

    def compute(x: Any) -> Any:
        e = exp2(abs(x) * log2e)
        ratio = coefficients[0]
        for k in numba.literal_unroll(coefficients[1:]):
            ratio = ratio * e + k
        return (x if x > nothing else nothing) + e * ratio

    return compute


@compile_loop
def scan_forward(first, last, span, u, delta, exponents, B, C, D, bias, z, out, states, back):
    """The selective scan with its gate: task = (image, route, `span` channels), routes that share a sequence of u by their number.

    Args:
        span: a multiple of BLOCK.
        u: (B,T,K,E). delta: (B,T,R,E). exponents: (R,N,E), A log₂e. B, C: (B,T,R,N). D, bias: (R,E).
        z: (B,T,E), or no elements.
        out: (B,T,R,E), which is written.
        states: (B,groups,R,N,E), at the start of every group of tokens except the first, which are written; or no elements.
        back: (R,), 1 for a route that is scanned from the last token, else 0.
    """
    _, T, R, E = delta.shape
    N, K, dtype = exponents.shape[1], u.shape[2], delta.dtype
    spans = (E + span - 1) // span
    square = np.zeros((span // BLOCK, N, 2, BLOCK), dtype)
    work = np.zeros((GROUP, span // BLOCK, 3, BLOCK), dtype)
    STATE, RATE, SIZE, FED, Y = 0, 1, 0, 1, 2
    for task in range(first, last):
        b, r, start = task // (spans * R), task // spans % R, task % spans * span
        k, forth, end = r % K, 1 - 2 * back[r], min(E, start + span)
        square[:, :, STATE] = 0
        for e in range(start, end):
            square[(e - start) // BLOCK, :, RATE, (e - start) % BLOCK] = exponents[r, :, e]
        for group in range((T + GROUP - 1) // GROUP):
            tokens, origin = min(GROUP, T - group * GROUP), back[r] * (T - 1) + forth * group * GROUP
            for j in range(tokens):
                t = origin + j * forth
                for block, e in enumerate(range(start, end, BLOCK)):
                    until, row = min(e + BLOCK, end), work[j, block]
                    u_row, delta_row, D_row, bias_row = u[b, t, k, e:until], delta[b, t, r, e:until], D[r, e:until], bias[r, e:until]
                    for c in range(len(u_row)):
                        row[SIZE, c] = softplus(delta_row[c] + bias_row[c])
                    for c in range(len(u_row)):
                        row[FED, c] = row[SIZE, c] * u_row[c]
                        row[Y, c] = D_row[c] * u_row[c]
            for block, e in enumerate(range(start, end, BLOCK)):
                if states.size and group:
                    until = min(e + BLOCK, end)
                    states[b, group - 1, r, :, e:until] = square[block, :, STATE, : until - e]
                for j in range(tokens):
                    t, row = origin + j * forth, work[j, block]
                    for n in range(N):
                        weight, read, own = B[b, t, r, n], C[b, t, r, n], square[block, n]
                        for c in range(BLOCK):
                            state = exp2(own[RATE, c] * row[SIZE, c]) * own[STATE, c] + weight * row[FED, c]
                            own[STATE, c] = state
                            row[Y, c] += read * state
            for j in range(tokens):
                t = origin + j * forth
                for block, e in enumerate(range(start, end, BLOCK)):
                    until, row = min(e + BLOCK, end), work[j, block]
                    out_row = out[b, t, r, e:until]
                    if z.size:
                        z_row = z[b, t, e:until]
                        for c in range(len(out_row)):
                            out_row[c] = row[Y, c] * z_row[c] * sigmoid(z_row[c])
                    else:
                        for c in range(len(out_row)):
                            out_row[c] = row[Y, c]


@compile_loop
def scan_backward(first, last, span, u, delta, exponents, B, C, D, bias, z, dout, states, back, du, ddelta, dA, dB, dC, dD, dbias, dz):
    """The gradients of `scan_forward`, with its tasks; dout: (B,T,R,E).

    What tasks share is written apart: du, ddelta (B,T,R,E), dA (B,R,N,E), dB and dC (spans,B,T,R,N), dD and dbias (B,R,E), dz (B,T,R,E)
    or no elements.
    """
    _, T, R, E = delta.shape
    N, K, dtype = exponents.shape[1], u.shape[2], delta.dtype
    zeros = np.zeros(2, dtype)
    nothing, one, ln2 = zeros[0], np.exp2(zeros[0]), np.log(np.exp2(zeros[0]) + np.exp2(zeros[0]))
    spans = (E + span - 1) // span
    h = np.empty((GROUP + 1, N, BLOCK), dtype)  # before each token of a group, and after the last
    square = np.zeros((span // BLOCK, N, 3, BLOCK), dtype)
    work = np.zeros((GROUP, span // BLOCK, 6, BLOCK), dtype)
    sums = np.zeros((span // BLOCK, 2, BLOCK), dtype)
    LATER, RATE, OF_A, SIZE, FED, Y, DY, DFED, DSIZE, OF_D, OF_BIAS = 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1
    for task in range(first, last):
        b, r, number = task // (spans * R), task // spans % R, task % spans
        start = number * span
        k, forth, end = r % K, 1 - 2 * back[r], min(E, start + span)
        square[:], sums[:] = 0, 0
        for e in range(start, end):
            square[(e - start) // BLOCK, :, RATE, (e - start) % BLOCK] = exponents[r, :, e]
        for group in range((T - 1) // GROUP, -1, -1):
            tokens, origin = min(GROUP, T - group * GROUP), back[r] * (T - 1) + forth * group * GROUP
            for j in range(tokens):
                t = origin + j * forth
                for block, e in enumerate(range(start, end, BLOCK)):
                    until, row = min(e + BLOCK, end), work[j, block]
                    u_row, delta_row, D_row, bias_row = u[b, t, k, e:until], delta[b, t, r, e:until], D[r, e:until], bias[r, e:until]
                    dout_row = dout[b, t, r, e:until]
                    for c in range(len(u_row)):
                        row[SIZE, c] = softplus(delta_row[c] + bias_row[c])
                    for c in range(len(u_row)):
                        row[FED, c] = row[SIZE, c] * u_row[c]
                        row[Y, c] = D_row[c] * u_row[c]
                        row[DFED, c], row[DSIZE, c] = 0, 0
                    if z.size:
                        z_row = z[b, t, e:until]
                        for c in range(len(u_row)):
                            row[DY, c] = dout_row[c] * z_row[c] * sigmoid(z_row[c])
                    else:
                        for c in range(len(u_row)):
                            row[DY, c] = dout_row[c]
                dB[number, b, t, r, :], dC[number, b, t, r, :] = 0, 0
            for block, e in enumerate(range(start, end, BLOCK)):
                until = min(e + BLOCK, end)
                h[0] = 0
                if group:
                    h[0, :, : until - e] = states[b, group - 1, r, :, e:until]
                for j in range(tokens):
                    t, row = origin + j * forth, work[j, block]
                    for n in range(N):
                        weight, read, own = B[b, t, r, n], C[b, t, r, n], square[block, n]
                        of_C = nothing
                        for c in range(BLOCK):
                            state = exp2(own[RATE, c] * row[SIZE, c]) * h[j, n, c] + weight * row[FED, c]
                            h[j + 1, n, c] = state
                            row[Y, c] += read * state
                            of_C += row[DY, c] * state
                        dC[number, b, t, r, n] += of_C
                for j in range(tokens - 1, -1, -1):
                    t, row = origin + j * forth, work[j, block]
                    for n in range(N):
                        weight, read, own, before = B[b, t, r, n], C[b, t, r, n], square[block, n], h[j, n]
                        of_B = nothing
                        for c in range(BLOCK):
                            g = own[LATER, c] + read * row[DY, c]
                            decayed = g * exp2(own[RATE, c] * row[SIZE, c])
                            p = decayed * before[c]
                            of_B += g * row[FED, c]
                            own[LATER, c] = decayed
                            own[OF_A, c] += p * row[SIZE, c]
                            row[DFED, c] += g * weight
                            row[DSIZE, c] += p * own[RATE, c]
                        dB[number, b, t, r, n] += of_B
            for j in range(tokens):
                t = origin + j * forth
                for block, e in enumerate(range(start, end, BLOCK)):
                    until, row, sum_row = min(e + BLOCK, end), work[j, block], sums[block]
                    u_row, delta_row, D_row, bias_row = u[b, t, k, e:until], delta[b, t, r, e:until], D[r, e:until], bias[r, e:until]
                    du_row, ddelta_row = du[b, t, r, e:until], ddelta[b, t, r, e:until]
                    for c in range(len(u_row)):
                        du_row[c] = row[SIZE, c] * row[DFED, c] + D_row[c] * row[DY, c]
                    for c in range(len(u_row)):
                        slope = sigmoid(delta_row[c] + bias_row[c])
                        ddelta_row[c] = slope * (u_row[c] * row[DFED, c] + ln2 * row[DSIZE, c])
                    for c in range(len(u_row)):
                        sum_row[OF_D, c] += row[DY, c] * u_row[c]
                        sum_row[OF_BIAS, c] += ddelta_row[c]
                    if z.size:
                        z_row, dz_row, dout_row = z[b, t, e:until], dz[b, t, r, e:until], dout[b, t, r, e:until]
                        for c in range(len(u_row)):
                            gate = sigmoid(z_row[c])
                            dz_row[c] = dout_row[c] * row[Y, c] * gate * (one + z_row[c] * (one - gate))
        for e in range(start, end):
            block, c = (e - start) // BLOCK, (e - start) % BLOCK
            dA[b, r, :, e] = square[block, :, OF_A, c]
            dD[b, r, e] = sums[block, OF_D, c]
            dbias[b, r, e] = sums[block, OF_BIAS, c]


@numba.njit(**_INLINE)
def _add_token(state, w, exponents, xs, ys, c):
    """Move channel c of a state one token farther away, and add 2^exponent (x, y).

    A state (5,BLOCK) is m, a, b, which stand for 2^m a and 2^m b, and of which exponent m comes, as it was how many tokens ago: m − w,
    token after token, would lose a noticeable part of w near m = 1.
    """
    away = state[4, c] + exponents.dtype.type(1)
    before, exponent = state[3, c] - away * w[c], exponents[c]
    stays = before > exponent
    top = before if stays else exponent
    of_state, of_token = exp2(before - top), exp2(exponent - top)
    state[0, c] = top
    state[1, c] = state[1, c] * of_state + xs[c] * of_token
    state[2, c] = state[2, c] * of_state + ys[c] * of_token
    state[3, c] = state[3, c] if stays else exponent
    state[4, c] = away if stays else exponents.dtype.type(0)


@numba.njit(**_INLINE)
def _start(state, edge):
    """Make a state of one at the edge of a group."""
    for c in range(BLOCK):
        state[0, c], state[1, c], state[2, c] = edge[0, c], edge[1, c], edge[2, c]
        state[3, c] = state[0, c]
        state[4, c] = state.dtype.type(0)


@numba.njit(**_INLINE)
def _add_group(state, group, tokens, farthest, w, sums):
    """Add a group's tokens to a state, `tokens` places farther away; `farthest` is the index of the token that is farthest from there.

    From group to group a state is fp64. In fp32, m − w loses a noticeable part of w near m = 1, at each of thousands of tokens.

    Args:
        state: (3,BLOCK), fp64, m, a and b, which are written. group: (GROUP,3,BLOCK), exponent, x and y of each token.
        w: (BLOCK,). sums: (3 + GROUP,BLOCK), scratch memory: the group's m, a and b, and each token's exponent.
    """
    kind = group.dtype.type
    for c in range(BLOCK):
        sums[0, c] = kind(FLOOR)
        sums[1, c] = kind(0)
        sums[2, c] = kind(0)
    for j in range(tokens):
        apart = kind(tokens - 1 - abs(j - farthest))
        for c in range(BLOCK):
            exponent = group[j, 0, c] - apart * w[c]
            sums[3 + j, c] = exponent
            sums[0, c] = exponent if exponent > sums[0, c] else sums[0, c]
    for j in range(tokens):
        for c in range(BLOCK):
            power = exp2(sums[3 + j, c] - sums[0, c])
            sums[1, c] += power * group[j, 1, c]
            sums[2, c] += power * group[j, 2, c]
    for c in range(BLOCK):
        before, exponent = state[0, c] - tokens * np.float64(w[c]), np.float64(sums[0, c])
        top = before if before > exponent else exponent
        of_state, of_group = exp2(before - top), exp2(exponent - top)
        state[0, c] = top
        state[1, c] = of_state * state[1, c] + of_group * sums[1, c]
        state[2, c] = of_state * state[2, c] + of_group * sums[2, c]


@compile_loop
def wkv_forward(first, last, span, w, u, k, v, out, states):
    """Bi-WKV: task = (image, `span` channels). It goes back through the tokens to the state behind each group, and then forth.

    Args:
        span: a multiple of BLOCK.
        w, u: (C,), times log₂e. k: (B,T,C), times log₂e. v: (B,T,C).
        out: (B,T,C), which is written.
        states: (B,T,3,C), the exponent and the sum of an output's weights, and the output, which are written; or no elements.
    """
    _, T, C = k.shape
    kind, floor = k.dtype.type, FLOOR
    one = kind(1)
    spans, groups = (C + span - 1) // span, (T + GROUP - 1) // GROUP
    W, U, LEFT, NEAR, OUT, TOP, SUM = 0, 1, 2, 7, 12, 13, 14
    cell = np.zeros((span // BLOCK, 15, BLOCK), k.dtype)
    edge = np.empty((span // BLOCK, 2, 3, BLOCK), np.float64)  # the states before and behind a group
    behind = np.empty((groups, span // BLOCK, 3, BLOCK), np.float64)
    right, sums = np.empty((GROUP, 3, BLOCK), k.dtype), np.empty((3 + GROUP, BLOCK), k.dtype)
    token = np.zeros((GROUP, 3, BLOCK), k.dtype)
    token[:, 2] = one
    for task in range(first, last):
        b, start = task // spans, task % spans * span
        end = min(C, start + span)
        for e in range(start, end):
            cell[(e - start) // BLOCK, :LEFT, (e - start) % BLOCK] = w[e], u[e]
        edge[:] = 0
        edge[:, :, 0] = floor
        for step in range(2 * groups):
            group = groups - 1 - step if step < groups else step - groups
            origin = group * GROUP
            tokens = min(GROUP, T - origin)
            for block, e in enumerate(range(start, end, BLOCK)):
                own, until = cell[block], min(e + BLOCK, end)
                for j in range(tokens):
                    k_row, v_row = k[b, origin + j, e:until], v[b, origin + j, e:until]
                    for c in range(len(k_row)):
                        token[j, 0, c], token[j, 1, c] = k_row[c], v_row[c]
                if step < groups:
                    behind[group, block] = edge[block, 1]
                    _add_group(edge[block, 1], token, tokens, tokens - 1, own[W], sums)
                    continue
                near, left = own[NEAR:OUT], own[LEFT:NEAR]
                _start(left, edge[block, 0])
                _start(near, behind[group, block])
                for j in range(tokens - 1, -1, -1):
                    for c in range(BLOCK):
                        right[j, 0, c], right[j, 1, c], right[j, 2, c] = near[0, c], near[1, c], near[2, c]
                    for c in range(BLOCK):
                        _add_token(near, own[W], token[j, 0], token[j, 1], token[j, 2], c)
                for j in range(tokens):
                    t, other, its = origin + j, right[j], token[j]
                    out_row = out[b, t, e:until]
                    for c in range(BLOCK):
                        bonus = its[0, c] + own[U, c]
                        top = own[LEFT, c] if own[LEFT, c] > other[0, c] else other[0, c]
                        top = top if top > bonus else bonus
                        of_left, of_right, of_own = exp2(own[LEFT, c] - top), exp2(other[0, c] - top), exp2(bonus - top)
                        total = own[LEFT + 2, c] * of_left + other[2, c] * of_right + of_own
                        own[OUT, c] = (own[LEFT + 1, c] * of_left + other[1, c] * of_right + its[1, c] * of_own) / total
                        own[TOP, c], own[SUM, c] = top, total
                        _add_token(left, own[W], its[0], its[1], its[2], c)
                    for c in range(len(out_row)):
                        out_row[c] = own[OUT, c]
                    if states.size:
                        for each, kept in enumerate((TOP, SUM, OUT)):
                            kept_row = states[b, t, each, e:until]
                            for c in range(len(kept_row)):
                                kept_row[c] = own[kept, c]
                _add_group(edge[block, 0], token, tokens, 0, own[W], sums)


@compile_loop
def wkv_backward(first, last, span, w, u, k, v, states, dout, dw, du, dk, dv):
    """The gradients of `wkv_forward`, with its tasks; dw, du: (B,C), of each image. They are those by natural w, u and k.

    The gradient is the same kind of sum, of adjoint tokens: the exponent −top, the values (g, g out) with g = dout / sum. A pair of
    tokens i < t < j, of which one is adjoint, has e^{−w} once for t.
    """
    _, T, C = k.shape
    kind, floor = k.dtype.type, FLOOR
    one = kind(1)
    spans, groups = (C + span - 1) // span, (T + GROUP - 1) // GROUP
    W, U, DK, DV, DW, DU = 0, 1, 2, 3, 4, 5
    K, V, E, X, Y = 0, 1, 3, 4, 5
    cell = np.zeros((span // BLOCK, 6, BLOCK), k.dtype)
    edge = np.empty((span // BLOCK, 2, 6, BLOCK), np.float64)  # the states before and behind a group
    behind = np.empty((groups, span // BLOCK, 6, BLOCK), np.float64)
    left, near = np.empty((2, 5, BLOCK), k.dtype), np.empty((2, 5, BLOCK), k.dtype)  # of tokens, and of adjoint tokens
    right, sums = np.empty((GROUP, 6, BLOCK), k.dtype), np.empty((3 + GROUP, BLOCK), k.dtype)
    token = np.zeros((GROUP, 6, BLOCK), k.dtype)  # exponent and two values, of a token and of its adjoint
    token[:, 2] = one
    for task in range(first, last):
        b, start = task // spans, task % spans * span
        end = min(C, start + span)
        cell[:], edge[:] = 0, 0
        for each in (0, 3):
            edge[:, :, each] = floor
        for e in range(start, end):
            cell[(e - start) // BLOCK, :DK, (e - start) % BLOCK] = w[e], u[e]
        for step in range(2 * groups):
            group = groups - 1 - step if step < groups else step - groups
            origin = group * GROUP
            tokens = min(GROUP, T - origin)
            for block, e in enumerate(range(start, end, BLOCK)):
                own, until = cell[block], min(e + BLOCK, end)
                count = until - e
                for j in range(tokens):
                    t, its = origin + j, token[j]
                    k_row, v_row, dout_row = k[b, t, e:until], v[b, t, e:until], dout[b, t, e:until]
                    top_row, sum_row, out_row = states[b, t, 0, e:until], states[b, t, 1, e:until], states[b, t, 2, e:until]
                    for c in range(count):
                        its[K, c], its[V, c], its[E, c], its[X, c] = k_row[c], v_row[c], -top_row[c], dout_row[c] / sum_row[c]
                        its[Y, c] = its[X, c] * out_row[c]
                if step < groups:
                    behind[group, block] = edge[block, 1]
                    _add_group(edge[block, 1, :3], token[:, :3], tokens, tokens - 1, own[W], sums)
                    _add_group(edge[block, 1, 3:], token[:, 3:], tokens, tokens - 1, own[W], sums)
                    continue
                for of in range(2):
                    _start(left[of], edge[block, 0, 3 * of : 3 * of + 3])
                    _start(near[of], behind[group, block, 3 * of : 3 * of + 3])
                for j in range(tokens - 1, -1, -1):
                    its = token[j]
                    for of in range(2):
                        for each in range(3):
                            for c in range(BLOCK):
                                right[j, 3 * of + each, c] = near[of, each, c]
                        for c in range(BLOCK):
                            _add_token(near[of], own[W], its[3 * of], its[3 * of + 1], its[3 * of + 2], c)
                for j in range(tokens):
                    t, its, other = origin + j, token[j], right[j]
                    for c in range(BLOCK):
                        x, y = its[X, c], its[Y, c]
                        itself = exp2(its[K, c] + own[U, c] + its[E, c])
                        own[DU, c] += itself * (its[V, c] * x - y)
                        of_left, of_right = exp2(its[K, c] + left[1, 0, c]), exp2(its[K, c] + other[3, c])
                        x = left[1, 1, c] * of_left + other[4, c] * of_right + x * itself
                        y = left[1, 2, c] * of_left + other[5, c] * of_right + y * itself
                        own[DV, c], own[DK, c] = x, its[V, c] * x - y
                        across = exp2(left[0, 0, c] + other[3, c] - own[W, c])
                        own[DW, c] -= across * (left[0, 1, c] * other[4, c] - left[0, 2, c] * other[5, c])
                        across = exp2(other[0, c] + left[1, 0, c] - own[W, c])
                        own[DW, c] -= across * (other[1, c] * left[1, 1, c] - other[2, c] * left[1, 2, c])
                    for of in range(2):
                        for c in range(BLOCK):
                            _add_token(left[of], own[W], its[3 * of], its[3 * of + 1], its[3 * of + 2], c)
                    dk_row, dv_row = dk[b, t, e:until], dv[b, t, e:until]
                    for c in range(count):
                        dk_row[c], dv_row[c] = own[DK, c], own[DV, c]
                _add_group(edge[block, 0, :3], token[:, :3], tokens, 0, own[W], sums)
                _add_group(edge[block, 0, 3:], token[:, 3:], tokens, 0, own[W], sums)
        for e in range(start, end):
            block, c = (e - start) // BLOCK, (e - start) % BLOCK
            dw[b, e], du[b, e] = cell[block, DW, c], cell[block, DU, c]
