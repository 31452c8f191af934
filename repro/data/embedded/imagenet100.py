"""ImageNet-100: a hundred classes of ImageNet-1K, as links to its images."""

import os
from pathlib import Path

import numpy as np

from ...core.errors import UserError
from ...core.ui import track
from ..imagenet100 import WNIDS
from ..settings import TuneSplitSettings
from ..tree import scan_tree
from . import choose_tune, list_class_folders, new_tree


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
    places = np.flatnonzero(np.isin(whole.classes, WNIDS))  # indices of the hundred classes among the thousand
    with new_tree(root, "imagenet100", settings, list_class_folders("imagenet100", WNIDS)) as tree:
        for split in ("train", "val"):
            files = whole.splits[split]
            chosen = np.flatnonzero(np.isin(files.targets, places))
            goes_to = np.full(len(chosen), "test", dtype=object)
            if split == "train":
                in_tune = choose_tune(files.targets[chosen], settings, source / split, whole.classes)
                goes_to = np.where(in_tune, "tune", "train")
            for index, goal in zip(track(chosen.tolist(), f"linking {split}", unit="images"), goes_to.tolist()):
                file = tree / goal / whole.classes[files.targets[index]] / os.fsdecode(files.names[index])
                if files.archives is None:
                    file.symlink_to(whole.path(split, index))
                else:
                    file.write_bytes(whole.source(split, index).read())
