"""Masks of COCO's objects: polygons, runs of pixels (RLE), and runs compressed into a text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pycocotools import mask as rle

_MOST_OUTSIDE = 10  # how far from the origin a polygon may reach, in sides of the image


def check_mask(segmentation: Any, height: int, width: int) -> bool:
    """Check a mask of an image of (height, width), and return whether it has an area.

    pycocotools trusts its input, and takes memory for every pixel of an outline, even far outside the image.

    Raises:
        ValueError, TypeError, LookupError: pycocotools could not draw the mask.
    """
    if isinstance(segmentation, dict):
        size, counts = segmentation["size"], segmentation["counts"]
        if list(size) != [height, width]:
            raise ValueError(f"a mask of {size[1]}×{size[0]} pixels in an image of {width}×{height}")
        if isinstance(counts, str):
            counts = _parse_counts(counts)
        if not all(type(count) is int and count >= 0 for count in counts) or sum(counts) != height * width:
            raise ValueError(f"the counts of a mask are not those of {width}×{height} pixels")
        return sum(counts[1::2]) > 0
    for polygon in segmentation:
        if not max(map(abs, polygon), default=0) <= _MOST_OUTSIDE * max(height, width) or len(polygon) % 2:
            raise ValueError(f"a polygon leaves its image of {width}×{height}, or has no y for an x")
    return any(map(_has_area, segmentation))


def encode_mask(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Convert COCO's polygons, RLE or compressed RLE to compressed RLE; polygons of one or two corners are empty."""
    if isinstance(segmentation, dict):
        compressed = not isinstance(segmentation["counts"], list)
        return segmentation if compressed else rle.frPyObjects(segmentation, height, width)
    polygons = [polygon for polygon in segmentation if len(polygon) >= 6]
    if not polygons:
        return rle.encode(np.zeros((height, width), dtype=np.uint8, order="F"))
    return rle.merge(rle.frPyObjects(polygons, height, width))


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Convert COCO's polygons, RLE or compressed RLE to (height, width) uint8; see `encode_mask`."""
    return rle.decode(encode_mask(segmentation, height, width))


def _has_area(polygon: Sequence[float]) -> bool:
    """Return whether the corners (x, y, x, y, ...) are not all on one line, which the third one mostly tells."""
    along = down = 0  # from the first corner to the first one that differs from it
    for x, y in zip(polygon[::2], polygon[1::2], strict=True):
        right, below = x - polygon[0], y - polygon[1]
        if right * down != below * along:
            return True
        if not (along or down):
            along, down = right, below
    return False


def _parse_counts(text: str) -> list[int]:
    """Parse the counts of a compressed RLE.

    A count is a signed integer in groups of five bits, lowest first; from the fourth on, it is a difference to the last
    but one. Each character, less 48, holds a group; its bit 32 says that another one follows.
    """
    counts, value, shift = [], 0, 0
    for character in text.encode("ascii"):
        bits = character - 48
        if not 0 <= bits < 64 or shift > 30:
            raise ValueError("the counts of a mask are not compressed RLE")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits & 16) << (shift - 4)  # sign extension
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value, shift = 0, 0
    if shift:
        raise ValueError("the counts of a mask are cut short")
    return counts
