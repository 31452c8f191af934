"""Decoding images and label maps."""

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from .findings import BadData, Finding

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # no other decoder of Pillow gets to see a file
MOST_OBLONG = 50  # scaled to the size of a model by its short side, a longer picture becomes enormous
# what reading a file raises that cannot be read
UNREADABLE = (OSError, ValueError, EOFError)
Image.MAX_IMAGE_PIXELS = None  # the limit is the one below
max_pixels = 80_000_000  # those of ImageNet, COCO and ADE20K are smaller; see `limit_pixels`
_animated: list[str] = []  # the first animation that was read

_log = logging.getLogger(__name__)


def limit_pixels(most: int) -> None:
    """Refuse images of more pixels from now on, in this process and in those that it forks."""
    global max_pixels
    max_pixels = most


def explain_error(error: Exception) -> str:
    """An exception in one line that repeats no path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return "not in any image format" if "cannot identify image file" in text else text or type(error).__name__


def open_image(content: bytes, name: object, *, upright: bool = True) -> Image.Image:
    """An image in one of `FORMATS`, decoded, turned as its EXIF data say or, unless `upright`, as it is stored.

    Of an animation it is the first frame, which is said once. `name` is what messages call the image.

    Raises:
        ValueError: in one line, what is wrong: damaged bytes, another format, or by its header more than `max_pixels`
            or sides whose ratio is above `MOST_OBLONG`.
    """
    try:
        # Pillow warns about EXIF data that are odd but readable
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            if image.width * image.height > max_pixels:
                raise ValueError(f"{image.width}×{image.height} pixels, more than runtime.max_pixels: {max_pixels:,}")
            if max(image.size) > MOST_OBLONG * min(image.size):
                raise ValueError(
                    f"{image.width}×{image.height} pixels; crop it, a side may be {MOST_OBLONG} times the other"
                )
            # a photo of several pictures is no animation
            if getattr(image, "is_animated", False) and image.format != "MPO" and not _animated:
                _animated.append(str(name))
                _log.warning("%s: an animation; of each such file, the first frame is used", name)
            image.load()
            return ImageOps.exif_transpose(image) if upright else image
    except Exception as error:  # Pillow raises whatever a damaged file leads to
        raise ValueError(explain_error(error)) from None


def decode_rgb(content: bytes, name: object, *, upright: bool = True) -> Image.Image:
    """An image as RGB, see `open_image`; by default as OpenCV decodes it.

    Grey becomes three equal channels, 16 bits keep the upper 8, an alpha channel is left out, palettes and CMYK are
    converted.
    """
    image = open_image(content, name, upright=upright)
    if upright and image.mode.startswith("I;16"):
        # Pillow's own conversion would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def read_pixels(path: Path) -> np.ndarray:
    """The image of a file as (H, W, 3) uint8, red first, see `decode_rgb`; raises UserError if it is missing or cannot
    be read.
    """
    return np.array(_decode_file(path, decode_rgb))


def read_labels(path: Path) -> np.ndarray:
    """A label map as (H, W) uint8; raises UserError if it is missing, damaged, or not of one channel with 8 bits."""
    image = _decode_file(path, open_image)
    if image.mode != "L":
        problem = f"label map of mode {image.mode}, one channel of 8 bits expected"
        raise BadData(Finding("error", path, problem, "take the file of the release"))
    return np.array(image)


def _decode_file(path: Path, decode: Callable[[bytes, Path], Image.Image]) -> Image.Image:
    try:
        return decode(path.read_bytes(), path)
    except UNREADABLE as error:
        raise BadData(Finding("error", path, f"unreadable image ({explain_error(error)})", "get it again")) from None
