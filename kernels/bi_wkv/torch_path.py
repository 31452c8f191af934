"""Bi-WKV in batched PyTorch operations, forward and hand-written backward: what CPUs run, and any other device.

Everything is in powers of two. A pair (e, x) of exponents (B,T,C) and values (2,B,T,C) stands for 2^e x; the two values
are a weighted sum and the sum of its weights, the output's numerator and denominator. With tokens as (k log2 e, [v,
1]), decay W = w log2 e and bonus U = u log2 e, a direction's state before token t and the sum that is divided are

    left_t = Σ_{i<t} 2^{−(t−i−1) W} token_i,      total_t = left_t + right_t + 2^U token_t,      out_t = total_t[0] /
    total_t[1]

`_scan` takes eight neighbouring tokens as a chunk, all chunks side by side. A sweep gives the states within the chunks
and the chunks' sums; a scan over these sums (the same function, with decay 8 W) gives the states at the chunks' starts,
which are added. Time is linear in T, and the number of operations grows with log T. The exponents that are carried
along are running maxima, which is right for any k, w and u. Where the powers of a whole sequence fit a float, as in a
trained model, e is None and 2^e is in x.

The backward pass repeats the scans. The gradient is the same kind of sum: with the adjoint tokens (−E, [g, g out] /
den), where total = 2^E [num, den] and g is out's gradient, and with ⟨a, b⟩ = a[0] b[0] − a[1] b[1],

    dv = 2^k adjoint_total[0]       dk = ⟨token, adjoint_total⟩       du = Σ_t 2^U ⟨token, adjoint_token⟩
    dw = −Σ_t 2^{−W} (⟨left_t, adjoint_right_t⟩ + ⟨right_t, adjoint_left_t⟩)

since a token between i and t stands for one of the |t−i| − 1 factors e^{−w} of that pair. Shape letters as in
`reference`.
"""

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype
from .reference import EMPTY, Arguments, check_decay

_CHUNK = 8
_BLOCK = 2**18  # elements of the tokens' values that are handled at once: scratch memory stays in the cache
# Without exponents the powers of a sequence stay within 2^±_POWERS and |v| below 2^_VALUES: they, and the product of
# both with a gradient of any usual size, fit an fp32's 2^±126.
_POWERS, _VALUES = 60, 40

Weighted = tuple[Tensor | None, Tensor]


def states_shape(shape: Sequence[int], keep_states: bool) -> tuple[int, ...]:
    """The shape of `forward`'s states: nothing is kept for the backward pass."""
    return (0,)


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """out (B,T,C) in k's dtype, and states of shape `states_shape`."""
    w, u, k, v = x
    out, T = torch.empty_like(k, memory_format=torch.contiguous_format), k.shape[1]
    blocks = _blocks(k.shape)
    # once for all blocks, since the first is the largest: new pages cost more than a scan
    memory = _memory(k[blocks[0]], 3)
    for here in blocks:
        B, _, C = k[here].shape
        values, left, right = memory[:, :, :B, :, :C]
        tokens, W, U = _tokens(w[here[2]], u[here[2]], k[here], v[here], values)
        left, right = _scan(tokens, W, False, left), _scan(tokens, W, True, right)
        _, total = _total(tokens, left, right, U, left[1])
        torch.div(total[0, :, :T], total[1, :, :T], out=total[0, :, :T])
        out[here] = total[0, :, :T]
    return out, k.new_empty(states_shape(k.shape, keep_states), dtype=compute_dtype(k.dtype))


def backward(dout: Tensor, out: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of w, u, k, v, each in its input's shape and dtype, from dout and `forward`'s results."""
    w, u, k, v = x
    T, dtype = k.shape[1], compute_dtype(k.dtype)
    dw, du = torch.zeros_like(w, dtype=dtype), torch.zeros_like(u, dtype=dtype)
    dk, dv = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (k, v))
    for here in _blocks(k.shape):
        channels = here[2]
        tokens, W, U = _tokens(w[channels], u[channels], k[here], v[here], _memory(k[here], 1)[0])
        left, right = _scan(tokens, W, False), _scan(tokens, W, True)
        e, total = _total(tokens, left, right, U)

        values = torch.zeros_like(total)
        torch.div(dout[here].to(dtype), total[1, :, :T], out=values[0, :, :T])
        torch.div(values[0, :, :T] * total[0, :, :T], total[1, :, :T], out=values[1, :, :T])
        if e is not None:
            e.neg_()[:, T:] = EMPTY
        adjoint = e, values
        adjoint_left, adjoint_right = _scan(adjoint, W, False), _scan(adjoint, W, True)
        adjoint_total = _total(adjoint, adjoint_left, adjoint_right, U)

        dw[channels] -= (_pair(left, adjoint_right, -W) + _pair(right, adjoint_left, -W)).sum((0, 1))
        du[channels] += _pair(tokens, adjoint, U).sum((0, 1))
        dk[here] = _pair(tokens, adjoint_total)[:, :T]
        dv[here] = _times_powers(tokens[1][1] * adjoint_total[1][0], tokens[0], adjoint_total[0])[:, :T]
    return dw.to(w.dtype), du.to(u.dtype), dk, dv


def _blocks(shape: Sequence[int]) -> list[tuple[slice, slice, slice]]:
    """The blocks, none larger than the first: some images with all channels, or one image with some channels."""
    B, T, C = shape
    images = max(1, _BLOCK // (2 * T * C))
    channels = min(C, max(32, _BLOCK // (2 * T)))
    return [
        (slice(b, b + images), slice(None), slice(c, c + channels))
        for b in range(0, B, images)
        for c in range(0, C, channels)
    ]


def _memory(k: Tensor, number: int) -> Tensor:
    """Memory for the values of `number` scans over k (B,T,C), with its last chunk filled up: (number,2,B,T',C)."""
    B, T, C = k.shape
    return k.new_empty((number, 2, B, T + -T % _CHUNK, C), dtype=compute_dtype(k.dtype))


def _tokens(w: Tensor, u: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Weighted, Tensor, Tensor]:
    """The tokens, with their values in x and zeros behind them up to a whole chunk, and w and u in powers of two."""
    T, log2e = k.shape[1], 1 / math.log(2)
    w, u, k, v = (x.to(compute_dtype(k.dtype)) for x in (w, u, k, v))
    check_decay(w, T)
    w, u = w * log2e, u * log2e
    x[:, :, T:] = 0
    largest = [max(abs(extreme.item()) for extreme in y.aminmax()) for y in (w, u, k, v)]
    powers = 2 * T * largest[0] + largest[1] + log2e * largest[2] + math.log2(T)
    if powers < _POWERS and largest[3] < 2.0**_VALUES:  # false if one of them is NaN
        torch.mul(k, log2e, out=x[1, :, :T]).exp2_()
        torch.mul(x[1, :, :T], v, out=x[0, :, :T])
        return (None, x), w, u
    x[0, :, :T], x[1, :, :T] = v, 1
    e = F.pad((k * log2e).clamp(min=EMPTY), (0, 0, 0, -T % _CHUNK), value=EMPTY)
    return (e, x), w, u


def _scan(items: Weighted, w: Tensor, reverse: bool, out: Tensor | None = None) -> Weighted:
    """At every token the sum of the items before it (`reverse`: behind it), with 2^{−w} for each token between.

    Without exponents the values are written to `out`, if there is one.
    """
    e, x = items
    T = x.shape[2]
    n = T if T < 2 * _CHUNK else _CHUNK
    if missing := -T % n:
        e = None if e is None else F.pad(e, (0, 0, 0, missing), value=EMPTY)
        e, x = _scan((e, F.pad(x, (0, 0, 0, missing))), w, reverse)
        return None if e is None else e[:, :T], x[:, :, :T]

    e, x = None if e is None else e.unflatten(1, (-1, n)), x.unflatten(2, (-1, n))
    result_e = None if e is None else torch.empty_like(e)
    result_x = torch.empty_like(x) if out is None else out.unflatten(2, (-1, n))
    here, there = _places(e, x), _places(result_e, result_x)
    if reverse:
        here, there = here[::-1], there[::-1]
    decay = torch.exp2(-w)
    there[0][1].zero_()
    if e is not None:
        there[0][0].fill_(EMPTY)
    for i in range(n - 1):
        _advance(there[i], here[i], w, decay, there[i + 1])
    if n < T:
        sums = None if e is None else torch.empty_like(here[0][0]), torch.empty_like(here[0][1])
        _advance(there[-1], here[-1], w, decay, sums)
        start_e, start_x = _scan(sums, n * w, reverse)
        between = torch.arange(n, dtype=w.dtype, device=w.device)[:, None] * -w
        between = between.flip(0) if reverse else between
        if e is None:
            result_x.addcmul_(start_x.unsqueeze(3), torch.exp2(between))
        else:
            result_e, result_x = _sum((result_e, result_x), (start_e.unsqueeze(2) + between, start_x.unsqueeze(3)))
    return None if e is None else result_e.flatten(1, 2), result_x.flatten(2, 3)


def _places(e: Tensor | None, x: Tensor) -> list[Weighted]:
    """The tokens of e (B,m,n,C) and x (2,B,m,n,C) at each place of a chunk."""
    values = x.unbind(3)
    return list(zip([None] * len(values) if e is None else e.unbind(2), values, strict=True))


def _advance(state: Weighted, item: Weighted, w: Tensor, decay: Tensor, result: Weighted) -> None:
    """result = 2^{−w} state + item; decay is 2^{−w}."""
    if item[0] is None:
        torch.addcmul(item[1], state[1], decay, out=result[1])
    else:
        for target, source in zip(result, _sum((state[0] - w, state[1]), item), strict=True):
            target.copy_(source)


def _sum(*pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of pairs with exponents; its own exponent is the largest."""
    top = functools.reduce(torch.maximum, (e for e, _ in pairs))
    return top, sum(x * torch.exp2(e - top) for e, x in pairs)


def _total(items: Weighted, left: Weighted, right: Weighted, u: Tensor, out: Tensor | None = None) -> Weighted:
    """left + right + 2^u items; without exponents the values are written to `out`, if there is one."""
    if items[0] is None:
        return None, torch.add(left[1], right[1], out=out).addcmul_(items[1], torch.exp2(u))
    return _sum(left, right, (items[0] + u, items[1]))


def _pair(a: Weighted, b: Weighted, *powers: Tensor) -> Tensor:
    """⟨a, b⟩ (B,T,C) times two to the `powers` (C,)."""
    product = a[1] * b[1]
    return _times_powers(product[0] - product[1], a[0], b[0], *powers)


def _times_powers(x: Tensor, *exponents: Tensor | None) -> Tensor:
    """x (B,T,C) times two to the sum of the exponents; None counts as 0."""
    known = [e for e in exponents if e is not None]
    return x * torch.exp2(sum(known)) if known else x
