"""The check of ImageNet-1K, in folders or archives, and of the embedded digits and connect: <root>/{train,val}/<class>/<image>."""

import functools
import json
import os
import pkgutil
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import UserError
from .check import Depth, Progress, Report, choose, inspect, list_folder, of_all
from .connect import CLASSES
from .imagenet import read_rgb
from .manifest import IMAGENET_1K
from .settings import ExpectedCounts
from .shards import is_sharded
from .tree import EXTENSIONS, SPLITS, Source, Tree, read_archives, reason

# of the default settings; the split is a setting, so their sum is what is compared
DIGITS = ExpectedCounts(classes=10, train=1438, val=359)
_ARCHIVES = (".tar", ".gz", ".zip", ".tgz")
# where the archive of Kaggle and the usual scripts put train/ and val/
_INSIDE = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "imagenet", "ILSVRC2012", "ImageNet", "data")
_WNID = re.compile(r"(n\d{8})_")
_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt counts classes by the ILSVRC2012_ID of meta.mat, not by sorted wnid (docs/data.md)"
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.")
_NOT_READ = "nothing reads them; remove them"
_AGAIN = "get it again: unpack its archive anew"
# Beyer et al. 2020 relabelled the validation images; about nine tenths of the original labels are among the new ones.
# Folders filled by a wrong map agree in about one image of a thousand.
_AGREEMENT = 0.75

Folders = dict[str, dict[str, int]]  # class -> image name -> bytes


def check_imagenet(root: Path, report: Report, depth: Depth, *, expected: ExpectedCounts = IMAGENET_1K) -> None:
    """Check layout, class folders, class mapping, counts and files of ImageNet-1K.

    Args:
        expected: the counts of a complete set.

    Raises:
        UserError: a folder that cannot be listed. RunError: a decoding process died.
    """
    wnids = _wnids()
    splits, archived = _read_splits(root, report, "imagenet")
    if not splits:
        return
    for split, folders in splits.items():
        if _check_classes(root / split, folders, wnids, expected.classes, report):
            report.ok(f"{split}/: {len(folders):,} class folders; sorted wnids, so class indices are those of timm's ImageNetInfo")
        _check_count(split, folders, expected, report)
    _check_same_classes(root, splits, report)
    # folders of unknown names were reported; their files have no right place
    known = {split: {name: files for name, files in folders.items() if name in wnids} for split, folders in splits.items()}
    if "train" in splits:
        _check_train_names(known["train"], report)
    if "val" in splits:
        _check_val_mapping(known["val"], wnids, report)
    _check_files(root, splits, archived, report, depth, _AGAIN)


def check_digits(root: Path, report: Report, depth: Depth, *, expected: ExpectedCounts = DIGITS) -> None:
    """Check the embedded data set; arguments and errors as `check_imagenet`. How it is split is a setting, the sum is not."""
    advice = "remove the folder and run `repro prepare-data`, which writes it anew"
    splits, archived = _read_splits(root, report, "digits")
    for split, folders in splits.items():
        names = [f"digit_{digit}" for digit in range(10)]
        if _check_classes(root / split, folders, names, expected.classes, report):
            report.ok(f"{split}/: {len(folders)} class folders, {sum(map(len, folders.values())):,} images")
    if len(splits) == 2:
        found = sum(len(files) for folders in splits.values() for files in folders.values())
        report.counts("train/ and val/", found, expected.train + expected.val, "images together", advice)
    _check_same_classes(root, splits, report)
    _check_files(root, splits, archived, report, depth, advice)


def check_connect(root: Path, report: Report, depth: Depth) -> None:
    """Check the embedded connectivity task; arguments and errors as `check_imagenet`. Its counts are settings, its pairs are whole."""
    advice = "remove the folder and run `repro prepare-data`, which writes it anew"
    splits, archived = _read_splits(root, report, "connect")
    for split, folders in splits.items():
        if _check_classes(root / split, folders, CLASSES, len(CLASSES), report):
            apart, joined = (set(folders[name]) for name in CLASSES)
            report.ok(f"{split}/: {len(apart & joined):,} pairs")
            report.error_each([(f"{split}/", f"{name} is in one class alone") for name in sorted(apart ^ joined)], advice)
    _check_files(root, splits, archived, report, depth, advice)


def image_size(source: Source) -> tuple[int, int] | str:
    """(width, height) in pixels of an image that decodes as the loaders decode it, or what is wrong with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, on EXIF data that nobody reads here
        try:
            return read_rgb(source).size
        except Exception as error:  # whatever a damaged file makes Pillow raise is the finding
            return f"cannot be decoded: {reason(error)}"


@functools.cache
def _wnids() -> tuple[str, ...]:
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


@functools.cache
def _real_labels() -> list[list[int]]:
    """ReaL class indices of the validation images, by number."""
    return json.loads(pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json"))


def _read_splits(root: Path, report: Report, kind: str) -> tuple[dict[str, Folders], dict[str, Tree]]:
    """The splits that hold class folders or archives, and those that hold archives; what is wrong with the layout is reported."""
    splits: dict[str, Folders] = {}
    archived: dict[str, Tree] = {}
    for split in SPLITS:
        if not (root / split).is_dir():
            inside = next((place for place in _INSIDE if all((root / place / name).is_dir() for name in SPLITS)), None)
            advice = f"give {root / inside} as ROOT" if inside else "lay it out as docs/data.md says"
            report.error(root / split, "no such folder", advice)
            continue
        if is_sharded(root / split):
            tree = _read_archived(root, split, report)
            if tree is not None:
                archived[split], splits[split] = tree, _folders(tree, split)
            continue
        files, names = list_folder(root / split)
        _check_loose(split, files, names, report, kind)
        if not names:
            if not files:
                report.error(f"{split}/", "is empty", "lay it out as docs/data.md says")
            continue
        splits[split] = {}
        deeper, empty, other = [], [], []
        with Progress(f"listing {split}/", len(names)) as progress:
            for name in names:
                found, below = list_folder(root / split / name)
                images = {file: size for file, size in found.items() if file.lower().endswith(EXTENSIONS)}
                splits[split][name] = images
                other += [f"{split}/{name}/{file}" for file in found if file not in images]
                if not images and below:
                    deeper.append((f"{split}/{name}/", f"holds no image but the folder {below[0]}/"))
                elif not images:
                    empty.append((f"{split}/{name}/", f"holds no image ({', '.join(EXTENSIONS)})"))
                progress.advance()
        report.error_each(deeper, "move the images up, directly into the class folder")
        report.error_each(empty, "fill the class folder, or remove it from train and val")
        if other:
            shown = ", ".join(other[:3]) + (", ..." if len(other) > 3 else "")
            report.warning(f"{split}/", f"{len(other):,} files that are not images ({shown})", _NOT_READ)
    return splits, archived


def _read_archived(root: Path, split: str, report: Report) -> Tree | None:
    try:
        classes, files = read_archives(root / split)
    except UserError as error:
        what, _, advice = str(error).rpartition("; ")
        report.error(f"{split}/", what or advice, advice if what else "see docs/data.md")
        return None
    report.ok(f"{split}/: {len(files.archives.files):,} archives")
    return Tree(root, classes, {split: files})


def _folders(tree: Tree, split: str) -> Folders:
    files = tree.splits[split]
    folders: Folders = {name: {} for name in tree.classes}
    for name, size, target in zip(files.names.tolist(), files.sizes.tolist(), files.targets.tolist()):
        folders[tree.classes[target]][os.fsdecode(name)] = size
    return folders


def _check_loose(split: str, files: dict[str, int], folders: list[str], report: Report, kind: str) -> None:
    images = [file for file in files if file.lower().endswith(EXTENSIONS)]
    archives = [file for file in files if file.lower().endswith(_ARCHIVES)]
    if images and kind == "imagenet" and split == "val" and not folders:
        report.error(
            "val/",
            f"is flat: {len(images):,} images lie directly in it, as the archive has them",
            f"move each into the folder of its class (wnid); {_GROUND_TRUTH}",
        )
    elif images:
        what = f"{len(images):,} images lie directly in it ({images[0]}, ...)"
        report.error(f"{split}/", what, "move each into the folder of its class")
    if archives:
        what = f"{len(archives):,} archives are not unpacked ({archives[0]}, ...)"
        report.error(f"{split}/", what, "unpack each into a folder of its own name")
    if other := sorted(set(files) - set(images) - set(archives)):
        report.warning(f"{split}/", f"{len(other):,} files that are not images ({other[0]}, ...)", _NOT_READ)


def _check_classes(folder: Path, found: Folders, known: Sequence[str], number: int, report: Report) -> bool:
    """Whether the class folders have known names, and are as many as expected."""
    before = report.errors
    where = f"{folder.name}/"
    strangers = [(f"{where}{name}/", f"is no class; they are named as {known[0]}") for name in sorted(set(found) - set(known))]
    report.error_each(strangers, "rename or remove it: it would shift the index of every class behind it")
    if len(found) != number:
        missing = sorted(set(known) - set(found)) if number == len(known) else []
        shown = f" (missing: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''})" if missing else ""
        report.error(where, f"{len(found):,} class folders{shown}, {number:,} expected", "unpack the missing classes")
    return report.errors == before


def _check_same_classes(root: Path, splits: dict[str, Folders], report: Report) -> None:
    if len(splits) == 2 and (different := sorted(set(splits["train"]) ^ set(splits["val"]))):
        where = [(f"{name}/", "is in train alone" if name in splits["train"] else "is in val alone") for name in different]
        report.error_each(where, "both splits need the same class folders")


def _check_count(split: str, folders: Folders, expected: ExpectedCounts, report: Report) -> None:
    wanted = getattr(expected, split)
    found = sum(map(len, folders.values()))
    advice = "complete the data; a wanted subset is written into prepare_data.<cell>.expected"
    if split == "val" and wanted % expected.classes == 0:  # each class has equally many there, so the gap has a name
        each = wanted // expected.classes
        if odd := [f"{name} {len(files)}" for name, files in folders.items() if len(files) != each]:
            advice = f"{each} in each class, but {', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''}; {advice}"
    report.counts(f"{split}/", found, wanted, "images", advice)


def _check_train_names(folders: Folders, report: Report) -> None:
    """A training image's name begins with its wnid."""
    strangers = [
        (f"train/{name}/{file}", f"is named as an image of {match[1]}")
        for name, files in folders.items()
        for file in files
        if (match := _WNID.match(file)) and match[1] != name
    ]
    report.error_each(strangers, "move it into the folder of its class")


def _check_val_mapping(folders: Folders, wnids: Sequence[str], report: Report) -> None:
    """Hold the folders of the validation images against the ReaL labels, which timm carries."""
    real = _real_labels()
    index = {wnid: place for place, wnid in enumerate(wnids)}
    agree = judged = 0
    for name, files in folders.items():
        for file in files:
            match = _VAL_NAME.match(file)
            if match and 1 <= int(match[1]) <= len(real) and (labels := real[int(match[1]) - 1]):
                judged += 1
                agree += index[name] in labels
    if not judged:
        report.warning(
            "val/",
            "whether images are in the folders of their classes cannot be seen: files are not named ILSVRC2012_val_<number>",
            "keep the names of the archive",
        )
    elif agree < _AGREEMENT * judged:
        report.error(
            "val/",
            f"images lie in folders of wrong classes: {agree:,} of {judged:,} agree with the ReaL labels, about 9 of 10 should",
            f"sort them again; {_GROUND_TRUTH}",
        )
    else:
        report.ok(f"val/: images lie in the folders of their classes ({agree:,} of {judged:,} agree with the ReaL labels)")


def _source(root: Path, place: str, archived: dict[str, Tree]) -> Source:
    split, name, file = place.split("/", 2)
    if split not in archived:
        return Source(str(root / place))
    tree = archived[split]
    return tree.source(split, tree.splits[split].find(tree.classes.index(name), file))


def _check_files(root: Path, splits: dict[str, Folders], archived: dict[str, Tree], report: Report, depth: Depth, advice: str) -> None:
    """Name the empty files of all, and those of the sample that cannot be decoded."""
    full: dict[str, list[str]] = {split: [] for split in splits}
    empty = []
    for split, folders in splits.items():
        for name, files in folders.items():
            for file, size in files.items():
                (full[split] if size else empty).append(f"{split}/{name}/{file}")
    report.error_each([(place, "is empty") for place in empty], advice)
    picked = choose({split: len(places) for split, places in full.items()}, depth)
    chosen = {split: [full[split][i] for i in picked[split]] for split in splits}
    places = [place for split in chosen for place in chosen[split]]
    results = inspect(image_size, [_source(root, place, archived) for place in places], depth.workers, "decoding")
    bad = [(place, result) for place, result in zip(places, results, strict=True) if isinstance(result, str)]
    report.error_each(bad, advice)
    for split, found in chosen.items():
        if found:
            damaged = sum(place.startswith(f"{split}/") for place, _ in bad)
            decoded = of_all(len(found), len(full[split]), depth)
            if not damaged:
                report.ok(f"{split}/: images decode, {decoded}")
            elif len(found) < len(full[split]):
                report.warning(f"{split}/", f"{damaged:,} bad images among {decoded}", "expect more; --full finds them all")
