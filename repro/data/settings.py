"""The parts of params.yaml that concern data: what a set holds, how an embedded one is drawn, transforms.

Imports nothing heavy: stage modules need these dataclasses before they know whether they will run.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from ..core.config import Each, bounded

_RAND_AUGMENT = re.compile(r"rand(-(m\d+|n\d+|p\d+(\.\d+)?|mstd(\d+(\.\d+)?|inf)|mmax\d+|inc[01]|t(weights|3a|3aw)))+")


def check_pair(name: str, pair: tuple[float, ...], wanted: str = "[smallest, largest]") -> None:
    """Raise ValueError where these are not two ascending numbers."""
    if len(pair) != 2 or pair[0] > pair[1]:
        raise ValueError(f"{name}: expected {wanted}, got {list(pair)}")


def check_channels(name: str, values: tuple[float, ...]) -> None:
    """Raise ValueError where there is not one number for each channel."""
    if len(values) != 3:
        raise ValueError(f"{name}: expected three numbers (red, green, blue), got {list(values)}")


def _check_fractions(tune: float, test: float) -> None:
    if tune + test > 0.9:
        raise ValueError(
            f"test_fraction: {test:g} and tune_fraction {tune:g} leave less than a tenth for training; make them smaller"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformSettings:
    """How an image becomes a tensor; the names are those of timm's `create_transform`, which does the work."""

    image_size: int = bounded(ge=1)  # side of the square input in pixels
    # area fraction of the random training crop, [smallest, largest]
    scale: tuple[Annotated[float, Each(gt=0, le=1)], ...] = (0.08, 1.0)
    ratio: tuple[Annotated[float, Each(gt=0)], ...] = (3 / 4, 4 / 3)  # its aspect ratio, [smallest, largest]
    # in place of the crop by `scale` and `ratio`: the short side is resized to image_size, every side gets this many
    # black pixels, and a square of image_size is cut out anywhere; null: none of this
    crop_padding: int | None = bounded(None, ge=0)
    # probability of a horizontal flip; 0 where left and right differ, as for digits
    hflip: float = bounded(0.5, ge=0, le=1)
    # strength; null switches it off. timm leaves it out where `auto_augment` is set
    color_jitter: float | None = bounded(None, ge=0)
    auto_augment: str | None = None  # a RandAugment string such as `rand-m9-mstd0.5-inc1`; null switches it off
    re_prob: float = bounded(0.0, ge=0, le=1)  # probability of random erasing (mode `pixel`, after normalisation)
    interpolation: Literal["bicubic", "bilinear", "nearest"] = "bicubic"  # the filter of every resize
    # evaluation resizes the short side to image_size / crop_pct, and crops the centre
    crop_pct: float = bounded(0.875, gt=0, le=1)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # of each channel (red, green, blue), for values in [0, 1]
    std: tuple[Annotated[float, Each(gt=0)], ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        check_pair("scale", self.scale)
        check_pair("ratio", self.ratio)
        for name in ("scale", "ratio") if self.crop_padding is not None else ():
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"crop_padding: takes the place of the crop by {name}; leave one of the two out")
        check_channels("mean", self.mean)
        check_channels("std", self.std)
        if self.auto_augment is not None and not _RAND_AUGMENT.fullmatch(self.auto_augment):
            raise ValueError(
                f"auto_augment: {self.auto_augment!r} is not a RandAugment string; write rand-m9-n2-mstd0.5-inc1, or null"
            )

    def preprocessing(self) -> dict[str, Any]:
        """What evaluation needs to know, under the names of timm's model configurations; it travels with the weights."""
        size = [3, self.image_size, self.image_size]
        shared = {name: getattr(self, name) for name in ("interpolation", "crop_pct")}
        return {"input_size": size, **shared, "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_preprocessing(cls, preprocessing: Mapping[str, Any], image_size: int | None = None) -> "TransformSettings":
        """Evaluation settings from `preprocessing()` or a configuration of timm; `image_size` overrides its own."""
        shared = {name: preprocessing[name] for name in ("interpolation", "crop_pct")}
        statistics = {name: tuple(preprocessing[name]) for name in ("mean", "std")}
        return cls(image_size=image_size or preprocessing["input_size"][-1], **shared, **statistics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsSettings:
    """How `digits` are written: side of the PNGs in pixels, each class's shares for tune and test, the split's seed."""

    CLASSES: ClassVar[tuple[str, ...]] = tuple(f"digit_{digit}" for digit in range(10))

    image_size: int = bounded(144, ge=8)
    tune_fraction: float = bounded(0.2, gt=0, le=0.9)
    test_fraction: float = bounded(0.2, gt=0, le=0.9)
    seed: int = bounded(0, ge=0)

    def __post_init__(self) -> None:
        _check_fractions(self.tune_fraction, self.test_fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneSplitSettings:
    """How many training images of each class go to `tune`, and the seed that draws them."""

    images_per_class: int = bounded(50, ge=1)
    seed: int = bounded(0, ge=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnDigits:
    """How digits look on textures, see `embedded.drawing`; the defaults are those of hard scenes."""

    # width of a scan in pixels before it is turned, [smallest, largest]
    side_px: tuple[Annotated[int, Each(ge=8)], ...] = (24, 96)
    angle_degrees: float = bounded(30.0, ge=0, le=180)  # how far a digit is turned, to either side
    # how far ink is from mid-grey, as a share of the way to white, [smallest, largest]
    contrast: tuple[Annotated[float, Each(gt=0, le=1)], ...] = (0.4, 1.0)
    # how far textures swing around mid-grey, likewise
    texture_contrast: tuple[Annotated[float, Each(ge=0, le=1)], ...] = (0.2, 0.6)

    def __post_init__(self) -> None:
        for name in ("side_px", "contrast", "texture_contrast"):
            check_pair(name, getattr(self, name))

    def _check_room(self, image_size: int) -> None:
        turned = math.radians(min(self.angle_degrees, 45))
        needed = math.ceil(self.side_px[1] * (math.cos(turned) + math.sin(turned))) + 2
        if needed > image_size:
            raise ValueError(
                f"side_px: {self.side_px[1]}, turned by {self.angle_degrees:g} degrees, needs {needed} pixels of {image_size}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WildDigitsSettings(DrawnDigits):
    """How the embedded `digits_wild` are drawn: each scan on a texture, alone, wholly inside the image.

    The fractions and `split_seed` choose the split of each scan, as for `digits`.
    """

    CLASSES: ClassVar[tuple[str, ...]] = DigitsSettings.CLASSES

    image_size: int = bounded(144, ge=32)
    train_copies: int = bounded(3, ge=1)  # images of each scan of the split train; of the others there is one
    tune_fraction: float = bounded(0.2, gt=0, le=0.9)
    test_fraction: float = bounded(0.2, gt=0, le=0.9)
    split_seed: int = bounded(0, ge=0)
    seed: int = bounded(0, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fractions(self.tune_fraction, self.test_fraction)
        self._check_room(self.image_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScenesSettings(DrawnDigits):
    """How the embedded `scenes` are drawn: side in pixels, number of images of each split, seed of the drawing.

    The fractions and `split_seed` choose the scans that appear in each split, as for `digits`. With the values that
    `digits` has, a backbone that was pretrained on those has seen no scan of tune or test.
    """

    image_size: int = bounded(256, ge=128)
    digits: tuple[Annotated[int, Each(ge=1, le=9)], ...] = (3, 8)  # [fewest, most] in an image
    # the largest share of a digit's box that another one's may cover: digits then lie wholly inside the image, and one
    # for which there is no room is left out; null: anywhere, up to a quarter of their width beyond the border
    overlap: float | None = bounded(None, ge=0, le=1)
    train: int = bounded(400, ge=1)
    tune: int = bounded(100, ge=1)
    test: int = bounded(100, ge=1)
    seed: int = bounded(0, ge=0)
    tune_fraction: float = bounded(0.2, gt=0, le=0.9)
    test_fraction: float = bounded(0.2, gt=0, le=0.9)
    split_seed: int = bounded(0, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair("digits", self.digits, "[fewest, most]")
        _check_fractions(self.tune_fraction, self.test_fraction)
        if self.overlap is not None:
            self._check_room(self.image_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectSettings:
    """How `connect` is drawn, see `embedded.connect`; lengths are measured between centres of the round pen."""

    CLASSES: ClassVar[tuple[str, ...]] = ("apart", "joined")

    image_size: int = bounded(ge=64)  # side of the images in pixels, a multiple of the models' patch of 16
    train_pairs: int = bounded(ge=1)  # number of pairs, half the number of images
    tune_pairs: int = bounded(ge=1)
    test_pairs: int = bounded(ge=1)
    # [fewest, most] dashes of an arm; a curve is two arms and a dash that joins them
    dashes: tuple[Annotated[int, Each(ge=1)], ...]
    dash_px: int = bounded(10, ge=1)  # length along a curve
    gap_px: int = bounded(4, ge=2)  # between two dashes
    thickness_px: float = bounded(2.0, ge=1)
    curvature: float = bounded(0.05, ge=0)  # the largest, in 1/pixel
    # least distance between the centre lines of two curves, and between far parts of one
    clearance_px: float = bounded(7.0, gt=0)
    marker_px: float = bounded(6.0, ge=3)  # diameter of the markers
    distractors: int = bounded(0, ge=0)  # number of further pairs of curves, without markers and with the fewest dashes
    # how far arms may be turned from the image's diagonals; 45 allows every angle
    tilt_degrees: float = bounded(45.0, ge=0, le=45)
    seed: int = bounded(0, ge=0)

    def __post_init__(self) -> None:
        if self.image_size % 16:
            raise ValueError(f"image_size: expected a multiple of 16, got {self.image_size}")
        check_pair("dashes", self.dashes, "[fewest, most]")
        if self.gap_px < self.thickness_px + 1:
            raise ValueError(
                f"gap_px: dashes touch, expected at least thickness_px + 1 = {self.thickness_px + 1:g}, got {self.gap_px}"
            )
        if not self.marker_px + 1 <= self.clearance_px <= 0.8 * self.bend_radius_px:
            raise ValueError(
                f"clearance_px: expected marker_px + 1 = {self.marker_px + 1:g} to {0.8 * self.bend_radius_px:.1f}, "
                f"the room between two bends of dash_px + gap_px, got {self.clearance_px:g}"
            )
        if self.curvature * self.clearance_px > 1:
            raise ValueError(
                f"curvature: expected at most 1 / clearance_px = {1 / self.clearance_px:.3g}, got {self.curvature:g}"
            )

    @property
    def bend_radius_px(self) -> float:
        """Radius of a bend: a quarter of a circle as long as one dash and gap."""
        return 2 * (self.dash_px + self.gap_px) / math.pi


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectionTransformSettings:
    """The size of a detector's input, and its random changes in training."""

    # short sides in pixels; training draws one per image, evaluation takes the last
    min_size: tuple[Annotated[int, Each(ge=1)], ...] = (800,)
    # bound of the long side in pixels; it wins over `min_size`, and the ratio of sides is kept
    max_size: int = bounded(1333, ge=1)
    # probability of a horizontal flip; 0 where left and right differ, as for digits
    hflip: float = bounded(0.5, ge=0, le=1)
    # if given, half of the training images are first resized to one of these short sides, and then cropped
    crop_min_size: tuple[Annotated[int, Each(ge=1)], ...] = ()
    # [smallest, largest] side in pixels; height and width are drawn apart
    crop_size: tuple[Annotated[int, Each(ge=1)], ...] = (384, 600)

    def __post_init__(self) -> None:
        if not self.min_size or max(self.min_size) > self.max_size:
            raise ValueError(
                f"min_size: expected short sides of at most max_size = {self.max_size}, got {list(self.min_size)}"
            )
        check_pair("crop_size", self.crop_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedCounts:
    """Number of classes, and of images in each split of the kind, that a data set must have.

    `prepare_data` refuses any other, so that a subset is a written decision.
    """

    classes: int = bounded(ge=1)
    train: int = bounded(ge=1)
    val: int | None = bounded(None, ge=1)
    tune: int | None = bounded(None, ge=1)
    test: int | None = bounded(None, ge=1)

    @property
    def splits(self) -> set[str]:
        """The splits whose images are counted."""
        return {name for name in ("train", "val", "tune", "test") if getattr(self, name) is not None}
