"""This project's weights files: what goes in comes out, and a wrong file is one line."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import repro.models  # noqa: F401  registers the models
from repro.core.errors import UserError
from repro.models.checkpoints import open_weights
from repro.models.weights import is_foreign, read_metadata, save_weights

NAME, OPTIONS = "vittt_nano_patch16_144", {"num_classes": 3, "design": "dual"}
PREPROCESSING = {"input_size": [3, 144, 144], "interpolation": "bicubic", "crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(NAME, **OPTIONS).eval()
    path = tmp_path / "weights.safetensors"
    save_weights(path, model, name=NAME, options=OPTIONS, preprocessing=PREPROCESSING, classes=["a", "b", "c"])
    return path, model


def test_round_trip(saved):
    path, model = saved
    again = open_weights(path).build()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(image), again(image)) and not again.training
    assert read_metadata(path) == {"model": NAME, "options": OPTIONS, "preprocessing": PREPROCESSING, "classes": ["a", "b", "c"]}


def test_bytes_depend_on_the_content_alone(saved, tmp_path):
    path, model = saved
    save_weights(
        tmp_path / "again", model, name=NAME, options=dict(reversed(OPTIONS.items())), preprocessing=PREPROCESSING, classes=["a", "b", "c"]
    )
    assert path.read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.parametrize("kept", [0, 7, 1000, -1])
def test_a_file_cut_short_is_named(saved, kept):
    path, _ = saved
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        open_weights(path)


def test_missing_and_foreign_files_are_told_apart(saved, tmp_path):
    with pytest.raises(UserError, match="no such weights file"):
        read_metadata(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="no such weights file"):
        is_foreign(tmp_path / "none.pth")
    foreign = tmp_path / "foreign.safetensors"
    save_file({"x": torch.zeros(1)}, foreign)
    with pytest.raises(UserError, match="none of this project's metadata"):
        read_metadata(foreign)
    assert is_foreign(foreign) and not is_foreign(saved[0])
