"""`repro pretrain` and `repro evaluate` as a user runs them: results, and every wrong input as one line; tests/faults
interrupts them.
"""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from repro.core.hashing import hash_code
from repro.core.record import read_record
from repro.data.manifest import read_manifest, write_manifest
from repro.data.prepare import scan_manifest
from tests.stages.test_dvc import outs_of

CELL = Path("results/pretrain/nano")
WEIGHTS = CELL / "weights.safetensors"
COMMAND = [sys.executable, "-m", "repro", "pretrain", "--cell", "nano"]


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> Path:
    """A checkout whose cell `nano` was trained without interruption, by the command itself."""
    root = tmp_path_factory.mktemp("trained") / "checkout"
    subprocess.run(["cp", "-a", str(prepared), str(root)], check=True)
    subprocess.run(COMMAND, cwd=root, check=True, timeout=1800)
    return root


def test_what_a_run_leaves(trained):
    record = read_record(trained / CELL / "metrics.json")
    metrics, identity = record["metrics"], record["identity"]
    assert (metrics["kind"], metrics["epochs"], metrics["steps"], metrics["held_out_images"]) == (
        "digits",
        2,
        2 * (1079 // 128),
        359,
    )
    assert metrics["split"] == "test"
    assert metrics["num_params"] == sum(t.numel() for t in load_file(trained / WEIGHTS).values())
    assert identity["device"].startswith("cpu: ") and identity["dtype"] == "fp32" and identity["backend"] == "numba"
    assert len(identity["code_hash"]) == len(identity["params_hash"]) == len(identity["data_manifest_hash"]) == 16
    assert identity["command"] == "repro pretrain --cell nano"
    assert identity["code_modules"] == ["repro.models.vittt", "stages.pretrain"]
    assert identity["code_hash"] == hash_code(trained, identity["code_modules"])
    assert (
        re.search(rf", {identity['machine']['threads']} threads?$", identity["device"])
        and identity["machine"]["vector"]
    )
    rows = list(csv.DictReader(open(trained / CELL / "curve.csv")))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[-1]["top1_percent"]) == pytest.approx(metrics["tune_top1_percent"], rel=1e-5)
    assert float(rows[0]["top1_percent"]) == pytest.approx(
        metrics["by_seed"][0]["tune_top1_previous_percent"], rel=1e-5
    )
    assert sorted(p.name for p in (trained / CELL / "snapshots").iterdir()) == [
        "epoch_000.safetensors",
        "epoch_002.safetensors",
    ]
    assert (trained / CELL / "snapshots/epoch_002.safetensors").read_bytes() == (trained / WEIGHTS).read_bytes()
    assert {file.name for file in (trained / CELL).iterdir()} == {
        "run.json",
        *(Path(out).name for out in outs_of("pretrain")),
    }
    assert not any((trained / ".runs").rglob("*.pt"))


def test_a_state_that_does_not_fit_is_one_line(checkout, repro_cli):
    """Only changed code can bring this about, since the folder is named after parameters and data."""
    import torch

    from repro.core.config import load_section
    from repro.core.paths import Paths
    from repro.runs.job import Cell
    from repro.tasks.classification.spec import SPEC
    from repro.training.checkpoint import Checkpointer

    params = load_section(SPEC.params, Path("params.yaml"), "pretrain", "nano")
    cell = Cell(
        stage="pretrain", name="nano", params=params, spec=SPEC, paths=Paths(checkout), runtime=None, folder=CELL
    )
    folder = cell.state_folder(0)
    Checkpointer(folder).save(3, {"run": {}, "model": {"head.weight": torch.zeros(1)}, "optimizer": {}, "rng": {}})
    code, _, err = repro_cli("pretrain", "--cell", "nano")
    assert code == 2 and err.startswith(f"repro: {folder}: holds the state of another model") and err.count("\n") == 1


@pytest.mark.parametrize("folder", ["results/pretrain", ".runs"])
def test_a_folder_that_cannot_be_written_is_noticed_before_the_first_step(checkout, repro_cli, folder):
    Path(folder).write_text("a file has no place for others, also for the superuser")
    code, out, err = repro_cli("pretrain", "--cell", "nano")
    assert code == 1 and str(Path(folder).absolute()) in err and err.count("\n") == 1 and "epoch 1," not in out


@pytest.mark.parametrize("steps", [2, 1000])
def test_a_run_that_diverges_stops_with_a_dump_that_can_be_replayed(checkout, repro_cli, steps):
    """In the run, or at its end with no result."""
    edit(
        "epochs: 2",
        f"epochs: 2\n    max_bad_steps: {steps}",
        "lr: 0.003, lr_batch_size: 128",
        "lr: 1.0e+30, lr_batch_size: 128, clip_grad_norm: null",
    )
    code, _, err = repro_cli("pretrain", "--cell", "nano")
    assert code == 1 and "not finite" in err and err.count("\n") == 1
    assert not CELL.exists() or not list(CELL.rglob("*.*"))
    (dump,) = Path(".runs").rglob("bad_step_*.pt")
    assert str(dump) in err and "--replay-bad-step" in err
    code, out, err = repro_cli("pretrain", "--replay-bad-step", str(dump))
    assert code == 0, err
    assert (
        re.search(r"first output that is not finite: (?!none)", out)
        and "images: digit_" in out
        and "inner loss of blocks.0.mixer" in out
    )
    moved = dump.rename("elsewhere.pt")
    code, _, err = repro_cli("pretrain", "--replay-bad-step", str(moved))
    assert code == 2 and "does not lie in the folder of a run; name its cell with --cell" in err
    code, again, _ = repro_cli("pretrain", "--cell", "nano", "--replay-bad-step", str(moved))
    assert code == 0 and again == out


def test_evaluate_finds_the_accuracy_of_the_training(trained, monkeypatch, repro_cli):
    monkeypatch.chdir(trained)
    code, out, _ = repro_cli("evaluate", "--weights", str(WEIGHTS), "--data", "digits")
    top1 = read_record(CELL / "metrics.json")["metrics"]["top1_percent"]
    assert code == 0 and f"top-1 {top1:.2f} %" in out
    (written,) = Path("results/measured").rglob("metrics.json")
    assert read_record(written)["metrics"]["top1_percent"] == top1
    assert repro_cli("evaluate", "--weights", str(WEIGHTS), "--data", "digits", "--image-size", "48")[0] == 0


def edit(*pairs: str) -> None:
    path = Path("params.yaml")
    text = path.read_text()
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)


def test_a_cell_by_hand_stands_elsewhere(checkout, repro_cli):
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["by_hand"] = {"pretrain": {"mine": params["pretrain"]["nano"] | {"epochs": 1, "snapshot_epochs": []}}}
    Path("params.yaml").write_text(yaml.safe_dump(params))
    code, _, err = repro_cli("pretrain", "--cell", "mine")
    assert code == 0, err
    assert list(Path("results/measured").glob("*/pretrain/mine/metrics.json")) and not Path("results/pretrain").exists()


def test_unreadable_images_are_counted_and_limited(checkout, repro_cli):
    image = next(Path("data/digits/train").rglob("*.png"))
    image.write_bytes(b"\0" * image.stat().st_size)
    code, _, err = repro_cli("pretrain", "--cell", "nano")
    assert code == 2 and f"train/{image.parent.name}: a file was changed or renamed" in err
    # as that of data of one's own would be, whose contents nobody compares
    file = Path("results/prepare_data/digits/manifest.json")
    write_manifest(file, scan_manifest(Path("data/digits"), "digits", read_manifest(file).generated))
    code, _, err = repro_cli("pretrain", "--cell", "nano")
    assert code == 2 and str(image) in err and "unreadable" in err.splitlines()[-1]
    edit("epochs: 2", "max_unreadable: 1\n    epochs: 2")
    assert repro_cli("pretrain", "--cell", "nano")[0] == 0
    assert read_record(CELL / "metrics.json")["metrics"]["unreadable_images"] == 1


def test_seeds_by_hand_stand_elsewhere_and_are_not_trained_twice(checkout, repro_cli):
    edit("epochs: 2", "epochs: 1", "snapshot_epochs: [0, 2]", "snapshot_epochs: []")
    code, _, err = repro_cli("pretrain", "--cell", "nano", "--seeds", "2")
    assert code == 0, err
    (file,) = Path("results/measured").glob("*/pretrain/nano_2seeds/metrics.json")
    metrics = read_record(file)["metrics"]
    assert metrics["seeds"] == [0, 1] and [run["seed"] for run in metrics["by_seed"]] == [0, 1] and not CELL.exists()
    assert metrics["top1_percent"] == pytest.approx(sum(run["top1_percent"] for run in metrics["by_seed"]) / 2)
    before = file.stat().st_mtime_ns
    code, out, _ = repro_cli("pretrain", "--cell", "nano", "--seeds", "2")
    assert code == 0 and "nano_2seeds: every seed is trained" in out and file.stat().st_mtime_ns == before
    code, _, err = repro_cli("pretrain", "--replay-bad-step", "x.pt", "--seeds", "2")
    assert (code, err.count("\n")) == (2, 1) and "--seeds" in err
