"""Decoding of images and label maps."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from ..core.runtime import Runtime
from .findings import BadData, Finding

_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # a file never reaches another decoder of Pillow
# largest ratio of the sides: a more oblong picture becomes enormous when its short side is resized for a model
_MOST_OBLONG = 50
# exceptions for a file that cannot be read
UNREADABLE = (OSError, ValueError, EOFError)
_EXACT = ("PNG", "BMP")  # lossless formats, whose pixels are exact labels
_ORIENTATION = 0x0112  # the EXIF tag
# EXIF orientation -> what turns a picture that is stored so
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
MAX_PIXELS = Runtime.max_pixels  # default where no setting is given; images of ImageNet, COCO and ADE20K are smaller
_animated: list[str] = []  # name of the first animation; only this one is logged

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class WrongSize(ValueError):
    """An intact picture that is rejected because of its size; its arguments are (problem, advice)."""

    def __str__(self) -> str:
        return "; ".join(self.args)


@contextlib.contextmanager
def lift_limit() -> Iterator[None]:
    """Let Pillow read and crop pictures of any size within the context; `runtime.max_pixels` is the limit instead."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def explain_error(error: Exception) -> str:
    """Describe an exception in one line without its path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return "not in any image format" if "cannot identify image file" in text else text or type(error).__name__


def decode_rgb(content: bytes, name: object, max_pixels: int = MAX_PIXELS, *, upright: bool = True) -> Image.Image:
    """Decode an image as RGB, see `_decode`; the default `upright` agrees with OpenCV.

    Grey becomes three equal channels, of 16 bits the upper 8 are kept (if `upright`), alpha is dropped, palettes and
    CMYK are converted.
    """
    return _to_rgb(_decode(content, name, max_pixels, upright=upright)[0], upright)


def read_pixels(path: Path, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read a file as (H, W, 3) uint8, RGB, see `decode_rgb`; raises UserError where it is missing or unreadable."""
    return np.array(_decode_file(path, decode_rgb, max_pixels))


def read_labelled(image: Path, labels: Path, max_pixels: int = MAX_PIXELS) -> tuple[np.ndarray, np.ndarray]:
    """Read an image as `read_pixels` and its label map as `read_labels`, each rotated by its own EXIF data.

    Raises:
        UserError: as `read_labels`; the sizes differ; or the orientation is ambiguous, since EXIF data rotate the image
            without changing its size, and the label map has other or no EXIF data.
    """
    shown, _, turned = _decode_file(image, _decode, max_pixels)
    pixels = np.array(_to_rgb(shown, True))
    found, own = read_labels(labels, max_pixels)
    if found.shape != pixels.shape[:2]:
        sizes = (f"{shape[1]}×{shape[0]}" for shape in (found.shape, pixels.shape))
        problem = "is {}, its image {}".format(*sizes)
        raise BadData(Finding("error", labels, problem, "take the label map of this image, of its size"))
    # the size cannot tell whether the labels were drawn on the rotated image
    within = turned in (2, 3, 4) or (turned > 4 and shown.width == shown.height)
    if within and own != turned:
        problem = (
            f"is turned by its EXIF data (orientation {turned}), and {labels.name} is not: which way is it labelled?"
        )
        raise BadData(Finding("error", image, problem, "save the image as it is shown, without EXIF data"))
    return pixels, found


def _decode(
    content: bytes, name: object, max_pixels: int, *, upright: bool = True
) -> tuple[Image.Image, str | None, int]:
    """Decode an image in one of `_FORMATS`; rotate it by its EXIF data if `upright`, else leave it as stored.

    An animation gives its first frame, which is logged once. `name` identifies the image in messages.

    Returns:
        The image, its format, and its EXIF orientation: 1 if it was not rotated, else 2 to 8.

    Raises:
        ValueError: damaged bytes or another format. As `WrongSize`, from the header alone: more than `max_pixels`, or
            sides whose ratio is above `_MOST_OBLONG`.
    """
    try:
        # Pillow warns about EXIF data that are odd but readable
        with warnings.catch_warnings(action="ignore"), lift_limit():
            image = Image.open(io.BytesIO(content), formats=_FORMATS)
            if image.width * image.height > max_pixels:
                problem = f"{image.width}×{image.height} pixels, more than runtime.max_pixels: {max_pixels:,}"
                raise WrongSize(problem, "shrink the picture, or raise that setting")
            if max(image.size) > _MOST_OBLONG * min(image.size):
                problem = f"{image.width}×{image.height} pixels, one side above {_MOST_OBLONG} times the other"
                raise WrongSize(problem, "crop the picture")
            # MPO: a photo file with several pictures, not an animation
            if getattr(image, "is_animated", False) and image.format != "MPO" and not _animated:
                _animated.append(str(name))
                _log.warning("%s: an animation; of each such file, the first frame is used", name)
            image.load()
            if not upright:
                return image, image.format, 1
            turned = image.getexif().get(_ORIENTATION)  # a damaged file may have any type here
            if not isinstance(turned, int) or turned not in _TURNS:
                return image, image.format, 1
            # not ImageOps.exif_transpose, which writes the EXIF data again and fails where they are odd
            return image.transpose(_TURNS[turned]), image.format, turned
    except WrongSize:
        raise
    except Exception as error:  # Pillow raises whatever a damaged file leads to
        raise ValueError(explain_error(error)) from None


def _to_rgb(image: Image.Image, upright: bool) -> Image.Image:
    """Convert to RGB; see `decode_rgb`."""
    if upright and image.mode.startswith("I;16"):
        # Pillow's own conversion would clip at 255. Without `upright` it does, as for published ImageNet results
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def read_labels(path: Path, max_pixels: int = MAX_PIXELS) -> tuple[np.ndarray, int]:
    """Read a label map (H, W) uint8, grey levels or the indices of a palette, and its EXIF orientation, see `_decode`.

    Raises:
        UserError: the file is missing or damaged, has not one channel of 8 bits, or its format is lossy.
    """
    image, form, turned = _decode_file(path, _decode, max_pixels)
    advice = "save it as a PNG of 8 bits, grey or with a palette, whose pixels are the numbers of the classes"
    if form not in _EXACT:
        problem = f"label map in the format {form}, which changes labels"
        advice = "write a PNG from the labels as they were before"
    elif image.mode not in ("L", "P"):
        problem = f"label map of mode {image.mode}, one channel of 8 bits expected"
    # Pillow scales fewer bits to 0..255; byte 24 of a PNG is the bit depth
    elif form == "PNG" and image.mode == "L" and (depth := path.read_bytes()[24]) < 8:
        problem = f"label map of {depth} bits, 8 expected"
    else:
        return np.array(image), turned
    raise BadData(Finding("error", path, problem, advice))


def judge_error(path: Path, error: Exception, advice: str, what: str = "image") -> Finding:
    """Return the finding for a file that could not be read, with `advice` unless the error has its own."""
    problem, advice = error.args if isinstance(error, WrongSize) else (explain_error(error), advice)
    return Finding("error", path, f"unreadable {what} ({problem})", advice)


def spread_places(total: int) -> list[int]:
    """Return at most 500 evenly spaced indices below `total`: the pictures of a split that are read before a training.

    That is enough for the share of each class, and to find a folder of damaged files.
    """
    return np.linspace(0, total - 1, min(total, 500)).astype(int).tolist()


def _decode_file(path: Path, decode: Callable[[bytes, Path, int], _T], max_pixels: int) -> _T:
    """Return `decode(content, path, max_pixels)` of a file; raises UserError where it is missing or unreadable."""
    try:
        return decode(path.read_bytes(), path, max_pixels)
    except UNREADABLE as error:
        raise BadData(judge_error(path, error, "get it again")) from None
