"""The effective receptive field of the central unit (Fig. 8), and what it is like in numbers.

After Luo et al. (2016), for y as Ding et al. (2022, RepLKNet) take it: the contribution of a pixel is |∂y/∂x|, summed over its
colours and averaged over images; y is the sum of what is positive in the last feature map, after a final norm, at its central
position. The plain sum over channels would not do: LayerNorms take the mean over channels away, so that no model uses it.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

SECTORS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A receptive field in numbers.

    Args:
        share_within: share of the contributions within a distance of 0, 1, 2, … pixels of the centre.
        radius_50_px, radius_90_px: distance in pixels within which half, and 90 %, of them lie.
        anisotropy: the share, of those inside the largest circle around the centre, that would have to move along its ring (a patch
            wide) to be spread evenly over the ring's eight sectors: 0 for a radial field, 7/8 for a ray.
        share_ahead: contributions from patches that come after the central one in row-major order, of those from before or after:
            0 for a model that scans forth only, 1/2 for one that sees both sides alike, None where nothing lies outside that patch.
    """

    share_within: list[float]
    radius_50_px: float
    radius_90_px: float
    anisotropy: float
    share_ahead: float | None


def last_features(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Images (B,3,H,W) -> the last feature map (B,C,h,w) of a model of timm's kind, after a final norm, without class tokens."""
    return lambda x: model.forward_intermediates(x, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True)[0]


def centre_of(model: nn.Module, image_size: tuple[int, int]) -> tuple[float, float]:
    """Row and column, in pixels, that the central position of a model's last feature map belongs to.

    Of a model with patches the middle of the patch; one of convolutions with symmetric padding looks at pixel i·stride from i.
    """
    stride = model.feature_info[-1]["reduction"]
    middle = (stride - 1) / 2 if hasattr(model, "patch_embed") else 0.0
    # as many positions as fit when padding lets one more begin
    return tuple((-(-side // stride) // 2) * stride + middle for side in image_size)


def receptive_field(features: Callable[[Tensor], Tensor], images: Tensor, batch_size: int = 32) -> Tensor:
    """Contributions of the pixels to the central position of a feature map.

    Args:
        features: images (B,3,H,W) -> (B,C,h,w), of each image by itself; the position is (h // 2, w // 2).
        images: (N,3,H,W).
        batch_size: images at a time.

    Returns:
        (H,W), fp64.
    """
    total = torch.zeros(images.shape[-2:], dtype=torch.float64, device=images.device)
    for part in images.split(batch_size):
        x = part.detach().clone().requires_grad_()
        y = features(x)
        (gradient,) = torch.autograd.grad(y[:, :, y.shape[2] // 2, y.shape[3] // 2].relu().sum(), x)
        total += gradient.abs().double().sum((0, 1))
    return total / len(images)


def describe(field: Tensor, centre: tuple[float, float], patch: int = 16) -> Shape:
    """The shape of a field (H,W) around a centre (row, column) in pixels, where a patch has so many pixels a side.

    Raises:
        ValueError: a field without any contribution, or with one that is not finite.
    """
    total = field.sum()
    if not total.isfinite() or total <= 0:
        raise ValueError(f"a receptive field whose contributions add up to {float(total)} has no shape")
    height, width = field.shape
    down = torch.arange(height, dtype=field.dtype, device=field.device)[:, None] - centre[0]
    right = torch.arange(width, dtype=field.dtype, device=field.device)[None, :] - centre[1]
    radius = (down.square() + right.square()).sqrt()
    order = radius.flatten().argsort(stable=True)
    radii, shares = radius.flatten()[order], (field.flatten()[order] / total).cumsum(0)

    def within(share: float) -> float:
        return float(radii[min(int(torch.searchsorted(shares, share)), len(radii) - 1)])

    # the last pixel at each whole distance; distance 0 may have none
    last = torch.searchsorted(radii, torch.arange(int(radii[-1]) + 2, dtype=radii.dtype, device=radii.device), right=True)
    share_within = torch.cat((shares.new_zeros(1), shares))[last]
    return Shape(
        share_within=share_within.tolist(),
        radius_50_px=within(0.5),
        radius_90_px=within(0.9),
        anisotropy=_anisotropy(field, down, right, radius, patch),
        share_ahead=_share_ahead(field, down, right, patch / 2),
    )


def _anisotropy(field: Tensor, down: Tensor, right: Tensor, radius: Tensor, width: int) -> float:
    inside = radius <= min(-down[0], down[-1], -right[0, 0], right[0, -1])
    ring = (radius[inside] / width).long()
    # sectors lie around the axes and diagonals, so that a square grid of patches favours as few of them as can be
    turn = torch.atan2(down.expand_as(field), right.expand_as(field))[inside] / (2 * torch.pi)
    place = ring * SECTORS + (turn * SECTORS).round().long() % SECTORS
    rings = int(ring.max()) + 1
    sums, counts = field.new_zeros(rings * SECTORS), field.new_zeros(rings * SECTORS)
    sums.index_add_(0, place, field[inside])
    counts.index_add_(0, place, torch.ones_like(field[inside]))
    sums, counts = sums.view(rings, SECTORS), counts.view(rings, SECTORS)
    even = counts * sums.sum(1, keepdim=True) / counts.sum(1, keepdim=True)
    return float((sums - even).abs().sum() / (2 * sums.sum()))


def _share_ahead(field: Tensor, down: Tensor, right: Tensor, half: float) -> float | None:
    same_row = down.abs() < half
    before = field[(down <= -half) | (same_row & (right <= -half))].sum()
    after = field[(down >= half) | (same_row & (right >= half))].sum()
    return float(after / (before + after)) if before + after > 0 else None
