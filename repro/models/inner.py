"""Inner learners: small models that are trained on the keys and values of one image, and then read by its queries.

A learner has a model F(x; W_1 .. W_P) with a learned start, a loss of its output v̂ = F(k) against v, and a schedule.
Only the error signal e = ∂L/∂v̂ depends on the loss, and only the gradients G_p = Σ_n (∂v̂_n/∂W_p)ᵀ e_n on the model.
`error_signal` has the first in closed form for five losses, `MODELS` the second for twelve models, and `adapt` is the
loop over them. Autograd differentiates the closed forms, so the outer gradient is that of all inner steps; none of it
needs `create_graph`.

Shape suffixes: B images, h heads, N tokens, d head dimension, n tokens of an inner batch.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from ..core.errors import did_you_mean
from .backbone import Grid

Loss = Literal["dot", "mse", "rmse", "mae", "smooth_l1"]
Direction = Literal["descent", "ascent"]
Rate = Literal["fixed", "dynamic"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
Weights = Sequence[Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerLoop:
    """How an inner learner learns.

    Args:
        model: a name of `MODELS`.
        width: hidden units of a model with hidden layers, as a multiple of d.
        depth: linear layers of an MLP.
        loss: a name of `LOSSES`.
        lr: the step on each weight.
        epochs: passes over the tokens.
        batches: inner batches of an epoch, in token order; their sizes differ by at most one token.
        damping: whether a gradient G is divided by ‖G‖ + 1, with one norm per output unit.
        direction: down the loss or up.
        only: places of the weights that learn; None for all.
        scale: factor s of the loss; None for d^-½.
        rate: `dynamic` where the loss of a token is weighted by a rate, which the caller computes.

    A name that is not known, or an option without effect, is a ValueError.
    """

    model: str = "mlp"
    width: int = 1
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

    def __post_init__(self) -> None:
        choices = {"model": MODELS, "loss": LOSSES, "direction": get_args(Direction), "rate": get_args(Rate)}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"inner {name} {value!r}: not known{did_you_mean(value, known)}")
        for name in ("width", "depth", "epochs", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"inner {name} {getattr(self, name)}: expected 1 or more")
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

    def split(self, tokens: int) -> list[tuple[int, int]]:
        """(first token, token after the last) of each inner batch; a ValueError where a batch would be empty."""
        if self.batches > tokens:
            raise ValueError(f"inner batches {self.batches}: there are {tokens} tokens")
        ends = [tokens * i // self.batches for i in range(self.batches + 1)]
        return list(itertools.pairwise(ends))

    def count_macs(self, tokens: int, head_dim: int) -> int:
        """Multiply-adds of learning and read-out for one head: matrix products and convolutions, the latter's borders
        included.

        The prediction v̂ is formed only for losses that need it.
        """
        model, sizes = MODELS[self.model], [math.prod(shape) for shape in self.shapes(head_dim)]
        if model.on_grid:  # a kernel (o, c, 3, 3) meets each position once
            prepare, read, back = 0, sum(sizes), 0
        else:
            prepare = sum(sizes[:-1]) if model.ends_linear else sum(sizes)
            read, back = sum(sizes) - prepare, (0 if model.first_back is None else sum(sizes[model.first_back :]))
        predict = read if self.loss != "dot" else 0
        return tokens * (self.epochs * (prepare + predict + sum(sizes) + back) + prepare + read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerModel:
    """A model F(x; W) as functions of its weights W, each (h, *shape) or (B, h, *shape), and tokens x (B, h, N, d).

    Args:
        shapes: (loop, d) -> the shape of each weight of one head.
        prepare: (W, x, grid) -> what `read` and `pull` share: the activations before the last linear layer.
        read: (W, prepared) -> F(x), shape of x.
        pull: (W, prepared, e) -> the gradient of Σ ⟨e, F(x)⟩ with respect to each weight, e like F(x).
        norm_axes: the axes over which the damping takes the norm of a gradient; one norm remains for each output unit.
        on_grid: whether F mixes tokens that are neighbours on the (h, w) grid.
        ends_linear: whether the last weight is a linear layer, whose product only `read` needs.
        first_back: the first of the weights through which `pull` passes e back; None where there are none.
        has_width, has_depth: whether `InnerLoop.width` and `depth` have a meaning.
    """

    shapes: Callable[[InnerLoop, int], list[tuple[int, ...]]]
    prepare: Callable[[Weights, Tensor, Grid], tuple]
    read: Callable[[Weights, tuple], Tensor]
    pull: Callable[[Weights, tuple, Tensor], list[Tensor]]
    norm_axes: tuple[int, ...] = (-2,)
    on_grid: bool = False
    ends_linear: bool = True
    first_back: int | None = None
    has_width: bool = False
    has_depth: bool = False


def learn(
    loop: InnerLoop, weights: Weights, q: Tensor, k: Tensor, v: Tensor, grid: Grid, rates: Tensor | None = None
) -> Tensor:
    """Learn k -> v from the start `weights`, then read out q: see `adapt` and `read_out`.

    q, k, v (B, h, N, d) -> (B, h, N, d) in the dtype of q. The computation is in fp32 or more, also under autocast: a
    step is small beside a weight.
    """
    with full_precision(q.device.type):
        dtype = torch.promote_types(q.dtype, torch.float32)
        wide = [each.to(dtype) for each in (q, k, v)]
        start = [weight.to(dtype) for weight in weights]
        learned = adapt(loop, start, *wide[1:], grid, None if rates is None else rates.to(dtype))
        return read_out(loop, learned, wide[0], grid).to(q.dtype)


def adapt(
    loop: InnerLoop, weights: Weights, k: Tensor, v: Tensor, grid: Grid, rates: Tensor | None = None
) -> list[Tensor]:
    """The weights after inner training: for each inner batch, W_p ← W_p − lr·G_p, or plus where the direction is
    ascent.

    Args:
        loop: how.
        weights: the start, each (h, *shape) or (B, h, *shape), of `loop.shapes(d)`.
        k, v: keys and values (B, h, N, d), row-major on the (h, w) grid.
        rates: (B, h, N), with `rate="dynamic"`.

    Returns:
        The weights (B, h, *shape); one that does not learn keeps its shape.

    Raises:
        ValueError: `rates` without `rate="dynamic"` or the other way round, or more batches than tokens.
    """
    if (rates is not None) != (loop.rate == "dynamic"):
        raise ValueError(f"inner rate {loop.rate}: token rates are {'missing' if rates is None else 'given'}")
    model, (N, d), W = MODELS[loop.model], k.shape[-2:], list(weights)
    scale = d**-0.5 if loop.scale is None else loop.scale
    step = loop.lr if loop.direction == "ascent" else -loop.lr
    for first, end in loop.split(N) * loop.epochs:
        prepared = model.prepare(W, k if model.on_grid else k[..., first:end, :], grid)
        predicted = None if loop.loss == "dot" else model.read(W, prepared)
        if model.on_grid and predicted is not None:
            predicted = predicted[..., first:end, :]
        e = error_signal(loop.loss, predicted, v[..., first:end, :], scale)
        if rates is not None:
            e = e * rates[..., first:end, None]
        if model.on_grid:  # the windows of a batch reach keys of other batches; their own errors do not count
            e = F.pad(e, (0, 0, first, N - end))
        gradients = model.pull(W, prepared, e)
        learning = range(len(W)) if loop.only is None else loop.only
        for p in learning:
            G = gradients[p]
            if loop.damping:
                G = G / (torch.linalg.vector_norm(G, dim=model.norm_axes, keepdim=True) + 1)
            W[p] = W[p] + step * G
    return W


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


def _silu_slope(z: Tensor) -> Tensor:
    """SiLU'(z) = σ(z)·(1 + z·(1 − σ(z)))."""
    sigmoid = z.sigmoid()
    return sigmoid * (1 + z * (1 - sigmoid))


def _square(count: int) -> Callable[[InnerLoop, int], list[tuple[int, ...]]]:
    """So many d x d matrices."""
    return lambda loop, d: [(d, d)] * count


def _mlp_shapes(loop: InnerLoop, d: int) -> list[tuple[int, ...]]:
    sides = [d, *[loop.width * d] * (loop.depth - 1), d]
    return list(itertools.pairwise(sides))


def _mlp_prepare(W: Weights, x: Tensor, grid: Grid) -> tuple:
    """SiLU between the layers and none at the end -> (inputs of every layer, pre-activations of all but the last)."""
    inputs, pre = [x], []
    for weight in W[:-1]:
        pre.append(inputs[-1] @ weight)
        inputs.append(F.silu(pre[-1]))
    return inputs, pre


def _mlp_pull(W: Weights, prepared: tuple, e: Tensor) -> list[Tensor]:
    inputs, pre = prepared
    gradients = [inputs[-1].mT @ e]
    for weight, x, z in zip(reversed(W[1:]), reversed(inputs[:-1]), reversed(pre), strict=True):
        e = (e @ weight.mT) * _silu_slope(z)
        gradients.append(x.mT @ e)
    return gradients[::-1]


def _add_identity(W: Weights) -> list[Tensor]:
    """The weights with W_P + I in place of the last one."""
    return [*W[:-1], W[-1] + torch.eye(W[-1].shape[-1], dtype=W[-1].dtype, device=W[-1].device)]


def _swiglu_prepare(W: Weights, x: Tensor, grid: Grid) -> tuple:
    z1, z2 = x @ W[0], x @ W[1]
    gate = F.silu(z1)
    return x, z1, z2, gate, gate * z2


def _swiglu_pull(W: Weights, prepared: tuple, e: Tensor) -> list[Tensor]:
    x, z1, z2, gate, a = prepared
    back = e @ W[2].mT
    return [x.mT @ (back * z2 * _silu_slope(z1)), x.mT @ (back * gate), a.mT @ e]


def _glu_prepare(W: Weights, x: Tensor, grid: Grid) -> tuple:
    z2 = x @ W[1]
    return x, x @ W[0], z2, F.silu(z2)


def _glu_pull(W: Weights, prepared: tuple, e: Tensor) -> list[Tensor]:
    x, z1, z2, gate = prepared
    return [x.mT @ (e * gate), x.mT @ (e * z1 * _silu_slope(z2))]


def _conv_prepare(W: Weights, x: Tensor, grid: Grid) -> tuple:
    """One image (1, B·h·d, h, w), in which every image and head has groups of its own."""
    B, heads, _, d = x.shape
    return x.mT.reshape(1, B * heads * d, *grid), x.shape


def _conv_read(W: Weights, prepared: tuple) -> Tensor:
    image, (B, heads, N, d) = prepared
    kernel = W[0].expand(B, *W[0].shape[-5:]).reshape(B * heads * d, -1, 3, 3)
    out = F.conv2d(image, kernel, padding=1, groups=image.shape[1] // kernel.shape[1])
    return out.reshape(B, heads, d, N).mT


def _conv_pull(W: Weights, prepared: tuple, e: Tensor) -> list[Tensor]:
    """G[o, i, δ] = Σ_p e[p, o]·x[p + δ, i] over the positions p of a grid with zeros outside."""
    image, (B, heads, _, d) = prepared
    per_group = W[0].shape[-3]
    groups = image.shape[1] // per_group
    gradient = conv2d_weight(
        image, (B * heads * d, per_group, 3, 3), e.mT.reshape(image.shape), padding=1, groups=groups
    )
    return [gradient.reshape(B, heads, d, per_group, 3, 3)]


_MLP: dict[str, Any] = {"shapes": _mlp_shapes, "prepare": _mlp_prepare, "first_back": 1, "has_depth": True}
_CONV: dict[str, Any] = {
    "prepare": _conv_prepare,
    "read": _conv_read,
    "pull": _conv_pull,
    "norm_axes": (-3, -2, -1),
    "on_grid": True,
}
MODELS: dict[str, InnerModel] = {
    "fc": InnerModel(  # x W
        shapes=_square(1),
        prepare=lambda W, x, grid: (x,),
        read=lambda W, prepared: prepared[0] @ W[0],
        pull=lambda W, prepared, e: [prepared[0].mT @ e],
    ),
    "silu_fc": InnerModel(  # SiLU(x W)
        shapes=_square(1),
        prepare=lambda W, x, grid: (x, x @ W[0]),
        read=lambda W, prepared: F.silu(prepared[1]),
        pull=lambda W, prepared, e: [prepared[0].mT @ (e * _silu_slope(prepared[1]))],
        ends_linear=False,
    ),
    "glu": InnerModel(  # (x W1) ⊙ SiLU(x W2)
        shapes=_square(2),
        prepare=_glu_prepare,
        read=lambda W, prepared: prepared[1] * prepared[3],
        pull=_glu_pull,
        ends_linear=False,
    ),
    "mlp": InnerModel(read=lambda W, prepared: prepared[0][-1] @ W[-1], pull=_mlp_pull, has_width=True, **_MLP),
    "mlp_residual": InnerModel(  # an MLP plus x
        read=lambda W, prepared: prepared[0][-1] @ W[-1] + prepared[0][0], pull=_mlp_pull, has_width=True, **_MLP
    ),
    "mlp_identity": InnerModel(  # an MLP whose last layer is W + I
        read=lambda W, prepared: prepared[0][-1] @ _add_identity(W)[-1],
        pull=lambda W, prepared, e: _mlp_pull(_add_identity(W), prepared, e),
        **_MLP,
    ),
    "swiglu": InnerModel(  # (SiLU(x W1) ⊙ (x W2)) W3
        shapes=lambda loop, d: [(d, loop.width * d), (d, loop.width * d), (loop.width * d, d)],
        prepare=_swiglu_prepare,
        read=lambda W, prepared: prepared[4] @ W[2],
        pull=_swiglu_pull,
        first_back=2,
        has_width=True,
    ),
    # 3x3 convolutions on the grid with zeros outside, all channels of a head to all, and each to itself
    "conv": InnerModel(shapes=lambda loop, d: [(d, d, 3, 3)], **_CONV),
    "dwconv": InnerModel(shapes=lambda loop, d: [(d, 1, 3, 3)], **_CONV),
}
