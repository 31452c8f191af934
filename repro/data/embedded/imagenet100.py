"""ImageNet-100: a hundred classes of ImageNet-1K, as links to its images."""

import os
from pathlib import Path

import numpy as np

from ...core.errors import UserError
from ...core.ui import track
from ..imagenet100 import WNIDS
from ..settings import TuneSplitSettings
from ..tree import scan_tree
from . import choose_tune, new_tree


def write_imagenet100(root: Path, settings: TuneSplitSettings, source: Path) -> None:
    """Link the images of the hundred classes in `source` as `root/{train,tune,test}/<wnid>/<image>`.

    An earlier tree of this function is replaced. `source` holds ImageNet-1K as {train,val}/<wnid>/. `test` is its
    `val`, and `tune` is taken from its `train`. Images in archives are copied.

    Raises:
        UserError: a class is missing; otherwise as `scan_tree`, `new_tree` and `choose_tune`.
    """
    whole = scan_tree(source, "imagenet")
    if missing := sorted(set(WNIDS) - set(whole.classes)):
        raise UserError(
            f"{source}: lacks {len(missing)} of the classes of ImageNet-100, the first of them {missing[0]}; unpack them there"
        )
    places = np.flatnonzero(np.isin(whole.classes, WNIDS))
    classes = [f"{split}/{name}" for split in ("train", "tune", "test") for name in sorted(WNIDS)]
    with new_tree(root, "imagenet100", settings, classes) as tree:
        for split, place in (("train", "train"), ("val", "test")):
            files = whole.splits[split]
            chosen = np.flatnonzero(np.isin(files.targets, places))
            in_tune = None
            if split == "train":
                in_tune = choose_tune(files.targets[chosen], settings, source / split, whole.classes)
            for number, index in enumerate(track(chosen.tolist(), f"linking {split}", unit="images")):
                folder = tree / ("tune" if in_tune is not None and in_tune[number] else place)
                file = folder / whole.classes[files.targets[index]] / os.fsdecode(files.names[index])
                if files.archives is None:
                    file.symlink_to(whole.path(split, index))
                else:
                    file.write_bytes(whole.source(split, index).read())
