"""Decoding for detection and segmentation, as the libraries of the published recipes do it with OpenCV."""

import io
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from ..core.errors import UserError
from .tree import UNREADABLE, reason


def read_pixels(path: Path) -> np.ndarray:
    """An image as (H, W, 3) uint8, red first, turned as its EXIF data say.

    Grey becomes three equal channels, 16 bits keep the upper 8, an alpha channel is left out, palettes and CMYK are converted.

    Raises:
        UserError: missing, damaged, or of a kind without a fixed range of values (32 bits, floats).
    """
    image = _decode(path)
    if image.mode.startswith("I;16"):
        # Pillow's own conversion would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise UserError(f"{path}: is an image of mode {image.mode}, whose range of values is not known; store it with 8 or 16 bits")
    return np.array(image.convert("RGB"))


def read_labels(path: Path) -> np.ndarray:
    """A label map as (H, W) uint8.

    Raises:
        UserError: missing, damaged, or not of one channel with 8 bits.
    """
    image = _decode(path)
    if image.mode != "L":
        raise UserError(f"{path}: label map of mode {image.mode}, one channel of 8 bits expected; take the release's own file")
    return np.array(image)


def _decode(path: Path) -> Image.Image:
    try:
        # Pillow warns of sizes that it still reads, and of EXIF data that are odd but readable
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(path.read_bytes())) as image:
            return ImageOps.exif_transpose(image)
    except UNREADABLE as error:
        raise UserError(f"{path}: unreadable image ({reason(error)}); get it again") from None
