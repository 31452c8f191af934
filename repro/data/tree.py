"""The ImageNet folder layout: root/{train,val}/<class>/<image>, scanned once with `os.scandir`; or archives, see `shards`."""

import dataclasses
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from ..core.errors import UserError
from .shards import Archives, is_sharded, list_shards

SPLITS = ("train", "val")
EXTENSIONS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
# what Pillow raises on damaged files of various formats
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


def reason(error: Exception) -> str:
    """An exception in one line that repeats no path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return "not in any image format" if "cannot identify image file" in text else text or type(error).__name__


class Source(NamedTuple):
    """Bytes of an image: a whole file, or `size` bytes of it from `offset` on."""

    file: str
    offset: int = 0
    size: int | None = None

    def read(self) -> bytes:
        """The bytes; raises OSError."""
        with open(self.file, "rb") as stream:
            stream.seek(self.offset)
            return stream.read(-1 if self.size is None else self.size)


@dataclasses.dataclass(frozen=True)
class Split:
    """The files of one split, ordered by class and then by name.

    Arrays and not lists of str: 1.28 million Python strings would be copied into every worker process page by page.

    Args:
        names: (N,) bytes; file names within their class folder.
        sizes: (N,) int64; bytes.
        targets: (N,) int64; class indices.
        archives: where the images lie, if not in class folders.
    """

    names: np.ndarray
    sizes: np.ndarray
    targets: np.ndarray
    archives: Archives | None = None

    def take(self, chosen: np.ndarray) -> "Split":
        """The images of these indices (n,), which ascend."""
        archives = self.archives and dataclasses.replace(
            self.archives, number=self.archives.number[chosen], offsets=self.archives.offsets[chosen]
        )
        return Split(self.names[chosen], self.sizes[chosen], self.targets[chosen], archives)

    def find(self, target: int, name: str) -> int:
        """The index of an image, by its class index and its name."""
        first, last = np.searchsorted(self.targets, (target, target + 1))
        return int(first + np.searchsorted(self.names[first:last], os.fsencode(name)))


@dataclasses.dataclass(frozen=True)
class Tree:
    """A scanned root. A class's index is its place in the sorted folder names.

    Args:
        root: the folder that holds train and val.
        classes: sorted names of the class folders, the same in both splits.
        splits: `train` and `val`.
    """

    root: Path
    classes: tuple[str, ...]
    splits: dict[str, Split]

    def path(self, split: str, index: int) -> Path:
        """The file of one sample; of one in an archive, the archive's path and the name in it."""
        files, source = self.splits[split], self.source(split, index)
        return Path(source.file) if files.archives is None else Path(source.file, os.fsdecode(files.names[index]))

    def source(self, split: str, index: int) -> Source:
        """Where the bytes of one sample are."""
        # text and no pathlib paths, which are slow to join: this runs for every image
        files, folder = self.splits[split], os.path.join(self.root, split)
        if files.archives is None:
            return Source(os.path.join(folder, self.classes[files.targets[index]], os.fsdecode(files.names[index])))
        archive = os.path.join(folder, files.archives.file(index))
        return Source(archive, int(files.archives.offsets[index]), int(files.sizes[index]))


def scan_tree(root: Path, kind: str) -> Tree:
    """Read names and sizes of all images below `root`.

    Args:
        root: the folder that holds train/<class>/ and val/<class>/.
        kind: the data set's kind, for messages.

    Raises:
        UserError: root, split or images missing, an empty class folder, or classes that differ between train and val.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; {_layout(kind)}")
    found = {split: _read_split(root / split, kind) for split in SPLITS}
    train, val = (set(found[split][0]) for split in SPLITS)
    if train != val:
        name = min(train ^ val)
        there, missing = ("train", "val") if name in train else ("val", "train")
        raise UserError(
            f"{root}: class {name!r} is in {there} but not in {missing} ({len(train ^ val)} such classes); "
            "both splits need the same classes"
        )
    return Tree(root, found["train"][0], {split: files for split, (_, files) in found.items()})


def _read_split(folder: Path, kind: str) -> tuple[tuple[str, ...], Split]:
    """The classes, sorted, and the files of one split."""
    if folder.is_dir() and is_sharded(folder):
        return read_archives(folder)
    classes = tuple(_class_folders(folder, kind))
    return classes, _read_folders(folder, classes)


def read_archives(folder: Path) -> tuple[tuple[str, ...], Split]:
    """The classes, sorted, and the images of a split that lies in archives; see `shards.list_shards`, also for errors."""
    listed, archives = list_shards(folder, EXTENSIONS)
    classes = tuple(os.fsdecode(name) for name in listed.pop("classes").tolist())
    return classes, Split(**listed, archives=archives)


def _class_folders(folder: Path, kind: str) -> list[str]:
    names, loose = [], 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    names.append(entry.name)
                elif entry.name.lower().endswith(EXTENSIONS):
                    loose += 1
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; {_layout(kind)}") from None
    if loose:
        raise UserError(f"{folder}: {loose:,} images lie directly in it; sort them into one folder per class (docs/data.md)")
    if not names:
        raise UserError(f"{folder}: holds no class folders; {_layout(kind)}")
    return sorted(names)


def _read_folders(folder: Path, classes: tuple[str, ...]) -> Split:
    names: list[bytes] = []
    sizes: list[int] = []
    counts = []
    for name in classes:
        files = list_images(folder / name)
        if not files:
            raise UserError(
                f"{folder / name}: holds no image ({', '.join(EXTENSIONS)}); fill this class folder or remove it from train and val"
            )
        names.extend(file for file, _ in files)
        sizes.extend(size for _, size in files)
        counts.append(len(files))
    targets = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return Split(np.array(names, dtype=np.bytes_), np.array(sizes, dtype=np.int64), targets)


def list_images(folder: Path) -> list[tuple[bytes, int]]:
    """(name, bytes) of the images that lie directly in a folder, sorted by name.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (os.fsencode(entry.name), entry.stat().st_size)
                for entry in entries
                if entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith(".")
            )
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}") from None


def _layout(kind: str) -> str:
    if kind == "imagenet":
        wanted = "lay ImageNet-1K out as train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, 1000 folders each (docs/data.md)"
    else:
        wanted = "lay the data out as train/<class>/<image> and val/<class>/<image> (docs/data.md)"
    return f"{wanted} and set runtime.data_roots.{kind}"
