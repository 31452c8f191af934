"""`repro measure`: its steps run apart, stop in time, are continued, and outlive one that breaks. The records that a CPU can make are made."""

import os
import signal

import pytest
import torch

from repro.benchmark import campaign
from repro.benchmark.campaign import STEPS, Step, run_campaign
from repro.benchmark.collectives import CollectivesParams, run_collectives
from repro.benchmark.training_rate import TrainingParams, run_training
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import read_json, write_json
from repro.measure.flops import cost


def note(paths, name):
    with open(paths.root / "steps.txt", "a") as file:
        file.write(f"{name}\n")


def succeed(paths, minutes):
    note(paths, "succeed")
    return True


def run_out_of_time(paths, minutes):
    note(paths, "run out of time")
    return False


def refuse(paths, minutes):
    raise UserError("there is no such thing")


def break_down(paths, minutes):
    raise ZeroDivisionError("division by zero")


def die(paths, minutes):
    os.kill(os.getpid(), signal.SIGKILL)


def step(run):
    return Step(name=run.__name__, about="a test", run=run)


def test_a_broken_step_costs_itself_alone(tmp_path, capfd):
    """A refusal, an error and a killed process; the step after them runs, and the end says which failed."""
    with pytest.raises(RunError, match=r"3 of 4 steps failed: refuse: there is no such thing; break_down: ZeroDivisionError: .*; die: its"):
        run_campaign(Paths(tmp_path), steps=(step(refuse), step(break_down), step(die), step(succeed)))
    assert (tmp_path / "steps.txt").read_text() == "succeed\n"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_it_says_what_is_left(tmp_path, capsys, monkeypatch):
    """A step that runs out of time, and then no time for the next."""
    monkeypatch.setattr(campaign, "SHORTEST_S", 0.0)
    assert not run_campaign(Paths(tmp_path), 1.0, (step(run_out_of_time), step(succeed)))
    assert "call again for: run_out_of_time\n" in capsys.readouterr().out
    monkeypatch.setattr(campaign, "SHORTEST_S", 3600.0)
    assert not run_campaign(Paths(tmp_path), 1.0, (step(succeed), step(run_out_of_time)))
    assert "call again for: succeed; run_out_of_time\n" in capsys.readouterr().out
    assert (tmp_path / "steps.txt").read_text() == "run out of time\nsucceed\n"
    assert run_campaign(Paths(tmp_path), None, (step(succeed),))
    assert "done: every record is complete" in capsys.readouterr().out


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with this code, as the working directory."""
    root = find_root().root
    for package in ("kernels", "repro", "stages"):
        (tmp_path / package).symlink_to(root / package)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text("runtime: {data_roots: {}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Paths(tmp_path)


def measured(checkout, name):
    (file,) = (checkout.results / "measured").glob(f"*/{name}.json")
    return file


@pytest.mark.slow
def test_without_a_gpu_each_step_that_needs_one_says_so(checkout):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    chosen = tuple(step for step in STEPS if step.name in ("environment", "check", "compared", "training", "collectives"))
    with pytest.raises(RunError, match="4 of 5 steps failed") as error:
        run_campaign(checkout, steps=chosen)
    assert str(error.value).count("CUDA device") == 4
    metrics = read_json(measured(checkout, "environment"))["metrics"]
    assert metrics["backend"] == "numba" and metrics["machine"]


@pytest.mark.slow
def test_a_training_is_timed(checkout):
    """The rate of the record is that of the steps' own seconds; a second call of the same code trains nothing."""
    params = TrainingParams(model="vittt_nano_patch16_144", image_size=32, batch_size=128, precision="fp32", steps=8)
    assert run_training(checkout, params, device="cpu")
    file = measured(checkout, "training")
    metrics = read_json(file)["metrics"]
    late = sorted(metrics["step_ms_samples"])
    assert metrics["steps"] == 8 and len(late) == 4 and 0 < metrics["train_loss"] < 10
    assert late[1] - 0.01 <= metrics["step_ms"] <= late[2] + 0.01
    assert metrics["img_per_s"] == pytest.approx(128 / metrics["step_ms"] * 1e3)
    assert metrics["mfu_percent"] is None and "not in our table" in metrics["mfu_percent_reason"]
    before = file.stat().st_mtime_ns
    assert run_training(checkout, params, device="cpu") and file.stat().st_mtime_ns == before


def test_the_share_of_the_peak_is_by_hand():
    """Vittt-T at 224²: 1.457 G multiply-adds; a training step is three forward passes of two FLOPs each: 8.74 GFLOP an image."""
    macs = cost("vittt_tiny_patch16_224", {}, (224, 224)).macs_g
    assert 6 * macs == pytest.approx(8.74, abs=0.01)


def test_processes_add_up(checkout):
    """Two processes over gloo: 1 + 2 = 3 everywhere."""
    assert run_collectives(checkout, CollectivesParams(mib=(1, 2)), device="cpu", processes=2)
    metrics = read_json(measured(checkout, "collectives"))["metrics"]
    assert metrics["world_size"] == 2 and [row["mib"] for row in metrics["rows"]] == [1, 2]
    for row in metrics["rows"]:
        assert row["correct"] and row["bus_gb_per_s"] == pytest.approx(row["mib"] * 2**20 / row["median_ms"] / 1e6)


def test_the_page_says_what_is_measured_of_a_gpu_and_that_nothing_is(checkout):
    """Records of a CPU are not shown; what a GPU's say stands in a line each."""
    ((page, marker, text),) = campaign.make_passages(checkout)
    assert (page, marker) == ("results/speed.md", "gpu records") and "No GPU is measured" in text
    identity = {"device": "cuda: NVIDIA H200", "parent_commit": "0123456789"}
    row = {"mib": 27, "median_ms": 0.5}
    write_json(checkout.measured("cpu_x") / "environment.json", {"metrics": {}, "identity": identity | {"device": "cpu: X, 1 thread"}})
    write_json(checkout.measured("nvidia_h200") / "collectives.json", {"metrics": {"world_size": 2, "rows": [row]}, "identity": identity})
    params = {"model": "vittt_tiny_patch16_224", "image_size": 224, "batch_size": 64, "precision": "bf16"}
    metrics = {"params": params, "img_per_s": 2345.6, "mfu_percent": None, "mfu_percent_reason": "no peak"}
    write_json(checkout.measured("nvidia_h200") / "training.json", {"metrics": metrics, "identity": identity})
    ((_, _, text),) = campaign.make_passages(checkout)
    assert text.splitlines()[2:] == [
        "| cuda: NVIDIA H200 | `training.json` | vittt_tiny_patch16_224 at 224², batch 64, bf16: 2346 img/s, no peak | 01234567 |",
        "| cuda: NVIDIA H200 | `collectives.json` | 2 GPU(s), all-reduce: 27 MiB 0.50 ms | 01234567 |",
    ]
