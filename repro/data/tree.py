"""The ImageNet folder layout: root/{train,val}/<class>/<image>, scanned once with `os.scandir`."""

import dataclasses
import os
from pathlib import Path

import numpy as np

from ..core.errors import UserError

SPLITS = ("train", "val")
EXTENSIONS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")


@dataclasses.dataclass(frozen=True)
class Split:
    """The files of one split, ordered by class and then by name.

    Arrays and not lists of str: 1.28 million Python strings would be copied into every worker process page by page.

    Args:
        names: (N,) bytes; file names within their class folder.
        sizes: (N,) int64; bytes.
        targets: (N,) int64; class indices.
    """

    names: np.ndarray
    sizes: np.ndarray
    targets: np.ndarray


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
        """The file of one sample."""
        files = self.splits[split]
        return self.root / split / self.classes[files.targets[index]] / os.fsdecode(files.names[index])


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
    folders = {split: _class_folders(root / split, kind) for split in SPLITS}
    train, val = (set(folders[split]) for split in SPLITS)
    if train != val:
        name = min(train ^ val)
        there, missing = ("train", "val") if name in train else ("val", "train")
        raise UserError(
            f"{root}: class {name!r} is in {there} but not in {missing} ({len(train ^ val)} such classes); "
            "both splits need the same class folders"
        )
    classes = tuple(folders["train"])
    return Tree(root, classes, {split: _read_split(root / split, classes) for split in SPLITS})


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


def _read_split(folder: Path, classes: tuple[str, ...]) -> Split:
    names: list[bytes] = []
    sizes: list[int] = []
    counts = []
    for name in classes:
        files = _read_class(folder / name)
        names.extend(file for file, _ in files)
        sizes.extend(size for _, size in files)
        counts.append(len(files))
    targets = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return Split(np.array(names, dtype=np.bytes_), np.array(sizes, dtype=np.int64), targets)


def _read_class(folder: Path) -> list[tuple[bytes, int]]:
    try:
        with os.scandir(folder) as entries:
            files = [
                (os.fsencode(entry.name), entry.stat().st_size)
                for entry in entries
                if entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith(".")
            ]
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}") from None
    if not files:
        raise UserError(
            f"{folder}: holds no image ({', '.join(EXTENSIONS)}); fill this class folder or remove it from train and val"
        )
    return sorted(files)


def _layout(kind: str) -> str:
    if kind == "imagenet":
        wanted = "lay ImageNet-1K out as train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, 1000 folders each (docs/data.md)"
    else:
        wanted = "lay the data out as train/<class>/<image> and val/<class>/<image> (docs/data.md)"
    return f"{wanted} and set runtime.data_roots.{kind}"
