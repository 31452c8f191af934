"""Readers of semantic segmentation data in the layout of ADE20K's 150 classes: pairs of an image and a label map.

    <root>/images/{training,validation}/<stem>.jpg      <root>/annotations/{training,validation}/<stem>.png
    <root>/objectInfo150.txt: a heading and then a line for each class, with its name in the last column

A user's own set may list its classes in classes.txt instead, one name a line.

A label map is an 8-bit image: 0 where nothing is labelled, and 1..K for the classes.
"""

import os
from pathlib import Path

import numpy as np

from .findings import RAISE_FIRST, BadData, Finding, Reporter
from .kinds import Kind
from .manifest import Folder
from .pixels import MAX_PIXELS, explain_error, read_labelled, spread_places
from .tree import list_images, record_folder

# split -> its folder in ADE20K; the release has no `tune` and no `test`, drawn scenes have
FOLDERS = {"train": "training", "val": "validation", "tune": "tuning", "test": "testing"}
# advice for a file that is missing or wrong
RELEASE = "take ADEChallengeData2016.zip of the MIT Scene Parsing Benchmark, or correct your own files (docs/data.md)"
CLASSES_FILE = "classes.txt"  # in a user's own set, instead of objectInfo<K>.txt


class AdePairs:
    """Image and label map pairs of one split, sorted by file name. They are read at their own size.

    Args:
        root, split: ADEChallengeData2016 or the folder that holds it, and one of `Kind.splits`.
        report: receives the findings, and may raise an error as UserError. Errors: a missing folder or list of classes,
            an image or label map that is empty or has no partner, two files of one stem, a split without images.
            Warnings: files that are not images.
        max_pixels: largest number of pixels of an image that is read.
    """

    def __init__(self, root: Path, split: str, report: Reporter = RAISE_FIRST, *, max_pixels: int = MAX_PIXELS):
        base, self._max_pixels = find_base(root), max_pixels
        self.classes = _read_names(base, report)
        self._images, self._labels = (base / part / FOLDERS[split] for part in ("images", "annotations"))
        images, labels = (_list_stems(folder, report) for folder in (self._images, self._labels))
        if images is not None and labels is not None:
            single = [
                (self._images / images[stem], "has no label map") for stem in sorted(images.keys() - labels.keys())
            ]
            single += [(self._labels / labels[stem], "has no image") for stem in sorted(labels.keys() - images.keys())]
            report.errors(single, RELEASE)
        images, labels = images or {}, labels or {}
        pairs = sorted((images[stem], labels[stem]) for stem in images.keys() & labels.keys())
        # the file names of the images and of the label maps, (N,) each. Byte arrays: the reference counts of a list of
        # strings would make every forked worker copy its memory pages
        self._names = tuple(np.array([os.fsencode(pair[part]) for pair in pairs], dtype=np.bytes_) for part in (0, 1))

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._names[0])

    def name(self, index: int) -> str:
        """Return the file name of an image."""
        return self.paths(index)[0].name

    def paths(self, index: int) -> tuple[Path, Path]:
        """Return the paths of a pair: (image, label map)."""
        image, label = (os.fsdecode(names[index]) for names in self._names)
        return self._images / image, self._labels / label

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Read a pair: image (H, W, 3) uint8 in RGB order, and label map (H, W) uint8 with values 0..K.

        Raises:
            UserError: as `read_labelled`, or a label above K.
        """
        image, labels = self.paths(index)
        pixels, values = read_labelled(image, labels, self._max_pixels)
        if (fault := judge_labels(labels, values, len(self.classes))) is not None:
            raise BadData(fault)
        return pixels, values


def judge_labels(path: Path, labels: np.ndarray, num_classes: int) -> Finding | None:
    """Return the fault of a label map whose values exceed the number of classes; None for one without it."""
    if labels.max() <= num_classes:
        return None
    problem = f"holds label {labels.max()}, at most {num_classes} expected"
    advice = f"classes are 1 to {num_classes}, and 0 is void; name all classes, or correct the labels (docs/data.md)"
    return Finding("error", path, problem, advice)


def survey(pairs: AdePairs) -> tuple[np.ndarray, np.ndarray]:
    """Measure the image sizes and the pixels per class of at most 500 evenly spaced pairs; raises as `AdePairs.read`.

    Training on own pictures chooses its crop and batch by them; the check of own data refuses labels that are all 0.

    Returns:
        (N, 2) int64, height and width in pixels; (K,) int64, the pixels of each class, without the unlabelled ones.
    """
    sizes, counts = [], np.zeros(len(pairs.classes) + 1, dtype=np.int64)
    for place in spread_places(len(pairs)):
        _, labels = pairs.read(place)
        sizes.append(labels.shape)
        counts += np.bincount(labels.ravel(), minlength=len(counts))
    return np.array(sizes, dtype=np.int64).reshape(-1, 2), counts[1:]


def read_classes(root: Path, row: Kind, report: Reporter) -> tuple[str, ...]:
    """Read the names of the classes 1..K and check the pairs of all splits; raises UserError as `AdePairs` does."""
    return [AdePairs(root, split, report).classes for split in row.splits][-1]


def find_base(root: Path) -> Path:
    """Return the folder ADEChallengeData2016: `root` itself, or the folder of this name in it."""
    inside = root / "ADEChallengeData2016"
    return inside if inside.is_dir() else root


def list_folders(root: Path, split: str, row: Kind) -> list[Folder]:
    """Record the folder of images and then that of label maps of a split; for the order see `coco.list_folders`."""
    base, names = find_base(root), [f"{part}/{FOLDERS[split]}" for part in ("images", "annotations")]
    return [record_folder(base, name, row.parts["ade20k"], row.compares_contents) for name in names]


def _read_names(base: Path, report: Reporter) -> tuple[str, ...]:
    """Read the names of classes 1..K from objectInfo<K>.txt or classes.txt.

    Returns () after an error that `report` lets pass.
    """
    files = sorted(base.glob("objectInfo*.txt"))
    if not files and (base / CLASSES_FILE).is_file():
        return _read_own(base / CLASSES_FILE, report)
    if len(files) != 1:
        report.error(
            base,
            f"expected one file objectInfo<K>.txt with the names of the classes, or {CLASSES_FILE}, found {len(files)}",
            RELEASE,
        )
        return ()
    if (lines := _read_lines(files[0], report)) is None:
        return ()
    rows = [line.split("\t") for line in lines[1:] if line.strip()]
    names = tuple(row[-1].strip() for row in rows)
    numbered = [row[0].strip() for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    if not rows or not numbered or len(set(names)) < len(names):
        problem = "expected a heading and lines that begin with 1, 2, 3, ... and end with a name of their own"
        report.error(files[0], f"{problem}, with tabs between the columns", RELEASE)
        return ()
    return names


def _read_own(file: Path, report: Reporter) -> tuple[str, ...]:
    """Read the names of classes 1..K from classes.txt; empty lines at its end do not count."""
    if (lines := _read_lines(file, report)) is None:
        return ()
    names = [line.strip() for line in lines]
    while names and not names[-1]:
        names.pop()
    if not names or "" in names or len(set(names)) < len(names):
        report.error(file, "expected a line for each class, with a name of its own", "name the classes 1, 2, 3, ...")
        return ()
    return tuple(names)


def _read_lines(file: Path, report: Reporter) -> list[str] | None:
    """Read the lines of a UTF-8 text, with or without a byte order mark; report any other file and return None."""
    try:
        if "\0" not in (text := file.read_bytes().decode("utf-8-sig")):
            return text.splitlines()
        problem = "it holds NUL"
    except (OSError, UnicodeDecodeError) as error:
        problem = explain_error(error)
    report.error(file, f"is not a text in UTF-8 ({problem})", "save it as UTF-8")
    return None


def _list_stems(folder: Path, report: Reporter) -> dict[str, str] | None:
    """Map the stem of each image in a folder to its file name; None where the folder is missing."""
    if (names := list_images(folder, report, RELEASE)) is None:
        return None
    found: dict[str, str] = {}
    twice = []
    for name in names:
        first = found.setdefault(os.path.splitext(name)[0], name)
        if first != name:
            twice.append((folder / name, f"has the stem of {first}"))
    report.errors(twice, "keep one of them, or rename one with its partner")
    return found
