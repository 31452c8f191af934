"""Weights of classification runs in an adapter's backbone: which keys are used, and what is refused."""

from collections import Counter
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import repro.models  # noqa: F401  registers the models
from repro.core.errors import UserError
from repro.models.adapter import build_adapter
from repro.models.transfer import load_backbone
from repro.models.weights import save_weights

PREPROCESSING = {"input_size": [3, 144, 144], "interpolation": "bicubic", "crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3}
NANO = "vittt_nano_patch16_144"


def trained(folder: Path, name: str = NANO, **options) -> tuple[Path, torch.nn.Module]:
    """What a classification run leaves behind."""
    torch.manual_seed(1)
    model = timm.create_model(name, num_classes=10, **options)
    path = folder / "weights.safetensors"
    options = {**options, "num_classes": 10, "img_size": 144}
    save_weights(path, model, name=name, options=options, preprocessing=PREPROCESSING, classes=list("0123456789"))
    return path, model


@pytest.mark.parametrize(
    "name, options",
    [
        *((f"{family}_nano_patch16_144", {}) for family in ("vittt", "vim", "vrwkv", "vit3", "deit")),
        (NANO, {"pool": "double", "design": "dual", "w0": "frozen"}),
    ],
)
def test_every_key_is_accounted_for(tmp_path, name, options):
    path, model = trained(tmp_path, name, **options)
    adapter = build_adapter(name, options=options)
    report = load_backbone(adapter, path)
    state, own = model.state_dict(), adapter.trunk.state_dict()
    not_needed = {key for key in state if key.startswith(("norm.", "head."))} | ({"cls_token"} if "deit" in name else set())
    new_scales = {f"backbone.model.blocks.{i}.ls{j}.gamma" for i in range(4) for j in (1, 2)} if "deit" in name else set()
    assert {key for key in state if report[key] == "used"} == set(state) - not_needed
    assert {key for key in state if report[key] == "expected: not needed"} == not_needed
    new = {key for key, line in report.items() if line == "expected: new"}
    assert new == {key for key in adapter.state_dict() if not key.startswith("backbone.")} | new_scales
    assert Counter(report.values()).keys() == {"used", "expected: not needed", "expected: new"}
    assert all(torch.equal(own[key], state[key]) for key in state if report[key] == "used")


def test_the_tokens_are_those_of_the_trained_model(tmp_path):
    path, model = trained(tmp_path)
    adapter, image, found = build_adapter(NANO).eval(), torch.randn(1, 3, 160, 96), []
    load_backbone(adapter, path)
    adapter.trunk.blocks[-1].register_forward_hook(lambda module, args, out: found.append(out))
    with torch.no_grad():
        adapter(image)
        expected = model.eval().forward_intermediates(image, 1, output_fmt="NLC", intermediates_only=True)[0]
    assert torch.equal(found[0], expected)


def test_timms_weights(tmp_path):
    model = timm.create_model("deit_nano_patch16_144", num_classes=1000)
    adapter = build_adapter("deit_nano_patch16_144")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save({"model": model.state_dict()}, tmp_path / "model.pth")
    for name in ("model.safetensors", "model.pth"):
        report = load_backbone(adapter, tmp_path / name)
        assert report["cls_token"] == "expected: not needed" and report["pos_embed"] == "used"
        assert torch.equal(adapter.trunk.pos_embed, model.pos_embed)


def test_official_weights_under_their_own_names(tmp_path):
    model = timm.create_model("vrwkv_nano_patch16_144", num_classes=1000)
    theirs = {"blocks.": "layers.", "patch_embed.": "patch_embed.projection.", "norm.": "ln1."}
    state = {}
    for key, value in model.state_dict().items():
        start = next((start for start in theirs if key.startswith(start)), "")
        state[theirs.get(start, "") + key.removeprefix(start)] = value
    torch.save({"state_dict": state}, tmp_path / "official.pth")
    adapter = build_adapter("vrwkv_nano_patch16_144")
    report = load_backbone(adapter, tmp_path / "official.pth")
    assert report["norm.weight"] == "expected: not needed" and report["blocks.3.att.key.weight"] == "used"
    assert torch.equal(adapter.trunk.blocks[3].att.key.weight, model.blocks[3].att.key.weight)


def lost_key(path, key="blocks.1.attn.qkv.weight", **options):
    state = timm.create_model("deit_nano_patch16_144", **options).state_dict()
    del state[key]
    save_file(state, path)


@pytest.mark.parametrize(
    "name, options, change, message",
    [
        (NANO, {}, lambda path: path.unlink(), "no such weights file"),
        (NANO, {}, lambda path: path.write_bytes(b""), "not a readable safetensors file"),
        (NANO, {}, lambda path: path.write_bytes(path.read_bytes()[:-1]), "not a readable safetensors file"),
        (NANO, {}, lambda path: save_file({"x": torch.zeros(1)}, path), "no official weights are known for vittt_nano"),
        ("vim_nano_patch16_144", {}, None, "holds weights of vittt_nano_patch16_144, not of vim_nano_patch16_144"),
        (NANO, {"chunk_size": 8}, None, "built with no options, the backbone is built with {'chunk_size': 8}"),
        (NANO, {"pool": "max"}, None, "the backbone is built with {'pool': 'max'}"),
        (NANO, {"img_size": 96}, None, r"pos_embed is \(1, 81, 64\), expected \(1, 36, 64\); give it"),
        ("deit_nano_patch16_144", {}, lost_key, "blocks.1.attn.qkv.weight missing"),
        ("deit_nano_patch16_144", {}, lambda path: lost_key(path, "blocks.2.ls1.gamma", init_values=0.1), "blocks.2.ls1.gamma missing"),
        ("deit_nano_patch16_144", {}, lambda path: save_file({"x": torch.zeros(1)}, path), "x not used; pos_embed missing"),
    ],
)
def test_what_is_refused_leaves_the_adapter_as_it_was(tmp_path, name, options, change, message):
    path, _ = trained(tmp_path)
    if change:
        change(path)
    adapter = build_adapter(name, options=options)
    before = {key: value.clone() for key, value in adapter.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_backbone(adapter, path)
    assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())
