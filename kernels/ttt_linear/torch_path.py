"""TTT-Linear in batched PyTorch operations, forward and hand-written backward: what CPUs run, and any other device.

The scan over chunks is sequential and each chunk is small, so the number of operations per chunk decides the speed:

 - All (direction, batch, head) groups go through one batched product; a back direction is gathered in scan order.
 - A ones column extends K and Q, so that the state S = [W; β] is one matrix and the bias costs no operation. Key and query
   of a token are neighbouring rows of `KQ`, so that Z and QW + β are one product with S, and so are their gradients.
 - Chunks are handled in segments: what does not depend on the state is done for the whole segment at once, before or
   after its scan. Scratch memory is that of one segment.
 - LayerNorm does not see the mean of its input and G has mean 0, so S is kept with rows of mean 0 and no mean is computed:
   with h = √(‖Z‖² + D·eps) and x = Z / h, norm(Z) = √D x and G = √D/h · proj(g), where proj(g) = g − mean(g) − x (g·x);
   √D·proj is one call of LayerNorm's backward.

The backward pass keeps the state at the start of every segment but the first, repeats a segment's scan and walks it back.
With u = dL/dG, dg = dL/dg = √D/h · proj(u), P = c[n−1] lr ⊙ K, and S' = S − PᵀG the state after the chunk:

    u  = −Aᵀ dO − P dS'                   dZ = (√D proj(γ² dg) − (g·x) dg − (u·x) G − (u·G) x) / h
    dP = −G dS'ᵀ                          dS = dS' + Kᵀ dZ + Qᵀ dO

Shape letters: B images, T tokens, R directions, H heads, D head width, G = B·R·H groups, m chunks of a segment, n tokens of
a chunk. A row is one vector of width D of q, k or v; there are B·T·R·H.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

# Sizes that keep scratch memory in the cache and operations large enough to pay for their dispatch. Images are taken in blocks
# of at most _BLOCK_GROUPS groups, a block's chunks in segments of about _SEGMENT_ROWS rows (a chunk counts for 16 tokens at
# least: its state takes that much memory). No segment is shorter than _SEGMENT_CHUNKS chunks, so that the states kept for the
# backward pass, one of D + 1 rows per group and segment, stay smaller than the output.
_BLOCK_GROUPS = 48
_SEGMENT_ROWS = 4096
_SEGMENT_CHUNKS = 8

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_ONLY_INPUT = (True, False, False)  # of LayerNorm's backward: no gradients of weight and bias


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, statistics and products for q of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kept_states(shape: Sequence[int], chunk_size: int) -> int:
    """How many states `forward` keeps for q of shape (B,T,R,H,D): one per segment but the first. Takes symbolic sizes."""
    _, _, segments, tail = _split(shape, chunk_size)
    return segments + tail - 1


def forward(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, token_scale: Tensor, W0: Tensor, b0: Tensor, ln_weight: Tensor, ln_bias: Tensor,
    chunk_size: int, reverse: Sequence[bool], eps: float, keep_states: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs, and what the backward pass needs beside the inputs.

    Args:
        q, k, v: (B,T,R,H,D) of one dtype. lr: (B,T,H). token_scale: (R,chunk_size). W0: (R,H,D,D).
        b0, ln_weight, ln_bias: (R,H,D).
        reverse: R flags; a direction with True is scanned from the last token.
        keep_states: whether `backward` will follow.

    Returns:
        out (B,T,R,H,D) in q's dtype; states (kept_states,B,R,H,D+1,D) in the compute dtype, of length 0 without `keep_states`.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, _, R, H, D = q.shape
    out = torch.empty_like(q)
    kept = kept_states(q.shape, chunk_size) if keep_states else 0
    states = torch.empty((kept, B, R, H, D + 1, D), dtype=compute_dtype(q.dtype), device=q.device)
    for images in _blocks(q.shape):
        scan = _Scan(q.shape, states.dtype, lr[images], token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps)
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


def backward(
    dout: Tensor, states: Tensor,
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, token_scale: Tensor, W0: Tensor, b0: Tensor, ln_weight: Tensor, ln_bias: Tensor,
    chunk_size: int, reverse: Sequence[bool], eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k, ... ln_bias, each in its input's shape and dtype, from dout (B,T,R,H,D) and `forward`'s states."""
    dout, q, k, v = dout.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    B, T, R, H, D = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    drate = torch.empty((B, T, R, H, 1), dtype=compute_dtype(q.dtype), device=q.device)
    sums: list[Tensor] = []
    for images in _blocks(q.shape):
        scan = _Scan(q.shape, states.dtype, lr[images], token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps)
        totals = dS, dc, dgamma, dmu = [torch.zeros_like(x) for x in (scan.S0, scan.c, scan.gamma, scan.mu)]
        for number, segment in scan.walk(reversed(range(len(scan.plan))), None):
            segment.states[0].copy_(states[number - 1, images].flatten(0, 2) if number else scan.S0)
            segment.load(q[images], k[images], v[images])
            segment.scan()
            gradients = _segment_backward(segment, dout[images], dS, dc, dgamma, dmu)
            for whole, part in zip((dq, dk, dv, drate), gradients, strict=True):
                _scatter(whole[images], segment.rows, part)
        totals = [x.unflatten(0, (-1, R, H)).sum(0) for x in totals]
        sums = [x + y for x, y in zip(sums, totals, strict=True)] if sums else totals

    dS, dc, dgamma, dmu = sums  # (R,H,...)
    dtoken_scale = torch.zeros_like(token_scale)
    dtoken_scale[:, : dc.shape[-1]] = dc.sum(1)
    gradients = dq, dk, dv, drate[..., 0].sum(2), dtoken_scale, dS[:, :, :D], dS[:, :, D], dgamma[:, :, 0], dmu[:, :, 0]
    inputs = q, k, v, lr, token_scale, W0, b0, ln_weight, ln_bias
    return tuple(g.to(x.dtype).contiguous() for g, x in zip(gradients, inputs, strict=True))


def _images_per_block(shape: Sequence[int]) -> int:
    B, _, R, H, _ = shape
    return torch.sym_min(B, torch.sym_max(1, _BLOCK_GROUPS // (R * H)))


def _blocks(shape: Sequence[int]) -> list[slice]:
    """The batch in blocks of nearly equal length."""
    B = shape[0]
    count = -(-B // _images_per_block(shape))
    even = -(-B // count)
    return [slice(first, min(first + even, B)) for first in range(0, B, even)]


def _split(shape: Sequence[int], chunk_size: int) -> tuple[int, int, int, int]:
    """Tokens of a full chunk, full chunks, segments of full chunks, and 1 where a shorter chunk follows, else 0."""
    _, T, R, H, _ = shape
    n = torch.sym_min(chunk_size, T)
    full = T // n
    rows = _images_per_block(shape) * R * H * torch.sym_max(n, 16)
    per_segment = torch.sym_max(_SEGMENT_CHUNKS, _SEGMENT_ROWS // rows)
    return n, full, (full + per_segment - 1) // per_segment, (T + n - 1) // n - full


def _plan(shape: Sequence[int], chunk_size: int) -> list[tuple[int, int, int]]:
    """The segments in scan order: first token, chunks, tokens of a chunk. A ragged last chunk is a segment of its own."""
    n, full, segments, tail = _split(shape, chunk_size)
    even = -(-full // segments)
    plan = [(first * n, min(even, full - first), n) for first in range(0, full, even)]
    return plan + [(full * n, 1, shape[1] - full * n)] * tail


class _Scan:
    """What the segments of a block share, per group in the order (B,R,H): parameters, row numbers and rates in scan order."""

    def __init__(self, shape, dtype, lr, token_scale, W0, b0, ln_weight, ln_bias, chunk_size, reverse, eps):
        (_, T, R, H, D), B = shape, lr.shape[0]
        self.dtype, self.device = dtype, lr.device
        self.D, self.root = D, math.sqrt(D)
        self.norm_eps = torch.tensor(math.sqrt(D * eps), dtype=self.dtype, device=self.device)
        self.plan = _plan(shape, chunk_size)

        def per_group(x: Tensor) -> Tensor:  # (R,H,...) -> (G,...)
            return x.to(self.dtype).expand(B, *x.shape).flatten(0, 2)

        def numbers(n: int, *shape: int) -> Tensor:
            return torch.arange(n, device=self.device).view(shape)

        self.gamma, self.mu, b = (per_group(x).unsqueeze(1) for x in (ln_weight, ln_bias, b0))  # (G,1,D)
        S = torch.cat([per_group(W0), b], 1)
        self.S0 = S - S.mean(-1, keepdim=True)  # (G,D+1,D)
        self.c = per_group(token_scale[:, None, : min(chunk_size, T)].expand(R, H, -1))  # (G, tokens of a full chunk)
        forth, back = numbers(T, T, 1), numbers(T, T, 1).flip(0)
        token = torch.stack([back if flag else forth for flag in reverse], 1)[:, None]  # (T,1,R,1)
        row = ((numbers(B, B, 1, 1) * T + token) * R + numbers(R, R, 1)) * H + numbers(H, H)
        self.rows = row.flatten(1)  # (T,G)
        rate = lr.to(self.dtype).unsqueeze(2).expand(B, T, R, H).reshape(-1)
        self.rate = rate.index_select(0, self.rows.view(-1)).view_as(self.rows)  # (T,G)

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def walk(self, numbers: Iterable[int], S: Tensor | None) -> Iterator[tuple[int, "_Segment"]]:
        """The plan's segments of these numbers; one of the same size as its predecessor reuses its memory. S: see `_Segment`."""
        segment = None
        for number in numbers:
            start, m, n = self.plan[number]
            if segment is None or segment.size != (m, n):
                segment = _Segment(self, m, n, S)
            segment.start = start
            yield number, segment


class _Segment:
    """m chunks of n tokens in memory, and the forward steps on them.

    With a state S (G,D+1,D) the scan updates it in place and keeps per chunk only what the output needs. Without, it starts from
    `states[0]` and keeps for every chunk what the backward pass needs.
    """

    def __init__(self, scan: _Scan, m: int, n: int, S: Tensor | None):
        (G, _, D), new, keep = scan.S0.shape, scan.new, S is None
        self.shared, self.size, self.start = scan, (m, n), 0
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
        self.x, self.h, self.g = (new(m, *s) if keep else new(*s).expand(m, *s) for s in ((G, n, D), (G, n, 1), (G, n, D)))
        self.states = new(m + 1, G, D + 1, D) if keep else S.expand(m + 1, *S.shape)
        parts = (self.KQ, self.ZO, self.ZO[:, :, ::2], self.P.mT, self.target, self.x, self.h, self.g, self.G)
        self.steps = list(zip(*(x.unbind(0) for x in (*parts, self.states[:-1], self.states[1:])), strict=True))

    def load(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Gather the segment's rows and rates, and compute all that does not depend on the state."""
        scan, (m, n) = self.shared, self.size
        tokens = slice(self.start, self.start + m * n)
        rows, self.rate = (x[tokens].view(m, n, -1).transpose(1, 2) for x in (scan.rows, scan.rate))  # (m,G,n)
        self.rows = rows.reshape(-1)
        for source, target in ((k, self.K[..., :-1]), (q, self.Q[..., :-1]), (v, self.difference)):
            _gather(source, self.rows, target)
        torch.sub(self.K[..., :-1], self.difference, out=self.difference)
        torch.addcmul(scan.gamma * scan.mu, self.difference, scan.gamma, out=self.target)
        torch.mul(self.K, (self.c_last * self.rate).unsqueeze(-1), out=self.P)
        torch.bmm(_flat(self.Q), _flat(self.K).mT, out=_flat(self.QK))

    def scan(self) -> None:
        """The sequential part: Z and QW + β, the inner gradient G and the next state, chunk by chunk."""
        shared, zero, root = self.shared, self.zero[0], self.root[0]
        D, eps, gamma2 = shared.D, shared.norm_eps, self.gamma2 * shared.root
        for KQ, ZO, Z, PT, target, x, h, g, G, S, S_next in self.steps:
            torch.bmm(KQ, S, out=ZO)
            torch.linalg.vector_norm(Z, dim=-1, keepdim=True, out=h)
            torch.hypot(h, eps, out=h)
            torch.div(Z, h, out=x)
            torch.addcmul(target, x, gamma2, out=g)
            torch.div(_layer_norm_backward(g, x, (D,), zero, root, None, None, _ONLY_INPUT)[0], h, out=G)
            torch.baddbmm(S, PT, G, alpha=-1, out=S_next)

    def unit_output(self, A: Tensor) -> tuple[Tensor, Tensor]:
        """O = QW + β − AG divided by h = √(‖O‖² + D·eps) (m,G,n,D), and h (m,G,n,1)."""
        O = torch.sub(self.ZO[:, :, 1::2], torch.bmm(_flat(A), _flat(self.G)).view_as(self.G))
        h = torch.linalg.vector_norm(O, dim=-1, keepdim=True)
        torch.hypot(h, self.shared.norm_eps, out=h)
        return O.div_(h), h

    def project(self, y: Tensor, x: Tensor) -> Tensor:
        """√D (y − mean(y) − x (x·y)) for rows of the whole segment."""
        return _layer_norm_backward(y, x, (self.shared.D,), self.zero, self.root, None, None, _ONLY_INPUT)[0]


def _segment_backward(
    s: _Segment, dout: Tensor, dS: Tensor, dc: Tensor, dgamma: Tensor, dmu: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One segment's gradients, from the gradient dS of the state after it; dS becomes that of the state before it.

    Returns dQ, dK, dV (m,G,n,D) and the rates' gradient (m,G,n); adds to dc, dgamma and dmu.
    """
    scan, (_, n) = s.shared, s.size
    E = s.mask * s.rate.unsqueeze(-2)
    A = s.QK * E
    O, h_O = s.unit_output(A)
    dy = _gather(dout, s.rows, torch.empty_like(s.G))
    dgamma += scan.root * (dy * O).sum((0, 2)).unsqueeze(1)
    dmu += dy.sum((0, 2)).unsqueeze(1)
    dO = s.project(dy * scan.gamma, O).div_(h_O)
    dZO = torch.empty_like(s.ZO)
    dZO[:, :, 1::2] = dO
    dA = torch.bmm(_flat(dO), _flat(s.G).mT).view_as(A).neg_()
    u = torch.bmm(_flat(A).mT, _flat(dO)).view_as(dO).neg_()
    dg, dP, g_x = torch.empty_like(s.G), torch.empty_like(s.P), (s.g * s.x).sum(-1, keepdim=True)

    zero, root, D = s.zero[0], s.root[0], scan.D
    parts = (s.KQ.mT, s.P, s.x, s.h, s.G, g_x, u, dg, dP, dZO, dZO[:, :, ::2])
    for KQT, P, x, h, G, gx, u_c, dg_c, dP_c, dZO_c, dZ_c in reversed(list(zip(*(t.unbind(0) for t in parts), strict=True))):
        u_c.baddbmm_(P, dS, alpha=-1)
        torch.div(_layer_norm_backward(u_c, x, (D,), zero, root, None, None, _ONLY_INPUT)[0], h, out=dg_c)
        dZ = _layer_norm_backward(dg_c * s.gamma2, x, (D,), zero, root, None, None, _ONLY_INPUT)[0]
        dZ.addcmul_(gx, dg_c, value=-1)
        dZ.addcmul_((u_c * x).sum(-1, keepdim=True), G, value=-1)
        dZ.addcmul_((u_c * G).sum(-1, keepdim=True), x, value=-1)
        torch.div(dZ, h, out=dZ_c)
        torch.bmm(G, dS.mT, out=dP_c)
        dS.baddbmm_(KQT, dZO_c)

    dtau = dg * scan.gamma
    dgamma += 2 * scan.root * scan.gamma * (s.x * dg).sum((0, 2)).unsqueeze(1)
    dgamma += (s.difference.add_(scan.mu) * dg).sum((0, 2)).unsqueeze(1)
    dmu += dtau.sum((0, 2)).unsqueeze(1)
    dP.neg_()
    dE, dQK = dA * s.QK, dA * E
    dKQ = torch.bmm(_flat(dZO), _flat(s.states[:-1])[:, :D].mT).view_as(dZO)
    dQ = torch.bmm(_flat(dQK), _flat(s.K[..., :D])).view_as(dO).add_(dKQ[:, :, 1::2]).add_(dy)
    dK = torch.bmm(_flat(dQK).mT, _flat(s.Q[..., :D])).view_as(dO).add_(dKQ[:, :, ::2]).add_(dtau)
    dK.addcmul_(dP[..., :D], (s.c_last * s.rate).unsqueeze(-1))
    de = (dP * s.K).sum(-1)
    drate = torch.addcmul((dE * s.mask).sum(-2), de, s.c_last)
    dc[:, :n] += (dE * s.rate.unsqueeze(-2)).sum(0).tril_().sum(-1)
    dc[:, n - 1] += (de * s.rate).sum((0, 2))
    return dQ, dK, dtau.neg_(), drate


def _flat(x: Tensor) -> Tensor:
    """Chunks and groups as one batch axis."""
    return x.flatten(0, 1)


def _gather(source: Tensor, rows: Tensor, target: Tensor) -> Tensor:
    """target (m,G,n,D) = rows of source (..., D), in target's dtype."""
    source, flat = source.view(-1, source.shape[-1]), target.view(-1, target.shape[-1])
    if source.dtype == target.dtype:
        torch.index_select(source, 0, rows, out=flat)
    else:
        flat.copy_(source.index_select(0, rows))
    return target


def _scatter(target: Tensor, rows: Tensor, source: Tensor) -> None:
    """Rows of target (..., D) = source (m,G,n,D), in target's dtype."""
    target = target.view(-1, target.shape[-1])
    target.index_copy_(0, rows, source.reshape(-1, target.shape[-1]).to(target.dtype))
