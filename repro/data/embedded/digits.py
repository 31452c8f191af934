"""The embedded `digits`: 1,797 handwritten digits, scanned at 8×8 pixels, as an ImageNet-style folder tree of PNGs."""

from pathlib import Path

import numpy as np
from PIL import Image

from ...core.ui import track
from ..settings import DigitsSettings
from . import list_class_folders, new_tree, save_png


def write_digits(root: Path, settings: DigitsSettings) -> None:
    """Write `root/{train,tune,test}/digit_<0-9>/scan_<number>.png`, replacing an earlier tree of this function.

    The scans are those of scikit-learn's `load_digits` (8x8 pixels, 17 grey levels), enlarged bicubically; the number
    in a file name is the scan's index there. Each class is split separately. The same settings give the same bytes.
    Raises UserError as `new_tree` does.
    """
    scans, targets = load_scans()
    split_of = choose_splits(targets, settings.tune_fraction, settings.test_fraction, settings.seed)
    with new_tree(root, "digits", settings, list_class_folders("digits", settings.CLASSES)) as tree:
        for number, (scan, digit) in enumerate(track(list(zip(scans, targets)), f"writing {root.name}", unit="images")):
            large = Image.fromarray(scan).resize((settings.image_size, settings.image_size), Image.Resampling.BICUBIC)
            save_png(np.asarray(large), tree / split_of[number] / settings.CLASSES[digit] / f"scan_{number:04d}.png")


def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """Load scikit-learn's digits: scans (1797, 8, 8) uint8 with bright ink, and their digits (1797,)."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    return np.rint(scans.images * (255 / 16)).astype(np.uint8), scans.target


def choose_splits(targets: np.ndarray, tune_fraction: float, test_fraction: float, seed: int) -> np.ndarray:
    """Choose the split of each scan, given the digits (N,) that they show.

    Of each digit, the shares for tune and test are drawn, and the rest is for training.

    Returns:
        (N,) names of splits.
    """
    chosen = np.full(len(targets), "train", dtype=object)
    rng = np.random.Generator(np.random.PCG64(seed))
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(targets == digit))
        tune, test = (round(len(members) * fraction) for fraction in (tune_fraction, test_fraction))
        # tune first: the recipe was chosen on these scans, and another share for test must not change them
        chosen[members[:tune]] = "tune"
        chosen[members[tune : tune + test]] = "test"
    return chosen
