"""One's own pictures without an edit of params.yaml: the split, the recipe, the training and what comes after it."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.data.own import parse_own, split_own
from repro.runs.own import SMALL, choose_recipe


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
    paths = Paths(tmp_path / "checkout")
    own = parse_own(f"folder:{source}")
    split_own(paths, own)
    with open(paths.root / "data" / own.name / "split.csv", newline="") as stream:
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


@pytest.mark.parametrize("count", [2, 3])
def test_a_small_class_is_on_both_sides(tmp_path, count):
    found = split(tmp_path, draw(tmp_path / "pets", {"cat": 20, "dog": count}))
    assert {side for file, side in found.items() if file.startswith("dog/")} == {"train", "val"}


def test_a_csv_names_files_and_labels(tmp_path):
    draw(tmp_path / "scans", {"a": 4, "b": 4})
    rows = [f"scans/{name}/{i:03d}.png,{label}" for name, label in (("a", "cat"), ("b", "dog")) for i in range(4)]
    (tmp_path / "list.csv").write_text("\n".join(["file,label", *rows]))
    found = split(tmp_path, tmp_path / "list.csv")
    assert len(found) == 8
    assert {p.name for p in (tmp_path / "checkout/data/own_list/train").iterdir()} == {"cat", "dog"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("name,kind\na.png,cat", "columns"),
        ("file,label\nmissing.png,cat", "line 2"),
        ("file,label\n../x.png,cat", "below"),
        ("file,label\nscans/a/000.png,cat\nscans/a/000.png,dog", "two labels"),
        ("file,label\nscans/a/000.png,a/b", "name of a class"),
        ("file,label\nscans/a/000.png,cat\nscans/a/001.png,cat", "two classes"),
        ("file,label\nscans/a/000.png,cat\nscans/b/001.png,dog", "one picture"),
    ],
)
def test_a_bad_csv_is_refused(tmp_path, text, word):
    draw(tmp_path / "scans", {"a": 4, "b": 4})
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(UserError, match=word) as caught:
        split(tmp_path, tmp_path / "list.csv")
    assert "\n" not in str(caught.value) and not (tmp_path / "checkout/data").exists()


@pytest.mark.parametrize(("counts", "word"), [({"cat": 5}, "two classes"), ({"cat": 5, "dog": 1}, "dog")])
def test_a_folder_without_two_classes_is_refused(tmp_path, counts, word):
    with pytest.raises(UserError, match=word):
        split(tmp_path, draw(tmp_path / "pets", counts))


@pytest.mark.parametrize(
    ("data", "word"), [("folder:", "no such"), ("folder:nowhere", "nowhere"), ("zip:a", "folder:PATH")]
)
def test_what_names_no_data_is_refused(data, word):
    with pytest.raises(UserError, match=word):
        parse_own(data)
    assert parse_own("digits") is None


@pytest.mark.parametrize("images", [100, 1_000, SMALL - 1, SMALL, 1_000_000])
@pytest.mark.parametrize("model", ["vittt_nano_patch16_144", "vittt_tiny_patch16_224"])
def test_a_recipe_has_enough_steps_for_any_number_of_pictures(images, model):
    params = choose_recipe("folder:x", images, model, 144, init=None, flip=False, epochs=None)
    steps = params.epochs * (images // params.batch_size)
    assert params.batch_size <= images and params.optim.warmup_epochs < params.epochs
    assert steps >= 900 and params.epochs <= 300
    assert params.transform.hflip == 0 and params.max_unreadable <= images / 100


def test_from_class_folders_to_a_prediction(checkout, repro_cli, tmp_path):
    source = draw(tmp_path / "lamps", {"off": 24, "on": 6})
    code, out, err = repro_cli(
        "pretrain", "--data", f"folder:{source}", "--epochs", "2", "--model", "vim_nano_patch16_144"
    )
    assert code == 0, err
    weights = Path(os.getcwd()) / "results/own/lamps/vim_nano_patch16_144-2epochs/weights.safetensors"
    assert weights.is_file() and str(weights) in out and "top-1" in out
    code, out, err = repro_cli("evaluate", "--weights", str(weights), "--data", f"folder:{source}")
    assert code == 0 and "top-1" in out, err
    code, out, err = repro_cli("predict", str(source / "on/000.png"), "--weights", str(weights))
    assert code == 0 and ("on" in out or "off" in out), err
    code, out, err = repro_cli("pretrain", "--data", f"folder:{source}", "--from", str(weights), "--epochs", "1")
    assert code == 0 and "from_weights" in out, err


def test_imbalance_is_said(checkout, repro_cli, tmp_path):
    source = draw(tmp_path / "lamps", {"off": 80, "on": 3})
    code, out, err = repro_cli("prepare-data", "--cell", f"folder:{source}")
    assert code == 0 and "favour off" in out, err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--flip",),
        ("--model", "vim_nano_patch16_144"),
        ("--data", "folder:.", "--cell", "nano"),
        ("--data", "coco:."),
        ("--data", "digits"),
    ],
)
def test_options_that_do_not_go_together_are_refused(checkout, repro_cli, arguments):
    code, _, err = repro_cli("pretrain", *arguments)
    assert code == 2 and "--data" in err and err.count("\n") == 1
