"""Manifests: what a data set holds, small enough for Git, so that no stage depends on the images and DVC never hashes them.

A manifest names no absolute path and no date. Names and sizes are compared, contents are not: a check of ImageNet takes
seconds, not hours.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from ..core.config import build
from ..core.errors import UserError
from ..core.hashing import short_hash
from ..core.record import read_json, write_json
from .kinds import KINDS
from .settings import SPLITS, ExpectedCounts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassRecord:
    """One folder, or one annotation file: number of images, bytes, and a hash over names and sizes (of a file, over its content)."""

    images: int
    bytes: int
    hash: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitRecord:
    """One split: number of images, bytes of all its files, and its folders."""

    images: int
    bytes: int
    folders: dict[str, ClassRecord]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `results/prepare_data/<cell>/manifest.json`.

    Args:
        kind: a row of `KINDS`.
        classes: class name -> class index. Of `scenes` these are the classes of segmentation, of which detection has the first ten.
        splits: `train` and `val`; their folders are class folders, or image and label folders and the annotation file.
        departures: how the counts differ from those of the published data set; empty for a complete one.
        generated: the settings that an embedded data set was written with, see `Kind.settings`.
        hash: over the records of all folders.
    """

    kind: Literal[tuple(KINDS)]
    classes: dict[str, int]
    splits: dict[str, SplitRecord]
    departures: tuple[str, ...]
    generated: object | None
    hash: str


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder, or an annotation file, as it lies on disk.

    Args:
        name: its name in the manifest.
        path: where it lies.
        record: what it holds.
    """

    name: str
    path: Path
    record: ClassRecord


Folders = Mapping[str, Sequence[Folder]]  # split -> its folders


def build_manifest(kind: str, classes: Sequence[str], images: Mapping[str, int], folders: Folders, generated: object = None) -> Manifest:
    """The manifest of a data set.

    Args:
        kind: a row of `KINDS`.
        classes: names, in the order of the class indices.
        images: number of images of each split.
        folders: what each split holds.
        generated: the settings that it was written with.
    """
    splits = {
        split: SplitRecord(
            images=images[split],
            bytes=sum(folder.record.bytes for folder in folders[split]),
            folders={folder.name: folder.record for folder in folders[split]},
        )
        for split in SPLITS
    }
    manifest = Manifest(
        kind=kind,
        classes={name: index for index, name in enumerate(classes)},
        splits=splits,
        departures=(),
        generated=generated,
        hash=short_hash("\n".join(f"{split}/{name} {r.hash}" for split in SPLITS for name, r in splits[split].folders.items())),
    )
    if KINDS[kind].official is None:
        return manifest
    name, counts = KINDS[kind].official
    departures = tuple(f"{count}: {found:,}, {name} has {wanted:,}" for count, found, wanted in _find_differences(manifest, counts))
    return dataclasses.replace(manifest, departures=departures)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest as sorted JSON, atomically."""
    write_json(path, dataclasses.asdict(manifest))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest strictly; a missing or damaged file is a `UserError` that names the stage to run."""
    if not path.is_file():
        raise UserError(f"{path}: no such manifest; run `repro prepare-data` first")
    content = read_json(path)
    kind = KINDS.get(str(content.get("kind"))) if isinstance(content, dict) else None
    if kind is not None and kind.settings is not None and content.get("generated") is not None:
        content["generated"] = build(kind.settings, content["generated"], f"{path}.generated")
    return build(Manifest, content, str(path))


def verify(manifest: Manifest, root: Path, folders: Folders) -> None:
    """Compare a data set, or a part of it, with its manifest by names and sizes.

    Args:
        manifest: the record of all of it.
        root: where it lies, for the message.
        folders: what lies there now, of the splits that are compared.

    Raises:
        UserError: one line that names the first folder that differs, how, and how many do.
    """
    different = [
        (folder, manifest.splits[split].folders[folder.name])
        for split, listed in folders.items()
        for folder in listed
        if folder.record != manifest.splits[split].folders[folder.name]
    ]
    if not different:
        return
    folder, recorded = different[0]
    found = folder.record
    if found.images != recorded.images:
        problem = f"{found.images} images, the manifest has {recorded.images}"
    elif not recorded.images:
        problem = "this annotation file differs from the one in the manifest"
    elif found.bytes != recorded.bytes:
        problem = f"{found.bytes} bytes in {found.images} images, the manifest has {recorded.bytes}: a file was changed or cut short"
    else:
        problem = "a file was renamed, or two were swapped"
    number = "1 such difference" if len(different) == 1 else f"{len(different)} such differences"
    raise UserError(f"{folder.path}: {problem} ({number}); {advise(manifest, root)}")


def verify_classes(manifest: Manifest, root: Path, classes: Sequence[str]) -> None:
    """Compare the class folders of a data set with its manifest; raises UserError, one line that names the first that differs."""
    if different := set(classes) ^ set(manifest.classes):
        name = min(different)
        problem = "is not in the manifest" if name in classes else "is missing"
        raise UserError(f"{root}: class folder {name!r} {problem}; {advise(manifest, root)}")


def advise(manifest: Manifest, root: Path) -> str:
    """What to do where a data set is not the one of its manifest."""
    if manifest.generated is not None:
        return f"remove {root} and run the same command again, which writes it anew"
    return "restore the files, or run `repro prepare-data` to accept the data as it is"


def check_expected(manifest: Manifest, root: Path, expected: ExpectedCounts, where: str) -> None:
    """Refuse a data set whose counts are not the expected ones.

    Args:
        manifest: what it holds.
        root: where it lies, for the message.
        expected: what it must hold.
        where: the key path of the expected counts, for the message.

    Raises:
        UserError: one line with the key to change where the difference is wanted.
    """
    for name, found, wanted in _find_differences(manifest, expected):
        raise UserError(f"{where}.{name}: {wanted:,} expected, {root} holds {found:,}; complete the data or change this")


def record_files(files: Sequence[tuple[bytes, int]]) -> ClassRecord:
    """The record of a folder, given (name, bytes) of each file."""
    listing = b"".join(b"%s\0%d\n" % pair for pair in files)
    return ClassRecord(images=len(files), bytes=sum(size for _, size in files), hash=short_hash(listing))


def _find_differences(manifest: Manifest, expected: ExpectedCounts) -> Iterator[tuple[str, int, int]]:
    """(name, found, expected) of each count that differs."""
    counts = {"classes": len(manifest.classes), **{split: manifest.splits[split].images for split in SPLITS}}
    for name, found in counts.items():
        if found != (wanted := getattr(expected, name)):
            yield name, found, wanted
