"""The annotations of COCO detection: targets as mmdet takes them, in arrays.

<root>/{train,val}2017/<image>      <root>/annotations/instances_{train,val}2017.json
"""

import dataclasses
import json
import marshal
import os
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import UserError
from .tree import list_images

_RENEW = "unpack annotations_trainval2017.zip again"


@dataclasses.dataclass(frozen=True)
class Instances:
    """One annotation file. Arrays and bytes, since a million objects would be copied into every worker process page by page.

    Args:
        file: the JSON itself, which pycocotools reads for the evaluation.
        folder: of the images.
        classes: (K,) names; a label in 1..K is a place here plus one.
        category_ids: (K,) their ids in the file, ascending, mostly with gaps.
        image_ids: (N,) int64, ascending.
        names: (N,) bytes; file names.
        sizes: (N, 2) int64; (height, width) in pixels.
        starts: (N + 1,) int64; where an image's targets begin among those of all.
        boxes: (A, 4) fp32; corners (x, y, x, y) in pixels, clipped to the image.
        labels: (A,) int64 in 1..K.
        masks: the `segmentation` of each target, marshalled, one after the other.
        mask_starts: (A + 1,) int64; where each begins.
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

    def path(self, place: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(self.names[place])

    def targets(self, place: int) -> slice:
        """The targets of an image among those of all."""
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def segmentation(self, target: int) -> Any:
        """Polygons or RLE, as the file has them."""
        return marshal.loads(self.masks[self.mask_starts[target] : self.mask_starts[target + 1]])


def read_instances(root: Path, split: str) -> Instances:
    """Read and judge the annotations of `train` or `val`, and see that their images are there.

    As in mmdet, crowds are no targets, nor are boxes of less than a pixel's width or height, without area or outside their
    image; boxes that reach over the border are clipped.

    Raises:
        UserError: file or folder missing, malformed JSON, ids that occur twice or belong to nothing, a target without a mask,
            images that are not in the folder.
    """
    file, folder = root / f"annotations/instances_{split}2017.json", root / f"{split}2017"
    content = _read_json(file)
    categories = {row["id"]: row["name"] for row in _rows(content, file, "categories", ("id", "name"))}
    images = {row["id"]: row for row in _rows(content, file, "images", ("id", "file_name", "height", "width"))}
    for what, found in (("categories", categories), ("images", images)):
        if len(found) < len(content[what]):
            raise UserError(f"{file}: two of its {what} have the same id; {_RENEW}")
    listed = {os.fsdecode(name) for name, _ in list_images(folder)}
    if missing := sorted(row["file_name"] for row in images.values() if row["file_name"] not in listed):
        number = f"{len(missing):,} such images"
        raise UserError(f"{folder / missing[0]}: no such file, {file.name} has it ({number}); unpack {split}2017.zip again")
    category_ids, image_ids = sorted(categories), sorted(images)
    label_of = {category_id: label for label, category_id in enumerate(category_ids, start=1)}
    place_of = {image_id: place for place, image_id in enumerate(image_ids)}
    rows = []
    for row in _rows(content, file, "annotations", ("id", "image_id", "category_id", "bbox")):
        for key, known in (("image_id", images), ("category_id", categories)):
            if row[key] not in known:
                raise UserError(f"{file}: annotation {row['id']} has {key} {row[key]}, which is not in the file; {_RENEW}")
        try:
            box = None if row.get("iscrowd") else _clip(row, images[row["image_id"]])
        except (TypeError, ValueError) as error:
            raise UserError(f"{file}: annotation {row['id']} is malformed ({error}); {_RENEW}") from None
        if box is None:
            continue
        if not row.get("segmentation"):
            raise UserError(f"{file}: annotation {row['id']} has no segmentation; take the instances_ file, not one of boxes alone")
        rows.append((place_of[row["image_id"]], box, label_of[row["category_id"]], marshal.dumps(row["segmentation"])))
    rows.sort(key=lambda row: row[0])
    ordered = [images[image_id] for image_id in image_ids]
    return Instances(
        file=file,
        folder=folder,
        classes=tuple(categories[category_id] for category_id in category_ids),
        category_ids=tuple(category_ids),
        image_ids=np.array(image_ids, dtype=np.int64),
        names=np.array([os.fsencode(row["file_name"]) for row in ordered], dtype=np.bytes_),
        sizes=np.array([(row["height"], row["width"]) for row in ordered], dtype=np.int64).reshape(-1, 2),
        starts=np.searchsorted([row[0] for row in rows], np.arange(len(images) + 1)),
        boxes=np.array([row[1] for row in rows], dtype=np.float32).reshape(-1, 4),
        labels=np.array([row[2] for row in rows], dtype=np.int64),
        masks=b"".join(row[3] for row in rows),
        mask_starts=np.cumsum([0, *(len(row[3]) for row in rows)]),
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {_RENEW}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON ({error}); {_RENEW}") from None
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise UserError(f"{file}: has no list {key!r}; {_RENEW}")
    return content


def _rows(content: dict[str, Any], file: Path, what: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of a list, each found to be a mapping with these keys."""
    for place, row in enumerate(content[what]):
        if not isinstance(row, dict) or not row.keys() >= set(keys):
            raise UserError(f"{file}: {what}[{place}] is malformed, it needs {', '.join(keys)}; {_RENEW}")
    return content[what]


def _clip(annotation: dict[str, Any], image: dict[str, Any]) -> tuple[float, float, float, float] | None:
    """The corners of a box within its image; None where mmdet sees no instance."""
    x, y, width, height = map(float, annotation["bbox"])
    left, top, right, bottom = max(x, 0.0), max(y, 0.0), min(x + width, image["width"]), min(y + height, image["height"])
    # asked in this way NaN is no instance either
    real = width >= 1 and height >= 1 and right > left and bottom > top and annotation.get("area", 1) > 0
    return (left, top, right, bottom) if real else None
