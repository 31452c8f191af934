"""The checks of COCO 2017 (detection) and of ADE20K's 150 classes (segmentation)."""

import dataclasses
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from . import dense
from .ade20k import FOLDERS
from .check import Depth, Report, choose, inspect, list_folder, of_all
from .check_tree import image_size
from .tree import EXTENSIONS, SPLITS, Source, reason

_RENEW_COCO = "unpack annotations_trainval2017.zip again"
_ADE_RELEASE = (
    "get ADEChallengeData2016.zip of the MIT Scene Parsing Benchmark (sceneparsing.csail.mit.edu): 150 classes, 20,210 + 2,000 images"
)
_SHIFTED = "labels were already shifted down by one (0 to 255), which training does by itself"
_BOX_SLACK_PX = 1.0  # coordinates are rounded
_LARGE_BYTES = 50_000_000  # takes seconds to read


@dataclasses.dataclass(frozen=True, kw_only=True)
class CocoCounts:
    """What a complete COCO holds; keys of the mappings are the splits, which are folder names.

    Args:
        images, instances: number of them.
        empty_boxes: boxes of zero width or height that the original is known to have.
        category_ids: all of them; not contiguous.
    """

    images: Mapping[str, int]
    instances: Mapping[str, int]
    empty_boxes: Mapping[str, int]
    category_ids: frozenset[int]


COCO_2017 = CocoCounts(
    images={f"{split}2017": getattr(dense.COCO_2017, split) for split in SPLITS},
    instances={"train2017": 860_001, "val2017": 36_781},
    empty_boxes={"train2017": 2, "val2017": 0},
    category_ids=frozenset(range(1, 91)) - {12, 26, 29, 30, 45, 66, 68, 69, 71, 83},
)
ADE20K = {FOLDERS[split]: getattr(dense.ADE20K, split) for split in SPLITS}


def check_coco(root: Path, report: Report, depth: Depth, *, expected: CocoCounts = COCO_2017) -> None:
    """Check images, annotations, and that they belong together; categories and boxes of every annotation.

    Args:
        expected: the counts of a complete set.

    Raises:
        UserError: a folder that cannot be listed. RunError: a decoding process died.
    """
    sized = {split: _check_coco_split(root, split, report, expected) for split in expected.images}
    picked = choose({split: len(images) for split, images in sized.items()}, depth)
    chosen = [(f"{split}/{sized[split][i][0]}", sized[split][i][1]) for split in picked for i in picked[split]]
    results = inspect(image_size, [Source(str(root / place)) for place, _ in chosen], depth.workers, "decoding")
    bad, other = [], []
    for (place, size), result in zip(chosen, results, strict=True):
        if isinstance(result, str):
            bad.append((place, result))
        elif result != size:
            turned = " (turned: is it another copy of the images?)" if result == size[::-1] else ""
            other.append((place, f"is {_by(result)}, the annotations say {_by(size)}{turned}"))
    report.error_each(bad, "get it again: unpack its archive anew")
    report.error_each(other, "boxes and masks would not fit; take images and annotations of one release")
    if chosen and not bad and not other:
        total = sum(map(len, sized.values()))
        report.ok(f"images decode and have the annotations' sizes, {of_all(len(chosen), total, depth)}")


def _check_coco_split(root: Path, split: str, report: Report, expected: CocoCounts) -> list[tuple[str, tuple[int, int]]]:
    """Check one split without decoding; returns (file name, (width, height)) of the images that can be decoded."""
    files: dict[str, int] = {}
    if (root / split).is_dir():
        listed, below = list_folder(root / split)
        files = {name: size for name, size in listed.items() if name.lower().endswith(EXTENSIONS)}
        deeper = f"holds no image but the folder {below[0]}/" if below and not files else ""
        if deeper:
            report.error(f"{split}/", deeper, f"move the images up, directly into {split}/")
        else:
            report.counts(f"{split}/", len(files), expected.images[split], "images", f"unpack {split}.zip again")
        report.error_each([(f"{split}/{name}", "is empty") for name, size in files.items() if not size], "get it again")
    else:
        inside = (root / "images" / split).is_dir()
        advice = f"move images/{split} here" if inside else f"unpack {split}.zip in {root}"
        report.error(root / split, "no such folder", advice)
    name = f"annotations/instances_{split}.json"
    content = _read_json(root / name, name, report)
    if content is None:
        return []
    _check_categories(content["categories"], name, report, expected.category_ids)
    images = _images_by_id(content["images"], name, report)
    _check_annotations(content["annotations"], images, name, split, report, expected)
    named = {file: (width, height) for file, width, height in images.values()}
    if (root / split).is_dir():
        missing = [(f"{split}/{file}", f"is not there, {name} has it") for file in sorted(set(named) - set(files))]
        report.error_each(missing, f"unpack {split}.zip again")
        if extra := sorted(set(files) - set(named)):
            what = f"{len(extra):,} images that {name} does not have ({extra[0]}, ...)"
            report.warning(f"{split}/", what, "nothing reads them")
    return sorted((file, size) for file, size in named.items() if files.get(file))


def _read_json(path: Path, name: str, report: Report) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > _LARGE_BYTES:
            print(f"reading {name}", file=sys.stderr, flush=True)
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = reason(error) if isinstance(error, OSError) else f"is no valid JSON: {reason(error)[:120]}"
        report.error(name, what, _RENEW_COCO)
        return None
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            report.error(name, f"has no list {key!r}", _RENEW_COCO)
            return None
    return content


def _check_categories(categories: list, name: str, report: Report, known: frozenset[int]) -> None:
    rows = [category if isinstance(category, dict) else {} for category in categories]
    ids = {row["id"] if isinstance(row.get("id"), int) else None for row in rows}
    if ids == known and len(categories) == len(known):
        report.ok(f"{name}: {len(ids)} categories, ids of {min(known)}..{max(known)}")
        return
    unknown, missing = (sorted(map(str, some)) for some in (ids - known, known - ids))
    details = [f"unknown id {one}" for one in unknown[:1]] + [f"no id {one}" for one in missing[:1]]
    what = f"{len(categories)} categories ({', '.join(details) or 'an id twice'}), {len(known)} expected with ids of 1..90"
    report.error(name, what, "take the instances_ file of COCO 2017, its ids as they are")


def _images_by_id(images: list, name: str, report: Report) -> dict[int, tuple[str, int, int]]:
    """Image id -> (file name, width, height)."""
    found: dict[int, tuple[str, int, int]] = {}
    bad = []
    for place, image in enumerate(images):
        try:
            entry = str(image["file_name"]), int(image["width"]), int(image["height"])
            if image["id"] in found:
                bad.append((f"{name}: images[{place}]", f"id {image['id']} a second time"))
            found[image["id"]] = entry
        except (KeyError, TypeError, ValueError) as error:
            bad.append((f"{name}: images[{place}]", f"is malformed ({type(error).__name__}: {error})"))
    report.error_each(bad, _RENEW_COCO)
    return found


def _check_annotations(
    annotations: list, images: dict[int, tuple[str, int, int]], name: str, split: str, report: Report, expected: CocoCounts
) -> None:
    before = report.errors
    malformed, lost, categories, empty, outside, maskless = [], [], [], [], [], []
    seen: set[int] = set()
    annotated: set[int] = set()
    for place, annotation in enumerate(annotations):
        try:
            where = f"{name}: annotation {annotation['id']}"
            x, y, width, height = box = [float(number) for number in annotation["bbox"]]
            image_id, category = annotation["image_id"], annotation["category_id"]
            twice, no_category = annotation["id"] in seen, category not in expected.category_ids
            seen.add(annotation["id"])
            annotated.add(image_id)
            entry = images.get(image_id)
        except (KeyError, TypeError, ValueError) as error:
            malformed.append((f"{name}: annotations[{place}]", f"is malformed ({type(error).__name__}: {error})"))
            continue
        if twice:
            malformed.append((where, "has an id that another one has"))
        if no_category:
            categories.append((where, f"category_id {category} is none of the {len(expected.category_ids)}"))
        if not annotation.get("segmentation"):
            maskless.append((where, "has no segmentation"))
        if entry is None:
            lost.append((where, f"image_id {image_id} is none of the images"))
        if not (width > 0 and height > 0):  # asked in this way NaN fails, too
            empty.append((where, f"box {box} has no area"))
        elif entry is not None:
            inside = x >= -_BOX_SLACK_PX and y >= -_BOX_SLACK_PX
            if not (inside and x + width <= entry[1] + _BOX_SLACK_PX and y + height <= entry[2] + _BOX_SLACK_PX):
                outside.append((where, f"box {box} leaves its image of {_by(entry[1:])}"))
    for found in (malformed, lost, categories, outside, maskless):
        report.error_each(found, _RENEW_COCO)
    if 0 < len(empty) <= expected.empty_boxes[split]:
        example = empty[0][0].split(": ")[1]
        report.warning(name, f"{len(empty)} boxes without area ({example}, ...), as in the original", "leave them out of training")
    else:
        report.error_each(empty, _RENEW_COCO)
    report.counts(name, len(annotations), expected.instances[split], "instances", _RENEW_COCO)
    if report.errors == before:
        report.ok(f"{name}: boxes lie in their images, {len(annotated & set(images)):,} of {len(images):,} images have instances")


def check_ade20k(root: Path, report: Report, depth: Depth, *, expected: Mapping[str, int] = ADE20K) -> None:
    """Check the release, the pairs of image and label map, and the label maps themselves.

    Args:
        root: ADEChallengeData2016, or the folder that holds it.
        expected: number of pairs in `training` and `validation`.

    Raises:
        UserError: a folder that cannot be listed. RunError: a decoding process died.
    """
    base = root / "ADEChallengeData2016" if (root / "ADEChallengeData2016").is_dir() else root
    if evidence := _other_release(base):
        report.error(base, f"is the full ADE20K ({evidence}), with thousands of classes in other files", _ADE_RELEASE)
        return
    pairs = {split: _ade_pairs(base, split, report, expected[split]) for split in expected}
    picked = choose({split: len(of_split) for split, of_split in pairs.items()}, depth)
    chosen = [pairs[split][i] for split in picked for i in picked[split]]
    files = [(str(base / image), str(base / label)) for image, label in chosen]
    results = inspect(_inspect_pair, files, depth.workers, "decoding")
    bad, strange, values = [], [], set()
    for places, (which, what, labels) in zip(chosen, results, strict=True):
        values |= labels
        if what:
            (strange if labels and max(labels) > 150 else bad).append((places[which], what))
    report.error_each(bad, "get it again from ADEChallengeData2016.zip")
    if strange:
        shifted = not values & {*range(150, 255)}
        report.error_each(strange, f"{_SHIFTED if shifted else 'labels are of another release'}: {_ADE_RELEASE}")
    total = sum(map(len, pairs.values()))
    if chosen and not bad and not strange:
        report.ok(f"label maps have 8 bits, values in {min(values)}..{max(values)} (0: unlabelled), sizes of their images")
        report.ok(f"images and label maps decode, {of_all(len(chosen), total, depth)}")


def _other_release(root: Path) -> str | None:
    """What gives away the full ADE20K of 2016 or 2021, None where nothing does."""
    files, folders = list_folder(root)
    for name in [*files, *folders]:
        if name.startswith(("index_ade20k", "ADE20K_20")):
            return name
    for folder in (root / "images", root / "images" / "training", root / "annotations" / "training"):
        files, folders = list_folder(folder) if folder.is_dir() else ({}, [])
        if folder.name == "images" and "ADE" in folders:
            return "images/ADE/"
        if scene := next((name for name in files if name.endswith(("_seg.png", "_atr.txt"))), None):
            return scene
        if folder.parent.name == "images" and folders and not files:
            return f"folders by scene: images/training/{folders[0]}/"
    return None


def _ade_pairs(base: Path, split: str, report: Report, expected: int) -> list[tuple[str, str]]:
    """The pairs of a split that can be decoded, as paths of image and label map."""
    stems: dict[str, dict[str, str]] = {}
    empty = set()
    for part, extension in (("images", (".jpg", ".png")), ("annotations", ".png")):  # images of `scenes` are PNGs
        where = f"{part}/{split}/"
        if not (base / part / split).is_dir():
            advice = "unpack ADEChallengeData2016.zip, and give the folder that comes out as ROOT"
            report.error(base / part / split, "no such folder", advice)
            continue
        files, _ = list_folder(base / part / split)
        if other := [name for name in files if not name.endswith(extension)]:
            what = extension if part == "annotations" else extension[0]
            report.warning(where, f"{len(other):,} files that are no {what} ({other[0]}, ...)", "nothing reads them")
        stems[part] = {Path(name).stem: f"{where}{name}" for name in files if name.endswith(extension)}
        advice = "unpack ADEChallengeData2016.zip again"
        report.counts(where, len(stems[part]), expected, "images" if part == "images" else "label maps", advice)
        empty |= {place for place in stems[part].values() if not files[Path(place).name]}
        report.error_each([(place, "is empty") for place in stems[part].values() if place in empty], advice)
    if len(stems) < 2:
        return []
    images, labels = stems["images"], stems["annotations"]
    single = [(images[stem], "has no label map") for stem in sorted(set(images) - set(labels))]
    single += [(labels[stem], "has no image") for stem in sorted(set(labels) - set(images))]
    report.error_each(single, "get the other one again from ADEChallengeData2016.zip")
    pairs = [(image, labels[stem]) for stem, image in images.items() if stem in labels]
    return [pair for pair in pairs if empty.isdisjoint(pair)]


def _inspect_pair(paths: tuple[str, str]) -> tuple[int, str, frozenset[int]]:
    """(which of the two is bad, what is wrong with it or an empty string, the label values)."""
    size = image_size(Source(paths[0]))
    if isinstance(size, str):
        return 0, size, frozenset()
    try:
        with warnings.catch_warnings(), Image.open(paths[1]) as label:
            warnings.simplefilter("ignore")
            values, mode = np.asarray(label), label.mode
    except Exception as error:  # as for images
        return 1, f"cannot be decoded: {reason(error)}", frozenset()
    if mode != "L":
        return 1, f"has mode {mode}, one channel of 8 bits expected", frozenset()
    found = frozenset(np.flatnonzero(np.bincount(values.ravel(), minlength=256)).tolist())
    if max(found) > 150:
        return 1, f"holds label {max(found)}, at most 150 expected", found
    if label.size != size:
        return 1, f"is {_by(label.size)}, its image {_by(size)}", found
    return 0, "", found


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
