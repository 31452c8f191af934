"""`repro linearize` as a lab runs it: cells, files of timm, frozen and fine-tuned, stopped and continued."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from repro.core.errors import UserError
from repro.core.hashing import hash_file
from repro.core.paths import Paths
from repro.core.record import find_run, read_json, read_record
from repro.papers import describe_recipe
from repro.runs import from_weights
from repro.runs.job import build_job
from tests.stages.helpers import SOFTMAX, find_record, read_metrics, write_student
from tests.stages.test_own import draw


@pytest.fixture
def ready(checkout) -> Path:
    """A checkout with a softmax model of ours and a cell that linearises it."""
    write_student(checkout)
    return checkout


def test_a_cell_inherits_trains_and_says_what_became_of_every_key(ready, repro_cli):
    out = repro_cli.run("linearize", "--cell", "student")
    assert "expected: new: blocks (14)" in out
    assert "used: pos_embed (1), patch_embed (2), head (2), blocks (24), norm (2)" in out
    folder, teacher = Path("artifacts/linearize/student"), load_file(SOFTMAX)
    fates = dict(reversed(line.rsplit(None, 1)) for line in (folder / "load_report.txt").read_text().splitlines())
    student = load_file(folder / "weights.safetensors")
    assert set(fates) == set(student) and {key for key, fate in fates.items() if fate.strip() == "used"} == set(teacher)
    metrics = read_metrics(Path("results/linearize/student/metrics.json"))
    assert "freeze" not in metrics and metrics["init"]["weights_hash"] == hash_file(SOFTMAX)
    assert 0 <= metrics["untrained_top1_percent"] <= 100
    repro_cli.run("evaluate", "--weights", str(folder / "weights.safetensors"), "--data", "digits")
    assert read_metrics(find_record("evaluate/*"))["top1_percent"] == metrics["top1_percent"]


def test_a_published_name_with_a_tag_is_no_file(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(from_weights, "_keep", lambda checkpoint, file: kept.append(checkpoint.published.full_name))
    name = "vit_tiny_patch16_224.augreg_in21k"
    (tmp_path / name).mkdir()  # timm's downloads may lie in a folder of their name
    monkeypatch.chdir(tmp_path)
    file, _ = from_weights.find_weights(Paths(tmp_path), name, None)
    assert kept == [name] and file.name == f"{name}.safetensors"
    for missing in (f"{name}.pth", "vit_tiny_patch16_224.pth", "deit.safetensors"):
        with pytest.raises(UserError, match="no such file"):
            from_weights.find_weights(Paths(tmp_path), missing, None)


def test_frozen_weights_stay_equal_bit_by_bit_and_new_ones_learn(ready, repro_cli):
    write_student(ready, freeze=True)
    repro_cli.run("linearize", "--cell", "student")
    student, teacher = load_file("artifacts/linearize/student/weights.safetensors"), load_file(SOFTMAX)
    assert all(torch.equal(student[key], teacher[key]) for key in teacher)
    assert student["blocks.0.attn.w1"].std() > 0.021  # it began with 0.02


def test_a_published_size_is_found_by_its_file(ready):
    """Another ViT than that of the cell: the student follows from it, and the recipe from the cell."""
    torch.manual_seed(0)
    torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), "vit.pth")
    asked = {"options": {"inner": "gate", "dwc": "v"}, "freeze": True, "data": "digits", "epochs": 1, "batch_size": 64}
    recipe = {"seeds": 2, "recipe": describe_recipe}
    cell = from_weights.make_cell("vit.pth", model="vit_tiny_patch16_224", **asked, **recipe)
    assert (cell.params.model, cell.params.seeds, cell.params.batch_size) == ("t5_tiny_patch16_224", (0, 1), 64)
    assert cell.name == "vit-inner_gate-dwc_v-digits-frozen-1epochs"
    # timm's ViTs saw pixels in [-1, 1]
    transform = cell.params.transform
    assert (transform.image_size, transform.mean, transform.std) == (32, (0.5,) * 3, (0.5,) * 3)
    job = build_job(cell, 0)
    job.close()
    # the grid of the images of the cell is smaller, so the positions are resampled; classes are others
    assert job.task.model.grid_size == (2, 2) and job.load_report["cls_token"].startswith("left behind")
    assert job.load_report["head.weight"] == "expected: new"


@pytest.mark.slow
def test_pictures_of_ones_own_train_the_student_of_a_published_shape(ready, repro_cli):
    draw(Path("pets"), {"cat": 6, "dog": 6})
    options = ("--data", "folder:pets", "--epochs", "1", "--batch-size", "4")
    repro_cli.run("linearize", "--from", str(SOFTMAX), *options)
    (weights,) = Path("artifacts/own/pets").glob("*/weights.safetensors")
    assert "cat" in repro_cli.run("predict", "pets/cat", "--weights", str(weights))


@pytest.mark.slow
def test_from_a_file_with_options(ready, repro_cli):
    asked = ("--inner", "gate", "--dwc", "v", "--neighbours", "3", "--epochs", "1")
    repro_cli.run("linearize", "--from", str(SOFTMAX), *asked)
    record = find_record("linearize/*")
    expected = {"inner": "gate", "key_norm": "instance", "dwc": "v", "neighbours": 3}
    assert expected.items() <= read_metrics(record)["options"].items()
    weights = Path("artifacts", record.relative_to("results")).with_suffix("") / "weights.safetensors"
    content, before = weights.read_bytes(), read_record(record)
    seconds = read_json(find_run(record))["seconds"]
    # a seed more: the first one is not trained again, and its curve stands before that of the second
    assert "seed 1, 2 of 2" in repro_cli.run("linearize", "--from", str(SOFTMAX), *asked, "--seeds", "2")
    after = read_record(record)
    assert read_json(find_run(record))["seconds"] > seconds
    assert after["metrics"]["by_seed"][0] == before["metrics"]["by_seed"][0] and weights.read_bytes() == content
    assert after["curve"][:2] == before["curve"] and [row.split(",")[0] for row in after["curve"][1:]] == ["0", "1"]
