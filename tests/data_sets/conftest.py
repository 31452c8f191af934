"""Small data sets, and the ways in which files are spoilt."""

import hashlib
from pathlib import Path

import pytest
from PIL import Image

from repro.data.cells import DataCell
from repro.data.kinds import list_imagenet100
from repro.data.manifest import Manifest

CLASSES = {"ant": 5, "bee": 9, "cat": 6}


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Change a byte near the end of a file; its size stays."""
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def hash_files(root: Path) -> dict[str, str]:
    """Name below the root -> hash, of every file."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def make_cell(root: Path, manifest: Manifest) -> DataCell:
    return DataCell(name="mine", manifest_path=root / "manifest.json", manifest=manifest, root=root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small tree of class folders: 20 train and 20 val images of 16x16, each with a grey value of 10 times its place
    in sorted order.
    """
    folder = tmp_path / "set"
    for split in ("train", "val"):
        place = 0
        for name, count in sorted(CLASSES.items()):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                grey = (10 * place,) * 3
                Image.new("RGB", (16, 16), grey).save(folder / split / name / f"{i:03d}.png")
                place += 1
    return folder


@pytest.fixture
def imagenet_folder(tmp_path: Path) -> Path:
    """ImageNet's layout with the classes of ImageNet-100 and one more: three training images and one of val each."""
    folder = tmp_path / "imagenet"
    for wnid in (*list_imagenet100(), "n01440764"):
        for split, count in (("train", 3), ("val", 1)):
            place = folder / split / wnid
            place.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (4, 4), number).save(place / f"{wnid}_{number}.JPEG")
    return folder


@pytest.fixture
def published_files(cifar100_files: Path, imagenet_folder: Path) -> dict[str, Path]:
    """Key in runtime.data_roots -> the folder of published files from which a data set is written."""
    return {"torchvision": cifar100_files, "imagenet": imagenet_folder}
