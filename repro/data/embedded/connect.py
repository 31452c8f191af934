"""The embedded connectivity task, similar to Pathfinder: are two markers at the ends of the same dashed curve?

Two curves approach each other at a bend and part again: four arms leave the bend at right angles, and each curve joins
two neighbouring arms. The markers lie on the ends of arms 0 and 1. `joined` has one bend between arms 0 and 1, and one
between 2 and 3. `apart` has the same bends rotated by 90 degrees, between 1 and 2, and between 3 and 0.

Images are drawn in such pairs, which differ only in these two dashes. Both classes therefore have exactly the same
marker positions, curve lengths, dashes and ink. No region outside the bend reveals the class. The bend alone does not
either, since the markers lie on any two neighbouring arms with the same probability: the class follows from the bend
together with the arms that lead to the markers. Distractors are more such pairs of curves without markers, equal in
both images.
"""

from pathlib import Path

import numpy as np

from ...core.errors import UserError
from ...core.ui import track
from ..kinds import KINDS
from ..settings import ConnectSettings
from . import list_class_folders, new_tree, save_png

_QUARTER_TURNS = np.array([1, 1j, -1, -1j])[:, None]  # of arms 0 to 3; exact, unlike exp(1j * angle)
_SAMPLES_PER_PX = 2  # points of a curve for each pixel of its length
_COARSE = 4  # every fourth sample is tested for clearance
_CANDIDATES = 32  # pairs of curves in one vectorised proposal
_PROPOSALS = 8  # proposals for a pair of curves, given those already placed
_TRIES = 40  # restarts of an image


def write_connect(root: Path, settings: ConnectSettings) -> None:
    """Write `root/{train,tune,test}/{apart,joined}/pair_<number>.png`, replacing an earlier tree of this function.

    Images of one name in the two class folders are a pair. The same settings give the same bytes.

    Raises:
        UserError: as `new_tree`, or the curves do not fit into an image.
    """
    with new_tree(root, "connect", settings, list_class_folders("connect", settings.CLASSES)) as tree:
        for index, split in enumerate(KINDS["connect"].splits):
            for number in track(
                range(getattr(settings, f"{split}_pairs")), f"drawing {root.name}, {split}", unit="pairs"
            ):
                # one generator per pair: with more pairs, the first ones stay the same
                rng = np.random.Generator(np.random.PCG64((settings.seed, index, number)))
                for name, pixels in zip(settings.CLASSES, draw_pair(rng, settings)):
                    save_png(pixels, tree / split / name / f"pair_{number:05d}.png")


def draw_pair(rng: np.random.Generator, settings: ConnectSettings) -> np.ndarray:
    """Draw (2, S, S) uint8 with bright ink, one image of `apart` and one of `joined`.

    Raises:
        UserError: as `place_curves`.
    """
    (arms, bends), *others = place_curves(rng, settings)
    shared = np.zeros((settings.image_size, settings.image_size))
    _draw(shared, arms, settings)
    _stamp(shared, arms[:2, -1], settings.marker_px)
    for other_arms, other_bends in others:
        _draw(shared, other_arms, settings)
        _draw(shared, other_bends[rng.integers(2) :: 2], settings)
    canvas = np.stack([shared, shared])
    for image, first in zip(canvas, (1, 0)):
        _draw(image, bends[first::2], settings)
    return np.rint(255 * canvas).astype(np.uint8)


def place_curves(rng: np.random.Generator, settings: ConnectSettings) -> list[tuple[np.ndarray, np.ndarray]]:
    """Place all pairs of curves of an image: arms (4, P) and possible bends (4, Q) of each pair.

    The pair with the markers comes first. Points are complex numbers x + iy in pixels, two for each pixel of length.
    Arms run outwards, and bend k joins arms k and k + 1.

    Raises:
        UserError: they do not fit into an image.
    """
    lengths = [rng.integers(*settings.dashes, endpoint=True), *[settings.dashes[0]] * settings.distractors]
    for _ in range(_TRIES):
        placed: list[tuple[np.ndarray, np.ndarray]] = []
        for dashes in lengths:
            taken = np.concatenate([points.ravel()[::_COARSE] for pair in placed for points in pair] or [np.empty(0)])
            for _ in range(_PROPOSALS):
                arms, bends = _propose(rng, dashes, settings)
                fitting = _fits(arms, bends, taken, settings)
                if fitting.any():
                    placed.append((arms[fitting.argmax()], bends[fitting.argmax()]))
                    break
            else:
                break
        else:
            return placed
    raise UserError(
        f"connect: {2 * len(lengths)} curves with arms of {settings.dashes[0]} to {settings.dashes[1]} dashes do not fit into "
        f"{settings.image_size} pixels after {_TRIES} attempts; take fewer distractors, fewer or shorter dashes, or a larger image_size"
    )


def _propose(rng: np.random.Generator, dashes: int, settings: ConnectSettings) -> tuple[np.ndarray, np.ndarray]:
    """Propose N <= 32 pairs of curves inside the image: arms (N, 4, P) and bends (N, 4, Q).

    An arm has `dashes` dashes, and its curvature is piecewise linear. All is first built around the origin, with arm 0
    along the x axis, and then turned and shifted.
    """
    period, radius, reach = settings.dash_px + settings.gap_px, settings.bend_radius_px, settings.curvature
    along = np.arange(_SAMPLES_PER_PX * (dashes * period - settings.gap_px / 2) + 1) / _SAMPLES_PER_PX
    # (dashes + 1, P) hat functions: the curvature is linear between knots that are one dash and gap apart
    knots = np.maximum(0, 1 - np.abs(along / period - np.arange(dashes + 1)[:, None]))
    curvature = rng.uniform(-reach, reach, (_CANDIDATES, 4, dashes + 1)) @ knots
    # a sample's direction is the integral of the curvature, and its place that of the directions
    steps = np.exp(1j * np.cumsum(curvature, axis=2) / _SAMPLES_PER_PX) / _SAMPLES_PER_PX
    arms = radius + np.cumsum(steps, axis=2) - steps[:, :, :1]
    # a quarter circle from the beginning of arm 1 to that of arm 0
    bend = radius * (1 + 1j + np.exp(1j * np.linspace(np.pi, 1.5 * np.pi, _SAMPLES_PER_PX * period + 1)))
    tilt = np.radians(45 + rng.uniform(-settings.tilt_degrees, settings.tilt_degrees, (_CANDIDATES, 1, 1)))
    turns = np.exp(1j * tilt) * 1j ** rng.integers(4, size=(_CANDIDATES, 1, 1)) * _QUARTER_TURNS
    arms, bends = turns * arms, turns * bend
    ends, rim = np.stack([arms.real, arms.imag]), settings.marker_px / 2 + 1
    # (2, N) smallest and largest shift, in x and in y, that keeps the arms inside
    low, high = np.ceil(rim - ends.min(axis=(2, 3))), np.floor(settings.image_size - 1 - rim - ends.max(axis=(2, 3)))
    inside = (low <= high).all(axis=0)
    # whole pixels: a bend and its rotation by 90 degrees then cover the same pixels, rotated
    x, y = rng.integers(low[:, inside].astype(int), high[:, inside].astype(int), endpoint=True)[..., None, None]
    return x + 1j * y + arms[inside], x + 1j * y + bends[inside]


def _fits(arms: np.ndarray, bends: np.ndarray, taken: np.ndarray, settings: ConnectSettings) -> np.ndarray:
    """Return (N,) bool: whether a candidate stays `clearance_px` away from itself and from the points `taken`."""
    clearance, count = settings.clearance_px, len(arms)
    centres = bends.mean(axis=(1, 2))[:, None]
    arms, bends = arms[:, :, ::_COARSE], bends[:, :, ::_COARSE]
    points = arms.reshape(count, 4 * arms.shape[2])
    number = np.arange(points.shape[1])
    along = number % arms.shape[2] * (_COARSE / _SAMPLES_PER_PX)
    # neighbouring points of one arm are close by construction
    near = (np.abs(along[:, None] - along) < 2 * clearance) & (
        number[:, None] // arms.shape[2] == number // arms.shape[2]
    )
    fitting = ((np.abs(points[:, :, None] - points[:, None]) >= clearance) | near).all(axis=(1, 2))
    # the bends lie in a disc around the centre, which the beginnings of the arms touch
    fitting &= ((np.abs(points - centres) >= settings.bend_radius_px + clearance) | (along < 2 * clearance)).all(axis=1)
    points = np.concatenate([points, bends.reshape(count, 4 * bends.shape[2])], axis=1)
    fitting &= (np.abs(points[:, :, None] - taken) >= clearance).all(axis=(1, 2))
    return fitting


def _draw(canvas: np.ndarray, paths: np.ndarray, settings: ConnectSettings) -> None:
    """Draw the dashes of paths (K, P). Each path begins in the middle of a gap."""
    along = np.arange(paths.shape[1]) / _SAMPLES_PER_PX - settings.gap_px / 2
    _stamp(canvas, paths[:, along % (settings.dash_px + settings.gap_px) <= settings.dash_px], settings.thickness_px)


def _stamp(canvas: np.ndarray, centres: np.ndarray, diameter_px: float) -> None:
    """Cover the pixels under discs; pixels at a disc's edge are covered in part."""
    reach = int(diameter_px / 2 + 1.5)
    window = np.arange(-reach, reach + 1)
    centres = centres.reshape(-1, 1, 1)
    x, y = np.rint(centres.real) + window, np.rint(centres.imag) + window[:, None]
    cover = np.clip(diameter_px / 2 + 0.5 - np.abs(x + 1j * y - centres), 0, 1)
    np.maximum.at(canvas, (y.astype(int), x.astype(int)), cover)
