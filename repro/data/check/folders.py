"""Checks of class folders and archives: ImageNet-1K, data sets that the project writes, and a folder of your own."""

import contextlib
import json
import os
import pkgutil
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..classification import read_rgb
from ..findings import Finding, Reporter, compare_counts, count, show_few
from ..kinds import GROUND_TRUTH, Kind, list_wnids
from ..latents import read_latents
from ..pictures import describe_splits
from ..pixels import UNREADABLE, judge_error
from ..tree import ImageBytes, Tree, scan_tree
from .run import Depth, describe_extent, draw_sample, run_parallel

# name of an image in ILSVRC2012_img_val.tar, with its number from 1
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.")
# Beyer et al. 2020 (ReaL) relabelled the validation images; about nine tenths of the original labels are among the new
# ones. With folders that were filled from a wrong map, about one image in a thousand agrees.
_AGREEMENT = 0.75


def check_tree(root: Path, row: Kind, report: Reporter, depth: Depth) -> None:
    """Check layout, class folders, counts and files of a set of class folders, and that no pair is incomplete.

    Raises:
        UserError: a folder cannot be listed.
        RunError: a decoding process died.
    """
    tree = scan_tree(root, row.at(root), report)
    expected, named = row.official and row.official.counts, row.class_names() if row.class_names else ()
    for split, files in tree.splits.items():
        folder, present = tree.folder(split), np.unique(files.targets)
        wanted = expected.classes if expected else len(named) or None
        missing = sorted(set(named) - {tree.classes[target] for target in present}) if wanted == len(named) else []
        unit = "classes" + (f" (missing: {show_few(missing)})" if missing else "")
        compare_counts(report, folder, unit, len(present), wanted, "complete the classes" if expected else row.renewal)
        subset = "complete the data; for a subset, change prepare_data.<cell>.expected"
        compare_counts(report, folder, "images", len(files.names), expected and getattr(expected, split), subset)
        if row.paired:
            names, counts = np.unique(files.names, return_counts=True)
            report.ok(folder, count(int((counts == 2).sum()), "pair"))
            single = [f"{os.fsdecode(name)} is in one class alone" for name in names[counts == 1].tolist()]
            report.errors([(folder, problem) for problem in single], row.renewal)
    if row.other_splits and tree.splits:
        report.ok(root, describe_splits(root, tree.kind.splits))
    if row.num_images is not None and len(tree.splits) == len(row.splits):
        found = sum(len(files.names) for files in tree.splits.values())
        compare_counts(report, root, "images in all splits together", found, row.num_images, row.renewal)
    if row.name == "imagenet" and "val" in tree.splits:
        _check_val_mapping(tree, report)
    _check_files(tree, report, depth)


def _check_val_mapping(tree: Tree, report: Reporter) -> None:
    """Compare the folders of the validation images with the ReaL labels, which timm ships."""
    place = tree.root / "val"
    # image number - 1 -> class indices
    real: list[list[int]] = json.loads(pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json"))
    index = {wnid: number for number, wnid in enumerate(list_wnids())}
    agree = judged = 0
    files = tree.splits["val"]
    for name, target in zip(files.names.tolist(), files.targets.tolist(), strict=True):
        match, wnid = _VAL_NAME.match(os.fsdecode(name)), tree.classes[target]
        if match and wnid in index and 1 <= int(match[1]) <= len(real) and (labels := real[int(match[1]) - 1]):
            judged += 1
            agree += index[wnid] in labels
    if not judged:
        problem = (
            "files are not named ILSVRC2012_val_<number>, so it cannot be checked whether they are in the right folders"
        )
        report.warning(place, problem, "keep the names of the archive")
    elif agree < _AGREEMENT * judged:
        problem = f"images lie in folders of wrong classes: {agree:,} of {judged:,} agree with the ReaL labels, about 9 of 10 should"
        report.error(place, problem, f"sort them again; {GROUND_TRUTH}")
    else:
        report.ok(
            place, f"images lie in the folders of their classes ({agree:,} of {judged:,} agree with the ReaL labels)"
        )


def _make_reader(tree: Tree, depth: Depth) -> Callable[[ImageBytes], Any]:
    """Return the loaders' function that decodes a file. All latents must have the shape of the first file.

    It is a `partial` of a module's function and no closure, since `run_parallel` sends it to worker processes.
    """
    if tree.kind.name != "latents":
        return partial(read_rgb, upright=tree.kind.upright, max_pixels=depth.max_pixels)
    first = next((tree.source(split, 0) for split, files in tree.splits.items() if len(files.names)), None)
    shape = None
    with contextlib.suppress(*UNREADABLE):  # `_check_files` reports the unreadable file itself
        shape = first and read_latents(first).shape[1:]
    return partial(read_latents, shape=shape)


def _check_files(tree: Tree, report: Reporter, depth: Depth) -> None:
    """Report empty files, and sampled files that the loaders cannot read."""
    advice, what = tree.kind.renewal, "latents" if tree.kind.name == "latents" else "image"
    judge = partial(_judge_file, read=_make_reader(tree, depth), advice=advice, what=what)
    full = {split: np.flatnonzero(files.sizes) for split, files in tree.splits.items()}
    for split, files in tree.splits.items():
        empty = np.flatnonzero(files.sizes == 0).tolist()
        report.errors([(tree.path(split, index), "is empty") for index in empty], advice)
    picked = draw_sample({split: len(indices) for split, indices in full.items()}, depth)
    chosen = [(split, int(full[split][place])) for split, places in picked.items() for place in places]
    files = [(tree.path(*one), tree.source(*one)) for one in chosen]
    results = list(run_parallel(judge, files, depth.workers))
    report.add_mixed([finding for finding in results if finding])
    for split, places in picked.items():
        damaged = sum(of == split and finding is not None for (of, _), finding in zip(chosen, results, strict=True))
        decoded = describe_extent(len(places), len(full[split]), depth)
        if places and not damaged:
            report.ok(tree.folder(split), f"images decode, {decoded}")
        elif damaged and len(places) < len(full[split]):
            problem = f"{count(damaged, 'bad image')} among {decoded}"
            report.warning(tree.folder(split), problem, "expect more; --full finds them all")


def _judge_file(
    item: tuple[Path, ImageBytes], read: Callable[[ImageBytes], Any], advice: str, what: str
) -> Finding | None:
    """Return the fault of a file; None where it can be read."""
    path, source = item
    try:
        read(source)
    except UNREADABLE as error:
        return judge_error(path, error, advice, what)
    return None
