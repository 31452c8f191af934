"""CIFAR-100 (Krizhevsky 2009) as a folder tree of PNGs, from the files that torchvision downloads."""

from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR100

from ...core.errors import UserError
from ...core.ui import track
from ..settings import TuneSplitSettings
from . import choose_tune, new_tree


def write_cifar100(root: Path, settings: TuneSplitSettings, source: Path) -> None:
    """Write `root/{train,tune,test}/<class>/<number>.png` from `source/cifar-100-python/{train,test,meta}`, replacing an
    earlier tree of this function.

    The number is the image's place in its file. torchvision compares the MD5 sum of each file before it unpickles it.

    Raises:
        UserError: a file is missing or is not the published one; otherwise as `new_tree` and `choose_tune`.
    """
    folder = source / CIFAR100.base_folder
    try:
        train, test = CIFAR100(source, train=True), CIFAR100(source, train=False)
    except (RuntimeError, OSError):
        state = "is not the published CIFAR-100 (MD5)" if folder.is_dir() else "no such folder"
        raise UserError(
            f"{folder}: {state}; run `repro prepare-data --cell cifar100 --download`, or unpack {CIFAR100.filename} in {source}"
        ) from None
    in_tune = choose_tune(np.array(train.targets), settings, folder)
    classes = [f"{split}/{name}" for split in ("train", "tune", "test") for name in train.classes]
    with new_tree(root, "cifar100", settings, classes) as tree:
        for split, images in (("train", train), ("test", test)):
            pairs = zip(images.data, images.targets)
            for number, (pixels, target) in enumerate(track(list(pairs), f"writing {split}", unit="images")):
                place = "tune" if split == "train" and in_tune[number] else split
                # stored uncompressed, as the digits are: the size of a file does not depend on the zlib version
                file = tree / place / train.classes[target] / f"{number:05d}.png"
                Image.fromarray(pixels).save(file, compress_level=0)


def download_cifar100(source: Path) -> None:
    """Fetch and unpack the archive into `source`, its MD5 sum compared; nothing where its files are there.

    Raises:
        UserError: it cannot be fetched, or is another.
    """
    try:
        source.mkdir(parents=True, exist_ok=True)
        CIFAR100(source, download=True)
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{CIFAR100.url}: could not be downloaded ({reason}); get it elsewhere, and unpack it in {source}"
        ) from None
