"""The inner learner of LaCT, and the six steps that take its parts away until linear attention is left.

For each head, a gated model F(x) = (SiLU(x W1) ⊙ (x W2)) W3 learns to map keys to values, by steps up ⟨F(k), v⟩ on
chunks of tokens: with a rate for each token and matrix, momentum from chunk to chunk, steps that Newton–Schulz makes
orthogonal (Muon), and columns of the weights that are brought back to their first norms. Queries are read out before,
after or within the learning.

`repro.models.inner` goes from chunk to chunk. `learn_in_parallel` computes all chunks at once, where the learner
reduces to linear attention with a decay: only the last matrix learns, or there is only one, and the state has no norm.

Shape suffixes: B images, h heads, T tokens, d width of q, k and v, e hidden units, n tokens of a chunk, c chunks.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import did_you_mean
from . import inner
from .image_model import Grid
from .inner import MODELS, InnerLoop, Weights, full_precision
from .muon import newton_schulz

Form = Literal["recurrent", "parallel"]
# what every step has; W3 is the last matrix
_SUMS: dict[str, Any] = {"loss": "dot", "reduction": "sum", "scale": 1.0}
_LACT = {"model": "swiglu", **_SUMS, "rate": "per_weight", "momentum": True, "muon": "lact", "norm": "state"}
# paper 004's steps from LaCT to linear attention, each with all changes before it
_V1 = {**_LACT, "only": (2,)}
_V2 = {**_V1, "norm": "none"}
_V3 = {**_LACT, "model": "fc", "norm": "none"}
_V4 = {**_V3, "rate": "fixed"}
_V5 = {**_V4, "momentum": False}
LADDER: dict[str, dict[str, Any]] = {
    "own": _LACT,
    "ascent": {**_LACT, "direction": "ascent"},
    "q_is_k": {**_LACT, "q_is_k": True},
    "v1": _V1,
    "v2": _V2,
    "v3": _V3,
    "v4": _V4,
    "v5": _V5,
    "v6": {**_V5, "muon": "none"},
}


def find_obstacle(loop: InnerLoop) -> str | None:
    """The part that keeps a step of the ladder from a parallel form, in words; None where there is one."""
    if loop.model != "fc" and loop.only != (2,):
        return "W1 and W2 learn, so the kernel of a chunk depends on all chunks before it"
    if loop.norm != "none":
        return f"norm {loop.norm} is applied to the state, so that it is no sum over chunks"
    return None


def choose_form(loop: InnerLoop, backend: str, device: torch.device) -> Form:
    """The form that runs for a request.

    `auto` is parallel on a GPU, where a chunk after another leaves most of it idle, for learners that have this form;
    else recurrent, as are `torch` and `reference`.

    Raises:
        ValueError: an unknown backend, or `parallel` for a learner without this form; the message says why.
    """
    if backend not in (known := ("auto", "recurrent", "parallel", "torch", "reference")):
        raise ValueError(f"backend {backend!r}: fast weights have {', '.join(known)}{did_you_mean(backend, known)}")
    obstacle = find_obstacle(loop)
    if backend == "parallel" and obstacle is not None:
        raise ValueError(f"backend parallel: {obstacle}; use recurrent")
    if backend == "parallel" or (backend == "auto" and device.type == "cuda" and obstacle is None):
        return "parallel"
    return "recurrent"


def learn(
    loop: InnerLoop,
    weights: Weights,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    rates: Tensor | None,
    momentum: Tensor | None,
    form: Form,
) -> Tensor:
    """`repro.models.inner.learn` for a step of the ladder, by either form: the same function by other sums."""
    if form == "recurrent":
        return inner.learn(loop, weights, q, k, v, grid, rates, momentum)
    with full_precision(q.device.type):
        dtype = torch.promote_types(q.dtype, torch.float32)
        given = (None if x is None else x.to(dtype) for x in (k if loop.q_is_k else q, k, v, rates, momentum))
        return learn_in_parallel(loop, [weight.to(dtype) for weight in weights], *given).to(q.dtype)


def learn_in_parallel(
    loop: InnerLoop, weights: Weights, q: Tensor, k: Tensor, v: Tensor, rates: Tensor | None, momentum: Tensor | None
) -> Tensor:
    """`learn` of all chunks at once, in the dtype of its arguments.

    With static features φ the steps G_c = Σ (η φ(k))ᵀ v of all chunks are one batched product. The momenta are M_j =
    Σ_i Λ_ji G_i with Λ_ji = Π_{i<s≤j} α_s, taken from differences of cumulated logarithms, which never divide; the
    state that a chunk reads is the start and the sum of the steps of the chunks before it.

    Raises:
        ValueError: a learner without this form.
    """
    if (obstacle := find_obstacle(loop)) is not None:
        raise ValueError(f"backend parallel: {obstacle}; use recurrent")
    T = k.shape[-2]
    start = weights[-1]
    chunks = loop.split(T)
    n = chunks[0][1]
    features_q, features_k = (MODELS[loop.model].prepare(weights, x, (1, x.shape[-2]))[-1] for x in (q, k))
    if loop.order == "before":  # nobody reads what the last chunk would teach
        learning, chunks = chunks[-1][0], chunks[:-1]
        features_k = features_k[..., :learning, :]
        v = v[..., :learning, :]
        rates = None if rates is None else rates[..., :learning, :]
    scaled = features_k if rates is None else features_k * rates
    keys, values = (F.pad(x, (0, 0, 0, -x.shape[-2] % n)).unflatten(-2, (len(chunks), n)) for x in (scaled, v))
    steps = keys.mT @ values  # (B, h, c, e, d)
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
        return features_q @ (start + steps.sum(2))
    states = start.unsqueeze(1) + steps.cumsum(2)
    if loop.order == "before":
        states = torch.cat((start.expand(len(q), -1, -1, -1).unsqueeze(2), states), 2)
    read = F.pad(features_q, (0, 0, 0, -T % n)).unflatten(-2, (-1, n)) @ states
    return read.flatten(2, 3)[..., :T, :]


def decay_matrix(factors: Tensor) -> Tensor:
    """Λ (..., c, c) of factors α (..., c) between 0 and 1: Λ_ji = Π_{i<s≤j} α_s for i ≤ j, else 0.

    The logarithms are cumulated, so that no product of many factors is formed, which would be a divisor.
    """
    # in fp64, since differences of large sums are left
    logs = factors.double().clamp_min(torch.finfo(torch.float64).tiny).log().cumsum(-1)
    above = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).triu(1)
    return (logs.unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill(above, -torch.inf).exp().to(factors.dtype)
