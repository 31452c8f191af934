"""Manifests of class folders, scenes, COCO and ADE20K: what is scanned, and what they say of a set that differs."""

import contextlib
import dataclasses
import json
import shutil

import pytest
import torchvision
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from repro.data.embedded.connect import write_connect
from repro.data.embedded.scenes import write_scenes
from repro.data.kinds import PrepareData
from repro.data.manifest import read_manifest
from repro.data.prepare import prepare, scan_manifest
from repro.data.settings import ConnectSettings, ScenesSettings
from repro.data.tree import scan_tree
from tests.data_sets.conftest import cut, findings, flip, make_cell

CONNECT = ConnectSettings(image_size=96, train_pairs=2, tune_pairs=1, test_pairs=1, dashes=(1, 1))
SCENES = ScenesSettings(train=6, tune=2, test=3)


def test_scan_agrees_with_torchvision(root):
    tree = scan_tree(root, "folder")
    for split in ("train", "val"):
        theirs = torchvision.datasets.ImageFolder(root / split)
        assert list(tree.classes) == theirs.classes
        ours = [(str(tree.path(split, i)), int(target)) for i, target in enumerate(tree.splits[split].targets)]
        assert ours == theirs.samples
    val = scan_manifest(root, "folder").splits["val"]
    assert val.bytes == sum(path.stat().st_size for path in (root / "val").rglob("*.png"))


def rename(root, old, new):
    for split in ("train", "val"):
        (root / split / old).rename(root / split / new)


BEE = "val/bee/003.png"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: (r / BEE).unlink(), r"val/bee: 8 images, the manifest has 9 \(1 such difference\)"),
        (lambda r: (r / BEE).rename(r / "val/bee/009.png"), r"val/bee: a file was renamed"),
        (lambda r: cut(r / BEE), r"val/bee: \d+ bytes in 9 images, .* cut"),
        (lambda r: (r / BEE).rename(r / "val/cat/b.png"), r"8 images, the manifest has 9 \(2 such differences\)"),
        (lambda r: rename(r, "bee", "wasp"), r"class folder 'bee' is missing"),
        (shutil.rmtree, r"set: no such folder; lay the data out as train/<class>/ .* runtime\.data_roots\.folder"),
        (lambda r: shutil.rmtree(r / "val"), "val: no such folder; lay the data out as"),
    ],
)
def test_opening_says_what_differs(root, change, message):
    manifest = scan_manifest(root, "folder")
    change(root)
    with pytest.raises(UserError, match=message) as caught:
        make_cell(root, manifest).open_tree()
    assert "\n" not in str(caught.value) and str(root) in str(caught.value)
    with contextlib.suppress(UserError):
        assert scan_manifest(root, "folder").hash != manifest.hash


def test_an_embedded_set_is_compared_byte_by_byte(root, tmp_path):
    write_connect(tmp_path / "connect", CONNECT)
    written = scan_manifest(tmp_path / "connect", "connect", CONNECT)
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


WHOLE = '{"kind": "digits", "classes": {}, "splits": {}, "departures": [], "generated": %s, "hash": ""}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such manifest; run `repro prepare-data`"),
        ("{", "not valid JSON"),
        ('{"kind": "digits"}', "classes: missing"),
        ('{"kind": "digit"}', "kind: .*'imagenet'.* got str 'digit'; did you mean 'digits'"),
        (WHOLE % '{"image_side": 16}', r"generated\.image_side: unknown key; did you mean"),
    ],
)
def test_damaged_manifest(tmp_path, text, message):
    path = tmp_path / "manifest.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_manifest(path)


@pytest.fixture
def scenes(tmp_path):
    write_scenes(tmp_path / "scenes", SCENES)
    return tmp_path / "scenes"


@pytest.fixture
def published(scenes):
    """The parts of scenes as a COCO and an ADE20K have them, with a val in place of test; nothing reads tune."""
    for path in list(scenes.rglob("*test*")):
        if path.suffix != ".png":
            path.rename(path.with_name(path.name.replace("testing", "validation").replace("test", "val")))
    return scenes


@pytest.mark.parametrize(
    ("kind", "classes", "official"),
    [("coco", 10, ("COCO 2017", "80", "118,287", "5,000")), ("ade20k", 13, ("ADE20K", "150", "20,210", "2,000"))],
)
def test_others_are_prepared_where_they_lie(published, tmp_path, kind, classes, official):
    """A part of scenes is a COCO, or an ADE20K, most of which is missing."""
    before = sorted(published.rglob("*"))
    params = build(PrepareData, {"kind": kind, "expected": {"classes": classes, "train": 6, "val": 3}}, "x")
    prepare(params, Paths(tmp_path), Runtime(data_roots={kind: str(published / kind)}), "subset")
    manifest = read_manifest(tmp_path / "results/prepare_data/subset/manifest.json")
    assert manifest.departures == tuple(
        f"{what}: {found}, {official[0]} has {wanted}"
        for what, found, wanted in zip(("classes", "train", "val"), (classes, 6, 3), official[1:])
    )
    assert manifest.generated is None and len(manifest.classes) == classes
    assert sorted(published.rglob("*")) == before
    prepared = make_cell(published / kind, manifest)
    assert len(prepared.open_instances("train").names if kind == "coco" else prepared.open_pairs("train")) == 6


def remove_pair(file):
    file.unlink()
    (file.parents[2] / "annotations/training" / file.name).unlink()


def edit(file):
    file.write_text(file.read_text().replace("0", "1", 1))


PHOTO, LABEL = "coco/train2017/000000000003.png", "ade20k/annotations/testing/ADE_test_00000002.png"
LISTED, PAIR = "coco/annotations/instances_test2017.json", "ade20k/images/training/ADE_train_00000001.png"


@pytest.mark.parametrize(
    ("spoil", "file", "message"),
    [
        (flip, PHOTO, r"coco/train2017: a file was changed or renamed \(1 such difference\); remove .*scenes and"),
        (cut, LABEL, r"annotations/testing: \d+ bytes in 3 images, .* cut short \(1 such difference\)"),
        (edit, LISTED, r"instances_test2017\.json: this annotation file differs from the one in the manifest"),
        (remove_pair, PAIR, r"images/training: 5 images, the manifest has 6 \(2 such differences\)"),
    ],
)
def test_what_differs_from_the_manifest_is_one_line(scenes, spoil, file, message):
    manifest = scan_manifest(scenes, "scenes", SCENES)
    spoil(scenes / file)
    with pytest.raises(UserError, match=message) as caught:
        for split in ("train", "tune", "test"):
            prepared = make_cell(scenes, manifest)
            prepared.open_instances(split) if file.startswith("coco") else prepared.open_pairs(split)
    assert "\n" not in str(caught.value)


def test_a_coco_renamed_after_its_preparation_is_one_line(published):
    root = published / "coco"
    manifest = scan_manifest(root, "coco")
    (root / "train2017").rename(root / "train")
    (root / "annotations/instances_train2017.json").rename(root / "annotations/instances_train.json")
    with pytest.raises(
        UserError, match=r"'annotations/instances_train\.json' is not in the manifest; restore"
    ) as caught:
        make_cell(root, manifest).open_instances("train")
    assert "\n" not in str(caught.value)


def test_every_split_is_judged_as_it_is_scanned(scenes):
    file = scenes / LISTED
    file.write_text(file.read_text().replace("digit 0", "zero"))
    with pytest.raises(UserError, match=r"instances_test2017\.json: has other categories than instances_train2017"):
        scan_manifest(scenes, "scenes", SCENES)


def test_kinds_are_not_taken_for_one_another(scenes, root):
    with pytest.raises(UserError, match=r"mine: folder is not laid out as coco; choose a cell of kind scenes or coco"):
        make_cell(root, scan_manifest(root, "folder")).open_instances("train")
    manifest = scan_manifest(scenes, "scenes", SCENES)
    with pytest.raises(UserError, match="scenes is not laid out as folders"):
        make_cell(scenes, manifest).open_tree()
    with pytest.raises(UserError, match="coco is not laid out as ade20k"):
        make_cell(scenes / "coco", dataclasses.replace(manifest, kind="coco")).open_pairs("train")


def test_the_check_of_the_originals_says_no_more_than_that_much_is_missing(published):
    """With the originals' classes, their counts are expected; with others, the set is one's own."""
    names = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    known = [name for name in names[1:] if name != "N/A"]
    assert findings("coco", published / "coco")[1] == 0
    for file in (published / "coco/annotations").iterdir():
        content = json.loads(file.read_text())
        content["categories"] += [{"id": 100 + place, "name": name} for place, name in enumerate(known[:40])]
        file.write_text(json.dumps(content))
    lines = [line for line in findings("coco", published / "coco")[0] if not line.startswith("ok ")]
    # images, instances and categories of each split
    assert len(lines) == 2 * 3 and all(" expected" in line for line in lines), lines
