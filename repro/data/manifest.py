"""Manifests: the contents of a data set in a file small enough for Git. Stages depend on it, and DVC hashes no image.

A manifest holds no absolute path and no date. For a published data set, names and sizes are compared and contents are
not: a check of ImageNet takes seconds, not hours. For an embedded one, which is small, contents are compared too.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ..core.config import build
from ..core.errors import UserError
from ..core.hashing import short_hash
from ..core.record import read_json, write_json
from .findings import count
from .kinds import KINDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassRecord:
    """One folder, or one annotation file: number of images, bytes, and a hash.

    A folder's hash covers names and sizes, and contents where the kind is embedded; a file's hash covers its content.
    """

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

    The classes of `scenes` are those of segmentation; detection has the first ten of them. A manifest that was read has
    its classes and splits in alphabetical order: take the order of splits from `DataCell.row`.
    """

    kind: Literal[tuple(KINDS)]
    classes: dict[str, int]  # name -> index
    splits: dict[str, SplitRecord]  # class folders, or image and label folders and the annotation file
    departures: tuple[str, ...]  # differences from the published counts; empty for a complete set
    generated: object | None  # the settings that wrote an embedded set or cut `tune` off, see `Kind.settings`
    hash: str  # hash over the records of all folders


class Folder(NamedTuple):
    """A folder or an annotation file: its name in the manifest, its path, and its record."""

    name: str
    path: Path
    record: ClassRecord


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest as sorted JSON, atomically."""
    write_json(path, dataclasses.asdict(manifest))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest strictly; raises UserError with the stage to run where it is missing or damaged."""
    if not path.is_file():
        raise UserError(f"{path}: no such manifest; run `repro prepare-data` first")
    manifest = build(Manifest, read_json(path), str(path))
    settings = KINDS[manifest.kind].settings
    if settings is None or manifest.generated is None:
        return manifest
    return dataclasses.replace(manifest, generated=build(settings, manifest.generated, f"{path}.generated"))


def verify(manifest: Manifest, root: Path, folders: Mapping[str, Sequence[Folder]]) -> None:
    """Compare a data set at `root`, or a part of it, with its manifest; `folders` are the present ones by split.

    Raises:
        UserError: a class folder is missing, any folder is unknown, or the first folder that differs, with the number
            of others. In a dense format no folder is missing, since `folders` may be those of one part.
    """
    advice, different = advise(manifest, root), []
    for split, listed in folders.items():
        records, names = manifest.splits[split].folders, {folder.name for folder in listed}
        if "folders" in KINDS[manifest.kind].parts and (single := names ^ records.keys()):
            problem = "is not in the manifest" if min(single) in names else "is missing"
            raise UserError(f"{root}: class folder {min(single)!r} {problem}; {advice}")
        if unknown := names - records.keys():
            raise UserError(f"{root}: {min(unknown)!r} is not in the manifest; {advice}")
        different += [(folder, records[folder.name]) for folder in listed if folder.record != records[folder.name]]
    if not different:
        return
    (_, path, found), recorded = different[0]
    if found.images != recorded.images:
        problem = f"{found.images} images, the manifest has {recorded.images}"
    elif not recorded.images:
        problem = "this annotation file differs from the one in the manifest"
    elif found.bytes != recorded.bytes:
        problem = f"{found.bytes} bytes in {found.images} images, the manifest has {recorded.bytes}: a file was changed or cut short"
    elif KINDS[manifest.kind].compares_contents:
        problem = "a file was changed or renamed"
    else:
        problem = "a file was renamed, or two were swapped"
    raise UserError(f"{path}: {problem} ({count(len(different), 'such difference')}); {advice}")


def advise(manifest: Manifest, root: Path) -> str:
    """Say what to do about a data set at `root` that differs from its manifest."""
    if KINDS[manifest.kind].embedded:
        return f"remove {root} and run the same command again, which writes the data set again"
    return "restore the files, or run `repro prepare-data` to accept the data as it is"


def record_files(files: Sequence[tuple[bytes, int]], hashes: Sequence[str] | None = None) -> ClassRecord:
    """Make a folder's record from the (name, bytes) of its files, and the hashes of their contents if these count.

    The hash depends on the order of the files: callers sort them by name. Committed manifests hold it: if it were
    computed otherwise, every data set would be refused as changed.
    """
    rows = [b"%s\0%d" % pair for pair in files]
    if hashes is not None:
        rows = [row + b"\0" + content.encode() for row, content in zip(rows, hashes, strict=True)]
    listing = b"".join(row + b"\n" for row in rows)
    return ClassRecord(images=len(files), bytes=sum(size for _, size in files), hash=short_hash(listing))
