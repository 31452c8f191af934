"""The annotations of COCO detection: targets as mmdet takes them, in arrays.

<root>/{train,val}2017/<image>      <root>/annotations/instances_{train,val}2017.json
"""

import dataclasses
import json
import marshal
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.hashing import short_hash
from .findings import RAISE_FIRST, BadData, Finding, Report, count
from .manifest import ClassRecord, Folder, record_files
from .pixels import explain_error, read_pixels
from .settings import SPLITS
from .tree import list_entries, list_images, show_few

_RENEW = "unpack annotations_trainval2017.zip again"
_SLACK_PX = 1.0  # coordinates are rounded
# sorts of faults of annotations -> severity and advice; those that training survives are warnings
_FAULTS = {
    "malformed": ("error", _RENEW),
    "lost": ("error", _RENEW),
    "maskless": ("error", "take the instances_ file, not one of boxes alone"),
    "empty": ("warning", "training leaves it out"),
    "outside": ("warning", "training takes what lies inside"),
}
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Instances:
    """One annotation file. Arrays and bytes, since a million objects would be copied into every worker process page by page.

    Args:
        file: the JSON itself, which pycocotools reads for the evaluation.
        folder: the folder of the images.
        classes: (K,) names; label k in 1..K is `classes[k - 1]`.
        category_ids: (K,) their ids in the file, ascending, mostly with gaps.
        image_ids: (N,) int64, ascending.
        names: (N,) bytes; file names.
        sizes: (N, 2) int64; (height, width) in pixels.
        starts: (N + 1,) int64; the targets of image n are those from starts[n] to starts[n + 1] - 1.
        boxes: (A, 4) fp32; corners (x, y, x, y) in pixels, clipped to the image.
        labels: (A,) int64 in 1..K.
        masks: the `segmentation` of each target, marshalled, one after the other.
        mask_starts: (A + 1,) int64; where each begins.
        num_annotations: number of annotations in the file, targets or not.
        num_empty, num_outside: number of boxes without area, and of boxes that reach beyond their image.
    """

    file: Path
    folder: Path
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    image_ids: np.ndarray
    names: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    masks: bytes
    mask_starts: np.ndarray
    num_annotations: int
    num_empty: int
    num_outside: int

    def path(self, place: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(self.names[place])

    def targets(self, place: int) -> slice:
        """The targets of an image among those of all."""
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def segmentation(self, target: int) -> Any:
        """Polygons or RLE, as the file has them."""
        return marshal.loads(self.masks[self.mask_starts[target] : self.mask_starts[target + 1]])


def read_instances(root: Path, split: str, report: Report = RAISE_FIRST) -> Instances | None:
    """Read and judge the annotations of `train` or `val`, and see that their images are there.

    As in mmdet, crowds are not targets, nor are boxes that are narrower or lower than a pixel, without area or outside of their image;
    boxes that reach over the border are clipped.

    Args:
        root: the folder that holds train2017, val2017 and annotations.
        split: `train` or `val`.
        report: takes what is wrong: a file or folder that is missing, malformed JSON, ids that occur twice or belong to nothing, a
            target without a mask, images that are not in the folder; warnings for boxes without area or beyond their image.

    Returns:
        The annotations; None where the report lets the reading continue after an error that leaves nothing to read.

    Raises:
        UserError: an error, if the report raises it.
    """
    file, folder = root / f"annotations/instances_{split}2017.json", root / f"{split}2017"
    if (content := _read_json(file, report)) is None:
        return None
    categories = _index_rows(content, file, "categories", ("id", "name"), report)
    images = _index_rows(content, file, "images", ("id", "file_name", "height", "width"), report)
    annotations = _index_rows(content, file, "annotations", ("id", "image_id", "category_id", "bbox"), report)
    _find_images(folder, file, [row["file_name"] for row in images.values()], report)
    category_ids, image_ids = sorted(categories), sorted(images)
    label_of = {category_id: label for label, category_id in enumerate(category_ids, start=1)}
    place_of = {image_id: place for place, image_id in enumerate(image_ids)}
    rows, judge = [], _Judge(images, categories)
    for row in annotations.values():
        if (box := judge.find_target(row)) is not None:
            rows.append((place_of[row["image_id"]], box, label_of[row["category_id"]], marshal.dumps(row["segmentation"])))
    for sort, (severity, advice) in _FAULTS.items():
        report.add([Finding(severity, file, problem, advice) for problem in judge.faults[sort]])
    rows.sort(key=lambda row: row[0])
    ordered = [images[image_id] for image_id in image_ids]
    return Instances(
        file=file,
        folder=folder,
        classes=tuple(categories[category_id]["name"] for category_id in category_ids),
        category_ids=tuple(category_ids),
        image_ids=np.array(image_ids, dtype=np.int64),
        names=np.array([os.fsencode(row["file_name"]) for row in ordered], dtype=np.bytes_),
        sizes=np.array([(row["height"], row["width"]) for row in ordered], dtype=np.int64).reshape(-1, 2),
        starts=np.searchsorted([row[0] for row in rows], np.arange(len(images) + 1)),
        boxes=np.array([row[1] for row in rows], dtype=np.float32).reshape(-1, 4),
        labels=np.array([row[2] for row in rows], dtype=np.int64),
        masks=b"".join(row[3] for row in rows),
        mask_starts=np.cumsum([0, *(len(row[3]) for row in rows)]),
        num_annotations=len(content["annotations"]),
        num_empty=len(judge.faults["empty"]),
        num_outside=len(judge.faults["outside"]),
    )


def read_classes(root: Path, report: Report = RAISE_FIRST) -> tuple[str, ...]:
    """The names of the categories, in the order of their ids; reads and judges both splits.

    Raises:
        UserError: see `read_instances`; categories that differ between train and val.
    """
    train, val = (read_instances(root, split, report) for split in SPLITS)
    if (train.category_ids, train.classes) != (val.category_ids, val.classes):
        report.error(val.file, f"has other categories than {train.file.name}", "take both files of one release")
    return train.classes


def list_folders(root: Path, split: str, prefix: str) -> list[Folder]:
    """The image folder and the annotation file of a split; `prefix` begins their names in the manifest."""
    images, annotations = f"{split}2017", f"annotations/instances_{split}2017.json"
    try:
        content = (root / annotations).read_bytes()
    except OSError as error:
        raise BadData(Finding("error", root / annotations, explain_error(error), _RENEW)) from None
    return [
        Folder(prefix + images, root / images, record_files(list_entries(root / images).images)),
        Folder(prefix + annotations, root / annotations, ClassRecord(images=0, bytes=len(content), hash=short_hash(content))),
    ]


def read_image(path: Path, size: tuple[int, int], file: Path) -> np.ndarray:
    """An image as (H, W, 3) uint8, red first.

    Args:
        path: the image.
        size: (height, width) in pixels that the annotations say.
        file: the annotations, for the message.

    Raises:
        UserError: it cannot be read, or has another size.
    """
    pixels = read_pixels(path)
    if (found := pixels.shape[:2]) != size:
        turned = " (turned: is it another copy of the images?)" if found == size[::-1] else ""
        problem = f"is {found[1]}×{found[0]}, {file.name} says {size[1]}×{size[0]}{turned}"
        raise BadData(Finding("error", path, problem, "boxes and masks would not fit; take images and annotations of one release"))
    return pixels


class _Judge:
    """Decides which annotations are targets, and collects what is wrong with the others.

    Args:
        images, categories: the rows of the file, by id.
    """

    def __init__(self, images: Mapping[int, Row], categories: Mapping[int, Row]):
        self.images, self.categories = images, categories
        self.faults: dict[str, list[str]] = {sort: [] for sort in _FAULTS}

    def find_target(self, row: Row) -> tuple[float, float, float, float] | None:
        """The corners of an annotation's box within its image; None where mmdet sees no target."""
        name = f"annotation {row['id']}"
        try:
            for key, known in (("image_id", self.images), ("category_id", self.categories)):
                if row[key] not in known:
                    self.faults["lost"].append(f"{name} has {key} {row[key]}, which is not in the file")
                    return None
            x, y, width, height = box = [float(number) for number in row["bbox"]]
            if not all(map(math.isfinite, box)):
                raise ValueError(f"box {box} is not finite")
            area = float(row.get("area", 1))
        except (TypeError, ValueError) as error:
            self.faults["malformed"].append(f"{name} is malformed ({explain_error(error)})")
            return None
        wide, high = self.images[row["image_id"]]["width"], self.images[row["image_id"]]["height"]
        if width <= 0 or height <= 0:
            self.faults["empty"].append(f"{name}: box {box} has no area")
        elif min(x, y) < -_SLACK_PX or x + width > wide + _SLACK_PX or y + height > high + _SLACK_PX:
            self.faults["outside"].append(f"{name}: box {box} leaves its image of {wide}×{high}")
        left, top, right, bottom = max(x, 0.0), max(y, 0.0), min(x + width, wide), min(y + height, high)
        if row.get("iscrowd") or width < 1 or height < 1 or right <= left or bottom <= top or not area > 0:
            return None
        if not row.get("segmentation"):
            self.faults["maskless"].append(f"{name} has no segmentation")
            return None
        return left, top, right, bottom


def _read_json(file: Path, report: Report) -> dict[str, Any] | None:
    """The three lists of an annotation file; None where it has not got them."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        report.error(file, explain_error(error), _RENEW)
        return None
    except (ValueError, RecursionError) as error:
        report.error(file, f"is not valid JSON ({explain_error(error)[:120]})", _RENEW)
        return None
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            report.error(file, f"has no list {key!r}", _RENEW)
            return None
    return content


def _index_rows(content: Mapping[str, Any], file: Path, key: str, columns: Sequence[str], report: Report) -> dict[int, Row]:
    """The rows of a list by their id. Rows without these columns, or with the id of another row, are errors and are left out."""
    types = {"id": int, "file_name": str, "height": int | float, "width": int | float}
    found: dict[int, Row] = {}
    malformed, twice = [], []
    for place, row in enumerate(content[key]):
        if not isinstance(row, dict) or not all(name in row and isinstance(row[name], types.get(name, object)) for name in columns):
            malformed.append((file, f"{key}[{place}] is malformed, it needs {', '.join(columns)}"))
        elif row["id"] in found:
            twice.append((file, f"{key}[{place}] has id {row['id']}, as another one has"))
        else:
            found[row["id"]] = row
    report.errors(malformed, _RENEW)
    report.errors(twice, _RENEW)
    return found


def _find_images(folder: Path, file: Path, names: Sequence[str], report: Report) -> None:
    """Report images that are missing, empty or in no annotation file."""
    elsewhere, advice = folder.parent / "images" / folder.name, f"unpack {folder.name}.zip again"
    sizes = list_images(folder, report, f"move {elsewhere} here" if elsewhere.is_dir() else advice)
    if sizes is None:
        return
    report.errors([(folder / name, f"no such file, {file.name} has it") for name in sorted(set(names) - set(sizes))], advice)
    if unused := sorted(set(sizes) - set(names)):
        report.warning(
            folder, f"holds {count(len(unused), 'image')} that {file.name} does not have ({show_few(unused)})", "nothing reads them"
        )
