"""The embedded data set: 1,797 real handwritten digits, written as an ImageNet-style folder tree of PNGs."""

import dataclasses
import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from ..core.errors import UserError
from ..core.record import write_json
from .settings import DigitsSettings

_MARKER = "generated.json"


def write_digits(root: Path, settings: DigitsSettings) -> None:
    """Write `root/{train,val}/digit_<0-9>/scan_<number>.png`, replacing an earlier tree of this function.

    The scans are scikit-learn's `load_digits` (8x8 pixels, 17 grey levels), enlarged bicubically; the number in a name is
    the scan's place there. Each class is split on its own. The same settings give the same bytes. The tree is written
    beside `root` and renamed, so that an interrupted call leaves nothing at `root` that is not whole.

    Raises:
        UserError: `root` holds something that this function did not write.
    """
    from sklearn.datasets import load_digits

    if root.exists() and any(root.iterdir()) and not (root / _MARKER).is_file():
        raise UserError(f"{root}: holds files that are not ours; remove them or set runtime.data_roots.digits to another folder")
    scans = load_digits()
    in_val = _choose_val(scans.target, settings)
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.", suffix=".tmp") as temporary:
        tree = Path(temporary) / "new"
        for split in ("train", "val"):
            for digit in range(10):
                (tree / split / f"digit_{digit}").mkdir(parents=True)
        for number, (scan, digit) in enumerate(zip(scans.images, scans.target)):
            grey = Image.fromarray(np.rint(scan * (255 / 16)).astype(np.uint8))
            large = grey.resize((settings.image_size, settings.image_size), Image.Resampling.BICUBIC)
            split = "val" if in_val[number] else "train"
            # stored, not deflated: file sizes stand in the manifest and must not depend on a zlib's taste; it also decodes faster
            large.save(tree / split / f"digit_{digit}" / f"scan_{number:04d}.png", compress_level=0)
        write_json(tree / _MARKER, {"kind": "digits", **dataclasses.asdict(settings)})
        if root.exists():
            os.rename(root, Path(temporary) / "old")
        try:
            os.rename(tree, root)
        except OSError:
            # another process put its own tree there in between; the manifest's check judges it
            if not (root / _MARKER).is_file():
                raise


def _choose_val(targets: np.ndarray, settings: DigitsSettings) -> np.ndarray:
    """(N,) bool: which scans go to val, `val_fraction` of each class."""
    chosen = np.zeros(len(targets), dtype=bool)
    rng = np.random.Generator(np.random.PCG64(settings.seed))
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(targets == digit))
        chosen[members[: round(len(members) * settings.val_fraction)]] = True
    return chosen
