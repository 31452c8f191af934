"""Manifests: what a data set holds, small enough for Git, so that no stage depends on (and DVC never hashes) the images.

A manifest names no absolute path and no date. Names and sizes are compared, contents are not: a check of ImageNet takes
seconds, not hours.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Literal

import numpy as np

from ..core.config import build
from ..core.errors import UserError
from ..core.record import read_json, write_json
from .digits import write_digits
from .settings import DigitsSettings, ExpectedCounts
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


def build_manifest(tree: Tree, kind: str, generated: DigitsSettings | None = None) -> Manifest:
    """The manifest of a scanned tree.

    Raises:
        UserError: an `imagenet` root with a class folder that is no ImageNet-1K wnid.
    """
    splits = {split: _record_split(tree, split) for split in SPLITS}
    text = "\n".join(f"{split}/{name} {r.hash}" for split in SPLITS for name, r in splits[split].folders.items())
    return Manifest(
        kind=kind,
        classes={name: index for index, name in enumerate(tree.classes)},
        splits=splits,
        departures=_imagenet_departures(tree) if kind == "imagenet" else (),
        generated=generated,
        hash=_short_hash(text.encode()),
    )


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest as sorted JSON, atomically."""
    write_json(path, dataclasses.asdict(manifest))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest strictly; a missing or damaged file is a `UserError` that names the stage to run."""
    if not path.is_file():
        raise UserError(f"{path}: no such manifest; run `repro prepare-data` first")
    return build(Manifest, read_json(path), str(path))


def open_root(root: Path, manifest: Manifest) -> Tree:
    """The data set at `root`, found to be the one of the manifest. An embedded one that is missing is written.

    Args:
        root: see `Runtime.data_root(paths, manifest.kind)`.

    Raises:
        UserError: the root is missing (`imagenet`), badly laid out, or not what the manifest says.
    """
    if manifest.generated is not None and not root.exists():
        write_digits(root, manifest.generated)
    tree = scan_tree(root, manifest.kind)
    verify(tree, manifest)
    return tree


def verify(tree: Tree, manifest: Manifest) -> None:
    """Compare a scanned tree with a manifest by names and sizes.

    Raises:
        UserError: one line that names the first class folder that differs, how, and how many do.
    """
    advice = (
        f"remove {tree.root} and run the same command again, which writes it anew"
        if manifest.generated is not None
        else "restore the files, or run `repro prepare-data` to accept the data as it is"
    )
    known = set(manifest.classes)
    if set(tree.classes) != known:
        name = min(set(tree.classes) ^ known)
        problem = "is not in the manifest" if name in tree.classes else "is missing"
        raise UserError(f"{tree.root}: class folder {name!r} {problem}; {advice}")
    different = []
    for split in SPLITS:
        found = _record_split(tree, split).folders
        for name, wanted in manifest.splits[split].folders.items():
            if found[name] != wanted:
                different.append((tree.root / split / name, found[name], wanted))
    if not different:
        return
    folder, found, wanted = different[0]
    if found.images != wanted.images:
        problem = f"{found.images} images, the manifest has {wanted.images}"
    elif found.bytes != wanted.bytes:
        problem = f"{found.bytes} bytes in {found.images} images, the manifest has {wanted.bytes}: a file was changed or cut"
    else:
        problem = "a file was renamed, or two changed places"
    number = f"{len(different)} class folder{'s differ' if len(different) > 1 else ' differs'}"
    raise UserError(f"{folder}: {problem} ({number}); {advice}")


def check_expected(tree: Tree, expected: ExpectedCounts, where: str) -> None:
    """Refuse a tree whose counts are not the expected ones.

    Args:
        where: key path of the expected counts, for the message.

    Raises:
        UserError: naming the key to change where the difference is wanted.
    """
    for name, found in _counts(tree).items():
        wanted = getattr(expected, name)
        if found != wanted:
            raise UserError(f"{where}.{name}: {wanted:,} expected, {tree.root} holds {found:,}; complete the data or change this")


def _imagenet_departures(tree: Tree) -> tuple[str, ...]:
    from timm.data import ImageNetInfo

    unknown = sorted(set(tree.classes) - set(ImageNetInfo("imagenet-1k").label_names()))
    if unknown:
        raise UserError(
            f"{tree.root / 'train' / unknown[0]}: no wnid of ImageNet-1K ({len(unknown)} such folders); "
            "class folders are named as n01440764 (docs/data.md)"
        )
    return tuple(
        f"{name}: {found:,}, ImageNet-1K has {getattr(IMAGENET_1K, name):,}"
        for name, found in _counts(tree).items()
        if found != getattr(IMAGENET_1K, name)
    )


def _counts(tree: Tree) -> dict[str, int]:
    return {"classes": len(tree.classes), **{split: len(tree.splits[split].names) for split in SPLITS}}


def _record_split(tree: Tree, split: str) -> SplitRecord:
    files = tree.splits[split]
    ends = np.searchsorted(files.targets, np.arange(len(tree.classes)), side="right")
    folders, start = {}, 0
    for name, end in zip(tree.classes, ends.tolist()):
        names, sizes = files.names[start:end].tolist(), files.sizes[start:end].tolist()
        listing = b"".join(b"%s\0%d\n" % pair for pair in zip(names, sizes))
        folders[name] = ClassRecord(images=end - start, bytes=sum(sizes), hash=_short_hash(listing))
        start = end
    return SplitRecord(images=len(files.names), bytes=int(files.sizes.sum()), folders=folders)


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
