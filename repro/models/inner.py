"""Inner learners: small models that are trained on the keys and values of one image, and then read by its queries.

A learner has a model F(x; W_1 .. W_P) with a learned start, a loss of its output v̂ = F(k) against v, and a schedule.
Only the error signal e = ∂L/∂v̂ depends on the loss, and only the gradients G_p = Σ_n (∂v̂_n/∂W_p)ᵀ e_n on the model.
`error_signal` has the first in closed form for five losses, `MODELS` the second for twelve models, and `learn` is the
loop over them, for ViT3, its study, T5 and LaCT. Autograd differentiates the closed forms, so the outer gradient is
that of all inner steps; none of it needs `create_graph`.

Shape suffixes: B images, h heads, N tokens, d head dimension, n tokens of an inner batch.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import did_you_mean
from .image_model import Grid
from .inner_models import MODELS, Weights
from .muon import Muon, newton_schulz, newton_schulz_macs

Loss = Literal["dot", "mse", "rmse", "mae", "smooth_l1"]
Direction = Literal["descent", "ascent"]
Rate = Literal["fixed", "dynamic", "per_weight"]
Reduction = Literal["mean", "sum"]
Norm = Literal["none", "state", "detached", "copy"]
Order = Literal["before", "after", "end"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerLoop:
    """How an inner learner learns.

    Args:
        model: a name of `MODELS`.
        width: hidden units of a model with hidden layers, as a multiple of d.
        loss: a name of `LOSSES`.
        batches: inner batches of an epoch, in token order; their sizes differ by at most one token.
        damping: whether a gradient G is divided by ‖G‖ + 1, with one norm per output unit.
        only: places of the weights that learn; None for all.
        scale: factor s of the loss; None for d^-½.
        rate: `dynamic` where the loss of a token is weighted by a rate, which the caller computes; `per_weight` where
            it has such a rate for each weight that learns.
        reduction: whether the loss is the mean over the tokens of an inner batch or their sum.
        chunk_size: tokens of an inner batch, of which the last may be shorter; 0 for `batches` of them.
        steps: on each inner batch, one after another.
        momentum: whether the steps of earlier inner batches go on, with a factor that the caller computes.
        muon: see `newton_schulz`, which makes a step orthogonal.
        norm: whether the weights are brought back to their first norms after each step, one for each output unit: the
            weights themselves (`state`; `detached` where no gradient goes through the first norms, as in LaCT for
            novel views), or a copy that is read, while the weights go on without (`copy`).
        order: when the queries of an inner batch are read out: `before` its own step, `after` it, or at the `end` of
            all learning.

    A name that is not known, a number out of range, or an option without effect is a ValueError.
    """

    model: str = "mlp"
    width: float = 1
    depth: int = 2
    loss: Loss = "dot"
    lr: float = 1.0
    epochs: int = 1
    batches: int = 1
    damping: bool = False
    direction: Direction = "descent"
    only: tuple[int, ...] | None = None
    scale: float | None = None
    rate: Rate = "fixed"
    reduction: Reduction = "mean"
    chunk_size: int = 0
    steps: int = 1
    momentum: bool = False
    muon: Muon = "none"
    norm: Norm = "none"
    order: Order = "end"
    q_is_k: bool = False

    def __post_init__(self) -> None:
        choices = {
            "model": MODELS,
            "loss": LOSSES,
            "direction": get_args(Direction),
            "rate": get_args(Rate),
            "reduction": get_args(Reduction),
            "muon": get_args(Muon),
            "norm": get_args(Norm),
            "order": get_args(Order),
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"inner {name} {value!r}: not known{did_you_mean(value, known)}")
        for name in ("depth", "epochs", "batches", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"inner {name} {getattr(self, name)}: expected 1 or more")
        if self.width <= 0:
            raise ValueError(f"inner width {self.width}: expected more than 0")
        if self.chunk_size < 0:
            raise ValueError(f"inner chunk_size {self.chunk_size}: expected 1 or more tokens, or 0 for all of them")
        if self.order != "end" and self.epochs > 1:
            raise ValueError(f"inner order {self.order}: reads in the one pass over the tokens, so leave epochs at 1")
        model = MODELS[self.model]
        if self.width != 1 and not model.has_width:
            raise ValueError(f"inner width {self.width}: the inner model {self.model} has width 1")
        if self.depth != 2 and not model.has_depth:
            raise ValueError(f"inner depth {self.depth}: the inner model {self.model} has no choice of depth")
        if self.depth < 2 and model.has_depth:
            raise ValueError(
                f"inner depth {self.depth}: an {self.model} has 2 layers or more; one layer is the inner model fc"
            )
        if self.only is not None and not (self.only and set(self.only) <= set(range(len(self.shapes(1))))):
            raise ValueError(
                f"inner only {self.only}: expected places of the weights of the inner model {self.model}, counted from 0"
            )

    def shapes(self, head_dim: int) -> list[tuple[int, ...]]:
        """The shape of each weight of one head of width d."""
        return MODELS[self.model].shapes(self, head_dim)

    @property
    def learned(self) -> tuple[int, ...]:
        """The places of the weights that learn."""
        return tuple(range(len(self.shapes(1)))) if self.only is None else self.only

    def split(self, tokens: int) -> list[tuple[int, int]]:
        """(first token, token after the last) of each inner batch; a ValueError where a batch would be empty."""
        if self.batches > tokens:
            raise ValueError(f"inner batches {self.batches}: there are {tokens} tokens")
        if self.chunk_size:
            ends = [*range(0, tokens, self.chunk_size), tokens]
        else:
            ends = [tokens * i // self.batches for i in range(self.batches + 1)]
        return list(itertools.pairwise(ends))

    def count_macs(self, tokens: int, head_dim: int) -> int:
        """Multiply-adds of learning and read-out for one head: matrix products, and convolutions with borders.

        The prediction v̂ is formed only for losses that need it, and no step is taken that nobody reads.
        """
        model = MODELS[self.model]
        shapes = self.shapes(head_dim)
        sizes = [math.prod(shape) for shape in shapes]
        prepare = 0 if model.on_grid else sum(sizes[:-1] if model.ends_linear else sizes)
        read = sum(sizes) - prepare  # a kernel (o, c, 3, 3) meets each position once
        predict = read if self.loss != "dot" else 0
        gradients = sum(sizes[p] for p in self.learned)
        first = len(sizes) if model.first_back is None else model.first_back
        back = sum(size for p, size in enumerate(sizes) if p >= first and p > min(self.learned))
        batches = self.split(tokens)[: -1 if self.order == "before" else None]
        steps = self.epochs * self.steps
        of_tokens = steps * sum(end - first for first, end in batches) * (prepare + predict + gradients + back)
        orthogonal = sum(newton_schulz_macs(self.muon, *shapes[p]) for p in self.learned) if self.muon != "none" else 0
        return of_tokens + steps * len(batches) * orthogonal + tokens * (prepare + read)


def learn(
    loop: InnerLoop,
    weights: Weights,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    rates: Tensor | None = None,
    momentum: Tensor | None = None,
) -> Tensor:
    """Learn k -> v from the start `weights`, and read out q as `loop.order` says: see `follow` and `read_out`.

    q, k, v (B, h, N, d) -> (B, h, N, d) in the dtype of q; with the order `end`, there may be more or fewer queries
    than keys. The computation is in fp32 or more, also under autocast: a step is small against a weight.
    """
    with full_precision(q.device.type):
        dtype = torch.promote_types(q.dtype, torch.float32)
        wide_q, k, v, rates, momentum = (None if x is None else x.to(dtype) for x in (q, k, v, rates, momentum))
        start = [weight.to(dtype) for weight in weights]
        wide_q = k if loop.q_is_k else wide_q
        states = follow(loop, start, k, v, grid, rates, momentum)
        if loop.order == "end":
            *_, learned = states
            return read_out(loop, learned, wide_q, grid).to(q.dtype)
        if loop.order == "after":
            next(states)
        batches = zip(loop.split(k.shape[-2]), states, strict=False)
        outs = [read_out(loop, W, wide_q[..., first:end, :], grid) for (first, end), W in batches]
        return torch.cat(outs, -2).to(q.dtype)


def follow(
    loop: InnerLoop,
    weights: Weights,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    rates: Tensor | None = None,
    momentum: Tensor | None = None,
) -> Iterator[list[Tensor]]:
    """The weights at the start, and after the steps on each inner batch; one list, which the next batch changes.

    For each step on an inner batch, with the gradients G_p and the factor α of the earlier steps' momentum:

        M_p ← G_p / (‖G_p‖ + 1) if damped,  M_p ← M_p + α M_p before,  M_p ← NewtonSchulz(M_p)
        W_p ← W_p − lr·M_p, or plus where the direction is ascent,  W_p ← W_p / (‖W_p‖ + ε) · ‖W_p at the start‖

    Args:
        weights: the start, each (h, *shape) or (B, h, *shape), of `loop.shapes(d)`.
        k, v: keys and values (B, h, N, d), row-major on the (h, w) grid.
        rates: (B, h, N) with `rate="dynamic"`, (B, h, N, weights that learn) with `rate="per_weight"`.
        momentum: (B, h, N) with `momentum`; α is the mean over the inner batch.

    Yields:
        The weights, after a step (B, h, *shape); one that does not learn keeps its shape.

    Raises:
        ValueError: `rates` or `momentum` that the loop does not have, or has and misses; more batches than tokens.
    """
    if (rates is not None) != (loop.rate != "fixed"):
        raise ValueError(f"inner rate {loop.rate}: token rates are {'missing' if rates is None else 'given'}")
    if (momentum is not None) != loop.momentum:
        raise ValueError(f"inner momentum {loop.momentum}: factors are {'missing' if momentum is None else 'given'}")
    model = MODELS[loop.model]
    axes = model.norm_axes
    W = list(weights)
    starts = [weight.detach() for weight in W] if loop.norm == "detached" else W
    first_norms = [torch.linalg.vector_norm(weight, dim=axes, keepdim=True) for weight in starts]
    unscaled = list(W)  # without the norm, for a copy that is read
    moving = dict.fromkeys(loop.learned, 0)
    rate = loop.lr if loop.direction == "ascent" else -loop.lr
    yield W
    for first, end in loop.split(k.shape[-2]) * loop.epochs:
        for _ in range(loop.steps):
            gradients = _find_gradients(loop, W, k, v, grid, rates, first, end)
            for p, G in zip(loop.learned, gradients, strict=True):
                if loop.damping:
                    G = G / (torch.linalg.vector_norm(G, dim=axes, keepdim=True) + 1)
                if momentum is not None:
                    G = G + momentum[..., first:end].mean(-1)[..., None, None] * moving[p]
                    moving[p] = G
                if loop.muon != "none":
                    G = newton_schulz(G, loop.muon)
                unscaled[p] = (unscaled if loop.norm == "copy" else W)[p] + rate * G
                W[p] = unscaled[p]
                if loop.norm != "none":
                    norms = torch.linalg.vector_norm(W[p], dim=axes, keepdim=True)
                    W[p] = W[p] / (norms + NORM_EPS) * first_norms[p]
        yield W


def _find_gradients(
    loop: InnerLoop, W: Weights, k: Tensor, v: Tensor, grid: Grid, rates: Tensor | None, first: int, end: int
) -> list[Tensor]:
    """The gradients of the loss of one inner batch with respect to the weights that learn, each (B, h, *shape)."""
    model, (N, d) = MODELS[loop.model], k.shape[-2:]
    prepared = model.prepare(W, k if model.on_grid else k[..., first:end, :], grid)
    predicted = None if loop.loss == "dot" else model.read(W, prepared)
    if model.on_grid and predicted is not None:
        predicted = predicted[..., first:end, :]
    scale = d**-0.5 if loop.scale is None else loop.scale
    scale = scale if loop.reduction == "mean" else scale * (end - first)
    e = error_signal(loop.loss, predicted, v[..., first:end, :], scale)
    if loop.rate == "dynamic":
        e = e * rates[..., first:end, None]
    if model.on_grid:  # the windows of a batch reach keys of other batches; their own errors do not count
        e = F.pad(e, (0, 0, first, N - end))
    # no further back than to the first weight that learns
    backwards = reversed(range(min(loop.learned), len(W)))
    pairs = dict(zip(backwards, model.pull(W, prepared, e), strict=False))
    found = [pairs[p] for p in loop.learned]
    if loop.rate == "per_weight":
        found = [(rates[..., first:end, i : i + 1] * x, back) for i, (x, back) in enumerate(found)]
    return [model.join(x, back) for x, back in found]


def read_out(loop: InnerLoop, weights: Weights, q: Tensor, grid: Grid) -> Tensor:
    """F(q; W): queries (B, h, N, d) -> (B, h, N, d)."""
    model = MODELS[loop.model]
    return model.read(weights, model.prepare(weights, q, grid))


def error_signal(loss: Loss, predicted: Tensor | None, v: Tensor, scale: float) -> Tensor:
    """e = ∂L/∂v̂ of one inner batch, like v (B, h, n, d), with r = v̂ − v and the factor s = `scale`.

    | loss      | L                                    | e                        |
    |-----------|--------------------------------------|--------------------------|
    | dot       | −(s/n) Σ ⟨v̂, v⟩                      | −s v / n                 |
    | mse       | (s/2n) Σ ‖r‖²                        | s r / n                  |
    | rmse      | √S, S = (s/n) Σ ‖r‖² of image, head  | s r / (n √S)             |
    | mae       | (s/n) Σ |r|                          | s sign(r) / n            |
    | smooth_l1 | (s/n) Σ r²/2, or |r| − ½ where |r| > 1 | s clamp(r, −1, 1) / n  |

    `predicted` is v̂, which the dot product does not need. The values v reach an outer loss through e alone: with mae
    nowhere, and with smooth_l1 not where |r| > 1.
    """
    factor = scale / v.shape[-2]
    if loss == "dot":
        return -factor * v
    if predicted is None:
        raise ValueError(f"inner loss {loss}: needs the prediction")
    r = predicted - v
    if loss == "mae":
        return factor * r.sign()
    if loss == "smooth_l1":
        return factor * r.clamp(-1, 1)
    if loss == "rmse":
        squares = factor * r.square().sum(dim=(-2, -1), keepdim=True)
        # a prediction without error takes no step, and √ has no gradient there
        return factor * r / torch.where(squares > 0, squares, 1).sqrt()
    return factor * r


def full_precision(device_type: str) -> contextlib.AbstractContextManager:
    """A context without autocast; nothing to do on devices that do not support autocast, such as meta."""
    supported = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if supported else contextlib.nullcontext()
