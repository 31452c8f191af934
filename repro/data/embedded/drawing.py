"""Drawing of digits on textures, for `scenes` and `digits_wild`.

An image is square and grey. A straight line divides the ground in two, and each side has one of three textures.
Enlarged and rotated scans of scikit-learn's digits are drawn over it; their strokes are opaque.
"""

import numpy as np
from PIL import Image

from ..settings import DrawnDigits

TEXTURES = ("clouds", "stripes", "checks")
_MID_GREY = 127.5  # between black (0) and white (255)
# grey levels of a scan, 0 to 255, at which a stroke begins to cover the ground, belongs to its mask, and covers the
# ground fully
_FAINT, INK, _FULL = 60, 100, 140
_NOISE = 8  # amplitude of the uniform noise in grey levels


def draw_level(rng: np.random.Generator, settings: DrawnDigits) -> float:
    """Draw the grey level of a digit's ink, brighter than mid-grey."""
    return _MID_GREY * (1 + rng.uniform(*settings.contrast))


def cover(ink: np.ndarray) -> np.ndarray:
    """Return the opacity of a scan's ink, uint8, over the ground: 0 to 1."""
    return np.clip((ink - float(_FAINT)) / (_FULL - _FAINT), 0, 1)


def finish(rng: np.random.Generator, canvas: np.ndarray) -> np.ndarray:
    """Add noise to the canvas and round it to uint8."""
    return (
        np.rint(canvas + rng.integers(-_NOISE, _NOISE, size=canvas.shape, endpoint=True)).clip(0, 255).astype(np.uint8)
    )


def draw_ground(rng: np.random.Generator, size: int, settings: DrawnDigits) -> tuple[np.ndarray, np.ndarray]:
    """Draw a ground with one texture on each side of a line.

    Returns:
        Pixels (size, size) float64 around mid-grey, and each pixel's index in `TEXTURES` (size, size) uint8.
    """
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    angle = rng.uniform(0, 2 * np.pi)
    beyond = x * np.cos(angle) + y * np.sin(angle) > rng.uniform(-size / 4, size / 4)
    canvas, labels = np.empty((size, size)), np.empty((size, size), dtype=np.uint8)
    for side, kind in zip((beyond, ~beyond), rng.permutation(len(TEXTURES))[:2], strict=True):
        pattern = _texture(rng, TEXTURES[kind], x, y)
        canvas[side] = (_MID_GREY * (1 + rng.uniform(*settings.texture_contrast) * pattern))[side]
        labels[side] = kind
    return canvas, labels


def _texture(rng: np.random.Generator, kind: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Draw a pattern (size, size) with values in [-1, 1] at the coordinates x, y (size, size) in pixels."""
    if kind == "clouds":
        octaves = [rng.integers(256, size=(cells, cells), dtype=np.uint8) for cells in (4, 8, 16, 32, 64)]
        grown = [np.asarray(Image.fromarray(noise).resize(x.shape, Image.Resampling.BICUBIC)) for noise in octaves]
        # factor 2: the mean of octaves varies less than each of them
        return np.clip(2 * (np.mean(grown, axis=0) / _MID_GREY - 1), -1, 1)
    # the phases are those of the two directions of a checkerboard
    angle, wavelength, (first, second) = rng.uniform(0, np.pi), rng.uniform(6, 24), rng.uniform(0, 2 * np.pi, size=2)
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    wave = np.sin(2 * np.pi * along / wavelength + first)
    return wave if kind == "stripes" else np.sign(wave) * np.sign(np.sin(2 * np.pi * across / wavelength + second))


def enlarge(scan: np.ndarray, side: int, degrees: float) -> np.ndarray:
    """Enlarge a scan's ink (8, 8) uint8 to a width of `side` pixels, and rotate it.

    A rim of one scan pixel is added, in which the strokes fade out: the result is a square of side * 10 / 8 pixels or,
    rotated, the larger square around it.
    """
    whole = round(side * 10 / 8)
    large = Image.fromarray(np.pad(scan, 1)).resize((whole, whole), Image.Resampling.BICUBIC)
    return np.asarray(large.rotate(degrees, Image.Resampling.BICUBIC, expand=True))
