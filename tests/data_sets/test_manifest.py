import os
import shutil
from pathlib import Path

import pytest
import torchvision
from PIL import Image

from repro.core.errors import UserError
from repro.data.cells import DataCell
from repro.data.embedded.digits import write_digits
from repro.data.manifest import Manifest, read_manifest, write_manifest
from repro.data.prepare import check_expected, scan_manifest
from repro.data.settings import DigitsSettings, ExpectedCounts
from repro.data.tree import scan_tree

SMALL = DigitsSettings(image_size=16)


def cell(root: Path, manifest: Manifest) -> DataCell:
    return DataCell(name="mine", manifest_path=root / "manifest.json", manifest=manifest, root=root)


def change_nothing_but(root: Path, what: str) -> None:
    folder = root / "val" / "bee"
    if what == "removed":
        (folder / "003.png").unlink()
    elif what == "added":
        shutil.copy(folder / "003.png", folder / "new.png")
    elif what == "renamed":
        os.rename(folder / "003.png", folder / "009.png")
    elif what == "truncated":
        os.truncate(folder / "003.png", 20)
    elif what == "moved":
        os.rename(folder / "003.png", root / "val" / "cat" / "003b.png")
    elif what == "class gone":
        for split in ("train", "val"):
            shutil.rmtree(root / split / "bee")
    elif what == "class renamed":
        for split in ("train", "val"):
            os.rename(root / split / "bee", root / split / "wasp")


def test_scan_agrees_with_torchvision(root):
    tree = scan_tree(root, "folder")
    for split in ("train", "val"):
        theirs = torchvision.datasets.ImageFolder(root / split)
        assert list(tree.classes) == theirs.classes
        ours = [(str(tree.path(split, i)), int(target)) for i, target in enumerate(tree.splits[split].targets)]
        assert ours == theirs.samples


def test_counts_by_hand(root):
    manifest = scan_manifest(root, "folder")
    assert manifest.classes == {"ant": 0, "bee": 1, "cat": 2}
    for split in manifest.splits.values():
        assert split.images == 20
        assert {name: folder.images for name, folder in split.folders.items()} == {"ant": 5, "bee": 9, "cat": 6}
    assert manifest.splits["val"].bytes == sum(p.stat().st_size for p in (root / "val").rglob("*.png"))


def test_round_trip_and_no_trace_of_the_place(tmp_path):
    write_digits(tmp_path / "digits", SMALL)
    manifest = scan_manifest(tmp_path / "digits", "digits", SMALL)
    write_manifest(tmp_path / "manifest.json", manifest)
    assert read_manifest(tmp_path / "manifest.json") == manifest
    assert str(tmp_path) not in (tmp_path / "manifest.json").read_text()
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "digits", moved)
    for path in moved.rglob("*.png"):
        os.utime(path, (0, 0))
    assert scan_manifest(moved, "digits", SMALL) == manifest
    cell(moved, manifest).open_tree()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("removed", r"val/bee: 8 images, the manifest has 9 \(1 such difference\)"),
        ("added", r"val/bee: 10 images, the manifest has 9"),
        ("renamed", r"val/bee: a file was renamed"),
        ("truncated", r"val/bee: \d+ bytes in 9 images, .* cut"),
        ("moved", r"val/bee: 8 images, the manifest has 9 \(2 such differences\)"),
        ("class gone", r"class folder 'bee' is missing"),
        ("class renamed", r"class folder 'bee' is missing"),
    ],
)
def test_opening_says_what_differs(root, what, message):
    manifest = scan_manifest(root, "folder")
    change_nothing_but(root, what)
    with pytest.raises(UserError, match=message) as caught:
        cell(root, manifest).open_tree()
    assert "\n" not in str(caught.value) and str(root) in str(caught.value)
    assert scan_manifest(root, "folder").hash != manifest.hash


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("", r"set: no such folder; lay the data out as train/<class>/ .* and set runtime\.data_roots\.folder"),
        ("val", "val: no such folder; lay the data out as"),
        ("train/cat", "val/cat: class 'cat' is in val but not in train"),
    ],
)
def test_missing_folders_are_one_line(root, gone, message):
    shutil.rmtree(root / gone)
    with pytest.raises(UserError, match=message) as caught:
        scan_tree(root, "folder")
    assert "\n" not in str(caught.value)


def test_imagenet_names_departures_and_refuses_other_folders(root):
    for split in ("train", "val"):
        for name, wnid in {"ant": "n01440764", "bee": "n01443537", "cat": "n15075141"}.items():
            os.rename(root / split / name, root / split / wnid)
    assert scan_manifest(root, "imagenet").departures == (
        "classes: 3, ImageNet-1K has 1,000",
        "train: 20, ImageNet-1K has 1,281,167",
        "val: 20, ImageNet-1K has 50,000",
    )
    for split in ("train", "val"):
        os.rename(root / split / "n01440764", root / split / "tench")
    with pytest.raises(
        UserError,
        match=r"tench: is not a class of imagenet; class folders are named like n01440764; .* kind folder for classes of your own",
    ):
        scan_manifest(root, "imagenet")


@pytest.mark.parametrize("name", ["classes", "train", "val"])
def test_unexpected_counts_name_the_key(root, name):
    counts, manifest = {"classes": 3, "train": 20, "val": 20}, scan_manifest(root, "folder")
    check_expected(manifest, root, ExpectedCounts(**counts), "prepare_data.imagenet.expected")
    counts[name] += 1
    message = rf"prepare_data\.imagenet\.expected\.{name}: {counts[name]} expected, .* holds {counts[name] - 1};"
    with pytest.raises(UserError, match=message):
        check_expected(manifest, root, ExpectedCounts(**counts), "prepare_data.imagenet.expected")


def test_a_missing_embedded_set_is_written_and_an_old_one_is_compared(tmp_path):
    root = tmp_path / "digits"
    write_digits(root, SMALL)
    manifest = scan_manifest(root, "digits", SMALL)
    shutil.rmtree(root)
    tree = cell(root, manifest).open_tree()
    assert sum(len(files.names) for files in tree.splits.values()) == 1797
    os.truncate(next((root / "train").rglob("*.png")), 40)
    with pytest.raises(UserError, match=r"cut short .*; remove .*digits and run the same command again"):
        cell(root, manifest).open_tree()


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def test_a_changed_byte_is_noticed_where_the_project_wrote_the_data(root, tmp_path):
    write_digits(tmp_path / "digits", SMALL)
    written, own = scan_manifest(tmp_path / "digits", "digits", SMALL), scan_manifest(root, "folder")
    change_a_byte(next((tmp_path / "digits/tune/digit_3").iterdir()))
    change_a_byte(next((root / "val/bee").iterdir()))
    with pytest.raises(
        UserError, match=r"tune/digit_3: a file was changed or renamed \(1 such difference\); remove .*digits and run"
    ):
        cell(tmp_path / "digits", written).open_tree()
    cell(root, own).open_tree()  # of others' data, names and sizes are compared


def test_a_data_set_of_the_user_is_not_invented(root, tmp_path):
    manifest = scan_manifest(root, "folder")
    with pytest.raises(UserError, match="no such folder"):
        cell(tmp_path / "nowhere", manifest).open_tree()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such manifest; run `repro prepare-data`"),
        ("{", "not valid JSON"),
        ("[]", "expected a mapping"),
        ('{"kind": "digits"}', "classes: missing"),
        ('{"kind": "digit"}', "digit' is not one of digits, .*; did you mean 'digits'"),
        (
            '{"kind": "digits", "generated": {"image_side": 16}}',
            r"generated\.image_side: unknown key; did you mean 'image_size'",
        ),
    ],
)
def test_damaged_manifest(tmp_path, text, message):
    path = tmp_path / "manifest.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_manifest(path)


def test_other_files_are_no_samples(root):
    before = scan_manifest(root, "folder")
    (root / "train" / "ant" / "notes.txt").write_text("x")
    (root / "train" / "ant" / ".hidden.png").write_text("x")
    (root / "README").write_text("x")
    Image.new("RGB", (4, 4)).save(root / "train" / "ant" / "UPPER.JPEG")
    assert len(scan_tree(root, "folder").splits["train"].names) == 21
    assert before.splits["val"] == scan_manifest(root, "folder").splits["val"]
