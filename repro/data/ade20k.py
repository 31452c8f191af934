"""ADE20K's 150 classes, and what is laid out as they are: pairs of an image and a label map.

    <root>/images/{training,validation}/<stem>.jpg      <root>/annotations/{training,validation}/<stem>.png
    <root>/objectInfo150.txt: a line for each class after the heading, its name in the last column

A label map has 8 bits, 0 where nothing is labelled and 1..K for the classes.
"""

import os
from pathlib import Path

import numpy as np

from ..core.errors import UserError
from .pixels import read_labels, read_pixels
from .tree import list_images

FOLDERS = {"train": "training", "val": "validation"}
_RELEASE = "take ADEChallengeData2016.zip of the MIT Scene Parsing Benchmark (docs/data.md)"


class AdePairs:
    """One split, in the order of the names. Pairs are read at their own size and not changed.

    Args:
        root: ADEChallengeData2016, or the folder that holds it.
        split: `train` or `val`.

    Raises:
        UserError: a folder or the list of classes missing, an image or a label map without its partner, no pair at all.
    """

    def __init__(self, root: Path, split: str):
        base = ade_base(root)
        self.classes = _read_classes(base)
        self._images, self._labels = (base / part / FOLDERS[split] for part in ("images", "annotations"))
        images, labels = ([name for name, _ in list_images(folder)] for folder in (self._images, self._labels))
        stems = [{os.path.splitext(name)[0] for name in names} for names in (images, labels)]
        if single := sorted(stems[0] ^ stems[1]):
            here, what = (self._images, "label map") if single[0] in stems[0] else (self._labels, "image")
            raise UserError(f"{here / os.fsdecode(single[0])}: has no {what} ({len(single):,} such files); {_RELEASE}")
        if not images:
            raise UserError(f"{self._images}: holds no image; {_RELEASE}")
        # arrays, since lists would be copied into every worker process page by page
        self._names = np.array(images, dtype=np.bytes_), np.array(labels, dtype=np.bytes_)

    def __len__(self) -> int:
        return len(self._names[0])

    def name(self, index: int) -> str:
        """The image's file name."""
        return self.paths(index)[0].name

    def paths(self, index: int) -> tuple[Path, Path]:
        """The files of a pair: image and label map."""
        image, label = (os.fsdecode(names[index]) for names in self._names)
        return self._images / image, self._labels / label

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A pair: image (H, W, 3) uint8, red first, and label map (H, W) uint8 with values 0..K.

        Raises:
            UserError: a file that cannot be decoded, a label above K, or two different sizes.
        """
        image_path, label_path = self.paths(index)
        image, labels = read_pixels(image_path), read_labels(label_path)
        if labels.shape != image.shape[:2]:
            found, wanted = (f"{shape[1]}×{shape[0]}" for shape in (labels.shape, image.shape))
            raise UserError(f"{label_path}: is {found}, its image {wanted}; {_RELEASE}")
        if labels.max() > len(self.classes):
            raise UserError(f"{label_path}: holds label {labels.max()}, at most {len(self.classes)} expected; {_RELEASE}")
        return image, labels


def ade_base(root: Path) -> Path:
    """ADEChallengeData2016, whether it is `root` or lies in it."""
    inside = root / "ADEChallengeData2016"
    return inside if inside.is_dir() else root


def _read_classes(root: Path) -> tuple[str, ...]:
    files = sorted(root.glob("objectInfo*.txt"))
    if len(files) != 1:
        raise UserError(f"{root}: {len(files)} files objectInfo<classes>.txt, which name the classes, one expected; {_RELEASE}")
    rows = [line.split("\t") for line in files[0].read_text(encoding="utf-8").splitlines()[1:] if line.strip()]
    if not rows or [row[0].strip() for row in rows] != [str(number) for number in range(1, len(rows) + 1)]:
        raise UserError(f"{files[0]}: expected a heading and lines that begin with 1, 2, 3, ..., parted by tabs; {_RELEASE}")
    return tuple(row[-1].strip() for row in rows)
