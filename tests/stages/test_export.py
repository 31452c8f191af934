"""`repro export`: the target programs read the files, and what cannot be exported is one line."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.data.readers import create_reader

import repro.inference.export
from repro.core.hashing import hash_file
from repro.models.checkpoints import open_weights
from repro.models.registry import build_model
from repro.models.weights import save_weights
from tests.data_sets.made import picture
from tests.models.helpers import nano, shaken
from tests.slow import first, slow

CLASSES = ["1", "10", "2"]  # in the order of the logits
PREPROCESSING = {"input_size": [3, 48, 48], "interpolation": "bilinear", "crop_pct": 0.9}
PREPROCESSING |= {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Write the weights of a small model, with parameters away from their initial values; returns their path."""
    monkeypatch.chdir(tmp_path)

    def save(family: str, **options):
        torch.manual_seed(0)
        name, options = f"{family}_nano_patch16_144", {"img_size": 48, "depth": 1, "num_classes": 3, **options}
        model = shaken(build_model(name, **options))
        path = tmp_path / "trained" / "weights.safetensors"
        save_weights(path, model, name=name, options=options, preprocessing=PREPROCESSING, classes=CLASSES)
        return path

    return save


@torch.no_grad()
def expected(path, images):
    return open_weights(path).build()(images)


def assert_runs(file, path, images):
    """Where onnxruntime is installed, a file gives in it what the model gives; returns what the file says of itself."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for batch in images:
        (logits,) = session.run(None, {"images": batch.numpy()})
        np.testing.assert_allclose(logits, expected(path, batch).numpy(), rtol=1e-4, atol=1e-5)
    return json.loads(session.get_modelmeta().custom_metadata_map["vision_ttt_repro"])


@pytest.mark.parametrize(("family", "options"), [("vittt", {"design": "dual", "pool": "head"}), ("deit", {})])
def test_a_folder_for_timm(saved, tmp_path, repro_cli, family, options):
    path, folder = saved(family, **options), tmp_path / "folder"
    out = repro_cli.run("export", "--weights", str(path), "--format", "safetensors", "-o", "folder")
    assert "differ by at most 0.0e+00" in out
    images, name = torch.randn(2, 3, 48, 48), f"{family}_nano_patch16_144"
    from_folder = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    shape = {"num_classes": 3, "img_size": 48, "depth": 1, **options}
    from_file = timm.create_model(name, checkpoint_path=str(folder / "model.safetensors"), **shape).eval()
    for model in (from_folder, from_file):
        with torch.no_grad():
            assert torch.equal(model(images), expected(path, images))
    config = timm.data.resolve_model_data_config(from_folder)
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    assert PREPROCESSING.items() <= listed.items() and from_folder.pretrained_cfg["label_names"] == CLASSES
    # the file for timm's --class-map, whose reader sorts folders called by numbers in another order
    for name in CLASSES:
        picture(tmp_path / "sorted" / name / "0.jpg", (8, 8))
    reader = create_reader("", root=str(tmp_path / "sorted"), class_map=str(folder / "class_map.txt"))
    assert reader.class_to_idx == {name: index for index, name in enumerate(CLASSES)}
    # and for `repro predict`
    assert torch.equal(expected(folder / "model.safetensors", images), expected(path, images))
    # the configuration differs from timm's own in what the weights say alone, which timm takes from the model
    checkpoint = open_weights(path)
    arguments = {"model_config": {"label_names": CLASSES}, "model_args": {"img_size": 48, "depth": 1, **options}}
    timm.models.save_for_hf(checkpoint.build(), tmp_path / "theirs", safe_serialization=True, **arguments)
    ours, theirs = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "theirs"))
    assert ours.keys() - theirs.keys() == {"vision_ttt_repro"} and theirs.keys() <= ours.keys()
    said = {*PREPROCESSING, "num_classes", "tag"}
    our_config, their_config = ours.pop("pretrained_cfg"), theirs.pop("pretrained_cfg")
    assert our_config.keys() == their_config.keys() and our_config["tag"] == checkpoint.hash
    assert ours["num_classes"] == 3
    for one, two in ((ours, theirs), (our_config, their_config)):
        assert {key: one[key] for key in two if key not in said} == {key: two[key] for key in two if key not in said}


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto"])
def test_a_folder_names_only_a_pooling_that_is_an_option(tmp_path, monkeypatch, repro_cli, name):
    """ResNet's `global_pool` is a module, and ConvNeXt has none."""
    monkeypatch.chdir(tmp_path)
    options = {"num_classes": 3}
    described = {"name": name, "options": options, "preprocessing": PREPROCESSING, "classes": CLASSES}
    save_weights(tmp_path / "weights.safetensors", build_model(name, **options), **described)
    out = repro_cli.run("export", "--weights", "weights.safetensors", "--format", "safetensors", "-o", "folder")
    assert "differ by at most 0.0e+00" in out
    assert "global_pool" not in json.loads(Path("folder/config.json").read_text())


ALONE = [("study", {"inner_model": "conv", "inner_loss": "mse"}), ("vrwkv", {}), ("vim", {}), ("vit3", {})]


@pytest.mark.parametrize(("family", "options"), first(ALONE, 2))
def test_torch_export_stands_alone(saved, repro_cli, family, options):
    path = saved(family, **options)
    arguments = ("--format", "torch_export", "--no-verify", "--image-size", "32", "-o", "model.pt2")
    repro_cli.run("export", "--weights", str(path), *arguments)
    extra = {"vision_ttt_repro.json": ""}
    program = torch.export.load("model.pt2", extra_files=extra)
    assert json.loads(extra["vision_ttt_repro.json"])["preprocessing"]["input_size"] == [3, 32, 32]
    assert "vision_ttt" not in str(program.graph_module)  # none of this project's operators is left in it
    for count in (1, 3):
        images = torch.randn(count, 3, 32, 32)
        torch.testing.assert_close(program.module()(images), expected(path, images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_onnx_in_its_runtime(saved, repro_cli, monkeypatch):
    _, rewriter = pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript.rewriter")
    # its time grows with the square of the number of nodes
    monkeypatch.setattr(rewriter.RewritePass, "call", lambda *_: pytest.fail("the rewriter of patterns ran"))
    path = saved("vittt", pool="double")
    out = repro_cli.run("export", "--weights", str(path), "--format", "onnx")
    assert out.startswith("vittt_nano_patch16_144_48.onnx: vittt_nano_patch16_144, 3 classes; read back, ")
    images = [torch.randn(count, 3, 48, 48) for count in (1, 5)]
    facts = assert_runs("vittt_nano_patch16_144_48.onnx", path, images)
    about = {"model": "vittt_nano_patch16_144", "classes": CLASSES, "preprocessing": PREPROCESSING}
    assert {**about, "weights_hash": hash_file(path)}.items() <= facts.items()


@pytest.mark.parametrize("difference", [1.0, float("nan")])
def test_a_file_that_differs_is_not_left(saved, tmp_path, repro_cli, monkeypatch, difference):
    load = timm.create_model

    def spoilt(name, **options):
        model = load(name, **options)
        if name.startswith("local-dir"):
            model.head.bias.data[0] += difference
        return model

    path = saved("vittt")
    monkeypatch.setattr(timm, "create_model", spoilt)
    code, out, err = repro_cli("export", "--weights", str(path), "--format", "safetensors")
    assert (code, out, err.count("\n")) == (1, "", 1) and "not written: read back, logits differ by at most" in err
    assert [each.name for each in tmp_path.iterdir()] == ["trained"]


def test_a_missing_package_is_one_line(saved, repro_cli, monkeypatch):
    monkeypatch.setattr(repro.inference.export, "ONNX_PACKAGES", ("onnx_of_nobody",))
    err = repro_cli.refuse("export", "--weights", str(saved("vittt")), "--format", "onnx")
    assert "needs onnx_of_nobody: python -m pip install -e '.[export]'" in err


@pytest.mark.parametrize("family", first(["vim", "vittt", "ladder_vittt", "vit3", "vrwkv", "t5", "study", "deit"], 2))
def test_pytorch_exports_a_model_for_any_batch(family):
    """With gradients; the command exports without."""
    model, batch = nano(family, img_size=48, depth=1), {0: torch.export.Dim("batch")}
    program = torch.export.export(model, (torch.zeros(2, 3, 48, 48),), dynamic_shapes=(batch,)).module()
    for count in (1, 3):
        images = torch.randn(count, 3, 48, 48)
        torch.testing.assert_close(program(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vittt", "vit3", "vrwkv", "t5", "study", "ladder_vittt", "ladder_vit3"])
def test_one_graph_takes_all_sides(saved, repro_cli, family):
    path = saved(family)
    for format, file in (("torch_export", "any.pt2"), ("onnx", "any.onnx")):
        repro_cli.run("export", "--weights", str(path), "--format", format, "--any-size", "-o", file)
    images = torch.randn(3, 3, 32, 80)
    logits = torch.export.load("any.pt2").module()(images)
    torch.testing.assert_close(logits, expected(path, images), rtol=1e-4, atol=1e-5)
    assert assert_runs("any.onnx", path, [images])["sides_multiple_of"] == 16


# Vim's class token is in the middle, at the place that was traced; LaCT cuts the tokens that were traced into chunks;
# timm's DeiT asserts its size
@pytest.mark.parametrize("family", ["deit", *map(slow, ("vim", "lact"))])
def test_a_graph_of_one_size_is_refused_for_all(saved, tmp_path, repro_cli, family):
    arguments = ("--weights", str(saved(family)), "--format", "torch_export", "--any-size")
    assert "--any-size" in repro_cli.refuse("export", *arguments, code=1)
    assert [each.name for each in tmp_path.iterdir()] == ["trained"]
