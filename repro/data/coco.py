"""The annotations of COCO detection in arrays: targets as mmdet takes them, and what a score is counted on.

<root>/<split>2017/<image>      <root>/annotations/instances_<split>2017.json

One's own set may leave out the 2017 in the names of folders and files.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as rle

from ..core.hashing import short_hash
from .findings import RAISE_FIRST, BadData, Finding, Reporter, count
from .manifest import ClassRecord, Folder
from .masks import check_mask, encode_mask
from .pixels import MAX_PIXELS, explain_error, read_pixels
from .tree import list_images, record_folder, show_few

_RENEW = "add or correct the file; that of COCO 2017 is in annotations_trainval2017.zip"
_SLACK_PX = 1.0  # coordinates are rounded
# sorts of faults of annotations -> severity and advice; those that training survives are warnings
_FAULTS = {
    "malformed": ("error", _RENEW),
    "lost": ("error", _RENEW),
    "maskless": ("error", "add an outline, or take boxes as masks: boxes:PATH, or `kind: boxes` (docs/data.md)"),
    "empty": ("warning", "training leaves it out"),
    "outside": ("warning", "training takes what lies inside"),
}
# of an annotation: place of its image, label, box as the file has it (left, top, width, height), area in pixels,
# whether it is neither found nor missed, and whether it is a target of training
ANNOTATION = np.dtype(
    [("image", "i8"), ("label", "i8"), ("box", "f8", 4), ("area", "f8"), ("ignored", "?"), ("target", "?")]
)
_Row = dict[str, Any]
Box = tuple[float, float, float, float]  # corners
Faults = dict[str, list[str]]  # sort -> descriptions


@dataclasses.dataclass(frozen=True)
class Instances:
    """One annotation file of K categories, N images and M annotations, A of them targets; all follow image by image.

    Arrays and bytes, since a million objects would be copied into every worker process page by page.
    """

    file: Path  # the JSON itself, for messages
    folder: Path  # of the images
    classes: tuple[str, ...]  # (K,) names; label k in 1..K is classes[k - 1]
    category_ids: tuple[int, ...]  # (K,) their ids in the file, ascending, mostly with gaps
    image_ids: np.ndarray  # (N,) int64, ascending
    names: np.ndarray  # (N,) bytes; file names
    sizes: np.ndarray  # (N, 2) int64; (height, width) in pixels
    starts: np.ndarray  # (N + 1,) int64; the targets of image n are those from starts[n] to starts[n + 1] - 1
    boxes: np.ndarray  # (A, 4) fp32; corners (x, y, x, y) in pixels, clipped to the image
    labels: np.ndarray  # (A,) int64 in 1..K
    rows: np.ndarray  # (A,) int64; the targets among the annotations
    annotations: np.ndarray  # (M,) of `ANNOTATION`, those of an image in the file's order
    masks: bytes  # the `segmentation` of each annotation, marshalled, one after the other
    mask_starts: np.ndarray  # (M + 1,) int64; where each begins
    num_annotations: int  # in the file, also those with a fault
    left_out: Mapping[str, int]  # why annotations are no targets -> how many
    num_empty: int  # boxes without area
    num_outside: int  # boxes that reach beyond their image
    max_pixels: int  # of an image that is read

    def path(self, place: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(self.names[place])

    def targets(self, place: int) -> slice:
        """The targets of an image among those of all."""
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def segmentation(self, row: int) -> Any:
        """Polygons or RLE of an annotation as the file has them; its box where it has none."""
        return marshal.loads(self.masks[self.mask_starts[row] : self.mask_starts[row + 1]])

    def describe_targets(self) -> str:
        """How many annotations are targets, and why others are not: `4 of 7 annotations are learned; left out: crowds (3)`."""
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
    """Read and judge the annotations of a split, and see that their images are there.

    As in mmdet, crowds are not targets, nor are boxes that are narrower or lower than a pixel, without area or outside
    of their image; boxes that reach over the border are clipped. A score counts thin boxes with a mask, as COCO's does,
    and neither crowds nor what has no area or mask. An area that is missing or 0 is that of the mask.

    Args:
        root, split: the folder that holds train2017, val2017 and annotations (see `find_parts`), and one of `Kind.splits`.
        boxes_as_masks: whether the mask of an object without an outline is its box.
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
    for row in images.values():
        row["file_name"] = posixpath.normpath(row["file_name"])  # ./a.png
        row["height"], row["width"] = int(row["height"]), int(row["width"])  # 480.0
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
        num_empty=len(faults["empty"]),
        num_outside=len(faults["outside"]),
        max_pixels=max_pixels,
    )


def read_classes(
    root: Path, splits: Sequence[str], report: Reporter = RAISE_FIRST, *, boxes_as_masks: bool = False
) -> tuple[str, ...]:
    """The names of the categories in the order of their ids; judges these splits.

    Raises:
        UserError: as `read_instances`, or categories that differ between the splits.
    """
    found = [read_instances(root, split, report, boxes_as_masks=boxes_as_masks) for split in splits]
    compare_categories(found, report)
    return found[0].classes


def compare_categories(splits: Sequence[Instances], report: Reporter) -> None:
    """Report splits whose categories are not those of the first one."""
    for other in splits[1:]:
        if (splits[0].category_ids, splits[0].classes) != (other.category_ids, other.classes):
            report.error(
                other.file, f"has other categories than {splits[0].file.name}", "give all splits the same list"
            )


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


def _judge(
    row: _Row,
    images: Mapping[int, _Row],
    categories: Mapping[int, _Row],
    boxes_as_masks: bool,
    faults: Faults,
    left_out: Counter[str],
) -> tuple[tuple, Box, Any] | None:
    """The last four values of `ANNOTATION`, the corners within the image, and the mask; None where `faults` says why.

    `left_out` counts why annotations are no targets.
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


def _to_id(value: Any) -> int:
    """An id, also one that is written as text or as 1.0; raises ValueError where it is no whole number of 63 bits."""
    whole = type(value) is int or (isinstance(value, float) and value.is_integer() and abs(value) < 2**53)
    whole = whole or (isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value))
    if not whole or abs(int(value)) >= 2**63:
        raise ValueError(f"id {value!r:.60} is no whole number of 63 bits")
    return int(value)


def _is_id(value: Any) -> bool:
    try:
        return _to_id(value) is not None
    except ValueError:
        return False


def _is_file_name(value: Any) -> bool:
    """Whether a file can have this name, and a message can name it in one line."""
    try:
        return isinstance(value, str) and value.splitlines() == [value] and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _is_side(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < 2**31 and value == int(value)


def _index_rows(
    content: Mapping[str, Any], file: Path, key: str, columns: Sequence[str], report: Reporter
) -> dict[int, _Row]:
    """The rows of a list by id; those without these columns, or with another row's id, are errors and left out."""
    rules = {
        "id": _is_id,
        "name": lambda value: isinstance(value, str),
        "file_name": _is_file_name,
        "height": _is_side,
        "width": _is_side,
    }
    found: dict[int, _Row] = {}
    malformed, twice = [], []
    for place, row in enumerate(content[key]):
        given = row if isinstance(row, dict) else {}
        wrong = next((each for each in columns if each not in given or not rules.get(each, _anything)(given[each])), "")
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


def _find_images(folder: Path, file: Path, names: Sequence[str], report: Reporter) -> None:
    """Report images that are missing, empty or in no annotation file."""
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
    """A file name without the differences that two systems may not see."""
    return unicodedata.normalize("NFC", name).casefold()
