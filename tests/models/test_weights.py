"""This project's weights files: what goes in comes out, and a wrong file is one line."""

import json

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import repro.models  # noqa: F401  registers the models
from repro.core.errors import UserError
from repro.models.checkpoints import open_weights
from repro.models.weights import METADATA_KEY, is_foreign, read_metadata, read_state, save_weights

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


class Holder(torch.nn.Module):
    """Something with a state of a few bytes."""

    def __init__(self, state=None):
        super().__init__()
        self.state = state or {"norm.bias": torch.arange(4.0), "norm.weight": torch.ones(4, dtype=torch.float16)}

    def state_dict(self):
        return self.state


def save_tiny(path, state=None):
    described = {"options": {}, "preprocessing": PREPROCESSING, "classes": ["a", 'b\u00e4"\\'], "task": {"name": "detect"}}
    save_weights(path, Holder(state), name=NAME, **described)


@pytest.mark.parametrize("model", [None, NAME])
def test_every_flipped_byte_is_one_line(tmp_path, model):
    path = tmp_path / "w.safetensors"
    save_tiny(path)
    assert open_weights(path, model=model).read_state()["norm.bias"].tolist() == [0, 1, 2, 3]
    content = path.read_bytes()
    for place in range(len(content)):
        mask = (1, 0x20, 0x40, 0x80, 0x29)[place % 5]  # the last makes a tab of a space
        path.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"w\.safetensors") as caught:
            open_weights(path, model=model).read_state()
        assert "\n" not in str(caught.value)


def test_a_file_from_before_the_checksums_is_read_with_a_line(tmp_path, capsys):
    save_tiny(tmp_path / "new.safetensors")
    state = read_state(tmp_path / "new.safetensors")
    assert capsys.readouterr().err == ""
    with safe_open(tmp_path / "new.safetensors", framework="pt") as stream:
        metadata = json.loads(stream.metadata()[METADATA_KEY])
    del metadata["checksum"]
    save_file(state, tmp_path / "old.safetensors", metadata={METADATA_KEY: json.dumps(metadata)})
    assert torch.equal(open_weights(tmp_path / "old.safetensors").read_state()["norm.bias"], state["norm.bias"])
    assert capsys.readouterr().err.count("old.safetensors: has no checksum") == 1


@pytest.mark.parametrize("metadata", ["", "[]", "{}", '{"model": "vittt_nano_patch16_144"}'])
def test_metadata_that_are_none_are_one_line(tmp_path, metadata):
    save_file({"x": torch.zeros(1)}, tmp_path / "w.safetensors", metadata={METADATA_KEY: metadata})
    with pytest.raises(UserError, match=r"w\.safetensors: damaged"):
        read_metadata(tmp_path / "w.safetensors")
