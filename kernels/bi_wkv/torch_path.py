"""Bi-WKV in batched PyTorch operations, forward and backward: for a GPU without Triton, and a CPU without numba.

A weighted sum is a tensor (2,B,T,C), the sum and its weights, or (3,B,T,C) with an exponent e as the third row, where
2^e is a factor of both. A token is [v, 1] with the exponent k. Here k, w and u are in powers of two, that is,
multiplied by log₂e. The state of a direction before token t, and the total that is divided, are

    left_t = Σ_{i<t} 2^{−(t−i−1) w} token_i         total_t = left_t + right_t + 2^u token_t
    out_t = total_t[0] / total_t[1]

`_scan` takes eight neighbouring tokens as a chunk, all chunks at once, and scans the chunks' sums in the same way: the
roundings of an exponent grow with log T. Exponents are running maxima, which is right for any k, w and u. Where the
weights of a whole sequence fit a float, as in a trained model, there are no exponents.

The gradient is the same kind of sum. With the adjoint tokens [g, g out] / den and their exponents −e, where total is
[num, den] with the exponent e and g is out's gradient, and with ⟨a, b⟩ = a[0] b[0] − a[1] b[1],

    dv = 2^k adjoint_total[0]       dk = ⟨token, adjoint_total⟩       du = Σ_t 2^u ⟨token, adjoint_token⟩
    dw = −Σ_t 2^{−w} (⟨left_t, adjoint_right_t⟩ + ⟨right_t, adjoint_left_t⟩)

since a token between i and t stands for one of the |t−i| − 1 factors 2^{−w} of that pair. Shape letters as in
`reference`.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype
from .reference import EMPTY, Arguments, check_decay

_CHUNK = 8
_BLOCK = 2**18  # elements of the token sums that are computed at once: scratch memory stays in the cache
# Exponents are left out where a sequence's weights stay within 2^±_POWERS and |v| below 2^_VALUES. Both, and their
# product with a gradient of any usual size, fit fp32's 2^±126.
_POWERS, _VALUES = 60, 40


def states_shape(shape: Sequence[int], keep_states: bool) -> tuple[int, ...]:
    """Return the shape of `forward`'s states: nothing is kept for the backward pass."""
    return (0,)


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """Return out (B,T,C) in k's dtype, and states of shape `states_shape`.

    Results are contiguous for any strides of k, here and in `backward`: the fake kernels of `CustomOp` promise it.
    """
    out = torch.empty_like(x.k, memory_format=torch.contiguous_format)
    for here in _blocks(x.k.shape):
        w, u, tokens = _tokens(x, here)
        total = _add(_add(_scan(tokens, w, False), _scan(tokens, w, True)), tokens, u)
        out[here] = total[0] / total[1]
    return out, x.k.new_empty(states_shape(x.k.shape, keep_states), dtype=compute_dtype(x.k.dtype))


def backward(dout: Tensor, out: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of w, u, k, v, each in its input's shape and dtype, from dout and `forward`'s results."""
    dw, du = (torch.zeros_like(each, dtype=compute_dtype(x.k.dtype)) for each in (x.w, x.u))
    dk, dv = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x.k, x.v))
    for here in _blocks(x.k.shape):
        w, u, tokens = _tokens(x, here)
        left, right = (_scan(tokens, w, reverse) for reverse in (False, True))
        total = _add(_add(left, right), tokens, u)
        g = dout[here].to(dw.dtype) / total[1]
        adjoint = torch.stack([g, g * total[0] / total[1], *-total[2:]])
        adjoint_left, adjoint_right = (_scan(adjoint, w, reverse) for reverse in (False, True))
        adjoint_total = _add(_add(adjoint_left, adjoint_right), adjoint, u)

        dw[here[2]] -= (_pair(left, adjoint_right, -w) + _pair(right, adjoint_left, -w)).sum((0, 1))
        du[here[2]] += _pair(tokens, adjoint, u).sum((0, 1))
        dk[here] = _pair(tokens, adjoint_total)
        dv[here] = _raise(tokens[1] * adjoint_total[0], tokens, adjoint_total)
    return dw.to(x.w.dtype), du.to(x.u.dtype), dk, dv


def _blocks(shape: Sequence[int]) -> list[tuple[slice, slice, slice]]:
    """List the blocks: some images with all channels, or one image with some channels."""
    B, T, C = shape
    images = max(1, _BLOCK // (2 * T * C))
    channels = min(C, max(32, _BLOCK // (2 * T)))
    return [
        (slice(b, b + images), slice(None), slice(c, c + channels))
        for b in range(0, B, images)
        for c in range(0, C, channels)
    ]


def _tokens(x: Arguments, here: tuple[slice, slice, slice]) -> tuple[Tensor, Tensor, Tensor]:
    """Return w, u and the tokens of a block, in the compute dtype and in powers of two.

    The tokens have no exponents, (2,B,T,C), where the weights fit a float.
    """
    w, u, k, v = (each.to(compute_dtype(x.k.dtype)) for each in (x.w[here[2]], x.u[here[2]], x.k[here], x.v[here]))
    T = k.shape[1]
    check_decay(w, T)
    w, u, k = (each * math.log2(math.e) for each in (w, u, k))
    largest_w, largest_u, largest_k, largest_v = (max(abs(y.item()) for y in each.aminmax()) for each in (w, u, k, v))
    # false if any of them is NaN, which takes the way with exponents
    if 2 * T * largest_w + largest_u + largest_k + math.log2(T) < _POWERS and largest_v < 2**_VALUES:
        weights = k.exp2()
        return w, u, torch.stack([weights * v, weights])
    return w, u, torch.stack([v, torch.ones_like(v), k.clamp(min=EMPTY)])


def _scan(items: Tensor, w: Tensor, reverse: bool) -> Tensor:
    """Return at every item the sum of the items before it (`reverse`: behind it), with 2^{−w} for each item between.

    The items are (2,B,T,C) or (3,B,T,C).
    """
    T, order = items.shape[2], -1 if reverse else 1
    n = T if T < 2 * _CHUNK else _CHUNK
    padded = F.pad(items, (0, 0, 0, -T % n))
    padded[2:, :, T:] = EMPTY
    places = padded.unflatten(2, (-1, n)).unbind(3)[::order]
    states = [torch.zeros_like(places[0])]
    states[0][2:] = EMPTY
    for place in places:
        states.append(_add(place, states[-1], -w))
    sums = states.pop()
    inside = torch.stack(states[::order], 3)
    if n < T:
        steps = torch.arange(n, dtype=w.dtype, device=w.device)[:, None]
        start = _scan(sums, n * w, reverse).unsqueeze(3)
        inside = _add(inside, start, -w * (steps.flip(0) if reverse else steps))
    return inside.flatten(2, 3)[:, :, :T]


def _add(a: Tensor, b: Tensor, power: Tensor | None = None) -> Tensor:
    """Return a + 2^power b."""
    if len(a) == 2:
        return a + b if power is None else torch.addcmul(a, b, power.exp2())
    e = b[2] if power is None else b[2] + power
    top = torch.maximum(a[2], e)
    result = torch.empty_like(a)
    torch.mul(a[:2], torch.exp2(a[2] - top), out=result[:2]).addcmul_(b[:2], torch.exp2(e - top))
    result[2] = top
    return result


def _pair(a: Tensor, b: Tensor, power: Tensor | None = None) -> Tensor:
    """Return 2^power ⟨a, b⟩ (B,T,C)."""
    return _raise(torch.addcmul(a[0] * b[0], a[1], b[1], value=-1), a, b, power)


def _raise(values: Tensor, a: Tensor, b: Tensor, power: Tensor | None = None) -> Tensor:
    """Multiply values (B,T,C) by 2^power and by the powers of two of a and b."""
    exponents = [*a[2:], *b[2:], *([] if power is None else [power])]
    return values * torch.exp2(sum(exponents)) if exponents else values
