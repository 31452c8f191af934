"""The annotations of COCO detection: targets as mmdet takes them, in arrays.

<root>/<split>2017/<image>      <root>/annotations/instances_<split>2017.json

One's own set may leave out the 2017 in the names of folders and files.
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
from .manifest import ClassRecord, Folder
from .pixels import MAX_PIXELS, explain_error, read_pixels
from .tree import list_images, record_folder, show_few

_RENEW = "unpack annotations_trainval2017.zip again, or correct your own file"
_SLACK_PX = 1.0  # coordinates are rounded
_MOST_OUTSIDE = 10  # how far from its origin a polygon may reach, in sides of the image
# sorts of faults of annotations -> severity and advice; those that training survives are warnings
_FAULTS = {
    "malformed": ("error", _RENEW),
    "lost": ("error", _RENEW),
    "maskless": ("error", "take the instances_ file, not one of boxes alone"),
    "empty": ("warning", "training leaves it out"),
    "outside": ("warning", "training takes what lies inside"),
}
Row = dict[str, Any]
Box = tuple[float, float, float, float]  # corners
Faults = dict[str, list[str]]  # sort -> descriptions


@dataclasses.dataclass(frozen=True)
class Instances:
    """One annotation file of K categories, N images and A targets; boxes and masks follow image by image.

    Arrays and bytes, since a million objects would be copied into every worker process page by page.
    """

    file: Path  # the JSON itself, which pycocotools reads for the evaluation
    folder: Path  # of the images
    classes: tuple[str, ...]  # (K,) names; label k in 1..K is classes[k - 1]
    category_ids: tuple[int, ...]  # (K,) their ids in the file, ascending, mostly with gaps
    image_ids: np.ndarray  # (N,) int64, ascending
    names: np.ndarray  # (N,) bytes; file names
    sizes: np.ndarray  # (N, 2) int64; (height, width) in pixels
    starts: np.ndarray  # (N + 1,) int64; the targets of image n are those from starts[n] to starts[n + 1] - 1
    boxes: np.ndarray  # (A, 4) fp32; corners (x, y, x, y) in pixels, clipped to the image
    labels: np.ndarray  # (A,) int64 in 1..K
    masks: bytes  # the `segmentation` of each target, marshalled, one after the other
    mask_starts: np.ndarray  # (A + 1,) int64; where each begins
    num_annotations: int  # in the file, targets or not
    num_empty: int  # boxes without area
    num_outside: int  # boxes that reach beyond their image
    max_pixels: int  # of an image that is read

    def path(self, place: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(self.names[place])

    def targets(self, place: int) -> slice:
        """The targets of an image among those of all."""
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def segmentation(self, target: int) -> Any:
        """Polygons or RLE, as the file has them."""
        return marshal.loads(self.masks[self.mask_starts[target] : self.mask_starts[target + 1]])


def read_instances(
    root: Path, split: str, report: Report = RAISE_FIRST, *, max_pixels: int = MAX_PIXELS
) -> Instances | None:
    """Read and judge the annotations of a split, and see that their images are there.

    As in mmdet, crowds are not targets, nor are boxes that are narrower or lower than a pixel, without area or outside
    of their image; boxes that reach over the border are clipped.

    Args:
        root, split: the folder that holds train2017, val2017 and annotations (see `find_parts`), and one of `Kind.splits`.
        report: takes what is wrong: a file or folder that is missing, malformed JSON, ids that occur twice or belong to
            nothing, a target without a mask, images that are not in the folder; warnings for boxes without area or
            beyond their image. Where it lets the reading continue after an error that leaves nothing to read, None is
            returned.

    Raises:
        UserError: an error, if the report raises it.
    """
    folder, file = (root / part for part in find_parts(root, split))
    if (content := _read_json(file, report)) is None:
        return None
    categories = _index_rows(content, file, "categories", ("id", "name"), report)
    images = _index_rows(content, file, "images", ("id", "file_name", "height", "width"), report)
    annotations = _index_rows(content, file, "annotations", ("id", "image_id", "category_id", "bbox"), report)
    _find_images(folder, file, [row["file_name"] for row in images.values()], report)
    category_ids, image_ids = sorted(categories), sorted(images)
    label_of = {category_id: label for label, category_id in enumerate(category_ids, start=1)}
    place_of = {image_id: place for place, image_id in enumerate(image_ids)}
    rows, faults = [], {sort: [] for sort in _FAULTS}
    for row in annotations.values():
        if (box := _find_target(row, images, categories, faults)) is not None:
            rows.append(
                (place_of[row["image_id"]], box, label_of[row["category_id"]], marshal.dumps(row["segmentation"]))
            )
    for sort, (severity, advice) in _FAULTS.items():
        report.add([Finding(severity, file, problem, advice) for problem in faults[sort]])
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
        num_empty=len(faults["empty"]),
        num_outside=len(faults["outside"]),
        max_pixels=max_pixels,
    )


def read_classes(root: Path, splits: Sequence[str], report: Report = RAISE_FIRST) -> tuple[str, ...]:
    """The names of the categories in the order of their ids; judges these splits.

    Raises:
        UserError: as `read_instances`, or categories that differ between the splits.
    """
    first, *others = (read_instances(root, split, report) for split in splits)
    for other in others:
        if (first.category_ids, first.classes) != (other.category_ids, other.classes):
            report.error(other.file, f"has other categories than {first.file.name}", "take all files of one release")
    return first.classes


def list_folders(root: Path, split: str, prefix: str, with_contents: bool) -> list[Folder]:
    """The image folder and the annotation file of a split; see `ade20k.list_folders`."""
    images, annotations = find_parts(root, split)
    try:
        content = (root / annotations).read_bytes()
    except OSError as error:
        raise BadData(Finding("error", root / annotations, explain_error(error), _RENEW)) from None
    return [
        Folder(prefix + images, root / images, record_folder(root / images, with_contents)),
        Folder(
            prefix + annotations,
            root / annotations,
            ClassRecord(images=0, bytes=len(content), hash=short_hash(content)),
        ),
    ]


def find_parts(root: Path, split: str) -> tuple[str, str]:
    """The image folder and the annotation file of a split below the root; without 2017 where only these are there."""
    names = f"{split}2017", f"annotations/instances_{split}2017.json"
    short = tuple(name.replace("2017", "") for name in names)
    return tuple(
        plain if (root / plain).exists() and not (root / dated).exists() else dated
        for dated, plain in zip(names, short, strict=True)
    )


def read_image(path: Path, size: tuple[int, int], file: Path, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read an image as (H, W, 3) uint8, red first; UserError where that fails or `file` has another (height, width)."""
    pixels = read_pixels(path, max_pixels)
    if (found := pixels.shape[:2]) != size:
        turned = " (turned: is it another copy of the images?)" if found == size[::-1] else ""
        problem = f"is {found[1]}×{found[0]}, {file.name} says {size[1]}×{size[0]}{turned}"
        raise BadData(
            Finding("error", path, problem, "boxes and masks would not fit; take images and annotations of one release")
        )
    return pixels


def _find_target(row: Row, images: Mapping[int, Row], categories: Mapping[int, Row], faults: Faults) -> Box | None:
    """The corners of an annotation's box within its image; None where mmdet sees no target. `faults` takes faults."""
    name = f"annotation {row['id']}"
    try:
        for key, known in (("image_id", images), ("category_id", categories)):
            if row[key] not in known:
                faults["lost"].append(f"{name} has {key} {row[key]}, which is not in the file")
                return None
        x, y, width, height = box = [float(number) for number in row["bbox"]]
        if not all(map(math.isfinite, box)):
            raise ValueError(f"box {box} is not finite")
        area = float(row.get("area", 1))
        image = images[row["image_id"]]
        if row.get("segmentation"):
            _check_mask(row["segmentation"], image["height"], image["width"])
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        faults["malformed"].append(f"{name} is malformed ({explain_error(error)})")
        return None
    wide, high = image["width"], image["height"]
    if width <= 0 or height <= 0:
        faults["empty"].append(f"{name}: box {box} has no area")
    elif min(x, y) < -_SLACK_PX or x + width > wide + _SLACK_PX or y + height > high + _SLACK_PX:
        faults["outside"].append(f"{name}: box {box} leaves its image of {wide}×{high}")
    left, top, right, bottom = max(x, 0.0), max(y, 0.0), min(x + width, wide), min(y + height, high)
    if row.get("iscrowd") or width < 1 or height < 1 or right <= left or bottom <= top or not area > 0:
        return None
    if not row.get("segmentation"):
        faults["maskless"].append(f"{name} has no segmentation")
        return None
    return left, top, right, bottom


def _read_json(file: Path, report: Report) -> dict[str, Any] | None:
    """The three lists of an annotation file; None if one is missing."""
    try:
        content = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
        lists = ("images", "annotations", "categories")
        missing = [key for key in lists if not isinstance(content, dict) or not isinstance(content.get(key), list)]
        problem = f"has no list {missing[0]!r}" if missing else None
    except OSError as error:
        problem = explain_error(error)
    except (ValueError, RecursionError) as error:
        problem = f"is not valid JSON ({explain_error(error)[:120]})"
    if problem is not None:
        report.error(file, problem, _RENEW)
        return None
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _anything(value: Any) -> bool:
    return True


def _is_side(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < 2**31


def _check_mask(segmentation: Any, height: int, width: int) -> None:
    """Raise an error about a mask that pycocotools, which trusts its input, could not draw into an image of this size.

    That takes room for every pixel of an outline, also of one far outside the image.
    """
    if isinstance(segmentation, dict):
        size, counts = segmentation["size"], segmentation["counts"]
        if list(size) != [height, width]:
            raise ValueError(f"a mask of {size[1]}×{size[0]} pixels in an image of {width}×{height}")
        if isinstance(counts, str):
            counts = _parse_counts(counts)
        if not all(type(count) is int and count >= 0 for count in counts) or sum(counts) != height * width:
            raise ValueError(f"the counts of a mask are not those of {width}×{height} pixels")
        return
    for polygon in segmentation:
        if not max(map(abs, polygon), default=0) <= _MOST_OUTSIDE * max(height, width) or len(polygon) % 2:
            raise ValueError(f"a polygon leaves its image of {width}×{height}, or has no y for an x")


def _parse_counts(text: str) -> list[int]:
    """The counts of a compressed RLE: five-bit groups, lowest first; from the third, relative to the last but one."""
    counts, value, shift = [], 0, 0
    for character in text.encode("ascii"):
        bits = character - 48
        if not 0 <= bits < 64 or shift > 30:
            raise ValueError("the counts of a mask are not compressed RLE")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits & 16) << (shift - 4)  # the sign
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value, shift = 0, 0
    if shift:
        raise ValueError("the counts of a mask are cut short")
    return counts


def _index_rows(
    content: Mapping[str, Any], file: Path, key: str, columns: Sequence[str], report: Report
) -> dict[int, Row]:
    """The rows of a list by id; those without these columns, or with another row's id, are errors and left out."""
    rules = {
        "id": lambda value: type(value) is int and abs(value) < 2**63,
        "name": lambda value: isinstance(value, str),
        "file_name": lambda value: isinstance(value, str) and value.isprintable(),
        "height": _is_side,
        "width": _is_side,
    }
    found: dict[int, Row] = {}
    malformed, twice = [], []
    for place, row in enumerate(content[key]):
        if not isinstance(row, dict) or not all(
            name in row and rules.get(name, _anything)(row[name]) for name in columns
        ):
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
    report.errors(
        [(folder / name, f"no such file, {file.name} has it") for name in sorted(set(names) - set(sizes))], advice
    )
    if unused := sorted(set(sizes) - set(names)):
        problem = f"has {count(len(unused), 'image')} that {file.name} does not list ({show_few(unused)})"
        report.warning(folder, problem, "nothing reads them")
