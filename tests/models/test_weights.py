"""Weights files: what goes in comes out, and a wrong file is one line."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import repro.models  # noqa: F401
from repro.core.errors import UserError
from repro.models.weights import build_from_weights, load_weights, read_metadata, save_weights

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
    again, metadata = build_from_weights(path)
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(image), again(image))
    assert metadata == {"model": NAME, "options": OPTIONS, "preprocessing": PREPROCESSING, "classes": ["a", "b", "c"]}


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
        build_from_weights(path)


def test_weights_of_another_model_or_other_options_are_refused(saved):
    path, _ = saved
    with pytest.raises(UserError, match="holds weights of vittt_nano_patch16_144, not of deit_tiny_patch16_224"):
        load_weights(path, timm.create_model("deit_tiny_patch16_224", depth=1), name="deit_tiny_patch16_224")
    with pytest.raises(UserError, match="does not fit .*options were"):
        load_weights(path, timm.create_model(NAME, num_classes=4), name=NAME)


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such weights file"):
        read_metadata(tmp_path / "none.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(UserError, match="without this project's metadata"):
        read_metadata(tmp_path / "foreign.safetensors")
