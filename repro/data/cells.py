"""Prepared data sets: a manifest, the folder that it describes, and the reader of its format."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..core.config import load_profiles, section_keys
from ..core.errors import UserError, did_you_mean
from ..core.paths import Paths
from ..core.runtime import Runtime
from .kinds import KINDS, Format, Kind, load_function
from .manifest import Manifest, advise, read_manifest, verify
from .own import locate_own, own_folder, parse_own
from .settings import SPLITS
from .tree import Tree, scan_tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataCell:
    """A cell of `prepare_data:` whose manifest was written.

    Each `open_*` first compares the data set with the manifest, and writes an embedded data set that is missing.
    Readers of dense formats are loaded by name: a classifier's training then imports none of them.
    """

    name: str
    manifest_path: Path  # every result from this data depends on this file
    manifest: Manifest
    root: Path  # the folder that holds the data set
    max_pixels: int = Runtime.max_pixels  # largest image that is read
    # folder of the published files, needed where the data set is missing and written from them
    source: Path | None = None

    def records(self, paths: Paths, device: str) -> Path:
        """Return the folder for records outside the pipeline by device; no page reports those of a user's own set.

        Args:
            device: a name of `runtime.device_slug`.
        """
        home = self.manifest_path.parents[1]  # results/own/<set>, or results/prepare_data
        return home / device if home.parent == paths.results / "own" else paths.replications(device)

    @property
    def kind(self) -> str:
        """The kind of the data set, e.g. `imagenet`."""
        return self.manifest.kind

    @property
    def row(self) -> Kind:
        """The kind's row in the table, restricted to the splits in the manifest."""
        splits = tuple(split for split in SPLITS if split in self.manifest.splits)
        return dataclasses.replace(KINDS[self.kind], splits=splits)

    def open_tree(self) -> Tree:
        """Open the images by class.

        Raises:
            UserError: the images differ from the manifest, or the kind is not sorted by class.
        """
        row = self.row
        # `generated` has the settings that wrote an embedded set, or else those that cut `tune` off
        tree = scan_tree(self._find_part("folders"), row, tune=None if row.embedded else self.manifest.generated)
        verify(self.manifest, self.root, {split: tree.list_folders(split) for split in row.splits})
        return dataclasses.replace(tree, max_pixels=self.max_pixels)

    def open_instances(self, split: str) -> Any:
        """Open a split's objects in COCO's format; raises UserError where they differ from the manifest."""
        return self._open("coco", "read_instances", split, boxes_as_masks=self.row.boxes_as_masks)

    def open_pairs(self, split: str) -> Any:
        """Open a split's images and label maps in ADE20K's format.

        Raises UserError where they, or the names of the classes, differ from the manifest.
        """
        pairs = self._open("ade20k", "AdePairs", split)
        if pairs.classes != tuple(sorted(self.manifest.classes, key=self.manifest.classes.get)):
            problem = "the classes or their order differ from the manifest"
            raise UserError(f"{self.root}: {problem}; {advise(self.manifest, self.root)}")
        return pairs

    def groups(self, tree: Tree) -> np.ndarray | None:
        """Return (N,) the group of each training image, for `TrainOrder`; None where the kind is not paired.

        Images of one name are a group: they lie in different class folders, and `TrainOrder` puts them in one batch.
        """
        return np.unique(tree.splits["train"].names, return_inverse=True)[1] if self.row.paired else None

    def _open(self, part: Format, reader: str, split: str, **more: bool) -> Any:
        """Compare a split of a dense format with the manifest, and open it by the reader of that format's module."""
        base = self._find_part(part)
        verify(self.manifest, self.root, {split: load_function(f"{part}.list_folders")(base, split, self.row)})
        return load_function(f"{part}.{reader}")(base, split, max_pixels=self.max_pixels, **more)

    def _find_part(self, part: Format) -> Path:
        """Return the folder of the part in a format; writes an embedded data set that is missing."""
        if part not in self.row.parts:
            kinds = " or ".join(kind.name for kind in KINDS.values() if part in kind.parts)
            raise UserError(
                f"prepare_data.{self.name}: {self.kind} is not laid out as {part}; choose a cell of kind {kinds}"
            )
        if self.row.embedded and not self.root.exists():
            write_embedded(self.row, self.root, self.manifest.generated, self.source)
        return self.root / self.row.parts[part]


def manifest_path(paths: Paths, name: str) -> Path:
    """Return the path of the manifest of a cell, or of a set `KIND:PATH`."""
    if (own := parse_own(name)) is not None:
        return own_folder(paths, own) / "data" / "manifest.json"
    return paths.cell("prepare_data", name) / "manifest.json"


def find_data_root(paths: Paths, runtime: Runtime, name: str, kind: str) -> Path:
    """Return the folder of a cell's data set: `runtime.data_roots.<name>`, else `runtime.data_roots.<kind>`.

    A set `KIND:PATH` names its own folder.

    Raises:
        UserError: runtime.data_roots has neither key.
    """
    if (own := parse_own(name)) is not None:
        return locate_own(paths, own)
    key = name if name in runtime.data_roots else kind
    if key not in runtime.data_roots:
        hint = did_you_mean(name, runtime.data_roots)
        raise UserError(f"runtime.data_roots: has neither {name} nor {kind}; say where the data set lies{hint}")
    return runtime.data_root(paths, key)


def find_source(paths: Paths, runtime: Runtime, kind: Kind) -> Path | None:
    """Return the folder of a kind's published files, or None; raises UserError where runtime.data_roots lacks it."""
    return runtime.data_root(paths, kind.source) if kind.source else None


def write_embedded(kind: Kind, root: Path, settings: Any, source: Path | None) -> None:
    """Write an embedded data set at `root`, from the published files in `source` if the kind needs them."""
    load_function(kind.writer)(root, settings, *([source] if kind.source else []))


def suggest_data(paths: Paths, name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown data set: the profiles that define it, else `did_you_mean`."""
    profiles = load_profiles(paths)
    having = [f"profiles/{each}.yaml" for each, content in profiles if name in (content.get("prepare_data") or {})]
    return f"; copy it from {' or '.join(having)}" if having else did_you_mean(name, known)


def require_data(paths: Paths, stage: str, data: str) -> None:
    """Raise UserError if a stage's `--data` is not a cell of `prepare_data:`."""
    if data not in (known := section_keys(paths.params, "prepare_data")):
        guess = suggest_data(paths, data, known)
        raise UserError(f"{stage}: --data {data}: not a cell of prepare_data in params.yaml{guess}")


def open_cell(paths: Paths, runtime: Runtime, name: str) -> DataCell:
    """Open a cell of `prepare_data:`.

    Raises UserError where it is unknown, not prepared or has no folder in data_roots.
    """
    file = manifest_path(paths, name)
    own = parse_own(name)
    if own is not None:
        if not file.is_file():
            raise UserError(f"{name}: not prepared; run `repro prepare-data --cell {name}` first")
    elif not file.is_file() and name not in (known := section_keys(paths.params, "prepare_data")):
        raise UserError(f"{name}: prepare_data in params.yaml has no such cell{suggest_data(paths, name, known)}")
    manifest = read_manifest(file)
    root = find_data_root(paths, runtime, name, manifest.kind)
    source = None if root.exists() else find_source(paths, runtime, KINDS[manifest.kind])
    return DataCell(
        name=own.name if own else name,
        manifest_path=file,
        manifest=manifest,
        root=root,
        max_pixels=runtime.max_pixels,
        source=source,
    )
