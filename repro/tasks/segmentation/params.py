"""Parameters of a segmenter's training. Imports nothing heavy: the stages need them for `--help`."""

import dataclasses
from typing import Annotated

from ...core.config import Each, bounded
from ...data.settings import check_channels, check_pair
from ..dense.base import DenseParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class UperNetParams:
    """UperNet and its losses; the defaults are those of Vision-RWKV, ViT-Adapter and Swin.

    Args:
        channels: width of the UPerHead.
        aux_channels: width of the auxiliary FCN head, which is used only in training.
        pool_scales: sides of the maps of the pyramid pooling.
        dropout: probability of dropping a channel before both classifiers.
        aux_weight: weight of the auxiliary loss.
        class_weights: one weight for each class in both losses; null: equal weights.
    """

    channels: int = bounded(512, ge=1)
    aux_channels: int = bounded(256, ge=1)
    pool_scales: tuple[Annotated[int, Each(ge=1)], ...] = (1, 2, 3, 6)
    dropout: float = bounded(0.1, ge=0, le=1)
    aux_weight: float = bounded(0.4, ge=0)
    class_weights: tuple[Annotated[float, Each(gt=0)], ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentationTransformSettings:
    """Resizing and augmentation of images and label maps, and the sliding windows of evaluation.

    Args:
        scale: [long, short]; an image is resized, keeping its aspect ratio, to the largest size within these sides.
        ratio: [smallest, largest]; in training `scale` is first multiplied by a number drawn from this range.
        crop_size: side of the random training crop and of the windows of evaluation, in pixels.
        stride: distance from one window to the next, in pixels; null for the whole image at once, as in Swin's recipe.
        cat_max_ratio: a crop is drawn again, at most ten times, while one class has this share of its labelled pixels.
        hflip: probability of a horizontal flip; 0 where left and right differ, as for digits.
        photometric: whether to change brightness, contrast, saturation and hue at random, as mmsegmentation's recipes
            do.
        mean, std: per channel (red, green, blue), of values in [0, 1].
    """

    scale: tuple[Annotated[int, Each(ge=1)], ...] = (2048, 512)
    ratio: tuple[Annotated[float, Each(gt=0)], ...] = (0.5, 2.0)
    crop_size: int = bounded(512, ge=32)
    stride: int | None = bounded(341, ge=1)
    cat_max_ratio: float = bounded(0.75, gt=0, le=1)
    hflip: float = bounded(0.5, ge=0, le=1)
    photometric: bool = True
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[Annotated[float, Each(gt=0)], ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if len(self.scale) != 2 or self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: expected [long, short], got {list(self.scale)}")
        check_pair("ratio", self.ratio)
        if self.stride is not None and self.stride > self.crop_size:
            raise ValueError(f"stride: {self.stride} leaves gaps between windows of crop_size {self.crop_size}")
        check_channels("mean", self.mean)
        check_channels("std", self.std)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentParams(DenseParams):
    """A cell of `segment:`.

    Args:
        upernet: sizes and losses of the heads.
        transform: resizing, augmentation, and the windows of evaluation.
    """

    upernet: UperNetParams = UperNetParams()
    transform: SegmentationTransformSettings
