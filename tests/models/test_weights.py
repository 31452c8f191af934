"""This project's weights files: what goes in comes out, and a wrong file is one line."""

import hashlib

import pytest
import timm
import torch
from safetensors.torch import save_file

import repro.models  # noqa: F401  registers the models
from repro.core.errors import UserError
from repro.core.hashing import require_hash
from repro.models import weights
from repro.models.checkpoints import open_own, open_weights
from repro.models.weights import METADATA_KEY, open_file, save_weights
from repro.tasks import load_tasks
from repro.tasks.generation.data import open_denoiser
from tests.models.helpers import PREPROCESSING, rewrite_description

NAME, OPTIONS = "vittt_nano_patch16_144", {"num_classes": 3, "design": "dual"}
DESCRIBED = {"options": OPTIONS, "preprocessing": PREPROCESSING, "classes": ["a", "b", "c"]}


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(NAME, **OPTIONS).eval()
    path = tmp_path / "weights.safetensors"
    save_weights(path, model, name=NAME, **DESCRIBED)
    return path, model


def test_bytes_depend_on_the_content_alone(saved, tmp_path):
    path, model = saved
    turned = DESCRIBED | {"options": dict(reversed(OPTIONS.items()))}
    save_weights(tmp_path / "again", model, name=NAME, **turned)
    assert path.read_bytes() == (tmp_path / "again").read_bytes()


def test_missing_and_foreign_files_are_told_apart(saved, tmp_path):
    for name in ("none.safetensors", "none.pth"):
        with pytest.raises(UserError, match=f"{name}: no such weights file"):
            open_file(tmp_path / name)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"x": torch.zeros(1)}, foreign)
    assert open_file(foreign) == ({"x": torch.zeros(1)}, None)
    with pytest.raises(UserError, match=r"foreign\.safetensors: not a weights file of this project"):
        open_own(foreign)
    assert open_file(saved[0])[1] == DESCRIBED | {"model": NAME}


class Holder(torch.nn.Module):
    """Something with a state of a few bytes."""

    def __init__(self, state=None):
        super().__init__()
        self.state = state or {"norm.bias": torch.arange(4.0), "norm.weight": torch.ones(4, dtype=torch.float16)}

    def state_dict(self):
        return self.state


def save_tiny(path, state=None):
    described = DESCRIBED | {"options": {}, "classes": ["a", 'b\u00e4"\\']}
    save_weights(path, Holder(state), name=NAME, task={"name": "detect"}, **described)


@pytest.mark.parametrize("opening", [open_weights, open_denoiser])
def test_every_flipped_byte_is_one_line(tmp_path, opening):
    path = tmp_path / "w.safetensors"
    save_tiny(path)
    opening(path)
    content = path.read_bytes()
    for place in range(len(content)):
        mask = (1, 0x20, 0x40, 0x80, 0x29)[place % 5]  # the last makes a tab of a space
        path.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"w\.safetensors") as caught:
            opening(path)
        assert "\n" not in str(caught.value)


def test_a_file_from_before_the_checksums_is_read_with_a_line(tmp_path, capsys):
    save_tiny(tmp_path / "old.safetensors")
    state, _ = open_file(tmp_path / "old.safetensors")
    assert capsys.readouterr().err == ""
    rewrite_description(tmp_path / "old.safetensors")
    assert torch.equal(open_weights(tmp_path / "old.safetensors").read_state()["norm.bias"], state["norm.bias"])
    assert capsys.readouterr().err.count("old.safetensors: has no checksum") == 1


@pytest.mark.parametrize("metadata", ["", "[]", "{}", '{"model": "vittt_nano_patch16_144"}'])
def test_metadata_that_are_none_are_one_line(tmp_path, metadata):
    save_file({"x": torch.zeros(1)}, tmp_path / "w.safetensors", metadata={METADATA_KEY: metadata})
    with pytest.raises(UserError, match=r"w\.safetensors: damaged"):
        open_file(tmp_path / "w.safetensors")


WRONG = {
    "model": [3, None],
    "options": [[], "x"],
    "preprocessing": [None, []],
    "classes": ["ab", [1, 2]],
    "task": ["detect"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_metadata_of_another_kind_are_one_line(saved, key, value):
    rewrite_description(saved[0], lambda described: described.update({key: value}))
    with pytest.raises(UserError, match=r"weights\.safetensors: damaged"):
        open_file(saved[0])


LACKING = {
    "detect": ["transform", "mask_rcnn"],
    "segment": ["transform", "upernet"],
    "classify": ["input_size", "interpolation", "crop_pct", "mean", "std"],
}


@pytest.mark.parametrize(("task", "part"), [(task, part) for task, parts in LACKING.items() for part in parts])
def test_a_part_that_the_metadata_lack_is_named_with_the_file(tmp_path, task, part):
    spec, path, options = load_tasks()[task], tmp_path / "weights.safetensors", {"depth": 1, "num_classes": 2}
    stated = {} if task == "classify" else {"name": task, "transform": {}, spec.head: {}}
    described = {"options": options, "preprocessing": dict(PREPROCESSING), "classes": ["a", "b"], "task": stated}
    del (stated or described["preprocessing"])[part]
    save_weights(path, timm.create_model(NAME, **options), name=NAME, **described)
    checkpoint = open_own(path)
    with pytest.raises(UserError, match=rf"weights\.safetensors: .*lack '{part}'") as caught:
        spec.open_predictor(checkpoint, torch.device("cpu"), 0.3)
    assert "\n" not in str(caught.value)


NONFINITE = [torch.tensor([1.0, value]) for value in (float("nan"), float("inf"), float("-inf"))]
UNKNOWN = [torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.float8_e4m3fn), torch.eye(2).to_sparse()]
REFUSED = [("official.pth", bad) for bad in NONFINITE + UNKNOWN]
REFUSED += [(kind, NONFINITE[0]) for kind in ("own.safetensors", "official.safetensors")]


@pytest.mark.parametrize(("kind", "bad"), REFUSED)
def test_tensors_that_no_training_leaves_are_refused(tmp_path, kind, bad):
    path, state = tmp_path / kind, {"fine": torch.zeros(2), "planted": bad}
    if kind == "own.safetensors":
        save_tiny(path, state)
    elif kind == "official.safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    message = rf"{kind}: planted (has 1 values|is (complex64|float8_e4m3fn|float32 \(torch.sparse_coo))"
    with pytest.raises(UserError, match=message) as caught:
        open_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_integers_stand_only_where_the_model_has_some(dtype):
    model = torch.nn.BatchNorm1d(2)
    state = model.state_dict()
    weights.load_state(model, {key: x.to(dtype) if x.is_floating_point() else x for key, x in state.items()}, "w")
    for key in ("weight", "num_batches_tracked"):
        wrong = state[key].long() if key == "weight" else state[key].float()
        with pytest.raises(UserError, match=rf"w: {key} is \w+, expected \w+"):
            weights.load_state(model, state | {key: wrong}, "w")


@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [
        ("vim", "layers.0.norm.weight", "blocks.0.norm.weight"),
        ("vrwkv", "ln1.weight", "norm.weight"),
        ("vit3", "patch_embed.proj.bias", "patch_embed.bias"),
        ("t5", "blocks.0.attn.q_conv2d.weight", "blocks.0.attn.dwc_q.weight"),
        ("hvit3", "layers.0.x", "stages.0.x"),
        ("mambavision", "levels.0.blocks.0.x", "stages.0.blocks.0.x"),
        ("vmamba", "layers.0.blocks.0.op.x", "stages.0.blocks.0.mixer.x"),
        ("dit", "x_embedder.proj.bias", "patch_embed.bias"),
    ],
)
def test_two_keys_that_become_one_are_refused(family, theirs, ours):
    assert "unknown.weight" in weights.translate_official({"unknown.weight": torch.zeros(1)}, f"repro.models.{family}")
    for keys in ((theirs, ours), (ours, theirs)):
        with pytest.raises(UserError) as caught:
            weights.translate_official({key: torch.zeros(2) for key in keys}, f"repro.models.{family}")
        assert theirs in str(caught.value) and ours in str(caught.value)


def test_a_flipped_byte_of_a_tensor_in_a_zip_is_one_line(tmp_path):
    path, values = tmp_path / "w.pth", torch.arange(1000, 1064, dtype=torch.float32)
    torch.save({"x": values}, path)
    content = path.read_bytes()
    start = content.index(values.numpy().tobytes())
    for place in range(start, start + 256, 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"w\.pth: .*checksum") as caught:
            open_file(path)
        assert "\n" not in str(caught.value)


def test_a_hash_in_a_files_name_is_that_of_its_content(tmp_path):
    torch.save({"x": torch.zeros(1)}, tmp_path / "w.pth")
    digits = hashlib.sha256((tmp_path / "w.pth").read_bytes()).hexdigest()
    first, second = digits[:8], digits[1:9]
    for name, right in ((f"net-{first}.pth", True), (f"net-{first}.pth.tar", True), (f"net-{second}.pth", False)):
        (tmp_path / name).write_bytes((tmp_path / "w.pth").read_bytes())
        if right:
            assert open_file(tmp_path / name)[0].keys() == {"x"}
        else:
            with pytest.raises(UserError, match=rf"{name}: has SHA-256 {digits[:16]}.*rename"):
                open_file(tmp_path / name)


def test_a_stated_hash_is_that_of_the_file(tmp_path):
    path = tmp_path / "w.pth"
    path.write_bytes(b"abc")
    require_hash(path, "ba7816bf")  # FIPS 180-4, example B.1
    require_hash(path, "BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD")
    require_hash(path, None)
    wrong = {"ba7816bf0": "w.pth: has SHA-256", "ba7816b": "8 hex digits", "ba7816bg": "8 hex digits"}
    for stated, message in wrong.items():
        with pytest.raises(UserError, match=message):
            require_hash(path, stated)
    with pytest.raises(UserError, match="no such file"):
        require_hash(tmp_path / "none", "ba7816bf")
    with pytest.raises(UserError, match=r"^a\.b\.sha256: ba78"):  # the key of a params file, not the option
        require_hash(path, "ba78", stated="a.b.sha256:")
