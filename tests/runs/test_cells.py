"""What is recorded of a cell's training."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from repro.core.errors import Interrupted, UserError
from repro.core.paths import Paths
from repro.core.ranks import Ranks
from repro.core.record import write_json
from repro.core.runtime import Runtime, device_label
from repro.models.registry import build_model
from repro.runs import cells
from repro.runs.cells import _collect_files, record_speed, train_cells
from repro.runs.job import Cell, place_model, require_resumable
from repro.training.params import OptimParams, TrainParams

UNTIMED = {"throughput_img_per_s": None, "throughput_img_per_s_reason": "no step was timed"}


@pytest.mark.parametrize(
    ("speeds", "recorded"),
    [
        ([{"throughput_img_per_s": 100.0}, {"throughput_img_per_s": 50.0}, {"throughput_img_per_s": 70.0}], 70.0),
        ([{"throughput_img_per_s": 50.0}, UNTIMED], 50.0),
        ([UNTIMED, UNTIMED], None),
    ],
)
def test_the_speed_of_a_cell_is_that_of_its_last_seed(tmp_path, speeds, recorded):
    """Or of the one before, where an earlier call trained the last seed to its last step."""
    transform = SimpleNamespace(image_size=32, hflip=0.5)
    params = SimpleNamespace(model="m", options={"depth": 1}, transform=transform, batch_size=16, ema_decay=0.9)
    params.needs_even_parts = False
    about = {"paths": Paths(tmp_path), "stage": "pretrain", "name": "nano", "where": "p.nano"}
    cell = SimpleNamespace(params=params, ranks=Ranks(world_size=2), **about)
    cell.runtime = SimpleNamespace(micro_batch=4)
    record_speed(cell, speeds, "gpu", {"device": "cuda: GPU"}, 1.0)
    folder = tmp_path / "results/replications/gpu/speed/pretrain"
    assert {file.name for file in folder.iterdir()} == {"nano.json", "nano.run.json"}
    record = json.loads((folder / "nano.json").read_text())
    assert record["metrics"]["throughput_img_per_s"] == recorded and record["identity"] == {"device": "cuda: GPU"}
    named = {name: record["metrics"][name] for name in ("model", "options", "processes", "micro_batch", "transform")}
    of = {"model": "m", "options": {"depth": 1}, "processes": 2, "micro_batch": 4, "transform": {"image_size": 32}}
    assert named == of and [name for name, is_on in record["metrics"]["keeps"].items() if is_on] == ["ema_decay"]


PARAMS = {"model": "m", "data": "data", "epochs": 1, "batch_size": 1, "drop_path": 0.0, "optim": OptimParams(lr=1.0)}


@dataclasses.dataclass
class Seeds:
    seeds: tuple[int, ...]


def list_files(folder):
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def two_runs(tmp_path):
    """A cell whose folder has an earlier run's files, and the outcome of a new run."""
    record = tmp_path / "record.json"
    spec = SimpleNamespace(scores={"top1_percent": "Top-1", "top5_percent": "Top-5", "top9_percent": "Top-9"})
    cell = SimpleNamespace(folder=tmp_path / "cell", params=SimpleNamespace(seeds=(0,)), spec=spec, record=record)
    row = {"epoch": 1, "held_out_loss": float("nan"), "top1_percent": 50.0}
    outcome = SimpleNamespace(folder=tmp_path / "result", curve=[row])
    old = ("weights.safetensors", "curve.csv", "snapshots/epoch_001.safetensors", "examples/old.png")
    new = ("weights.safetensors", "load_report.txt", "snapshots/epoch_002.safetensors")
    for folder, names, text in ((cell.folder, old, "old"), (outcome.folder, new, "new")):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return cell, outcome


def test_new_files_stand_beside_none_of_an_earlier_run(two_runs):
    cell, outcome = two_runs
    kept = _collect_files(cell, {0: outcome}, {})
    found = list_files(cell.folder)
    assert found.pop("curve.csv").splitlines() == ["seed,epoch,held_out_loss,top1_percent", "0,1,nan,50.0"]
    assert found == list_files(outcome.folder) and kept == ["seed,epoch,top1_percent", "0,1,50.0"]


def test_a_seed_more_keeps_the_whole_curve_of_the_first_and_a_record_its_loss_and_first_scores(two_runs):
    cell, outcome = two_runs
    outcome.curve = [{"epoch": 1, "lr": 0.1, "train_loss": 2.5, **dict.fromkeys(cell.spec.scores, 50.0)}]
    (cell.folder / "curve.csv").write_text("seed,epoch,lr,train_loss\n0,1,0.2,nan\n7,1,0.3,4.5\n")
    kept = _collect_files(cell, {1: outcome}, {0: {}})
    lines = (cell.folder / "curve.csv").read_text().splitlines()
    assert lines[1:] == ["0,1,0.2,nan,,,", "1,1,0.1,2.5,50.0,50.0,50.0"]
    assert kept == ["seed,epoch,train_loss,top1_percent,top5_percent", "0,1,nan,,", "1,1,2.5,50.0,50.0"]


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_full_disk_leaves_the_earlier_run_whole(two_runs, monkeypatch, fails):
    (cell, outcome), left, copy = two_runs, [fails], shutil.copyfile

    def copy_until_full(source, target):
        copy(source, target)
        if not left[0]:
            Path(target).write_text("n")
            raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))
        left[0] -= 1

    before = list_files(cell.folder)
    monkeypatch.setattr(shutil, "copyfile", copy_until_full)
    with pytest.raises(OSError, match="No space"):
        _collect_files(cell, {0: outcome}, {})
    assert list_files(cell.folder) == before


def test_the_state_of_a_seed_whose_record_stands_is_removed(tmp_path, monkeypatch):
    """It stays where a call is killed between its record and the removal."""
    params, runtime, folder = (
        SimpleNamespace(seeds=(0,)),
        SimpleNamespace(device="cpu"),
        tmp_path / "artifacts/pretrain/nano",
    )
    monkeypatch.setattr(Cell, "state_folder", lambda self, seed: tmp_path / f".runs/seed_{seed}")
    shared = {"paths": Paths(tmp_path), "runtime": runtime, "record": tmp_path / "results/pretrain/nano/metrics.json"}
    cell = Cell(stage="pretrain", name="nano", params=params, spec=None, **shared)
    names = [cell.state_folder(seed) / "step_1.pt" for seed in (0, 1)]
    for file in (*names, folder / "snapshots/.epoch_001.safetensors.abcdefgh.tmp"):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(cells, "find_finished_seeds", lambda cell: {0: {}})
    train_cells([cell])
    assert set(list_files(tmp_path)) == {".runs/seed_1/step_1.pt"}


def test_no_state_is_left_without_its_snapshots(tmp_path, monkeypatch):
    """A call may be killed while it removes a folder, whose files go in any order."""
    cell = SimpleNamespace(state_folder=lambda seed: tmp_path)
    for name in ("step_000000001.0.pt", "step_000000002.0.pt", "epoch_001.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.setattr(shutil, "rmtree", lambda folder, ignore_errors: None)
    cells.remove_states(cell, [0])
    assert set(list_files(tmp_path)) == {"epoch_001.safetensors"}


def test_seeds_from_other_initial_weights_are_not_joined(tmp_path, monkeypatch):
    manifest, weights, record = tmp_path / "manifest", tmp_path / "weights", tmp_path / "record.json"
    manifest.write_text("data")
    weights.write_text("before")
    params = Seeds(seeds=(0,))
    cell = SimpleNamespace(record=record, is_of_graph=False, params=params, inputs=(manifest, weights), init=weights)
    monkeypatch.setattr(cells, "params_hash", lambda params: "p")
    identity = {"params_hash": "p", "data_manifest_hash": cells.hash_file(manifest)}
    init = {"weights": "weights", "weights_hash": cells.hash_file(weights)}
    metrics = {"by_seed": [{"seed": 0}], "epochs": 1, "init": init}
    monkeypatch.setattr(cells, "read_record", lambda file: {"metrics": metrics, "identity": identity})
    record.touch()
    assert list(cells.find_finished_seeds(cell)) == [0]
    weights.write_text("after")
    with pytest.raises(UserError, match="initial weights"):
        cells.find_finished_seeds(cell)


def test_a_cell_whose_seeds_descend_finds_its_own_record(tmp_path, monkeypatch):
    manifest, record = tmp_path / "manifest", tmp_path / "record.json"
    for file in (manifest, record):
        file.touch()
    params = Seeds(seeds=(2, 0))
    cell = SimpleNamespace(record=record, is_of_graph=False, params=params, inputs=(manifest,), init=None)
    monkeypatch.setattr(cells, "params_hash", lambda params: str(params.seeds))
    identity = {"params_hash": "(2, 0)", "data_manifest_hash": cells.hash_file(manifest)}
    metrics = {"by_seed": [{"seed": 0}, {"seed": 2}], "epochs": 1}
    monkeypatch.setattr(cells, "read_record", lambda file: {"metrics": metrics, "identity": identity})
    assert sorted(cells.find_finished_seeds(cell)) == [0, 2]


@pytest.mark.parametrize("changed", ["data/manifest.json", "golden/vit.json", "processes", "device", "precision"])
def test_a_state_is_continued_by_the_same_code_and_in_the_same_place_alone(tmp_path, monkeypatch, changed):
    state, paths = tmp_path / "state", Paths(tmp_path)
    monkeypatch.setattr(Cell, "state_folder", lambda self, seed: state)
    files = {"data/manifest.json": paths.results / "prepare_data/data/manifest.json"}
    files |= {"golden/vit.json": paths.results / "golden/vit.json", "state": state / "step_1.pt"}
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    params = TrainParams(family="vit", **PARAMS)
    about = {"spec": None, "paths": paths, "runtime": SimpleNamespace(device="cpu"), "record": tmp_path / "r.json"}
    cell = Cell(stage="pretrain", name="nano", params=params, **about)
    begun = require_resumable(cell, 0, 1)
    for note in (begun, {name: begun[name] for name in ("inputs", "processes")}):  # as written now, and in the past
        write_json(state / "run.json", note)
        assert require_resumable(cell, 0, 1) == begun
    if changed in files:
        write_json(state / "run.json", begun)
        files[changed].write_text("after")
    else:
        write_json(
            state / "run.json", begun | {changed: {"processes": 2, "device": "cuda", "precision": "bf16"}[changed]}
        )
    with pytest.raises(UserError, match=changed if changed in files else "2 process|on cuda|in bf16") as caught:
        require_resumable(cell, 0, 1)
    assert str(state) in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"device": device_label("cpu") + ", 2 processes"}, None),
        ({"device": "cuda: GPU"}, "other device"),
        ({"dtype": "bf16"}, "other dtype"),
        ({"golden_hash": "g"}, "other golden"),
    ],
)
def test_a_seed_more_runs_as_the_finished_ones_did(tmp_path, monkeypatch, changed, named):
    for name in ("manifest", "record"):
        (tmp_path / name).touch()
    monkeypatch.setattr(cells, "params_hash", lambda params: "p")
    identity = {"params_hash": "p", "data_manifest_hash": cells.hash_file(tmp_path / "manifest"), "golden_hash": None}
    identity |= {"device": device_label("cpu"), "dtype": "fp32"} | changed
    metrics = {"by_seed": [{"seed": 0}], "epochs": 1}
    monkeypatch.setattr(cells, "read_record", lambda file: {"metrics": metrics, "identity": identity})
    about = {"is_of_graph": False, "paths": Paths(tmp_path), "runtime": SimpleNamespace(device="cpu"), "init": None}
    about |= {"record": tmp_path / "record", "inputs": (tmp_path / "manifest",)}
    finished, more = (SimpleNamespace(params=TrainParams(seeds=seeds, **PARAMS), **about) for seeds in ((0,), (0, 1)))
    assert list(cells.find_finished_seeds(finished)) == [0]
    if named is None:
        assert list(cells.find_finished_seeds(more)) == [0]
    else:
        with pytest.raises(UserError, match=named):
            cells.find_finished_seeds(more)


@pytest.mark.parametrize("stopped", ["one", "two"])
def test_a_stopped_section_says_what_trains_again(tmp_path, monkeypatch, stopped):
    """Cells of the graph that ended are trained again by the same command."""

    def run(cell):
        if cell.name == stopped:
            raise Interrupted(15, "the state is saved")

    monkeypatch.setattr(cells, "build_job", lambda cell, seed: cell)
    monkeypatch.setattr(cells, "_announce", lambda *given, **named: None)
    monkeypatch.setattr(cells, "run_job", run)
    shared = {"stage": "pretrain", "params": TrainParams(**PARAMS), "spec": None, "paths": Paths(tmp_path)}
    shared["runtime"] = SimpleNamespace(device="cpu")
    records = {name: tmp_path / f"results/pretrain/{name}/metrics.json" for name in ("one", "two")}
    with pytest.raises(Interrupted, match="the state is saved") as caught:
        train_cells([Cell(name=name, record=record, **shared) for name, record in records.items()])
    assert caught.value.exit_code == 143 and ("--cell two" in str(caught.value)) == (stopped == "two")


@pytest.mark.parametrize("inner", ["conv", "dwconv"])
def test_channels_last_is_the_format_of_ordinary_convolutions_alone(inner):
    """Weights of an inner convolution have five axes, for which PyTorch has no such format."""
    model = build_model("study_nano_patch16_144", inner_model=inner, depth=1, img_size=32)
    placed = place_model(model, Runtime(channels_last=True, data_roots={}), Ranks(), torch.device("cpu"))
    convolutions = [layer for layer in placed.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert convolutions and {parameter.dim() for parameter in placed.parameters()} >= {4, 5}
    assert all(layer.weight.is_contiguous(memory_format=torch.channels_last) for layer in convolutions)
