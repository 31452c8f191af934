"""Preparation of a data set: write an embedded one, read and check any, and record its contents in a manifest."""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from ..core.errors import UserError
from ..core.hashing import short_hash
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime
from . import ade20k, coco
from .cells import find_data_root, find_source, manifest_path, write_embedded
from .findings import RAISE_FIRST, BadData, RaiseFirst, Reporter
from .kinds import KINDS, Kind, PrepareData, load_function
from .manifest import Folder, Manifest, SplitRecord, read_manifest, write_manifest
from .own import claim_name, locate_own, parse_own, split_own
from .pictures import describe_splits
from .pixels import UNREADABLE, decode_rgb, judge_error, spread_places
from .settings import ExpectedCounts
from .tree import scan_tree

_IMBALANCE = 10  # ratio of the largest class to the smallest from which a warning is printed


def prepare(params: PrepareData, paths: Paths, runtime: Runtime, cell: str) -> None:
    """Write `manifest.json`, `metrics.json` and `run.json` into `results/prepare_data/<cell>`.

    For a set `KIND:PATH` the folder is another, see `manifest_path`. An embedded data set is first written anew.

    Raises:
        UserError: the data set is missing, badly laid out or differs from `expected`.
    """
    started = time.monotonic()
    kind, root = KINDS[params.kind], find_data_root(paths, runtime, cell, params.kind)
    if kind.embedded:
        write_embedded(kind, root, params.settings, find_source(paths, runtime, kind))
    manifest = scan_manifest(root, params.kind, params.settings, RaiseFirst(progress=True))
    if kind.other_splits:
        if len(manifest.classes) < 2:
            raise UserError(f"{root}: holds the class {min(manifest.classes)!r} alone; a classifier needs two or more")
        print(f"{root}: {describe_splits(root, list(manifest.splits))}", flush=True)
    if params.expected is not None:
        for name, found, wanted in _find_differences(len(manifest.classes), manifest.splits, params.expected):
            problem = f"{wanted:,} expected, {root} holds {found:,}; complete the data or change this"
            raise UserError(f"prepare_data.{cell}.expected.{name}: {problem}")
    path = manifest_path(paths, cell)
    write_manifest(path, manifest)
    metrics = {
        "classes": len(manifest.classes),
        **{f"{split}_images": record.images for split, record in manifest.splits.items()},
        "images_mib": round(sum(split.bytes for split in manifest.splits.values()) / 2**20, 1),
        "departures": len(manifest.departures),
    }
    identity = make_identity(paths.root, params, data_manifest=path, device="cpu", dtype="uint8", backend="none")
    write_record(path.with_name("metrics.json"), metrics, identity, time.monotonic() - started)
    counted = ", ".join(f"{record.images:,} {split}" for split, record in manifest.splits.items())
    print(f"{cell}: {metrics['classes']} classes; images: {counted}", flush=True)


def download(params: PrepareData, paths: Paths, runtime: Runtime, cell: str) -> None:
    """Download the published files of a cell; do nothing if they are there.

    Raises:
        UserError: files of this kind cannot be downloaded, or the download failed.
    """
    kind = KINDS[params.kind]
    if kind.download is None:
        names = ", ".join(kind.name for kind in KINDS.values() if kind.download)
        raise UserError(
            f"--download: prepare_data.{cell} is of kind {kind.name}, and serves {names} alone; docs/data.md says how to get it"
        )
    load_function(kind.download)(find_source(paths, runtime, kind))


def prepare_own(data: str, paths: Paths, runtime: Runtime) -> None:
    """Split and prepare a set `KIND:PATH`, and print a warning where its classes are unbalanced.

    Raises as `prepare` and `split_own`, and UserError where dense labels teach nothing, or a sampled picture that no
    training replaces is unreadable.
    """
    own = parse_own(data)
    split_own(paths, own)
    if "coco" in KINDS[own.kind].parts:
        counts, unit = _count_objects(own.path, KINDS[own.kind], runtime.max_pixels), "training objects"
    elif own.kind == "ade20k":
        counts, unit = _count_pixels(own.path, runtime.max_pixels), "pixels of training pictures"
    else:
        _read_held_out(locate_own(paths, own), runtime.max_pixels)
    prepare(PrepareData(kind=own.kind), paths, runtime, data)
    claim_name(paths, own)
    if own.kind == "folder":
        folders = read_manifest(manifest_path(paths, data)).splits["train"].folders
        counts, unit = {name: record.images for name, record in folders.items()}, "training pictures"
    few, many = min(counts, key=counts.get), max(counts, key=counts.get)
    if counts[many] >= _IMBALANCE * counts[few]:
        print(f"{few}: {counts[few]:,} {unit}, {many}: {counts[many]:,}; training will favour {many}", flush=True)


def _count_objects(root: Path, kind: Kind, max_pixels: int) -> dict[str, int]:
    """Count the targets of each category in `train`; print how many boxes are clipped, and how many are left out.

    Raises:
        UserError: no category, a split without targets, or a sampled picture that cannot be read.
    """
    counts = {}
    for split in kind.splits:
        instances = coco.read_instances(root, split, max_pixels=max_pixels, boxes_as_masks=kind.boxes_as_masks)
        if not len(instances.labels):
            raise UserError(f"{instances.file}: has no object of a category; a detector needs some in each split")
        for place in spread_places(len(instances.names)):
            coco.read_image(instances.path(place), tuple(instances.sizes[place].tolist()), instances.file, max_pixels)
        if instances.num_spoiled:
            print(
                f"{instances.file}: boxes outside of the picture or without area: {instances.num_spoiled:,}; training "
                "takes what lies inside (`repro data check coco` names them)",
                flush=True,
            )
        if instances.left_out:
            print(f"{instances.file}: {instances.describe_targets()}", flush=True)
        counts[split] = np.bincount(instances.labels, minlength=len(instances.classes) + 1)[1:]
    return dict(zip(instances.classes, counts["train"].tolist()))  # all splits have the same classes


def _count_pixels(root: Path, max_pixels: int) -> dict[str, int]:
    """Count the pixels of each class in a sample of `train`; raises UserError where no segmenter could learn."""
    counts = {}
    for split in KINDS["ade20k"].splits:
        pairs = ade20k.AdePairs(root, split, max_pixels=max_pixels)
        if split == "train" and len(pairs) < 2:
            raise UserError(f"{root}: has one training picture; a segmenter's batch norm needs two or more")
        if len(pairs.classes) < 2:
            raise UserError(
                f"{root}: has one class; name another, for what surrounds it (0 is where nothing is labelled)"
            )
        _, counts[split] = ade20k.survey(pairs)
        if not counts[split].any():
            raise UserError(
                f"{root}: every label map of {ade20k.FOLDERS[split]} is 0, which says nothing; label classes"
            )
    return dict(zip(pairs.classes, counts["train"].tolist()))  # all splits have the same classes


def _read_held_out(root: Path, max_pixels: int) -> None:
    """Decode a sample of the held-out pictures; raises UserError at the first unreadable one, as an evaluation would."""
    tree = scan_tree(root, "folder")
    for split in tree.kind.held_out:
        for place in spread_places(len(tree.splits[split].names)):
            path = tree.path(split, place)
            try:
                decode_rgb(tree.source(split, place).read(), path, max_pixels)
            except UNREADABLE as error:
                raise BadData(judge_error(path, error, "get it again, or remove it")) from None


def scan_manifest(root: Path, kind: str, generated: object = None, report: Reporter = RAISE_FIRST) -> Manifest:
    """Make the manifest of the data set at `root`; annotations and pairs are checked as for training.

    `generated` are the settings that wrote an embedded data set, or cut `tune` off another. `report` must raise errors:
    the readers of a report that continues leave out what they cannot read.

    Raises:
        UserError: a class whose name is not UTF-8; see also `scan_tree`, `coco.read_classes` and `ade20k.read_classes`.
    """
    row, classes = KINDS[kind].at(root), ()
    folders: dict[str, list[Folder]] = {}
    for part, prefix in row.parts.items():
        if part == "folders":
            tree = scan_tree(root, row, report, tune=None if row.embedded else generated)
            row, classes, list_folders = tree.kind, tree.classes, tree.list_folders
            if odd := [name for name in classes if name != name.encode(errors="ignore").decode()]:
                raise UserError(f"{root}: the name of the class folder {odd[0]} is not UTF-8; rename it")
        else:
            reader = {"coco": coco, "ade20k": ade20k}[part]
            classes = reader.read_classes(root / prefix, row, report)
            list_folders = partial(reader.list_folders, root / prefix, row=row)
        for split in row.splits:
            folders.setdefault(split, []).extend(list_folders(split))
    splits = {}
    for split, listed in folders.items():
        # count each image once: in dense formats the first folder has all images, and later ones the label maps or
        # annotations
        counted = listed if "folders" in row.parts else listed[:1]
        splits[split] = SplitRecord(
            images=sum(folder.record.images for folder in counted),
            bytes=sum(folder.record.bytes for folder in listed),
            folders={folder.name: folder.record for folder in listed},
        )
    hashes = [f"{split}/{name} {record.hash}" for split in row.splits for name, record in splits[split].folders.items()]
    departures = []
    if row.official is not None:
        for count, found, wanted in _find_differences(len(classes), splits, row.official.counts):
            departures.append(f"{count}: {found:,}, {row.official.name} has {wanted:,}")
    return Manifest(
        kind=kind,
        classes={name: index for index, name in enumerate(classes)},
        splits=splits,
        departures=tuple(departures),
        generated=generated,
        hash=short_hash("\n".join(hashes)),
    )


def _find_differences(
    num_classes: int, splits: Mapping[str, SplitRecord], expected: ExpectedCounts
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, found, expected) of each count that differs; 0 for a split that is missing or not expected."""
    counts = {"classes": num_classes} | {split: record.images for split, record in splits.items()}
    for name in {**counts, **dict.fromkeys(sorted(expected.splits))}:
        if (found := counts.get(name, 0)) != (wanted := getattr(expected, name) or 0):
            yield name, found, wanted
