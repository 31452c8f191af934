"""Manifests of scenes, COCO and ADE20K."""

import dataclasses
import json
import os

import pytest

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from repro.data.cells import DataCell
from repro.data.check.dense import CocoCounts, check_ade20k, check_coco, check_scenes
from repro.data.check.run import Depth
from repro.data.coco import read_instances
from repro.data.embedded.scenes import CATEGORY_IDS, write_scenes
from repro.data.findings import PrintAll
from repro.data.kinds import PrepareData
from repro.data.manifest import Manifest, read_manifest
from repro.data.prepare import prepare, scan_manifest
from repro.data.settings import ExpectedCounts, ScenesSettings

SMALL = ScenesSettings(train=6, tune=2, test=3)


def cell(root, manifest: Manifest) -> DataCell:
    return DataCell(name="mine", manifest_path=root / "manifest.json", manifest=manifest, root=root)


@pytest.fixture
def scenes(tmp_path):
    write_scenes(tmp_path / "scenes", SMALL)
    return tmp_path / "scenes"


@pytest.fixture
def published(scenes):
    """The parts of scenes as a COCO and an ADE20K have them, with a val in place of test; tune is left over, and
    nothing reads it.
    """
    for test, val in (
        ("coco/test2017", "coco/val2017"),
        ("coco/annotations/instances_test2017.json", "coco/annotations/instances_val2017.json"),
        ("ade20k/images/testing", "ade20k/images/validation"),
        ("ade20k/annotations/testing", "ade20k/annotations/validation"),
    ):
        (scenes / test).rename(scenes / val)
    return scenes


@pytest.mark.parametrize("kind", ["coco", "ade20k"])
def test_others_are_prepared_where_they_lie(published, tmp_path, kind):
    """A part of scenes is a COCO, or an ADE20K, most of which is missing."""
    before = sorted(published.rglob("*"))
    classes = {"coco": 10, "ade20k": 13}[kind]
    params = build(PrepareData, {"kind": kind, "expected": {"classes": classes, "train": 6, "val": 3}}, "x")
    prepare(params, Paths(tmp_path), Runtime(data_roots={kind: str(published / kind)}), "subset")
    manifest = read_manifest(tmp_path / "results/prepare_data/subset/manifest.json")
    official = {"coco": ("COCO 2017", "80", "118,287", "5,000"), "ade20k": ("ADE20K", "150", "20,210", "2,000")}[kind]
    assert manifest.departures == tuple(
        f"{what}: {found}, {official[0]} has {wanted}"
        for what, found, wanted in zip(("classes", "train", "val"), (classes, 6, 3), official[1:])
    )
    assert manifest.generated is None and len(manifest.classes) == classes
    assert sorted(published.rglob("*")) == before
    prepared = cell(published / kind, manifest)
    assert len(prepared.open_instances("train").names if kind == "coco" else prepared.open_pairs("train")) == 6


def change_image(root):
    file = root / "coco/tune2017/000000000008.png"
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


def change_label(root):
    file = root / "ade20k/annotations/testing/ADE_test_00000002.png"
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


def remove_image(root):
    (root / "coco/train2017/000000000003.png").unlink()


def cut_image(root):
    os.truncate(root / "coco/train2017/000000000003.png", 100)


def cut_label(root):
    os.truncate(root / "ade20k/annotations/testing/ADE_test_00000002.png", 100)


def edit_annotations(root):
    file = root / "coco/annotations/instances_test2017.json"
    file.write_text(file.read_text().replace("0", "1", 1))


def remove_annotations(root):
    (root / "coco/annotations/instances_test2017.json").unlink()


def remove_pair(root):
    for name in ("images/training/ADE_train_00000001.png", "annotations/training/ADE_train_00000001.png"):
        (root / "ade20k" / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "part", "message"),
    [
        (
            change_image,
            "coco",
            r"coco/tune2017: a file was changed or renamed \(1 such difference\); remove .*scenes and",
        ),
        (change_label, "ade20k", r"annotations/testing: a file was changed or renamed \(1 such difference\)"),
        (
            remove_image,
            "coco",
            r"coco/train2017: 5 images, the manifest has 6 \(1 such difference\); remove .*scenes and",
        ),
        (cut_image, "coco", r"coco/train2017: \d+ bytes in 6 images, the manifest has \d+: a file was changed or cut"),
        (cut_label, "ade20k", r"annotations/testing: \d+ bytes in 3 images, .* cut short \(1 such difference\)"),
        (
            edit_annotations,
            "coco",
            r"instances_test2017\.json: this annotation file differs from the one in the manifest",
        ),
        (remove_annotations, "coco", r"instances_test2017\.json: No such file"),
        (remove_pair, "ade20k", r"images/training: 5 images, the manifest has 6 \(2 such differences\)"),
    ],
)
def test_what_differs_from_the_manifest_is_one_line(scenes, spoil, part, message):
    manifest = scan_manifest(scenes, "scenes", SMALL)
    spoil(scenes)
    with pytest.raises(UserError, match=message) as caught:
        for split in ("train", "tune", "test"):
            prepared = cell(scenes, manifest)
            prepared.open_instances(split) if part == "coco" else prepared.open_pairs(split)
    assert "\n" not in str(caught.value)


def test_pairs_are_judged_in_every_split(scenes):
    (scenes / "ade20k/images/training/ADE_train_00000001.png").unlink()
    with pytest.raises(UserError, match=r"ADE_train_00000001\.png: has no image"):
        scan_manifest(scenes, "scenes", SMALL)


def test_categories_must_be_the_same_in_every_split(scenes):
    file = scenes / "coco/annotations/instances_test2017.json"
    content = json.loads(file.read_text())
    content["categories"][0]["name"] = "zero"
    file.write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"instances_test2017\.json: has other categories than instances_train2017\.json"
    ):
        scan_manifest(scenes, "scenes", SMALL)


def test_kinds_are_not_taken_for_one_another(scenes, root):
    folders = cell(root, scan_manifest(root, "folder"))
    with pytest.raises(
        UserError, match=r"prepare_data\.mine: folder is not laid out as coco; choose a cell of kind scenes or coco"
    ):
        folders.open_instances("train")
    manifest = scan_manifest(scenes, "scenes", SMALL)
    with pytest.raises(UserError, match="scenes is not laid out as folders"):
        cell(scenes, manifest).open_tree()
    with pytest.raises(UserError, match="coco is not laid out as ade20k"):
        cell(scenes / "coco", dataclasses.replace(manifest, kind="coco")).open_pairs("train")


def test_the_check_of_the_originals_accepts_the_formats(published):
    """With the counts of scenes in place of the originals', the checks have nothing to object to."""
    lines = []
    scenes, report = published, PrintAll(published, lines.append)
    counts = CocoCounts(
        images={"train": 6, "val": 3},
        instances={split: len(read_instances(scenes / "coco", split).labels) for split in ("train", "val")},
        empty_boxes={"train": 0, "val": 0},
        category_ids=frozenset(CATEGORY_IDS),
    )
    check_coco(scenes / "coco", report, Depth(full=True), expected=counts)
    check_ade20k(scenes / "ade20k", report, Depth(full=True), expected=ExpectedCounts(classes=13, train=6, val=3))
    assert lines and all(line.startswith("ok ") for line in lines), lines


def test_the_check_of_scenes_has_nothing_to_object_to(scenes):
    lines = []
    check_scenes(scenes, PrintAll(scenes, lines.append), Depth(full=True))
    assert lines and all(line.startswith("ok ") for line in lines), lines
    assert sum("2017.json: 10 categories" in line for line in lines) == 3


def test_the_check_of_the_originals_says_no_more_than_that_much_is_missing(published):
    """With the originals' classes, their counts are expected; with others, the set is one's own."""
    scenes, found = published, []
    for _ in range(2):
        lines = []
        report = PrintAll(scenes, lines.append)
        check_coco(scenes / "coco", report, Depth(full=True))
        check_ade20k(scenes / "ade20k", report, Depth(full=True))
        found.append([line for line in lines if not line.startswith("ok ")])
        for file in (scenes / "coco/annotations").iterdir():
            content = json.loads(file.read_text())
            for row, name in zip(content["categories"], ("person", "car", "dog", "cat", "bus", "cow")):
                row["name"] = name
            known = ("truck", "boat", "bench", "bird", "horse", "sheep", "bear", "zebra", "kite", "cup", "fork", "bed")
            known += (
                "knife",
                "spoon",
                "bowl",
                "apple",
                "pizza",
                "cake",
                "chair",
                "tv",
                "mouse",
                "oven",
                "sink",
                "book",
            )
            known += ("clock", "vase", "train", "giraffe", "tie", "skis", "bottle", "couch", "toilet", "laptop")
            content["categories"] += [{"id": 100 + place, "name": name} for place, name in enumerate(known)]
            file.write_text(json.dumps(content))
        (names,) = (scenes / "ade20k").glob("objectInfo*.txt")
        names.unlink()
        rows = [f"{number}\tthing {number}" for number in range(1, 151)]
        (scenes / "ade20k/objectInfo150.txt").write_text("\n".join(["Idx\tName", *rows]))
    own, original = found
    # images, instances and categories of each split of COCO; the pairs of each split of ADE20K
    assert not own and len(original) == 2 * 3 + 2 and all(" expected" in line for line in original), found
