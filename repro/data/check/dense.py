"""Checks of COCO 2017 (detection), ADE20K's 150 classes (segmentation), and the embedded scenes in both formats."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..ade20k import CLASSES_FILE, FOLDERS, RELEASE, AdePairs, find_base, judge_labels
from ..coco import Instances, compare_categories, read_image, read_instances
from ..findings import BadData, Finding, Reporter, compare_counts
from ..kinds import KINDS, Kind, Release
from ..pixels import read_labelled
from .run import Depth, describe_extent, draw_sample, run_parallel

# what is said of a set that is compared with no release, and advice for two common mistakes in label maps
_OWN = "its classes are not those of {}: judged as a set of your own, with its own counts"
_SHIFTED = "labels were already shifted down by one, with 255 for void: add 1 to each label, and make 255 0"
_TWO_VALUES = "a mask in black and white: write the numbers of the classes, 1 and 2"
_VOID = 0.1  # share of unlabelled pixels above which 0 may be a class, counted from 0 by mistake


def check_coco(root: Path, row: Kind, report: Reporter, depth: Depth) -> None:
    """Check images and annotations, whether they match, and the category and box of every annotation.

    Errors are those of `folders.check_tree`. A set whose categories are not COCO's is not compared with the release.
    """
    read = {split: read_instances(root, split, report, boxes_as_masks=row.boxes_as_masks) for split in row.splits}
    found = {split: instances for split, instances in read.items() if instances is not None}
    release = row.official
    if found and release and all(_is_own(instances.classes, release) for instances in found.values()):
        report.ok(root, _OWN.format(release.name))
        release = None
    if release is None:
        compare_categories([*found.values()], report)
    for split, instances in found.items():
        _compare_with_release(instances, split, report, release)
    picked = draw_sample({split: len(instances.names) for split, instances in found.items()}, depth)
    chosen = [(found[split], place) for split, places in picked.items() for place in places]
    items = [(one.path(place), tuple(one.sizes[place].tolist()), one.file, depth.max_pixels) for one, place in chosen]
    faults = [fault for fault in run_parallel(_judge_image, items, depth.workers) if fault is not None]
    report.add_mixed(faults)
    if chosen and not faults:
        total = sum(len(instances.names) for instances in found.values())
        report.ok(root, f"images decode and have the annotations' sizes, {describe_extent(len(chosen), total, depth)}")


def check_ade20k(root: Path, row: Kind, report: Reporter, depth: Depth) -> None:
    """Check the pairs of image and label map, and the values in the label maps.

    Errors are those of `folders.check_tree`; `root` is ADEChallengeData2016 or the folder that holds it. A set with
    another number of classes is not compared with the release.
    """
    base, expected = find_base(root), row.official and row.official.counts
    pairs = {split: AdePairs(base, split, report) for split in row.splits}
    if (named := len(pairs["train"].classes)) and expected and named != expected.classes:
        expected = None
        report.ok(base, _OWN.format(row.official.name))
    if named:
        compare_counts(report, base, "classes", named, expected and expected.classes, RELEASE)
    num_classes = named or KINDS["ade20k"].official.counts.classes  # a missing list of classes is reported above
    for split, of_split in pairs.items():
        if len(of_split):
            folder, wanted = base / "images" / FOLDERS[split], expected and getattr(expected, split)
            compare_counts(report, folder, "images with a label map", len(of_split), wanted, RELEASE)
    picked = draw_sample({split: len(of_split) for split, of_split in pairs.items()}, depth)
    chosen = [pairs[split].paths(place) for split, places in picked.items() for place in places]
    items = [(*paths, num_classes, depth.max_pixels) for paths in chosen]
    judged = list(run_parallel(_judge_pair, items, depth.workers))
    pixels = sum((counts for _, counts in judged), np.zeros(256, dtype=np.int64))  # (256,) pixels of each label value
    values = np.flatnonzero(pixels).tolist()
    strange = f"labels are of another release; {RELEASE}"
    # labels 0..K-1 and 255 alone: they begin at 0, or are the two colours of a mask
    if not {*values} & {*range(num_classes, 255)}:
        strange = _SHIFTED if {*values} - {0, 255} else _TWO_VALUES
    found = [(fault, counts.any()) for fault, counts in judged if fault is not None]
    faults = [dataclasses.replace(fault, advice=strange) if is_read else fault for fault, is_read in found]
    report.add_mixed(faults)
    if items and not faults:
        total = sum(map(len, pairs.values()))
        held = f"values in {min(values)}..{max(values)} (0: unlabelled)"
        report.ok(base, f"label maps have 8 bits, {held}, sizes of their images")
        report.ok(base, f"images and label maps decode, {describe_extent(len(items), total, depth)}")
        _report_pixels(base, pairs["train"].classes, pixels / pixels.sum(), report)


def _report_pixels(base: Path, names: Sequence[str], shares: np.ndarray, report: Reporter) -> None:
    """Report the share of each label among the pixels, and warn where 0 may be a class, counted from 0 by mistake.

    Args:
        base: the folder ADEChallengeData2016.
        names: the classes 1, 2, 3, ...; empty after an error in their list.
        shares: (256,), by label value.
    """
    report.ok(base, f"pixels: {_list_shares(['0 (unlabelled)', *names], shares)}")
    # only for users' own sets: the labels of a release and of drawn scenes are known to be right
    if not names or not (base / CLASSES_FILE).is_file():
        return
    unlabelled, of_class = shares[0], shares[1 : len(names) + 1]
    if not of_class[-1] and unlabelled:
        problem = f"no pixel has {len(names)}, the last class {names[-1]}, and {unlabelled:.1%} have 0"
    elif unlabelled > min(_VOID, np.median(of_class)):
        problem = f"0, of which nothing is learned, has {unlabelled:.1%} of the pixels, as much as a class"
    else:
        return
    report.warning(base, problem, f"if 0 is {names[0]}, add 1 to every label, and make void 0")


def _list_shares(names: Sequence[str], shares: np.ndarray) -> str:
    """Format the first shares as percentages by name; `shares` may have more entries, as those of label values."""
    return ", ".join(f"{name} {share:.1%}" for name, share in zip(names, shares[: len(names)].tolist(), strict=True))


def _is_own(classes: Sequence[str], release: Release) -> bool:
    """Return whether fewer than half of the categories, here or in the release, bear names of COCO's categories."""
    from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

    shared = set(classes) & set(MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"])
    return 2 * len(shared) < max(len(classes), len(release.category_ids))


def _compare_with_release(instances: Instances, split: str, report: Reporter, release: Release | None) -> None:
    """Compare the counts of one annotation file with the release, if given, and report the objects per category."""
    file, advice = instances.file, "take the instances_ file of COCO 2017 as it is"
    found = frozenset(instances.category_ids)
    report.ok(file, f"{len(found)} categories with ids of {min(found, default=0)}..{max(found, default=0)}")
    if release and (odd := sorted(found ^ release.category_ids)):
        problem = f"{'unknown' if odd[0] in found else 'no'} id {odd[0]} among {len(found)} categories"
        report.error(file, f"{problem}, {len(release.category_ids)} expected", advice)
    images, annotations = (getattr(release.counts, split), release.instances[split]) if release else (None, None)
    compare_counts(report, file, "images", len(instances.names), images, advice)
    compare_counts(report, file, "instances", instances.num_annotations, annotations, advice)
    report.ok(file, instances.describe_targets())
    report.ok(file, f"{np.count_nonzero(np.diff(instances.starts)):,} of {len(instances.names):,} images have targets")
    objects = np.bincount(instances.labels, minlength=len(instances.classes) + 1)[1:]
    report.ok(file, f"objects: {_list_shares(instances.classes, objects / max(1, objects.sum()))}")


def _judge_image(item: tuple[Path, tuple[int, int], Path, int]) -> Finding | None:
    """Return the fault of a COCO image, or None; the reader has already reported missing and empty ones."""
    if not item[0].is_file() or not item[0].stat().st_size:
        return None
    try:
        read_image(*item)
    except BadData as error:
        return error.finding
    return None


def _judge_pair(item: tuple[Path, Path, int, int]) -> tuple[Finding | None, np.ndarray]:
    """Return a pair's fault or None, and the pixels of each label value (256,) int64; zeros if it cannot be read.

    The reader has reported empty files. An item is image, label map, number of classes, and limit of pixels. A pair with
    a fault is counted, too: `check_ade20k` chooses its advice by the counts, and takes all zeros for an unread pair.
    """
    image, label, num_classes, max_pixels = item
    unknown = np.zeros(256, dtype=np.int64)
    if not (image.stat().st_size and label.stat().st_size):
        return None, unknown
    try:
        _, labels = read_labelled(image, label, max_pixels)
    except BadData as error:
        return error.finding, unknown
    return judge_labels(label, labels, num_classes), np.bincount(labels.ravel(), minlength=256)
