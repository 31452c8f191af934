"""Manifests: what a data set holds, small enough for Git, so that no stage depends on (and DVC never hashes) the images.

A manifest names no absolute path and no date. Names and sizes are compared, contents are not: a check of ImageNet takes
seconds, not hours.
"""

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ..core.config import build
from ..core.errors import UserError
from ..core.record import read_json, write_json
from .connect import write_connect
from .digits import write_digits
from .settings import ConnectSettings, DigitsSettings, ExpectedCounts, ScenesSettings
from .tree import SPLITS, Tree, scan_tree

IMAGENET_1K = ExpectedCounts(classes=1000, train=1_281_167, val=50_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassRecord:
    """One class folder: number of images, their bytes together, and a hash over their names and sizes."""

    images: int
    bytes: int
    hash: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitRecord:
    """One split: number of images, their bytes together, and its class folders."""

    images: int
    bytes: int
    folders: dict[str, ClassRecord]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `results/prepare_data/<cell>/manifest.json` holds.

    Args:
        kind: `digits` or `imagenet`.
        classes: class folder name -> class index.
        splits: `train` and `val`.
        departures: how an `imagenet` root differs from ImageNet-1K; empty for the standard one.
        generated: the settings that write the tree, for embedded kinds.
        hash: over all class records.
    """

    kind: Literal["digits", "imagenet"]
    classes: dict[str, int]
    splits: dict[str, SplitRecord]
    departures: tuple[str, ...]
    generated: DigitsSettings | None
    hash: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectManifest(Manifest):
    """The same of `connect`."""

    kind: Literal["connect"]
    generated: ConnectSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseManifest(Manifest):
    """The same of a data set for detection or segmentation; see `dense`.

    The `folders` of a split are its image and label folders, and its annotation file, whose hash is over what it contains.

    Args:
        kind: `coco`, `ade20k` or `scenes`.
        classes: class name -> place in order; of `scenes` those of segmentation, whose first ten are also those of detection.
        splits, departures, hash: as above.
        generated: the settings that draw `scenes`.
    """

    kind: Literal["coco", "ade20k", "scenes"]
    generated: ScenesSettings | None


def build_manifest(tree: Tree, kind: str, generated: DigitsSettings | ConnectSettings | None = None) -> Manifest:
    """The manifest of a scanned tree.

    Raises:
        UserError: an `imagenet` root with a class folder that is no ImageNet-1K wnid.
    """
    splits = {split: _record_split(tree, split) for split in SPLITS}
    return (ConnectManifest if kind == "connect" else Manifest)(
        kind=kind,
        classes={name: index for index, name in enumerate(tree.classes)},
        splits=splits,
        departures=_imagenet_departures(tree, splits) if kind == "imagenet" else (),
        generated=generated,
        hash=hash_splits(splits),
    )


def hash_splits(splits: Mapping[str, SplitRecord]) -> str:
    """The `hash` of a manifest."""
    text = "\n".join(f"{split}/{name} {r.hash}" for split in SPLITS for name, r in splits[split].folders.items())
    return short_hash(text.encode())


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest as sorted JSON, atomically."""
    write_json(path, dataclasses.asdict(manifest))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest strictly; a missing or damaged file is a `UserError` that names the stage to run."""
    if not path.is_file():
        raise UserError(f"{path}: no such manifest; run `repro prepare-data` first")
    content = read_json(path)
    kind = str(content.get("kind")) if isinstance(content, dict) else ""
    classes = {"connect": ConnectManifest, **dict.fromkeys(("coco", "ade20k", "scenes"), DenseManifest)}
    return build(classes.get(kind, Manifest), content, str(path))


def open_root(root: Path, manifest: Manifest) -> Tree:
    """The data set at `root`, found to be the one of the manifest. An embedded one that is missing is written.

    Args:
        root: see `Runtime.data_root(paths, manifest.kind)`.

    Raises:
        UserError: the root is missing (`imagenet`), badly laid out, or not what the manifest says; or it is one of `dense`.
    """
    if isinstance(manifest, DenseManifest):
        raise UserError(f"{root}: {manifest.kind} has no class folders; choose a prepare_data cell of kind digits, connect or imagenet")
    if manifest.generated is not None and not root.exists():
        (write_connect if manifest.kind == "connect" else write_digits)(root, manifest.generated)
    tree = scan_tree(root, manifest.kind)
    verify(tree, manifest)
    return tree


def verify(tree: Tree, manifest: Manifest) -> None:
    """Compare a scanned tree with a manifest by names and sizes.

    Raises:
        UserError: one line that names the first class folder that differs, how, and how many do.
    """
    known = set(manifest.classes)
    if set(tree.classes) != known:
        name = min(set(tree.classes) ^ known)
        problem = "is not in the manifest" if name in tree.classes else "is missing"
        raise UserError(f"{tree.root}: class folder {name!r} {problem}; {_advice(tree.root, manifest)}")
    compare(
        manifest,
        tree.root,
        [
            (tree.root / split / name, found, manifest.splits[split].folders[name])
            for split in SPLITS
            for name, found in _record_split(tree, split).folders.items()
        ],
    )


def compare(manifest: Manifest, root: Path, records: Sequence[tuple[Path, ClassRecord, ClassRecord]]) -> None:
    """Refuse folders, or annotation files, whose record is not the manifest's.

    Args:
        records: folder, its record now, its record in the manifest.

    Raises:
        UserError: see `verify`.
    """
    different = [record for record in records if record[1] != record[2]]
    if not different:
        return
    folder, found, wanted = different[0]
    if found.images != wanted.images:
        problem = f"{found.images} images, the manifest has {wanted.images}"
    elif not wanted.images:
        problem = "an annotation file that does not hold what the manifest has"
    elif found.bytes != wanted.bytes:
        problem = f"{found.bytes} bytes in {found.images} images, the manifest has {wanted.bytes}: a file was changed or cut"
    else:
        problem = "a file was renamed, or two changed places"
    number = "1 such difference" if len(different) == 1 else f"{len(different)} such differences"
    raise UserError(f"{folder}: {problem} ({number}); {_advice(root, manifest)}")


def _advice(root: Path, manifest: Manifest) -> str:
    if manifest.generated is not None:
        return f"remove {root} and run the same command again, which writes it anew"
    return "restore the files, or run `repro prepare-data` to accept the data as it is"


def check_expected(manifest: Manifest, root: Path, expected: ExpectedCounts, where: str) -> None:
    """Refuse a data set whose counts are not the expected ones.

    Args:
        root: where it lies, and `where`: key path of the expected counts; both for the message.

    Raises:
        UserError: naming the key to change where the difference is wanted.
    """
    for name, found, wanted in _differences(manifest.classes, manifest.splits, expected):
        raise UserError(f"{where}.{name}: {wanted:,} expected, {root} holds {found:,}; complete the data or change this")


def departures(classes: Collection[str], splits: Mapping[str, SplitRecord], official: ExpectedCounts, name: str) -> tuple[str, ...]:
    """How the counts differ from those of the official data set of this name."""
    return tuple(f"{what}: {found:,}, {name} has {wanted:,}" for what, found, wanted in _differences(classes, splits, official))


def record_files(files: Sequence[tuple[bytes, int]]) -> ClassRecord:
    """The record of a folder of (name, bytes)."""
    listing = b"".join(b"%s\0%d\n" % pair for pair in files)
    return ClassRecord(images=len(files), bytes=sum(size for _, size in files), hash=short_hash(listing))


def short_hash(data: bytes) -> str:
    """16 hex digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def _differences(classes: Collection[str], splits: Mapping[str, SplitRecord], expected: ExpectedCounts) -> Iterator[tuple[str, int, int]]:
    """(name, found, expected) of each count that is another one."""
    for name, found in (("classes", len(classes)), *((split, splits[split].images) for split in SPLITS)):
        if found != (wanted := getattr(expected, name)):
            yield name, found, wanted


def _imagenet_departures(tree: Tree, splits: Mapping[str, SplitRecord]) -> tuple[str, ...]:
    from timm.data import ImageNetInfo

    unknown = sorted(set(tree.classes) - set(ImageNetInfo("imagenet-1k").label_names()))
    if unknown:
        raise UserError(
            f"{tree.root / 'train' / unknown[0]}: no wnid of ImageNet-1K ({len(unknown)} such folders); "
            "class folders are named as n01440764 (docs/data.md)"
        )
    return departures(tree.classes, splits, IMAGENET_1K, "ImageNet-1K")


def _record_split(tree: Tree, split: str) -> SplitRecord:
    files = tree.splits[split]
    ends = np.searchsorted(files.targets, np.arange(len(tree.classes)), side="right")
    folders, start = {}, 0
    for name, end in zip(tree.classes, ends.tolist()):
        folders[name] = record_files(list(zip(files.names[start:end].tolist(), files.sizes[start:end].tolist())))
        start = end
    return SplitRecord(images=len(files.names), bytes=int(files.sizes.sum()), folders=folders)
