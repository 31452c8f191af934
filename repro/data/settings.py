"""The settings in params.yaml for data: counts of a data set, drawing of embedded ones, transforms.

Imports nothing heavy: stage modules need these dataclasses before they know whether they will run.

A new field changes the hash of every cell that has these settings, see `repro.core.config._NEWER`. A manifest holds the
settings of its data set in full: a new field changes its hash too, and saved states and files of results/seeds are then
refused.
Fields of transforms that hold the size of an input are also named in `repro.runs.cells._SIZES`.
The stage prepare_data does not depend on this file (dvc.yaml): DVC misses a change of a default or of `bend_radius_px`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from ..core.config import Each, bounded

# all split names. A manifest sorts its keys, so `DataCell.row` takes their order from here. Of a data set's splits, the
# second gives the curves and the last gives the reported scores: `tune` must stand before `val` and `test`
SPLITS = ("train", "tune", "val", "test")
# the strings that timm's `rand_augment_transform` reads; it ignores some mistakes, and fails at others by an assertion
_RAND_AUGMENT = re.compile(r"rand(-(m\d+|n\d+|p\d+(\.\d+)?|mstd(\d+(\.\d+)?|inf)|mmax\d+|inc[01]|t(weights|3a|3aw)))+")


def check_pair(name: str, pair: tuple[float, ...], wanted: str = "[smallest, largest]") -> None:
    """Raise ValueError unless `pair` is two ascending numbers; the message describes them as `wanted`."""
    if len(pair) != 2 or pair[0] > pair[1]:
        raise ValueError(f"{name}: expected {wanted}, got {list(pair)}")


def check_channels(name: str, values: tuple[float, ...]) -> None:
    """Raise ValueError unless there is one number for each of three channels."""
    if len(values) != 3:
        raise ValueError(f"{name}: expected three numbers (red, green, blue), got {list(values)}")


def _check_fractions(tune: float, test: float) -> None:
    """Raise ValueError unless a tenth of the scans or more remain for training."""
    if tune + test > 0.9:
        raise ValueError(
            f"test_fraction: {test:g} and tune_fraction {tune:g} leave less than a tenth for training; make them smaller"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformSettings:
    """The transform from an image to a tensor; names are those of timm's `create_transform`, which does the work."""

    image_size: int = bounded(ge=1)  # side of the square input in pixels
    # area fraction of the random training crop, [smallest, largest]
    scale: tuple[Annotated[float, Each(gt=0, le=1)], ...] = (0.08, 1.0)
    ratio: tuple[Annotated[float, Each(gt=0)], ...] = (3 / 4, 4 / 3)  # its aspect ratio, [smallest, largest]
    # instead of the crop by `scale` and `ratio`: resize the short side to image_size, pad every side by this many black
    # pixels, and crop a square of image_size anywhere; null: off
    crop_padding: int | None = bounded(None, ge=0)
    # probability of a horizontal flip; 0 where left and right differ, as for digits
    hflip: float = bounded(0.5, ge=0, le=1)
    # strength; null switches it off. timm ignores it where `auto_augment` is set, unless that contains `3a`
    color_jitter: float | None = bounded(None, ge=0)
    auto_augment: str | None = None  # a RandAugment string such as `rand-m9-mstd0.5-inc1`; null switches it off
    re_prob: float = bounded(0.0, ge=0, le=1)  # probability of random erasing (mode `pixel`, after normalisation)
    interpolation: Literal["bicubic", "bilinear", "nearest"] = "bicubic"  # the filter of every resize
    # evaluation resizes the short side to image_size / crop_pct and crops the centre
    crop_pct: float = bounded(0.875, gt=0, le=1)
    # evaluation of some of timm's weights: `squash` resizes both sides, `border` pads the short one; null: the crop above
    crop_mode: Literal["squash", "border"] | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # of red, green and blue, for values in [0, 1]
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
        """Return the settings for evaluation under timm's names in model configurations.

        They are saved with the weights. Every setting that an evaluation uses must be here and in `from_preprocessing`:
        a training evaluates with all settings, but `repro predict` and others have these alone.
        """
        size = [3, self.image_size, self.image_size]
        shared = {name: getattr(self, name) for name in ("interpolation", "crop_pct")}
        shared |= {"crop_mode": self.crop_mode} if self.crop_mode else {}  # files of before have no such key
        return {"input_size": size, **shared, "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_preprocessing(cls, preprocessing: Mapping[str, Any], image_size: int | None = None) -> "TransformSettings":
        """Make evaluation settings from `preprocessing()` or a configuration of timm.

        `image_size` overrides its size.
        """
        shared = {name: preprocessing[name] for name in ("interpolation", "crop_pct")}
        mode = preprocessing.get("crop_mode", "center")
        shared |= {} if mode == "center" else {"crop_mode": mode}
        statistics = {name: tuple(preprocessing[name]) for name in ("mean", "std")}
        return cls(image_size=image_size or preprocessing["input_size"][-1], **shared, **statistics)

    def adapt(self, preprocessing: Mapping[str, Any]) -> "TransformSettings":
        """Return these settings with the filter, mean and std that given weights learnt with; see `from_preprocessing`."""
        seen = self.from_preprocessing(preprocessing)
        return dataclasses.replace(self, interpolation=seen.interpolation, mean=seen.mean, std=seen.std)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsSettings:
    """Drawing of `digits`: side of the PNGs in pixels, shares of each class for tune and test, seed of the split."""

    CLASSES: ClassVar[tuple[str, ...]] = tuple(f"digit_{digit}" for digit in range(10))

    image_size: int = bounded(144, ge=8)
    tune_fraction: float = bounded(0.2, gt=0, le=0.9)
    test_fraction: float = bounded(0.2, gt=0, le=0.9)
    seed: int = bounded(0, ge=0)

    def __post_init__(self) -> None:
        _check_fractions(self.tune_fraction, self.test_fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneSplitSettings:
    """Number of training images of each class that go to `tune`, and the seed of the draw."""

    images_per_class: int = bounded(50, ge=1)
    seed: int = bounded(0, ge=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnDigits:
    """The look of digits on textures, see `embedded.drawing`; the defaults are those of hard scenes."""

    # width of a scan in pixels before its rotation, [smallest, largest]
    side_px: tuple[Annotated[int, Each(ge=8)], ...] = (24, 96)
    angle_degrees: float = bounded(30.0, ge=0, le=180)  # largest rotation of a digit, to either side
    # distance of the ink from mid-grey, as a share of the distance to white, [smallest, largest]
    contrast: tuple[Annotated[float, Each(gt=0, le=1)], ...] = (0.4, 1.0)
    # amplitude of the textures around mid-grey, in the same unit
    texture_contrast: tuple[Annotated[float, Each(ge=0, le=1)], ...] = (0.2, 0.6)

    def __post_init__(self) -> None:
        for name in ("side_px", "contrast", "texture_contrast"):
            check_pair(name, getattr(self, name))

    def _check_room(self, image_size: int) -> None:
        """Raise ValueError if the largest digit, at the largest rotation, does not fit into the image."""
        # the bounding box of a rotated square is largest at 45 degrees
        turned = math.radians(min(self.angle_degrees, 45))
        needed = math.ceil(self.side_px[1] * (math.cos(turned) + math.sin(turned))) + 2  # rounding, at either side
        if needed > image_size:
            raise ValueError(
                f"side_px: {self.side_px[1]}, turned by {self.angle_degrees:g} degrees, needs {needed} pixels of {image_size}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WildDigitsSettings(DrawnDigits):
    """Drawing of the embedded `digits_wild`: each scan alone on a texture, wholly inside the image.

    The fractions and `split_seed` choose the split of each scan, as for `digits`.
    """

    CLASSES: ClassVar[tuple[str, ...]] = DigitsSettings.CLASSES

    image_size: int = bounded(144, ge=32)
    train_copies: int = bounded(3, ge=1)  # images of each training scan; other splits have one
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
    """Drawing of the embedded `scenes`: side in pixels, number of images of each split, seed of the drawing.

    The fractions and `split_seed` choose the scans of each split, as for `digits`. With the same values as there, a
    backbone that was pretrained on `digits` has seen no scan of tune or test.
    """

    image_size: int = bounded(256, ge=128)
    digits: tuple[Annotated[int, Each(ge=1, le=9)], ...] = (3, 8)  # [fewest, most] in an image
    # largest share of a digit's box that another may cover; digits then lie wholly inside the image, and one that finds
    # no room is left out. null: anywhere, also beyond the border
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
    """Drawing of `connect`, see `embedded.connect`; lengths are measured between the centres of the round pen."""

    CLASSES: ClassVar[tuple[str, ...]] = ("apart", "joined")

    image_size: int = bounded(ge=64)  # side of the images in pixels, a multiple of the models' patch of 16
    train_pairs: int = bounded(ge=1)  # number of pairs, half the number of images
    tune_pairs: int = bounded(ge=1)
    test_pairs: int = bounded(ge=1)
    # [fewest, most] dashes of an arm; a curve is two arms and the dash that joins them
    dashes: tuple[Annotated[int, Each(ge=1)], ...]
    dash_px: int = bounded(10, ge=1)  # length along a curve
    gap_px: int = bounded(4, ge=2)  # between two dashes
    thickness_px: float = bounded(2.0, ge=1)
    curvature: float = bounded(0.05, ge=0)  # largest, in 1/pixel
    # smallest distance between the centre lines of two curves, and between far parts of one
    clearance_px: float = bounded(7.0, gt=0)
    marker_px: float = bounded(6.0, ge=3)  # diameter of the markers
    # number of additional pairs of curves, without markers and with the fewest dashes
    distractors: int = bounded(0, ge=0)
    # largest rotation of the arms from the image's diagonals; 45 allows every angle
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
        # neighbouring points of an arm, which `embedded.connect` does not compare, would come too close
        if self.curvature * self.clearance_px > 1:
            raise ValueError(
                f"curvature: expected at most 1 / clearance_px = {1 / self.clearance_px:.3g}, got {self.curvature:g}"
            )

    @property
    def bend_radius_px(self) -> float:
        """Radius of a bend: a quarter circle as long as one dash and one gap."""
        return 2 * (self.dash_px + self.gap_px) / math.pi


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectionTransformSettings:
    """The size of a detector's input, and its random augmentation in training."""

    # short sides in pixels; training draws one per image, evaluation takes the last
    min_size: tuple[Annotated[int, Each(ge=1)], ...] = (800,)
    # largest long side in pixels; it overrides `min_size`, and the aspect ratio is kept
    max_size: int = bounded(1333, ge=1)
    # probability of a horizontal flip; 0 where left and right differ, as for digits
    hflip: float = bounded(0.5, ge=0, le=1)
    # if given, half of the training images are first resized to one of these short sides and then cropped
    crop_min_size: tuple[Annotated[int, Each(ge=1)], ...] = ()
    # [smallest, largest] side of the crop in pixels; height and width are drawn independently
    crop_size: tuple[Annotated[int, Each(ge=1)], ...] = (384, 600)

    def __post_init__(self) -> None:
        if not self.min_size or max(self.min_size) > self.max_size:
            raise ValueError(
                f"min_size: expected short sides of at most max_size = {self.max_size}, got {list(self.min_size)}"
            )
        check_pair("crop_size", self.crop_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedCounts:
    """Number of classes, and of images in each split, that a data set must have.

    `prepare_data` refuses any other number: the use of a subset must be written down.
    """

    classes: int = bounded(ge=1)
    train: int = bounded(ge=1)
    val: int | None = bounded(None, ge=1)
    tune: int | None = bounded(None, ge=1)
    test: int | None = bounded(None, ge=1)

    @property
    def splits(self) -> set[str]:
        """The splits whose images are counted."""
        return {name for name in SPLITS if getattr(self, name) is not None}
