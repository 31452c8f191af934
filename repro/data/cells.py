"""Opening a prepared data set: its manifest, its folder, and the reader of its format."""

import dataclasses
from pathlib import Path
from typing import Any

from ..core.paths import Paths
from ..core.runtime import Runtime
from .ade20k import AdePairs
from .coco import read_instances
from .dense import open_dense
from .manifest import Manifest, open_root, read_manifest
from .tree import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataCell:
    """A cell of `prepare_data:` whose manifest was written.

    Args:
        name: the cell's.
        manifest_path: its file, on which every result from this data depends.
        manifest: its content.
        root: the folder that holds the data set.
    """

    name: str
    manifest_path: Path
    manifest: Manifest
    root: Path

    @property
    def kind(self) -> str:
        """The kind of the data set, e.g. `imagenet`."""
        return self.manifest.kind

    def open_tree(self) -> Tree:
        """The images by class, found to be those of the manifest; raises UserError."""
        return open_root(self.root, self.manifest)

    def open_instances(self, split: str) -> Any:
        """The annotated objects of a split (COCO's format), found to be those of the manifest; raises UserError."""
        return read_instances(open_dense(self.root, self.manifest, "coco"), split)

    def open_pairs(self, split: str) -> AdePairs:
        """The images of a split with their label maps (ADE20K's format), found to be those of the manifest; raises UserError."""
        return AdePairs(open_dense(self.root, self.manifest, "ade20k"), split)


def manifest_path(paths: Paths, name: str) -> Path:
    """Where the manifest of a cell lies."""
    return paths.cell("prepare_data", name) / "manifest.json"


def open_cell(paths: Paths, runtime: Runtime, name: str) -> DataCell:
    """A cell of `prepare_data:` by its name.

    Raises:
        UserError: it was not prepared, or `runtime.data_roots` does not say where it lies.
    """
    file = manifest_path(paths, name)
    manifest = read_manifest(file)
    return DataCell(name=name, manifest_path=file, manifest=manifest, root=runtime.data_root(paths, manifest.kind))
