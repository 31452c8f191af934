"""Multi-scale deformable attention by PyTorch's `grid_sample`, forward and backward: what CPUs run, and any other
device.

A level's map is sampled for all heads at once, each head as a sample of the batch, and its points are then summed with
their weights. The backward pass keeps only the inputs and samples again. On CUDA, `grid_sample` adds up the gradient of
the map in no fixed order. Shape letters as in `reference`, and N = B·M.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype
from .reference import Arguments


def forward(x: Arguments) -> Tensor:
    """out (B,Q,M,C) in value's dtype."""
    B, Q, M = x.locations.shape[:3]
    out_NCQ = None
    for _, map_NChw, grid_NQP2, weight_NQP in _levels(x):
        level_NCQ = (_sampled(map_NChw, grid_NQP2) * weight_NQP[:, None]).sum(-1)
        out_NCQ = level_NCQ if out_NCQ is None else out_NCQ.add_(level_NCQ)
    return out_NCQ.view(B, M, -1, Q).permute(0, 3, 1, 2).to(x.value.dtype, memory_format=torch.contiguous_format)


def backward(dout: Tensor, x: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of value, locations and weights, each in its input's shape and dtype, from dout (B,Q,M,C)."""
    B, Q, M = x.locations.shape[:3]
    dout_NCQ = dout.to(compute_dtype(x.value.dtype)).permute(0, 2, 3, 1).reshape(B * M, -1, Q)
    dvalue, dlocations, dweights = (
        torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in (x.value, x.locations, x.weights)
    )
    for level, (tokens, map_NChw, grid_NQP2, weight_NQP) in enumerate(_levels(x)):
        dweight_NQP = (_sampled(map_NChw, grid_NQP2) * dout_NCQ[..., None]).sum(1)
        dsampled_NCQP = dout_NCQ[..., None] * weight_NQP[:, None]
        dmap_NChw, dgrid_NQP2 = torch.ops.aten.grid_sampler_2d_backward(
            dsampled_NCQP, map_NChw, grid_NQP2, 0, 0, False, [True, True]
        )
        dvalue[:, tokens] = dmap_NChw.view(B, M, -1, dmap_NChw.shape[2] * dmap_NChw.shape[3]).permute(0, 3, 1, 2)
        dlocations[:, :, :, level] = 2 * dgrid_NQP2.view(B, M, Q, -1, 2).transpose(1, 2)
        dweights[:, :, :, level] = dweight_NQP.view(B, M, Q, -1).transpose(1, 2)
    return dvalue, dlocations, dweights


def _levels(x: Arguments) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Level by level, in the compute dtype: its tokens, its map (N,C,h,w), its points (N,Q,P,2) from −1 to 1, their
    weights.
    """
    value, shapes, locations, weights = x
    B, Q, M, _, P = weights.shape
    dtype, first = compute_dtype(value.dtype), 0
    for level, (h, w) in enumerate(zip(shapes[::2], shapes[1::2], strict=True)):
        tokens = slice(first, first + h * w)
        map_NChw = value[:, tokens].to(dtype).permute(0, 2, 3, 1).reshape(B * M, -1, h, w)
        grid_NQP2 = locations[:, :, :, level].to(dtype).transpose(1, 2).reshape(B * M, Q, P, 2) * 2 - 1
        weight_NQP = weights[:, :, :, level].to(dtype).transpose(1, 2).reshape(B * M, Q, P)
        yield tokens, map_NChw, grid_NQP2, weight_NQP
        first += h * w


def _sampled(map_NChw: Tensor, grid_NQP2: Tensor) -> Tensor:
    return F.grid_sample(map_NChw, grid_NQP2, mode="bilinear", padding_mode="zeros", align_corners=False)
