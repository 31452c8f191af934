"""TTT-Linear's forward pass as a loop that numba compiles for CPUs: a head's state stays in the cache from its first
chunk to its last.

See `cpu_loops` for what such loops are. The head's width is a constant to the compiler, which then sees that rows do
not overlap, and keeps several of them in flight. Shape letters as in `ttt_linear.reference`.
"""

import numba
import numpy as np

from .cpu_loops import OPTIONS, compile_loop

_ROWS, _DEPTH = 4, 4  # rows of a product that are computed together, and how many of its sums' terms


@numba.njit(**OPTIONS)
def _multiply(constant, A, rows, B, terms, C):
    """C += A B, of the first `rows` rows of A and C, a multiple of 4, and `terms` of the sums."""
    D = len(constant)
    for i in range(0, rows, _ROWS):
        for d in range(0, terms, _DEPTH):
            a00, a01, a02, a03 = A[i, d], A[i, d + 1], A[i, d + 2], A[i, d + 3]
            a10, a11, a12, a13 = A[i + 1, d], A[i + 1, d + 1], A[i + 1, d + 2], A[i + 1, d + 3]
            a20, a21, a22, a23 = A[i + 2, d], A[i + 2, d + 1], A[i + 2, d + 2], A[i + 2, d + 3]
            a30, a31, a32, a33 = A[i + 3, d], A[i + 3, d + 1], A[i + 3, d + 2], A[i + 3, d + 3]
            for c in range(D):
                b0, b1, b2, b3 = B[d, c], B[d + 1, c], B[d + 2, c], B[d + 3, c]
                C[i, c] += a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3
                C[i + 1, c] += a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3
                C[i + 2, c] += a20 * b0 + a21 * b1 + a22 * b2 + a23 * b3
                C[i + 3, c] += a30 * b0 + a31 * b1 + a32 * b2 + a33 * b3


@compile_loop
def learn(first, last, constant, q, k, v, lr, scale, state, gamma, mu, out, back, eps):
    """TTT-Linear: task = (image, direction, head).

    Args:
        constant: a tuple of as many elements as a head is wide, a multiple of 4: its length is what the compiler knows
            of it.
        q, k, v: (B,T,R,H,D). lr: (B,T,H). scale: (R,n).
        state: (R,H,D+1,D), W0 above b0, with rows of mean 0. gamma, mu: (R,H,D).
        out: (B,T,R,H,D), which is written.
        back: (R,), 1 for a direction that starts with the last token, else 0.
        eps: added to variances.
    """
    _, T, R, H, _ = q.shape
    D = len(constant)
    chunk, dtype = scale.shape[1], q.dtype
    chunk = min(chunk, T)
    held = (chunk + _ROWS - 1) // _ROWS * _ROWS
    zeros = np.zeros(2, dtype)
    nothing, width = zeros[0], zeros[1] + D
    # keys, then queries; and what the state makes of them
    X, Y = np.zeros((2 * held, D), dtype), np.zeros((2 * held, D), dtype)
    target, G, A = np.zeros((held, D), dtype), np.zeros((held, D), dtype), np.zeros((held, held), dtype)
    P, S = np.zeros((D, held), dtype), np.zeros((D + 1, D), dtype)
    for task in range(first, last):
        b, r, h = task // (R * H), task // H % R, task % H
        weight, bias = gamma[r, h], mu[r, h]
        S[:] = state[r, h]
        for start in range(0, T, chunk):
            n = min(chunk, T - start)
            rows = (n + _ROWS - 1) // _ROWS * _ROWS
            for j in range(rows):  # beyond the end keys, queries and rates are 0
                t = T - 1 - start - j if back[r] else start + j
                inside = j < n
                t = t if inside else start
                k_row, q_row, v_row = k[b, t, r, h], q[b, t, r, h], v[b, t, r, h]
                for c in range(D):
                    X[j, c] = k_row[c] if inside else nothing
                    X[rows + j, c] = q_row[c] if inside else nothing
                    target[j, c] = weight[c] * (bias[c] + X[j, c] - v_row[c])
                for c in range(D):
                    Y[j, c] = S[D, c]
                    Y[rows + j, c] = S[D, c]
            _multiply(constant, X, 2 * rows, S, D, Y)
            for j in range(rows):
                square, offset, mean, along = nothing, nothing, nothing, nothing
                # the state's rows have mean 0 but for rounding, which from chunk to chunk would grow
                for c in range(D):
                    offset += Y[j, c]
                offset /= width
                for c in range(D):
                    Y[j, c] -= offset
                    square += Y[j, c] * Y[j, c]
                norm = np.sqrt(square / width + eps)
                for c in range(D):
                    Y[j, c] /= norm
                for c in range(D):
                    G[j, c] = weight[c] * weight[c] * Y[j, c] + target[j, c]
                for c in range(D):
                    mean += G[j, c]
                    along += G[j, c] * Y[j, c]
                mean, along = mean / width, along / width
                for c in range(D):
                    G[j, c] = (G[j, c] - mean - along * Y[j, c]) / norm
            for j in range(rows):
                for i in range(rows):
                    A[j, i] = nothing
                for i in range(min(j + 1, n) if j < n else 0):
                    dot = nothing
                    for c in range(D):
                        dot += X[rows + j, c] * X[i, c]
                    t = T - 1 - start - i if back[r] else start + i
                    A[j, i] = -scale[r, j] * lr[b, t, h] * (dot + 1)
            _multiply(constant, A, rows, G, rows, Y[rows:])
            for i in range(rows):
                t = T - 1 - start - i if back[r] else start + i
                rate = -scale[r, n - 1] * lr[b, t, h] if i < n else nothing
                for d in range(D):
                    P[d, i] = rate * X[i, d]
                if i < n:
                    for c in range(D):
                        S[D, c] += rate * G[i, c]
            _multiply(constant, P, D, G, rows, S)
            for j in range(n):
                t = T - 1 - start - j if back[r] else start + j
                q_row, out_row, square = q[b, t, r, h], out[b, t, r, h], nothing
                for c in range(D):
                    square += Y[rows + j, c] * Y[rows + j, c]
                norm = np.sqrt(square / width + eps)
                for c in range(D):
                    out_row[c] = q_row[c] + bias[c] + weight[c] * Y[rows + j, c] / norm
