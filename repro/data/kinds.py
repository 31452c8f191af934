"""The table of data kinds, and the `prepare_data` cells of params.yaml that name one. Imports nothing heavy.

A new kind is a row of `KINDS`; an embedded kind, which the project writes, also has a writer and its settings.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .settings import (
    ConnectSettings,
    DigitsSettings,
    ExpectedCounts,
    ScenesSettings,
    TuneSplitSettings,
    WildDigitsSettings,
)

Format = Literal["folders", "coco", "ade20k"]
OWN_KINDS = ("folder", "coco", "boxes", "ade20k")  # users' own sets, which a command may name by path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of data set; `check` and `writer` name functions of this package, see `load_function`."""

    name: str  # its key in params.yaml and in manifests
    layout: str  # content of the root, for messages
    check: str  # `repro data check` calls it with (root, report, depth)
    # the first is for training; curves and the choice of recipes use the second; scores are reported on the last
    splits: tuple[str, ...] = ("train", "val")
    # alternatives, tried in order where the folders of `splits` do not all exist
    other_splits: tuple[tuple[str, ...], ...] = ()
    # format of each part -> prefix of its folder below the root and in manifests; `folders` is <split>/<class>/. Any
    # other format is the name of a module here, whose functions are called by name. The last part gives a manifest its
    # classes
    parts: Mapping[Format, str] = dataclasses.field(default_factory=lambda: {"folders": ""})
    suffixes: tuple[str, ...] = ()  # suffixes of the files in class folders; empty for images
    # returns the allowed names of class folders; None allows any
    class_names: Callable[[], Sequence[str]] | None = None
    sorting: str = "sort them into one folder per class (docs/data.md)"  # advice where images are not in class folders
    # name and counts of the published data set; a manifest lists the departures from it
    official: tuple[str, ExpectedCounts] | None = None
    size_gb: float | None = None  # 1e9 bytes without the archives; None where it depends on settings or on the user
    # key of its settings in a cell of prepare_data; required for an embedded kind, optional for others
    settings_key: str | None = None
    settings: type | None = None  # class of these settings
    # of an embedded kind, called with (root, settings), and with the folder of `source` where it has one
    writer: str | None = None
    # key in runtime.data_roots of the published files that it is written from
    source: str | None = None
    download: str | None = None  # downloads the published files, called with that folder
    linked: bool = False  # the writer links the published files, whose contents are too large to compare
    # rotate images by their EXIF data; published ImageNet results leave them as stored
    upright: bool = False
    boxes_as_masks: bool = False  # in COCO's layout, the mask of an object without an outline is its box
    paired: bool = False  # training images of the same name belong in one batch

    def at(self, root: Path) -> "Kind":
        """Return the row with the first of its split layouts that exists at `root`, see `pictures.find_splits`.

        Where none exists, or the kind has one layout, the row itself is returned.
        """
        if not self.other_splits or not root.is_dir():
            return self
        from .pictures import find_splits

        folders = find_splits(root)
        found = (splits for splits in (self.splits, *self.other_splits) if folders.keys() >= set(splits))
        return dataclasses.replace(self, splits=next(found, self.splits))

    @property
    def held_out(self) -> tuple[str, ...]:
        """The splits that are not for training."""
        return self.splits[1:]

    @property
    def reported_split(self) -> str:
        """The split on which scores are reported."""
        return self.splits[-1]

    @property
    def embedded(self) -> bool:
        """Whether the project writes this data set."""
        return self.writer is not None

    @property
    def compares_contents(self) -> bool:
        """Whether a manifest's hashes cover the contents of the files."""
        return self.embedded and not self.linked


@functools.cache
def list_wnids() -> tuple[str, ...]:
    """Return the sorted wnids of ImageNet-1K; published weights number the classes in this order."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


@functools.cache
def list_imagenet100() -> tuple[str, ...]:
    """Return the wnids of ImageNet-100 in sorted order."""
    from .imagenet100 import WNIDS

    return tuple(sorted(WNIDS))


# all split names. `DataCell.row` takes their order from here, since a manifest sorts its keys. Of a data set's splits,
# the second gives the curves and the last gives the reported scores: `tune` must stand before `val` and `test`
SPLITS = ("train", "tune", "val", "test")
_TUNED = ("train", "tune", "test")
IMAGENET_1K = ExpectedCounts(classes=1000, train=1_281_167, val=50_000)
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt counts classes by the ILSVRC2012_ID of meta.mat, not by sorted wnid (docs/data.md)"

KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            name="digits",
            layout="train/, tune/ and test/, each with digit_<0-9>/",
            splits=_TUNED,
            check="check.folders.check_digits",
            class_names=lambda: DigitsSettings.CLASSES,
            settings_key="generate",
            settings=DigitsSettings,
            writer="embedded.digits.write_digits",
        ),
        Kind(
            name="digits_wild",
            layout="train/, tune/ and test/, each with digit_<0-9>/",
            splits=_TUNED,
            check="check.folders.check_digits_wild",
            class_names=lambda: WildDigitsSettings.CLASSES,
            settings_key="wild",
            settings=WildDigitsSettings,
            writer="embedded.digits_wild.write_digits_wild",
        ),
        Kind(
            name="imagenet",
            layout="train/<wnid>/ and val/<wnid>/, a thousand folders each",
            check="check.folders.check_imagenet",
            class_names=list_wnids,
            sorting=f"sort them into one folder per class, named by its wnid; {GROUND_TRUTH}",
            official=("ImageNet-1K", IMAGENET_1K),
            size_gb=150,
        ),
        Kind(
            name="imagenet100",
            layout="train/<wnid>/, tune/<wnid>/ and test/<wnid>/, a hundred folders each",
            splits=_TUNED,
            check="check.folders.check_imagenet100",
            class_names=list_imagenet100,
            settings_key="tune_split",
            settings=TuneSplitSettings,
            writer="embedded.imagenet100.write_imagenet100",
            source="imagenet",
            linked=True,
        ),
        *(
            Kind(
                name=name,
                layout="train/<class>/, tune/<class>/ and test/<class>/",
                splits=_TUNED,
                check=f"check.folders.check_{name}",
                size_gb=0.2,
                settings_key="tune_split",
                settings=TuneSplitSettings,
                writer=f"embedded.cifar.write_{name}",
                source="torchvision",
                download=f"embedded.cifar.download_{name}",
            )
            for name in ("cifar10", "cifar100")
        ),
        Kind(
            name="latents",
            layout="train/<class>/ and val/<class>/",
            suffixes=(".npy",),
            check="check.folders.check_latents",
        ),
        Kind(
            name="folder",
            layout="train/<class>/ and val/<class>/ or test/<class>/",
            other_splits=(_TUNED, ("train", "test")),
            check="check.folders.check_folder",
            settings_key="tune_split",
            settings=TuneSplitSettings,
            upright=True,
        ),
        Kind(
            name="connect",
            layout="train/, tune/ and test/, each with apart/ and joined/",
            splits=_TUNED,
            check="check.folders.check_connect",
            class_names=lambda: ConnectSettings.CLASSES,
            settings_key="curves",
            settings=ConnectSettings,
            writer="embedded.connect.write_connect",
            paired=True,
        ),
        Kind(
            name="scenes",
            parts={"coco": "coco/", "ade20k": "ade20k/"},
            layout="coco/ and ade20k/",
            splits=_TUNED,
            check="check.dense.check_scenes",
            settings_key="draw",
            settings=ScenesSettings,
            writer="embedded.scenes.write_scenes",
        ),
        Kind(
            name="coco",
            parts={"coco": ""},
            layout="train2017/, val2017/ and annotations/",
            check="check.dense.check_coco",
            official=("COCO 2017", ExpectedCounts(classes=80, train=118_287, val=5_000)),
            size_gb=20,
        ),
        Kind(
            name="boxes",
            parts={"coco": ""},
            layout="train/, val/ and annotations/",
            check="check.dense.check_boxes",
            boxes_as_masks=True,
        ),
        Kind(
            name="ade20k",
            parts={"ade20k": ""},
            layout="ADEChallengeData2016, or is that folder,",
            check="check.dense.check_ade20k",
            official=("ADE20K", ExpectedCounts(classes=150, train=20_210, val=2_000)),
            size_gb=1,
        ),
    )
}


def load_function(name: str) -> Callable[..., Any]:
    """Import a function of this package by module and name, e.g. `embedded.digits.write_digits`.

    The table can thus name functions without importing their modules.
    """
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), function)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareData:
    """One cell of the `prepare_data` section.

    Its root is `runtime.data_roots.<cell>`, or `runtime.data_roots.<kind>`.
    """

    kind: Literal[tuple(KINDS)]
    expected: ExpectedCounts | None = None  # counts that the data set must have; optional for users' own sets
    generate: DigitsSettings | None = None  # how `digits` is written; only there
    wild: WildDigitsSettings | None = None  # how `digits_wild` is written; only there
    draw: ScenesSettings | None = None  # how `scenes` is written; only there
    curves: ConnectSettings | None = None  # how `connect` is written; only there
    # how `cifar10`, `cifar100` and `imagenet100` are split; for `folder`, how `tune` is cut off `train`; only there
    tune_split: TuneSplitSettings | None = None

    def __post_init__(self) -> None:
        if self.expected is None and self.kind not in OWN_KINDS:
            raise ValueError(f"expected: missing; say how many classes and images {self.kind} must have")
        for key in filter(None, dict.fromkeys(kind.settings_key for kind in KINDS.values())):
            users = [kind for kind in KINDS.values() if kind.settings_key == key]
            needed, free = ([kind.name for kind in users if kind.embedded == embedded] for embedded in (True, False))
            if self.kind not in free and (self.kind in needed) != (getattr(self, key) is not None):
                allowed = f", allowed for {' and '.join(free)}" if free else ""
                raise ValueError(f"{key}: needed for kind {' and '.join(needed)}{allowed}, and for no other")
        row = KINDS[self.kind]
        layouts = [row.splits, *row.other_splits]
        if self.settings is not None and not row.embedded:
            layouts = [("train", "tune", *splits[1:]) for splits in layouts if "tune" not in splits]
        if self.expected is not None:  # with several layouts, the expected counts say which one the folder must have
            nearest = min(layouts, key=lambda splits: len(self.expected.splits ^ set(splits)))
            if wrong := self.expected.splits ^ set(nearest):
                what = "missing" if min(wrong) in nearest else "no such split"
                named = " or ".join(", ".join(splits) for splits in layouts)
                raise ValueError(f"expected.{min(wrong)}: {what}; {self.kind} has {named}")

    @property
    def settings(self) -> Any:
        """The settings of an embedded data set, or those that cut `tune` off a `folder`; else None."""
        key = KINDS[self.kind].settings_key
        return getattr(self, key) if key else None
