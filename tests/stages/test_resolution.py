"""`repro resolution`: accuracies by hand, times that are measured, the figure, and wrong inputs as one line."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from repro.models.checkpoints import open_weights
from tests.stages.helpers import NANO, WEIGHTS, save_model
from tests.stages.test_explain import DEIT

PARAMS = """
resolution:
  data: digits
  models: {vittt: %s, deit: %s}
  image_sizes: [64, 96]
  batch_size: 50
  repeats: 3
"""


@pytest.fixture
def models(checkout) -> dict[str, Path]:
    save_model(WEIGHTS, NANO, depth=2, chunk_size=4)
    save_model(DEIT, "deit_nano_patch16_144", depth=1)
    with open("params.yaml", "a") as stream:
        stream.write(PARAMS % (WEIGHTS, DEIT))
    return {"vittt": WEIGHTS, "deit": DEIT}


def count_right(weights: Path, size: int) -> float:
    """Percent of the test images, each read and resized by Pillow, that a model built for this size gets right."""
    model = open_weights(weights).build(size).eval()
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    files = sorted(Path("data/digits/test").rglob("*.png"))
    pictures = [Image.open(file).convert("RGB").resize((size, size), Image.Resampling.BICUBIC) for file in files]
    pixels = torch.stack([torch.from_numpy(np.array(picture)) for picture in pictures]).permute(0, 3, 1, 2)
    labels = torch.tensor([int(file.parent.name[-1]) for file in files])
    with torch.inference_mode():
        return 100 * (model((pixels / 255 - mean) / std).argmax(1) == labels).double().mean().item()


def test_rows_figure_and_lines(models, repro_cli):
    code, out, err = repro_cli("resolution")
    assert code == 0
    metrics = json.loads(Path("results/resolution/metrics.json").read_text())["metrics"]
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
        assert isinstance(row["noisy"], list)
    assert "vittt_nano_patch16_144 at 96: top-1" in out + err
    with Image.open("results/resolution/accuracy_and_time.png") as figure:
        assert figure.width > 900 and np.asarray(figure.convert("L")).std() > 5
