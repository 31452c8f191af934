"""Decoding images and label maps."""

import io
import struct
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from .findings import BadData, Finding

# what Pillow raises on damaged files of various formats
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


def explain_error(error: Exception) -> str:
    """An exception in one line that repeats no path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return "not in any image format" if "cannot identify image file" in text else text or type(error).__name__


def decode_rgb(content: bytes) -> Image.Image:
    """An image as RGB, its pixels as they are stored: EXIF orientation is ignored, as in all published numbers on ImageNet.

    Raises:
        UNREADABLE: damaged bytes.
    """
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


def decode_upright(content: bytes) -> Image.Image:
    """An image as RGB, turned as its EXIF data say, as OpenCV decodes it.

    Grey becomes three equal channels, 16 bits keep the upper 8, an alpha channel is left out, palettes and CMYK are converted.

    Raises:
        UNREADABLE: damaged bytes, or pixels without a known range of values (32 bits, floats).
    """
    image = _open_upright(content)
    if image.mode.startswith("I;16"):
        # Pillow's own conversion would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode} has no known range of values, 8 or 16 bits expected")
    return image.convert("RGB")


def read_pixels(path: Path) -> np.ndarray:
    """The image of a file as (H, W, 3) uint8, red first; see `decode_upright`.

    Raises:
        UserError: missing, damaged, or of a mode without a known range of values.
    """
    try:
        return np.array(decode_upright(path.read_bytes()))
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def read_labels(path: Path) -> np.ndarray:
    """A label map as (H, W) uint8.

    Raises:
        UserError: missing, damaged, or not of one channel with 8 bits.
    """
    try:
        image = _open_upright(path.read_bytes())
    except UNREADABLE as error:
        raise _unreadable(path, error) from None
    if image.mode != "L":
        raise BadData(
            Finding("error", path, f"label map of mode {image.mode}, one channel of 8 bits expected", "take the file of the release")
        )
    return np.array(image)


def _open_upright(content: bytes) -> Image.Image:
    # Pillow warns about sizes that it still reads, and about EXIF data that are odd but readable
    with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as image:
        return ImageOps.exif_transpose(image)


def _unreadable(path: Path, error: Exception) -> BadData:
    return BadData(Finding("error", path, f"unreadable image ({explain_error(error)})", "get it again"))
