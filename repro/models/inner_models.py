"""Inner models with closed-form outputs and weight gradients; `repro.models.inner` has the learning loop.

Shape suffixes: B images, h heads, N tokens, d head dimension.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from .image_model import Grid

Weights = Sequence[Tensor]
_Pair = tuple[Any, Tensor]  # see `InnerModel.vjp`


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerModel:
    """An inner model F(x; W) as functions of its weights W, each (h, *shape) or (B, h, *shape), and x (B, h, N, d).

    Args:
        shapes: maps (d, width, depth), the last two those of `InnerLoop`, to the shape of each weight of one head.
        prepare: maps (W, x, grid) to the activations that `read` and `vjp` share. Those of `fc` and `swiglu` must end
            with the input of the last weight, which `fast_weights.learn_in_parallel` takes for the features.
        read: maps (W, prepared) to F(x), of the shape of x.
        vjp: the vjp: maps (W, prepared, e), with e of the shape of F(x), to one pair (x_p, e_p) per weight, the last
            weight first. x_p is the weight's input, and e_p the error at the weight's output.
        weight_grad: the weight gradient: maps (x_p, e_p) to that of Σ ⟨e, F(x)⟩, for a matrix Σ_n x_pᵀ e_p.
        norm_axes: axes of the norms of weights and gradients, all but that of the output units.
        on_grid: whether F mixes neighbouring tokens on the (h, w) grid.
        ends_linear: whether the last weight is a linear layer, so that only `read` needs its product.
        first_back: index of the first weight through which `vjp` backpropagates e; inf if there is none.
            `InnerLoop.count_macs` counts these products.
        has_width, has_depth: whether the model has the options `InnerLoop.width` and `depth`.
    """

    shapes: Callable[[int, float, int], list[tuple[int, ...]]]
    prepare: Callable[[Weights, Tensor, Grid], tuple]
    read: Callable[[Weights, tuple], Tensor]
    vjp: Callable[[Weights, tuple, Tensor], Iterable[_Pair]]
    weight_grad: Callable[[Any, Tensor], Tensor] = lambda x, e: x.mT @ e
    norm_axes: tuple[int, ...] = (-2,)
    on_grid: bool = False
    ends_linear: bool = True
    first_back: float = math.inf
    has_width: bool = False
    has_depth: bool = False


def _silu_slope(z: Tensor) -> Tensor:
    """Compute SiLU'(z) = σ(z)·(1 + z·(1 − σ(z)))."""
    sigmoid = z.sigmoid()
    return sigmoid * (1 + z * (1 - sigmoid))


def _mlp_shapes(d: int, width: float, depth: int) -> list[tuple[int, ...]]:
    """Return the shapes of `depth` layers with `width`·d hidden units between them."""
    return list(itertools.pairwise([d, *[int(width * d)] * (depth - 1), d]))


def _mlp_prepare(W: Weights, x: Tensor, grid: Grid) -> tuple:
    """Return (inputs of every layer, pre-activations of all but the last); SiLU follows every layer but the last.

    The weights of the last layer are not used, so `mlp_identity` can add I to them later.
    """
    inputs, pre = [x], []
    for weight in W[:-1]:
        pre.append(inputs[-1] @ weight)
        inputs.append(F.silu(pre[-1]))
    return inputs, pre


def _mlp_vjp(W: Weights, prepared: tuple, e: Tensor) -> Iterator[_Pair]:
    """Yield the pairs from the last layer to the first, so that a caller who stops early saves the products."""
    inputs, pre = prepared
    yield inputs[-1], e
    for weight, x, z in zip(reversed(W[1:]), reversed(inputs[:-1]), reversed(pre), strict=True):
        e = (e @ weight.mT) * _silu_slope(z)
        yield x, e


def _add_identity(W: Weights) -> list[Tensor]:
    """Return the weights with W_P + I in place of the last one."""
    return [*W[:-1], W[-1] + torch.eye(W[-1].shape[-1], dtype=W[-1].dtype, device=W[-1].device)]


def _swiglu_prepare(W: Weights, x: Tensor, grid: Grid) -> tuple:
    """Return x, both pre-activations, the gate, and the hidden units, which W3 reads."""
    z1, z2 = x @ W[0], x @ W[1]
    gate = F.silu(z1)
    return x, z1, z2, gate, gate * z2


def _swiglu_shapes(d: int, width: float, depth: int) -> list[tuple[int, ...]]:
    """Return the shapes of W1, W2 and W3 for `width`·d hidden units."""
    hidden = int(width * d)
    return [(d, hidden), (d, hidden), (hidden, d)]


def _swiglu_vjp(W: Weights, prepared: tuple, e: Tensor) -> Iterator[_Pair]:
    """Yield the pairs of W3, W2 and W1; where W3 alone learns, nobody asks for the others."""
    x, z1, z2, gate, a = prepared
    yield a, e
    back = e @ W[2].mT
    yield x, back * gate
    yield x, back * z2 * _silu_slope(z1)


def _glu_prepare(W: Weights, x: Tensor, grid: Grid) -> tuple:
    """Return x, both products, and the gate SiLU(x W2)."""
    z2 = x @ W[1]
    return x, x @ W[0], z2, F.silu(z2)


def _glu_vjp(W: Weights, prepared: tuple, e: Tensor) -> Iterator[_Pair]:
    """Yield the pairs of W2 and W1."""
    x, z1, z2, gate = prepared
    yield x, e * z1 * _silu_slope(z2)
    yield x, e * gate


def _conv_prepare(W: Weights, x: Tensor, grid: Grid) -> tuple:
    """Fold batch and heads into the channels, (1, B·h·d, h, w): one grouped convolution serves all their kernels."""
    B, heads, _, d = x.shape
    return x.mT.reshape(1, B * heads * d, *grid), x.shape


def _conv_read(W: Weights, prepared: tuple) -> Tensor:
    """Convolve what `_conv_prepare` returned: (B, h, N, d); a kernel that all images share is repeated for each."""
    image, (B, heads, N, d) = prepared
    kernel = W[0].expand(B, *W[0].shape[-5:]).reshape(B * heads * d, -1, 3, 3)
    out = F.conv2d(image, kernel, padding=1, groups=image.shape[1] // kernel.shape[1])
    return out.reshape(B, heads, d, N).mT


def _conv_weight_grad(x: tuple, e: Tensor) -> Tensor:
    """Compute G[o, i, δ] = Σ_p e[p, o]·x[p + δ, i] over the positions p of a zero-padded grid.

    Args:
        x: what `_conv_prepare` returned, and the inputs of a group.
        e: (B, h, N, d).
    """
    (image, (B, heads, _, d)), per_group = x
    gradient = conv2d_weight(
        image, (B * heads * d, per_group, 3, 3), e.mT.reshape(image.shape), padding=1, groups=B * heads * d // per_group
    )
    return gradient.reshape(B, heads, d, per_group, 3, 3)


_MLP: dict[str, Any] = {"shapes": _mlp_shapes, "prepare": _mlp_prepare, "first_back": 1, "has_depth": True}
_CONV: dict[str, Any] = {
    "prepare": _conv_prepare,
    "read": _conv_read,
    "vjp": lambda W, prepared, e: [((prepared, W[0].shape[-3]), e)],
    "weight_grad": _conv_weight_grad,
    "norm_axes": (-3, -2, -1),
    "on_grid": True,
}
MODELS: dict[str, InnerModel] = {
    "fc": InnerModel(  # x W
        shapes=lambda d, width, depth: [(d, d)],
        prepare=lambda W, x, grid: (x,),
        read=lambda W, prepared: prepared[0] @ W[0],
        vjp=lambda W, prepared, e: [(prepared[0], e)],
    ),
    "silu_fc": InnerModel(  # SiLU(x W)
        shapes=lambda d, width, depth: [(d, d)],
        prepare=lambda W, x, grid: (x, x @ W[0]),
        read=lambda W, prepared: F.silu(prepared[1]),
        vjp=lambda W, prepared, e: [(prepared[0], e * _silu_slope(prepared[1]))],
        ends_linear=False,
    ),
    "glu": InnerModel(  # (x W1) ⊙ SiLU(x W2)
        shapes=lambda d, width, depth: [(d, d)] * 2,
        prepare=_glu_prepare,
        read=lambda W, prepared: prepared[1] * prepared[3],
        vjp=_glu_vjp,
        ends_linear=False,
    ),
    "mlp": InnerModel(read=lambda W, prepared: prepared[0][-1] @ W[-1], vjp=_mlp_vjp, has_width=True, **_MLP),
    "mlp_residual": InnerModel(  # an MLP plus x
        read=lambda W, prepared: prepared[0][-1] @ W[-1] + prepared[0][0], vjp=_mlp_vjp, has_width=True, **_MLP
    ),
    "mlp_identity": InnerModel(  # an MLP whose last layer is W + I
        read=lambda W, prepared: prepared[0][-1] @ _add_identity(W)[-1],
        vjp=lambda W, prepared, e: _mlp_vjp(_add_identity(W), prepared, e),
        **_MLP,
    ),
    "swiglu": InnerModel(  # (SiLU(x W1) ⊙ (x W2)) W3
        shapes=_swiglu_shapes,
        prepare=_swiglu_prepare,
        read=lambda W, prepared: prepared[4] @ W[2],
        vjp=_swiglu_vjp,
        first_back=2,
        has_width=True,
    ),
    # zero-padded 3x3 convolutions on the grid: dense within a head, and depth-wise
    "conv": InnerModel(shapes=lambda d, width, depth: [(d, d, 3, 3)], **_CONV),
    "dwconv": InnerModel(shapes=lambda d, width, depth: [(d, 1, 3, 3)], **_CONV),
}
