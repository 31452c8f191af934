"""A data set in archives has the names, sizes, classes, order and pixels of the folders that it was packed from."""

import io
import os
import tarfile

import numpy as np
import pytest

from repro.core.errors import UserError
from repro.data.classification import ImageFolder
from repro.data.prepare import scan_manifest
from repro.data.tree import Tree, scan_tree
from tests.data_sets.conftest import SMALL, WNIDS, findings, only


def append(file, name, content, mode="a"):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    with tarfile.open(file, mode) as archive:
        archive.addfile(member, io.BytesIO(content))


def pack(folders, target, layout):
    """The same images in archives, in another order."""
    for split in ("train", "val"):
        (target / split).mkdir(parents=True)
        files = sorted((folders / split).glob("*/*"), key=lambda path: path.name[::-1])
        for number, path in enumerate(files):
            wnid, content = path.parent.name, path.read_bytes()
            shard = target / split / f"{split}-{number % 2:04d}.tar"
            if layout == "class archives":
                append(target / split / f"{wnid}.tar", path.name, content)
            elif layout == "class folders":
                append(shard, f"{split}/{wnid}/{path.name}", content)
            else:
                key = path.stem if split == "train" else f"{wnid}/{path.stem}"
                append(shard, f"{key}.cls", str(WNIDS.index(wnid)).encode())
                append(shard, f"{key}.JPEG", content)
                append(shard, f"{key}.json", b"{}")
    return target


@pytest.fixture
def packed(imagenet, tmp_path):
    return pack(imagenet, tmp_path / "packed", "class archives")


@pytest.mark.parametrize("layout", ["class archives", "class folders", "webdataset"])
def test_archives_equal_the_folders(imagenet, tmp_path, layout):
    plain, packed = scan_tree(imagenet, "imagenet"), scan_tree(pack(imagenet, tmp_path / "packed", layout), "imagenet")
    assert scan_manifest(tmp_path / "packed", "imagenet") == scan_manifest(imagenet, "imagenet")
    contents = [plain.path("train", index).read_bytes() for index in range(12)]
    assert [packed.source("train", index).read() for index in range(12)] == contents
    datasets = [ImageFolder(tree, "train", lambda image: image.tobytes()) for tree in (plain, packed)]
    assert [datasets[0][(0, index)] for index in range(12)] == [datasets[1][(0, index)] for index in range(12)]
    assert all(packed.path("train", index).name == plain.path("train", index).name for index in range(12))
    chosen = np.array([3, 7, 11])
    part = Tree(packed.root, packed.classes, {"train": packed.splits["train"].take(chosen)}, packed.kind)
    assert [part.source("train", i).read() for i in range(3)] == [contents[i] for i in chosen]


def test_the_listing_is_kept_until_an_archive_changes(packed):
    archive = packed / "train" / f"{WNIDS[0]}.tar"
    before, stamp = scan_manifest(packed, "imagenet"), archive.stat()
    content = archive.read_bytes()
    archive.write_bytes(b"x" * len(content))  # the same size and time: the kept listing is used
    os.utime(archive, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert scan_manifest(packed, "imagenet") == before
    archive.write_bytes(content)
    append(archive, "n01440764_99.JPEG", b"more")
    assert len(scan_tree(packed, "imagenet").splits["train"].names) == 13
    (packed / "train" / ".shards.npz").write_bytes(b"damaged")
    assert len(scan_tree(packed, "imagenet").splits["train"].names) == 13


def test_the_listing_of_another_kind_is_not_taken(packed):
    assert len(scan_tree(packed, "imagenet").splits["train"].names) == 12
    with pytest.raises(UserError, match="npy"):
        scan_tree(packed, "latents")


def cut(packed):
    archive = packed / "train" / f"{WNIDS[1]}.tar"
    with tarfile.open(archive) as stream:
        last = stream.getmembers()[-1]
    os.truncate(archive, last.offset_data + last.size // 2)


def break_header(packed):
    archive = packed / "train" / f"{WNIDS[0]}.tar"
    with tarfile.open(archive) as stream:
        member = stream.getmembers()[2]
    with open(archive, "r+b") as stream:
        stream.seek(member.offset)
        stream.write(b"x")


def cut_header(packed):
    archive = packed / "train" / f"{WNIDS[0]}.tar"
    with tarfile.open(archive) as stream:
        os.truncate(archive, stream.getmembers()[2].offset + 100)


def twice(packed):
    (packed / "train" / "more.tar").write_bytes((packed / "train" / f"{WNIDS[0]}.tar").read_bytes())
    append(packed / "train" / "more.tar", f"{WNIDS[0]}/n01440764_0.JPEG", b"x")


LAST = f"val/{WNIDS[2]}.tar"
FAULTS = [
    (cut, f"{WNIDS[1]}.tar: (cut short within|not a readable tar archive)"),
    (break_header, f"{WNIDS[0]}.tar: damaged at byte "),
    (cut_header, f"{WNIDS[0]}.tar: damaged at byte "),
    (twice, f"n01440764_0.JPEG of class {WNIDS[0]} is there twice"),
    (lambda root: append(root / LAST, "a.cls", b"1000"), "a.cls holds b'1000', expected a class index from 0 to 999"),
    (lambda root: append(root / LAST, "a.JPEG", b"x", "w:gz"), f"{WNIDS[2]}.tar: not a readable tar archive"),
    (lambda root: (root / LAST).unlink(), f"class '{WNIDS[2]}' is in train but not in val"),
]


@pytest.mark.parametrize(("plant", "message"), FAULTS)
def test_faults_are_named(packed, plant, message):
    plant(packed)
    with pytest.raises(UserError, match=message):
        scan_tree(packed, "imagenet")


def test_the_check_reads_archives(imagenet, tmp_path):
    packed = pack(imagenet, tmp_path / "packed", "webdataset")
    archive = sorted((packed / "train").glob("*.tar"))[0]
    with tarfile.open(archive) as stream:
        victim = next(member for member in stream if member.name.endswith(".JPEG"))
    with open(archive, "r+b") as stream:
        stream.seek(victim.offset_data)
        stream.write(b"no image")
    lines, _, _ = findings("imagenet", packed, official=SMALL)
    (error,) = only(lines, "error")
    name = f"{archive.relative_to(packed)}/{victim.name.rsplit('/')[-1]}"
    assert "unreadable image" in error and name in error and "ok       train: 12 images" in lines


def test_the_check_reads_on_after_a_damaged_archive(packed):
    cut(packed), twice(packed)
    errors = "\n".join(only(findings("imagenet", packed, official=SMALL)[0], "error"))
    assert f"train/{WNIDS[1]}.tar: cut short within" in errors
    assert "is there twice; remove one archive or image" in errors
    # a faulty listing is not kept
    assert not (packed / "train/.shards.npz").exists() and (packed / "val/.shards.npz").exists()
