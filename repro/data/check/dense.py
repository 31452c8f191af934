"""Checks of COCO 2017 (detection), ADE20K's 150 classes (segmentation), and the embedded scenes in both formats."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..ade20k import CLASSES_FILE, FOLDERS, RELEASE, AdePairs, find_base, read_pair
from ..coco import Instances, compare_categories, read_image, read_instances
from ..findings import BadData, Finding, Reporter, compare_counts
from ..kinds import KINDS
from ..pixels import read_labels
from ..settings import ExpectedCounts
from .run import Depth, describe_extent, draw_sample, run_parallel

_OWN = "its classes are not those of {}: judged as a set of your own, with its own counts"
_SHIFTED = "labels were already shifted down by one, with 255 for void: add 1 to each label, and make 255 0"
_TWO_VALUES = "a mask in black and white: write the numbers of the classes, 1 and 2"
_VOID = 0.1  # share of unlabelled pixels above which 0 may be a class, counted from 0 by mistake


@dataclasses.dataclass(frozen=True, kw_only=True)
class CocoCounts:
    """Counts of a complete COCO release by split, and its category ids, which have gaps."""

    images: Mapping[str, int]
    instances: Mapping[str, int]
    category_ids: frozenset[int]


COCO_2017 = CocoCounts(
    images={split: getattr(KINDS["coco"].official[1], split) for split in KINDS["coco"].splits},
    instances={"train": 860_001, "val": 36_781},
    category_ids=frozenset(range(1, 91)) - {12, 26, 29, 30, 45, 66, 68, 69, 71, 83},
)
ADE20K = KINDS["ade20k"].official[1]


def check_coco(
    root: Path,
    report: Reporter,
    depth: Depth,
    *,
    splits: Sequence[str] = KINDS["coco"].splits,
    expected: CocoCounts | None = COCO_2017,
    boxes_as_masks: bool = False,
) -> None:
    """Check images and annotations, whether they match, and the category and box of every annotation.

    Arguments and errors are those of `folders.check_imagenet`. `expected` is None where the counts are a setting; it is
    also ignored for a set whose categories are not COCO's.
    """
    read = {split: read_instances(root, split, report, boxes_as_masks=boxes_as_masks) for split in splits}
    found = {split: instances for split, instances in read.items() if instances is not None}
    if found and expected and all(_is_own(instances.classes, expected) for instances in found.values()):
        expected = None
        report.ok(root, _OWN.format("COCO 2017"))
    if expected is None:
        compare_categories([*found.values()], report)
    for split, instances in found.items():
        _compare_with_release(instances, split, report, expected)
    picked = draw_sample({split: len(instances.names) for split, instances in found.items()}, depth)
    chosen = [(found[split], place) for split, places in picked.items() for place in places]
    items = [(one.path(place), tuple(one.sizes[place].tolist()), one.file, depth.max_pixels) for one, place in chosen]
    faults = [fault for fault in run_parallel(_judge_image, items, depth.workers, "decoding") if fault is not None]
    report.add_mixed(faults)
    if chosen and not faults:
        total = sum(len(instances.names) for instances in found.values())
        report.ok(root, f"images decode and have the annotations' sizes, {describe_extent(len(chosen), total, depth)}")


def check_boxes(root: Path, report: Reporter, depth: Depth) -> None:
    """Check a user's own set in COCO's layout that uses boxes as masks; errors as `check_coco`."""
    kind = KINDS["boxes"]
    check_coco(root, report, depth, splits=kind.splits, expected=None, boxes_as_masks=kind.boxes_as_masks)


def check_ade20k(
    root: Path,
    report: Reporter,
    depth: Depth,
    *,
    splits: Sequence[str] = KINDS["ade20k"].splits,
    expected: ExpectedCounts | None = ADE20K,
) -> None:
    """Check the pairs of image and label map, and the values in the label maps.

    Arguments and errors are those of `check_coco`; `root` is ADEChallengeData2016 or the folder that holds it.
    `expected` is ignored for a set with another number of classes.
    """
    base = find_base(root)
    pairs = {split: AdePairs(base, split, report) for split in splits}
    if (named := len(pairs["train"].classes)) and expected and named != expected.classes:
        expected = None
        report.ok(base, _OWN.format("ADE20K"))
    if named:
        compare_counts(report, base, "classes", named, expected and expected.classes, RELEASE)
    num_classes = named or ADE20K.classes
    for split, of_split in pairs.items():
        if len(of_split):
            folder, wanted = base / "images" / FOLDERS[split], expected and getattr(expected, split)
            compare_counts(report, folder, "images with a label map", len(of_split), wanted, RELEASE)
    picked = draw_sample({split: len(of_split) for split, of_split in pairs.items()}, depth)
    chosen = [pairs[split].paths(place) for split, places in picked.items() for place in places]
    items = [(*paths, num_classes, depth.max_pixels) for paths in chosen]
    judged = list(run_parallel(_judge_pair, items, depth.workers, "decoding"))
    pixels = sum((counts for _, counts in judged), np.zeros(256, dtype=np.int64))  # (256,) pixels of each label value
    values = np.flatnonzero(pixels).tolist()
    strange = f"labels are of another release; {RELEASE}"
    if not {*values} & {*range(num_classes, 255)}:
        strange = _SHIFTED if {*values} - {0, 255} else _TWO_VALUES
    found = [(fault, max(np.flatnonzero(counts), default=0)) for fault, counts in judged if fault is not None]
    faults = [dataclasses.replace(fault, advice=strange) if top > num_classes else fault for fault, top in found]
    report.add_mixed(faults)
    if items and not faults:
        total = sum(map(len, pairs.values()))
        held = f"values in {min(values)}..{max(values)} (0: unlabelled)"
        report.ok(base, f"label maps have 8 bits, {held}, sizes of their images")
        report.ok(base, f"images and label maps decode, {describe_extent(len(items), total, depth)}")
        names = pairs["train"].classes
        shares = pixels / pixels.sum()
        report.ok(base, f"pixels: {_list_shares(['0 (unlabelled)', *names], shares)}")
        # only for users' own sets: the labels of a release and of drawn scenes are known to be right
        of_class = shares[1 : len(names) + 1]
        if (
            names
            and (base / CLASSES_FILE).is_file()
            and shares[0] > min(_VOID, np.median(of_class)) * (of_class[-1] > 0)
        ):
            problem = f"0, of which nothing is learned, has {shares[0]:.1%} of the pixels, as much as a class"
            if not of_class[-1]:
                problem = f"no pixel has {len(names)}, the last class {names[-1]}, and {shares[0]:.1%} have 0"
            report.warning(base, problem, f"if 0 is {names[0]}, add 1 to every label, and make void 0")


def check_scenes(root: Path, report: Reporter, depth: Depth) -> None:
    """Check both parts of the embedded scenes; errors as `check_coco`. Their counts are settings."""
    splits = KINDS["scenes"].splits
    check_coco(root / "coco", report, depth, splits=splits, expected=None)
    check_ade20k(root / "ade20k", report, depth, splits=splits, expected=None)


def _list_shares(names: Sequence[str], shares: np.ndarray) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in zip(names, shares[: len(names)].tolist(), strict=True))


def _is_own(classes: Sequence[str], expected: CocoCounts) -> bool:
    """Return whether fewer than half of the categories, here or in the release, bear names of COCO's categories."""
    from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

    shared = set(classes) & set(MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"])
    return 2 * len(shared) < max(len(classes), len(expected.category_ids))


def _compare_with_release(instances: Instances, split: str, report: Reporter, expected: CocoCounts | None) -> None:
    """Compare the counts of one annotation file with the release, and report the objects per category."""
    file, advice = instances.file, "take the instances_ file of COCO 2017 as it is"
    found = frozenset(instances.category_ids)
    report.ok(file, f"{len(found)} categories with ids of {min(found, default=0)}..{max(found, default=0)}")
    if expected and (odd := sorted(found ^ expected.category_ids)):
        problem = f"{'unknown' if odd[0] in found else 'no'} id {odd[0]} among {len(found)} categories"
        report.error(file, f"{problem}, {len(expected.category_ids)} expected", advice)
    compare_counts(report, file, "images", len(instances.names), expected and expected.images[split], advice)
    compare_counts(report, file, "instances", instances.num_annotations, expected and expected.instances[split], advice)
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
    """Return a pair's fault or None, and the pixels of each label value (256,) int64.

    The reader has reported empty files.
    """
    image, label, _, max_pixels = item
    none, fault = np.zeros(256, dtype=np.int64), None
    if not (image.stat().st_size and label.stat().st_size):
        return None, none
    try:
        read_pair(*item)
    except BadData as error:
        fault = error.finding
    try:
        return fault, np.bincount(read_labels(label, max_pixels).ravel(), minlength=256)
    except BadData:
        return fault, none
