"""Folders of pictures whose `tune` is cut off `train` when they are opened, and folders with `test` in place of `val`."""

import itertools
import os
import shutil

import numpy as np
import pytest
import torch
import yaml

from repro.core.config import build
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.runtime import Runtime
from repro.data.cells import open_cell
from repro.data.classification import ImageFolder
from repro.data.kinds import PrepareData
from repro.data.prepare import prepare
from repro.data.tree import scan_tree
from repro.runs.tune import read_searches
from repro.tasks.classification.spec import SPEC
from tests.data_sets.conftest import cut, findings, only
from tests.data_sets.made import picture

CLASSES = ("bird", "cat", "dog")
CELL = {"kind": "folder", "expected": {"classes": 3, "train": 15, "tune": 9, "test": 6}}
CELL["tune_split"] = {"images_per_class": 3, "seed": 0}


@pytest.fixture
def pictures(tmp_path):
    """Three classes with 8 training and 2 test pictures each."""
    return make(tmp_path / "pictures", 1)


def make(root, step):
    """Write the pictures in order, or with a `step` of -1 the last one first."""
    for split, count in (("train", 8), ("test", 2))[::step]:
        for name in CLASSES[::step]:
            for number in range(count)[::step]:
                seed = 1000 * len(split) + 100 * CLASSES.index(name) + number
                picture(root / split / name / f"{number:04d}.jpg", (8, 8), seed=seed)
    return root


def opened(root, content, name="small", again=True):
    """The cell of these params on a folder, prepared `again` or as it was."""
    paths, runtime = Paths(root.parent), Runtime(data_roots={"folder": str(root)})
    if again:
        prepare(build(PrepareData, content, f"prepare_data.{name}"), paths, runtime, name)
    return open_cell(paths, runtime, name)


def list_files(tree) -> dict[str, list[str]]:
    """Split -> the paths of its images below the root."""
    return {
        split: [tree.path(split, index).relative_to(tree.root).as_posix() for index in range(len(files.names))]
        for split, files in tree.splits.items()
    }


def tuned(seed: int) -> dict:
    return CELL | {"tune_split": {"images_per_class": 3, "seed": seed}}


def test_tune_is_cut_off_train_and_nothing_is_copied(pictures):
    before = sorted(pictures.rglob("*"))
    cell = opened(pictures, CELL)
    tree = cell.open_tree()
    files = list_files(tree)
    assert sorted(pictures.rglob("*")) == before
    assert list(files) == ["train", "tune", "test"] and tree.classes == CLASSES
    counts = {split: np.bincount(found.targets).tolist() for split, found in tree.splits.items()}
    assert counts == {"train": [5] * 3, "tune": [3] * 3, "test": [2] * 3}
    everything = list(itertools.chain(*files.values()))
    assert sorted(everything) == sorted(path.relative_to(pictures).as_posix() for path in pictures.rglob("*.jpg"))
    assert len(set(everything)) == 30, "no image is in two splits"
    assert (cell.row.held_out, cell.row.reported_split) == (("tune", "test"), "test") == (tree.kind.held_out, "test")
    for split in files:
        dataset = ImageFolder(tree, split, lambda image: torch.from_numpy(np.array(image)))
        for index, target in enumerate(tree.splits[split].targets.tolist()):
            assert dataset[(0, index)][1] == target and dataset.name(index).startswith(CLASSES[target])


def test_the_seed_and_the_names_alone_choose(pictures, monkeypatch, tmp_path):
    chosen = [list_files(opened(pictures, tuned(seed)).open_tree())["tune"] for seed in (0, 0, 1, 2)]
    assert chosen[0] == chosen[1] and len(set(map(tuple, chosen))) > 1
    manifest = opened(pictures, CELL).manifest
    assert manifest.hash != opened(pictures, tuned(1)).manifest.hash
    moved = make(tmp_path / "elsewhere/pictures", -1)
    scandir = os.scandir

    class Reversed:
        def __init__(self, folder):
            self.listed = scandir(folder)

        def __enter__(self):
            return reversed(list(self.listed))

        def __exit__(self, *_):
            self.listed.close()

    monkeypatch.setattr("repro.data.tree.os.scandir", Reversed)
    again = opened(moved, CELL)
    assert list_files(again.open_tree())["tune"] == chosen[0] and again.manifest == manifest


def test_a_folder_is_opened_as_it_was_prepared(pictures):
    """Splits and cut are those of the manifest, and what differs from it is named where it lies."""
    opened(pictures, CELL)
    shutil.copytree(pictures / "test", pictures / "val")
    assert list(opened(pictures, CELL, again=False).open_tree().splits) == ["train", "tune", "test"]
    (pictures / "train/cat/0000.jpg").rename(pictures / "train/cat/new.jpg")
    with pytest.raises(UserError, match=r"train/cat: .*; restore the files, or run `repro prepare-data`"):
        opened(pictures, CELL, again=False).open_tree()
    shutil.rmtree(pictures)
    with pytest.raises(UserError, match="pictures: no such folder"):
        opened(pictures, CELL, again=False).open_tree()
    assert not pictures.exists()


def test_the_folders_say_which_splits_there_are(pictures):
    plain = {"kind": "folder"}
    with_test = opened(pictures, plain)
    assert (with_test.row.held_out, with_test.manifest.generated) == (("test",), None)
    (pictures / "test").rename(pictures / "val")
    cut_off_val = CELL | {"expected": {"classes": 3, "train": 15, "tune": 9, "val": 6}}
    assert opened(pictures, plain).row.held_out == ("val",)
    assert opened(pictures, cut_off_val).row.held_out == ("tune", "val")
    shutil.copytree(pictures / "val", pictures / "test")
    assert opened(pictures, plain).row.held_out == ("val",), "as before there were folders with test"
    (pictures / "val").rename(pictures / "tune")
    assert (
        opened(pictures, plain).row.held_out == ("tune", "test") and len(list_files(scan_tree(pictures, "folder"))) == 3
    )


def drop_test_class(root):
    shutil.rmtree(root / "test/dog")


def drop_class(root):
    drop_test_class(root)
    shutil.rmtree(root / "train/dog")


def drop_images(root):
    for number in range(3, 8):
        (root / f"train/cat/{number:04d}.jpg").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_test_class, r"pictures/train/dog: class 'dog' is in train but not in test; every split needs the same"),
        (drop_class, r"prepare_data\.small\.expected\.classes: 3 expected, .*pictures holds 2; complete the data"),
        (drop_images, r"pictures/train: class 'cat' has 3 training images, .*images_per_class is 3; make it smaller"),
        (lambda root: shutil.copytree(root / "test", root / "tune"), r"pictures/tune: is there, .*; move it away, or"),
        (lambda root: shutil.copytree(root / "test", root / "tuning"), r"pictures/tuning: is there, .*; move it away"),
        (lambda root: (root / "test").rename(root / "val"), r"expected\.val: 0 expected, .*pictures holds 6; complete"),
        (lambda root: shutil.rmtree(root / "test"), r"pictures/val: no such folder; lay the data out as .* or test/"),
    ],
)
def test_wrong_data_is_one_line(pictures, spoil, message):
    spoil(pictures)
    with pytest.raises(UserError, match=message) as caught:
        opened(pictures, CELL)
    assert "\n" not in str(caught.value) and not (pictures.parent / "results").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"expected": {"classes": 3, "train": 15, "test": 6}},
            r"expected\.tune: missing; folder has train, tune, val or",
        ),
        ({"tune_split": None, "expected": {"classes": 3, "train": 15, "test": 6, "val": 6}}, r"expected\.\w+: no such"),
        ({"tune_split": {"images_per_class": 0}}, r"tune_split\.images_per_class: .* 1, got int 0"),
        ({"kind": "imagenet"}, r"tune_split: needed for kind .*cifar100, allowed for folder, and for no other"),
        ({"kind": "cifar10", "tune_split": None}, r"tune_split: needed for kind .*cifar10 and .*allowed for folder"),
    ],
)
def test_bad_params(changes, message):
    with pytest.raises(UserError, match=message):
        build(PrepareData, CELL | changes, "prepare_data.small")


def test_a_search_takes_a_folder_that_has_a_tune(pictures, monkeypatch):
    monkeypatch.chdir(pictures.parent)
    nano = {"model": "resnet_nano", "family": "resnet", "data": "small", "epochs": 2, "batch_size": 2, "drop_path": 0.0}
    nano |= {"optim": {"lr": 1e-3}, "mix": {}, "transform": {"image_size": 8}}
    search = {"cell": "pretrain.nano", "family": "resnet", "data": "small", "lr": [1e-3], "warmup_epochs": [0]}
    params = {"runtime": {"data_roots": {"folder": str(pictures)}}, "pretrain": {"nano": nano}, "tune": {"one": search}}

    def read(cell):
        (pictures.parent / "dvc.yaml").write_text("stages: {}\n")
        (pictures.parent / "params.yaml").write_text(yaml.safe_dump(params | {"prepare_data": {"small": cell}}))
        return [each.name for each in read_searches({"pretrain": SPEC}, None)]

    assert read(CELL) == ["one"]
    with pytest.raises(
        UserError, match=r"tune\.one\.data: small is of kind folder, .* no split tune .*; give it a tune_s"
    ):
        read({"kind": "folder"})
    (pictures / "tune").mkdir()
    assert read({"kind": "folder"}) == ["one"]


def test_the_check_names_a_broken_picture(pictures):
    assert findings("folder", pictures)[1] == 0
    cut(pictures / "test/dog/0001.jpg")
    lines, errors, _ = findings("folder", pictures)
    assert errors == 1 and "test/dog/0001.jpg" in only(lines, "error")[0]
