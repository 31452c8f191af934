"""The embedded data set: 1,797 real handwritten digits, written as an ImageNet-style folder tree of PNGs."""

from pathlib import Path

import numpy as np
from PIL import Image

from .embedded import new_tree
from .settings import DigitsSettings


def write_digits(root: Path, settings: DigitsSettings) -> None:
    """Write `root/{train,val}/digit_<0-9>/scan_<number>.png`, replacing an earlier tree of this function.

    The scans are scikit-learn's `load_digits` (8x8 pixels, 17 grey levels), enlarged bicubically; the number in a name is
    the scan's place there. Each class is split on its own. The same settings give the same bytes.

    Raises:
        UserError: `root` holds something that this function did not write.
    """
    scans, targets = load_scans()
    in_val = choose_val(targets, settings.val_fraction, settings.seed)
    with new_tree(root, "digits", settings) as tree:
        for split in ("train", "val"):
            for digit in range(10):
                (tree / split / f"digit_{digit}").mkdir(parents=True)
        for number, (scan, digit) in enumerate(zip(scans, targets)):
            large = Image.fromarray(scan).resize((settings.image_size, settings.image_size), Image.Resampling.BICUBIC)
            split = "val" if in_val[number] else "train"
            # stored, not deflated: file sizes stand in the manifest and must not depend on a zlib's taste; it also decodes faster
            large.save(tree / split / f"digit_{digit}" / f"scan_{number:04d}.png", compress_level=0)


def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """(1797, 8, 8) uint8 scans, ink bright, and (1797,) the digits that they show."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    return np.rint(scans.images * (255 / 16)).astype(np.uint8), scans.target


def choose_val(targets: np.ndarray, val_fraction: float, seed: int) -> np.ndarray:
    """(N,) bool: which scans go to val, `val_fraction` of each class."""
    chosen = np.zeros(len(targets), dtype=bool)
    rng = np.random.Generator(np.random.PCG64(seed))
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(targets == digit))
        chosen[members[: round(len(members) * val_fraction)]] = True
    return chosen
