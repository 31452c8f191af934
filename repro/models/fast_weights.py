"""The inner learner of LaCT, and its ablation chain of six steps down to linear attention.

In each head, a gated model F(x) = (SiLU(x W1) ⊙ (x W2)) W3 learns to map keys to values by gradient ascent on ⟨F(k), v⟩
over chunks of tokens. Each token has a learning rate per matrix. Momentum carries over from chunk to chunk,
Newton–Schulz orthogonalises the steps (Muon), and the columns of the weights are rescaled to their initial norms.
Queries read the weights before or after the step on their chunk, or at the end.

The recurrent form, `repro.models.inner.learn`, goes from chunk to chunk. `learn_in_parallel` computes all chunks at
once. It exists where the learner reduces to linear attention with a decay: the last matrix alone learns, or there is
only one, and the state is not normalised.

Shape suffixes: B images, h heads, T tokens, d width of q, k and v, e hidden units, n tokens of a chunk, c chunks.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import compute_dtype, no_autocast

from ..core.errors import did_you_mean
from . import inner
from .image_model import Grid
from .inner import MODELS, InnerLoop, Weights
from .muon import newton_schulz

Form = Literal["recurrent", "parallel"]
# options of every step of the chain; `only=(2,)` below means that W3 alone learns
_SUMS: dict[str, Any] = {"loss": "dot", "reduction": "sum", "scale": 1.0}
_LACT = {"model": "swiglu", **_SUMS, "rate": "per_weight", "momentum": True, "muon": "lact", "norm": "state"}
# the options that the parallel form does not read; their values are those of LaCT. A new option of `InnerLoop` must be
# listed here or read by `learn_in_parallel`, or the parallel form ignores it
_PARALLEL = {**_SUMS, "lr": 1.0, "damping": False, "epochs": 1, "batches": 1}
# the steps of the paper on KV binding from LaCT to linear attention; each has all changes of the steps before it
_V1 = {**_LACT, "only": (2,)}
_V2 = {**_V1, "norm": "none"}
_V3 = {**_LACT, "model": "fc", "norm": "none"}
_V4 = {**_V3, "rate": "fixed"}
_V5 = {**_V4, "momentum": False}
LACT_STEPS: dict[str, dict[str, Any]] = {
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
    """Return in words why a learner has no parallel form, or None if it has one."""
    if loop.model != "fc" and (loop.model, loop.only) != ("swiglu", (2,)):  # W3 alone learns
        return "W1 and W2 learn, so the kernel of a chunk depends on all chunks before it"
    if loop.norm != "none":
        return f"norm {loop.norm} is applied to the state, so that it is no sum over chunks"
    for name, value in _PARALLEL.items():
        if getattr(loop, name) != value:
            return f"the parallel form supports only {name} {value}, not {getattr(loop, name)}"
    return "the parallel form has no rate for each token" if loop.rate == "dynamic" else None


def choose_form(loop: InnerLoop, backend: str, device: torch.device) -> Form:
    """Return the form that a backend means on a device.

    `torch` and `reference` are recurrent. `auto` is parallel on a GPU for learners that have this form, because going
    from chunk to chunk leaves most of a GPU idle; otherwise it is recurrent.

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
    """Compute `repro.models.inner.learn` by either form; they differ only in the order of their sums."""
    if form == "recurrent":
        return inner.learn(loop, weights, q, k, v, grid, rates, momentum)
    with no_autocast(q.device.type):
        dtype = compute_dtype(q.dtype)
        given = (None if x is None else x.to(dtype) for x in (k if loop.q_is_k else q, k, v, rates, momentum))
        return learn_in_parallel(loop, [weight.to(dtype) for weight in weights], *given).to(q.dtype)


def learn_in_parallel(
    loop: InnerLoop, weights: Weights, q: Tensor, k: Tensor, v: Tensor, rates: Tensor | None, momentum: Tensor | None
) -> Tensor:
    """Compute `learn` for all chunks at once, in the dtype of the arguments.

    The features φ(k) are static, so the steps G_c = Σ (η φ(k))ᵀ v of all chunks are one batched product. The momenta
    are M_j = Σ_i Λ_ji G_i with Λ_ji = Π_{i<s≤j} α_s, see `decay_matrix`. The state that a chunk reads is the start plus
    a cumulative sum of the steps.

    The features are the last of the activations that `InnerModel.prepare` returns. `loop.q_is_k` is not read: `learn`
    passes the keys as q.

    Shapes are those of `inner.learn`: q, k, v and the result (B, h, T, d), rates (B, h, T, 1), momentum (B, h, T).

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
    if loop.order == "before":  # no query reads the state after the last chunk, so that chunk does not learn
        learning, chunks = chunks[-1][0], chunks[:-1]
        features_k = features_k[..., :learning, :]
        v = v[..., :learning, :]
        rates = None if rates is None else rates[..., :learning, :]
    scaled = features_k if rates is None else features_k * rates
    keys, values = (F.pad(x, (0, 0, 0, -x.shape[-2] % n)).unflatten(-2, (len(chunks), n)) for x in (scaled, v))
    steps = keys.mT @ values  # (B, h, c, e, d)
    if loop.steps > 1:  # the gradient of the dot product ignores the learning weights: a chunk's steps are equal
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
        states = torch.cat((start.expand(q.shape[0], -1, -1, -1).unsqueeze(2), states), 2)
    read = F.pad(features_q, (0, 0, 0, -T % n)).unflatten(-2, (-1, n)) @ states
    return read.flatten(2, 3)[..., :T, :]


def decay_matrix(factors: Tensor) -> Tensor:
    """Compute Λ (..., c, c) of factors α (..., c) in [0, 1]: Λ_ji = Π_{i<s≤j} α_s for i ≤ j, else 0.

    It takes differences of cumulative sums of logarithms. A quotient of cumulative products would divide by products of
    many factors, which underflow.
    """
    # in fp64, because differences of large sums cancel; clamped, because a factor of 0 would give -inf - -inf = nan
    logs = factors.double().clamp_min(torch.finfo(torch.float64).tiny).log().cumsum(-1)
    # masked before exp, which could overflow above the diagonal
    above = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).triu(1)
    return (logs.unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill(above, -torch.inf).exp().to(factors.dtype)
