"""Made-up data as files: pictures of noise, annotations as COCO has them, and pairs as ADE20K has them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as rle

WIDTH, HEIGHT = 60, 40


def picture(path: Path, size: tuple[int, int] = (48, 36), seed: int = 0) -> Path:
    """A JPEG of noise, which does not compress: half of its bytes hold half of its rows."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).save(path, "JPEG")
    return path


def block(left: int, top: int, right: int, bottom: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    mask = np.zeros((height, width), dtype=np.uint8)
    mask[top:bottom, left:right] = 1
    return mask


def polygon(left: float, top: float, right: float, bottom: float) -> list[list[float]]:
    return [[left, top, right, top, right, bottom, left, bottom]]


def compressed(mask: np.ndarray) -> dict[str, Any]:
    encoded = rle.encode(np.asfortranarray(mask))
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}


def runs(mask: np.ndarray) -> dict[str, Any]:
    """Uncompressed RLE: lengths of runs of 0 and 1, column by column, zeros first."""
    changes = np.flatnonzero(np.diff(mask.T.ravel(), prepend=0))
    return {"size": list(mask.shape), "counts": np.diff(changes, prepend=0, append=mask.size).tolist()}


def annotation(number: int, image_id: int, category_id: int, bbox: list[float], segmentation=None, **more) -> dict:
    """An instance; without a segmentation it is the box."""
    left, top, width, height = bbox
    mask = segmentation or polygon(left, top, left + width, top + height)
    row = {"id": number, "image_id": image_id, "category_id": category_id, "bbox": bbox, "segmentation": mask}
    return row | {"area": max(width * height, 0), "iscrowd": 0, **more}


def image(number: int, width: int = WIDTH, height: int = HEIGHT) -> dict[str, Any]:
    return {"id": number, "file_name": f"{number:012d}.png", "width": width, "height": height}


def places(width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """An image whose red is 2 x and whose green is 2 y + 1, so that each pixel tells its place."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.dstack([2 * x, 2 * y + 1, np.zeros_like(x)]).astype(np.uint8)


def write_coco(root: Path, content: dict[str, Any], split: str = "train2017") -> Path:
    """An annotation file of COCO, and its images."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / split).mkdir(exist_ok=True)
    (root / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    for row in content["images"]:
        Image.fromarray(places(row["width"], row["height"])).save(root / split / row["file_name"])
    return root


def write_ade20k(root: Path, *, classes: int, split: str = "training", pairs: int = 4, size=(40, 64)) -> Path:
    """Pairs of noise with blocks of labels 0..classes, one of them 0.

    Images are PNGs under JPEG's name, so that every decoder reads the same.
    """
    rng = np.random.default_rng(0)
    (root / "images" / split).mkdir(parents=True)
    (root / "annotations" / split).mkdir(parents=True)
    for number in range(pairs):
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        labels = rng.integers(0, classes + 1, (size[0] // 8, size[1] // 8), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
        labels[:8, :8] = 0
        Image.fromarray(pixels).save(root / "images" / split / f"ADE_{number:08d}.jpg", format="PNG")
        Image.fromarray(labels).save(root / "annotations" / split / f"ADE_{number:08d}.png")
    rows = [f"{number}\tclass {number}" for number in range(1, classes + 1)]
    (root / f"objectInfo{classes}.txt").write_text("\n".join(["Idx\tName", *rows]) + "\n")
    return root
