"""The masks of COCO's objects: polygons, runs of pixels (RLE), and runs compressed into a text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pycocotools import mask as rle

_MOST_OUTSIDE = 10  # how far from its origin a polygon may reach, in sides of the image


def check_mask(segmentation: Any, height: int, width: int) -> bool:
    """Whether a mask has an area.

    Raises an error about one that pycocotools, which trusts its input, could not draw into an image of this size.

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
        return sum(counts[1::2]) > 0
    for polygon in segmentation:
        if not max(map(abs, polygon), default=0) <= _MOST_OUTSIDE * max(height, width) or len(polygon) % 2:
            raise ValueError(f"a polygon leaves its image of {width}×{height}, or has no y for an x")
    return any(map(_has_area, segmentation))


def encode_mask(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """COCO's polygons, RLE or compressed RLE as compressed RLE; polygons of one or two corners are empty."""
    if isinstance(segmentation, dict):
        compressed = not isinstance(segmentation["counts"], list)
        return segmentation if compressed else rle.frPyObjects(segmentation, height, width)
    polygons = [polygon for polygon in segmentation if len(polygon) >= 6]
    if not polygons:
        return rle.encode(np.zeros((height, width), dtype=np.uint8, order="F"))
    return rle.merge(rle.frPyObjects(polygons, height, width))


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """COCO's polygons, RLE or compressed RLE as (height, width) uint8; polygons of one or two corners are empty."""
    return rle.decode(encode_mask(segmentation, height, width))


def _has_area(polygon: Sequence[float]) -> bool:
    """Whether the corners do not lie on one line; mostly known at the third one."""
    along = down = 0
    for x, y in zip(polygon[::2], polygon[1::2], strict=True):
        right, below = x - polygon[0], y - polygon[1]
        if right * down != below * along:
            return True
        if not (along or down):
            along, down = right, below
    return False


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
