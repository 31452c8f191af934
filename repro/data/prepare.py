"""Preparing a data set: an embedded one is written, any is read and judged, and a manifest records what it holds."""

import time
from collections.abc import Sequence
from pathlib import Path

from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime
from . import ade20k, coco
from .cells import find_root, manifest_path
from .findings import RAISE_FIRST, RaiseFirst, Report
from .kinds import KINDS, Format, PrepareData
from .manifest import Folder, Manifest, build_manifest, check_expected, write_manifest
from .settings import SPLITS
from .tree import scan_tree


def prepare(params: PrepareData, paths: Paths, runtime: Runtime, cell: str) -> None:
    """Write `manifest.json`, `metrics.json` and `run.json` into `results/prepare_data/<cell>`.

    Raises:
        UserError: the data set is missing, badly laid out or not what `expected` says.
    """
    started = time.monotonic()
    kind, root = KINDS[params.kind], find_root(paths, runtime, cell, params.kind)
    if params.embedded:
        kind.write(root, params.settings)
    manifest = scan_manifest(root, params.kind, params.settings, RaiseFirst(progress=True))
    if params.expected is not None:
        check_expected(manifest, root, params.expected, f"prepare_data.{cell}.expected")
    path = manifest_path(paths, cell)
    write_manifest(path, manifest)
    metrics = {
        "classes": len(manifest.classes),
        "train_images": manifest.splits["train"].images,
        "val_images": manifest.splits["val"].images,
        "images_mib": round(sum(split.bytes for split in manifest.splits.values()) / 2**20, 1),
        "departures": len(manifest.departures),
    }
    code = [__name__, *kind.modules]
    identity = make_identity(paths.root, code, params, data_manifest=path, device="cpu", dtype="uint8", backend="none")
    write_record(path.parent, metrics, identity, time.monotonic() - started)


def scan_manifest(root: Path, kind: str, generated: object = None, report: Report = RAISE_FIRST) -> Manifest:
    """The manifest of the data set at `root`, whose annotations and pairs are judged as in training.

    Args:
        root: the folder that holds it.
        kind: a row of `KINDS`.
        generated: the settings that an embedded data set was written with.
        report: takes what is wrong, and shows progress.

    Raises:
        UserError: see `scan_tree`, `coco.read_classes` and `ade20k.read_classes`.
    """
    row, classes = KINDS[kind], ()
    folders: dict[str, list[Folder]] = {split: [] for split in SPLITS}
    for part, below in row.parts.items():
        classes, listed = _read_part(part, root / below, kind, row.prefix(part), report)
        for split in SPLITS:
            folders[split] += listed[split]
    # class folders hold the images of a split together; elsewhere the first folder holds all of them
    counted = {split: listed if "folders" in row.parts else listed[:1] for split, listed in folders.items()}
    images = {split: sum(folder.record.images for folder in listed) for split, listed in counted.items()}
    return build_manifest(kind, classes, images, folders, generated)


def _read_part(part: Format, base: Path, kind: str, prefix: str, report: Report) -> tuple[Sequence[str], dict[str, list[Folder]]]:
    """The classes of a part, and what each split holds."""
    if part == "folders":
        tree = scan_tree(base, kind, report)
        return tree.classes, {split: tree.list_folders(split) for split in SPLITS}
    reader = {"coco": coco, "ade20k": ade20k}[part]
    return reader.read_classes(base, report), {split: reader.list_folders(base, split, prefix) for split in SPLITS}
