"""The embedded data set of dense tasks: handwritten digits on textures, in the formats of COCO 2017 and of ADE20K.

See `drawing` for the look of an image. Digits overlap and reach beyond the border, farther at the right and at the
bottom, unless the setting `overlap` keeps them apart and inside.

Detection has the ten digits as categories with ids as sparse as COCO's, masks of the visible parts, and boxes around
the masks. Segmentation has the digits as classes 1..10 and the textures as 11..13, so that no background class inflates
the score. Its label 0, unlabelled, is given to the soft edge of the strokes, where digit and ground mix, and to visible
parts of a digit that are too small to be annotated.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pycocotools import mask as rle

from ...core.ui import track
from ..ade20k import FOLDERS
from ..kinds import KINDS
from ..settings import ScenesSettings
from . import new_tree, save_png
from .digits import choose_splits, load_scans
from .drawing import INK, TEXTURES, cover, draw_ground, draw_level, enlarge, finish

# names of the classes 1..13 of segmentation; detection has the digits alone
CLASSES = (*(f"digit {digit}" for digit in range(10)), *TEXTURES)
CATEGORY_IDS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)  # ids of the digits 0..9, with gaps as in COCO
_VISIBLE_PX = 20  # a digit with fewer visible pixels is not an instance
_TRIES = 50  # positions tried for a digit that must lie apart from the others


def write_scenes(root: Path, settings: ScenesSettings) -> None:
    """Write `root/coco` and `root/ade20k`, replacing an earlier tree of this function.

    Images are PNGs, since the bytes of JPEG encoders differ between machines; both layouts share them by hard links.
    Each split shows its own scans. The same settings give the same files. Raises UserError as `new_tree` does.
    """
    scans, targets = load_scans()
    split_of = choose_splits(targets, settings.tune_fraction, settings.test_fraction, settings.split_seed)
    splits, folders = KINDS["scenes"].splits, ["coco/annotations"]
    for split in splits:
        folders += [f"coco/{split}2017", *(f"ade20k/{part}/{FOLDERS[split]}" for part in ("images", "annotations"))]
    with new_tree(root, "scenes", settings, folders) as tree:
        first_id = 1  # of the split's images; ids continue from split to split
        for index, split in enumerate(splits):
            photos = tree / "coco" / f"{split}2017"
            copies, maps = (tree / "ade20k" / part / FOLDERS[split] for part in ("images", "annotations"))
            members = np.flatnonzero(split_of == split)
            images, annotations = [], []
            for number in track(range(getattr(settings, split)), f"drawing {root.name}, {split}", unit="images"):
                image_id = first_id + number
                # one generator per image: with more images, the first ones stay the same
                rng = np.random.Generator(np.random.PCG64((settings.seed, index, number)))
                pixels, instances, labels = draw_image(rng, scans[members], targets[members], settings)
                file, stem = f"{image_id:012d}.png", f"ADE_{split}_{number + 1:08d}"
                save_png(pixels, photos / file)
                _share(photos / file, copies / f"{stem}.png")
                save_png(labels, maps / f"{stem}.png")
                images.append(
                    {"id": image_id, "file_name": file, "height": settings.image_size, "width": settings.image_size}
                )
                # an image has at most nine digits: the ids are unique over all splits
                annotations += [
                    _annotation(10 * image_id + place, image_id, *found) for place, found in enumerate(instances)
                ]
            content = {
                "info": {"description": "scenes: handwritten digits on textures", "version": "1.0"},
                "licenses": [],
                "images": images,
                "annotations": annotations,
                "categories": [
                    {"supercategory": "digit", "id": category_id, "name": name}
                    for category_id, name in zip(CATEGORY_IDS, CLASSES[: -len(TEXTURES)], strict=True)
                ],
            }
            annotation_file = tree / f"coco/annotations/instances_{split}2017.json"
            annotation_file.write_text(json.dumps(content) + "\n", encoding="utf-8")
            first_id += len(images)
        rows = [f"{number}\t{name}" for number, name in enumerate(CLASSES, start=1)]
        names = "\n".join(["Idx\tName", *rows]) + "\n"
        (tree / f"ade20k/objectInfo{len(CLASSES)}.txt").write_text(names, encoding="utf-8")


def draw_image(
    rng: np.random.Generator, scans: np.ndarray, targets: np.ndarray, settings: ScenesSettings
) -> tuple[np.ndarray, list[tuple[int, np.ndarray]], np.ndarray]:
    """Draw one scene, S = `settings.image_size` pixels a side.

    Args:
        scans, targets: (N, 8, 8) uint8, and the digits (N,) that they show.

    Returns:
        The pixels (S, S) uint8; for each instance its digit and the mask of its visible part (S, S) bool; the label map
        (S, S) uint8, which has an instance's class wherever its mask is true.
    """
    size = settings.image_size
    canvas, labels = draw_ground(rng, size, settings)
    # the textures are the last classes
    labels += len(CLASSES) - len(TEXTURES) + 1
    owner = np.full((size, size), -1)  # index in `digits` of the topmost stroke at a pixel
    digits, boxes = [], []
    for _ in range(rng.integers(*settings.digits, endpoint=True)):
        chosen = rng.integers(len(scans))
        side = rng.integers(*settings.side_px, endpoint=True)
        ink = enlarge(scans[chosen], side, rng.uniform(-settings.angle_degrees, settings.angle_degrees))
        if settings.overlap is not None:
            found = _find_room(rng, ink, boxes, size, settings.overlap)
            if found is None:
                continue
            (top, left), box = found
            boxes.append(box)
        else:
            # of the scan's corner, a quarter of its width beyond the border at most; `ink` is wider than the scan
            top, left = rng.integers(-side // 4, size - 3 * side // 4, size=2)
        level = draw_level(rng, settings)
        digits.append(int(targets[chosen]))
        ink = ink[max(-top, 0) : size - top, max(-left, 0) : size - left]
        window = np.s_[max(top, 0) : max(top, 0) + ink.shape[0], max(left, 0) : max(left, 0) + ink.shape[1]]
        covered = cover(ink)
        canvas[window] += covered * (level - canvas[window])
        # the soft rim stays unlabelled, except over the stroke of an earlier digit, which keeps its pixels; strokes get
        # their class below, when it is known which of them remain visible
        labels[window][covered > 0] = 0
        owner[window][ink > INK] = len(digits) - 1
    instances = []
    for number, digit in enumerate(digits):
        mask = owner == number
        seen = mask.sum() >= _VISIBLE_PX
        labels[mask] = digit + 1 if seen else 0
        if seen:
            instances.append((digit, mask))
    return finish(rng, canvas), instances, labels


def _find_room(
    rng: np.random.Generator, ink: np.ndarray, boxes: Sequence[np.ndarray], size: int, overlap: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Draw a position where a digit's box shares at most `overlap` of the smaller area with every one of `boxes`.

    Boxes are (top, left, bottom, right) in pixels of the visible ink of a digit.

    Returns:
        The (row, column) of the upper left corner of `ink` (h, w) uint8 in the image, which may be negative, and the
        digit's box; None if none of `_TRIES` positions is free.
    """
    rows, columns = (np.flatnonzero((ink > INK).any(axis=axis)) for axis in (1, 0))
    extent = np.array([rows[0], columns[0], rows[-1] + 1, columns[-1] + 1])
    for _ in range(_TRIES):
        corner = rng.integers(-extent[:2], size - extent[2:], endpoint=True)
        box = extent + np.tile(corner, 2)
        if all(_shared(box, other) <= overlap * min(_area(box), _area(other)) for other in boxes):
            return corner, box
    return None


def _area(box: np.ndarray) -> int:
    """Return the area of a box (top, left, bottom, right) in pixels; 0 where it ends before it begins."""
    return int(np.prod((box[2:] - box[:2]).clip(0)))


def _shared(box: np.ndarray, other: np.ndarray) -> int:
    """Return the number of pixels that two boxes share."""
    return _area(np.concatenate([np.maximum(box[:2], other[:2]), np.minimum(box[2:], other[2:])]))


def _annotation(annotation_id: int, image_id: int, digit: int, mask: np.ndarray) -> dict:
    """Return an instance as a COCO annotation, its mask as compressed RLE."""
    encoded = rle.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": CATEGORY_IDS[digit],
        "segmentation": {"size": encoded["size"], "counts": encoded["counts"].decode("ascii")},
        "area": int(rle.area(encoded)),
        "bbox": rle.toBbox(encoded).tolist(),
        "iscrowd": 0,
    }


def _share(file: Path, other: Path) -> None:
    """Make `other` a hard link to a file, or a copy of it on a file system without hard links."""
    try:
        os.link(file, other)
    except OSError:
        shutil.copyfile(file, other)
