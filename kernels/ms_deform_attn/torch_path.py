"""Multi-scale deformable attention by PyTorch's `grid_sample`, for CPUs and any other device.

A level's map is sampled for all heads at once, each head as a sample of the batch; its points are then summed with
their weights. The backward pass keeps only the inputs and samples again, under autograd. On CUDA, `grid_sample` adds up
the gradient of the map in no fixed order. Shape letters as in `reference`, and N = B·M.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import compute_dtype
from .reference import Arguments


def forward(x: Arguments) -> Tensor:
    """Return out (B,Q,M,C) in value's dtype, contiguous, as the fake kernel of `CustomOp` promises."""
    B, Q, M = x.locations.shape[:3]
    out_NCQ = None
    for map_NChw, grid_NQP2, weight_NQP in _levels(x):
        sampled_NCQP = F.grid_sample(map_NChw, grid_NQP2, mode="bilinear", padding_mode="zeros", align_corners=False)
        level_NCQ = (sampled_NCQP * weight_NQP[:, None]).sum(-1)
        out_NCQ = level_NCQ if out_NCQ is None else out_NCQ.add_(level_NCQ)
    return out_NCQ.view(B, M, -1, Q).permute(0, 3, 1, 2).to(x.value.dtype, memory_format=torch.contiguous_format)


def _levels(x: Arguments) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield of each level, in the compute dtype: its map (N,C,h,w), points (N,Q,P,2) from −1 to 1, weights (N,Q,P)."""
    value, shapes, locations, weights = x
    B, Q, M, _, P = weights.shape
    dtype, first = compute_dtype(value.dtype), 0
    for level, (h, w) in enumerate(zip(shapes[::2], shapes[1::2], strict=True)):
        map_NChw = value[:, first : first + h * w].to(dtype).permute(0, 2, 3, 1).reshape(B * M, -1, h, w)
        grid_NQP2 = locations[:, :, :, level].to(dtype).transpose(1, 2).reshape(B * M, Q, P, 2) * 2 - 1
        weight_NQP = weights[:, :, :, level].to(dtype).transpose(1, 2).reshape(B * M, Q, P)
        yield map_NChw, grid_NQP2, weight_NQP
        first += h * w
