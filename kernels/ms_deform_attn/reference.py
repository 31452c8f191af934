"""Arguments of multi-scale deformable attention, and its equation, against which every backend is tested.

A loop over levels, points and the four neighbours of a point. Plain PyTorch operations, differentiable by autograd, in
fp64 for fp64 inputs and in fp32 otherwise.

Shape letters: B images, S tokens of all levels, Q queries, M heads, L levels, P points, C channels of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import compute_dtype


class Arguments(NamedTuple):
    """Arguments of every backend.

    value: (B,S,M,C). shapes: h, w, h, w, … of the levels. locations: (B,Q,M,L,P,2). weights: (B,Q,M,L,P).

    Backends take them by their places, and return the gradients of the tensors in this order.
    """

    value: Tensor
    shapes: Sequence[int]
    locations: Tensor
    weights: Tensor


def ms_deform_attn_formula(
    value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor
) -> Tensor:
    """Compute the weighted sum of bilinear samples, by head, point by point.

        out_q = Σ_l Σ_p weight · Σ over the neighbours (i, j) of (x, y) of (1 − |x − j|) (1 − |y − i|) value_ij

    (x, y) = location · (w, h) − 0.5 are the point's pixel coordinates on level l, a map of h rows and w columns. Its
    neighbours are in the rows ⌊y⌋, ⌊y⌋ + 1 and the columns ⌊x⌋, ⌊x⌋ + 1, as far as these exist: outside the map
    everything is zero. On a pixel, the derivative is the one from the right.

    Args:
        value: (B,S,M,C), any floating dtype, the levels' maps row by row, one after the other.
        shapes: (h, w) of each level.
        locations: (B,Q,M,L,P,2), (x, y) in [0,1] from the map's upper left corner to its lower right one.
        weights: (B,Q,M,L,P).

    Returns:
        (B,Q,M,C) in value's dtype.
    """
    dtype = compute_dtype(value.dtype)
    v, locations, weights = (x.to(dtype) for x in (value, locations, weights))
    image = torch.arange(v.shape[0], device=v.device)[:, None, None]
    head = torch.arange(v.shape[2], device=v.device)
    out, first = v.new_zeros(*locations.shape[:3], v.shape[3]), 0
    for level, (h, w) in enumerate(shapes):
        for point in range(weights.shape[-1]):
            x = locations[:, :, :, level, point, 0] * w - 0.5
            y = locations[:, :, :, level, point, 1] * h - 0.5
            left, top = x.detach().floor(), y.detach().floor()
            for j, share_x in ((left, 1 - (x - left)), (left + 1, x - left)):
                for i, share_y in ((top, 1 - (y - top)), (top + 1, y - top)):
                    inside = (i >= 0) & (i < h) & (j >= 0) & (j < w)
                    token = first + torch.where(inside, i * w + j, 0).long()
                    share = weights[:, :, :, level, point] * share_x * share_y
                    out = out + share[..., None] * torch.where(inside[..., None], v[image, token, head], 0)
        first += h * w
    return out.to(value.dtype)
