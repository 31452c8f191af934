"""The checks of class folders and archives: ImageNet-1K, embedded digits and connect, a folder of your own."""

import json
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..classification import read_rgb
from ..findings import Finding, Report, compare_counts, count
from ..kinds import GROUND_TRUTH, IMAGENET_1K, KINDS, list_wnids
from ..latents import read_latents
from ..pictures import describe_splits
from ..pixels import UNREADABLE, judge_error
from ..settings import ExpectedCounts
from ..tree import Source, Tree, scan_tree, show_few
from .run import Depth, describe_extent, draw_sample, run_parallel

CIFAR_IMAGES = 60_000
DIGITS_IMAGES = 1797  # the scans of scikit-learn's load_digits
_TRAIN_NAME = re.compile(r"(n\d{8})_")
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.")
_WRITE_AGAIN = "remove the folder and run `repro prepare-data` to write it again"
# Beyer et al. 2020 relabelled the validation images; about nine tenths of the original labels are among the new ones.
# Folders that were filled by a wrong map agree in about one image of a thousand.
_AGREEMENT = 0.75


def check_imagenet(root: Path, report: Report, depth: Depth, *, expected: ExpectedCounts = IMAGENET_1K) -> None:
    """Check layout, class folders, class mapping, counts and files of ImageNet-1K.

    `report` takes the findings, `depth` says how many images are decoded, `expected` has a complete set's counts.

    Raises:
        UserError: a folder that cannot be listed. RunError: a decoding process died.
    """
    tree = scan_tree(root, "imagenet", report)
    for split, files in tree.splits.items():
        present = [tree.classes[target] for target in np.unique(files.targets)]
        missing = sorted(set(list_wnids()) - set(present)) if expected.classes == len(list_wnids()) else []
        unit = "classes" + (f" (missing: {show_few(missing)})" if missing else "")
        compare_counts(report, tree.folder(split), unit, len(present), expected.classes, "unpack the missing classes")
        advice = _advise_count(tree, split, expected)
        compare_counts(report, tree.folder(split), "images", len(files.names), getattr(expected, split), advice)
    if "train" in tree.splits:
        _check_train_names(tree, report)
    if "val" in tree.splits:
        _check_val_mapping(tree, report)
    _check_files(tree, report, depth, "get it again: unpack its archive again")


def _check_classes(root: Path, kind: str, report: Report) -> Tree:
    tree, class_names = scan_tree(root, kind, report), KINDS[kind].class_names
    expected = len(class_names()) if class_names else None
    for split, files in tree.splits.items():
        compare_counts(report, tree.folder(split), "classes", len(np.unique(files.targets)), expected, _WRITE_AGAIN)
        report.ok(tree.folder(split), count(len(files.names), "image"))
    if tree.kind.other_splits and tree.splits:
        report.ok(root, describe_splits(root, tree.kind.splits))
    return tree


def _check_tree(
    root: Path, report: Report, depth: Depth, *, kind: str, images: int | None = None, advice: str = _WRITE_AGAIN
) -> None:
    """Check classes and files, that pairs are whole, and that all splits have `images` together, if it is known."""
    tree = _check_classes(root, kind, report)
    if tree.kind.paired:
        for split, files in tree.splits.items():
            names, counts = np.unique(files.names, return_counts=True)
            report.ok(tree.folder(split), count(int((counts == 2).sum()), "pair"))
            single = [f"{os.fsdecode(name)} is in one class alone" for name in names[counts == 1].tolist()]
            report.errors([(tree.folder(split), problem) for problem in single], advice)
    if images is not None and len(tree.splits) == len(tree.kind.splits):
        found = sum(len(files.names) for files in tree.splits.values())
        compare_counts(report, root, "images in all splits together", found, images, advice)
    _check_files(tree, report, depth, advice)


# with the arguments and errors of `check_imagenet`; splits are settings, the number of all images is not
check_digits = partial(_check_tree, kind="digits", images=DIGITS_IMAGES)
check_digits_wild = partial(_check_tree, kind="digits_wild")  # a setting says how often each scan is drawn
check_cifar10, check_cifar100 = (
    partial(_check_tree, kind=kind, images=CIFAR_IMAGES) for kind in ("cifar10", "cifar100")
)
check_connect = partial(_check_tree, kind="connect")
check_imagenet100 = partial(_check_tree, kind="imagenet100")
check_folder = partial(_check_tree, kind="folder", advice="replace the file or remove it")


def check_latents(root: Path, report: Report, depth: Depth) -> None:
    """Check latents of a VAE as `check_imagenet`; nothing is known about their counts, and all have one shape."""
    tree = _check_classes(root, "latents", report)
    first = next(((split, 0) for split, files in tree.splits.items() if len(files.names)), None)
    if first is not None:
        try:
            shape = read_latents(tree.source(*first)).shape[1:]
        except UNREADABLE as error:
            report.add([judge_error(tree.path(*first), error, "compute it again", "latents")])
        else:
            _check_files(tree, report, depth, "compute it again", partial(read_latents, shape=shape))


def _advise_count(tree: Tree, split: str, expected: ExpectedCounts) -> str:
    """What to do about missing images; each class of ImageNet's val has equally many, so that the gap has a name."""
    advice = "complete the data; for a subset, change prepare_data.<cell>.expected"
    each, rest = divmod(getattr(expected, split), expected.classes)
    if split == "train" or rest:
        return advice
    counts = np.bincount(tree.splits[split].targets, minlength=len(tree.classes)).tolist()
    odd = [f"{name} {count}" for name, count in zip(tree.classes, counts) if count != each]
    return f"{each} in each class, but {show_few(odd)}; {advice}" if odd else advice


def _check_train_names(tree: Tree, report: Report) -> None:
    """A training image's name begins with its wnid."""
    strangers, known = [], set(list_wnids())
    for index, (name, wnid) in enumerate(_list_names(tree, "train")):
        if (match := _TRAIN_NAME.match(name)) and match[1] != wnid and wnid in known:
            strangers.append((tree.path("train", index), f"is named as an image of {match[1]}"))
    report.errors(strangers, "move it into the folder of its class")


def _check_val_mapping(tree: Tree, report: Report) -> None:
    """Compare the folders of the validation images with the ReaL labels, which timm carries."""
    place = tree.root / "val"
    # class indices of the validation images, by number
    real: list[list[int]] = json.loads(pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json"))
    index = {wnid: number for number, wnid in enumerate(list_wnids())}
    agree = judged = 0
    for name, wnid in _list_names(tree, "val"):
        match = _VAL_NAME.match(name)
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


def _list_names(tree: Tree, split: str) -> Iterator[tuple[str, str]]:
    """(file name, class folder) of each image of a split."""
    files = tree.splits[split]
    for name, target in zip(files.names.tolist(), files.targets.tolist()):
        yield os.fsdecode(name), tree.classes[target]


def _check_files(
    tree: Tree, report: Report, depth: Depth, advice: str, read: Callable[[Source], Any] | None = None
) -> None:
    """Report empty files, and those of the sample that `read`, by default what the loaders do, cannot read."""
    read = read or partial(read_rgb, upright=tree.kind.upright, max_pixels=depth.max_pixels)
    judge = partial(_judge_file, read=read, advice=advice, what="latents" if tree.kind.suffixes else "image")
    full = {split: np.flatnonzero(files.sizes) for split, files in tree.splits.items()}
    for split, files in tree.splits.items():
        empty = np.flatnonzero(files.sizes == 0).tolist()
        report.errors([(tree.path(split, index), "is empty") for index in empty], advice)
    picked = draw_sample({split: len(indices) for split, indices in full.items()}, depth)
    chosen = [(split, int(full[split][place])) for split, places in picked.items() for place in places]
    files = [(tree.path(*one), tree.source(*one)) for one in chosen]
    results = list(run_parallel(judge, files, depth.workers, "decoding"))
    report.add_mixed([finding for finding in results if finding])
    for split, places in picked.items():
        damaged = sum(of == split and finding is not None for (of, _), finding in zip(chosen, results, strict=True))
        decoded = describe_extent(len(places), len(full[split]), depth)
        if places and not damaged:
            report.ok(tree.folder(split), f"images decode, {decoded}")
        elif damaged and len(places) < len(full[split]):
            problem = f"{count(damaged, 'bad image')} among {decoded}"
            report.warning(tree.folder(split), problem, "expect more; --full finds them all")


def _judge_file(item: tuple[Path, Source], read: Callable[[Source], Any], advice: str, what: str) -> Finding | None:
    """What is wrong with a file; None where it can be read."""
    path, source = item
    try:
        read(source)
    except UNREADABLE as error:
        return judge_error(path, error, advice, what)
    return None
