"""Small copies of the real layouts; each fault is planted, found, named and counted."""

import functools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from repro.core.errors import RunError, UserError
from repro.data.ade20k import AdePairs
from repro.data.check.run import Depth, draw_sample, run_check, run_parallel
from repro.data.coco import read_instances
from repro.data.detection import CocoDetection
from repro.data.kinds import KINDS, Release, load_function
from repro.data.settings import (
    ConnectSettings,
    DetectionTransformSettings,
    DigitsSettings,
    ExpectedCounts,
    ScenesSettings,
)
from repro.data.tree import scan_tree
from tests.data_sets.conftest import FULL, SMALL, WNIDS, cut, findings, only
from tests.data_sets.made import annotation, image, picture, write_ade20k, write_coco


def check_small(root, depth=FULL):
    return findings("imagenet", root, depth, SMALL)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_complete_imagenet(imagenet, workers):
    lines, errors, warnings = check_small(imagenet, Depth(full=True, workers=workers))
    assert (errors, warnings) == (0, 0) and [line.split(maxsplit=1) for line in lines] == [
        ["ok", "train: 3 classes"],
        ["ok", "train: 12 images"],
        ["ok", "val: 3 classes"],
        ["ok", "val: 6 images"],
        ["ok", "val: images lie in the folders of their classes (6 of 6 agree with the ReaL labels)"],
        ["ok", "train: images decode, all 12"],
        ["ok", "val: images decode, all 6"],
    ]


def test_against_imagenet_1k_it_is_incomplete(imagenet):
    lines, errors, _ = findings("imagenet", imagenet)
    assert errors == 4
    text = "\n".join(only(lines, "error"))
    assert "train: 3 classes (missing: n01491361, n01494475, n01496331, ...), 1,000 expected" in text
    assert "12 images, 1,281,167 expected" in text and "6 images, 50,000 expected" in text


def flat_val(root):
    for file in list((root / "val").glob("*/*")):
        file.rename(root / "val" / file.name)
    for wnid in WNIDS:
        (root / "val" / wnid).rmdir()


def first(root, split="train"):
    return sorted((root / split).glob("*/*.JPEG"))[0]


def rotate_val(root):
    for a, b in (("x", 0), (0, 1), (1, 2), (2, "x")):
        source, target = (WNIDS[n] if isinstance(n, int) else n for n in (b, a))
        (root / "val" / source).rename(root / "val" / target)


def nowhere(root):
    (root / "train" / WNIDS[0] / "nowhere.JPEG").symlink_to(root / "gone")


def deepen(root):
    """As in the layout of Tiny ImageNet."""
    for wnid in WNIDS:
        (root / "train" / wnid).rename(root / "x")
        (root / "train" / wnid).mkdir()
        (root / "x").rename(root / "train" / wnid / "images")


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


def rename_class(root):
    for folder in root.glob(f"*/{WNIDS[0]}"):
        folder.rename(folder.parent / "tench")


# name -> what is planted, the number of errors that follow, and the beginning of the line that names it
TREE_FAULTS = {
    "flat val": (flat_val, 1, "val: holds 6 images outside of class folders; sort them into one folder per class"),
    "cut": (lambda r: cut(first(r)), 1, "train/n01440764/n01440764_0.JPEG: unreadable image (image file is truncated"),
    # the link and the count
    "link to nothing": (lambda r: [first(r).unlink(), nowhere(r)], 2, "nowhere.JPEG: this link is broken; remove it"),
    "empty file": (lambda r: first(r, "val").write_bytes(b""), 1, "is empty; get it again"),
    "a web page": (lambda r: first(r).write_text("<html>no"), 1, "unreadable image (not in any image format)"),
    # the folder is empty, and classes and images are too few
    "empty class": (lambda r: empty(r / "train" / WNIDS[1]), 3, "train/n01443537: holds no image"),
    # val has two classes instead of three and 4 of 6 images, and train has one class more
    "no class": (lambda r: shutil.rmtree(r / "val" / WNIDS[2]), 3, "class 'n01484850' is in train but not in val"),
    "count": (lambda r: first(r, "val").unlink(), 1, "val: 5 images, 6 expected; complete the data"),
    "renamed": (rename_class, 2, "val/tench: is not a class"),  # one in each split
    "wrong map": (rotate_val, 1, "val: images lie in folders of wrong classes: 0 of 6 agree with the ReaL labels"),
    "loose": (lambda r: picture(r / "train" / "a.jpg"), 1, "train: holds 1 image outside of class folders"),
    # three folders, and the counts of classes and images
    "too deep": (deepen, 3 + 2, "train/n01440764: has no images, only the folder images/; move the images up"),
}


def test_the_folder_inside_is_proposed(imagenet, tmp_path):
    inner = tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC"
    inner.parent.mkdir(parents=True)
    imagenet.rename(inner)
    lines, errors, _ = check_small(tmp_path / "kaggle")
    assert errors == 2 and len(lines) == 2
    assert lines[0].endswith(f"train: no such folder; take {inner} as the root")


def test_other_files_and_other_names_are_warnings(imagenet):
    for name in (f"train/{WNIDS[0]}/notes.txt", "train/n01491361.tar", "train/.DS_Store", "val/LOC_val_solution.csv"):
        (imagenet / name).write_bytes(b"x")
    for place, file in enumerate(sorted((imagenet / "val").glob("*/*.JPEG"))):
        file.rename(file.with_name(f"{place}.jpeg"))
    lines, errors, warnings = check_small(imagenet)
    assert (errors, warnings) == (0, 4)
    for line, words in zip(only(lines, "warning"), ("train n01491361.tar", "train notes.txt", "val LOC_val", "names")):
        assert all(word in line for word in words.split()), line


def test_ten_are_named_and_the_rest_counted(imagenet):
    for number in range(13):
        cut(picture(imagenet / "train" / WNIDS[0] / f"{WNIDS[0]}_{100 + number}.JPEG"))
    lines, errors, _ = findings(
        "imagenet", imagenet, official=Release(name="", counts=ExpectedCounts(classes=3, train=25, val=6))
    )
    assert errors == 13
    named = only(lines, "error")
    assert [line.split(":")[0][-8:] for line in named[:10]] == [f"{100 + number}.JPEG" for number in range(10)]
    assert named[10:] == ["... and 3 more like this"]


def test_the_sample(imagenet):
    sizes = {"train": 1000, "val": 100}
    lengths = [{s: len(c) for s, c in draw_sample(sizes, Depth(sample=n)).items()} for n in (0, 20, 500, 5000)]
    assert lengths == [{"train": 0, "val": 0}, {"train": 10, "val": 10}, {"train": 400, "val": 100}, sizes]
    first_seed, again, other = (draw_sample(sizes, Depth(sample=20, seed=seed)) for seed in (0, 0, 1))
    assert first_seed == again != other
    assert draw_sample(sizes, Depth(full=True, sample=1)) == {"train": list(range(1000)), "val": list(range(100))}

    cut(first(imagenet))
    first(imagenet, "val").write_bytes(b"")
    assert check_small(imagenet, Depth(sample=0))[1] == 1, "an empty file is found without decoding, a cut one is not"


CONNECT = ConnectSettings(image_size=96, train_pairs=3, tune_pairs=2, test_pairs=2, dashes=(1, 1))
DIGITS = DigitsSettings(image_size=16, tune_fraction=0.3)
SCENES = ScenesSettings(train=2, tune=1, test=2)


@pytest.mark.parametrize(
    ("kind", "settings", "counted", "gone", "says"),
    [
        ("digits", DIGITS, "1,797 images in all", "tune/digit_3/*.png", "1,796 images in all splits"),
        ("connect", CONNECT, "train: 3 pairs", "tune/joined/pair_00001.png", "is in one class alone"),
        ("scenes", SCENES, "test2017.json: 10 categories", "ade20k/annotations/testing/*.png", "has no label map"),
    ],
)
def test_a_set_that_the_project_writes(tmp_path, kind, settings, counted, gone, says):
    root = tmp_path / "set"
    load_function(KINDS[kind].writer)(root, settings)
    lines, errors, warnings = findings(kind, root, Depth(sample=20))
    assert (errors, warnings) == (0, 0) and counted in "\n".join(lines)
    next(root.glob(gone)).unlink()
    lines, errors, _ = findings(kind, root, Depth(sample=20))
    assert errors == 1 and says in only(lines, "error")[0]


# COCO: 3 training images with 4 instances, 2 validation images with 2 instances, and category ids of COCO
COCO_SMALL = Release(
    name="a part of COCO",
    counts=ExpectedCounts(classes=3, train=3, val=2),
    instances={"train": 4, "val": 2},
    category_ids=frozenset({1, 2, 90}),
)
TRAIN_JSON = "annotations/instances_train2017.json"


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    root = tmp_path / "coco"
    root.mkdir()
    categories = [{"id": 1, "name": "person"}, {"id": 2, "name": "bicycle"}, {"id": 90, "name": "toothbrush"}]
    train = [
        annotation(11, 9, 1, [0.0, 0.0, 64.0, 48.0]),
        annotation(12, 9, 2, [10.5, 3.25, 20.1, 30.07]),
        annotation(13, 25, 90, [1.0, 1.0, 5.0, 5.0]),
        annotation(14, 25, 1, [40.0, 30.0, 24.3, 18.0]),
    ]
    val = [annotation(21, 30, 1, [2.0, 2.0, 8.0, 8.0]), annotation(22, 34, 2, [2.0, 2.0, 8.0, 8.0])]
    for split, ids, instances in (("train2017", (9, 25, 42), train), ("val2017", (30, 34), val)):
        images = [image(number, 64, 48) for number in ids]
        write_coco(root, {"images": images, "annotations": instances, "categories": categories}, split)
    return root


def change(key, *places, **values):
    """Plant `values` in entries of the training annotations; None removes a key."""

    def plant(root):
        content = json.loads((root / TRAIN_JSON).read_text())
        for place in places:
            entry = content[key][place] | values
            content[key][place] = {name: value for name, value in entry.items() if value is not None}
        (root / TRAIN_JSON).write_text(json.dumps(content))

    return plant


def test_a_complete_coco(coco):
    lines, errors, warnings = findings("coco", coco, official=COCO_SMALL)
    assert (errors, warnings) == (0, 0) and [line.rpartition(": ")[2] for line in lines] == [
        *("3 categories with ids of 1..90", "3 images", "4 instances", "4 of 4 annotations are learned"),
        *("2 of 3 images have targets", "person 50.0%, bicycle 25.0%, toothbrush 25.0%"),
        *("3 categories with ids of 1..90", "2 images", "2 instances", "2 of 2 annotations are learned"),
        *("2 of 2 images have targets", "person 50.0%, bicycle 50.0%, toothbrush 0.0%"),
        "images decode and have the annotations' sizes, all 5",
    ]
    assert [line.count("train2017.json") - line.count("val2017.json") for line in lines] == [1] * 6 + [-1] * 6 + [0]
    ids = KINDS["coco"].official.category_ids
    assert len(ids) == 80 and {1, 90} <= ids and 12 not in ids


def lie_deeper(root):
    (root / "train2017").rename(root / "x")
    (root / "train2017").mkdir()
    (root / "x").rename(root / "train2017" / "train2017")


def lie_elsewhere(root):
    (root / "images").mkdir()
    (root / "train2017").rename(root / "images" / "train2017")


PHOTO = "train2017/000000000025.png"
COCO_FAULTS = {
    "an image is missing": (lambda r: (r / PHOTO).unlink(), 1, f"{PHOTO}: no such file, instances_train"),
    "an image is cut": (lambda r: cut(r / PHOTO), 1, f"{PHOTO}: unreadable image ("),
    "JSON cut": (lambda r: cut(r / TRAIN_JSON), 1, f"{TRAIN_JSON}: is not valid JSON ("),
    "no JSON": (lambda r: (r / TRAIN_JSON).unlink(), 1, f"{TRAIN_JSON}: No such file or directory; "),
    "captions": (lambda r: (r / TRAIN_JSON).write_text('{"images": [], "annotations": []}'), 1, "no list 'categories'"),
    "a list": (lambda r: (r / TRAIN_JSON).write_text("[1, 2]"), 1, "has no list 'images'"),
    "size": (change("images", 1, width=65), 1, f"{PHOTO}: is 64×48, instances_train2017.json says 65×48; boxes"),
    "turned": (change("images", 2, width=48, height=64), 1, "is 64×48, instances_train2017.json says 48×64 (turned"),
    # the row, and the number of remaining images
    "image twice": (change("images", 2, id=25), 2, "images[2] has id 25, as another one has"),
    # an id of the release is missing in the file, and so is the category of an instance
    "categories": (change("categories", 2, id=80), 2, "unknown id 80 among 3 categories, 3 expected"),
    "category of an instance": (change("annotations", 1, category_id=3), 1, "annotation 12 has category_id 3, which"),
    "no such image": (change("annotations", 1, image_id=7), 1, "annotation 12 has image_id 7, which is not in the"),
    "box is no number": (change("annotations", 0, bbox=[float("nan"), 0, 5, 5]), 1, "is not valid JSON (NaN"),
    "no box": (change("annotations", 3, bbox=None), 1, "annotations[3] is malformed, it needs id, image_id, categor"),
    "no mask": (change("annotations", 3, segmentation=[]), 1, "annotation 14 has no segmentation"),
    # the folder, and three images
    "images one level deeper": (lie_deeper, 1 + 3, "train2017: has no images, only the folder train2017/; move the"),
    "images elsewhere": (lie_elsewhere, 1, "images/train2017 here"),
}


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (change("annotations", 0, bbox=[1.0, 1.0, 5.0, 0.0]), "annotation 11: box [1.0, 1.0, 5.0, 0.0] has no area"),
        (change("annotations", 0, bbox=[0.0, 0.0, 64.0, 49.5]), "annotation 11: box [0.0, 0.0, 64.0, 49.5] leaves"),
        (lambda r: picture(r / "val2017/stray.jpg"), "val2017: has 1 image that instances_val2017.json does not"),
    ],
)
def test_a_warning_of_coco(coco, plant, says):
    plant(coco)
    lines, errors, warnings = findings("coco", coco, official=COCO_SMALL)
    assert (errors, warnings) == (0, 1) and says in only(lines, "warning")[0]


# ADE20K: 3 + 2 pairs
ADE_SMALL = Release(name="a part of ADE20K", counts=ExpectedCounts(classes=150, train=3, val=2))


def label_map(path: Path, values, size: tuple[int, int] = (40, 32)) -> None:
    content = np.resize(np.array(values, dtype=np.uint8), (size[1], size[0]))
    Image.fromarray(content).save(path)


@pytest.fixture
def ade(tmp_path: Path) -> Path:
    root = tmp_path / "ADEChallengeData2016"
    for split, count in (("training", 3), ("validation", 2)):
        write_ade20k(root, classes=150, split=split, pairs=count, size=(32, 40))
    return root


@pytest.mark.parametrize("inside", [False, True])
def test_a_complete_ade20k(ade, inside):
    (ade.parent / "ADE20K_2021_17_01").mkdir()  # the other release may lie next to it
    lines, errors, warnings = findings("ade20k", ade.parent if inside else ade, official=ADE_SMALL)
    said = [line.rpartition("ADEChallengeData2016")[2] for line in lines[:5:4]]
    assert (errors, warnings, said) == (0, 0, [": 150 classes", ": images and label maps decode, all 5"])
    assert len(lines) == 6 and "class 150 " in lines[5]
    for line, words in zip(lines[1:4], ("training: 3 images", "validation: 2 images", "values in 0..150"), strict=True):
        assert words in line


IMAGE, LABEL = "images/training/ADE_00000002.jpg", "annotations/training/ADE_00000002.png"
NAMES = "objectInfo150.txt"


def drop_training(root):
    empty(root / "images/training")
    empty(root / "annotations/training")


def shift(root):
    for path in root.glob("annotations/*/*.png"):
        label_map(path, [0, 255, 149])


def convert(mode):
    return lambda root: Image.open(root / LABEL).convert(mode).save(root / LABEL)


def name_classes(text):
    return lambda root: (root / NAMES).write_text(text)


def turn(root):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 32)).save(root / IMAGE, exif=exif)


ADE_FAULTS = {
    # the pair, and the number of pairs
    "no label": (lambda r: (r / LABEL).unlink(), 2, f"{IMAGE}: has no label map"),
    "no image": (lambda r: (r / IMAGE).unlink(), 2, f"{LABEL}: has no image"),
    "image cut": (lambda r: cut(r / IMAGE), 1, f"{IMAGE}: unreadable image ("),
    "label cut": (lambda r: cut(r / LABEL), 1, f"{LABEL}: unreadable image ("),
    "label empty": (lambda r: (r / LABEL).write_bytes(b""), 1, f"{LABEL}: is empty"),
    "no image at all": (drop_training, 2, "images/training: holds no image; take ADE"),
    "size": (lambda r: label_map(r / LABEL, [0, 1], (32, 40)), 1, f"{LABEL}: is 32×40, its image 40×32"),
    "colours": (convert("RGB"), 1, f"{LABEL}: label map of mode RGB, one channel"),
    "another release": (lambda r: label_map(r / LABEL, [0, 151, 251]), 1, "150 expected; labels are of another"),
    "shifted": (shift, 5, f"{LABEL}: holds label 255, at most 150 expected; labels were already shifted down by one"),
    "no labels at all": (lambda r: shutil.rmtree(r / "annotations"), 2, "training: no such folder; take ADE"),
    "no classes": (lambda r: (r / NAMES).unlink(), 1, "expected one file objectInfo<K>.txt with the names of the"),
    "other classes": (name_classes("Idx\n1\twall\n3\tsky\n"), 1, f"{NAMES}: expected a heading and lines that begin"),
    "one name twice": (name_classes("Idx\n1\twall\n2\twall\n"), 1, f"{NAMES}: expected a heading and lines that begin"),
    "an empty list": (name_classes(""), 1, f"{NAMES}: expected a heading"),
    "turned by EXIF": (turn, 1, f"{LABEL}: is 40×32, its image 32×40"),
}


def read_coco(root):
    settings = DetectionTransformSettings(min_size=(48,), max_size=64)
    dataset = CocoDetection(read_instances(root, "train"), settings, training=False)
    for place in range(len(dataset)):
        dataset[(0, place)]


def read_ade20k(root):
    pairs = AdePairs(root, "train")
    for index in range(len(pairs)):
        pairs.read(index)


# fixture -> kind, release, faults, what training reads, and faults that it takes: a scan reads no contents, and knows
# neither names nor counts; boxes that leave their images are clipped
UNSEEN = ("cut", "empty file", "a web page", "count", "wrong map")
SETS = {
    "imagenet": ("imagenet", SMALL, TREE_FAULTS, functools.partial(scan_tree, kind="imagenet"), UNSEEN),
    "coco": ("coco", COCO_SMALL, COCO_FAULTS, read_coco, ()),
    "ade": ("ade20k", ADE_SMALL, ADE_FAULTS, read_ade20k, ()),
}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in SETS for fault in SETS[name][2]])
def test_a_fault_is_counted_and_named_and_training_raises_it_or_takes_the_data(request, name, fault):
    root, (kind, official, faults, read, taken) = request.getfixturevalue(name), SETS[name]
    plant, errors, message = faults[fault]
    plant(root)
    lines, found, _ = findings(kind, root, official=official)
    named = only(lines, "error")
    assert message in "\n".join(named) and found == errors, lines
    assert all("; " in line for line in named), "each says what to do"
    said = ""
    try:
        read(root)
    except UserError as error:
        said = str(error).removeprefix(f"{root}/")
    assert bool(said) == (fault not in taken) and "\n" not in said, said
    assert said.partition(" (and ")[0].partition("; ")[0] in "\n".join(lines), (said, lines)


def test_pairs_of_ade20k_by_hand(ade):
    for name in (".hidden.jpg", "notes.txt"):
        (ade / "images/training" / name).write_text("x")
    train, val = (AdePairs(root, split) for root, split in ((ade, "train"), (ade.parent, "val")))
    assert (len(train), len(val)) == (3, 2) and train.classes == tuple(f"class {i}" for i in range(1, 151))
    assert train.paths(2) == (ade / IMAGE, ade / LABEL) and train.name(2) == "ADE_00000002.jpg"
    for found, path in zip(train.read(2), train.paths(2), strict=True):
        with Image.open(path) as theirs:
            assert np.array_equal(found, np.asarray(theirs)) and found.dtype == np.uint8


def test_a_label_map_for_fewer_classes(tmp_path):
    root = write_ade20k(tmp_path, classes=13, size=(32, 40))
    label_map(root / LABEL, [13])
    AdePairs(root, "train").read(2)
    label_map(root / LABEL, [14])
    with pytest.raises(UserError, match="holds label 14, at most 13 expected"):
        AdePairs(root, "train").read(2)


@pytest.mark.parametrize(
    ("kind", "root", "message"),
    [
        ("imagnet", ".", "kind 'imagnet': unknown; did you mean 'imagenet'"),
        ("coco", "nowhere", "no such folder; give the folder that holds train2017/"),
        ("imagenet", __file__, "is not a folder"),
    ],
)
def test_the_users_mistakes(tmp_path, kind, root, message):
    with pytest.raises(UserError, match=message):
        run_check(kind, tmp_path / root, FULL)


def test_each_row_of_the_table_has_its_functions():
    for kind in KINDS.values():
        assert (kind.settings_key is None) == (kind.settings is None) and not (kind.embedded and kind.settings is None)
        if kind.embedded:
            writer = load_function(kind.writer)
            assert getattr(writer, "func", writer).__module__ == f"repro.data.{kind.writer.rpartition('.')[0]}"


def test_a_process_that_dies_ends_the_check_in_one_line():
    with pytest.raises(RunError, match="decoding: a process died, most likely for lack of memory; lower --workers"):
        list(run_parallel(os._exit, [3] * 40, 2))


def test_the_limit_of_pixels_is_the_setting_and_errors_are_an_exit_code(tmp_path, repro_cli, monkeypatch):
    for split in ("train", "val"):
        for number in range(10):
            picture(tmp_path / "pets" / split / "cat" / f"{number}.jpg")
    (tmp_path / "dvc.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    for most, expected in ((48 * 36, 0), (48 * 36 - 1, 1)):
        (tmp_path / "params.yaml").write_text(yaml.safe_dump({"runtime": {"max_pixels": most, "data_roots": {}}}))
        code, out, _ = repro_cli("data", "check", "folder", "pets", "--full", "--workers", "2")
        assert code == expected and ("runtime.max_pixels" in out) == bool(expected) and "again" not in out
