"""TTT-Linear as loops that numba compiles for CPUs, see `cpu_loops`.

A head's state stays in the cache from its first chunk to its last, and in the backward pass from a segment's last chunk
to its first. The compiler knows the head width. It therefore sees that rows do not overlap, and keeps several of them
in flight. A chunk is padded with rows of zeros to a multiple of 4.

Symbols and shape letters are those of `ttt_linear.reference`. In addition, S is W with β as its last row, and x holds
the normalised rows of Z. A has the sign with which it enters O = [Q 1] S + A G, and includes the learning rates.
"""

import numba
import numpy as np

from .cpu_loops import INLINE, Loop, copy_row, dot_rows

_ROWS = 4  # side of a block of `_multiply_transposed`; a chunk is padded to a multiple of it
_BEFORE = 3  # earlier tokens in the window of a causal convolution


@numba.njit(**INLINE)
def _multiply(constant, A, rows, B, terms, C):
    """Compute C += A B for `rows` rows of A and C, and `terms` terms of each sum, a multiple of 4; A has any strides.

    Four terms are added at a time, so that a row of C is loaded and stored once for four products.
    """
    for i in range(rows):
        for k in range(0, terms, 4):
            a0, a1, a2, a3 = A[i, k], A[i, k + 1], A[i, k + 2], A[i, k + 3]
            for c in range(len(constant)):
                C[i, c] += a0 * B[k, c] + a1 * B[k + 1, c] + a2 * B[k + 2, c] + a3 * B[k + 3, c]


@numba.njit(**INLINE)
def _multiply_transposed(constant, A, rows, B, columns, causal, C):
    """Compute C += A Bᵀ for the first `rows` rows of A and C, and the first `columns` rows of B, all multiples of 4.

    With `causal`, only the blocks of C below and on the diagonal are computed. A block's 16 sums stay in registers.
    """
    D, nothing = len(constant), A.dtype.type(0)
    for i in range(0, rows, 4):
        for j in range(0, i + 4 if causal else columns, 4):
            s00, s01, s02, s03 = nothing, nothing, nothing, nothing
            s10, s11, s12, s13 = nothing, nothing, nothing, nothing
            s20, s21, s22, s23 = nothing, nothing, nothing, nothing
            s30, s31, s32, s33 = nothing, nothing, nothing, nothing
            for c in range(D):
                a0, a1, a2, a3 = A[i, c], A[i + 1, c], A[i + 2, c], A[i + 3, c]
                b0, b1, b2, b3 = B[j, c], B[j + 1, c], B[j + 2, c], B[j + 3, c]
                s00, s01, s02, s03 = s00 + a0 * b0, s01 + a0 * b1, s02 + a0 * b2, s03 + a0 * b3
                s10, s11, s12, s13 = s10 + a1 * b0, s11 + a1 * b1, s12 + a1 * b2, s13 + a1 * b3
                s20, s21, s22, s23 = s20 + a2 * b0, s21 + a2 * b1, s22 + a2 * b2, s23 + a2 * b3
                s30, s31, s32, s33 = s30 + a3 * b0, s31 + a3 * b1, s32 + a3 * b2, s33 + a3 * b3
            for row, sums in enumerate(
                ((s00, s01, s02, s03), (s10, s11, s12, s13), (s20, s21, s22, s23), (s30, s31, s32, s33))
            ):
                for column in range(4):
                    C[i + row, j + column] += sums[column]


@numba.njit(**INLINE)
def _copy(constant, source, target):
    """Copy the matrix `source` to `target`."""
    for i in range(len(source)):
        copy_row(constant, source[i], target[i])


@numba.njit(**INLINE)
def _take(constant, numbers, strides, b, r, h, origin, forth, n, X):
    """Load n rows of a tensor (B,T,R,H,D), laid flat by `threads.lay_flat`, into X, and set the rest of X to zero.

    The first row is token `origin`. `forth` is the step from token to token, 1 or −1.
    """
    for j in range(len(X)):
        if j < n:
            t = origin + forth * j
            start = b * strides[0] + t * strides[1] + r * strides[2] + h * strides[3]
            copy_row(constant, numbers[start : start + len(constant)], X[j])
        else:
            X[j] = 0


@numba.njit(**INLINE)
def _place(start, chunk, T, back):
    """Return the tokens n of a chunk, its rows with padding, and its first token.

    `start` counts the tokens before the chunk in the order of the scan; `back` is 1 if the scan begins with token T − 1.
    """
    n = min(chunk, T - start)
    return n, (n + _ROWS - 1) // _ROWS * _ROWS, back * (T - 1) + (1 - 2 * back) * start


@numba.njit(**INLINE)
def _take_rates(lr, b, h, origin, forth, n, rows, rate):
    """Load the learning rates of n tokens, as `_take` does rows, and 0 for the rows of padding up to `rows`.

    The G of a padding row is not 0; a rate of 0 keeps it out of the state.
    """
    for i in range(rows):
        rate[i] = lr[b, origin + forth * i, h] if i < n else rate.dtype.type(0)


@numba.njit(**INLINE)
def _convolve(constant, raw, n, taps, bias, X):
    """Write n rows of a causal convolution with four taps to X, then zeros.

    `raw` (rows,D) begins with the three tokens before the n; taps (4,D), the last for the token itself; bias (D,).
    """
    for j in range(len(X)):
        if j < n:
            for c in range(len(constant)):
                first, last = taps[0, c] * raw[j, c] + taps[1, c] * raw[j + 1, c], taps[2, c] * raw[j + 2, c]
                X[j, c] = bias[c] + first + last + taps[3, c] * raw[j + 3, c]
        else:
            X[j] = 0


@numba.njit(**INLINE)
def _apply(constant, S, X, rows, Y):
    """Compute the first `rows` rows of Y = [X 1] S, that is X W + β."""
    D = len(constant)
    for j in range(rows):
        copy_row(constant, S[D], Y[j])
    _multiply(constant, X, rows, S, D, Y)


@numba.njit(**INLINE)
def _descend(constant, rows, K, V, weight, bias, ones, eps, x, G, norms, along):
    """Compute the inner gradient G from x = Z, and normalise x in place.

    Each row's √(variance + eps) is written to `norms`, and its mean(g x) to `along`, where g is the gradient by the
    normalised row.
    """
    D, one = len(constant), G.dtype.type(1)
    share = one / G.dtype.type(D)
    for j in range(rows):
        # the state's rows have mean 0 up to rounding, and the error would grow from chunk to chunk if it stayed in x
        offset = dot_rows(constant, x[j], ones) * share
        norm = np.sqrt(dot_rows(constant, x[j], x[j]) * share - offset * offset + eps)
        factor = one / norm
        for c in range(D):
            x[j, c] = (x[j, c] - offset) * factor
        for c in range(D):
            G[j, c] = weight[c] * (weight[c] * x[j, c] + bias[c] + K[j, c] - V[j, c])
        mean, product = dot_rows(constant, G[j], ones) * share, dot_rows(constant, G[j], x[j]) * share
        for c in range(D):
            G[j, c] = (G[j, c] - mean - product * x[j, c]) * factor
        norms[j], along[j] = norm, product


@numba.njit(**INLINE)
def _update(constant, K, G, rows, scale, rate, P, S):
    """Compute S −= [scale rate ⊙ K 1]ᵀ G; P (rows,D) is scratch memory."""
    D = len(constant)
    for i in range(rows):
        weight = -scale * rate[i]
        for d in range(D):
            P[i, d] = weight * K[i, d]
        for c in range(D):
            S[D, c] += weight * G[i, c]
    _multiply(constant, P.T, D, G, rows, S)


@numba.njit(**INLINE)
def _mask(rows, n, scale, rate, QK, A):
    """Compute A = −tril(scale rateᵀ) ⊙ (QKᵀ + 1) of a chunk's n tokens, and write zeros everywhere else.

    Products read all `rows` of A. `scale` may end after n numbers, so it is not read in the rows that pad the chunk.
    """
    one, nothing = A.dtype.type(1), A.dtype.type(0)
    for j in range(rows):
        for i in range(rows):
            A[j, i] = -scale[j] * rate[i] * (QK[j, i] + one) if i <= j < n else nothing


@Loop
def learn_forward(
    first,
    last,
    constant,
    q,
    q_strides,
    k,
    k_strides,
    v,
    v_strides,
    lr,
    scale,
    state,
    gamma,
    mu,
    taps,
    tap_biases,
    out,
    states,
    back,
    span,
    eps,
):
    """Run TTT-Linear; a task is one direction and head of one image.

    Args:
        constant: a tuple of D elements, a multiple of 4, whose length the compiler knows.
        q, k, v: (B,T,R,H,D), each laid flat by `threads.lay_flat`, with its strides. lr: (B,T,H). scale: (R,n).
        state: (R,H,D+1,D), W0 above b0, with rows of mean 0: the output's norm subtracts no mean. gamma, mu: (R,H,D).
        taps, tap_biases: (2,R,H,4,D) and (2,R,H,D), of the causal convolutions that compute keys and queries from k; or
            no elements, where k and q are given as they are used.
        out: (B,T,R,H,D), which is written.
        states: (B,R,H,segments,D+1,D), the states before all segments except the first, which are written; or no
            elements.
        back: (R,), 1 for a direction that starts with the last token, else 0.
        span: tokens of a segment, a multiple of the chunk.
    """
    _, T, R, H, _ = out.shape
    D, dtype = len(constant), out.dtype
    chunk = min(scale.shape[1], T)
    held = (chunk + _ROWS - 1) // _ROWS * _ROWS
    ones, share = np.ones(D, dtype), dtype.type(1) / dtype.type(D)
    # X has keys, then queries; Y = [X 1] S
    X, Y = np.zeros((2 * held, D), dtype), np.zeros((2 * held, D), dtype)
    V, G, A = np.zeros((held, D), dtype), np.zeros((held, D), dtype), np.zeros((held, held), dtype)
    QK, P, S = np.zeros((held, held), dtype), np.zeros((held, D), dtype), np.zeros((D + 1, D), dtype)
    rate, norms, along = np.zeros(held, dtype), np.zeros(held, dtype), np.zeros(held, dtype)
    raw = np.zeros((_BEFORE + held, D), dtype)  # input of the convolutions, with the tokens before the chunk
    for task in range(first, last):
        b, r, h = task // (R * H), task // H % R, task % H
        weight, bias, forth = gamma[r, h], mu[r, h], 1 - 2 * back[r]
        _copy(constant, state[r, h], S)
        for start in range(0, T, chunk):
            if states.size and start and start % span == 0:
                _copy(constant, S, states[b, r, h, start // span - 1])
            n, rows, origin = _place(start, chunk, T, back[r])
            K, Q = X[:rows], X[rows : 2 * rows]
            if taps.size:
                for i in range(_BEFORE):
                    if start:
                        # the window of a chunk's first tokens reaches into the previous chunk
                        copy_row(constant, raw[chunk + i], raw[i])
                    else:
                        raw[i] = 0
                _take(constant, k, k_strides, b, r, h, origin, forth, n, raw[_BEFORE : _BEFORE + rows])
                _convolve(constant, raw, n, taps[0, r, h], tap_biases[0, r, h], K)
                _convolve(constant, raw, n, taps[1, r, h], tap_biases[1, r, h], Q)
            else:
                _take(constant, k, k_strides, b, r, h, origin, forth, n, K)
                _take(constant, q, q_strides, b, r, h, origin, forth, n, Q)
            _take(constant, v, v_strides, b, r, h, origin, forth, n, V[:rows])
            _take_rates(lr, b, h, origin, forth, n, rows, rate)
            _apply(constant, S, X, 2 * rows, Y)
            _descend(constant, rows, K, V, weight, bias, ones, eps, Y, G, norms, along)
            QK[:] = 0
            _multiply_transposed(constant, Q, rows, K, rows, True, QK)
            _mask(rows, n, scale[r], rate, QK, A)
            O = Y[rows : 2 * rows]
            _multiply(constant, A, rows, G, rows, O)
            _update(constant, K, G, rows, scale[r, n - 1], rate, P, S)
            for j in range(n):
                out_row = out[b, origin + forth * j, r, h]
                factor = dtype.type(1) / np.sqrt(dot_rows(constant, O[j], O[j]) * share + eps)
                for c in range(D):
                    out_row[c] = Q[j, c] + bias[c] + weight[c] * O[j, c] * factor


@Loop
def learn_backward(
    first,
    last,
    constant,
    q,
    q_strides,
    k,
    k_strides,
    v,
    v_strides,
    lr,
    scale,
    state,
    gamma,
    mu,
    dout,
    dout_strides,
    states,
    dq,
    dk,
    dv,
    drate,
    dscale,
    dstate,
    dgamma,
    dmu,
    back,
    span,
    eps,
):
    """Compute the gradients of `learn_forward`, with the same tasks.

    A segment's chunks are run forward once more, and then backward. dout (laid flat by `threads.lay_flat`), dq, dk and
    dv are (B,T,R,H,D). Gradients to which several tasks add are written separately for each: drate (B,T,R,H), and by
    image dscale (B,R,H,n), dstate (B,R,H,D+1,D), dgamma and dmu (B,R,H,D), which start with zeros. dstate also carries
    the gradient of the state from a chunk to the one before it.
    """
    _, T, R, H, _ = dq.shape
    D, dtype = len(constant), dq.dtype
    chunk = min(scale.shape[1], T)
    held = (chunk + _ROWS - 1) // _ROWS * _ROWS
    ones, one, two = np.ones(D, dtype), dtype.type(1), dtype.type(2)
    share = one / dtype.type(D)
    chunks = (min(span, T) + chunk - 1) // chunk
    # per chunk of a segment: the state before it, x and G
    kept, xs, Gs = (
        np.zeros((chunks, D + 1, D), dtype),
        np.zeros((chunks, held, D), dtype),
        np.zeros((chunks, held, D), dtype),
    )
    rates, norms, alongs = (
        np.zeros((chunks, held), dtype),
        np.zeros((chunks, held), dtype),
        np.zeros((chunks, held), dtype),
    )
    # X has keys, then queries; Y = [X 1] S; dX and dY are their gradients
    X, dY, dX = np.zeros((2 * held, D), dtype), np.zeros((2 * held, D), dtype), np.zeros((2 * held, D), dtype)
    work, square = np.zeros((4, held, D), dtype), np.zeros((3, held, held), dtype)
    V, O, u, dP = work[0], work[1], work[2], work[3]
    sums = np.zeros((3, D), dtype)  # sums over a chunk: adding these to the totals rounds less than adding tokens
    of_start, of_weight, of_bias = sums[0], sums[1], sums[2]
    QK, A, dA, of_rate = square[0], square[1], square[2], np.zeros(held, dtype)
    for task in range(first, last):
        b, r, h = task // (R * H), task // H % R, task % H
        weight, bias, forth, scales = gamma[r, h], mu[r, h], 1 - 2 * back[r], scale[r]
        dS, of_scale = dstate[b, r, h], dscale[b, r, h]
        for begin in range((T - 1) // span * span, -1, -span):
            _copy(constant, states[b, r, h, begin // span - 1] if begin else state[r, h], kept[0])
            end = min(T, begin + span)
            for m, start in enumerate(range(begin, end, chunk)):
                n, rows, origin = _place(start, chunk, T, back[r])
                _take(constant, k, k_strides, b, r, h, origin, forth, n, X[:rows])
                _take(constant, v, v_strides, b, r, h, origin, forth, n, V[:rows])
                _take_rates(lr, b, h, origin, forth, n, rows, rates[m])
                _apply(constant, kept[m], X, rows, xs[m])
                _descend(constant, rows, X, V, weight, bias, ones, eps, xs[m], Gs[m], norms[m], alongs[m])
                if start + chunk < end:
                    _copy(constant, kept[m], kept[m + 1])
                    _update(constant, X, Gs[m], rows, scales[n - 1], rates[m], u, kept[m + 1])
            for m in range((end - begin - 1) // chunk, -1, -1):
                start = begin + m * chunk
                n, rows, origin = _place(start, chunk, T, back[r])
                S, x, G, rate = kept[m], xs[m], Gs[m], rates[m]
                K, Q, dZ, dO = X[:rows], X[rows : 2 * rows], dY[:rows], dY[rows : 2 * rows]
                _take(constant, k, k_strides, b, r, h, origin, forth, n, K)
                _take(constant, q, q_strides, b, r, h, origin, forth, n, Q)
                _take(constant, v, v_strides, b, r, h, origin, forth, n, V[:rows])
                _take(constant, dout, dout_strides, b, r, h, origin, forth, n, dO)
                QK[:], dA[:], dP[:], sums[:] = 0, 0, 0, 0
                _multiply_transposed(constant, Q, rows, K, rows, True, QK)
                _mask(rows, n, scales, rate, QK, A)
                _apply(constant, S, Q, rows, O)
                _multiply(constant, A, rows, G, rows, O)
                for j in range(rows):  # backward through the output's LayerNorm
                    factor = one / np.sqrt(dot_rows(constant, O[j], O[j]) * share + eps)
                    copy_row(constant, dO[j], dX[rows + j])  # the residual Q has the gradient of the output itself
                    for c in range(D):
                        O[j, c] *= factor
                        of_weight[c] += dO[j, c] * O[j, c]
                    for c in range(D):
                        of_bias[c] += dO[j, c]
                        dO[j, c] *= weight[c]
                    mean, along = dot_rows(constant, dO[j], ones) * share, dot_rows(constant, dO[j], O[j]) * share
                    for c in range(D):
                        dO[j, c] = (dO[j, c] - mean - along * O[j, c]) * factor
                _apply(constant, dS, K, rows, u)
                for i in range(rows):
                    last_rate = -scales[n - 1] * rate[i]
                    for c in range(D):
                        u[i, c] *= last_rate
                _multiply(constant, A.T, rows, dO, rows, u)
                for j in range(rows):  # backward through G and the LayerNorm of Z
                    factor = one / norms[m, j]
                    mean, along = dot_rows(constant, u[j], ones) * share, dot_rows(constant, u[j], x[j]) * share
                    of_G = dot_rows(constant, u[j], G[j]) * share
                    for c in range(D):
                        u[j, c] = (u[j, c] - mean - along * x[j, c]) * factor
                    for c in range(D):
                        dZ[j, c] = weight[c] * weight[c] * u[j, c]
                    mean, product = (
                        dot_rows(constant, dZ[j], ones) * share,
                        dot_rows(constant, dZ[j], x[j]) * share + of_G,
                    )
                    for c in range(D):
                        of_Z = dZ[j, c] - mean - product * x[j, c] - alongs[m, j] * u[j, c] - along * G[j, c]
                        dZ[j, c] = of_Z * factor
                    for c in range(D):
                        of_weight[c] += u[j, c] * (two * weight[c] * x[j, c] + bias[c] + K[j, c] - V[j, c])
                    for c in range(D):
                        u[j, c] *= weight[c]
                        of_bias[c] += u[j, c]
                # backward through the update of the state
                _multiply_transposed(constant, G, rows, dS, D, False, dP)
                for i in range(rows):
                    last_rate = -scales[n - 1] * rate[i]
                    sum_rate = dot_rows(constant, dP[i], K[i]) + dot_rows(constant, G[i], dS[D])
                    for c in range(D):
                        dX[i, c] = u[i, c] + last_rate * dP[i, c]
                    of_rate[i] = -scales[n - 1] * sum_rate
                    of_scale[n - 1] -= rate[i] * sum_rate
                # backward through A, whose other elements are still 0 from `_mask`
                _multiply_transposed(constant, dO, rows, G, rows, True, dA)
                for j in range(rows):
                    for i in range(rows):
                        if i <= j < n:
                            of_A = -dA[j, i] * (QK[j, i] + one)
                            of_rate[i] += scales[j] * of_A
                            of_scale[j] += rate[i] * of_A
                            A[j, i] = -scales[j] * rate[i] * dA[j, i]
                _multiply(constant, A.T, rows, Q, rows, dX)
                _multiply(constant, A, rows, K, rows, dX[rows:])
                # backward through Z and QW + β
                _multiply_transposed(constant, dY, 2 * rows, S, D, False, dX)
                for i in range(2 * rows):
                    for c in range(D):
                        of_start[c] += dY[i, c]
                _multiply(constant, X.T, D, dY, 2 * rows, dS)
                for c in range(D):
                    dS[D, c] += of_start[c]
                    dgamma[b, r, h, c] += of_weight[c]
                    dmu[b, r, h, c] += of_bias[c]
                for j in range(n):
                    t = origin + forth * j
                    dq_row, dk_row, dv_row = dq[b, t, r, h], dk[b, t, r, h], dv[b, t, r, h]
                    drate[b, t, r, h] = of_rate[j]
                    for c in range(D):
                        dq_row[c] = dX[rows + j, c]
                        dk_row[c] = dX[j, c]
                        dv_row[c] = -u[j, c]
