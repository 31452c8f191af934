"""One's own pictures without an edit of params.yaml: the split, the recipe, the training and what comes after it."""

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from repro.data.ade20k import AdePairs
from repro.data.coco import read_instances
from repro.data.own import parse_own, split_own
from repro.data.prepare import prepare_own
from repro.data.settings import TransformSettings
from repro.runs.own import SMALL, OwnTraining, choose_detector, choose_recipe, choose_segmenter, train_own
from repro.tasks.classification.spec import Classify
from repro.training.params import InitParams
from tests.data_sets.conftest import cut
from tests.data_sets.made import annotation
from tests.slow import slow
from tests.stages.helpers import read_metrics, save_model


def draw(folder: Path, counts: dict[str, int]) -> Path:
    """Pictures of 8 x 8 pixels, bright for one class and dark for another."""
    generator = np.random.default_rng(0)
    for place, (label, count) in enumerate(counts.items()):
        for number in range(count):
            file = folder / label / f"{number:03d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 40, (8, 8, 3)) + 200 * (place % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(file)
    return folder


def split(tmp_path: Path, source: Path) -> dict[str, str]:
    own = parse_own(f"folder:{source}")
    split_own(Paths(tmp_path / "checkout"), own)
    with open(tmp_path / "checkout/data" / own.name / "split.csv", newline="") as stream:
        return {row["file"]: row["split"] for row in csv.DictReader(stream)}


def test_every_picture_is_on_one_side_and_stays_there(tmp_path):
    source = draw(tmp_path / "pets", {"cat": 30, "dog": 12})
    before = split(tmp_path, source)
    assert set(before) == {f.relative_to(source).as_posix() for f in source.rglob("*.png")}
    draw(source, {"cat": 40, "dog": 12})
    after = split(tmp_path, source)
    assert len(after) == 52 and all(after[file] == side for file, side in before.items())
    root = tmp_path / "checkout/data/own_pets"
    for file, side in after.items():
        link = root / side / Path(file).parent / file.replace("/", "__")
        assert link.resolve() == source / file


def test_links_are_made_again_only_where_something_changed(tmp_path):
    source, root = draw(tmp_path / "pets", {"cat": 6, "dog": 6}), tmp_path / "checkout/data/own_pets"
    before = split(tmp_path, source)
    made = root.stat().st_ino
    (tmp_path / "checkout/data/own_pets.tmp").mkdir()  # somebody's
    assert split(tmp_path, source) == before and root.stat().st_ino == made
    link = next((root / "train/cat").iterdir())
    target = link.readlink()
    for spoil in (lambda: None, lambda: link.symlink_to(source / "dog/000.png")):
        link.unlink()
        spoil()
        assert split(tmp_path, source) == before and link.readlink() == target
    assert sorted(path.name for path in root.parent.iterdir()) == ["own_pets", "own_pets.tmp"]


def test_a_small_class_is_on_both_sides(tmp_path):
    found = split(tmp_path, draw(tmp_path / "pets", {"cat": 20, "dog": 2}))
    assert {side for file, side in found.items() if file.startswith("dog/")} == {"train", "val"}


def test_two_pictures_of_one_name_are_refused_and_an_unfinished_split_is_in_nobodys_way(tmp_path):
    source = draw(tmp_path / "pets", {"cat": 20, "dog": 20})
    before = set(split(tmp_path, source))
    (source / "cat/a").mkdir()
    for name in ("a/b.png", "a__b.png"):
        (source / "cat" / name).write_bytes((source / "cat/000.png").read_bytes())
    # both on one side, whatever their hashes say
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="a__b.png"):
        patch.setattr("repro.data.own._is_held_out", lambda file: file.endswith("000.png"))
        split(tmp_path, source)
    (source / "cat/a__b.png").unlink()
    assert set(split(tmp_path, source)) == before | {"cat/a/b.png"}


def test_an_unreadable_picture_is_refused_where_no_training_replaces_it(tmp_path):
    for split in ("train", "val"):
        cut(draw(tmp_path / "pets" / split, {"cat": 4, "dog": 4}) / "dog/002.png")
    with pytest.raises(UserError, match=r"pets/val/dog/002\.png: unreadable"):
        prepare_own(f"folder:{tmp_path / 'pets'}", Paths(tmp_path / "checkout"), Runtime(data_roots={}))
    draw(tmp_path / "pets/val", {"cat": 4, "dog": 4})
    prepare_own(f"folder:{tmp_path / 'pets'}", Paths(tmp_path / "checkout"), Runtime(data_roots={}))


def test_a_csv_names_files_and_labels(tmp_path):
    draw(tmp_path / "scans", {"a": 4, "b": 4})
    rows = [f"scans/{name}/{i:03d}.png,{label}" for name, label in (("a", "cat"), ("b", "dog")) for i in range(4)]
    (tmp_path / "list.csv").write_text("\n".join(["file,label", *rows]))
    found = split(tmp_path, tmp_path / "list.csv")
    assert len(found) == 8
    assert {p.name for p in (tmp_path / "checkout/data/own_list/train").iterdir()} == {"cat", "dog"}


BAD_CSVS = {
    "name,kind\na.png,cat": "columns",
    "file,label\nmissing.png,cat": "line 2",
    "file,label\n../x.png,cat": "below",
    "file,label\nscans/a/000.png,cat\nscans/a/000.png,dog": "two labels",
    "file,label\nscans/a/000.png,a/b": "name of a class",
    "file,label\nscans/a/000.png,cat\nscans/a/001.png,cat": "two classes",
    "file,label\nscans/a/000.png,cat\nscans/b/001.png,dog": "one picture",
}


@pytest.mark.parametrize("text", BAD_CSVS)
def test_a_bad_csv_is_refused(tmp_path, text):
    draw(tmp_path / "scans", {"a": 4, "b": 4})
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(UserError, match=BAD_CSVS[text]) as caught:
        split(tmp_path, tmp_path / "list.csv")
    assert "\n" not in str(caught.value) and not (tmp_path / "checkout/data").exists()


@pytest.mark.parametrize("images", [100, SMALL - 1, SMALL, 1_000_000])
def test_a_recipe_has_enough_steps_for_any_number_of_pictures(images):
    params = choose_recipe(OwnTraining(data="folder:x", model="vittt_nano_patch16_144"), images, 144)
    steps = params.epochs * (images // params.batch_size)
    assert params.batch_size <= images and params.optim.warmup_epochs < params.epochs
    assert steps >= 900 and params.epochs <= 300
    assert params.transform.hflip == 0 and params.max_unreadable <= images / 100


def test_from_class_folders_to_a_prediction(checkout, repro_cli, tmp_path):
    source = draw(tmp_path / "lamps", {"off": 80, "on": 3})
    data, model = f"folder:{source}", "vim_nano_patch16_144"
    out = repro_cli.run("pretrain", "--data", data, "--epochs", "2", "--model", model)
    assert "favour off" in out
    weights = checkout / f"artifacts/own/lamps/{model}-2epochs/weights.safetensors"
    assert weights.is_file() and str(weights) in out and "top-1" in out
    assert "top-1" in repro_cli.run("evaluate", "--weights", str(weights), "--data", data)
    assert "off" in repro_cli.run("predict", str(source / "on/000.png"), "--weights", str(weights))
    assert "from_weights" in repro_cli.run("pretrain", "--data", data, "--from", str(weights), "--epochs", "1")


def test_given_weights_see_pictures_as_before(checkout, tmp_path, monkeypatch):
    """timm's ViTs saw pixels in [-1, 1], and DeiT with ImageNet's mean and std."""
    cells, data = [], f"folder:{draw(tmp_path / 'pets', {'cat': 4, 'dog': 4})}"
    monkeypatch.setattr("repro.runs.own.train_cells", lambda found, gpus: cells.extend(found))
    others = {"epochs": 1, "seeds": 1, "flip": False, "sha256": None, "gpus": None, "without": {}}
    for model in ("vit_tiny_patch16_224", "deit_tiny_patch16_224"):
        torch.save(timm.create_model(model, depth=1).state_dict(), tmp_path / f"{model}.pth")
        train_own("pretrain", Classify(), data, model=model, source=tmp_path / f"{model}.pth", **others)
    vit, deit = (cell.params.transform for cell in cells)
    assert (vit.image_size, vit.mean, vit.std) == (224, (0.5,) * 3, (0.5,) * 3)
    assert deit == dataclasses.replace(vit, mean=TransformSettings.mean, std=TransformSettings.std)


def test_a_set_is_one_training_however_its_path_is_written(checkout, tmp_path, monkeypatch):
    cells, pets = [], draw(tmp_path / "pets", {"cat": 4, "dog": 4})
    monkeypatch.setattr("repro.runs.own.train_cells", lambda found, gpus: cells.extend(found))
    given = {"model": None, "source": None, "epochs": 1, "seeds": 1, "flip": False, "gpus": None, "without": {}}
    for place in (pets, f"{pets}/", "../pets", "./../pets"):
        train_own("pretrain", Classify(), f"folder:{place}", sha256=None, **given)
    assert len({cell.state_folder(0) for cell in cells}) == 1
    with pytest.raises(UserError, match="--sha256"):
        train_own("pretrain", Classify(), f"folder:{pets}", sha256="0" * 8, **given)


SIDE = 64  # of a picture of scenes, in pixels


def draw_scenes(root: Path, count: int = 4, classes: tuple[str, ...] = ("lamp", "door")) -> Path:
    """`root` as COCO without the years and as ADE20K at once: a bright rectangle of one class in each picture."""
    generator = np.random.default_rng(0)
    listed = [{"id": 3 * number + 1, "name": name} for number, name in enumerate(classes)]
    for split, folder in (("train", "training"), ("val", "validation")):
        images, annotations = [], []
        for number in range(count):
            kind, (x, y) = number % len(classes), generator.integers(0, SIDE - 24, 2).tolist()
            pixels = generator.integers(0, 40, (SIDE, SIDE, 3)).astype(np.uint8)
            labels = np.full((SIDE, SIDE), len(classes) + 1, np.uint8)
            pixels[y : y + 24, x : x + 24] += 200 - 80 * kind
            labels[y : y + 24, x : x + 24] = kind + 1
            name = f"{number:03d}.png"
            for place, content in ((split, pixels), (f"images/{folder}", pixels), (f"annotations/{folder}", labels)):
                (root / place).mkdir(parents=True, exist_ok=True)
                Image.fromarray(content).save(root / place / name)
            annotations.append(annotation(number + 1, number, 3 * kind + 1, [x, y, 24, 24]))
            images.append({"id": number, "file_name": name, "height": SIDE, "width": SIDE})
        content = {"images": images, "annotations": annotations, "categories": listed}
        (root / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    (root / "classes.txt").write_text("\n".join([*classes, "wall"]))
    return root


SCENES = [("detect", "boxes", "mask AP"), ("segment", "ade20k", "mIoU"), slow("detect", "coco", "box AP")]


@pytest.mark.parametrize(("stage", "kind", "score"), SCENES)
def test_from_scenes_to_a_prediction(checkout, repro_cli, tmp_path, stage, kind, score):
    source, model = draw_scenes(tmp_path / "rooms"), "vim_nano_patch16_144"
    if kind == "boxes":
        for file in (TRAIN, VAL):
            change(lambda found: [row.pop("segmentation") for row in found["annotations"]])(source / file)
    out = repro_cli.run("data", "check", kind, str(source))
    assert "no errors" in out and "lamp" in out
    out = repro_cli.run(stage, "--data", f"{kind}:{source}", "--epochs", "1", "--model", model)
    weights = checkout / f"artifacts/own/rooms_{kind}/{model}-1epochs/weights.safetensors"
    assert weights.is_file() and str(weights) in out and score in out
    picture = str(source / "val/000.png")
    repro_cli.run("predict", picture, "--weights", str(weights), "--min-score", "0")
    found = json.loads(Path("predictions", stage, "predictions.json").read_text())["pictures"]["000.png"]
    names = set(found) if stage == "segment" else {each["class"] for each in found}
    assert names <= {"lamp", "door", "wall"} and (names or stage == "detect")


@pytest.mark.parametrize("count", [2, 40, SMALL])
@pytest.mark.parametrize("given", [None, InitParams(weights="x")])
def test_a_recipe_fits_any_number_of_scenes(tmp_path, monkeypatch, count, given):
    source = draw_scenes(tmp_path / "rooms", 2)
    instances, pairs = read_instances(source, "train"), AdePairs(source, "train")
    monkeypatch.setattr("repro.data.detection.CocoDetection.__len__", lambda self: count)
    monkeypatch.setattr(AdePairs, "__len__", lambda self: count)
    monkeypatch.setattr("repro.data.ade20k.survey", lambda pairs: (np.array([[64, 64]]), np.array([10, 10, 1000])))
    for choose, found in ((choose_detector, instances), (choose_segmenter, pairs)):
        params = choose(OwnTraining(data="x", model="vim_nano_patch16_144", init=given), found)
        steps = params.epochs * (count // params.batch_size)
        assert params.batch_size <= count and params.optim.warmup_steps < steps and not params.optim.milestones
        assert steps >= min(300 * (count // params.batch_size), 400 if given else 1100)
        assert (params.optim.layer_decay is None) == (given is None) and params.transform.hflip == 0
    weights = params.upernet.class_weights
    assert weights[0] == weights[1] > weights[2]


@pytest.mark.parametrize(("side", "short"), [(64, 128), (200, 200), (3000, 512)])
def test_the_median_picture_and_object_set_the_sizes(tmp_path, side, short):
    """One odd picture changes nothing, and the middle one of five anchors is as large as the median object, up to the published 128."""
    instances = read_instances(draw_scenes(tmp_path / "rooms", 5), "train")
    sizes = np.array([[side, 2 * side]] * 4 + [[40, 9000]])
    boxes = instances.boxes * side / SIDE
    found = dataclasses.replace(instances, sizes=sizes, boxes=boxes)
    params = choose_detector(OwnTraining(data="x", model="vim_nano_patch16_144", flip=True, epochs=3), found)
    assert (params.transform.min_size, params.transform.max_size) == ((short,), 2 * short)
    assert 16 * params.mask_rcnn.anchor_scale == pytest.approx(min(128, 24 * short / SIDE), rel=0.02)
    assert params.transform.hflip == 0.5 and params.epochs == 3


def prepare_rooms(root: Path, kind: str) -> None:
    prepare_own(f"{kind}:{root / 'rooms'}", Paths(root / "checkout"), Runtime(data_roots={}))


def blank(folder):
    for file in folder.iterdir():
        Image.new("L", (SIDE, SIDE)).save(file)


def write(*names):
    return lambda file: file.write_text("\n".join(names))


def change(function):
    def spoil(file):
        content = json.loads(file.read_text())
        function(content)
        file.write_text(json.dumps(content))

    return spoil


TRAIN, VAL = (f"annotations/instances_{split}.json" for split in ("train", "val"))


@pytest.mark.parametrize(
    ("kind", "file", "spoil", "words"),
    [
        ("coco", TRAIN, change(lambda found: found["annotations"][0].update(bbox=[-9, 5, 24, 24])), "without area: 1"),
        ("coco", TRAIN, change(lambda found: found.update(annotations=found["annotations"][::2])), "door: 0 training"),
        ("coco", TRAIN, change(lambda found: found["annotations"][0].update(iscrowd=1)), "left out: crowds (1)"),
        ("ade20k", "classes.txt", write("lamp", "door", "wall", "sky"), "sky: 0 pixels"),
    ],
)
def test_what_training_survives_is_said(tmp_path, capsys, kind, file, spoil, words):
    source = draw_scenes(tmp_path / "rooms")
    prepare_rooms(tmp_path, kind)
    assert words not in capsys.readouterr().out
    spoil(source / file)
    prepare_rooms(tmp_path, kind)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "file", "spoil", "word"),
    [
        ("coco", "train/001.png", cut, "001.png"),
        ("coco", "val/001.png", Path.unlink, "001.png: no such file"),
        ("coco", TRAIN, change(lambda found: found.update(categories=[])), "category_id"),
        ("coco", VAL, change(lambda found: found.update(annotations=[])), "val.json: has no"),
        ("coco", VAL, change(lambda found: found["categories"].pop()), "category_id"),
        ("coco", TRAIN, change(lambda found: found["annotations"][1].pop("segmentation")), "boxes:PATH"),
        ("coco", VAL, Path.unlink, "instances_val2017.json"),
        ("ade20k", "annotations/training/001.png", cut, "001.png"),
        ("ade20k", "images/validation/001.png", cut, "001.png"),
        ("ade20k", "annotations/training/001.png", Path.unlink, "no label map"),
        ("ade20k", "classes.txt", write("lamp", "wall"), "label 3"),
        ("ade20k", "classes.txt", write("lamp", "lamp", "wall"), "classes.txt"),
        ("ade20k", "classes.txt", write("lamp"), "one class"),
        ("ade20k", "classes.txt", Path.unlink, "classes.txt"),
        ("ade20k", "annotations/training", blank, "training"),
    ],
)
def test_scenes_that_cannot_be_learned_are_one_line_and_leave_nothing(tmp_path, kind, file, spoil, word):
    spoil(draw_scenes(tmp_path / "rooms", 3) / file)
    with pytest.raises(UserError, match=word) as caught:
        prepare_rooms(tmp_path, kind)
    assert "\n" not in str(caught.value) and not (tmp_path / "checkout").exists()


def test_one_scene_is_too_few_to_segment(tmp_path):
    draw_scenes(tmp_path / "rooms", 1)
    with pytest.raises(UserError, match="one training picture"):
        prepare_rooms(tmp_path, "ade20k")


PLACES = "{0}/pets/ {0}/x/../pets {0}/link ./../pets ~/link/../pets"


def test_a_set_has_one_record_however_its_path_is_written_and_none_tells_the_path(
    checkout, repro_cli, tmp_path, monkeypatch
):
    source = draw(tmp_path / "pets", {f"digit_{digit}": 2 for digit in range(10)})
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "x").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    weights = save_model("w.safetensors", "vittt_nano_patch16_144", depth=1, img_size=32)
    repro_cli.run("prepare-data", "--cell", "folder:../pets")
    for place in PLACES.format(tmp_path).split():
        repro_cli.run("evaluate", f"--data=folder:{place}", "--weights", weights)
        assert not list(Path("results/replications").rglob("*own_*"))  # pages report what lies there
        (record,) = Path("results/own/pets").glob("*/evaluate/*_own_*[!n].json")
        assert "_own_pets_32_" in record.name and read_metrics(record)["data"] == "own_pets"
        text = record.read_text()
        assert not [word for word in (str(tmp_path), tmp_path.name, "..", "~") if word in text.replace(".../", "")]
        record.unlink()
