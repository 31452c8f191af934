"""Data sets that the project writes, some of them from published files. A writer leaves a complete tree or nothing.

The committed manifests compare contents. A further random draw in a writer, or another order of draws, changes the
files of all its images, and every result on them is then out of date. The stage prepare_data depends on this folder
alone (dvc.yaml): code that determines the files must not move out of it.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...core.errors import UserError
from ...core.record import write_json
from ..kinds import KINDS
from ..settings import TuneSplitSettings

_MARKER = "generated.json"  # only a tree that has it may be replaced


@contextlib.contextmanager
def new_tree(root: Path, kind: str, settings: Any, folders: Iterable[str]) -> Iterator[Path]:
    """Yield a new tree of empty `folders`, which replaces `root` on success.

    The tree is written next to `root` and renamed at the end, so that an interrupted call leaves no half-written tree.
    The kind and the settings, a dataclass, go into its `generated.json`.

    Raises:
        UserError: `root` holds files that this function did not write.
    """
    if root.exists() and any(root.iterdir()) and not (root / _MARKER).is_file():
        raise UserError(
            f"{root}: holds files that `repro prepare-data` did not write; remove them or set runtime.data_roots.{kind} to another folder"
        )
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.", suffix=".tmp") as temporary:
        tree = Path(temporary) / "new"
        for folder in folders:
            (tree / folder).mkdir(parents=True)
        yield tree
        write_json(tree / _MARKER, {"kind": kind, **dataclasses.asdict(settings)})
        if root.exists():
            os.rename(root, Path(temporary) / "old")
        try:
            os.rename(tree, root)
        except OSError:
            # another process was faster; the comparison with the manifest will check its tree
            if not (root / _MARKER).is_file():
                raise


def list_class_folders(kind: str, classes: Iterable[str]) -> list[str]:
    """Return the folders of a new tree by class: `<split>/<class>` for every split of the kind."""
    return [f"{split}/{name}" for split in KINDS[kind].splits for name in classes]


def save_png(pixels: np.ndarray, file: Path) -> None:
    """Save pixels (H, W) or (H, W, 3) uint8 as an uncompressed PNG.

    Manifests hold the sizes of files, which must not depend on the version of zlib. Such files also decode faster.
    """
    Image.fromarray(pixels).save(file, compress_level=0)


def choose_tune(targets: np.ndarray, settings: TuneSplitSettings, where: Path, classes: Sequence[str]) -> np.ndarray:
    """Choose the training images that go to `tune`, the same number of each class.

    Args:
        targets: (N,) class indices.
        where, classes: the folder and the names of the classes, for messages.

    Returns:
        (N,) bool.

    Raises:
        UserError: a class would keep no image for training.
    """
    chosen = np.zeros(len(targets), dtype=bool)
    rng = np.random.Generator(np.random.PCG64(settings.seed))
    for target in np.unique(targets):
        members = rng.permutation(np.flatnonzero(targets == target))
        if len(members) <= settings.images_per_class:
            raise UserError(
                f"{where}: class {classes[target]!r} has {len(members)} training images, and tune_split.images_per_class is "
                f"{settings.images_per_class}; make it smaller"
            )
        chosen[members[: settings.images_per_class]] = True
    return chosen
