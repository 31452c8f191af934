"""The inner learner of LaCT, and the six steps that take its parts away until linear attention is left.

For each head, a gated model F(x) = W1 (SiLU(W0 x) ⊙ (W2 x)) learns to map keys to values, by steps up ⟨F(k), v⟩ on
chunks of tokens: with a rate for each token and matrix, momentum from chunk to chunk, steps that Newton–Schulz makes
orthogonal (Muon), and rows of the weights that are brought back to their first norms. Queries are read out before,
after or within the learning.

`learn_recurrently` goes from chunk to chunk. `learn_in_parallel` computes all chunks at once, where the learner reduces
to linear attention with a decay: only the last matrix learns, or there is only one, and no norm is applied to the
state.

Shape suffixes: B images, h heads, T tokens, d width of q, k and v, e hidden units, n tokens of a chunk, c chunks.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import did_you_mean
from .inner import Direction, full_precision

Muon = Literal["none", "lact", "nvs", "frobenius"]
Norm = Literal["none", "state", "copy"]
Order = Literal["before", "after", "end"]
Form = Literal["recurrent", "parallel"]
EPS = 1e-5  # of the row norms
NEWTON_SCHULZ_EPS = 1e-7
# (a, b, c) of each step X <- aX + (bA + cA²)X with A = XXᵀ
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "lact": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "nvs": ((3.4445, -4.7750, 2.0315),) * 5,  # of its model for novel views
    "frobenius": (),  # the start of the steps alone
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastLoop:
    """How the fast weights learn. The defaults are LaCT's; `LADDER` has what paper 004 takes away.

    Args:
        only_last: whether W1 alone learns, so that the kernel φ(x) = SiLU(W0 x) ⊙ (W2 x) is static.
        linear: whether the model is one matrix, F(x) = S x.
        rates: whether each token has rates; without, all are 1.
        momentum: whether the steps of earlier chunks go on, each chunk with a factor.
        muon: the coefficients of Newton–Schulz, `frobenius` for its start alone, or `none`.
        norm: whether the rows of the learned weights are brought back to their first norms after each step: those of
            the weights themselves (`state`), or of a copy that is read, beside weights that go on without (`copy`).
        direction: down the loss −⟨F(k), v⟩ or up.
        q_is_k: whether keys are read out in place of queries.
        order: when a chunk is read out: `before` its own step, `after` it, or at the `end` of all learning.
        chunk_size: tokens of a chunk; 0 for all tokens.
        steps: on each chunk, one after another.

    A choice that is not known, or a number out of range, is a ValueError.
    """

    only_last: bool = False
    linear: bool = False
    rates: bool = True
    momentum: bool = True
    muon: Muon = "lact"
    norm: Norm = "state"
    direction: Direction = "descent"
    q_is_k: bool = False
    order: Order = "end"
    chunk_size: int = 0
    steps: int = 1

    def __post_init__(self) -> None:
        choices = {
            "muon": get_args(Muon),
            "norm": get_args(Norm),
            "direction": get_args(Direction),
            "order": get_args(Order),
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"fast weights: {name} {value!r}: not known{did_you_mean(value, known)}")
        if self.chunk_size < 0:
            raise ValueError(
                f"fast weights: chunk_size {self.chunk_size}: expected 1 or more tokens, or 0 for all of them"
            )
        if self.steps < 1:
            raise ValueError(f"fast weights: steps {self.steps}: expected 1 or more")

    @property
    def learned(self) -> tuple[int, ...]:
        """The places of the weights that learn: of (W0, W1, W2), or of (S,)."""
        return (0,) if self.linear else (1,) if self.only_last else (0, 1, 2)

    @property
    def obstacle(self) -> str | None:
        """The part that keeps this learner from a parallel form, in words; None where there is one."""
        if not (self.linear or self.only_last):
            return "W0 and W2 learn, so the kernel of a chunk depends on all chunks before it"
        if self.norm != "none":
            return f"norm {self.norm} is applied to the state, so that it is no sum over chunks"
        return None

    def shapes(self, d: int, e: int) -> list[tuple[int, int]]:
        """(outputs, inputs) of each weight of one head."""
        return [(d, d)] if self.linear else [(e, d), (d, e), (e, d)]

    def split(self, tokens: int) -> list[tuple[int, int]]:
        """(first token, token after the last) of each chunk; the last may be short."""
        ends = [*range(0, tokens, self.chunk_size or tokens), tokens]
        return list(itertools.pairwise(ends))

    def count_macs(self, tokens: int, d: int, e: int) -> int:
        """Multiply-adds of the matrix products of one head, as `learn_recurrently` does them."""
        chunks = self.split(tokens)[:-1] if self.order == "before" else self.split(tokens)
        learning = self.steps * sum(end - first for first, end in chunks)
        sizes = [rows * columns for rows, columns in self.shapes(d, e)]
        of_token = d * d if self.linear else (3 if self.only_last else 6) * d * e
        orthogonal = (
            sum(newton_schulz_macs(self.muon, *self.shapes(d, e)[place]) for place in self.learned)
            if self.muon != "none"
            else 0
        )
        return learning * of_token + self.steps * len(chunks) * orthogonal + tokens * sum(sizes)


# paper 004's steps from LaCT to linear attention, each with all changes before it
_V1 = {"only_last": True}
_V2 = {**_V1, "norm": "none"}
_V3 = {"linear": True, "norm": "none"}
_V4 = {**_V3, "rates": False}
_V5 = {**_V4, "momentum": False}
LADDER: dict[str, dict[str, object]] = {
    "own": {},
    "ascent": {"direction": "ascent"},
    "q_is_k": {"q_is_k": True},
    "v1": _V1,
    "v2": _V2,
    "v3": _V3,
    "v4": _V4,
    "v5": _V5,
    "v6": {**_V5, "muon": "none"},
}


def choose_form(loop: FastLoop, backend: str, device: torch.device) -> Form:
    """The form that runs for a request.

    `auto` is parallel on a GPU, where a chunk after another leaves most of it idle, for learners that have this form;
    else recurrent, as are `torch` and `reference`.

    Raises:
        ValueError: an unknown backend, or `parallel` for a learner without this form; the message names the part that
            is in the way.
    """
    if backend not in (known := ("auto", "recurrent", "parallel", "torch", "reference")):
        raise ValueError(f"backend {backend!r}: fast weights have {', '.join(known)}{did_you_mean(backend, known)}")
    if backend == "parallel" and loop.obstacle is not None:
        raise ValueError(f"backend parallel: {loop.obstacle}; use recurrent")
    if backend == "parallel" or (backend == "auto" and device.type == "cuda" and loop.obstacle is None):
        return "parallel"
    return "recurrent"


def learn(
    loop: FastLoop,
    weights: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Tensor | None,
    momentum: Tensor | None,
    form: Form,
) -> Tensor:
    """Learn k -> v from the start `weights`, and read out q.

    With a step for each chunk, η the rates of a token and α the mean over the chunk of its tokens' momentum:

        dW1 = Σ v (η1 φ(k))ᵀ,  dW2 = Σ ((W1ᵀv) ⊙ SiLU(W0 k)) (η2 k)ᵀ,  dW0 = Σ ((W1ᵀv) ⊙ (W2 k) ⊙ SiLU'(W0 k)) (η0 k)ᵀ
        M ← dW + α M,  W ← W ± NewtonSchulz(M),  W ← W / (‖W‖ + ε) · ‖W at the start‖ by rows

    The computation is in fp32 or more, also under autocast.

    Args:
        weights: each (h, *shape), of `loop.shapes(d, e)`.
        q, k, v: (B, h, T, d); with the order `end`, there may be more or fewer queries than keys.
        rates: (B, h, T, 3), η of W0, W1 and W2 (S has that of W1); None where `loop.rates` is False.
        momentum: (B, h, T); None where `loop.momentum` is False.
        form: `recurrent`, or `parallel` where `loop.obstacle` is None: the same function by other sums.

    Returns:
        (B, h, T, d) in the dtype of q.
    """
    with full_precision(q.device.type):
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k, v, rates, momentum = (None if x is None else x.to(dtype) for x in (q, k, v, rates, momentum))
        run = learn_recurrently if form == "recurrent" else learn_in_parallel
        return run(loop, [weight.to(dtype) for weight in weights], k if loop.q_is_k else q, k, v, rates, momentum).to(
            q.dtype
        )


def learn_recurrently(
    loop: FastLoop,
    weights: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Tensor | None,
    momentum: Tensor | None,
) -> Tensor:
    """`learn` from chunk to chunk, in the dtype of its arguments."""
    W = [weight.expand(len(q), *weight.shape) for weight in weights]
    goes_on = list(W)  # without the norm, for a copy that is read
    first_norms = [_row_norms(weight) for weight in W]
    moving = dict.fromkeys(loop.learned, 0)
    sign = 1 if loop.direction == "descent" else -1
    outs, chunks = [], loop.split(k.shape[-2])
    for number, (first, end) in enumerate(chunks):
        here = slice(first, end)
        if loop.order == "before":
            outs.append(read_out(W, q[..., here, :]))
            if number + 1 == len(chunks):
                break
        of_chunk = None if rates is None else rates[..., here, :]
        for _ in range(loop.steps):
            steps = _find_steps(loop, W, k[..., here, :], v[..., here, :], of_chunk)
            for place, step in zip(loop.learned, steps, strict=True):
                if momentum is not None:
                    moving[place] = step = step + momentum[..., here].mean(-1)[..., None, None] * moving[place]
                if loop.muon != "none":
                    step = newton_schulz(step, loop.muon)
                goes_on[place] = (goes_on if loop.norm == "copy" else W)[place] + sign * step
                W[place] = goes_on[place]
                if loop.norm != "none":
                    W[place] = W[place] / (_row_norms(W[place]) + EPS) * first_norms[place]
        if loop.order == "after":
            outs.append(read_out(W, q[..., here, :]))
    return read_out(W, q) if loop.order == "end" else torch.cat(outs, -2)


def learn_in_parallel(
    loop: FastLoop,
    weights: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Tensor | None,
    momentum: Tensor | None,
) -> Tensor:
    """`learn` of all chunks at once, in the dtype of its arguments.

    With static features φ the steps G_c = Σ v (η φ(k))ᵀ of all chunks are one batched product. The momenta are M_j =
    Σ_i Λ_ji G_i with Λ_ji = Π_{i<s≤j} α_s, taken from differences of cumulated logarithms, which never divide; the
    state that a chunk reads is the start and the sum of the steps of the chunks before it.

    Raises:
        ValueError: a learner without this form.
    """
    if loop.obstacle is not None:
        raise ValueError(f"backend parallel: {loop.obstacle}; use recurrent")
    T, start = k.shape[-2], weights[0] if loop.linear else weights[1]
    n, chunks = min(loop.chunk_size or T, T), loop.split(T)
    features_q, features_k = (x if loop.linear else gate(weights, x)[0] for x in (q, k))
    if loop.order == "before":  # nobody reads what the last chunk would teach
        learning, chunks = chunks[-1][0], chunks[:-1]
        features_k = features_k[..., :learning, :]
        v = v[..., :learning, :]
        rates = None if rates is None else rates[..., :learning, :]
    scaled = features_k if rates is None else features_k * rates[..., 1:2]
    keys, values = (F.pad(x, (0, 0, 0, -x.shape[-2] % n)).unflatten(-2, (len(chunks), n)) for x in (scaled, v))
    steps = values.mT @ keys  # (B, h, c, d, e)
    if loop.steps > 1:
        steps = steps.repeat_interleave(loop.steps, dim=2)
    if momentum is not None and chunks:
        factors = torch.stack([momentum[..., first:end].mean(-1) for first, end in chunks], -1)
        if loop.steps > 1:
            factors = factors.repeat_interleave(loop.steps, dim=2)
        steps = (decay_matrix(factors) @ steps.flatten(-2)).view_as(steps)
    if loop.muon != "none":
        steps = newton_schulz(steps, loop.muon)
    if loop.steps > 1:
        steps = steps.unflatten(2, (len(chunks), loop.steps)).sum(3)
    if loop.direction == "ascent":
        steps = -steps
    if loop.order == "end":
        return features_q @ (start + steps.sum(2)).mT
    states = start.unsqueeze(1) + steps.cumsum(2)
    if loop.order == "before":
        states = torch.cat((start.expand(len(q), -1, -1, -1).unsqueeze(2), states), 2)
    read = F.pad(features_q, (0, 0, 0, -T % n)).unflatten(-2, (-1, n)) @ states.mT
    return read.flatten(2, 3)[..., :T, :]


def decay_matrix(factors: Tensor) -> Tensor:
    """Λ (..., c, c) of factors α (..., c) between 0 and 1: Λ_ji = Π_{i<s≤j} α_s for i ≤ j, else 0.

    The logarithms are cumulated, so that no product of many factors is formed, by which something would have to be
    divided.
    """
    # in fp64, since differences of large sums are left
    logs = factors.double().clamp_min(torch.finfo(torch.float64).tiny).log().cumsum(-1)
    above = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).triu(1)
    return (logs.unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill(above, -torch.inf).exp().to(factors.dtype)


def newton_schulz(G: Tensor, kind: str) -> Tensor:
    """Steps X ← aX + (bA + cA²)X, A = XXᵀ, from X = G / (‖G‖_F + ε): singular values near 1, in the dtype of G.

    G is (..., m, n); the products are of the smaller side.

    Raises:
        ValueError: a vector, for which there is nothing to make orthogonal.
    """
    if G.ndim < 2 or min(G.shape[-2:]) < 2:
        raise ValueError(
            f"muon: orthogonalises matrices, and a step of shape {tuple(G.shape[-2:])} is a vector; use muon none"
        )
    wide = G.shape[-2] <= G.shape[-1]
    X = G if wide else G.mT
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + NEWTON_SCHULZ_EPS)
    for a, b, c in COEFFICIENTS[kind]:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X if wide else X.mT


def newton_schulz_macs(kind: str, rows: int, columns: int) -> int:
    """Multiply-adds of `newton_schulz` of one matrix."""
    m, n = sorted((rows, columns))
    return len(COEFFICIENTS[kind]) * (2 * m * m * n + m**3)


def gate(weights: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """φ(x) = SiLU(W0 x) ⊙ (W2 x), and its two products: each (B, h, n, e)."""
    z0, z2 = x @ weights[0].mT, x @ weights[2].mT
    return F.silu(z0) * z2, z0, z2


def read_out(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """F(x): (B, h, n, d) -> (B, h, n, d)."""
    return x @ weights[0].mT if len(weights) == 1 else gate(weights, x)[0] @ weights[1].mT


def _find_steps(loop: FastLoop, W: Sequence[Tensor], k: Tensor, v: Tensor, rates: Tensor | None) -> list[Tensor]:
    """Steps up ⟨F(k), v⟩ of the weights that learn, each (B, h, outputs, inputs)."""
    eta = (1, 1, 1) if rates is None else rates.split(1, dim=-1)
    if loop.linear:
        return [v.mT @ (eta[1] * k)]
    features, z0, z2 = gate(W, k)
    of_last = v.mT @ (eta[1] * features)
    if loop.only_last:
        return [of_last]
    sigmoid = z0.sigmoid()
    e = v @ W[1]
    of_first = (e * z2 * sigmoid * (1 + z0 * (1 - sigmoid))).mT @ (eta[0] * k)
    return [of_first, of_last, (e * z0 * sigmoid).mT @ (eta[2] * k)]


def _row_norms(weight: Tensor) -> Tensor:
    """Over the inputs of each output."""
    return torch.linalg.vector_norm(weight, dim=-1, keepdim=True)
