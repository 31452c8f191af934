"""The effective receptive field of the central unit (Fig. 8), as a map and in numbers.

After Luo et al. (2016), with the y of Ding et al. (2022, RepLKNet): the contribution of a pixel is |∂y/∂x|, summed over
its colours and averaged over images. Here y is the sum of the positive values at the central position of the last
feature map, after the final norm. A plain sum over channels would be meaningless, because LayerNorm removes the mean
over channels.
"""

import dataclasses
from collections.abc import Callable

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

SECTORS = 8  # of a ring, for the anisotropy
# kinds of layers that may reduce the grid of a map
_LAYERS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldShape:
    """A receptive field in numbers.

    Args:
        share_within: share of the contributions within 0, 1, 2, … pixels of the centre.
        radius_50_px, radius_90_px: distance in pixels within which 50 % and 90 % of the contributions lie.
        anisotropy: share of the contributions inside the largest circle around the centre that would have to move along
            their ring (one patch wide) to be evenly distributed over its eight sectors: 0 for a radial field, 7/8 for a
            ray.
        share_ahead: contributions from patches after the central one in row-major order, as a share of those from
            before and after it: 0 for a model with only a forward scan, 1/2 for a symmetric field, None if only the
            central patch contributes.
    """

    share_within: list[float]
    radius_50_px: float
    radius_90_px: float
    anisotropy: float
    share_ahead: float | None


def get_last_features(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from images (B,3,H,W) to a model's last feature map (B,C,h,w).

    The map is normed, and has no class tokens.

    Raises:
        ValueError: timm gives no features of this model.
    """
    if not hasattr(model, "forward_intermediates"):
        raise ValueError("timm gives no feature maps of this model, so it has no receptive field here")
    return lambda x: model.forward_intermediates(x, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True)[0]


def find_centre(model: nn.Module, image_size: tuple[int, int]) -> tuple[float, float]:
    """Find the pixel (row, column) at the centre of the region that a model's central last feature stems from.

    Position i of disjoint patches of side s is centred at pixel i·s + (s − 1) / 2. A layer of kernel k, stride s and
    padding p shifts that by (k − s) / 2 − p positions of its input. A reduction that is no convolution and no pooling,
    such as the merging of a Swin, counts as disjoint patches; those layers may come before it, but not after it.
    """
    leaving: dict[tuple[int, int], nn.Module] = {}  # grid -> the last layer that reduces it

    def note(layer: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
        """Note the layer under the grid (h, w) of its input."""
        leaving[tuple(given[0].shape[-2:])] = layer

    reducing = [each for each in model.modules() if isinstance(each, _LAYERS) and max(to_2tuple(each.stride)) > 1]
    hooks = [layer.register_forward_hook(note) for layer in reducing]
    try:
        with torch.no_grad():
            images = torch.zeros(1, 3, *image_size, device=next(model.parameters()).device)
            grid = get_last_features(model)(images).shape[-2:]
    finally:
        for hook in hooks:
            hook.remove()
    total = model.feature_info[-1]["reduction"]
    centre = []
    for axis, side in enumerate(grid):
        # as if the whole model cut disjoint patches; then the shift of each layer, whose input positions are `pixels` wide
        place, pixels = side // 2 * total + (total - 1) / 2, 1
        # layers beside the path of the features, such as those that reduce keys, come before the one that leaves a grid
        for layer in leaving.values():
            k, s, p = (to_2tuple(each)[axis] for each in (layer.kernel_size, layer.stride, layer.padding))
            place += pixels * ((k - s) / 2 - p)
            pixels *= s
        centre.append(place)
    return tuple(centre)


def compute_receptive_field(features: Callable[[Tensor], Tensor], images: Tensor, batch_size: int = 32) -> Tensor:
    """Compute contributions (H,W) fp64 of the pixels of images (N,3,H,W) to a feature map's position (h // 2, w // 2).

    `features` maps images to (B,C,h,w); images must not affect each other.
    """
    total = torch.zeros(images.shape[-2:], dtype=torch.float64, device=images.device)
    for part in images.split(batch_size):
        x = part.detach().clone().requires_grad_()
        y = features(x)
        (gradient,) = torch.autograd.grad(y[:, :, y.shape[2] // 2, y.shape[3] // 2].relu().sum(), x)
        total += gradient.abs().double().sum((0, 1))
    return total / len(images)


def describe_field(field: Tensor, centre: tuple[float, float], patch: int = 16) -> FieldShape:
    """Summarise a field (H,W) around a centre (row, column), for patches of `patch` x `patch` pixels.

    Raises:
        ValueError: the contributions are all zero, or not finite.
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
        """Return the distance in pixels within which this share of the contributions lies."""
        return float(radii[min(int(torch.searchsorted(shares, share)), len(radii) - 1)])

    # number of pixels within each whole distance, which may be 0
    last = torch.searchsorted(
        radii, torch.arange(int(radii[-1]) + 2, dtype=radii.dtype, device=radii.device), right=True
    )
    share_within = torch.cat((shares.new_zeros(1), shares))[last]
    return FieldShape(
        share_within=share_within.tolist(),
        radius_50_px=within(0.5),
        radius_90_px=within(0.9),
        anisotropy=_anisotropy(field, down, right, radius, patch),
        share_ahead=_share_ahead(field, down, right, patch / 2),
    )


def _anisotropy(field: Tensor, down: Tensor, right: Tensor, radius: Tensor, width: int) -> float:
    """Compute `FieldShape.anisotropy` of a field (H,W).

    Distances of pixels to the centre are `down` (H,1), `right` (1,W) and `radius` (H,W); `width` is that of a ring.
    """
    inside = radius <= min(-down[0], down[-1], -right[0, 0], right[0, -1])
    ring = (radius[inside] / width).long()
    # sectors centred on axes and diagonals treat a square grid of patches most evenly
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
    """Compute `FieldShape.share_ahead` of a field (H,W); `half` is half of a patch's side.

    Distances of pixels to the centre are `down` (H,1) and `right` (1,W).
    """
    same_row = down.abs() < half
    before = field[(down <= -half) | (same_row & (right <= -half))].sum()
    after = field[(down >= half) | (same_row & (right >= half))].sum()
    return float(after / (before + after)) if before + after > 0 else None
