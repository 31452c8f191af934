"""`repro pretrain` as a user runs it; tests/faults interrupts it."""

import csv
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from repro.core.config import load_section
from repro.core.hashing import hash_file
from repro.core.paths import Paths
from repro.core.record import read_record
from repro.runs.job import Cell
from repro.tasks.classification.spec import SPEC
from repro.training.checkpoint import Checkpointer
from tests.stages.helpers import RECORD, accept_data, edit, find_record, read_metrics
from tests.stages.test_dvc import outs_of

CELL = Path("artifacts/pretrain/nano")


def test_what_a_run_leaves(trained):
    trained = trained("pretrain")
    folder, results = trained / CELL, (trained / RECORD).parent
    record = read_record(trained / RECORD)
    metrics, identity = record["metrics"], record["identity"]
    about = {"kind": "digits", "epochs": 2, "steps": 2 * (1079 // 128), "held_out_images": 359, "split": "test"}
    assert about.items() <= metrics.items()
    assert metrics["num_params"] == sum(t.numel() for t in load_file(trained / CELL / "weights.safetensors").values())
    about = {"dtype": "fp32", "backend": "numba", "command": "repro pretrain --cell nano"}
    assert about.items() <= identity.items()
    assert len(identity["params_hash"]) == len(identity["data_manifest_hash"]) == 16
    threads = identity["machine"]["threads"]
    assert re.search(rf"^cpu: .*, {threads} threads?$", identity["device"]) and identity["machine"]["vector"]
    rows = list(csv.DictReader(open(folder / "curve.csv")))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    expected = [metrics["by_seed"][0]["tune_top1_previous_percent"], metrics["tune_top1_percent"]]
    assert [float(row["top1_percent"]) for row in rows] == pytest.approx(expected, rel=1e-5)
    snapshots = folder / "snapshots"
    assert {file.name for file in snapshots.iterdir()} == {"epoch_000.safetensors", "epoch_002.safetensors"}
    assert (snapshots / "epoch_002.safetensors").read_bytes() == (folder / "weights.safetensors").read_bytes()
    kept = ["seed", "epoch", "train_loss", "top1_percent", "top5_percent"]
    assert record["curve"] == [",".join(kept), *(",".join(row[name] for name in kept) for row in rows)]
    left = {file.name for place in (folder, results) for file in place.iterdir()}
    assert left == {"run.json", "load_report.txt", *(Path(out).name for out in outs_of("pretrain"))}
    assert not any((trained / ".runs").rglob("*.pt"))


def test_a_state_that_does_not_fit_is_one_line(checkout, repro_cli):
    """Only changed code can bring this about, since the folder is named after parameters and data."""
    params, paths = load_section(SPEC.params, Path("params.yaml"), "pretrain", "nano"), Paths(checkout)
    about = {"params": params, "spec": SPEC, "paths": paths, "runtime": None, "record": checkout / RECORD}
    folder = Cell(stage="pretrain", name="nano", **about).state_folder(0)
    Checkpointer(folder).save(3, {"run": {}, "model": {"head.weight": torch.zeros(1)}, "optimizer": {}, "rng": {}})
    err = repro_cli.refuse("pretrain", "--cell", "nano")
    assert err.startswith(f"repro: {folder}: holds the state of another model")


@pytest.mark.parametrize("folder", ["results/pretrain", "artifacts", ".runs"])
def test_a_folder_that_cannot_be_written_is_noticed_before_the_first_step(checkout, repro_cli, folder):
    Path(folder).write_text("a file has no place for others, also for the superuser")
    code, out, err = repro_cli("pretrain", "--cell", "nano")
    assert code == 1 and str(Path(folder).absolute()) in err and err.count("\n") == 1 and "epoch 1," not in out


@pytest.mark.parametrize("steps", [2, 1000])
def test_a_run_that_diverges_stops_with_the_files_of_its_last_batch(checkout, repro_cli, steps):
    """In the run, or at its end with no result."""
    edit("epochs: 2", f"epochs: 2\n    max_bad_steps: {steps}", "lr: 0.003,", "lr: 1.0e+30, clip_grad_norm: null,")
    err = repro_cli.refuse("pretrain", "--cell", "nano", code=1)
    assert "not finite" in err
    assert not list(CELL.rglob("*.*")) and not RECORD.exists()
    assert re.search(r"step \d+: ", err) and ".png" in err and err.count("\n") == 1


def test_unreadable_images_are_counted_and_limited(checkout, repro_cli):
    image = next(Path("data/digits/train").rglob("*.png"))
    image.write_bytes(b"\0" * image.stat().st_size)
    assert f"train/{image.parent.name}: a file was changed or renamed" in repro_cli.refuse("pretrain", "--cell", "nano")
    accept_data()
    code, _, err = repro_cli("pretrain", "--cell", "nano")
    assert code == 2 and str(image) in err and "unreadable" in err.splitlines()[-1]
    edit("epochs: 2", "max_unreadable: 1\n    epochs: 2")
    repro_cli.run("pretrain", "--cell", "nano")
    assert read_metrics(RECORD)["unreadable_images"] == 1


def test_seeds_stand_elsewhere_and_are_not_trained_twice(checkout, repro_cli):
    edit("epochs: 2", "epochs: 1", "snapshot_epochs: [0, 2]", "snapshot_epochs: []")
    repro_cli.run("pretrain", "--cell", "nano", "--seeds", "2")
    file = find_record("pretrain/nano_2seeds")
    metrics = read_metrics(file)
    assert metrics["seeds"] == [0, 1] and [run["seed"] for run in metrics["by_seed"]] == [0, 1]
    assert metrics["top1_percent"] == pytest.approx(sum(run["top1_percent"] for run in metrics["by_seed"]) / 2)
    weights = Path("artifacts", file.relative_to("results")).with_suffix("") / "weights.safetensors"
    assert hash_file(weights) == metrics["weights_hash"]
    assert not RECORD.exists() and not CELL.exists()
    before = file.stat().st_mtime_ns
    out = repro_cli.run("pretrain", "--cell", "nano", "--seeds", "2")
    assert "nano_2seeds: every seed is trained" in out and file.stat().st_mtime_ns == before
    edit("re_prob: 0.25", "re_prob: 0.5")
    err = repro_cli.refuse("pretrain", "--cell", "nano", "--seeds", "2")
    assert str(file) in err and "other params" in err and "seeds 0, 1" in err


def test_a_cell_of_cifar100_from_the_published_files_to_the_page(checkout, cifar_files, repro_cli):
    params = yaml.safe_load(Path("params.yaml").read_text())
    roots = {"cifar100": "data/c", "torchvision": str(cifar_files)}
    params["runtime"]["data_roots"] = roots
    expected, split = {"classes": 2, "train": 8, "tune": 4, "test": 4}, {"images_per_class": 2, "seed": 0}
    params["prepare_data"] = {"cifar100": {"kind": "cifar100", "expected": expected, "tune_split": split}}
    cell = params["pretrain"].pop("nano") | {"data": "cifar100", "batch_size": 4, "epochs": 1, "snapshot_epochs": []}
    cell |= {"options": {"depth": 1, "patch_size": 4}}
    params["pretrain"]["vittt_tiny_cifar100"] = cell
    Path("params.yaml").write_text(yaml.safe_dump(params))
    repro_cli.run("prepare-data")
    repro_cli.run("pretrain", "--cell", "vittt_tiny_cifar100")
    repro_cli.run("report")
    page = Path("results/papers/night.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| Vittt-T |") and line.endswith("| – |"))
    assert row.count("%") == 1, "the slot of CIFAR-100 is filled, that of ImageNet-100 is not"
