"""The embedded data set of dense tasks: handwritten digits on textures, in the formats of COCO 2017 and of ADE20K.

An image is square and grey. A straight line cuts its ground in two, and each side has one of three textures. On it lie 3 to 8 scans
of scikit-learn's digits, 24 to 96 pixels wide, turned by up to 30 degrees, over one another and over the border. The brightness of a
digit is 0.4 to 1.0 of the way from mid-grey to white; textures swing around mid-grey by up to 0.6 of the range.

Detection has the ten digits as categories, with ids as sparse as COCO's, masks of the visible parts, and boxes around the masks.
Segmentation has the digits as classes 1..10 and the textures as 11..13, so that there is no background class to score on. Its label
0, unlabelled, is the soft rim of the strokes, where digit and ground mix, and those parts of a digit that are too small to be
annotated.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as rle

from ...core.ui import track
from ..ade20k import FOLDERS
from ..kinds import KINDS
from ..settings import ScenesSettings
from . import new_tree
from .digits import choose_splits, load_scans

TEXTURES = ("clouds", "stripes", "checks")
CLASSES = (*(f"digit {digit}" for digit in range(10)), *TEXTURES)
CATEGORY_IDS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)  # of the digits 0..9
SPLITS = KINDS["scenes"].splits
_DIGITS_PER_IMAGE = (3, 8)
_SIDE_PX = (24, 96)
_ANGLE_DEGREES = 30
_CONTRAST = (0.4, 1.0)
_TEXTURE_CONTRAST = (0.2, 0.6)
# grey levels of a scan, 0 to 255, at which a stroke begins to cover the ground, belongs to its mask, and covers the ground fully
_FAINT, _INK, _FULL = 60, 100, 140
_VISIBLE_PX = 20  # a digit with fewer visible pixels is not an instance
_MID_GREY = 127.5
_NOISE = 8  # grey levels, in both directions


def write_scenes(root: Path, settings: ScenesSettings) -> None:
    """Write `root/coco` and `root/ade20k`, replacing an earlier tree of this function.

    Images are PNGs, whose bytes are the same on every machine, unlike those of JPEG encoders; both layouts share them by hard links.
    Each split shows scans of its own. The same settings give the same files. Raises UserError as `new_tree` does.
    """
    scans, targets = load_scans()
    split_of = choose_splits(targets, settings.tune_fraction, settings.test_fraction, settings.split_seed)
    folders = [f"{part}/{ade}" for ade in map(FOLDERS.get, SPLITS) for part in ("ade20k/images", "ade20k/annotations")]
    folders += ["coco/annotations", *(f"coco/{split}2017" for split in SPLITS)]
    with new_tree(root, "scenes", settings, folders) as tree:
        first_id = 1  # of the split's images; ids go on from split to split
        for index, split in enumerate(SPLITS):
            photos = tree / "coco" / f"{split}2017"
            copies, maps = (tree / "ade20k" / part / FOLDERS[split] for part in ("images", "annotations"))
            members = np.flatnonzero(split_of == split)
            images, annotations = [], []
            for number in track(range(getattr(settings, split)), f"drawing {root.name}, {split}", unit="images"):
                image_id = first_id + number
                # one generator per image, so that more images leave the first ones as they are
                rng = np.random.Generator(np.random.PCG64((settings.seed, index, number)))
                pixels, instances, labels = draw(rng, scans[members], targets[members], settings.image_size)
                file, stem = f"{image_id:012d}.png", f"ADE_{split}_{number + 1:08d}"
                # stored uncompressed, like those of `digits`
                Image.fromarray(pixels).save(photos / file, compress_level=0)
                _share(photos / file, copies / f"{stem}.png")
                Image.fromarray(labels).save(maps / f"{stem}.png", compress_level=0)
                images.append({"id": image_id, "file_name": file, "height": settings.image_size, "width": settings.image_size})
                # an image has at most eight, so that ids are unique over all splits
                annotations += [_annotation(10 * image_id + place, image_id, *found) for place, found in enumerate(instances)]
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
            (tree / f"coco/annotations/instances_{split}2017.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
            first_id += len(images)
        rows = [f"{number}\t{name}" for number, name in enumerate(CLASSES, start=1)]
        (tree / f"ade20k/objectInfo{len(CLASSES)}.txt").write_text("\n".join(["Idx\tName", *rows]) + "\n", encoding="utf-8")


def draw(
    rng: np.random.Generator, scans: np.ndarray, targets: np.ndarray, size: int
) -> tuple[np.ndarray, list[tuple[int, np.ndarray]], np.ndarray]:
    """One image of `size` x `size` pixels, with some of the `scans` (N, 8, 8), uint8, which show the digits `targets` (N,).

    Returns:
        The pixels (size, size), uint8; for each instance its digit and the mask of its visible part (size, size), bool; the label map
        (size, size), uint8, which has an instance's class wherever its mask is true.
    """
    canvas, labels = _ground(rng, size)
    owner = np.full((size, size), -1)  # the digit whose stroke a pixel shows
    digits = []
    for number in range(rng.integers(*_DIGITS_PER_IMAGE, endpoint=True)):
        chosen = rng.integers(len(scans))
        digits.append(int(targets[chosen]))
        side = rng.integers(*_SIDE_PX, endpoint=True)
        ink = _enlarge(scans[chosen], side, rng.uniform(-_ANGLE_DEGREES, _ANGLE_DEGREES))
        # up to a quarter of a side beyond the border
        top, left = rng.integers(-side // 4, size - 3 * side // 4, size=2)
        level = _MID_GREY * (1 + rng.uniform(*_CONTRAST))
        ink = ink[max(-top, 0) : size - top, max(-left, 0) : size - left]
        window = np.s_[max(top, 0) : max(top, 0) + ink.shape[0], max(left, 0) : max(left, 0) + ink.shape[1]]
        cover = np.clip((ink - float(_FAINT)) / (_FULL - _FAINT), 0, 1)
        canvas[window] += cover * (level - canvas[window])
        labels[window][cover > 0] = 0
        owner[window][ink > _INK] = number
    instances = []
    for number, digit in enumerate(digits):
        mask = owner == number
        seen = mask.sum() >= _VISIBLE_PX
        labels[mask] = digit + 1 if seen else 0
        if seen:
            instances.append((digit, mask))
    canvas += rng.integers(-_NOISE, _NOISE, size=canvas.shape, endpoint=True)
    return np.rint(canvas).clip(0, 255).astype(np.uint8), instances, labels


def _ground(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(pixels, labels) of two textures on the sides of a line."""
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    angle = rng.uniform(0, 2 * np.pi)
    beyond = x * np.cos(angle) + y * np.sin(angle) > rng.uniform(-size / 4, size / 4)
    canvas, labels = np.empty((size, size)), np.empty((size, size), dtype=np.uint8)
    for side, kind in zip((beyond, ~beyond), rng.permutation(len(TEXTURES))[:2], strict=True):
        pattern = _texture(rng, TEXTURES[kind], x, y)
        canvas[side] = (_MID_GREY * (1 + rng.uniform(*_TEXTURE_CONTRAST) * pattern))[side]
        labels[side] = len(CLASSES) - len(TEXTURES) + 1 + kind
    return canvas, labels


def _texture(rng: np.random.Generator, kind: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A pattern with values in [-1, 1]."""
    if kind == "clouds":
        octaves = [rng.integers(256, size=(cells, cells), dtype=np.uint8) for cells in (4, 8, 16, 32, 64)]
        grown = [np.asarray(Image.fromarray(noise).resize(x.shape, Image.Resampling.BICUBIC)) for noise in octaves]
        return np.clip(2 * (np.mean(grown, axis=0) / _MID_GREY - 1), -1, 1)  # their mean swings less than each
    angle, pixels, (first, second) = rng.uniform(0, np.pi), rng.uniform(6, 24), rng.uniform(0, 2 * np.pi, size=2)
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    wave = np.sin(2 * np.pi * along / pixels + first)
    return wave if kind == "stripes" else np.sign(wave) * np.sign(np.sin(2 * np.pi * across / pixels + second))


def _enlarge(scan: np.ndarray, side: int, degrees: float) -> np.ndarray:
    """A scan's ink, uint8, `side` pixels wide before it is turned, with a rim of one scan pixel in which strokes can end."""
    whole = round(side * 10 / 8)
    large = Image.fromarray(np.pad(scan, 1)).resize((whole, whole), Image.Resampling.BICUBIC)
    return np.asarray(large.rotate(degrees, Image.Resampling.BICUBIC, expand=True))


def _annotation(annotation_id: int, image_id: int, digit: int, mask: np.ndarray) -> dict:
    """An instance as COCO writes it, its mask as compressed RLE."""
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
    try:
        os.link(file, other)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, other)
