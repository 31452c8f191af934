"""Small data sets, and the ways in which files are spoilt."""

import dataclasses
import hashlib
import json
import pkgutil
from pathlib import Path

import pytest
from PIL import Image

from repro.data.cells import DataCell
from repro.data.check.run import Depth, check_parts
from repro.data.findings import PrintAll
from repro.data.imagenet100 import WNIDS as IMAGENET_100
from repro.data.kinds import KINDS, Release
from repro.data.manifest import Manifest
from repro.data.settings import ExpectedCounts
from tests.data_sets.made import picture

CLASSES = {"ant": 5, "bee": 9, "cat": 6}
WNIDS = ("n01440764", "n01443537", "n01484850")  # timm's classes 0, 1 and 2
SMALL = Release(name="three classes", counts=ExpectedCounts(classes=3, train=12, val=6))
FULL = Depth(full=True)


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


def findings(kind: str, root: Path, depth: Depth = FULL, official: Release | None = None):
    """(lines, number of errors, number of warnings); `official` takes the place of the kind's own release."""
    row = KINDS[kind] if official is None else dataclasses.replace(KINDS[kind], official=official)
    lines: list[str] = []
    report = PrintAll(root, lines.append)
    check_parts(row, root, report, depth)
    return lines, report.num_errors, report.num_warnings


def only(lines: list[str], level: str) -> list[str]:
    return [line[9:] for line in lines if line.startswith(level)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """20 train and 20 val images of 16x16 in class folders, each with a grey value of 10 times its place in order."""
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
def imagenet(tmp_path: Path) -> Path:
    """Three classes with 4 training and 2 validation images each; the latter have their real names."""
    root = tmp_path / "imagenet"
    real = json.loads(pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json"))
    for index, wnid in enumerate(WNIDS):
        for number in range(4):
            picture(root / "train" / wnid / f"{wnid}_{number}.JPEG", seed=number)
        for place in [place for place, labels in enumerate(real) if labels == [index]][:2]:
            picture(root / "val" / wnid / f"ILSVRC2012_val_{place + 1:08d}.JPEG", seed=place)
    return root


@pytest.fixture
def imagenet_folder(tmp_path: Path) -> Path:
    """ImageNet's layout with the classes of ImageNet-100 and one more: three training images and one of val each."""
    folder = tmp_path / "imagenet"
    for wnid in (*IMAGENET_100, "n01440764"):
        for split, count in (("train", 3), ("val", 1)):
            place = folder / split / wnid
            place.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (4, 4), number).save(place / f"{wnid}_{number}.JPEG")
    return folder


@pytest.fixture
def published_files(cifar_files: Path, imagenet_folder: Path) -> dict[str, Path]:
    """Key in runtime.data_roots -> the folder of published files from which a data set is written."""
    return {"torchvision": cifar_files, "imagenet": imagenet_folder}
