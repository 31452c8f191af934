"""Official checkpoints: all containers that they come in, one line for every misfit, and positions on another grid."""

import argparse
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from repro.core.errors import UserError
from repro.models.checkpoints import open_weights
from repro.models.vit3 import ViT3
from repro.models.weights import open_file
from tests.models.helpers import below, load_official, nano, read_data, state_unchanged


@pytest.fixture(scope="module")
def release() -> dict:
    """A small ViT3 from the official release: `weights` under their official names, x and logits."""
    tensors = read_data("vit3_model.npz")
    return {"weights": below(tensors, "state_dict/"), "x": tensors["x"], "logits": tensors["logits"]}


def small() -> ViT3:
    return ViT3(img_size=64, num_classes=11, embed_dim=48, depth=2, num_heads=3).eval()


class CfgNode(dict):
    """Like the class of yacs: a dict with attributes of its own, pickled under the name of its package."""

    def __init__(self, content):
        super().__init__(content)
        self.__dict__["__immutable__"] = True


CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"


def mmcls(weights: dict) -> dict:
    names = {k: k.replace("head.", "head.fc.") if k.startswith("head.") else f"backbone.{k}" for k in weights}
    meta = {"epoch": 300, "CLASSES": ("tench", "goldfish")}
    return {"meta": meta, "state_dict": {names[k]: v for k, v in weights.items()}}


CONTAINERS = {
    "bare": lambda weights: weights,
    "model": lambda weights: {"model": weights},
    "training": lambda weights: {
        "model": weights,
        "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]},
        "epoch": 299,
        "max_accuracy": 76.5,
        "args": argparse.Namespace(lr=1e-3, output_dir=""),
        "config": CfgNode({"MODEL": CfgNode({"NAME": "vit3"})}),
    },
    "parallel": lambda weights: {"state_dict": {f"module.{name}": value for name, value in weights.items()}},
    "mmcls": mmcls,
}


@pytest.mark.parametrize(("container", "zipped"), [*((name, True) for name in CONTAINERS), ("training", False)])
def test_containers_give_the_official_logits(release, tmp_path, monkeypatch, container, zipped):
    for name in ("yacs", "yacs.config"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["yacs.config"].CfgNode = CfgNode
    path = tmp_path / "official.pth"
    torch.save(CONTAINERS[container](release["weights"]), path, _use_new_zipfile_serialization=zipped)
    monkeypatch.undo()  # the reader has no yacs
    model = small()
    load_official(model, open_file(path)[0])
    with torch.no_grad():
        torch.testing.assert_close(model(release["x"]), release["logits"], rtol=1e-5, atol=1e-5)


WRAPPED = ["module.", "module._orig_mod.", "_orig_mod.module.", "_orig_mod._orig_mod.", "module._orig_mod.module."]
WRAPPED += ["module.backbone.", "backbone._orig_mod.module.", "_orig_mod.backbone._orig_mod."]


@pytest.mark.parametrize("prefix", WRAPPED)
def test_wrappers_in_any_order_are_taken_off(tmp_path, prefix):
    """Before all names, or before those that mmcls puts under its backbone."""
    weights = {"blocks.0.norm1.weight": torch.ones(2), "head.weight": torch.zeros(3), "module_.x": torch.zeros(1)}
    wrapped = {f"{prefix}{name}": value for name, value in weights.items()}
    if "backbone" in prefix:
        wrapped[f"{prefix.replace('backbone.', '')}head.fc.weight"] = wrapped.pop(f"{prefix}head.weight")
    torch.save({"model": wrapped}, tmp_path / "wrapped.pth")
    found, _ = open_file(tmp_path / "wrapped.pth")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("name", ["blocks.0._orig_mod.norm1.weight", "_orig_mod.blocks._orig_mod.0.norm1.weight"])
def test_compiled_parts_have_the_names_of_the_model(tmp_path, name):
    torch.save({name: torch.ones(2)}, tmp_path / "compiled.pth")
    assert [*open_file(tmp_path / "compiled.pth")[0]] == ["blocks.0.norm1.weight"]


@pytest.mark.parametrize("prefix", ["wrapped.", "student._orig_mod.", "encoder.module."])
def test_names_of_another_model_are_named(release, tmp_path, prefix):
    torch.save({f"{prefix}{name}": value for name, value in release["weights"].items()}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=rf"other\.pth: .*{re.escape(prefix.replace('_orig_mod.', ''))}") as caught:
        open_weights(tmp_path / "other.pth", model="vit3_nano_patch16_144").build()
    assert "without its head" not in str(caught.value)


def without(weights, *names):
    return {name: value for name, value in weights.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: without(w, "blocks.1.attn.w3"), r"as built: blocks\.1\.attn\.w3 missing$"),
        (lambda w: w | {"pos_embed": torch.zeros(1, 16, 48)}, r"as built: pos_embed not used$"),
        (lambda w: w | {"head.weight": torch.zeros(9, 48)}, r"built: head\.weight is \(9, 48\), expected \(11, 48\)$"),
        (
            lambda w: {"spare": torch.zeros(1)} | without(w, "norm.bias", "norm.weight", "head.bias"),
            r"head\.bias missing; norm\.weight missing; norm\.bias missing; and 1 more$",
        ),
        (
            lambda w: {f"x.{name}": value for name, value in w.items()},
            r"as built: (x\.\S+ not used; ){2}\S+ missing; and \d+ more$",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(release, change, message):
    model = small()
    with state_unchanged(model), pytest.raises(UserError, match=message):
        load_official(model, change(release["weights"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds no state dict"),
        ({}, "holds no state dict"),
        ({"model": {"lr": 0.1}}, "holds no state dict"),
        ({"backbone.x": torch.zeros(1), "x": torch.zeros(1)}, "both backbone.x and x"),
        ({"model": {}, "folder": Path("x")}, r"holds objects of pathlib\.\S+, which are never loaded from a file"),
    ],
)
def test_files_of_something_else_are_one_line(tmp_path, content, message):
    path = tmp_path / "other.pth"
    torch.save(content, path)
    with pytest.raises(UserError, match=f"^{path}: .*{message}") as caught:
        open_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kept", "zipped"), [(0, True), (2, False), (100, True), (0.5, False), (-1, True), (-1, False)]
)
def test_files_cut_short_are_one_line(release, tmp_path, zipped, kept):
    path = tmp_path / "short.pth"
    torch.save({"model": release["weights"]}, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    message = f"^{path}: not a readable checkpoint of PyTorch.*; it may have been cut short"
    with pytest.raises(UserError, match=message) as caught:
        open_file(path)
    assert "\n" not in str(caught.value)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("reached",)


def test_no_code_of_a_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"x": torch.zeros(1)}, "args": Attack()}, "attack.pth")
    with pytest.raises(UserError, match="holds objects of posix.mkdir"):
        open_file(Path("attack.pth"))
    assert not Path("reached").exists()


@pytest.mark.parametrize("size", [64, 32])
def test_positions_of_another_stride_are_refused_at_any_size(size):
    state = nano("vim", img_size=64).state_dict() | {"pos_embed": torch.zeros(1, 50, 64)}
    with pytest.raises(UserError, match=r"pos_embed is \(1, 50, 64\), expected"):
        load_official(nano("vim", img_size=size), state, (64, 64))
