"""The selective scan in batched PyTorch operations, forward and backward, for machines without Triton or numba.

It goes through tiles of some tokens of some images on all routes, in scan order and with channels innermost. Everything
except the recurrence is done for the whole tile at once; a token of the recurrence is one operation over images,
routes, states and channels. Nothing is divided by a decay, which could underflow: no step size overflows.

The backward pass has the state at the start of every tile except the first. It repeats a tile's scan and goes back
through it. With a_t = exp(Δ_t A), dy = dL/dy and g_t = dL/dh_t:

    g_t = C_t dy_t + a_{t+1} g_{t+1}        p_t = g_t a_t h_{t−1}
    dC_t = Σ_e dy_t h_t                     dB_t = Σ_e g_t Δ_t u_t               du_t = Δ_t Σ_n g_t B_t + D dy_t
    dΔ_t = u_t Σ_n g_t B_t + Σ_n p_t A      dA = Σ_t Δ_t p_t                     dD = Σ_t dy_t u_t

Shape letters as in `reference`, and b images and L tokens of a tile.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype
from .reference import Arguments

# elements of the states at one token, enough for the work of its step to outweigh its dispatch; and elements of the
# states of a tile, few enough for the cache
_STEP_ELEMENTS = 32768
_TILE_ELEMENTS = 786432
_MIN_TOKENS, _MAX_TOKENS = 8, 128

# a tile: its images, its tokens in the order of a route that scans forward, and the direction of each route
_Place = tuple[slice, slice, Sequence[bool]]


def states_shape(shape: Sequence[int], state_dim: int, keep_states: bool) -> tuple[int, int, int, int, int]:
    """Return the shape of `forward`'s states for delta (B,T,R,E), one per tile except the first.

    Takes symbolic sizes.
    """
    images, T, R, E = shape
    _, tokens = _tile_sizes(shape, state_dim)
    return (T + tokens - 1) // tokens - 1 if keep_states else 0, images, R, state_dim, E


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """Return out (B,T,R,E) in `x.out_dtype`; states in the compute dtype, of shape `states_shape`."""
    shape, N = x.delta.shape, x.A.shape[-1]
    out = x.u.new_empty(shape, dtype=x.out_dtype)
    states = x.u.new_empty(states_shape(shape, N, keep_states), dtype=compute_dtype(x.u.dtype))
    for images, tiles in _tiles(x):
        start = x.u.new_zeros((), dtype=states.dtype)
        for number, tokens in enumerate(tiles):
            if keep_states and number:
                states[number - 1, images] = start
            here = images, tokens, x.reverse
            tile = _load(x, here)
            _, _, h = _scan(tile, start)
            y = _read_out(tile, h)
            _put(out, here, y if x.z is None else y * F.silu(tile.z))
            start = h[:, -1].clone()
    return out, states


def backward(dout: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of u, delta, ... delta_bias, each in its input's shape and dtype.

    `dout` is (B,T,R,E), `states` those of `forward`.
    """
    shape, dtype = x.delta.shape, states.dtype
    # gradients of tensors that routes share, u and z, are summed over the routes before they are rounded; results are
    # contiguous for any strides of the inputs, as the fake kernels of `CustomOp` promise
    ddelta, dB, dC = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x.delta, x.B, x.C))
    du, dz = (states.new_empty(shape) for _ in range(2))
    dA, dD, dbias = (states.new_zeros(each.shape) for each in (x.A.mT, x.D, x.delta_bias))
    for images, tiles in _tiles(x):
        carry = states.new_zeros(())
        for number, tokens in reversed(list(enumerate(tiles))):
            here = images, tokens, x.reverse
            tile = _load(x, here)
            start = states[number - 1, images] if number else states.new_zeros(())
            step, a, h = _scan(tile, start)
            dy = _take(dout, here, dtype)
            if x.z is not None:
                gate = tile.z.sigmoid()
                silu = tile.z * gate
                _put(dz, here, _read_out(tile, h) * dy * (gate + silu - silu * gate))
                dy = dy * silu
            _put(dC, here, _over_channels(h, dy))
            g = dy.unsqueeze(-2) * tile.C.unsqueeze(-1)
            g[:, -1] += carry
            a_rows, g_rows = a.unbind(1), g.unbind(1)
            for t in reversed(range(len(g_rows) - 1)):
                g_rows[t].addcmul_(a_rows[t + 1], g_rows[t + 1])
            carry = a[:, 0] * g[:, 0]
            dinput = _over_states(tile.B, g)
            _put(dB, here, _over_channels(g, step * tile.u))
            # a is overwritten here, and g by `out=g` below: everything that reads them comes before
            p = a.mul_(g)
            p[:, 0] *= start
            p[:, 1:] *= h[:, :-1]
            dstep = torch.mul(p, tile.A, out=g).sum(-2).addcmul_(dinput, tile.u).mul_(tile.delta.sigmoid())
            _put(ddelta, here, dstep)
            _put(du, here, (dinput * step).addcmul_(dy, tile.D))
            dbias += dstep.sum((0, 1))
            dA += p.mul_(step.unsqueeze(-2)).sum((0, 1))
            dD += (tile.u * dy).sum((0, 1))
    du, dA = du.unflatten(2, (-1, x.u.shape[2])).sum(2).to(x.u.dtype), dA.mT.contiguous().to(x.A.dtype)
    dz = None if x.z is None else dz.sum(2).to(x.z.dtype)
    return du, ddelta, dA, dB, dC, dD.to(x.D.dtype), dz, dbias.to(x.delta_bias.dtype)


def _tile_sizes(shape: Sequence[int], state_dim: int) -> tuple[int, int]:
    """Return the images and the tokens of a tile.

    They must follow from these sizes alone. Both passes and the fake kernel compute them anew, and the backward pass
    finds a kept state by the number of its tile.
    """
    B, T, R, E = shape
    token = R * E * state_dim
    images = torch.sym_min(B, torch.sym_max(1, _STEP_ELEMENTS // token))
    tokens = torch.sym_max(_MIN_TOKENS, _TILE_ELEMENTS // (images * token))
    return images, torch.sym_min(T, torch.sym_min(_MAX_TOKENS, tokens))


def _tiles(x: Arguments) -> Iterator[tuple[slice, list[slice]]]:
    """Yield some images with their tiles, each tile as its tokens in scan order."""
    B, T = x.delta.shape[:2]
    images, tokens = _tile_sizes(x.delta.shape, x.A.shape[-1])
    tiles = [slice(first, min(first + tokens, T)) for first in range(0, T, tokens)]
    for first in range(0, B, images):
        yield slice(first, first + images), tiles


def _load(x: Arguments, here: _Place) -> Arguments:
    """Return the arguments of a tile in the compute dtype, with the bias added to delta, and A as (R,N,E)."""
    dtype = compute_dtype(x.u.dtype)
    A, D, bias = (each.to(dtype) for each in (x.A.mT.contiguous(), x.D, x.delta_bias))
    u, delta, B, C = (_take(each, here, dtype) for each in (x.u, x.delta, x.B, x.C))
    z = None if x.z is None else _take(x.z.unsqueeze(2), here, dtype)
    return x._replace(u=u, delta=delta + bias, A=A, B=B, C=C, D=D, z=z)


def _take(x: Tensor, here: _Place, dtype: torch.dtype) -> Tensor:
    """Return a tile of x (B,T,K,·) for all routes, (b,L,R,·) in scan order; route r has the sequence r mod K."""
    images, tokens, reverse = here
    K, back = x.shape[2], _mirrored(tokens, x.shape[1])
    routes = [x[images, back, r % K].flip(1) if flag else x[images, tokens, r % K] for r, flag in enumerate(reverse)]
    return torch.stack(routes, 2).to(dtype)


def _put(target: Tensor, here: _Place, tile: Tensor) -> None:
    """Write a tile (b,L,R,·) to the places of its tokens in target (B,T,R,·)."""
    images, tokens, reverse = here
    back = _mirrored(tokens, target.shape[1])
    for r, flag in enumerate(reverse):
        target[images, back if flag else tokens, r] = tile[:, :, r].flip(1) if flag else tile[:, :, r]


def _mirrored(tokens: slice, T: int) -> slice:
    """Return the places of a tile's tokens on a route that scans backward."""
    return slice(T - tokens.stop, T - tokens.start)


def _scan(tile: Arguments, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the steps Δ (b,L,R,E), and the decays a and states h (b,L,R,N,E), from the state before the tile."""
    step = _softplus(tile.delta)
    a = torch.mul(step.unsqueeze(-2), tile.A * math.log2(math.e)).exp2_()
    h = (step * tile.u).unsqueeze(-2) * tile.B.unsqueeze(-1)
    for a_t, h_t in zip(a.unbind(1), h.unbind(1), strict=True):
        start = h_t.addcmul_(a_t, start)
    return step, a, h


def _read_out(tile: Arguments, h: Tensor) -> Tensor:
    """Return y (b,L,R,E)."""
    return _over_states(tile.C, h).addcmul_(tile.D, tile.u)


def _over_states(weights: Tensor, x: Tensor) -> Tensor:
    """Return Σ_n weights x: (b,L,R,N) and (b,L,R,N,E) -> (b,L,R,E)."""
    # a single state needs no sum, only a product
    return weights * x.squeeze(-2) if weights.shape[-1] == 1 else (weights.unsqueeze(-2) @ x).squeeze(-2)


def _over_channels(x: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_e x weights: (b,L,R,N,E) and (b,L,R,E) -> (b,L,R,N)."""
    return (weights.unsqueeze(-2) @ x.mT).squeeze(-2)


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + eˣ); by a power of two it is several times faster on CPUs than PyTorch's own."""
    e = torch.exp2(x.abs() * -math.log2(math.e))
    w = 1 + e
    # the quotient restores the part of e that was rounded off in w
    return w.log().add_((e - (w - 1)) / w).add_(x.clamp(min=0))
