"""Decoding images and label maps."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from ..core.runtime import Runtime
from .findings import BadData, Finding

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # no other decoder of Pillow gets to see a file
MOST_OBLONG = 50  # scaled to the size of a model by its short side, a longer picture becomes enormous
# what reading a file raises that cannot be read
UNREADABLE = (OSError, ValueError, EOFError)
MAX_PIXELS = Runtime.max_pixels  # where no setting is at hand; images of ImageNet, COCO and ADE20K are smaller
_animated: list[str] = []  # the first animation that was read

_log = logging.getLogger(__name__)


class WrongSize(ValueError):
    """An intact picture that is not read because of its size: (problem, advice)."""

    def __str__(self) -> str:
        return "; ".join(self.args)


@contextlib.contextmanager
def lift_limit() -> Iterator[None]:
    """Within the context, Pillow reads and crops pictures of any size, since the limit is `runtime.max_pixels`."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def explain_error(error: Exception) -> str:
    """An exception in one line that repeats no path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return "not in any image format" if "cannot identify image file" in text else text or type(error).__name__


def open_image(content: bytes, name: object, max_pixels: int = MAX_PIXELS, *, upright: bool = True) -> Image.Image:
    """Decode an image in one of `FORMATS`, and turn it as its EXIF data say or, unless `upright`, leave it as stored.

    An animation gives its first frame, which is said once. `name` is what messages call the image.

    Raises:
        ValueError: in one line, what is wrong: damaged bytes or another format; as `WrongSize`, by the header alone,
            more than `max_pixels` or sides whose ratio is above `MOST_OBLONG`.
    """
    try:
        # Pillow warns about EXIF data that are odd but readable
        with warnings.catch_warnings(action="ignore"), lift_limit():
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            if image.width * image.height > max_pixels:
                problem = f"{image.width}×{image.height} pixels, more than runtime.max_pixels: {max_pixels:,}"
                raise WrongSize(problem, "shrink the picture, or raise that setting")
            if max(image.size) > MOST_OBLONG * min(image.size):
                problem = f"{image.width}×{image.height} pixels, one side above {MOST_OBLONG} times the other"
                raise WrongSize(problem, "crop the picture")
            # a photo of several pictures is no animation
            if getattr(image, "is_animated", False) and image.format != "MPO" and not _animated:
                _animated.append(str(name))
                _log.warning("%s: an animation; of each such file, the first frame is used", name)
            image.load()
            return ImageOps.exif_transpose(image) if upright else image
    except WrongSize:
        raise
    except Exception as error:  # Pillow raises whatever a damaged file leads to
        raise ValueError(explain_error(error)) from None


def decode_rgb(content: bytes, name: object, max_pixels: int = MAX_PIXELS, *, upright: bool = True) -> Image.Image:
    """Decode an image as RGB, see `open_image`; by default as OpenCV does.

    Grey becomes three equal channels, 16 bits keep the upper 8, alpha is left out, palettes and CMYK are converted.
    """
    image = open_image(content, name, max_pixels, upright=upright)
    if upright and image.mode.startswith("I;16"):
        # Pillow's own conversion would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def read_pixels(path: Path, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read a file as (H, W, 3) uint8, red first, see `decode_rgb`; UserError where it is missing or unreadable."""
    return np.array(_decode_file(path, decode_rgb, max_pixels))


def read_labels(path: Path, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read a label map as (H, W) uint8; UserError where it is missing, damaged, or not one channel of 8 bits."""
    image = _decode_file(path, open_image, max_pixels)
    if image.mode != "L":
        problem = f"label map of mode {image.mode}, one channel of 8 bits expected"
        raise BadData(Finding("error", path, problem, "take the file of the release"))
    return np.array(image)


def judge_error(path: Path, error: Exception, advice: str, what: str = "image") -> Finding:
    """What is wrong with a file that could not be read, and what to do: `advice`, unless the error knows better."""
    problem, advice = error.args if isinstance(error, WrongSize) else (explain_error(error), advice)
    return Finding("error", path, f"unreadable {what} ({problem})", advice)


def _decode_file(path: Path, decode: Callable[[bytes, Path, int], Image.Image], max_pixels: int) -> Image.Image:
    try:
        return decode(path.read_bytes(), path, max_pixels)
    except UNREADABLE as error:
        raise BadData(judge_error(path, error, "get it again")) from None
