import os
import shutil

import pytest
import torchvision
from PIL import Image

from repro.core.errors import UserError
from repro.data.embedded.connect import write_connect
from repro.data.manifest import read_manifest, write_manifest
from repro.data.prepare import scan_manifest
from repro.data.settings import ConnectSettings
from repro.data.tree import scan_tree
from tests.data_sets.conftest import cut, flip, make_cell

SMALL = ConnectSettings(image_size=96, train_pairs=2, tune_pairs=1, test_pairs=1, dashes=(1, 1))


def test_scan_agrees_with_torchvision(root):
    tree = scan_tree(root, "folder")
    for split in ("train", "val"):
        theirs = torchvision.datasets.ImageFolder(root / split)
        assert list(tree.classes) == theirs.classes
        ours = [(str(tree.path(split, i)), int(target)) for i, target in enumerate(tree.splits[split].targets)]
        assert ours == theirs.samples
    val = scan_manifest(root, "folder").splits["val"]
    assert {name: folder.images for name, folder in val.folders.items()} == {"ant": 5, "bee": 9, "cat": 6}
    assert val.bytes == sum(path.stat().st_size for path in (root / "val").rglob("*.png"))


def test_round_trip_and_no_trace_of_the_place(tmp_path):
    write_connect(tmp_path / "connect", SMALL)
    manifest = scan_manifest(tmp_path / "connect", "connect", SMALL)
    write_manifest(tmp_path / "manifest.json", manifest)
    assert read_manifest(tmp_path / "manifest.json") == manifest
    assert str(tmp_path) not in (tmp_path / "manifest.json").read_text()
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "connect", moved)
    for path in moved.rglob("*.png"):
        os.utime(path, (0, 0))
    assert scan_manifest(moved, "connect", SMALL) == manifest
    make_cell(moved, manifest).open_tree()


def rename(root, old, new):
    for split in ("train", "val"):
        (root / split / old).rename(root / split / new)


def remove_bees(root):
    for split in ("train", "val"):
        shutil.rmtree(root / split / "bee")


BEE = "val/bee/003.png"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: (r / BEE).unlink(), r"val/bee: 8 images, the manifest has 9 \(1 such difference\)"),
        (lambda r: shutil.copy(r / BEE, r / "val/bee/new.png"), r"val/bee: 10 images, the manifest has 9"),
        (lambda r: (r / BEE).rename(r / "val/bee/009.png"), r"val/bee: a file was renamed"),
        (lambda r: cut(r / BEE), r"val/bee: \d+ bytes in 9 images, .* cut"),
        (lambda r: (r / BEE).rename(r / "val/cat/b.png"), r"8 images, the manifest has 9 \(2 such differences\)"),
        (remove_bees, r"class folder 'bee' is missing"),
        (lambda r: rename(r, "bee", "wasp"), r"class folder 'bee' is missing"),
    ],
)
def test_opening_says_what_differs(root, change, message):
    manifest = scan_manifest(root, "folder")
    change(root)
    with pytest.raises(UserError, match=message) as caught:
        make_cell(root, manifest).open_tree()
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
    for name, wnid in {"ant": "n01440764", "bee": "n01443537", "cat": "n15075141"}.items():
        rename(root, name, wnid)
    found = scan_manifest(root, "imagenet").departures
    wanted = ("classes: 3, {} 1,000", "train: 20, {} 1,281,167", "val: 20, {} 50,000")
    assert found == tuple(each.format("ImageNet-1K has") for each in wanted)
    rename(root, "n01440764", "tench")
    with pytest.raises(UserError, match=r"tench: is not a class of imagenet; .*like n01440764; .* kind folder for"):
        scan_manifest(root, "imagenet")


def test_an_embedded_set_is_compared_byte_by_byte(root, tmp_path):
    write_connect(tmp_path / "connect", SMALL)
    written = scan_manifest(tmp_path / "connect", "connect", SMALL)
    own = scan_manifest(root, "folder")
    flip(next((tmp_path / "connect/tune/joined").iterdir()))
    flip(next((root / "val/bee").iterdir()))
    with pytest.raises(UserError, match=r"tune/joined: a file was changed or renamed \(1 such difference\); remove"):
        make_cell(tmp_path / "connect", written).open_tree()
    make_cell(root, own).open_tree()  # of others' data, names and sizes are compared
    with pytest.raises(UserError, match="no such folder"):  # and they are not written anew
        make_cell(tmp_path / "nowhere", own).open_tree()
    assert not (tmp_path / "nowhere").exists()
    cut(next((tmp_path / "connect/train").rglob("*.png")))
    with pytest.raises(UserError, match=r"cut short .*; remove .*connect and run the same command again"):
        make_cell(tmp_path / "connect", written).open_tree()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such manifest; run `repro prepare-data`"),
        ("{", "not valid JSON"),
        ("[]", "expected a mapping"),
        ('{"kind": "digits"}', "classes: missing"),
        ('{"kind": "digit"}', "digit' is not one of digits, .*; did you mean 'digits'"),
        ('{"kind": "digits", "generated": {"image_side": 16}}', r"generated\.image_side: unknown key; did you mean"),
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
