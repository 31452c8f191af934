"""The embedded data set `digits_wild`: the scans of `digits` on textures, at varied size, place, angle and contrast."""

from pathlib import Path

import numpy as np

from ...core.ui import track
from ..settings import WildDigitsSettings
from . import list_class_folders, new_tree, save_png
from .digits import choose_splits, load_scans
from .drawing import cover, draw_ground, draw_level, enlarge, finish


def write_digits_wild(root: Path, settings: WildDigitsSettings) -> None:
    """Write `root/{train,tune,test}/digit_<0-9>/scan_<number>_<copy>.png`, replacing an earlier tree of this function.

    The number is the scan's index in scikit-learn's `load_digits`. The same settings give the same bytes, and with more
    copies the first ones stay the same. Raises UserError as `new_tree` does.
    """
    scans, targets = load_scans()
    split_of = choose_splits(targets, settings.tune_fraction, settings.test_fraction, settings.split_seed)
    with new_tree(root, "digits_wild", settings, list_class_folders("digits_wild", settings.CLASSES)) as tree:
        for number, (scan, digit) in enumerate(track(list(zip(scans, targets)), f"drawing {root.name}", unit="scans")):
            for copy in range(settings.train_copies if split_of[number] == "train" else 1):
                rng = np.random.Generator(np.random.PCG64((settings.seed, number, copy)))
                file = tree / split_of[number] / settings.CLASSES[digit] / f"scan_{number:04d}_{copy}.png"
                save_png(draw_image(rng, scan, settings), file)


def draw_image(rng: np.random.Generator, scan: np.ndarray, settings: WildDigitsSettings) -> np.ndarray:
    """Draw an image (size, size) uint8 with a scan (8, 8) uint8 wholly inside."""
    canvas, _ = draw_ground(rng, settings.image_size, settings)
    side = rng.integers(*settings.side_px, endpoint=True)
    covered = cover(enlarge(scan, side, rng.uniform(-settings.angle_degrees, settings.angle_degrees)))
    covered = covered[np.ix_((covered > 0).any(axis=1), (covered > 0).any(axis=0))]
    top, left = (rng.integers(0, settings.image_size - length + 1) for length in covered.shape)
    window = np.s_[top : top + covered.shape[0], left : left + covered.shape[1]]
    canvas[window] += covered * (draw_level(rng, settings) - canvas[window])
    return finish(rng, canvas)
