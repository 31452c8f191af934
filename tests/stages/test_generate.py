"""`repro generate` as a user runs it: a training, which continues after a signal; pictures and their scores; every
wrong input as one line.
"""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from repro.core.config import load_section
from repro.core.hashing import hash_code, hash_file
from repro.core.record import read_record
from repro.models.dit import Denoiser
from repro.models.registry import build_denoiser, build_model
from repro.models.weights import save_weights
from repro.tasks.generation.params import GenerateParams

ROOT = Path(__file__).parents[2]
CELL = """
generate:
  nano:
    model: dit3_nano_patch4
    options: {depth: 1, embed_dim: 24}
    data: digits
    seeds: [0]
    epochs: 2
    steps_per_epoch: 4
    batch_size: 16
    snapshot_epochs: [2]
    ema_decay: 0.9
    optim: {lr: 0.003, lr_batch_size: 16, weight_decay: 0.0, warmup_epochs: 0}
    transform: {image_size: 16, channels: 1, hflip: 0.0}
    sampling: {sampler: ddim, steps: 4, guidance: 2.0}
    judge: {weights: judge.safetensors, samples: 20}
"""
COMMAND = [sys.executable, "-m", "repro", "generate", "--cell", "nano"]
CLASSES = [f"digit_{digit}" for digit in range(10)]


def save_judge(path: Path) -> None:
    torch.manual_seed(0)
    options = {"depth": 1, "num_classes": 10, "img_size": 32}
    preprocessing = {
        "input_size": [3, 32, 32],
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    model = build_model("vit3_nano_patch16_144", **options)
    save_weights(
        path, model, name="vit3_nano_patch16_144", options=options, preprocessing=preprocessing, classes=CLASSES
    )


@pytest.fixture
def ready(checkout) -> Path:
    """The checkout with a cell and a judge, untrained but sure of itself."""
    Path("params.yaml").write_text(Path("params.yaml").read_text() + CELL)
    save_judge(Path("judge.safetensors"))
    return checkout


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> Path:
    """A checkout whose cell was trained without interruption."""
    root = tmp_path_factory.mktemp("trained") / "checkout"
    shutil.copytree(prepared, root, symlinks=True)
    (root / "params.yaml").write_text((root / "params.yaml").read_text() + CELL)
    save_judge(root / "judge.safetensors")
    subprocess.run(COMMAND, cwd=root, check=True, timeout=1800)
    return root


def results(root: Path) -> Path:
    (folder,) = root.glob("results/measured/*/generate/nano")
    return folder


@pytest.fixture
def drawing(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the trained checkout as the working directory, with the weights in it as `own.safetensors`."""
    root = tmp_path / "drawing"
    shutil.copytree(trained, root, symlinks=True)
    monkeypatch.chdir(root)
    shutil.copy(results(root) / "weights.safetensors", "own.safetensors")
    return root


def test_what_a_run_leaves(trained):
    folder = results(trained)
    record = read_record(folder / "metrics.json")
    metrics, identity = record["metrics"], record["identity"]
    assert (metrics["data"], metrics["epochs"], metrics["steps"], metrics["image_size"]) == ("digits", 2, 8, 16)
    assert (metrics["split"], metrics["held_out_images"]) == ("test", 359)
    (run,) = metrics["by_seed"]
    assert metrics["held_out_mse"] == run["held_out_mse"] and 0.1 < run["held_out_mse"] < 1.2
    assert metrics["held_out_mse_std"] is None and metrics["held_out_mse_std_reason"] == "one seed has no spread"
    assert (
        run["judged_samples"] == 20
        and run["judged_percent"] in range(0, 101, 5)
        and 0 <= run["real_judged_percent"] <= 100
    )
    assert metrics["judged_percent"] == run["judged_percent"] and run["judge_hash"] == hash_file(
        trained / "judge.safetensors"
    )
    rows = list(csv.DictReader(open(folder / "curve.csv")))
    assert float(rows[1]["held_out_mse"]) == pytest.approx(run["tune_held_out_mse"], rel=1e-6)
    assert float(rows[0]["held_out_mse"]) == pytest.approx(run["tune_held_out_mse_previous"], rel=1e-6)
    assert identity["code_modules"] == ["repro.models.dit", "stages.generate"]
    assert identity["code_hash"] == hash_code(trained, identity["code_modules"]) and identity["backend"] == "torch"
    with Image.open(folder / "examples/samples.png") as picture:
        assert picture.mode == "L" and picture.size == (
            8 * (64 + 4) + 4,
            10 * (64 + 4) + 4,
        )  # a row for each digit, of pictures that are enlarged
    assert not (trained / "results/generate").exists() and not list((trained / ".runs").rglob("*.pt"))


@pytest.mark.slow
def test_a_stopped_run_continues_to_the_same_weights(trained, ready):
    process = subprocess.Popen(
        COMMAND, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    deadline = time.monotonic() + 1800
    while not list(Path(".runs").glob("generate/nano/seed_0-*/step_*.pt")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=1800)
    assert process.returncode == 143 and "is saved" in err and not Path("results/measured").exists()
    done = subprocess.run(COMMAND, check=True, timeout=1800, capture_output=True, text=True)
    assert "continuing after step" in done.stdout
    for name in ("weights.safetensors", "curve.csv", "snapshots/epoch_002.safetensors", "examples/samples.png"):
        assert (results(ready) / name).read_bytes() == (results(trained) / name).read_bytes(), name


def test_a_seed_that_is_there_is_not_trained_again(drawing, repro_cli):
    code, out, err = repro_cli("generate", "--cell", "nano")
    assert code == 0 and "every seed is trained" in out, err


def draw(repro_cli, *options: str) -> tuple[int, str, str]:
    return repro_cli("generate", "--weights", "own.safetensors", "--steps", "3", *options)


def test_a_dit5_begins_as_a_dit(ready, repro_cli):
    """Into a folder of its own; inner weights learn at twice the rate of the rest."""
    shape = {"depth": 1, "embed_dim": 24, "in_channels": 1, "num_classes": 10}
    torch.manual_seed(0)
    teacher = build_denoiser("dit_nano_patch4", **shape)
    save_weights(
        Path("dit.safetensors"),
        teacher,
        name="dit_nano_patch4",
        options=shape,
        preprocessing={"input_size": [1, 16, 16]},
        classes=CLASSES,
    )
    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("dit3_nano_patch4", "dit5_nano_patch4"))
    code, out, err = repro_cli("generate", "--cell", "nano", "--from", "dit.safetensors")
    assert code == 0 and "expected: new: blocks (7)" in out, err
    (folder,) = Path("results/measured").glob("*/generate/nano_inherited")
    fates = [line.split() for line in (folder / "load_report.txt").read_text().splitlines()]
    assert {fate[-1] for fate in fates if fate[0] == "used"} == set(teacher.state_dict())
    assert read_record(folder / "metrics.json")["metrics"]["init"]["weights_hash"] == hash_file(Path("dit.safetensors"))
    shutil.rmtree(folder)
    for source, why in (
        ("nothing.pt", "generate: --from nothing.pt: no such file"),
        ("judge.safetensors", "holds weights of vit3_nano"),
    ):
        code, _, err = repro_cli("generate", "--cell", "nano", "--from", source)
        assert code == 2 and why in err and err.count("\n") == 1


def test_pictures_follow_from_the_seed(drawing, repro_cli):
    code, out, err = draw(repro_cli, "-o", "first", "--samples", "12")
    assert code == 0 and "12 pictures in first" in out, err
    names = [f"{place:05d}_digit_{place % 10}.png" for place in range(12)]
    assert sorted(path.name for path in Path("first").iterdir()) == sorted([*names, "grid.png", "samples.json"])
    with Image.open("first/00000_digit_0.png") as picture:
        assert picture.size == (16, 16) and picture.mode == "L"
    about = json.loads(Path("first/samples.json").read_text())
    assert about["sampling"] == {"sampler": "ddim", "steps": 3, "guidance": 2.0} and about["classes"] == CLASSES
    assert draw(repro_cli, "-o", "second", "--samples", "12", "--batch-size", "5")[0] == 0
    assert draw(repro_cli, "-o", "one", "--samples", "2", "--class-label", "digit_0")[0] == 0
    assert draw(repro_cli, "-o", "other", "--samples", "1", "--seed", "1")[0] == 0

    def read(path: str) -> np.ndarray:
        with Image.open(path) as picture:
            return np.asarray(picture).astype(int)

    for name in names:  # up to the rounding of another batch
        assert abs(read(f"first/{name}") - read(f"second/{name}")).max() <= 1
    assert abs(read("one/00000_digit_0.png") - read("first/00000_digit_0.png")).max() <= 1
    assert (read("other/00000_digit_0.png") != read("first/00000_digit_0.png")).any()
    assert not list(Path("results/measured").glob("*/draw"))


def test_pictures_of_another_size_and_with_another_sampler(drawing, repro_cli):
    code, _, err = draw(
        repro_cli, "-o", "large", "--class-label", "3", "--samples", "1", "--image-size", "24", "--sampler", "ddpm"
    )
    assert code == 0, err
    with Image.open("large/00000_digit_3.png") as picture:
        assert picture.size == (24, 24)


class StandIn(torch.nn.Module):
    """As NVIDIA's Inception file is called."""

    def forward(self, img: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(img.float(), 2).flatten(1)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scores_are_recorded(drawing, repro_cli):
    torch.jit.script(StandIn()).save("inception.pt")
    scored = [
        "--judge",
        "judge.safetensors",
        "--inception",
        "inception.pt",
        "--inception-sha256",
        hash_file(Path("inception.pt")),
    ]
    code, out, err = draw(repro_cli, "-o", "scored", "--samples", "20", "--data", "digits", *scored)
    assert code == 0 and "20 pictures in scored; the judge takes " in out and " % of the 359 real ones; FID " in out, (
        err
    )
    (file,) = Path("results/measured").glob("*/draw/dit3_nano_patch4_*/metrics.json")
    metrics = read_record(file)["metrics"]
    assert metrics["fid"] > 0 and metrics["sfid"] is None and metrics["real_images"] == 359 and metrics["samples"] == 20
    assert 0 <= metrics["precision"] <= 1 and metrics["inception_score"] is None and metrics["protocol"] is None
    record = read_record(results(drawing) / "metrics.json")["metrics"]
    assert metrics["real_judged_percent"] == record["real_judged_percent"]
    statistics = {"mu": np.zeros(12), "sigma": np.eye(12), "mu_s": np.zeros(1), "sigma_s": np.eye(1)}
    np.savez("batch.npz", **statistics, arr_0=np.zeros((4, 16, 16, 3), np.uint8))
    code, out, err = draw(repro_cli, "-o", "batch", "--samples", "20", "--seed", "7", "--data", "batch.npz", *scored)
    assert code == 0 and "20 pictures in batch; the judge takes " in out and "; FID " in out and "; recall " in out, err
    (file,) = Path("results/measured").glob("*/draw/dit3_nano_patch4_*seed7/metrics.json")
    metrics = read_record(file)["metrics"]
    assert (metrics["data"], metrics["real_images"]) == ("batch.npz", 4) and metrics["protocol"] is None
    assert metrics["reference_hash"] == hash_file(Path("batch.npz")) and metrics["real_judged_percent"] is None
    code, _, err = draw(repro_cli, "-o", "scored", "--samples", "2", "--data", "digits", *scored[:-2])
    assert (code, err.count("\n")) == (2, 1) and "inception.pt: has SHA-256" in err


WRONG = [
    (["--class-label", "10"], "--class-label 10: no such class; the model knows 0 to 9, or their names"),
    (["--class-label", "-1"], "--class-label -1: no such class"),
    (["--class-label", "digit_x"], "no such class; the model knows 0 to 9, or their names; did you mean 'digit_"),
    (["--guidance", "-1"], "generate.guidance: -1.0 is out of range, must be >= 0"),
    (["--steps", "2000"], "generate.steps: 2000 is out of range, must be <= 1000"),
    (["--steps", "1"], "generate.steps: 1 is out of range, must be >= 2"),
    (["--image-size", "18"], "input of 18x18: height and width must be positive multiples of the patch size 4"),
    (["--image-size", "0"], "image_size: 0 is out of range, must be >= 1"),
    (["--vae", "own.safetensors"], "own.safetensors draws pixels, which nothing decodes; leave it out"),
    (["--model", "dit_nano_patch4"], "holds weights of dit3_nano_patch4, not of dit_nano_patch4"),
    (["--weights", "judge.safetensors"], "judge.safetensors: holds a model that can classify, not generate"),
    (["--weights", "absent.safetensors"], "absent.safetensors: no such weights file"),
    (
        ["--weights", "params.yaml"],
        "params.yaml: not a file of this project, so it does not name its model; name it with --model",
    ),
    (["--weights", "params.yaml", "--model", "dit3_xl"], "generate: --model dit3_xl: no such denoiser"),
    (["--weights", "params.yaml", "--model", "dit3_small_patch2"], "params.yaml: not a readable checkpoint of PyTorch"),
    (["--judge", "own.safetensors"], "own.safetensors: holds a model for the task 'generate', expected a classifier"),
    (["--judge", "params.yaml"], "params.yaml: not a file of this project, so it cannot judge"),
    (["--judge", "absent.safetensors"], "absent.safetensors: no such weights file"),
    (["--inception", "own.safetensors"], "--inception compares with real pictures; name them with --data CELL"),
    (["--inception", "own.safetensors", "--data", "digits"], "own.safetensors: has SHA-256"),
    (["--judge", "judge.safetensors", "--data", "numbers"], "numbers: prepare_data"),
    (
        ["--judge", "judge.safetensors", "--data", "batch.npz"],
        "--data batch.npz: a judge knows no class of its pictures",
    ),
    (["--data", "digits"], "--data says what --inception and --judge compare with; give one of them"),
    (["--inception-sha256", "0" * 16], "--inception-sha256 is the hash of the file that --inception names"),
    (["--cell", "nano"], "--cell, --from, --gpus and --seeds train, and --weights draws; take one of them"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[" ".join(options) for options, _ in WRONG])
def test_wrong_options_are_one_line_and_write_nothing(drawing, repro_cli, options, message):
    code, _, err = repro_cli("generate", "--weights", "own.safetensors", "-o", "out", *options)
    assert code == 2 and err.startswith("repro: ") and err.count("\n") == 1 and message in err, err
    assert not Path("out").exists()


NOTHING_TRAINED = [
    (
        ["--cell", "nano", "--steps", "20"],
        "--steps is for drawing, which needs --weights FILE; a training takes all settings from its cell",
    ),
    (["--class-label", "3"], "--class-label is for drawing, which needs --weights FILE"),  # an option with a default
    (["--cell", "nano", "-o", "out"], "--output is for drawing"),
    ([], "nothing to do; train with --cell NAME, or draw with --weights FILE"),
    (["--seeds", "2"], "nothing to do"),
    (["--cell", "nan"], "generate.nan: no such section; did you mean 'nano'"),
]


@pytest.mark.parametrize(
    ("options", "message"), NOTHING_TRAINED, ids=[" ".join(options) for options, _ in NOTHING_TRAINED]
)
def test_options_that_name_no_training_are_one_line(ready, repro_cli, options, message):
    code, _, err = repro_cli("generate", *options)
    assert (code, err.count("\n")) == (2, 1) and message in err, err
    assert not Path("results/measured").exists() and not Path(".runs").exists()


def test_the_weights_are_those_that_were_scored(drawing):
    """The exported weights, the moving average, have the held-out loss of the record."""
    from repro.core.paths import find_root
    from repro.core.runtime import load_runtime
    from repro.data.cells import open_cell
    from repro.data.loader import EvalLoader
    from repro.inference.generate import DrawRequest, open_drawer
    from repro.tasks.generation.data import open_split
    from repro.tasks.generation.task import Generation

    cpu, paths = torch.device("cpu"), find_root()
    drawer = open_drawer(DrawRequest(weights=Path("own.safetensors"), output=Path("out")), cpu)
    tree = open_cell(paths, load_runtime(paths), "digits").open_tree()
    loader = EvalLoader(open_split(tree, "test", drawer.transform), batch_size=64)
    how = {
        "transform": drawer.transform,
        "sampling": drawer.sampling,
        "num_classes": 10,
        "label_dropout": 0.0,
        "seed": 0,
    }
    task = Generation(drawer.model, [], {"test": loader}, batch_size=64, device=cpu, **how)
    found = task.evaluate(drawer.model, "test")
    record = read_record(results(drawing) / "metrics.json")["metrics"]
    assert found["held_out_mse"] == pytest.approx(record["held_out_mse"], rel=1e-5)


def test_a_folder_of_other_pictures_is_left_alone(drawing, repro_cli):
    assert draw(repro_cli, "-o", "mine", "--samples", "3")[0] == 0
    assert draw(repro_cli, "-o", "mine", "--samples", "3", "--seed", "1")[0] == 0  # the same names: drawn anew
    code, _, err = draw(repro_cli, "-o", "mine", "--samples", "2")
    assert (code, err.count("\n")) == (2, 1) and "--output mine: holds 1 other pictures, e.g. 00002_digit_2.png" in err
    Path("file").write_text("")
    for name in ("file", "file/inside"):
        code, _, err = draw(repro_cli, "-o", name, "--samples", "1")
        assert (code, err.count("\n")) == (2, 1) and f"--output {name}: is a file or lies in one; name a folder" in err


WRONG_CELLS = [
    ("dit3_nano_patch4", "dit3_nano_patch", "no such denoiser; did you mean 'dit3_nano_patch"),
    ("dit3_nano_patch4", "vittt_nano_patch16_144", "vittt_nano_patch16_144: not a denoiser"),
    ("{depth: 1, embed_dim: 24}", "{depht: 1}", "cannot be built with"),
    ("{depth: 1, embed_dim: 24}", "{in_channels: 3}", "options: in_channels follows from transform; leave it out"),
    (
        "image_size: 16",
        "image_size: 18",
        "generate.nano: input of 18x18: height and width must be positive multiples of the patch size 4",
    ),
    ("channels: 1,", "channels: 2,", "generate.nano.transform.channels: int 2 is not one of 1, 3"),
    ("channels: 1,", "channels: 3, latents: {},", "transform.latents: digits holds pictures (digits); leave it out"),
    (
        "channels: 1,",
        "latents: {stride: 3},",
        "latents: need channels 3 and an image_size that is a multiple of their stride, 3",
    ),
    ("steps: 4,", "steps: 1001,", "generate.nano.sampling.steps: 1001 is out of range, must be <= 1000"),
    ("guidance: 2.0", "guidance: -2.0", "generate.nano.sampling.guidance: -2.0 is out of range, must be >= 0"),
    ("sampler: ddim", "sampler: dpm", "'dpm' is not one of ddpm, ddim"),
    ("ema_decay: 0.9", "drop_path: 0.1", "generate.nano.drop_path: 0.1 is out of range, must be <= 0"),
    ("ema_decay: 0.9", "label_dropout: 1.5", "generate.nano.label_dropout: 1.5 is out of range, must be <= 1"),
    ("judge.safetensors", "nobody.safetensors", "nobody.safetensors: no such file; train that classifier first"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG_CELLS)
def test_wrong_cells_are_one_line_and_train_nothing(ready, repro_cli, old, new, message):
    text = Path("params.yaml").read_text()
    before, cell = text[: text.index("generate:")], text[text.index("generate:") :]
    assert old in cell
    Path("params.yaml").write_text(before + cell.replace(old, new, 1))
    code, _, err = repro_cli("generate", "--cell", "nano")
    assert code == 2 and err.startswith("repro: ") and err.count("\n") == 1 and message in err, err
    assert not Path("results/measured").exists() and not Path(".runs").exists()


def test_a_denoiser_sees_nothing_in_pictures(drawing, repro_cli):
    (picture,) = list(Path("data/digits/test/digit_0").glob("*.png"))[:1]
    code, _, err = repro_cli("predict", str(picture), "--weights", "own.safetensors")
    assert (code, err.count("\n")) == (2, 1) and "`repro generate --weights` draws with it" in err


class Decoder(torch.nn.Module):
    """Latents (B, 4, h, w) to pictures eight times as large, whose first channel is that of the latents."""

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(latents[:, :3], scale_factor=8.0)


class Halves(torch.nn.Module):
    """A decoder of another VAE."""

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return latents[:, :3]


@pytest.fixture
def release(ready) -> Path:
    """A release's file: names and table of positions as there, beside the raw weights a moving average."""
    torch.manual_seed(0)
    model = build_denoiser("dit_small_patch8", num_classes=3)
    state = official_state(model)
    torch.save(
        {"model": {key: torch.zeros_like(value) for key, value in state.items()}, "ema": state, "args": {"steps": 1}},
        "release.pt",
    )
    return ready


def official_state(model: Denoiser) -> dict[str, torch.Tensor]:
    """The inverse of `official_state_dict`, by the names of the release."""
    from repro.models.dit import embed_positions

    renamed = {"pos_embed": embed_positions((4, 4), 384)[None]}
    first = {
        "patch_embed.": "x_embedder.proj.",
        "time_embed.": "t_embedder.mlp.",
        "class_embed.": "y_embedder.embedding_table.",
    }
    first |= {"head.": "final_layer.linear.", "modulation.": "final_layer.adaLN_modulation.1."}
    for key, value in model.state_dict().items():
        if key.startswith("blocks."):
            renamed[key.replace(".modulation.", ".adaLN_modulation.1.")] = value
        else:
            ours = next(prefix for prefix in first if key.startswith(prefix))
            renamed[first[ours] + key.removeprefix(ours)] = value
    return renamed


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_releases_file_draws_latents_that_a_decoder_turns_into_pictures(release, repro_cli):
    torch.jit.script(Decoder()).save("decoder.pt")
    # takes no more than one
    torch.export.save(torch.export.export(Decoder(), (torch.zeros(1, 4, 32, 32),)), "decoder.pt2")
    options = [
        "--weights",
        "release.pt",
        "--model",
        "dit_small_patch8",
        "--steps",
        "2",
        "--samples",
        "2",
        "--class-label",
        "1",
    ]
    found = []
    for name in ("decoder.pt", "decoder.pt2"):
        code, _, err = repro_cli("generate", *options, "--vae", name, "-o", name.replace(".", "_"))
        assert code == 0, err
        with Image.open(Path(name.replace(".", "_")) / "00001_1.png") as picture:
            assert picture.size == (256, 256) and picture.mode == "RGB"
            found.append(np.asarray(picture).astype(int))
    assert abs(found[0] - found[1]).max() <= 1 and found[0].std() > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_vae_file_that_is_none_is_one_line(release, repro_cli):
    torch.jit.script(Halves()).save("halves.pt")
    Path("text.pt").write_text("no decoder")
    Path("text.pt2").write_text("no decoder")
    for vae, message in (
        ([], "release.pt: draws latents; give their VAE's decoder with --vae FILE"),
        (["--vae", "absent.pt"], "absent.pt: no such VAE file"),
        (["--vae", "judge.safetensors"], "judge.safetensors: holds weights without their model; export the decoder"),
        (["--vae", "text.pt"], "--vae text.pt: not a readable TorchScript file"),
        (["--vae", "text.pt2"], "--vae text.pt2: not a readable file of torch.export"),
        (["--vae", "release.pt"], "--vae release.pt: not a readable TorchScript file"),
        (
            ["--vae", "halves.pt"],
            "--vae halves.pt: makes (1, 3, 32, 32) of latents of shape (1, 4, 32, 32), expected (1, 3, 256, 256)",
        ),
    ):
        code, _, err = repro_cli(
            "generate", "--weights", "release.pt", "--model", "dit_small_patch8", *vae, "-o", "out"
        )
        assert code == 2 and err.startswith("repro: ") and err.count("\n") == 1 and message in err, err
    code, _, err = repro_cli("generate", "--weights", "release.pt", "--model", "dit3_small_patch8", "-o", "out")
    assert code == 2 and "release.pt: does not fit dit3_small_patch8 as built with" in err and err.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.parametrize("profile", ["params.yaml", "profiles/mini.yaml", "profiles/paper.yaml"])
def test_the_cells_of_the_profiles_are_valid(profile):
    from repro.core.config import section_keys

    models = {
        load_section(GenerateParams, ROOT / profile, "generate", name).model
        for name in section_keys(ROOT / profile, "generate")
    }
    assert {model.partition("_")[0] for model in models} >= {"dit", "dit3"}
