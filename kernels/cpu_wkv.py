"""Bi-WKV as loops that numba compiles for CPUs, see `cpu_loops`; shape letters are those of `bi_wkv.reference`."""

import numba
import numpy as np

from .bi_wkv.reference import EMPTY
from .cpu_loops import BLOCK, GROUP, INLINE, Loop, exp2


@numba.njit(**INLINE)
def _add_token(state, w, exponents, xs, ys, c):
    """Move channel c of a state one token farther away, and add 2^exponent (x, y).

    A state (5,BLOCK) has the rows m, a and b, which stand for the sums 2^m a and 2^m b, then the exponent of the token
    that set m, and the tokens since then. m is computed from the last two rows: subtracting w from m token by token
    would lose a noticeable part of w near m = 1.
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


@numba.njit(**INLINE)
def _start(state, edge):
    """Write a state (5,BLOCK) from m, a and b at the edge of a group, (3,BLOCK); the rows are those of `_add_token`.

    Which token set m is not kept at an edge, so m is taken for the exponent of a token at distance 0.
    """
    for c in range(BLOCK):
        state[0, c], state[1, c], state[2, c] = edge[0, c], edge[1, c], edge[2, c]
        state[3, c] = state[0, c]
        state[4, c] = state.dtype.type(0)


@numba.njit(**INLINE)
def _add_group(state, group, tokens, farthest, w, sums):
    """Move a state `tokens` places away and add a group's tokens; `farthest` is the index of the farthest token.

    A state stands for the sums 2^m a and 2^m b. Between groups it is fp64: in fp32, m − w would lose a noticeable part
    of w near m = 1, thousands of times.

    Args:
        state: written, (3,BLOCK), fp64: m, a and b. group: (GROUP,3,BLOCK): exponent, x and y of each token.
        w: (BLOCK,). sums: (3 + GROUP,BLOCK), scratch memory: the group's m, a and b, and each token's exponent.
    """
    kind = group.dtype.type
    for c in range(BLOCK):
        sums[0, c] = kind(EMPTY)
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


@Loop
def wkv_forward(first, last, span, w, u, k, v, out, states):
    """Run Bi-WKV; a task is `span` channels of one image.

    The loop goes through the groups twice: backward for the state after each group, then forward for the outputs.

    Args:
        span: a multiple of BLOCK.
        w, u: (C,), times log₂e. k: (B,T,C), times log₂e. v: (B,T,C).
        out: written, (B,T,C).
        states: written, (B,T,3,C), exponent and sum of an output's weights, and the output; not written if empty.
    """
    _, T, C = k.shape
    spans, groups = (C + span - 1) // span, (T + GROUP - 1) // GROUP
    # rows of `cell`: w, u, the state before a token (5), the state after it (5), and a token's output with the exponent
    # and sum of its weights
    W, U, LEFT, NEAR, OUT, TOP, SUM = 0, 1, 2, 7, 12, 13, 14
    cell = np.zeros((span // BLOCK, 15, BLOCK), k.dtype)
    edge = np.empty((span // BLOCK, 2, 3, BLOCK), np.float64)  # the states before and after a group
    behind = np.empty((groups, span // BLOCK, 3, BLOCK), np.float64)
    right, sums = np.empty((GROUP, 3, BLOCK), k.dtype), np.empty((3 + GROUP, BLOCK), k.dtype)
    token = np.zeros((GROUP, 3, BLOCK), k.dtype)
    token[:, 2] = 1
    for task in range(first, last):
        b, start = task // spans, task % spans * span
        end = min(C, start + span)
        for e in range(start, end):
            block, c = (e - start) // BLOCK, (e - start) % BLOCK
            cell[block, W, c], cell[block, U, c] = w[e], u[e]
        edge[:] = 0
        edge[:, :, 0] = EMPTY
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
                    for each in range(edge.shape[2]):
                        for c in range(BLOCK):
                            behind[group, block, each, c] = edge[block, 1, each, c]
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


@Loop
def wkv_backward(first, last, span, w, u, k, v, states, dout, dw, du, dk, dv):
    """Compute the gradients of `wkv_forward`, with the same tasks.

    dw and du are (B,C), one row per image. dw, du and dk are the gradients by w, u and k themselves, without the factor
    log₂e. The gradients are sums of the same kind as the outputs, over adjoint tokens with the exponent −top and the
    values (g, g out), where g = dout / sum. Each token t between a token and an adjoint token stands for one factor
    e^{−w} of that pair.
    """
    _, T, C = k.shape
    spans, groups = (C + span - 1) // span, (T + GROUP - 1) // GROUP
    # rows of `cell`: w, u, a token's gradients of k and v, the sums of dw and du; and rows of `token`
    W, U, DK, DV, DW, DU = 0, 1, 2, 3, 4, 5
    K, V, E, X, Y = 0, 1, 3, 4, 5
    cell = np.zeros((span // BLOCK, 6, BLOCK), k.dtype)
    edge = np.empty((span // BLOCK, 2, 6, BLOCK), np.float64)  # the states before and after a group
    behind = np.empty((groups, span // BLOCK, 6, BLOCK), np.float64)
    left, near = np.empty((2, 5, BLOCK), k.dtype), np.empty((2, 5, BLOCK), k.dtype)  # tokens, adjoint tokens
    right, sums = np.empty((GROUP, 6, BLOCK), k.dtype), np.empty((3 + GROUP, BLOCK), k.dtype)
    token = np.zeros((GROUP, 6, BLOCK), k.dtype)  # exponent and two values, of a token and of its adjoint
    token[:, 2] = 1
    for task in range(first, last):
        b, start = task // spans, task % spans * span
        end = min(C, start + span)
        cell[:], edge[:] = 0, 0
        for each in (0, 3):
            edge[:, :, each] = EMPTY
        for e in range(start, end):
            block, c = (e - start) // BLOCK, (e - start) % BLOCK
            cell[block, W, c], cell[block, U, c] = w[e], u[e]
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
                    top_row = states[b, t, 0, e:until]
                    sum_row = states[b, t, 1, e:until]
                    out_row = states[b, t, 2, e:until]
                    for c in range(count):
                        its[K, c], its[V, c], its[E, c], its[X, c] = (
                            k_row[c],
                            v_row[c],
                            -top_row[c],
                            dout_row[c] / sum_row[c],
                        )
                        its[Y, c] = its[X, c] * out_row[c]
                if step < groups:
                    for each in range(edge.shape[2]):
                        for c in range(BLOCK):
                            behind[group, block, each, c] = edge[block, 1, each, c]
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
