"""The parts of a Vittt block around the scan, as loops that numba compiles for CPUs, see `cpu_loops`.

A loop reads a token's row, keeps it in the cache for all its operations, and writes the result once. The shape letters
are those of `around.reference`.
"""

import math

import numba
import numpy as np

from .cpu_loops import INLINE, Loop, add_scaled, copy_row, sigmoid


@numba.njit(**INLINE)
def _centre(row, eps):
    """Subtract a row's mean in place, and return √(variance + eps), with the variance over all of the row."""
    nothing, width = row.dtype.type(0), row.dtype.type(len(row))
    mean, square = nothing, nothing
    for c in range(len(row)):
        mean += row[c]
    mean /= width
    for c in range(len(row)):
        row[c] -= mean
        square += row[c] * row[c]
    return np.sqrt(square / width + eps)


@Loop
def conv_norm(first, last, constant, tokens, weight, gamma, beta, out, height, eps):
    """Add a 3 x 3 convolution to the tokens and normalise the sum; a task is a row of one image's grid.

    Args:
        constant: a tuple of D elements, whose length the compiler knows.
        tokens: (B,T,D). weight: (3,3,D). gamma, beta: (D,).
        out: written, (2,B,T,D): the sum, then the normalised sum.
    """
    _, T, D = tokens.shape
    width = T // height
    work = np.empty(D, tokens.dtype)
    for task in range(first, last):
        b, y = task // height, task % height
        for x in range(width):
            t = y * width + x
            total, normed = out[0, b, t], out[1, b, t]
            copy_row(constant, tokens[b, t], total)
            # the bounds leave out taps beyond the edges, where the padding is zero
            for i in range(max(0, 1 - y), min(3, height + 1 - y)):
                for j in range(max(0, 1 - x), min(3, width + 1 - x)):
                    add_scaled(constant, total, weight[i, j], tokens[b, t + (i - 1) * width + j - 1])
            copy_row(constant, total, work)
            norm = _centre(work, eps)
            for c in range(D):
                work[c] *= gamma[c]
            for c in range(D):
                normed[c] = work[c] / norm + beta[c]


@Loop
def gated_norm(first, last, block, zs, z_strides, gates, gate_strides, weight, bias, out, eps):
    """Normalise the sum of both directions and gate it with GELU; a task is `block` tokens of one image.

    Args:
        zs, z_strides: z (B,T,2,D), laid flat by `threads.lay_flat`. gates, gate_strides: gate (B,T,D), likewise.
        weight, bias: (D,).
        out: written, (B,T,D).
    """
    _, T, D = out.shape
    kind = out.dtype.type
    # GELU(g) = g · sigmoid(√(8/π) (g + 0.044715 g³)), the tanh approximation
    slope, cubic, one = kind(math.sqrt(8 / math.pi)), kind(0.044715), kind(1)
    blocks = (T + block - 1) // block
    work = np.empty(D, out.dtype)
    for task in range(first, last):
        b, start = task // blocks, task % blocks * block
        for t in range(start, min(T, start + block)):
            for r in range(2):
                place = b * z_strides[0] + t * z_strides[1] + r * z_strides[2]
                row = zs[place : place + D]
                for c in range(D):
                    work[c] = row[c] if r == 0 else work[c] + row[c]
            norm = _centre(work, eps)
            for c in range(D):
                work[c] = work[c] / norm * weight[c]
            for c in range(D):
                work[c] += bias[c]
            place, result = b * gate_strides[0] + t * gate_strides[1], out[b, t]
            row = gates[place : place + D]
            for c in range(D):
                g = row[c]
                result[c] = work[c] * g * sigmoid(slope * g * (one + cubic * g * g))
