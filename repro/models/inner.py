"""Inner learners: small models that learn the map from keys to values of one image, and are then applied to queries.

A learner has a model F(x; W_1 .. W_P) with learned initial weights, a loss between v̂ = F(k) and v, and a schedule. The
loss determines only the error signal e = ∂L/∂v̂; the model determines only the gradients G_p = Σ_n (∂v̂_n/∂W_p)ᵀ e_n.
`error_signal` computes e in closed form for five losses, and `MODELS` has the closed-form gradients of the models.
`learn` runs the loop for ViT3, its design study, T5 and LaCT. Autograd differentiates through the closed forms, so the
outer gradient goes through all inner steps without `create_graph`.

Shape suffixes: B images, h heads, N tokens, d head dimension, n tokens of an inner batch.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import compute_dtype, no_autocast

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
NORM_EPS = 1e-5  # keeps the division by a norm finite, in the option `norm`


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerLoop:
    """Configuration of an inner learner.

    The defaults are part of recorded models: weights files and the loops of the families state only what differs. A new
    option must also be known to `fast_weights`, see `_PARALLEL` there.

    Args:
        model: a name of `MODELS`.
        width: hidden units of a model with hidden layers, as a multiple of d.
        depth: layers of an MLP.
        loss: a name of `LOSSES`; see `error_signal`.
        lr: inner learning rate.
        epochs: passes over all inner batches.
        batches: inner batches of an epoch, in token order; their sizes differ by at most one token.
        damping: whether a gradient G is divided by ‖G‖ + 1, with one norm per output unit.
        direction: `descent`, or `ascent` for steps up the loss.
        only: indices of the weights that learn; None for all.
        scale: factor s of the loss; None for d^-½.
        rate: `fixed` for `lr` alone; `dynamic` if the caller gives a rate per token, which weights its loss;
            `per_weight` if the caller gives a rate per token and learning weight.
        reduction: whether the loss is the mean over the tokens of an inner batch or their sum.
        chunk_size: tokens of an inner batch, where the last one may be shorter; 0 to use `batches` instead.
        steps: consecutive steps on each inner batch.
        momentum: whether steps have momentum, with a factor that the caller gives.
        muon: how `newton_schulz` orthogonalises a step.
        norm: how weights are rescaled to their initial norms (one per output unit) after each step. `state` rescales
            the weights. `detached` does the same without a gradient through the initial norms, as in LaCT for novel
            views. `copy` rescales a copy that is read, while the weights stay unscaled.
        order: when the queries of an inner batch are read: `before` its own step, `after` it, or at the `end` of all
            learning.
        q_is_k: whether the keys are read in place of the queries.

    Raises:
        ValueError: an unknown name, a number out of range, or an option without effect.
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
        fields = dataclasses.fields(self)
        choices = {each.name: get_args(each.type) for each in fields if get_origin(each.type) is Literal}
        for name, known in {"model": MODELS, **choices}.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"inner {name} {value!r}: not known{did_you_mean(value, known)}")
        for name in ("depth", "epochs", "batches", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"inner {name} {getattr(self, name)}: expected 1 or more")
        if self.width <= 0:
            raise ValueError(f"inner width {self.width}: expected more than 0")
        if self.chunk_size < 0:
            raise ValueError(f"inner chunk_size {self.chunk_size}: expected 1 or more tokens, or 0 for all of them")
        if self.chunk_size and self.batches > 1:
            raise ValueError(
                f"inner batches {self.batches}: chunk_size {self.chunk_size} sets them; leave batches at 1"
            )
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
        if self.rate == "per_weight" and model.on_grid:
            raise ValueError(f"inner rate per_weight: the inner model {self.model} has one rate for all of its weights")
        if self.only is not None and not (
            self.only and sorted({*range(len(self.shapes(1)))} & {*self.only}) == sorted(self.only)
        ):
            raise ValueError(
                f"inner only {self.only}: expected places of weights of the inner model {self.model}, from 0 and each once"
            )

    def shapes(self, head_dim: int) -> list[tuple[int, ...]]:
        """Return the shape of each weight of one head of width d."""
        return MODELS[self.model].shapes(head_dim, self.width, self.depth)

    @property
    def learned(self) -> tuple[int, ...]:
        """The indices of the weights that learn, in the order of the columns of `rates` with `rate="per_weight"`."""
        return tuple(range(len(self.shapes(1)))) if self.only is None else self.only

    def split(self, tokens: int) -> list[tuple[int, int]]:
        """Return (first token, token after the last) of each inner batch; ValueError if a batch would be empty."""
        if self.batches > tokens:
            raise ValueError(f"inner batches {self.batches}: there are {tokens} tokens")
        if self.chunk_size:
            ends = [*range(0, tokens, self.chunk_size), tokens]
        else:
            ends = [tokens * i // self.batches for i in range(self.batches + 1)]
        return list(itertools.pairwise(ends))

    def count_macs(self, tokens: int, head_dim: int) -> int:
        """Count the multiply-adds of learning and read-out for one head: matrix products and convolutions.

        Convolutions count their zero padding. The prediction v̂ counts only for losses that need it. With the order
        `before`, the last inner batch takes no step, because no query reads it.
        """
        model = MODELS[self.model]
        shapes = self.shapes(head_dim)
        sizes = [math.prod(shape) for shape in shapes]
        prepare = 0 if model.on_grid else sum(sizes[:-1] if model.ends_linear else sizes)
        read = sum(sizes) - prepare  # per token; a kernel (o, c, 3, 3) is applied once per position
        predict = read if self.loss != "dot" else 0
        gradients = sum(sizes[p] for p in self.learned)
        back = sum(size for p, size in enumerate(sizes) if p >= model.first_back and p > min(self.learned))
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
    """Learn the map from k to v, starting from `weights`, and apply it to q; see `follow` and `read_out`.

    q, k, v and the result are (B, h, N, d), the result in the dtype of q. With the order `end`, the numbers of queries
    and keys may differ. The computation is in at least fp32, also under autocast, because steps are small compared with
    the weights.

    Raises:
        ValueError: as `follow`.
    """
    with no_autocast(q.device.type):
        dtype = compute_dtype(q.dtype)
        wide_q, k, v, rates, momentum = (None if x is None else x.to(dtype) for x in (q, k, v, rates, momentum))
        start = [weight.to(dtype) for weight in weights]
        wide_q = k if loop.q_is_k else wide_q
        states = follow(loop, start, k, v, grid, rates, momentum)
        if loop.order == "end":
            *_, learned = states
            return read_out(loop, learned, wide_q, grid).to(q.dtype)
        if loop.order == "after":
            next(states)
        # each state is read before `states` goes on, because `follow` changes the list that it yielded
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
    """Yield the weights at the start and after each inner batch; it is one list, which the next batch changes.

    Each step on an inner batch, with gradients G_p and momentum factor α, is

        G_p ← G_p / (‖G_p‖ + 1)  (damping)
        M_p ← G_p + α·M_p        (momentum)
        W_p ← W_p ∓ lr·NewtonSchulz(M_p)                     (− for descent, + for ascent; NewtonSchulz with muon)
        W_p ← W_p / (‖W_p‖ + ε) · ‖W_p at the start‖         (norm)

    where every part that `loop` does not have is left out.

    Args:
        weights: the initial weights, each (h, *shape) or (B, h, *shape) with the shapes of `loop.shapes(d)`.
        k, v: keys and values (B, h, N, d), row-major on the (h, w) grid.
        rates: (B, h, N) with `rate="dynamic"`, (B, h, N, number of learning weights) with `rate="per_weight"`.
        momentum: (B, h, N) with `momentum`; α is the mean over the inner batch.

    Yields:
        The weights, each time in the same list: (B, h, *shape) after a step; a weight that does not learn keeps its
        shape.

    Raises:
        ValueError: `rates` or `momentum` missing or given against the loop's options; more batches than tokens.
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
    unscaled = list(W)  # the weights before the norm, from which `copy` goes on
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
                    G = G + momentum[..., first:end].mean(-1)[(..., *(None,) * (G.ndim - 2))] * moving[p]
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
    """Compute the gradients of one inner batch's loss for the weights that learn, each (B, h, *shape)."""
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
    # a convolution also needs the keys around a batch, so it runs on the whole grid with errors of 0 outside the batch
    if model.on_grid:
        e = F.pad(e, (0, 0, first, N - end))
    # `vjp` is lazy: do not backpropagate past the first weight that learns
    backwards = reversed(range(min(loop.learned), len(W)))
    pairs = dict(zip(backwards, model.vjp(W, prepared, e), strict=False))
    found = [pairs[p] for p in loop.learned]
    if loop.rate == "per_weight":
        found = [(rates[..., first:end, i : i + 1] * x, back) for i, (x, back) in enumerate(found)]
    return [model.weight_grad(x, back) for x, back in found]


def read_out(loop: InnerLoop, weights: Weights, q: Tensor, grid: Grid) -> Tensor:
    """Apply the learned model to queries: F(q; W), (B, h, N, d) -> (B, h, N, d)."""
    model = MODELS[loop.model]
    return model.read(weights, model.prepare(weights, q, grid))


def error_signal(loss: Loss, predicted: Tensor | None, v: Tensor, scale: float) -> Tensor:
    """Compute e = ∂L/∂v̂ of one inner batch, shaped as v (B, h, n, d), with r = v̂ − v and the factor s = `scale`.

    | loss      | L                                    | e                        |
    |-----------|--------------------------------------|--------------------------|
    | dot       | −(s/n) Σ ⟨v̂, v⟩                      | −s v / n                 |
    | mse       | (s/2n) Σ ‖r‖²                        | s r / n                  |
    | rmse      | √S, S = (s/n) Σ ‖r‖² of image, head  | s r / (n √S)             |
    | mae       | (s/n) Σ |r|                          | s sign(r) / n            |
    | smooth_l1 | (s/n) Σ r²/2, or |r| − ½ where |r| > 1 | s clamp(r, −1, 1) / n  |

    `predicted` is v̂, or None for the dot product, which does not need it. The values v get outer gradients through e
    alone. So they get none with mae, and with smooth_l1 none where |r| > 1.

    Raises:
        ValueError: no prediction for a loss that needs it.
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
        # where the error is 0 the step is 0, and the derivative of √ would be infinite
        return factor * r / torch.where(squares > 0, squares, 1).sqrt()
    return factor * r
