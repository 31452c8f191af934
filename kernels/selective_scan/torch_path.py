"""The selective scan in batched PyTorch operations, forward and hand-written backward: what CPUs run, and any other
device.

The states of a tile, some tokens of some images on all routes, are laid out with channels innermost. Everything except
the recurrence itself is done for the whole tile at once, in buffers that are allocated once and stay in the cache. A
token of the recurrence is then one operation over images, routes, states and channels. From some two thousand elements
a token on, combining several tokens into one step would cost more passes over the tile than it saves operations. A
route that scans back is gathered in scan order.

exp(Δ A) is 2^(Δ A log₂e), which has a vectorised form on every CPU. Its exponent is never positive for A < 0, and
nothing is divided by a decay: no step size overflows.

The backward pass has the state at the start of every tile except the first. It repeats a tile's scan and goes back
through it. With a_t = exp(Δ_t A), dy = dL/dy and g_t = dL/dh_t:

    g_t = C_t dy_t + a_{t+1} g_{t+1}        p_t = g_t a_t h_{t−1}
    dC_t = Σ_e dy_t h_t                     dB_t = Σ_e g_t Δ_t u_t               du_t = Δ_t Σ_n g_t B_t + D dy_t
    dΔ_t = u_t Σ_n g_t B_t + Σ_n p_t A      dA = Σ_t Δ_t p_t                     dD = Σ_t dy_t u_t

Shape letters as in `reference`, and b images and L tokens of a tile. A row is one vector of width E or N; there are
B·T·R.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype
from .reference import Arguments

# elements of a token's states that make its step worth its dispatch, and elements of a tile's buffer that keep it in
# the cache
_STEP_ELEMENTS = 32768
_TILE_ELEMENTS = 786432
_MIN_TOKENS, _MAX_TOKENS = 8, 128


def states_shape(shape: Sequence[int], state_dim: int, keep_states: bool) -> tuple[int, int, int, int, int]:
    """The shape of `forward`'s states for delta of shape (B,T,R,E), one per tile except the first. Takes symbolic
    sizes.
    """
    images, T, R, E = shape
    tokens = _tile_tokens(shape, state_dim)
    return (T + tokens - 1) // tokens - 1 if keep_states else 0, images, R, state_dim, E


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """out (B,T,R,E) in `x.out_dtype`; states in the compute dtype, of shape `states_shape`."""
    u, shape, N = x.u, x.delta.shape, x.A.shape[-1]
    out = torch.empty(shape, dtype=x.out_dtype, device=u.device)
    states = torch.empty(states_shape(shape, N, keep_states), dtype=compute_dtype(u.dtype), device=u.device)
    for images in _blocks(shape, N):
        scan = _Scan(images, x, buffers=2, vectors=6)
        for number in range(scan.count):
            if keep_states and number:
                states[number - 1, images] = scan.start
            tile = _Tile(scan, number)
            y = tile.read_out()
            scan.scatter(out, number, y if x.z is None else y.mul_(F.silu(tile.z, inplace=True)))
            scan.start.copy_(tile.h[:, -1])
    return out, states


def backward(dout: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor | None, ...]:
    """The gradients of u, delta, ... delta_bias, in their shapes and dtypes, from dout (B,T,R,E) and `forward`'s
    states.
    """
    u, z, shape = x.u, x.z, x.delta.shape
    # where routes share a sequence, and for the gate, which they all share, the gradient is summed in the compute
    # dtype, and then rounded
    du = torch.empty(shape, dtype=u.dtype if u.shape == shape else states.dtype, device=u.device)
    dz = None if z is None else torch.empty(shape, dtype=states.dtype, device=u.device)
    ddelta, dB, dC = (torch.empty(like.shape, dtype=like.dtype, device=u.device) for like in (x.delta, x.B, x.C))
    dA, dD, dbias = (
        torch.zeros(like.shape, dtype=states.dtype, device=u.device) for like in (x.A.mT, x.D, x.delta_bias)
    )
    for images in _blocks(shape, x.A.shape[-1]):
        scan = _Scan(images, x, buffers=3, vectors=9)
        dout_rows, carry = dout[images].flatten(1, 2), torch.zeros_like(scan.start)
        for number in reversed(range(scan.count)):
            scan.start.copy_(states[number - 1, images]) if number else scan.start.zero_()
            gradients = _Tile(scan, number).backward(dout_rows, carry, dA, dD, dbias)
            for whole, part in zip((du, ddelta, dB, dC, dz), gradients, strict=True):
                if whole is not None:
                    scan.scatter(whole, number, part)
    if u.shape != shape:
        du = du.unflatten(2, (-1, u.shape[2])).sum(2).to(u.dtype)
    dA, dD, dbias = dA.mT.contiguous().to(x.A.dtype), dD.to(x.D.dtype), dbias.to(x.delta_bias.dtype)
    return du, ddelta, dA, dB, dC, dD, None if z is None else dz.sum(2).to(z.dtype), dbias


def _images_per_block(shape: Sequence[int], state_dim: int) -> int:
    images, _, R, E = shape
    return torch.sym_min(images, torch.sym_max(1, _STEP_ELEMENTS // (R * E * state_dim)))


def _tile_tokens(shape: Sequence[int], state_dim: int) -> int:
    _, T, R, E = shape
    step = _images_per_block(shape, state_dim) * R * E * state_dim
    return torch.sym_min(T, torch.sym_min(_MAX_TOKENS, torch.sym_max(_MIN_TOKENS, _TILE_ELEMENTS // step)))


def _blocks(shape: Sequence[int], state_dim: int) -> list[slice]:
    step = _images_per_block(shape, state_dim)
    return [slice(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]


class _Scan:
    """What the tiles of a block of images share: inputs by rows, parameters with states before channels, memory, the
    start state.

    `memory` has `buffers` pieces for a tile's states, then `vectors` pieces for its channels.
    """

    def __init__(self, images: slice, x: Arguments, *, buffers: int, vectors: int):
        dtype, device, N = compute_dtype(x.u.dtype), x.u.device, x.A.shape[-1]
        self.images, self.reverse = images, x.reverse
        self.inputs = [rows[images].flatten(1, 2) for rows in (x.u, x.delta, x.B, x.C)]
        self.z = None if x.z is None else x.z[images]
        self.A, self.D, self.bias = x.A.mT.to(dtype).contiguous(), x.D.to(dtype), x.delta_bias.to(dtype)
        self.exponents = self.A * math.log2(math.e)
        _, self.T, R, _ = shape = x.delta.shape
        K = x.u.shape[2]
        self.length = _tile_tokens(shape, N)
        self.count = -(-self.T // self.length)
        self.shape = (len(self.inputs[0]), *self.A.shape)  # (b,R,N,E)
        self.start = torch.zeros(self.shape, dtype=dtype, device=device)
        sizes = [self.start.numel()] * buffers + [self.start.numel() // N] * vectors
        self.memory = [torch.empty(self.length * size, dtype=dtype, device=device) for size in sizes]
        self.buffers = buffers
        tokens = torch.arange(self.T, device=device)
        tokens = torch.stack([tokens.flip(0) if back else tokens for back in x.reverse], 1)  # (T,R), in scan order
        routes = torch.arange(R, device=device)
        self.tokens = tokens.flatten().split(self.length * R)
        self.rows = (tokens * R + routes).flatten().split(self.length * R)
        self.u_rows = self.rows if K == R else (tokens * K + routes % K).flatten().split(self.length * R)

    def scatter(self, target: Tensor, number: int, source: Tensor) -> None:
        """Write a tile's (b,L,R,·) to the places of its tokens in target (B,T,R,·)."""
        first = number * self.length
        last = first + source.shape[1]
        for r, back in enumerate(self.reverse):
            if back:
                target[self.images, self.T - last : self.T - first, r] = source[:, :, r].flip(1)
            else:
                target[self.images, first:last, r] = source[:, :, r]


class _Tile:
    """The tokens of one tile in scan order, and their decays a and states h (b,L,R,N,E), all in the block's memory."""

    def __init__(self, scan: _Scan, number: int):
        """Load the tile and compute its states from the block's start state."""
        self.whole, self.rows = scan, scan.rows[number]
        b, R, N, E = scan.shape
        L = len(self.rows) // R
        sizes = [(b, L, R, N, E)] * scan.buffers + [(b, L, R, E)] * (len(scan.memory) - scan.buffers)
        self.free = [piece[: math.prod(size)].view(size) for piece, size in zip(scan.memory, sizes, strict=True)]
        self.a, self.h = self.free.pop(0), self.free.pop(0)
        u, delta, B, C = scan.inputs
        self.u, self.raw = self.gather(u, scan.u_rows[number]), self.gather(delta, self.rows).add_(scan.bias)
        self.B, self.C = (x.index_select(1, self.rows).to(self.a.dtype).view(b, L, R, N) for x in (B, C))
        self.z = None if scan.z is None else self.gather(scan.z, scan.tokens[number])
        self.step = _softplus(self.raw, self.free.pop(), self.free[-1])
        self.input = torch.mul(self.step, self.u, out=self.free.pop())
        torch.mul(self.step.unsqueeze(-2), scan.exponents, out=self.a).exp2_()
        torch.mul(self.input.unsqueeze(-2), self.B.unsqueeze(-1), out=self.h)
        before = scan.start
        for a_t, h_t in zip(self.a.unbind(1), self.h.unbind(1), strict=True):
            before = h_t.addcmul_(a_t, before)

    def gather(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows of x (b,·,E) in the order given: (b,L,R,E), in the compute dtype."""
        taken = self.free.pop()
        if x.dtype == taken.dtype:
            torch.index_select(x, 1, rows, out=taken.flatten(1, 2))
        else:
            taken.flatten(1, 2).copy_(x.index_select(1, rows))
        return taken

    def read_out(self) -> Tensor:
        """y (b,L,R,E)."""
        return _over_states(self.C, self.h, self.free[-1]).addcmul_(self.whole.D, self.u)

    def backward(
        self, dout_rows: Tensor, carry: Tensor, dA: Tensor, dD: Tensor, dbias: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of u, delta, B, C, z over the tile.

        `carry`, a_t g_t of the token that follows the tile in scan order, becomes that of the tile's first token. The
        tile's part is added to dA, dD and dbias.
        """
        a, h, g = self.a, self.h, self.free.pop(0)
        dz, dy = None, self.gather(dout_rows, self.rows)
        if self.z is not None:
            gate = torch.sigmoid(self.z, out=self.free.pop())
            silu = torch.mul(self.z, gate, out=self.free.pop())
            dz = self.read_out().mul_(dy)
            self.free.pop()
            dy.mul_(silu)
            dz.mul_(torch.mul(silu, gate, out=self.z).neg_().add_(silu).add_(gate))
            self.free += [gate, silu]
        dC = _over_channels(h, dy)
        torch.mul(dy.unsqueeze(-2), self.C.unsqueeze(-1), out=g)
        later = g[:, -1].add_(carry)
        for a_next, g_t in zip(reversed(a.unbind(1)[1:]), reversed(g.unbind(1)[:-1]), strict=True):
            later = g_t.addcmul_(a_next, later)
        torch.mul(a[:, 0], later, out=carry)
        dinput = _over_states(self.B, g, self.free.pop())
        dB = _over_channels(g, self.input)

        p = a.mul_(g)
        p[:, 0].mul_(self.whole.start)
        p[:, 1:].mul_(h[:, :-1])
        ddelta = torch.sum(torch.mul(p, self.whole.A, out=g), -2, out=self.free.pop())
        ddelta.addcmul_(dinput, self.u).mul_(self.raw.sigmoid_())
        dbias += ddelta.sum((0, 1))
        dA += torch.mul(p, self.step.unsqueeze(-2), out=g).sum((0, 1))
        dD += self.u.mul_(dy).sum((0, 1))
        du = dinput.mul_(self.step).addcmul_(dy, self.whole.D)
        return du, ddelta, dB, dC, dz


def _over_states(weights: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Σ_n weights x: (b,L,R,N) and (b,L,R,N,E) -> out (b,L,R,E)."""
    if weights.shape[-1] == 1:
        return torch.mul(weights, x.squeeze(-2), out=out)
    torch.bmm(weights.reshape(-1, 1, weights.shape[-1]), x.flatten(0, 2), out=out.flatten(0, 2).unsqueeze(1))
    return out


def _over_channels(x: Tensor, weights: Tensor) -> Tensor:
    """Σ_e x weights: (b,L,R,N,E) and (b,L,R,E) -> (b,L,R,N)."""
    if x.shape[-2] == 1:
        return torch.linalg.vecdot(x, weights.unsqueeze(-2))
    return torch.bmm(weights.reshape(-1, 1, weights.shape[-1]), x.flatten(0, 2).mT).view(x.shape[:-1])


def _softplus(x: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
    """log(1 + eˣ) = max(x, 0) + log(1 + e), e = e^−|x|, several times faster than PyTorch's own on CPUs.

    With w the rounded 1 + e, log(1 + e) is log w + (e − (w − 1)) / w.
    """
    e = torch.abs(x, out=out).mul_(-math.log2(math.e)).exp2_()
    w = torch.add(e, 1, out=scratch)
    e.sub_(w.sub_(1)).div_(w.add_(1)).add_(w.log_())
    return e.add_(torch.clamp(x, min=0, out=scratch))
