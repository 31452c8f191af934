"""`repro explain`, `visualize` and `resolution` as a user runs them: figures and numbers."""

import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

from repro.core.record import read_record
from repro.models.checkpoints import open_weights
from tests.slow import slow
from tests.stages.helpers import NANO, WEIGHTS, add_params, find_record, read_metrics, save_model

DEIT = Path("artifacts/pretrain/deit/weights.safetensors")
VISUALIZE = """
visualize:
  cell: nano
  data: digits
  images: 12
  shown: 2
  receptive_fields:
    DeiT: {weights: artifacts/pretrain/deit/weights.safetensors}
    conv1d: {weights: artifacts/ablate/conv1d/weights.safetensors}
  field_images: 3
  probes: [steps=2, ascent]
  probe_images: 20
"""


@pytest.fixture
def weights(checkout) -> Path:
    """A checkout with the weights of a nano Vittt, earlier snapshots of it, and a DeiT."""
    names = ["weights", "snapshots/epoch_000", "snapshots/epoch_001"]
    for seed, name in enumerate(names):
        save_model(WEIGHTS.parent / f"{name}.safetensors", NANO, seed=seed, depth=2, chunk_size=4)
    save_model(DEIT, "deit_nano_patch16_144", depth=1)
    return WEIGHTS


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 90, 3), dtype=np.uint8)).save(path)
    return path


def is_figure(path: Path) -> bool:
    with Image.open(path) as image:
        return image.format == "PNG" and image.width >= 900 and np.asarray(image.convert("L")).std() > 5


SEEN = "out.png: 1 picture, resized to a short side of 64 px; the model sees the central 64x64"


@pytest.mark.parametrize(
    ("file", "map", "says"),
    [
        (WEIGHTS, "gmm", SEEN),
        slow(WEIGHTS, "reconstruction", SEEN),
        # another family has these two
        slow(DEIT, "erf", SEEN),
        (DEIT, "attention", "overlap (%)"),
    ],
)
def test_a_picture_becomes_a_figure(weights, picture, repro_cli, file, map, says):
    out = repro_cli.run("explain", str(picture), "--weights", str(file), "--map", map, "-o", "out.png", silent=True)
    assert is_figure(Path("out.png")) and says in out


@pytest.fixture
def models(checkout) -> tuple[str, ...]:
    """The options that compare a student with its softmax model."""
    softmax = save_model("softmax.safetensors", "t5_softmax_nano_patch4_32", img_size=32)
    student = save_model("student.safetensors", "t5_nano_patch4_32", seed=1, img_size=32, neighbours=3)
    return "--map", "attention", "--weights", student, "--teacher", softmax


def test_attention_before_and_after_linearising(models, picture, repro_cli):
    out = repro_cli.run("explain", str(picture), *models, "-o", "out.png", silent=True)
    assert is_figure(Path("out.png"))
    rows = [line.split() for line in out.splitlines() if line.startswith("layer ")]
    assert [row[2] for row in rows] == ["teacher", "before", "after", "even"] * 2
    # before and after, the first layer's keys are those of the projections' weights, which `before` inherits
    assert rows[0][3] == rows[1][3] != rows[2][3]


@pytest.mark.slow
def test_attention_of_a_data_set_is_recorded(models, repro_cli, monkeypatch):
    monkeypatch.setattr("repro.inference.attention._IMAGES", 4)
    out = repro_cli.run("explain", *models, "--data", "digits", silent=True)
    assert is_figure(Path("explained.png"))
    file = find_record("attention/*")
    metrics = read_record(file)["metrics"]
    assert metrics["options"] == {"neighbours": 3} and metrics["data"] == "digits" and metrics["tokens"] == 25
    assert set(metrics["by_layer"]) == {"teacher", "before", "after", "even"}
    assert all(len(values) == 2 for own in metrics["by_layer"].values() for values in own.values())
    assert f"the numbers are in {file}" in out
    repro_cli.run("explain", *models[:-2], "--data", "digits", silent=True)
    assert set(read_metrics(find_record("attention/*_no_teacher"))["by_layer"]) == {"t5_nano_patch4_32", "even"}
    assert read_metrics(file) == metrics


def test_a_probe_prints_both_accuracies(weights, repro_cli):
    out = repro_cli.run("explain", "--probe", "steps=1", silent=True)
    assert "359 test images" in out and "(+0.00)" in out and "Liu et al. report: more inner steps" in out


@pytest.mark.parametrize("name", ["ladder_vit3_nano_patch4_32", "lact_nano_patch4_32"])
def test_a_probe_of_a_ladder_is_recorded(checkout, repro_cli, name):
    file = Path("artifacts/replications/made_up/weights.safetensors")
    save_model(file, name, depth=1, img_size=32)
    out = repro_cli.run("explain", "--probe", "steps=2", "--weights", str(file), silent=True)
    assert "359 test images" in out
    assert "inner loss before and after its steps, with steps=2" in out
    metrics = read_metrics(find_record(f"probes/{name}_digits_*/steps2"))
    about = {"model": name, "data": "digits", "split": "test", "probe": "steps=2", "options": {}}
    assert about.items() <= metrics.items()
    probed, unchanged = metrics["probed"], metrics["unchanged"]
    assert probed["inner_loss_after"] < unchanged["inner_loss_after"] < unchanged["inner_loss_before"]
    assert probed["inner_loss_before"] == pytest.approx(unchanged["inner_loss_before"])


def test_what_visualize_leaves(weights, repro_cli):
    """And that it needs the weights before training."""
    add_params(Path(), VISUALIZE)
    before = {}
    for _ in range(2):
        repro_cli.run("visualize", silent=True)
        folder = Path("results/visualize")
        written = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "run.json"}
        assert before in ({}, written)
        before = written
    names = ("fig3_gradient_magnitude", "fig8_receptive_field", "fig11_reconstruction")
    assert all(is_figure(folder / f"{name}.png") for name in names)
    metrics = read_record(folder / "metrics.json")["metrics"]
    about = {"cell": "nano", "model": NANO, "data": "digits", "kind": "digits", "image_size": 64}
    assert {**about, "held_out_images": 12}.items() <= metrics.items()
    fields = metrics["receptive_fields"]
    assert fields["conv1d"] == {
        "radius_50_px": None,
        "reason": "artifacts/ablate/conv1d/weights.safetensors is missing",
    }
    assert 0 < fields["DeiT"]["radius_50_px"] < fields["DeiT"]["radius_90_px"] < 46
    # 16 patches in chunks of 4, from both ends: half of them
    assert metrics["gradient_magnitude"]["after"]["first_chunks_tokens_percent"] == 50
    assert metrics["gradient_magnitude"]["after"]["top30_share_percent"] > 100 * 5 / 16
    assert list(metrics["reconstruction_loss"]) == ["epoch_0", "epoch_1"]
    assert metrics["probes"]["steps=2"]["held_out_images"] == 20
    (WEIGHTS.parent / "snapshots/epoch_000.safetensors").unlink()
    assert "epoch 0; add 0 to pretrain.nano.snapshot_epochs" in repro_cli.refuse("visualize")


RESOLUTION = f"""
resolution:
  data: digits
  models: {{vittt: {WEIGHTS}, deit: {DEIT}}}
  image_sizes: [64, 96]
  batch_size: 50
  repeats: 3
"""


def count_right(weights: Path, size: int) -> float:
    """Percent of the test images, each read and resized by torchvision, that a model built for this size gets right."""
    model = open_weights(weights).build(size).eval()
    resize = transforms.Resize((size, size), transforms.InterpolationMode.BICUBIC)
    normalise = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    folder = ImageFolder("data/digits/test", transforms.Compose([resize, transforms.ToTensor(), normalise]))
    pictures, labels = zip(*folder, strict=True)
    with torch.inference_mode():
        return 100 * (model(torch.stack(pictures)).argmax(1) == torch.tensor(labels)).double().mean().item()


def test_what_resolution_leaves(weights, repro_cli):
    """Accuracies by hand, times that are measured, and the figure."""
    models = {"vittt": weights, "deit": DEIT}
    add_params(Path(), RESOLUTION)
    code, out, err = repro_cli("resolution")
    assert code == 0
    metrics = read_record(Path("results/resolution/metrics.json"))["metrics"]
    assert (metrics["train_image_size"], metrics["split"], metrics["held_out_images"]) == (64, "test", 359)
    rows = metrics["evaluated"]
    assert [(row["family"], row["image_size"]) for row in rows] == [(f, [s, s]) for f in models for s in (64, 96)]
    for row in rows:
        # an image may fall to the other side of a tie of two classes where sums are rounded otherwise
        right = count_right(models[row["family"]], row["image_size"][0])
        assert row["top1_percent"] == pytest.approx(right, abs=100 / 359 + 1e-6)
        # the samples are written with four decimals
        assert len(row["samples_ms"]) == 3
        assert row["latency_ms"] == pytest.approx(statistics.median(row["samples_ms"]), abs=1e-4)
    assert "vittt_nano_patch16_144 at 96: top-1" in out + err
