"""A data set in archives has the names, sizes, classes, order and pixels of the folders that it was packed from."""

import io
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo

from repro.core.errors import UserError
from repro.data.check.folders import check_imagenet
from repro.data.check.run import Depth
from repro.data.classification import ImageFolder, train_transform
from repro.data.findings import PrintAll
from repro.data.loader import TrainLoader
from repro.data.prepare import scan_manifest
from repro.data.settings import ExpectedCounts, TransformSettings
from repro.data.tree import Tree, scan_tree

WNIDS = ImageNetInfo("imagenet-1k").label_names()[:3]
SETTINGS = TransformSettings(image_size=16, auto_augment="rand-m9-mstd0.5-inc1")


@pytest.fixture
def folders(tmp_path):
    rng = np.random.default_rng(0)
    for split, number in (("train", 5), ("val", 2)):
        for wnid in WNIDS:
            (tmp_path / "folders" / split / wnid).mkdir(parents=True)
            for i in range(number):
                picture = Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8))
                name = f"{wnid}_{i}.JPEG" if split == "train" else f"ILSVRC2012_val_{i:08d}.JPEG"
                picture.save(tmp_path / "folders" / split / wnid / name)
    return tmp_path / "folders"


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def pack(folders, target, layout):
    """The same images in archives, in another order."""
    for split in ("train", "val"):
        (target / split).mkdir(parents=True)
        files = sorted((folders / split).glob("*/*"), key=lambda path: path.name[::-1])
        for number, path in enumerate(files):
            wnid = path.parent.name
            shard = f"{wnid}.tar" if layout == "class archives" else f"{split}-{number % 2:04d}.tar"
            with tarfile.open(target / split / shard, "a") as archive:
                if layout == "class archives":
                    add(archive, path.name, path.read_bytes())
                elif layout == "class folders":
                    add(archive, f"{split}/{wnid}/{path.name}", path.read_bytes())
                else:
                    key = (
                        path.name.removesuffix(".JPEG")
                        if split == "train"
                        else f"{wnid}/{path.name.removesuffix('.JPEG')}"
                    )
                    add(archive, f"{key}.cls", str(WNIDS.index(wnid)).encode())
                    add(archive, f"{key}.JPEG", path.read_bytes())
                    add(archive, f"{key}.json", b"{}")
    return target


LAYOUTS = ["class archives", "class folders", "webdataset"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_archives_equal_the_folders(folders, tmp_path, layout):
    plain, packed = scan_tree(folders, "imagenet"), scan_tree(pack(folders, tmp_path / "packed", layout), "imagenet")
    assert scan_manifest(tmp_path / "packed", "imagenet") == scan_manifest(folders, "imagenet")
    for index in range(15):
        assert packed.source("train", index).read() == plain.path("train", index).read_bytes()
        assert packed.path("train", index).name == plain.path("train", index).name
    chosen = np.array([3, 7, 14])
    part = Tree(packed.root, packed.classes, {"train": packed.splits["train"].take(chosen)}, packed.kind)
    assert [part.source("train", i).read() for i in range(3)] == [plain.path("train", i).read_bytes() for i in chosen]


@pytest.mark.parametrize("workers", [0, 2])
def test_training_continues_in_the_same_order(folders, tmp_path, workers):
    packed = pack(folders, tmp_path / "packed", "webdataset")
    batches = []
    for root, start in ((folders, 0), (packed, 0), (packed, 2)):
        dataset = ImageFolder(scan_tree(root, "imagenet"), "train", train_transform(SETTINGS), seed=1)
        loader = TrainLoader(dataset, batch_size=4, seed=1, workers=workers)
        batches.append(list(loader.batches(3, start)))
        loader.close()
    expected = batches[0]
    assert len(expected) == 3
    for found in (batches[1], [*expected[:2], *batches[2]]):
        for (ours, targets), (theirs, their_targets) in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs) and torch.equal(targets, their_targets)


def test_the_listing_is_kept_until_an_archive_changes(folders, tmp_path):
    packed = pack(folders, tmp_path / "packed", "class archives")
    archive = packed / "train" / f"{WNIDS[0]}.tar"
    before, stamp = scan_manifest(packed, "imagenet"), archive.stat()
    content = archive.read_bytes()
    archive.write_bytes(b"x" * len(content))  # the same size and time: the kept listing is used
    os.utime(archive, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert scan_manifest(packed, "imagenet") == before
    archive.write_bytes(content)
    with tarfile.open(archive, "a") as stream:
        add(stream, "n01440764_99.JPEG", b"more")
    assert len(scan_tree(packed, "imagenet").splits["train"].names) == 16
    (packed / "train" / ".shards.npz").write_bytes(b"damaged")
    assert len(scan_tree(packed, "imagenet").splits["train"].names) == 16


def cut(packed):
    archive = packed / "train" / f"{WNIDS[1]}.tar"
    with tarfile.open(archive) as stream:
        last = stream.getmembers()[-1]
    os.truncate(archive, last.offset_data + last.size // 2)


def twice(packed):
    (packed / "train" / "more.tar").write_bytes((packed / "train" / f"{WNIDS[0]}.tar").read_bytes())
    with tarfile.open(packed / "train" / "more.tar", "a") as stream:
        add(stream, f"{WNIDS[0]}/n01440764_0.JPEG", b"x")


def mislabel(packed):
    with tarfile.open(packed / "val" / f"{WNIDS[2]}.tar", "a") as stream:
        add(stream, "a.cls", b"1000")


def compress(packed):
    archive = packed / "train" / f"{WNIDS[0]}.tar"
    with tarfile.open(archive, "w:gz") as stream:
        add(stream, "a.JPEG", b"x")


FAULTS = {
    "cut": (cut, f"{WNIDS[1]}.tar: (cut short within|not a readable tar archive)"),
    "twice": (twice, f"n01440764_0.JPEG of class {WNIDS[0]} is there twice"),
    "label": (mislabel, "a.cls holds b'1000', expected a class index from 0 to 999"),
    "compressed": (compress, f"{WNIDS[0]}.tar: not a readable tar archive"),
    "class of one split": (
        lambda r: (r / "val" / f"{WNIDS[2]}.tar").unlink(),
        f"class '{WNIDS[2]}' is in train but not in val",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(folders, tmp_path, fault):
    plant, message = FAULTS[fault]
    packed = pack(folders, tmp_path / "packed", "class archives")
    plant(packed)
    with pytest.raises(UserError, match=message):
        scan_tree(packed, "imagenet")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_check_reads_archives(folders, tmp_path, layout):
    lines: list[str] = []
    expected = ExpectedCounts(classes=3, train=15, val=6)
    packed = pack(folders, tmp_path / "packed", layout)
    archive = sorted((packed / "train").glob("*.tar"))[0]
    with tarfile.open(archive) as stream:
        victim = next(member for member in stream if member.name.endswith(".JPEG"))
    with open(archive, "r+b") as stream:
        stream.seek(victim.offset_data)
        stream.write(b"no image")
    check_imagenet(packed, PrintAll(packed, lines.append), Depth(full=True), expected=expected)
    errors = [line for line in lines if line.startswith("error")]
    assert len(errors) == 1 and "unreadable image" in errors[0], lines
    assert f"{archive.relative_to(packed)}/{victim.name.rsplit('/')[-1]}" in errors[0], lines
    assert "ok       train: 15 images" in lines


def test_the_check_reads_on_after_a_damaged_archive(folders, tmp_path):
    packed = pack(folders, tmp_path / "packed", "class archives")
    cut(packed), twice(packed)
    lines: list[str] = []
    report = PrintAll(packed, lines.append)
    check_imagenet(packed, report, Depth(full=True), expected=ExpectedCounts(classes=3, train=15, val=6))
    errors = "\n".join(line for line in lines if line.startswith("error"))
    assert (
        f"train/{WNIDS[1]}.tar: cut short within" in errors and "is there twice; remove one archive or image" in errors
    ), lines
    assert not (packed / "train/.shards.npz").exists() and (packed / "val/.shards.npz").exists(), (
        "a faulty listing is not kept"
    )
