"""The selective scan as loops that numba compiles for CPUs, see `cpu_loops`.

The shape letters are those of `selective_scan.reference`.
"""

import numba
import numpy as np

from .cpu_loops import BLOCK, GROUP, INLINE, Loop, exp2, sigmoid, softplus

SIZE, FED, Y = 0, 1, 2  # rows of a token's `work`: Δ, Δ u and y, which starts as D u


@numba.njit(**INLINE)
def _take_rates(exponents, start, end, square, rate):
    """Copy the exponents (N,E) of channels `start` to `end` to row `rate` of `square` (blocks,N,rows,BLOCK)."""
    for n in range(len(exponents)):
        for c in range(end - start):
            square[c // BLOCK, n, rate, c % BLOCK] = exponents[n, start + c]


@numba.njit(**INLINE)
def _feed(u_row, delta_row, D_row, bias_row, row):
    """Compute a token's Δ, Δ u and D u, the first three rows of `row` (rows,BLOCK), in as many channels as u_row has."""
    for c in range(len(u_row)):
        row[SIZE, c] = softplus(delta_row[c] + bias_row[c])
    for c in range(len(u_row)):
        row[FED, c] = row[SIZE, c] * u_row[c]
        row[Y, c] = D_row[c] * u_row[c]


@Loop
def scan_forward(first, last, span, u, delta, exponents, B, C, D, bias, z, out, states, back):
    """Run the selective scan with its gate; a task is `span` channels of one image and route.

    Route r scans the sequence u[:, :, r mod K].

    Args:
        span: a multiple of BLOCK.
        u: (B,T,K,E). delta: (B,T,R,E). exponents: (R,N,E), A log₂e. B, C: (B,T,R,N). D, bias: (R,E).
        z: (B,T,E); empty for no gate.
        out: written, (B,T,R,E).
        states: written, (B,groups,R,N,E), the states at the start of every group of tokens except the first; not
            written if empty.
        back: (R,), 1 for a route that is scanned from the last token, else 0.
    """
    _, T, R, E = delta.shape
    N, K, dtype = exponents.shape[1], u.shape[2], delta.dtype
    spans = (E + span - 1) // span
    square = np.zeros((span // BLOCK, N, 2, BLOCK), dtype)
    work = np.zeros((GROUP, span // BLOCK, 3, BLOCK), dtype)
    # rows of `square`: h and A log₂e; rows of `work`: Δ, Δ u and y
    STATE, RATE = 0, 1
    for task in range(first, last):
        b, r, start = task // (spans * R), task // spans % R, task % spans * span
        k, forth, end = r % K, 1 - 2 * back[r], min(E, start + span)
        square[:, :, STATE] = 0
        _take_rates(exponents[r], start, end, square, RATE)
        for group in range((T + GROUP - 1) // GROUP):
            tokens, origin = min(GROUP, T - group * GROUP), back[r] * (T - 1) + forth * group * GROUP
            for j in range(tokens):
                t = origin + j * forth
                for block, e in enumerate(range(start, end, BLOCK)):
                    until, row = min(e + BLOCK, end), work[j, block]
                    _feed(u[b, t, k, e:until], delta[b, t, r, e:until], D[r, e:until], bias[r, e:until], row)
            for block, e in enumerate(range(start, end, BLOCK)):
                if states.size and group:
                    until = min(e + BLOCK, end)
                    for n in range(N):
                        for c in range(until - e):
                            states[b, group - 1, r, n, e + c] = square[block, n, STATE, c]
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


@Loop
def scan_backward(
    first, last, span, u, delta, exponents, B, C, D, bias, z, dout, states, back, du, ddelta, dA, dB, dC, dD, dbias, dz
):
    """Compute the gradients of `scan_forward`, with the same tasks; dout: (B,T,R,E).

    Gradients to which several tasks add are written separately for each: du, ddelta (B,T,R,E), dA (B,R,N,E), dB and dC
    (spans,B,T,R,N), dD and dbias (B,R,E), dz (B,T,R,E) or no elements. dA is the gradient of A, not of `exponents`.
    """
    _, T, R, E = delta.shape
    N, K, dtype = exponents.shape[1], u.shape[2], delta.dtype
    zeros = np.zeros(2, dtype)
    nothing, one, ln2 = zeros[0], np.exp2(zeros[0]), np.log(np.exp2(zeros[0]) + np.exp2(zeros[0]))
    spans = (E + span - 1) // span
    h = np.empty((GROUP + 1, N, BLOCK), dtype)  # states before each token of a group, and after its last
    square = np.zeros((span // BLOCK, N, 3, BLOCK), dtype)
    work = np.zeros((GROUP, span // BLOCK, 6, BLOCK), dtype)
    sums = np.zeros((span // BLOCK, 2, BLOCK), dtype)
    # rows of `square`: a g of the next token, A log₂e and dA; rows of `work`: Δ, Δ u, y, dy and the gradients of Δ u
    # and of Δ through the decay; rows of `sums`: dD and dbias
    LATER, RATE, OF_A, DY, DFED, DSIZE, OF_D, OF_BIAS = 0, 1, 2, 3, 4, 5, 0, 1
    for task in range(first, last):
        b, r, number = task // (spans * R), task // spans % R, task % spans
        start = number * span
        k, forth, end = r % K, 1 - 2 * back[r], min(E, start + span)
        square[:], sums[:] = 0, 0
        work[:] = 0  # else the previous task's values, in channels that this task lacks, enter sums over channels
        _take_rates(exponents[r], start, end, square, RATE)
        for group in range((T - 1) // GROUP, -1, -1):
            tokens, origin = min(GROUP, T - group * GROUP), back[r] * (T - 1) + forth * group * GROUP
            for j in range(tokens):
                t = origin + j * forth
                for block, e in enumerate(range(start, end, BLOCK)):
                    until, row = min(e + BLOCK, end), work[j, block]
                    _feed(u[b, t, k, e:until], delta[b, t, r, e:until], D[r, e:until], bias[r, e:until], row)
                    dout_row = dout[b, t, r, e:until]
                    for c in range(len(dout_row)):
                        row[DFED, c], row[DSIZE, c] = 0, 0
                    if z.size:
                        z_row = z[b, t, e:until]
                        for c in range(len(dout_row)):
                            row[DY, c] = dout_row[c] * z_row[c] * sigmoid(z_row[c])
                    else:
                        for c in range(len(dout_row)):
                            row[DY, c] = dout_row[c]
                dB[number, b, t, r, :], dC[number, b, t, r, :] = 0, 0
            for block, e in enumerate(range(start, end, BLOCK)):
                until = min(e + BLOCK, end)
                h[0] = 0  # in any group: no state is loaded for channels beyond `end`, which enter sums over channels
                if group:
                    for n in range(N):
                        for c in range(until - e):
                            h[0, n, c] = states[b, group - 1, r, n, e + c]
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
                    u_row = u[b, t, k, e:until]
                    delta_row = delta[b, t, r, e:until]
                    D_row = D[r, e:until]
                    bias_row = bias[r, e:until]
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
            for n in range(N):
                dA[b, r, n, e] = square[block, n, OF_A, c]
            dD[b, r, e] = sums[block, OF_D, c]
            dbias[b, r, e] = sums[block, OF_BIAS, c]
