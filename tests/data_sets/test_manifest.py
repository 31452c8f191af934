import os
import shutil
from pathlib import Path

import pytest
import torchvision
from PIL import Image

from repro.core.errors import UserError
from repro.data.manifest import build_manifest, check_expected, open_root, read_manifest, verify, write_manifest
from repro.data.settings import DigitsSettings, ExpectedCounts
from repro.data.tree import scan_tree

SMALL = DigitsSettings(image_size=16)


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
    tree = scan_tree(root, "imagenet")
    for split in ("train", "val"):
        theirs = torchvision.datasets.ImageFolder(root / split)
        assert list(tree.classes) == theirs.classes
        ours = [(str(tree.path(split, i)), int(target)) for i, target in enumerate(tree.splits[split].targets)]
        assert ours == theirs.samples


def test_counts_by_hand(root):
    manifest = build_manifest(scan_tree(root, "digits"), "digits")
    assert manifest.classes == {"ant": 0, "bee": 1, "cat": 2}
    for split in manifest.splits.values():
        assert split.images == 20
        assert {name: folder.images for name, folder in split.folders.items()} == {"ant": 5, "bee": 9, "cat": 6}
    assert manifest.splits["val"].bytes == sum(p.stat().st_size for p in (root / "val").rglob("*.png"))


def test_round_trip_and_no_trace_of_the_place(root, tmp_path):
    manifest = build_manifest(scan_tree(root, "digits"), "digits", SMALL)
    write_manifest(tmp_path / "manifest.json", manifest)
    assert read_manifest(tmp_path / "manifest.json") == manifest
    assert str(tmp_path) not in (tmp_path / "manifest.json").read_text()
    moved = tmp_path / "elsewhere"
    shutil.move(root, moved)
    for path in moved.rglob("*.png"):
        os.utime(path, (0, 0))
    assert build_manifest(scan_tree(moved, "digits"), "digits", SMALL) == manifest
    verify(scan_tree(moved, "digits"), manifest)


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
def test_verify_says_what_differs(root, what, message):
    manifest = build_manifest(scan_tree(root, "digits"), "digits")
    change_nothing_but(root, what)
    with pytest.raises(UserError, match=message) as caught:
        verify(scan_tree(root, "digits"), manifest)
    assert "\n" not in str(caught.value) and str(root) in str(caught.value)
    assert build_manifest(scan_tree(root, "digits"), "digits").hash != manifest.hash


def no_root(root):
    shutil.rmtree(root)


def no_val(root):
    shutil.rmtree(root / "val")


def no_images_at_all(root):
    for split in ("train", "val"):
        shutil.rmtree(root / split)
        (root / split).mkdir()


def flat_val(root):
    for path in list((root / "val").rglob("*.png")):
        os.rename(path, root / "val" / f"{path.parent.name}_{path.name}")
    for folder in (root / "val").iterdir():
        if folder.is_dir():
            folder.rmdir()


def empty_class(root):
    for path in (root / "train" / "bee").iterdir():
        path.unlink()


def class_in_train_only(root):
    shutil.rmtree(root / "val" / "cat")


def class_in_val_only(root):
    shutil.rmtree(root / "train" / "cat")


def dangling_link(root):
    (root / "train" / "ant" / "link.png").symlink_to(root / "nowhere.png")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_root, r"set: no such folder; lay ImageNet-1K out .* runtime\.data_roots\.imagenet"),
        (no_val, r"val: No such file or directory; lay ImageNet-1K out"),
        (no_images_at_all, r"train: holds no class folders; lay ImageNet-1K out"),
        (flat_val, r"val: 20 images lie directly in it; sort them into one folder per class"),
        (empty_class, r"train/bee: holds no image .*; fill this class folder or remove it"),
        (class_in_train_only, r"class 'cat' is in train but not in val \(1 such classes\)"),
        (class_in_val_only, r"class 'cat' is in val but not in train"),
        (dangling_link, r"train/ant/link.png: No such file or directory"),
    ],
)
def test_bad_layouts_are_one_line(root, spoil, message):
    spoil(root)
    with pytest.raises(UserError, match=message) as caught:
        scan_tree(root, "imagenet")
    assert "\n" not in str(caught.value)


def test_imagenet_names_departures_and_refuses_other_folders(root):
    for split in ("train", "val"):
        for name, wnid in {"ant": "n01440764", "bee": "n01443537", "cat": "n15075141"}.items():
            os.rename(root / split / name, root / split / wnid)
    assert build_manifest(scan_tree(root, "imagenet"), "imagenet").departures == (
        "classes: 3, ImageNet-1K has 1,000",
        "train: 20, ImageNet-1K has 1,281,167",
        "val: 20, ImageNet-1K has 50,000",
    )
    for split in ("train", "val"):
        os.rename(root / split / "n01440764", root / split / "tench")
    with pytest.raises(UserError, match=r"tench: no wnid of ImageNet-1K \(1 such folders\)"):
        build_manifest(scan_tree(root, "imagenet"), "imagenet")


@pytest.mark.parametrize("name", ["classes", "train", "val"])
def test_unexpected_counts_name_the_key(root, name):
    counts, manifest = {"classes": 3, "train": 20, "val": 20}, build_manifest(scan_tree(root, "digits"), "digits")
    check_expected(manifest, root, ExpectedCounts(**counts), "prepare_data.imagenet.expected")
    counts[name] += 1
    message = rf"prepare_data\.imagenet\.expected\.{name}: {counts[name]} expected, .* holds {counts[name] - 1};"
    with pytest.raises(UserError, match=message):
        check_expected(manifest, root, ExpectedCounts(**counts), "prepare_data.imagenet.expected")


def test_open_root_writes_a_missing_embedded_set_and_checks_an_old_one(tmp_path):
    from repro.data.digits import write_digits

    write_digits(tmp_path / "digits", SMALL)
    manifest = build_manifest(scan_tree(tmp_path / "digits", "digits"), "digits", SMALL)
    shutil.rmtree(tmp_path / "digits")
    tree = open_root(tmp_path / "digits", manifest)
    assert len(tree.splits["train"].names) + len(tree.splits["val"].names) == 1797
    os.truncate(next((tmp_path / "digits" / "train").rglob("*.png")), 40)
    with pytest.raises(UserError, match=r"cut .*; remove .*digits and run the same command again"):
        open_root(tmp_path / "digits", manifest)


def test_open_root_does_not_invent_imagenet(root, tmp_path):
    manifest = build_manifest(scan_tree(root, "digits"), "digits")
    with pytest.raises(UserError, match="no such folder"):
        open_root(tmp_path / "nowhere", manifest)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such manifest; run `repro prepare-data`"), ("{", "not valid JSON"), ('{"kind": "digits"}', "classes: missing")],
)
def test_damaged_manifest(tmp_path, text, message):
    path = tmp_path / "manifest.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_manifest(path)


def test_other_files_are_no_samples(root):
    before = build_manifest(scan_tree(root, "digits"), "digits")
    (root / "train" / "ant" / "notes.txt").write_text("x")
    (root / "train" / "ant" / ".hidden.png").write_text("x")
    (root / "README").write_text("x")
    Image.new("RGB", (4, 4)).save(root / "train" / "ant" / "UPPER.JPEG")
    tree = scan_tree(root, "digits")
    assert len(tree.splits["train"].names) == 21
    assert before.splits["val"] == build_manifest(tree, "digits").splits["val"]
