"""TTT-Linear in batched PyTorch operations, forward and hand-written backward: for any device and any size.

The scan over chunks is sequential and each chunk is small: the number of operations per chunk decides the speed.

 - All (direction, batch, head) groups go through one batched product; a backward direction is gathered in scan order.
 - A column of ones extends K and Q: the state S = [W; β] is one matrix, and the bias costs no operation. Key and query
     of a
   token are neighbouring rows of `KQ`: Z and QW + β are one product with S, and so are their gradients.
 - Chunks are handled in segments: whatever does not depend on the state is done for the whole segment at once, before
     or
   after its scan. Scratch memory is that of one segment.
 - LayerNorm does not see the mean of its input and G has mean 0. S starts with rows of mean 0, and with h = √(‖Z‖² +
   D·eps) and
   x = Z / h, norm(Z) = √D x and G = √D/h · proj(g), where proj(g) = g − mean(g) − x (g·x); √D·proj is one call of
   LayerNorm's backward pass. Rounding gives Z a mean, and x would pass it on to G and to the next state, larger each
   time: it is taken off Z. What then stays in S is rounding that nothing makes larger, and O needs no such care.

The backward pass has the state at the start of every segment except the first. It repeats a segment's scan and goes
back through it. With u = dL/dG, dg = dL/dg = √D/h · proj(u), P = c[n−1] lr ⊙ K, and S' = S − PᵀG the state after the
chunk:

    u  = −Aᵀ dO − P dS'                   dZ = (√D proj(γ² dg) − (g·x) dg − (u·x) G − (u·G) x) / h
    dP = −G dS'ᵀ                          dS = dS' + Kᵀ dZ + Qᵀ dO

Shape letters as in `reference`, and G = B·R·H groups, m chunks of a segment, n tokens of a chunk. A row is one vector
of width D of q, k or v; there are B·T·R·H.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..dispatch import compute_dtype
from .reference import Arguments

# Images are taken in blocks of at most _BLOCK_GROUPS groups, which bounds scratch memory, and a block's chunks in segments
# of at least _SEGMENT_TOKENS tokens: the states that are kept for the backward pass, D + 1 rows per group and segment,
# then take at most half the memory of the output at D = 64.
_BLOCK_GROUPS = 48
_SEGMENT_TOKENS = 128

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_ONLY_INPUT = (True, False, False)  # for LayerNorm's backward pass: no gradients of weight and bias


def states_shape(shape: Sequence[int], chunk_size: int, keep_states: bool) -> tuple[int, int, int, int, int, int]:
    """The shape of `forward`'s states for q of shape (B,T,R,H,D), one per segment except the first. Takes symbolic
    sizes.
    """
    B, _, R, H, D = shape
    _, _, segments, tail = _split(shape, chunk_size)
    return segments + tail - 1 if keep_states else 0, B, R, H, D + 1, D


def forward(x: Arguments, keep_states: bool) -> tuple[Tensor, Tensor]:
    """out (B,T,R,H,D) in q's dtype; states in the compute dtype, of shape `states_shape`."""
    q, k, v = x.q.contiguous(), x.k.contiguous(), x.v.contiguous()
    out = torch.empty_like(q)
    states = torch.empty(
        states_shape(q.shape, x.chunk_size, keep_states), dtype=compute_dtype(q.dtype), device=q.device
    )
    for images in _blocks(q.shape):
        scan = _Scan(x, images)
        S = scan.S0.clone()
        for number, segment in scan.walk(range(len(scan.plan)), S):
            if keep_states and number:
                states[number - 1, images].copy_(S.view_as(states[number - 1, images]))
            segment.load(q[images], k[images], v[images])
            segment.scan()
            O, _ = segment.unit_output(segment.QK.mul_(segment.mask).mul_(segment.rate.unsqueeze(-2)))
            y = torch.addcmul(segment.Q[..., :-1], O, scan.gamma, value=scan.root, out=O).add_(scan.mu)
            _scatter(out[images], segment.rows, y)
    return out, states


def backward(dout: Tensor, states: Tensor, x: Arguments) -> tuple[Tensor, ...]:
    """The gradients of q, k, ... ln_bias, each in its input's shape and dtype, from dout (B,T,R,H,D) and `forward`'s
    states.
    """
    dout, q, k, v = (tensor.contiguous() for tensor in (dout, x.q, x.k, x.v))
    B, T, R, H, D = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    drate = torch.empty((B, T, R, H, 1), dtype=compute_dtype(q.dtype), device=q.device)
    sums: list[Tensor] = []
    for images in _blocks(q.shape):
        scan = _Scan(x, images)
        totals = dS, dc, dgamma, dmu = [torch.zeros_like(each) for each in (scan.S0, scan.c, scan.gamma, scan.mu)]
        for number, segment in scan.walk(reversed(range(len(scan.plan))), None):
            segment.states[0].copy_(states[number - 1, images].flatten(0, 2) if number else scan.S0)
            segment.load(q[images], k[images], v[images])
            segment.scan()
            gradients = _segment_backward(segment, dout[images], dS, dc, dgamma, dmu)
            for whole, part in zip((dq, dk, dv, drate), gradients, strict=True):
                _scatter(whole[images], segment.rows, part)
        totals = [total.unflatten(0, (-1, R, H)).sum(0) for total in totals]
        sums = [a + b for a, b in zip(sums, totals, strict=True)] if sums else totals

    dS, dc, dgamma, dmu = sums  # (R,H,...)
    dtoken_scale = torch.zeros_like(x.token_scale)
    dtoken_scale[:, : dc.shape[-1]] = dc.sum(1)
    sums = drate[..., 0].sum(2), dtoken_scale, dS[:, :, :D], dS[:, :, D], dgamma[:, :, 0], dmu[:, :, 0]
    # copies, since the results of an operator must not share memory
    return (
        dq,
        dk,
        dv,
        *(tensor.new_empty(tensor.shape).copy_(gradient) for tensor, gradient in zip(x[3:9], sums, strict=True)),
    )


def _blocks(shape: Sequence[int]) -> list[slice]:
    """The batch in blocks of nearly equal length."""
    B, _, R, H, _ = shape
    count = -(-B // max(1, _BLOCK_GROUPS // (R * H)))
    even = -(-B // count)
    return [slice(first, min(first + even, B)) for first in range(0, B, even)]


def _split(shape: Sequence[int], chunk_size: int) -> tuple[int, int, int, int]:
    """Tokens of a full chunk, full chunks, segments of full chunks, and 1 where a shorter chunk follows, else 0."""
    T = shape[1]
    n = torch.sym_min(chunk_size, T)
    full = T // n
    per_segment = (_SEGMENT_TOKENS + n - 1) // n
    return n, full, (full + per_segment - 1) // per_segment, (T + n - 1) // n - full


def _plan(shape: Sequence[int], chunk_size: int) -> list[tuple[int, int, int]]:
    """The segments in scan order: (first chunk among those of its length, chunks, tokens of a chunk). A short chunk is
    alone.
    """
    n, full, segments, tail = _split(shape, chunk_size)
    even = -(-full // segments)
    plan = [(first, min(even, full - first), n) for first in range(0, full, even)]
    return plan + [(0, 1, shape[1] - full * n)] * tail


class _Scan:
    """What the segments of a block of images share, per group in the order (B,R,H): parameters, row numbers and rates
    in scan order.
    """

    def __init__(self, inputs: Arguments, images: slice):
        lr = inputs.lr[images]
        (_, T, R, H, D), B = inputs.q.shape, lr.shape[0]
        self.dtype, self.device = compute_dtype(inputs.q.dtype), lr.device
        self.D, self.root = D, math.sqrt(D)
        self.norm_eps = torch.tensor(math.sqrt(D * inputs.eps), dtype=self.dtype, device=self.device)
        self.plan = _plan(inputs.q.shape, inputs.chunk_size)

        def per_group(x: Tensor) -> Tensor:  # (R,H,...) -> (G,...)
            return x.to(self.dtype).expand(B, *x.shape).flatten(0, 2)

        def numbers(n: int, *shape: int) -> Tensor:
            return torch.arange(n, device=self.device).view(shape)

        # (G,1,D)
        self.gamma, self.mu, b = (per_group(x).unsqueeze(1) for x in (inputs.ln_weight, inputs.ln_bias, inputs.b0))
        S = torch.cat([per_group(inputs.W0), b], 1)
        self.S0 = S - S.mean(-1, keepdim=True)  # (G,D+1,D)
        # (G, tokens of a full chunk)
        self.c = per_group(inputs.token_scale[:, None, : min(inputs.chunk_size, T)].expand(R, H, -1))
        forward, backward = numbers(T, T, 1), numbers(T, T, 1).flip(0)
        token = torch.stack([backward if flag else forward for flag in inputs.reverse], 1)[:, None]  # (T,1,R,1)
        row = (((numbers(B, B, 1, 1) * T + token) * R + numbers(R, R, 1)) * H + numbers(H, H)).flatten(1)  # (T,G)
        n, full, _, tail = _split(inputs.q.shape, inputs.chunk_size)
        self.rows = {n: row[: full * n].view(full, n, -1).mT.contiguous()}  # by length of chunk: (chunks,G,n)
        if tail:
            self.rows[T - full * n] = row[full * n :].mT.contiguous().unsqueeze(0)
        rate = lr.to(self.dtype).unsqueeze(2).expand(B, T, R, H).reshape(-1)
        self.rates = {n: rate.take(rows) for n, rows in self.rows.items()}

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def walk(self, numbers: Iterable[int], S: Tensor | None) -> Iterator[tuple[int, "_Segment"]]:
        """The plan's segments of these numbers; one of the same size as the one before reuses its memory. For S see
        `_Segment`.
        """
        segment = None
        for number in numbers:
            first, m, n = self.plan[number]
            if segment is None or segment.size != (m, n):
                segment = _Segment(self, m, n, S)
            segment.rows, segment.rate = (x[n][first : first + m] for x in (self.rows, self.rates))  # (m,G,n)
            yield number, segment


class _Segment:
    """m chunks of n tokens in memory, and the forward steps on them.

    With a state S (G,D+1,D) the scan updates it in place and keeps per chunk only what the output needs. Without one it
    starts from `states[0]` and keeps for every chunk what the backward pass needs.
    """

    def __init__(self, scan: _Scan, m: int, n: int, S: Tensor | None):
        (G, _, D), new, keep = scan.S0.shape, scan.new, S is None
        self.shared, self.size = scan, (m, n)
        self.mask, self.c_last = scan.c[:, :n, None].expand(G, n, n).tril(), scan.c[:, n - 1 : n]
        self.gamma2 = scan.gamma.square()
        self.zero, self.root = new(m, G, n, 1).zero_(), new(m, G, n, 1).fill_(scan.root)

        self.KQ = new(m, G, 2 * n, D + 1)
        self.KQ[..., D] = 1
        self.K, self.Q = self.KQ[:, :, ::2], self.KQ[:, :, 1::2]
        self.P = new(m, G, n, D + 1)
        self.difference = new(m, G, n, D)  # K − V
        self.target = new(m, G, n, D) if keep else self.difference  # γ(μ + K − V)
        self.G = new(m, G, n, D) if keep else self.target
        self.QK = new(m, G, n, n)
        self.ZO = new(m, G, 2 * n, D)
        self.x, self.h, self.g = (
            new(m, *s) if keep else new(*s).expand(m, *s) for s in ((G, n, D), (G, n, 1), (G, n, D))
        )
        if keep:
            self.states = new(m + 1, G, D + 1, D)
            before, after = self.states[:-1].unbind(0), self.states[1:].unbind(0)
        else:
            before = after = [S] * m  # the same tensor, so that the update works in place
        parts = (self.KQ, self.ZO, self.ZO[:, :, ::2], self.P.mT, self.target, self.x, self.h, self.g, self.G)
        self.steps = list(zip(*(x.unbind(0) for x in parts), before, after, strict=True))

    def load(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Gather the segment's rows and rates, and compute everything that does not depend on the state."""
        scan = self.shared
        for source, target in ((k, self.K[..., :-1]), (q, self.Q[..., :-1]), (v, self.difference)):
            _gather(source, self.rows, target)
        torch.sub(self.K[..., :-1], self.difference, out=self.difference)
        torch.addcmul(scan.gamma * scan.mu, self.difference, scan.gamma, out=self.target)
        torch.mul(self.K, (self.c_last * self.rate).unsqueeze(-1), out=self.P)
        torch.bmm(_flat(self.Q), _flat(self.K).mT, out=_flat(self.QK))

    def scan(self) -> None:
        """The sequential part: Z and QW + β, the inner gradient G and the next state, chunk by chunk."""
        zero, root, eps, gamma2 = self.zero[0], self.root[0], self.shared.norm_eps, self.gamma2 * self.shared.root
        for KQ, ZO, Z, PT, target, x, h, g, G, S, S_next in self.steps:
            torch.bmm(KQ, S, out=ZO)
            Z.sub_(Z.mean(-1, keepdim=True))
            torch.linalg.vector_norm(Z, dim=-1, keepdim=True, out=h)
            torch.hypot(h, eps, out=h)
            torch.div(Z, h, out=x)
            torch.addcmul(target, x, gamma2, out=g)
            torch.div(_project(g, x, zero, root), h, out=G)
            torch.baddbmm(S, PT, G, alpha=-1, out=S_next)

    def unit_output(self, A: Tensor) -> tuple[Tensor, Tensor]:
        """O = QW + β − AG divided by h = √(‖O‖² + D·eps) (m,G,n,D), and h (m,G,n,1)."""
        O = torch.sub(self.ZO[:, :, 1::2], torch.bmm(_flat(A), _flat(self.G)).view_as(self.G))
        h = torch.linalg.vector_norm(O, dim=-1, keepdim=True)
        torch.hypot(h, self.shared.norm_eps, out=h)
        return O.div_(h), h


def _segment_backward(
    s: _Segment, dout: Tensor, dS: Tensor, dc: Tensor, dgamma: Tensor, dmu: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One segment's gradients, from the gradient dS of the state after it; dS becomes that of the state before it.

    Returns dQ, dK, dV (m,G,n,D) and the rates' gradient (m,G,n); adds to dc, dgamma and dmu.
    """
    scan, (_, n) = s.shared, s.size
    zero, root, D = s.zero[0], s.root[0], scan.D
    E = s.mask * s.rate.unsqueeze(-2)
    A = s.QK * E
    O, h_O = s.unit_output(A)
    dy = _gather(dout, s.rows, torch.empty_like(s.G))
    dgamma += scan.root * _column_sum(dy * O)
    dmu += _column_sum(dy)
    dZO = torch.empty_like(s.ZO)
    dZ, dO = dZO[:, :, ::2], dZO[:, :, 1::2]
    torch.div(_project(dy * scan.gamma, O, s.zero, s.root), h_O, out=dO)
    dA = torch.bmm(_flat(dO), _flat(s.G).mT).view_as(A).neg_()
    u, dg, minus_dP = torch.empty_like(s.G), torch.empty_like(s.G), torch.empty_like(s.P)
    _flat(u).baddbmm_(_flat(A).mT, _flat(dO), beta=0, alpha=-1)
    gx = _row_sum(s.g * s.x)

    steps = zip(*(part.unbind(0) for part in (s.KQ.mT, s.P, s.x, s.h, s.G, gx, u, dg, minus_dP, dZO, dZ)), strict=True)
    for KQT, P, x, h, G, gx, u, dg_out, minus_dP_out, dZO_chunk, dZ_out in reversed(list(steps)):
        u.baddbmm_(P, dS, alpha=-1)
        torch.div(_project(u, x, zero, root), h, out=dg_out)
        from_norm = _project(dg_out * s.gamma2, x, zero, root).addcmul_(gx, dg_out, value=-1)
        from_norm.addcmul_(_row_sum(u * x), G, value=-1).addcmul_(_row_sum(u * G), x, value=-1)
        torch.div(from_norm, h, out=dZ_out)
        torch.bmm(G, dS.mT, out=minus_dP_out)
        dS.baddbmm_(KQT, dZO_chunk)

    # g = γ²√D x + γ(μ + K − V)
    sum_dg = _column_sum(dg)
    dgamma += scan.mu * sum_dg + _column_sum(torch.addcmul(s.difference, s.x, 2 * scan.root * scan.gamma).mul_(dg))
    dmu += scan.gamma * sum_dg
    dtau = dg.mul_(scan.gamma)
    dE, dQK = dA * s.QK, dA.mul_(E)
    dKQ = torch.bmm(_flat(dZO), _flat(s.states[:-1])[:, :D].mT).view_as(dZO)
    dQ = torch.bmm(_flat(dQK), _flat(s.K[..., :D])).view_as(dtau).add_(dKQ[:, :, 1::2]).add_(dy)
    dK = torch.bmm(_flat(dQK).mT, _flat(s.Q[..., :D])).view_as(dtau).add_(dKQ[:, :, ::2]).add_(dtau)
    dK.addcmul_(minus_dP[..., :D], (s.c_last * s.rate).unsqueeze(-1), value=-1)
    minus_de = minus_dP.mul_(s.K).sum(-1)
    drate = torch.addcmul((dE * s.mask).sum(-2), minus_de, s.c_last, value=-1)
    dc[:, :n] += dE.mul_(s.rate.unsqueeze(-2)).sum(0).tril_().sum(-1)
    dc[:, n - 1] -= minus_de.mul_(s.rate).sum(2).sum(0)
    return dQ, dK, dtau.neg_(), drate


def _project(y: Tensor, x: Tensor, zero: Tensor, root: Tensor) -> Tensor:
    """√D (y − mean(y) − x (x·y)) row by row; zero and root hold 0 and √D for every row."""
    return _layer_norm_backward(y, x, (x.shape[-1],), zero, root, None, None, _ONLY_INPUT)[0]


def _row_sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _column_sum(x: Tensor) -> Tensor:
    """(m,G,n,D) -> (G,1,D). Two reductions, each over one axis, are much faster than one over both."""
    return x.sum(2, keepdim=True).sum(0)


def _flat(x: Tensor) -> Tensor:
    """Chunks and groups as one batch axis."""
    return x.flatten(0, 1)


def _gather(source: Tensor, rows: Tensor, target: Tensor) -> Tensor:
    """target (m,G,n,D) = rows of source (..., D), in target's dtype."""
    source, flat = source.view(-1, source.shape[-1]), target.view(-1, target.shape[-1])
    if source.dtype == target.dtype:
        torch.index_select(source, 0, rows.view(-1), out=flat)
    else:
        flat.copy_(source.index_select(0, rows.view(-1)))
    return target


def _scatter(target: Tensor, rows: Tensor, source: Tensor) -> None:
    """Rows of target (..., D) = source (m,G,n,D), in target's dtype."""
    target = target.view(-1, target.shape[-1])
    target.index_copy_(0, rows.view(-1), source.reshape(-1, target.shape[-1]).to(target.dtype))
