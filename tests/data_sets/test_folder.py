"""Folders of one's own pictures: their manifests, and the roots of their cells."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from repro.data.cells import open_cell
from repro.data.classification import ImageFolder
from repro.data.kinds import PrepareData
from repro.data.prepare import prepare


def write(root: Path, *classes: str) -> Path:
    """One picture of each class in each split, 16 wide and 24 high, from a camera that was turned by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for split in ("train", "val"):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            Image.new("RGB", (16, 24)).save(root / split / name / "1.png", exif=exif)
    return root


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return write(tmp_path / "pets", "cat", "dog", "guinea pig")


def prepared(tmp_path: Path, cells: dict[str, Path]):
    paths, runtime = Paths(tmp_path), Runtime(data_roots={name: str(root) for name, root in cells.items()})
    for name in cells:
        prepare(build(PrepareData, {"kind": "folder"}, f"prepare_data.{name}"), paths, runtime, name)
    return [open_cell(paths, runtime, name) for name in cells]


def test_the_manifest_takes_the_folder_as_it_is(pets, tmp_path):
    (cell,) = prepared(tmp_path, {"pets": pets})
    manifest = cell.manifest
    assert (manifest.kind, manifest.departures, manifest.generated) == ("folder", (), None)
    assert manifest.classes == {"cat": 0, "dog": 1, "guinea pig": 2}
    assert [split.images for split in manifest.splits.values()] == [3, 3]
    pixels, _ = ImageFolder(cell.open_tree(), "train", lambda image: torch.from_numpy(np.array(image)))[(0, 0)]
    assert pixels.shape == (16, 24, 3), "not turned upright"
    Image.new("L", (4, 4)).save(pets / "train/dog/2.png")
    with pytest.raises(UserError, match="train/dog: 2 images, the manifest has 1 .*run `repro prepare-data` to"):
        cell.open_tree()


def test_each_cell_may_have_a_root_of_its_own(pets, tmp_path):
    birds = write(tmp_path / "birds", "owl", "wren")
    first, second = prepared(tmp_path, {"pets": pets, "birds": birds})
    assert (first.root, second.root) == (pets, birds) and second.open_tree().classes == ("owl", "wren")


def test_the_root_of_the_kind_serves_where_the_cell_has_none(pets, tmp_path):
    runtime = Runtime(data_roots={"folder": str(pets)})
    prepare(build(PrepareData, {"kind": "folder"}, "x"), Paths(tmp_path), runtime, "pets")
    assert open_cell(Paths(tmp_path), runtime, "pets").root == pets
    with pytest.raises(UserError, match=r"runtime\.data_roots: has neither pets nor folder; .*did you mean 'pet'"):
        open_cell(Paths(tmp_path), Runtime(data_roots={"pet": str(pets)}), "pets")
