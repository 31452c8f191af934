"""Data sets for detection and segmentation, which are manifested by folder: COCO, ADE20K, and `scenes`, which holds one of each."""

from pathlib import Path
from typing import Literal

from ..core.errors import UserError
from .ade20k import FOLDERS, AdePairs, ade_base
from .coco import read_instances
from .manifest import ClassRecord, DenseManifest, Manifest, SplitRecord, compare, departures, hash_splits, record_files, short_hash
from .scenes import write_scenes
from .settings import ExpectedCounts, ScenesSettings
from .tree import SPLITS, list_images

Part = Literal["coco", "ade20k"]
COCO_2017 = ExpectedCounts(classes=80, train=118_287, val=5_000)
ADE20K = ExpectedCounts(classes=150, train=20_210, val=2_000)
_OFFICIAL = {"coco": (COCO_2017, "COCO 2017"), "ade20k": (ADE20K, "ADE20K")}


def build_dense_manifest(root: Path, kind: str, generated: ScenesSettings | None = None) -> DenseManifest:
    """The manifest of a data set of kind `coco`, `ade20k` or `scenes`; its annotations and pairs are judged as in training.

    Raises:
        UserError: see `coco.read_instances` and `ade20k.AdePairs`; categories that differ between train and val.
    """
    found: dict[str, dict[str, ClassRecord]] = {split: {} for split in SPLITS}
    for part, base in _bases(root, kind).items():
        classes = _coco_classes(base) if part == "coco" else _ade_classes(base)
        for split in SPLITS:
            found[split] |= _records(kind, part, base, split)
    splits = {
        split: SplitRecord(images=next(iter(of.values())).images, bytes=sum(record.bytes for record in of.values()), folders=of)
        for split, of in found.items()
    }
    return DenseManifest(
        kind=kind,
        classes={name: place for place, name in enumerate(classes)},
        splits=splits,
        departures=departures(classes, splits, *_OFFICIAL[kind]) if kind in _OFFICIAL else (),
        generated=generated,
        hash=hash_splits(splits),
    )


def open_dense(root: Path, manifest: Manifest, part: Part) -> Path:
    """Where the data set in the layout of COCO or ADE20K begins, found to be the one of the manifest. `scenes` is drawn if missing.

    Args:
        root: see `Runtime.data_root(paths, manifest.kind)`.
        part: the layout that is wanted.

    Raises:
        UserError: a kind without this part, a folder missing, or not what the manifest says.
    """
    bases = _bases(root, manifest.kind)
    if part not in bases:
        raise UserError(f"{root}: {manifest.kind} is not laid out as {part}; choose a prepare_data cell of kind {part} or scenes")
    if manifest.generated is not None and not root.exists():
        write_scenes(root, manifest.generated)
    base = bases[part]
    records = [
        (base / name.removeprefix(f"{part}/"), record, manifest.splits[split].folders[name])
        for split in SPLITS
        for name, record in _records(manifest.kind, part, base, split).items()
    ]
    compare(manifest, root, records)
    return base


def _bases(root: Path, kind: str) -> dict[Part, Path]:
    """Where each part of a kind begins; none of a kind that is no dense one."""
    return {"coco": {"coco": root}, "ade20k": {"ade20k": ade_base(root)}, "scenes": {"coco": root / "coco", "ade20k": root / "ade20k"}}.get(
        kind, {}
    )


def _coco_classes(base: Path) -> tuple[str, ...]:
    train, val = (read_instances(base, split) for split in SPLITS)
    if (train.category_ids, train.classes) != (val.category_ids, val.classes):
        raise UserError(f"{val.file}: has other categories than {train.file.name}; take both files of one release")
    return train.classes


def _ade_classes(base: Path) -> tuple[str, ...]:
    return [AdePairs(base, split) for split in SPLITS][-1].classes


def _records(kind: str, part: Part, base: Path, split: str) -> dict[str, ClassRecord]:
    """The records of a split's folders and of its annotation file, by their path from `base`, or of `scenes` from the root."""
    prefix = f"{part}/" if kind == "scenes" else ""
    if part == "ade20k":
        folders = [f"images/{FOLDERS[split]}", f"annotations/{FOLDERS[split]}"]
        return {f"{prefix}{folder}": record_files(list_images(base / folder)) for folder in folders}
    images, annotations = f"{split}2017", f"annotations/instances_{split}2017.json"
    try:
        content = (base / annotations).read_bytes()
    except OSError as error:
        raise UserError(f"{base / annotations}: {error.strerror}; unpack annotations_trainval2017.zip again") from None
    return {
        f"{prefix}{images}": record_files(list_images(base / images)),
        f"{prefix}{annotations}": ClassRecord(images=0, bytes=len(content), hash=short_hash(content)),
    }
