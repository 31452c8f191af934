"""COCO detection annotations as arrays: training targets by mmdet's rules, and the ground truth of COCO's scores.

<root>/<split>2017/<image>      <root>/annotations/instances_<split>2017.json

A user's own set may omit 2017 from the names of folders and files.
"""

import dataclasses
import json
import marshal
import math
import os
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as rle

from ..core.hashing import short_hash
from .findings import RAISE_FIRST, BadData, Finding, Reporter, count, show_few
from .kinds import Kind
from .manifest import ClassRecord, Folder
from .masks import check_mask, encode_mask
from .pixels import MAX_PIXELS, explain_error, read_pixels
from .tree import list_images, record_folder

# advice for a file that is missing or wrong
_RENEW = "add or correct the file; that of COCO 2017 is in annotations_trainval2017.zip"
_SLACK_PX = 1.0  # tolerance of a box at the border: coordinates are rounded
# fault of an annotation -> severity and advice; a fault that training survives is a warning
_FAULTS = {
    "malformed": ("error", _RENEW),
    "lost": ("error", _RENEW),
    "maskless": ("error", "add an outline, or take boxes as masks: boxes:PATH, or `kind: boxes` (docs/data.md)"),
    "empty": ("warning", "training leaves it out"),
    "outside": ("warning", "training takes what lies inside"),
}
# index of the image, label, box in the file's format (left, top, width, height), area in pixels, whether scoring
# ignores it (counts it neither as found nor as missed), and whether it is a training target
ANNOTATION = np.dtype(
    [("image", "i8"), ("label", "i8"), ("box", "f8", 4), ("area", "f8"), ("ignored", "?"), ("target", "?")]
)
_Row = dict[str, Any]  # an entry of one of the file's lists
Box = tuple[float, float, float, float]  # (left, top, right, bottom) in pixels
Faults = dict[str, list[str]]  # key of `_FAULTS` -> descriptions


@dataclasses.dataclass(frozen=True)
class Instances:
    """One annotation file of K categories, N images, M annotations and A training targets; sorted by image.

    Arrays and bytes instead of objects: the reference counts of a million objects would make every forked worker copy
    the memory pages.
    """

    file: Path  # the JSON, named in messages
    folder: Path  # folder of the images
    classes: tuple[str, ...]  # (K,) names; label k in 1..K is classes[k - 1]
    category_ids: tuple[int, ...]  # (K,) their ids in the file, ascending, mostly with gaps
    image_ids: np.ndarray  # (N,) int64, ascending
    names: np.ndarray  # (N,) bytes; file names
    sizes: np.ndarray  # (N, 2) int64; (height, width) in pixels
    starts: np.ndarray  # (N + 1,) int64; the targets of image n are those from starts[n] to starts[n + 1] - 1
    boxes: np.ndarray  # (A, 4) fp32; corners (x, y, x, y) in pixels, clipped to the image
    labels: np.ndarray  # (A,) int64 in 1..K
    rows: np.ndarray  # (A,) int64; index of each target in `annotations`
    annotations: np.ndarray  # (M,) `ANNOTATION`; within an image in the file's order
    masks: bytes  # `segmentation` of each annotation, marshalled and concatenated
    mask_starts: np.ndarray  # (M + 1,) int64; byte offset of each in `masks`
    num_annotations: int  # all annotations in the file, also faulty ones
    left_out: Mapping[str, int]  # reason why annotations are not targets -> their number
    num_spoiled: int  # boxes without area, or beyond their image, of which training takes what lies inside
    max_pixels: int  # largest image that is read

    def path(self, place: int) -> Path:
        """Return the path of an image."""
        return self.folder / os.fsdecode(self.names[place])

    def targets(self, place: int) -> slice:
        """Return the slice of an image's targets in `boxes`, `labels` and `rows`."""
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def segmentation(self, row: int) -> Any:
        """Return the polygons or RLE of an annotation in COCO's format; its box as a polygon where it has neither.

        `row` is an index in `annotations`; that of a target is in `rows`.
        """
        return marshal.loads(self.masks[self.mask_starts[row] : self.mask_starts[row + 1]])

    def describe_targets(self) -> str:
        """Describe the numbers of targets and others: `4 of 7 annotations are learned; left out: crowds (3)`."""
        why = ", ".join(f"{reason} ({number:,})" for reason, number in self.left_out.items())
        text = f"{len(self.labels):,} of {count(self.num_annotations, 'annotation')} are learned"
        return f"{text}; left out: {why}" if why else text


def read_instances(
    root: Path,
    split: str,
    report: Reporter = RAISE_FIRST,
    *,
    max_pixels: int = MAX_PIXELS,
    boxes_as_masks: bool = False,
) -> Instances | None:
    """Read and check the annotations of a split, and check that their images exist.

    As in mmdet, training excludes crowds and boxes that are thinner than a pixel, without area or outside of their
    image; boxes that cross the border are clipped. As in COCO, scores count thin boxes with a mask, and ignore crowds
    and annotations without area or mask. A missing or zero area is computed from the mask.

    Args:
        root, split: the folder that holds train2017, val2017 and annotations (see `find_parts`), and one of
            `Kind.splits`.
        report: receives the findings. Errors: a missing file or folder, malformed JSON, ids that are duplicate or
            undefined, two categories of one name, a target without a mask, images that are not in the folder. Warnings:
            boxes without area or beyond their image.
        max_pixels: largest number of pixels of an image that is read later.
        boxes_as_masks: whether an object without an outline takes its box as its mask.

    Returns:
        None if nothing could be read and the report lets the reading continue.

    Raises:
        UserError: an error, if the report raises it.
    """
    folder, file = (root / part for part in find_parts(root, split))
    if (content := _read_json(file, report)) is None:
        return None
    categories = _index_rows(content, file, "categories", report)
    names = Counter(row["name"] for row in categories.values())
    twice = [(file, f"has {number} categories {name!r}") for name, number in names.items() if number > 1]
    report.errors(twice, "give each a name of its own, or make them one")
    images = _index_rows(content, file, "images", report)
    annotations = _index_rows(content, file, "annotations", report)
    for row in images.values():
        row["file_name"] = posixpath.normpath(row["file_name"])  # drops the dot of ./a.png
        row["height"], row["width"] = int(row["height"]), int(row["width"])  # may be written as 480.0
    _find_images(folder, file, [row["file_name"] for row in images.values()], report)
    category_ids, image_ids = sorted(categories), sorted(images)
    label_of = {category_id: label for label, category_id in enumerate(category_ids, start=1)}
    place_of = {image_id: place for place, image_id in enumerate(image_ids)}
    found: list[tuple[tuple, Box, bytes]] = []
    faults, left_out = {sort: [] for sort in _FAULTS}, Counter()
    for row in annotations.values():
        if (judged := _judge(row, images, categories, boxes_as_masks, faults, left_out)) is not None:
            values, corners, segmentation = judged
            values = (place_of[row["image_id"]], label_of[row["category_id"]], *values)
            found.append((values, corners, marshal.dumps(segmentation)))
    for sort, (severity, advice) in _FAULTS.items():
        report.add([Finding(severity, file, problem, advice) for problem in faults[sort]])
    # stable: an image's annotations keep the file's order
    found.sort(key=lambda each: each[0][0])
    table = np.array([each[0] for each in found], dtype=ANNOTATION)
    rows = np.flatnonzero(table["target"])
    ordered = [images[image_id] for image_id in image_ids]
    return Instances(
        file=file,
        folder=folder,
        classes=tuple(categories[category_id]["name"] for category_id in category_ids),
        category_ids=tuple(category_ids),
        image_ids=np.array(image_ids, dtype=np.int64),
        names=np.array([os.fsencode(row["file_name"]) for row in ordered], dtype=np.bytes_),
        sizes=np.array([(row["height"], row["width"]) for row in ordered], dtype=np.int64).reshape(-1, 2),
        starts=np.searchsorted(table["image"][rows], np.arange(len(images) + 1)),
        boxes=np.array([each[1] for each in found], dtype=np.float32).reshape(-1, 4)[rows],
        labels=table["label"][rows],
        rows=rows,
        annotations=table,
        masks=b"".join(each[2] for each in found),
        mask_starts=np.cumsum([0, *(len(each[2]) for each in found)]),
        num_annotations=len(content["annotations"]),
        left_out=dict(left_out),
        num_spoiled=len(faults["empty"]) + len(faults["outside"]),
        max_pixels=max_pixels,
    )


def read_classes(root: Path, row: Kind, report: Reporter) -> tuple[str, ...]:
    """Read the names of the categories, sorted by id, and check all splits.

    Raises:
        UserError: as `read_instances`, or categories that differ between the splits.
    """
    found = [read_instances(root, split, report, boxes_as_masks=row.boxes_as_masks) for split in row.splits]
    compare_categories(found, report)
    return found[0].classes


def compare_categories(splits: Sequence[Instances], report: Reporter) -> None:
    """Report the splits whose categories differ from those of the first."""
    for other in splits[1:]:
        if (splits[0].category_ids, splits[0].classes) != (other.category_ids, other.classes):
            report.error(
                other.file, f"has other categories than {splits[0].file.name}", "give all splits the same list"
            )


def list_folders(root: Path, split: str, row: Kind) -> list[Folder]:
    """Record the image folder and the annotation file of a split.

    The image folder comes first: a manifest takes the number of images from the first record. A record of 0 images is an
    annotation file to `manifest.verify`. `data.cells` finds this function by its name, here and in `ade20k`.
    """
    images, annotations = find_parts(root, split)
    try:
        content = (root / annotations).read_bytes()
    except OSError as error:
        raise BadData(Finding("error", root / annotations, explain_error(error), _RENEW)) from None
    prefix, record = row.parts["coco"], ClassRecord(images=0, bytes=len(content), hash=short_hash(content))
    return [
        record_folder(root, images, prefix, row.compares_contents),
        Folder(prefix + annotations, root / annotations, record),
    ]


def find_parts(root: Path, split: str) -> tuple[str, str]:
    """Return the names of a split's image folder and annotation file; without 2017 where only these exist."""
    names = f"{split}2017", f"annotations/instances_{split}2017.json"
    short = tuple(name.replace("2017", "") for name in names)
    return tuple(
        plain if (root / plain).exists() and not (root / dated).exists() else dated
        for dated, plain in zip(names, short, strict=True)
    )


def read_image(path: Path, size: tuple[int, int], file: Path, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read an image (H, W, 3) uint8, RGB; raises UserError where this fails or its (height, width) is not `size`."""
    pixels = read_pixels(path, max_pixels)
    if (found := pixels.shape[:2]) != size:
        turned = " (turned: is it another copy of the images?)" if found == size[::-1] else ""
        problem = f"is {found[1]}×{found[0]}, {file.name} says {size[1]}×{size[0]}{turned}"
        raise BadData(
            Finding("error", path, problem, "boxes and masks would not fit; take images and annotations of one release")
        )
    return pixels


def _judge(
    row: _Row,
    images: Mapping[int, _Row],
    categories: Mapping[int, _Row],
    boxes_as_masks: bool,
    faults: Faults,
    left_out: Counter[str],
) -> tuple[tuple, Box, Any] | None:
    """Check one annotation, and make its `image_id` and `category_id` integers in `row`, where the caller reads them.

    Returns:
        The box, area, ignored and target of `ANNOTATION`, the corners clipped to the image, and the mask; None for an
        annotation whose fault was added to `faults`. `left_out` counts why annotations are not targets.
    """
    name = f"annotation {row['id']}"
    try:
        for key, known in (("image_id", images), ("category_id", categories)):
            row[key] = _to_id(row[key])
            if row[key] not in known:
                faults["lost"].append(f"{name} has {key} {row[key]}, which is not in the file")
                return None
        x, y, width, height = box = [float(number) for number in row["bbox"]]
        area, crowd = float(row.get("area") or 0), bool(float(row.get("iscrowd") or 0))
        if not all(map(math.isfinite, (*box, area))):
            raise ValueError(f"box {box} or area {area} is not finite")
        image, segmentation = images[row["image_id"]], row.get("segmentation")
        if isinstance(segmentation, list):  # [[]] is no outline, as several programs write it
            segmentation = [polygon for polygon in segmentation if polygon != []]
        wide, high = image["width"], image["height"]
        outlined = check_mask(segmentation, high, wide) if segmentation else False
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        faults["malformed"].append(f"{name} is malformed ({explain_error(error)})")
        return None
    if width <= 0 or height <= 0:
        faults["empty"].append(f"{name}: box {box} has no area")
    elif min(x, y) < -_SLACK_PX or x + width > wide + _SLACK_PX or y + height > high + _SLACK_PX:
        faults["outside"].append(f"{name}: box {box} leaves its image of {wide}×{high}")
    left, top, right, bottom = max(x, 0.0), max(y, 0.0), min(x + width, wide), min(y + height, high)
    inside, thin = right > left and bottom > top, width < 1 or height < 1
    if inside and not segmentation:
        outlined = boxes_as_masks and not thin
        segmentation = [[left, top, right, top, right, bottom, left, bottom]]
        if not (crowd or thin or outlined):
            faults["maskless"].append(f"{name} has no segmentation")
            return None
    if outlined and not crowd and not area > 0:
        area = float(rle.area(encode_mask(segmentation, high, wide)))
    visible = inside and outlined and area > 0
    # reason -> whether it holds; the first one counts
    reasons = {
        "crowds": crowd,
        "boxes without area": width <= 0 or height <= 0,
        "boxes outside of their image": not inside,
        "boxes thinner than a pixel": thin,
        "masks without area": not visible,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        left_out[reason] += 1
    values = (tuple(box), area, crowd or not visible, reason is None)
    return values, (left, top, right, bottom), segmentation or []


def _read_json(file: Path, report: Reporter) -> dict[str, Any] | None:
    """Read an annotation file. If it is unreadable or lacks one of its three lists, report an error and return None."""
    try:
        content = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
        lists = content if isinstance(content, dict) else {}
        missing = [key for key in _COLUMNS if not isinstance(lists.get(key), list)]
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
    """Refuse NaN and infinity, which Python's parser of JSON would accept."""
    raise ValueError(f"{name} is no number")


def _to_id(value: Any) -> int:
    """Parse an id, which may be written as text or as 1.0; raises ValueError unless it is a whole number of 63 bits."""
    # bool is an int too, and floats above 2**53 are not exact
    whole = type(value) is int or (isinstance(value, float) and value.is_integer() and abs(value) < 2**53)
    whole = whole or (isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value))
    if not whole or abs(int(value)) >= 2**63:
        raise ValueError(f"id {value!r:.60} is no whole number of 63 bits")
    return int(value)


def _is_id(value: Any) -> bool:
    """Return whether `_to_id` parses a value."""
    try:
        return _to_id(value) is not None
    except ValueError:
        return False


def _is_file_name(value: Any) -> bool:
    """Return whether a file can have this name, and a one-line message can quote it."""
    try:
        return isinstance(value, str) and value.splitlines() == [value] and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _is_side(value: Any) -> bool:
    """Return whether a value is a positive whole number of pixels, perhaps written as 480.0."""
    return isinstance(value, int | float) and 0 < value < 2**31 and value == int(value)


def _index_rows(content: Mapping[str, Any], file: Path, key: str, report: Reporter) -> dict[int, _Row]:
    """Map id to row for one list of the file; report and drop rows that are malformed or repeat an id."""
    columns = _COLUMNS[key]
    found: dict[int, _Row] = {}
    malformed, twice = [], []
    for place, row in enumerate(content[key]):
        given = row if isinstance(row, dict) else {}
        wrong = next((name for name, fits in columns.items() if name not in given or not fits(given[name])), "")
        if wrong:
            value = f"{wrong} is {given[wrong]!r:.80}" if wrong in given else f"{wrong} is missing"
            malformed.append((file, f"{key}[{place}] is malformed, it needs {', '.join(columns)} ({value})"))
            continue
        row["id"] = _to_id(row["id"])
        if row["id"] in found:
            twice.append((file, f"{key}[{place}] has id {row['id']}, as another one has"))
        else:
            found[row["id"]] = row
    report.errors(malformed, _RENEW)
    report.errors(twice, _RENEW)
    return found


# list of an annotation file -> its columns, with a check of each value. `_judge` checks the other values of annotations
_COLUMNS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "images": {"id": _is_id, "file_name": _is_file_name, "height": _is_side, "width": _is_side},
    "annotations": {"id": _is_id, **dict.fromkeys(("image_id", "category_id", "bbox"), lambda value: True)},
    "categories": {"id": _is_id, "name": lambda value: isinstance(value, str)},
}


def _find_images(folder: Path, file: Path, names: Sequence[str], report: Reporter) -> None:
    """Report images that are missing, empty or not listed in the annotation file."""
    elsewhere, advice = folder.parent / "images" / folder.name, f"add the file, or correct {file.name}"
    if folder.name.endswith("2017"):
        advice = f"unpack {folder.name}.zip again, or correct your own file"
    sizes = list_images(folder, report, f"move {elsewhere} here" if elsewhere.is_dir() else advice)
    if sizes is None:
        return
    alike = {_fold(name): name for name in sizes}
    missing = []
    for name in sorted(set(names) - set(sizes)):
        better = advice
        if "/" in name or "\\" in name:
            better = f"a file_name is that within {folder.name}/, without folders; correct {file.name}"
        elif _fold(name) in alike:
            better = f"{alike[_fold(name)]!r} is there, with other capitals or Unicode forms; rename it"
        missing.append(Finding("error", folder / name, f"no such file, {file.name} has it", better))
    report.add_mixed(missing)
    if unused := sorted(set(sizes) - set(names)):
        problem = f"has {count(len(unused), 'image')} that {file.name} does not list ({show_few(unused)})"
        report.warning(folder, problem, "nothing reads them")


def _fold(name: str) -> str:
    """Return a file name without differences that file systems may ignore: letter case and Unicode normal form."""
    return unicodedata.normalize("NFC", name).casefold()
