"""Manifests of scenes, COCO and ADE20K."""

import dataclasses
import json
import os

import pytest
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from repro.data.check.dense import check_ade20k, check_coco, check_scenes
from repro.data.embedded.scenes import write_scenes
from repro.data.kinds import PrepareData
from repro.data.manifest import read_manifest
from repro.data.prepare import prepare, scan_manifest
from repro.data.settings import ScenesSettings
from tests.data_sets.conftest import cut, findings, flip, make_cell

SMALL = ScenesSettings(train=6, tune=2, test=3)


@pytest.fixture
def scenes(tmp_path):
    write_scenes(tmp_path / "scenes", SMALL)
    return tmp_path / "scenes"


@pytest.fixture
def published(scenes):
    """The parts of scenes as a COCO and an ADE20K have them, with a val in place of test; nothing reads tune."""
    for test, val in (
        ("coco/test2017", "coco/val2017"),
        ("coco/annotations/instances_test2017.json", "coco/annotations/instances_val2017.json"),
        ("ade20k/images/testing", "ade20k/images/validation"),
        ("ade20k/annotations/testing", "ade20k/annotations/validation"),
    ):
        (scenes / test).rename(scenes / val)
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
LISTED = "coco/annotations/instances_test2017.json"


@pytest.mark.parametrize(
    ("spoil", "file", "message"),
    [
        (flip, PHOTO, r"coco/train2017: a file was changed or renamed \(1 such difference\); remove .*scenes and"),
        (flip, LABEL, r"annotations/testing: a file was changed or renamed \(1 such difference\)"),
        (os.unlink, PHOTO, r"coco/train2017: 5 images, the manifest has 6 \(1 such difference\); remove .*scenes and"),
        (cut, PHOTO, r"coco/train2017: \d+ bytes in 6 images, the manifest has \d+: a file was changed or cut"),
        (cut, LABEL, r"annotations/testing: \d+ bytes in 3 images, .* cut short \(1 such difference\)"),
        (edit, LISTED, r"instances_test2017\.json: this annotation file differs from the one in the manifest"),
        (os.unlink, LISTED, r"instances_test2017\.json: No such file"),
        (
            remove_pair,
            "ade20k/images/training/ADE_train_00000001.png",
            r"images/training: 5 images, the manifest has 6 \(2 such differences\)",
        ),
    ],
)
def test_what_differs_from_the_manifest_is_one_line(scenes, spoil, file, message):
    manifest = scan_manifest(scenes, "scenes", SMALL)
    spoil(scenes / file)
    with pytest.raises(UserError, match=message) as caught:
        for split in ("train", "tune", "test"):
            prepared = make_cell(scenes, manifest)
            prepared.open_instances(split) if file.startswith("coco") else prepared.open_pairs(split)
    assert "\n" not in str(caught.value)


def test_pairs_are_judged_in_every_split(scenes):
    (scenes / "ade20k/images/training/ADE_train_00000001.png").unlink()
    with pytest.raises(UserError, match=r"ADE_train_00000001\.png: has no image"):
        scan_manifest(scenes, "scenes", SMALL)


def test_categories_must_be_the_same_in_every_split(scenes):
    content = json.loads((scenes / LISTED).read_text())
    content["categories"][0]["name"] = "zero"
    (scenes / LISTED).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"instances_test2017\.json: has other categories than instances_train2017"):
        scan_manifest(scenes, "scenes", SMALL)


def test_kinds_are_not_taken_for_one_another(scenes, root):
    with pytest.raises(UserError, match=r"mine: folder is not laid out as coco; choose a cell of kind scenes or coco"):
        make_cell(root, scan_manifest(root, "folder")).open_instances("train")
    manifest = scan_manifest(scenes, "scenes", SMALL)
    with pytest.raises(UserError, match="scenes is not laid out as folders"):
        make_cell(scenes, manifest).open_tree()
    with pytest.raises(UserError, match="coco is not laid out as ade20k"):
        make_cell(scenes / "coco", dataclasses.replace(manifest, kind="coco")).open_pairs("train")


def test_the_check_of_scenes_has_nothing_to_object_to(scenes):
    lines, _, _ = findings(check_scenes, scenes)
    assert lines and all(line.startswith("ok ") for line in lines), lines
    assert sum("2017.json: 10 categories" in line for line in lines) == 3


def test_the_check_of_the_originals_says_no_more_than_that_much_is_missing(published):
    """With the originals' classes, their counts are expected; with others, the set is one's own."""
    names = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    known = [name for name in names[1:] if name != "N/A"]
    found = []
    for _ in range(2):
        lines = findings(check_coco, published / "coco")[0] + findings(check_ade20k, published / "ade20k")[0]
        found.append([line for line in lines if not line.startswith("ok ")])
        for file in (published / "coco/annotations").iterdir():
            content = json.loads(file.read_text())
            content["categories"] += [{"id": 100 + place, "name": name} for place, name in enumerate(known[:40])]
            file.write_text(json.dumps(content))
        for file in (published / "ade20k").glob("objectInfo*.txt"):
            file.unlink()
        rows = [f"{number}\tthing {number}" for number in range(1, 151)]
        (published / "ade20k/objectInfo150.txt").write_text("\n".join(["Idx\tName", *rows]))
    own, original = found
    # images, instances and categories of each split of COCO; the pairs of each split of ADE20K
    assert not own and len(original) == 2 * 3 + 2 and all(" expected" in line for line in original), found
