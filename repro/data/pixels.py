"""Decoding images and label maps."""

import io
import struct
import warnings
from collections.abc import Callable
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


def decode_upright(content: bytes) -> Image.Image:
    """An image as RGB, turned as its EXIF data say, as OpenCV decodes it.

    Grey becomes three equal channels, 16 bits keep the upper 8, an alpha channel is left out, palettes and CMYK are converted.
    Damaged bytes, or pixels without a known range of values (32 bits, floats), raise `UNREADABLE`.
    """
    image = _open_upright(content)
    if image.mode.startswith("I;16"):
        # Pillow's own conversion would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode} has no known range of values, 8 or 16 bits expected")
    return image.convert("RGB")


def read_pixels(path: Path) -> np.ndarray:
    """The image of a file as (H, W, 3) uint8, red first, see `decode_upright`; raises UserError if it is missing or damaged."""
    return np.array(_decode_file(path, decode_upright))


def read_labels(path: Path) -> np.ndarray:
    """A label map as (H, W) uint8; raises UserError if it is missing, damaged, or not of one channel with 8 bits."""
    image = _decode_file(path, _open_upright)
    if image.mode != "L":
        problem = f"label map of mode {image.mode}, one channel of 8 bits expected"
        raise BadData(Finding("error", path, problem, "take the file of the release"))
    return np.array(image)


def _open_upright(content: bytes) -> Image.Image:
    # Pillow warns about sizes that it still reads, and about EXIF data that are odd but readable
    with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as image:
        return ImageOps.exif_transpose(image)


def _decode_file(path: Path, decode: Callable[[bytes], Image.Image]) -> Image.Image:
    try:
        return decode(path.read_bytes())
    except UNREADABLE as error:
        raise BadData(Finding("error", path, f"unreadable image ({explain_error(error)})", "get it again")) from None
