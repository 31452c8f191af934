"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) as folder trees of PNGs, from the files that torchvision downloads."""

from functools import partial
from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR10, CIFAR100

from ...core.errors import UserError
from ...core.hashing import require_hash
from ...core.ui import track
from ..pixels import explain_error
from ..settings import TuneSplitSettings
from . import choose_tune, list_class_folders, new_tree, save_png

_READERS = {"cifar10": CIFAR10, "cifar100": CIFAR100}
# hashes of the published archives from Keras' data set loaders; torchvision has only their MD5 sums and those of the
# files in them
_SHA256 = {
    "cifar10": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    "cifar100": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
}


def _write(kind: str, root: Path, settings: TuneSplitSettings, source: Path) -> None:
    """Write `root/{train,tune,test}/<class>/<number>.png` from the files of a CIFAR in `source`.

    An earlier tree of this function is replaced. The number is the image's index in the files. torchvision compares the
    MD5 sum of each file before it unpickles it.

    Raises:
        UserError: a file is missing or is not the published one; otherwise as `new_tree` and `choose_tune`.
    """
    reader = _READERS[kind]
    folder = source / reader.base_folder
    try:
        train, test = reader(source, train=True), reader(source, train=False)
    except (RuntimeError, OSError):
        state = f"is not the published {reader.__name__} (MD5)" if folder.is_dir() else "no such folder"
        raise UserError(
            f"{folder}: {state}; run `repro prepare-data --cell {kind} --download`, or unpack {reader.filename} in {source}"
        ) from None
    in_tune = choose_tune(np.array(train.targets), settings, folder, train.classes)
    with new_tree(root, kind, settings, list_class_folders(kind, train.classes)) as tree:
        for split, images in (("train", train), ("test", test)):
            pairs = zip(images.data, images.targets)
            for number, (pixels, target) in enumerate(track(list(pairs), f"writing {split}", unit="images")):
                place = "tune" if split == "train" and in_tune[number] else split
                save_png(pixels, tree / place / train.classes[target] / f"{number:05d}.png")


def _download(kind: str, source: Path) -> None:
    """Download and unpack the archive into `source`, and verify its hashes; does nothing if its files are there.

    Raises:
        UserError: the download failed, or the archive is not the published one.
    """
    reader = _READERS[kind]
    try:
        source.mkdir(parents=True, exist_ok=True)
        reader(source, download=True)
    except (RuntimeError, OSError) as error:
        problem = f"could not be downloaded ({explain_error(error)})"
        raise UserError(f"{reader.url}: {problem}; get it elsewhere, and unpack it in {source}") from None
    if (archive := source / reader.filename).is_file():
        require_hash(archive, _SHA256[kind])


# the names that rows of `KINDS` have as `writer` and `download`
write_cifar10, write_cifar100 = (partial(_write, kind) for kind in ("cifar10", "cifar100"))
download_cifar10, download_cifar100 = (partial(_download, kind) for kind in ("cifar10", "cifar100"))
