"""`repro generate` as a user runs it: a training, which continues after a signal; pictures and their scores."""

import csv
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from repro.core.hashing import hash_file
from repro.core.paths import find_root
from repro.core.record import read_record
from repro.core.runtime import load_runtime
from repro.data.cells import open_cell
from repro.data.loader import EvalLoader
from repro.models.dit import _OFFICIAL, embed_positions
from repro.models.registry import build_denoiser
from tests.stages.helpers import (
    DIGITS,
    GENERATE,
    add_params,
    edit,
    find_record,
    read_metrics,
    save_denoiser,
    save_model,
    stop_at_state,
)
from tests.stages.test_dvc import outs_of


@pytest.fixture(scope="module")
def prepared(prepared, tmp_path_factory) -> Path:
    """A checkout with the cell, and a judge, untrained but sure of itself."""
    root = tmp_path_factory.mktemp("generate") / "checkout"
    shutil.copytree(prepared, root, symlinks=True)
    add_params(root, GENERATE)
    save_model(root / "judge.safetensors", "vit3_nano_patch16_144", depth=1, img_size=32)
    return root


RECORD, FOLDER = Path("results/generate/nano/metrics.json"), Path("artifacts/generate/nano")


@pytest.fixture
def drawing(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the trained checkout as the working directory, with the weights in it as `own.safetensors`."""
    root = tmp_path / "drawing"
    shutil.copytree(trained("generate"), root, symlinks=True)
    monkeypatch.chdir(root)
    shutil.copy(FOLDER / "weights.safetensors", "own.safetensors")
    return root


def test_what_a_run_leaves(trained):
    trained = trained("generate")
    folder, record = trained / FOLDER, read_record(trained / RECORD)
    metrics, identity = record["metrics"], record["identity"]
    about = {"data": "digits", "epochs": 2, "steps": 8, "image_size": 16, "split": "test", "held_out_images": 359}
    assert about.items() <= metrics.items()
    (run,) = metrics["by_seed"]
    assert metrics["held_out_mse"] == run["held_out_mse"] and 0.1 < run["held_out_mse"] < 1.2
    assert metrics["held_out_mse_std"] is None and metrics["held_out_mse_std_reason"] == "one seed has no spread"
    assert run["judged_samples"] == 20 and run["judged_percent"] in range(0, 101, 5)
    assert 0 <= run["real_judged_percent"] <= 100 and metrics["judged_percent"] == run["judged_percent"]
    assert run["judge_hash"] == hash_file(trained / "judge.safetensors")
    losses = [float(row["held_out_mse"]) for row in csv.DictReader(open(folder / "curve.csv"))]
    assert losses == pytest.approx([run["tune_held_out_mse_previous"], run["tune_held_out_mse"]], rel=1e-6)
    assert identity["backend"] == "torch"
    with Image.open(folder / "examples/samples.png") as picture:
        # a row for each digit, of pictures that are enlarged
        assert picture.mode == "L" and picture.size == (8 * (64 + 4) + 4, 10 * (64 + 4) + 4)
    left = {file.name for place in (folder, (trained / RECORD).parent) for file in place.iterdir()}
    assert left == {"run.json", "load_report.txt", "examples", *(Path(out).name for out in outs_of("generate"))}
    assert not list((trained / ".runs").rglob("*.pt"))


@pytest.mark.slow
def test_a_stopped_run_continues_to_the_same_weights(trained, checkout, repro_cli):
    assert "is saved" in stop_at_state("generate", "nano", signal.SIGTERM) and not RECORD.exists()
    assert "continuing after step" in repro_cli.run("generate", "--cell", "nano")
    for name in ("weights.safetensors", "curve.csv", "snapshots/epoch_002.safetensors", "examples/samples.png"):
        assert (FOLDER / name).read_bytes() == (trained("generate") / FOLDER / name).read_bytes(), name


DRAW = ("generate", "--weights", "own.safetensors", "--steps", "3")


@pytest.mark.slow
def test_a_dit5_begins_as_a_dit(checkout, repro_cli):
    """Into a folder of its own; inner weights learn at twice the rate of the rest."""
    teacher = save_denoiser(Path("dit.safetensors"), "dit_nano_patch4")
    edit("dit3_nano_patch4", "dit5_nano_patch4")
    assert "blocks (7)" in repro_cli.run("generate", "--cell", "nano", "--from", "dit.safetensors")
    record = find_record("generate/nano_inherited")
    folder = Path("artifacts", record.relative_to("results")).with_suffix("")
    fates = [line.split() for line in (folder / "load_report.txt").read_text().splitlines()]
    assert {fate[-1] for fate in fates if fate[0] == "used"} == set(teacher.state_dict())
    assert read_metrics(record)["init"]["weights_hash"] == hash_file(Path("dit.safetensors"))


def read(path: str) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def test_pictures_follow_from_the_seed(drawing, repro_cli):
    assert "12 pictures in first" in repro_cli.run(*DRAW, "-o", "first", "--samples", "12")
    names = [f"{place:05d}_digit_{place % 10}.png" for place in range(12)]
    assert {path.name for path in Path("first").iterdir()} == {*names, "grid.png", "samples.json"}
    about = json.loads(Path("first/samples.json").read_text())
    assert about["sampling"] == {"sampler": "ddim", "steps": 3, "guidance": 2.0} and about["classes"] == DIGITS
    for options in (
        "-o second --samples 12 --batch-size 5",
        "-o other --samples 1 --class-label digit_0 --seed 1",
        "-o large --samples 1 --class-label 3 --image-size 24 --sampler ddpm",
    ):
        repro_cli.run(*DRAW, *options.split())
    for name in names:  # up to the rounding of another batch
        assert abs(read(f"first/{name}") - read(f"second/{name}")).max() <= 1
    assert read("first/00000_digit_0.png").shape == (16, 16)
    assert (read("other/00000_digit_0.png") != read("first/00000_digit_0.png")).any()
    assert read("large/00000_digit_3.png").shape == (24, 24)
    assert not list(Path("results/replications").glob("*/draw"))


class StandIn(torch.nn.Module):
    """As NVIDIA's Inception file is called."""

    def forward(self, img: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(img.float(), 2).flatten(1)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scores_are_recorded(drawing, repro_cli):
    torch.jit.script(StandIn()).save("inception.pt")
    scored = ("--judge", "judge.safetensors", "--inception", "inception.pt", "--inception-sha256")
    scored = (*DRAW, "--samples", "20", *scored, hash_file(Path("inception.pt")))
    out = repro_cli.run(*scored, "-o", "scored", "--data", "digits")
    assert "20 pictures in scored" in out and "359 real" in out and "FID " in out
    metrics = read_metrics(find_record("draw/dit3_nano_patch4_*"))
    assert metrics["fid"] > 0 and metrics["sfid"] is None and metrics["real_images"] == 359 and metrics["samples"] == 20
    assert 0 <= metrics["precision"] <= 1 and metrics["inception_score"] is None and metrics["protocol"] is None
    record = read_metrics(RECORD)
    assert metrics["real_judged_percent"] == record["real_judged_percent"]
    statistics = {"mu": np.zeros(12), "sigma": np.eye(12), "mu_s": np.zeros(1), "sigma_s": np.eye(1)}
    np.savez("batch.npz", **statistics, arr_0=np.zeros((4, 16, 16, 3), np.uint8))
    out = repro_cli.run(*scored, "-o", "batch", "--seed", "7", "--data", "batch.npz")
    assert "FID " in out and "recall " in out
    metrics = read_metrics(find_record("draw/dit3_nano_patch4_*seed7_judge*_batch"))
    assert (metrics["data"], metrics["real_images"]) == ("batch.npz", 4) and metrics["protocol"] is None
    assert metrics["reference_hash"] == hash_file(Path("batch.npz")) and metrics["real_judged_percent"] is None


def test_the_weights_are_those_that_were_scored(drawing):
    """The exported weights, the moving average, have the held-out loss of the record."""
    from repro.inference.generate import DrawRequest, open_drawer
    from repro.tasks.generation.data import open_split
    from repro.tasks.generation.task import Generation

    cpu, paths = torch.device("cpu"), find_root()
    drawer = open_drawer(DrawRequest(weights=Path("own.safetensors"), output=Path("out")), cpu)
    tree = open_cell(paths, load_runtime(paths), "digits").open_tree()
    loader = EvalLoader(open_split(tree, "test", drawer.transform), batch_size=64)
    shared = {"params": SimpleNamespace(transform=drawer.transform), "num_classes": 10, "device": cpu}
    task = Generation(drawer.model, [], {"test": loader}, batch_size=64, **shared)
    record = read_metrics(RECORD)
    found = task.evaluate(drawer.model, "test")["held_out_mse"]
    assert found == pytest.approx(record["held_out_mse"], rel=1e-5)


def test_a_folder_of_other_pictures_is_left_alone(drawing, repro_cli):
    repro_cli.run(*DRAW, "-o", "mine", "--samples", "3")
    repro_cli.run(*DRAW, "-o", "mine", "--samples", "3", "--seed", "1")  # the same names: drawn anew
    Path("file").write_text("")
    for name, names in (("mine", "00002_digit_2.png"), ("file", "file"), ("file/inside", "file/inside")):
        err = repro_cli.refuse(*DRAW, "-o", name, "--samples", "2")
        assert "--output" in err and names in err


class Decoder(torch.nn.Module):
    """Latents (B, 4, h, w) to pictures so many times as large, whose first channel is that of the latents."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(latents[:, :3], scale_factor=self.scale)


@pytest.fixture
def release(checkout) -> Path:
    """A release's file: names and table of positions as there, beside the raw weights a moving average."""
    torch.manual_seed(0)
    ours = build_denoiser("dit_small_patch8", num_classes=3).state_dict()
    state = {"pos_embed": embed_positions((4, 4), 384)[None], **{name_theirs(key): ours[key] for key in ours}}
    raw = {key: torch.zeros_like(value) for key, value in state.items()}
    torch.save({"model": raw, "ema": state, "args": {"steps": 1}}, "release.pt")
    return checkout


def name_theirs(key: str) -> str:
    """A parameter's name in the release, whose own names tests/models reads from one."""
    for theirs, ours in _OFFICIAL.items():
        if key.startswith(ours):
            return theirs + key.removeprefix(ours)
    return key.replace(".modulation.", ".adaLN_modulation.1.")


RELEASE = ("generate", "--weights", "release.pt", "--model", "dit_small_patch8")


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_releases_file_draws_latents_that_a_decoder_turns_into_pictures(release, repro_cli):
    decoder, found = Decoder(8.0), []
    torch.jit.script(decoder).save("decoder.pt")
    # takes no more than one
    torch.export.save(torch.export.export(decoder, (torch.zeros(1, 4, 32, 32),)), "decoder.pt2")
    for name in ("decoder.pt", "decoder.pt2"):
        options = ("--steps", "2", "--samples", "2", "--class-label", "1", "--vae", name, "-o", f"{name}.drawn")
        repro_cli.run(*RELEASE, *options)
        found.append(read(f"{name}.drawn/00001_1.png"))
        assert found[-1].shape == (256, 256, 3)
    assert abs(found[0] - found[1]).max() <= 1 and found[0].std() > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_vae_file_that_is_none_is_one_line(release, repro_cli):
    torch.jit.script(Decoder(1.0)).save("other.pt")
    for name in ("text.pt", "text.pt2"):
        Path(name).write_text("no decoder")
    cases = {"": "release.pt --vae", "--vae other.pt": "--vae other.pt 32) 256)"}
    cases |= {f"--vae {name}": f"--vae {name}" for name in ("text.pt", "text.pt2", "release.pt")}
    cases |= {f"--vae {name}": name for name in ("absent.pt", "judge.safetensors")}
    cases["--model dit3_small_patch8"] = "release.pt dit3_small_patch8"
    for options, names in cases.items():
        err = repro_cli.refuse(*RELEASE, *options.split(), "-o", "out")
        assert all(name in err for name in names.split()), err
    assert not Path("out").exists()
