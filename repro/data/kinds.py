"""The table of data kinds, and the `prepare_data` cells of params.yaml that name one. Imports nothing heavy.

A new kind is a row of `KINDS`; an embedded kind, which the project writes, also has a writer and its settings.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .imagenet100 import WNIDS
from .pictures import EXTENSIONS, find_splits
from .settings import (
    ConnectSettings,
    DigitsSettings,
    ExpectedCounts,
    ScenesSettings,
    TuneSplitSettings,
    WildDigitsSettings,
)

Format = Literal["folders", "coco", "ade20k"]  # of a part of a data set on disk, see `Kind.parts`
OWN_KINDS = ("folder", "coco", "boxes", "ade20k")  # users' own sets, which a command may name by path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """A published data set: manifests and checks of a kind compare a user's files with it."""

    name: str
    counts: ExpectedCounts
    # of a data set in COCO's layout: split -> number of annotations, and the ids of the categories, which have gaps
    instances: Mapping[str, int] = dataclasses.field(default_factory=dict)
    category_ids: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of data set; `writer` and `download` name functions of this package, see `load_function`."""

    name: str  # its key in params.yaml and in manifests
    layout: str  # content of the root, for messages
    # the first is for training; curves and the choice of recipes use the second; scores are reported on the last
    splits: tuple[str, ...] = ("train", "val")
    # alternatives, tried in order where the folders of `splits` do not all exist
    other_splits: tuple[tuple[str, ...], ...] = ()
    # format of each part -> prefix of its folder below the root and in manifests; `folders` is <split>/<class>/. Any
    # other format is the name of a module here, whose functions are called by name. `check.run` has a check for each.
    # The last part gives a manifest its classes
    parts: Mapping[Format, str] = dataclasses.field(default_factory=lambda: {"folders": ""})
    suffixes: tuple[str, ...] = EXTENSIONS  # suffixes of the files in class folders
    # returns the allowed names of class folders; None allows any
    class_names: Callable[[], Sequence[str]] | None = None
    # advice of a check: where images are not in class folders, and where one is damaged or missing
    sorting: str = "sort them into one folder per class (docs/data.md)"
    renewal: str = "remove the folder and run `repro prepare-data` to write it again"
    official: Release | None = None  # a manifest lists the departures from it
    num_images: int | None = None  # of all splits together, where settings divide a known number of images
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
        """Whether a manifest's hashes cover the contents of the files, which are then read at every start."""
        return self.embedded and not self.linked


@functools.cache
def list_wnids() -> tuple[str, ...]:
    """Return the sorted wnids of ImageNet-1K; published weights number the classes in this order."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


_TUNED = ("train", "tune", "test")  # hyperparameters are chosen on `tune`, and `test` gives the scores alone
IMAGENET_1K = ExpectedCounts(classes=1000, train=1_281_167, val=50_000)
# advice where images of ImageNet are not, or not rightly, in class folders: the file with the labels misleads
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt counts classes by the ILSVRC2012_ID of meta.mat, not by sorted wnid (docs/data.md)"

# name -> row; where an order matters, as in messages, it is this one
KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            name="digits",
            layout="train/, tune/ and test/, each with digit_<0-9>/",
            splits=_TUNED,
            num_images=1797,  # the scans of scikit-learn's load_digits
            class_names=lambda: DigitsSettings.CLASSES,
            settings_key="generate",
            settings=DigitsSettings,
            writer="embedded.digits.write_digits",
        ),
        Kind(
            name="digits_wild",
            layout="train/, tune/ and test/, each with digit_<0-9>/",
            splits=_TUNED,
            class_names=lambda: WildDigitsSettings.CLASSES,
            settings_key="wild",
            settings=WildDigitsSettings,
            writer="embedded.digits_wild.write_digits_wild",
        ),
        Kind(
            name="imagenet",
            layout="train/<wnid>/ and val/<wnid>/, a thousand folders each",
            class_names=list_wnids,
            sorting=f"sort them into one folder per class, named by its wnid; {GROUND_TRUTH}",
            renewal="get it again: unpack its archive again",
            official=Release(name="ImageNet-1K", counts=IMAGENET_1K),
            size_gb=150,
        ),
        Kind(
            name="imagenet100",
            layout="train/<wnid>/, tune/<wnid>/ and test/<wnid>/, a hundred folders each",
            splits=_TUNED,
            class_names=lambda: WNIDS,
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
                num_images=60_000,
                size_gb=0.2,
                settings_key="tune_split",
                settings=TuneSplitSettings,
                writer=f"embedded.cifar.write_{name}",
                source="torchvision",
                download=f"embedded.cifar.download_{name}",
            )
            for name in ("cifar10", "cifar100")
        ),
        Kind(name="latents", layout="train/<class>/ and val/<class>/", suffixes=(".npy",), renewal="compute it again"),
        Kind(
            name="folder",
            layout="train/<class>/ and val/<class>/ or test/<class>/",
            other_splits=(_TUNED, ("train", "test")),
            renewal="replace the file or remove it",
            settings_key="tune_split",
            settings=TuneSplitSettings,
            upright=True,
        ),
        Kind(
            name="connect",
            layout="train/, tune/ and test/, each with apart/ and joined/",
            splits=_TUNED,
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
            settings_key="draw",
            settings=ScenesSettings,
            writer="embedded.scenes.write_scenes",
        ),
        Kind(
            name="coco",
            parts={"coco": ""},
            layout="train2017/, val2017/ and annotations/",
            official=Release(
                name="COCO 2017",
                counts=ExpectedCounts(classes=80, train=118_287, val=5_000),
                instances={"train": 860_001, "val": 36_781},
                category_ids=frozenset(range(1, 91)) - {12, 26, 29, 30, 45, 66, 68, 69, 71, 83},
            ),
            size_gb=20,
        ),
        Kind(name="boxes", parts={"coco": ""}, layout="train/, val/ and annotations/", boxes_as_masks=True),
        Kind(
            name="ade20k",
            parts={"ade20k": ""},
            layout="ADEChallengeData2016, or is that folder,",
            official=Release(name="ADE20K", counts=ExpectedCounts(classes=150, train=20_210, val=2_000)),
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
        """Raise ValueError for settings that the kind needs or does not take, and for splits that it does not have.

        The message begins with the name of the field, by which `config.build` finds the key path.
        """
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
            # `tune` is cut off `train`, so a layout that has one already is refused by `scan_tree`
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
