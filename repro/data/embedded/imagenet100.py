"""ImageNet-100: a hundred classes of ImageNet-1K, as links to its images.

The classes are those of imagenet100.txt of CMC (Tian et al. 2020, https://github.com/HobbitLong/CMC), in its order.
"""

import os
from pathlib import Path

import numpy as np

from ...core.errors import UserError
from ...core.ui import track
from ..settings import TuneSplitSettings
from ..tree import scan_tree
from . import choose_tune, new_tree

WNIDS = tuple(
    """
    n02869837 n01749939 n02488291 n02107142 n13037406 n02091831 n04517823 n04589890 n03062245 n01773797
    n01735189 n07831146 n07753275 n03085013 n04485082 n02105505 n01983481 n02788148 n03530642 n04435653
    n02086910 n02859443 n13040303 n03594734 n02085620 n02099849 n01558993 n04493381 n02109047 n04111531
    n02877765 n04429376 n02009229 n01978455 n02106550 n01820546 n01692333 n07714571 n02974003 n02114855
    n03785016 n03764736 n03775546 n02087046 n07836838 n04099969 n04592741 n03891251 n02701002 n03379051
    n02259212 n07715103 n03947888 n04026417 n02326432 n03637318 n01980166 n02113799 n02086240 n03903868
    n02483362 n04127249 n02089973 n03017168 n02093428 n02804414 n02396427 n04418357 n02172182 n01729322
    n02113978 n03787032 n02089867 n02119022 n03777754 n04238763 n02231487 n03032252 n02138441 n02104029
    n03837869 n03494278 n04136333 n03794056 n03492542 n02018207 n04067472 n03930630 n03584829 n02123045
    n04229816 n02100583 n03642806 n04336792 n03259280 n02116738 n02108089 n03424325 n01855672 n02090622
    """.split()
)


def write_imagenet100(root: Path, settings: TuneSplitSettings, source: Path) -> None:
    """Link the images of the hundred classes in `source/{train,val}/<wnid>/` as `root/{train,tune,test}/<wnid>/<image>`,
    replacing an earlier tree of this function.

    `test` is ImageNet's `val`, and `tune` is cut off its `train`. Images in archives are copied.

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
            in_tune = choose_tune(files.targets[chosen], settings, source / split) if split == "train" else None
            for number, index in enumerate(track(chosen.tolist(), f"linking {split}", unit="images")):
                folder = tree / ("tune" if in_tune is not None and in_tune[number] else place)
                file = folder / whole.classes[files.targets[index]] / os.fsdecode(files.names[index])
                if files.archives is None:
                    file.symlink_to(whole.path(split, index))
                else:
                    file.write_bytes(whole.source(split, index).read())
