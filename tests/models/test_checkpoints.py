"""Opening weights from anywhere, and starting a training from them: every key is accounted for."""

import dataclasses
import hashlib

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import repro.models  # noqa: F401  registers the models
from repro.core.errors import UserError
from repro.models.backbone import insert_tokens, remove_tokens
from repro.models.checkpoints import initialise, open_weights
from repro.models.registry import build_model
from tests.models.helpers import PREPROCESSING, save_model, state_unchanged

NANO, DEIT, SWIN = "vittt_nano_patch16_144", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"
SMALL_SWIN = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}


def publish(monkeypatch, tmp_path, name, tag, **options):
    """Let timm's published weights of a model be a local file of random weights; returns the model."""
    torch.manual_seed(1)
    model = timm.create_model(name, **options)
    save_file(model.state_dict(), tmp_path / "published.safetensors")
    classes = options.get("num_classes", 1000)
    local = {"file": str(tmp_path / "published.safetensors"), "url": "", "hf_hub_id": None, "num_classes": classes}
    config = dataclasses.replace(timm.get_pretrained_cfg(f"{name}.{tag}"), **local)
    registry = timm.models._registry
    for key in (name, f"{name}.{tag}"):
        monkeypatch.setitem(registry._model_pretrained_cfgs, key, config)
    monkeypatch.setitem(registry._model_default_cfgs[name].cfgs, tag, config)
    return model.eval()


def test_a_file_of_this_project_names_everything_itself(tmp_path):
    path = tmp_path / "own.safetensors"
    model = save_model(path, NANO, chunk_size=8)
    for found in (open_weights(path), open_weights(path, model=NANO)):
        assert (found.name, found.model, found.task, found.path) == (NANO, NANO, None, path)
        assert found.options == {"chunk_size": 8, "num_classes": 10, "img_size": 144}
        assert found.facts == {"options": {"chunk_size": 8}}
        assert found.classes[9] == "class 9" and found.num_classes == 10
        assert found.preprocessing == PREPROCESSING and found.image_size == 144
        assert found.hash == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    state, built = found.read_state(), found.build()
    assert state.keys() == model.state_dict().keys() == built.state_dict().keys() and not built.training
    for key, x in model.state_dict().items():
        assert torch.equal(state[key], x) and torch.equal(built.state_dict()[key], x)


def test_an_official_file_at_its_own_size_and_at_another(tmp_path):
    model = build_model("vrwkv_nano_patch16_144", num_classes=7).eval()
    torch.nn.init.normal_(model.pos_embed)
    theirs = {"blocks.": "layers.", "patch_embed.": "patch_embed.projection.", "norm.": "ln1."}
    starts = {key: next((start for start in theirs if key.startswith(start)), "") for key in model.state_dict()}
    rename = {key: theirs.get(start, "") + key.removeprefix(start) for key, start in starts.items()}
    torch.save({"state_dict": {rename[key]: x for key, x in model.state_dict().items()}}, tmp_path / "official.pth")
    found = open_weights(tmp_path / "official.pth", model="vrwkv_nano_patch16_144")
    assert (found.num_classes, found.classes, found.facts) == (7, None, {"options": {}, "weights_file": "official.pth"})
    assert found.read_state().keys() == model.state_dict().keys()
    image = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(found.build(96)(image), model(image), rtol=1e-4, atol=1e-5)
        assert torch.equal(found.build()(image), model(image))


def test_published_weights_and_files_of_timms_layout(monkeypatch, tmp_path):
    model = publish(monkeypatch, tmp_path, DEIT, "fb_in1k", num_classes=5, depth=12, img_size=224)
    fetched = open_weights(None, model=DEIT)
    assert (fetched.name, fetched.hash, fetched.path, fetched.num_classes) == (DEIT, "timm", None, 5)
    assert fetched.facts == {"options": {}, "weights_tag": "fb_in1k", "weights_license": "apache-2.0"}
    torch.save({"model": model.state_dict()}, tmp_path / "deit.pth")
    file = open_weights(tmp_path / "deit.pth", model=f"{DEIT}.fb_in1k")
    assert (file.name, file.model, file.num_classes) == (f"{DEIT}.fb_in1k", DEIT, 5)
    assert file.preprocessing == fetched.preprocessing
    assert file.facts == {"weights_file": "deit.pth"}  # no options: nobody knows what the file was trained on
    for found in (fetched, file):
        tagged = build_model(f"{DEIT}.fb_in1k", num_classes=5)
        assert set(initialise(tagged, found).values()) == {"used"}
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        for found in (fetched, file):
            torch.testing.assert_close(found.build()(image), model(image))
            assert found.build(64)(torch.randn(1, 3, 64, 64)).shape == (1, 5)  # its position embedding is resampled
    other = build_model(DEIT, num_classes=3, img_size=64)
    report = initialise(other, fetched)
    assert report["head.weight"] == "expected: new" and report["pos_embed"] == "used"
    assert torch.equal(other.blocks[3].attn.qkv.weight, model.blocks[3].attn.qkv.weight)


@pytest.mark.parametrize(("key", "value"), [("cls_token", 0), ("norm.bias", float("nan"))])
def test_a_timm_file_with_integers_or_nan_is_refused(tmp_path, key, value):
    model = timm.create_model(DEIT, num_classes=5, depth=1)
    planted = torch.full_like(model.state_dict()[key], value, dtype=torch.int64 if value == 0 else None)
    torch.save({"model": model.state_dict() | {key: planted}}, tmp_path / "deit.pth")
    with pytest.raises(UserError, match=f"deit.pth: {key} has"):
        open_weights(tmp_path / "deit.pth", model=DEIT).read_state({"depth": 1})


@pytest.mark.parametrize("model", ["convnext_atto", SWIN, "resnet18"])
def test_a_timm_file_of_another_architecture_is_one_line(tmp_path, model):
    """Filters of timm look for their own keys in it."""
    torch.save(timm.create_model(DEIT, depth=1).state_dict(), tmp_path / "deit.pth")
    with pytest.raises(UserError, match=f"deit.pth: {model}.*: weights cannot be loaded") as caught:
        open_weights(tmp_path / "deit.pth", model=model).build()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_the_moving_average_of_a_timm_file_counts_and_its_counters_are_integers(tmp_path):
    model = timm.create_model("resnet18", num_classes=5)
    other = {key: x + 1 for key, x in model.state_dict().items()}
    averaged = {f"module.{key}": x for key, x in other.items()}
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": averaged}, tmp_path / "r.pth")
    built = open_weights(tmp_path / "r.pth", model="resnet18").build()
    assert all(torch.equal(x, other[key]) for key, x in built.state_dict().items())
    assert "state_dict" not in built.pretrained_cfg


def test_a_model_of_timm_is_resampled_for_another_size_when_it_is_built_and_when_it_is_initialised(tmp_path):
    path = tmp_path / "deit.safetensors"
    model = save_model(path, "deit_nano_patch16_144")
    built = open_weights(path).build(96)
    assert built(torch.zeros(1, 3, 96, 96)).shape == (1, 10)
    initialised = build_model("deit_nano_patch16_144", num_classes=10, img_size=96)
    assert initialise(initialised, open_weights(path))["pos_embed"] == "used"
    table = model.pos_embed[:, 1:].mT.reshape(1, 64, 9, 9)
    expected = F.interpolate(table, size=(6, 6), mode="bicubic", antialias=True, align_corners=False).flatten(2).mT
    for found in (built, initialised):
        torch.testing.assert_close(found.pos_embed[:, 1:], expected)
        assert torch.equal(found.pos_embed[:, :1], model.pos_embed[:, :1])


def replace(path):
    save_file({"x": torch.zeros(1)}, path)


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (lambda path: path.unlink(), None, "no such weights file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), None, "not a readable safetensors file"),
        (None, "vim_nano_patch16_144", "holds weights of vittt_nano_patch16_144, not of vim_nano_patch16_144"),
        (replace, None, "it does not name its model"),
        (replace, NANO, "for vittt_nano_patch16_144 no official weights are known"),
        (replace, "vit3_nano_patch16", "did you mean 'vit3_nano_patch16_144'"),
    ],
)
def test_what_cannot_be_opened_is_one_line(tmp_path, change, model, message):
    path = tmp_path / "w.safetensors"
    save_model(path, NANO)
    if change:
        change(path)
    with pytest.raises(UserError, match=message) as caught:
        open_weights(path, model=model)
    assert "\n" not in str(caught.value)


def test_positions_for_a_model_that_has_none_are_one_line_at_another_size_too(tmp_path):
    torch.save(build_model("deit_nano_patch16_144", num_classes=10).state_dict(), tmp_path / "other.pth")
    found = open_weights(tmp_path / "other.pth", model="vit3_nano_patch16_144")
    with pytest.raises(UserError, match="do not fit ViT3"):
        found.build(96)


def test_dense_models_and_bare_backbones_are_not_classifiers(tmp_path):
    save_model(tmp_path / "dense.safetensors", NANO, task={"name": "detect"})
    with pytest.raises(UserError, match="a model for the task 'detect', expected a classifier"):
        open_weights(tmp_path / "dense.safetensors").build()
    with pytest.raises(UserError, match="expected a classifier"):
        initialise(build_model(NANO, num_classes=10, img_size=144), open_weights(tmp_path / "dense.safetensors"))
    torch.save({"patch_embed.proj.bias": torch.zeros(64)}, tmp_path / "headless.pth")
    headless = open_weights(tmp_path / "headless.pth", model="vit3_nano_patch16_144")
    assert headless.num_classes is None
    with pytest.raises(UserError, match="a backbone without its head, expected a classifier"):
        headless.build()


def heads(name):
    return ("fc.",) if "resnet" in name else ("head.fc.",) if "swin" in name else ("head.",)


CASES = [(f"{family}_nano_patch16_144", {}) for family in ("vittt", "vim", "deit")]
CASES += [("resnet_nano", {}), (NANO, {"pool": "double", "w0": "frozen"}), (SWIN, SMALL_SWIN)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_initialise_with_other_classes_leaves_the_head_new(tmp_path, name, options):
    side = 96 if name == SWIN else 144
    source = save_model(tmp_path / "w.safetensors", name, side=side, **options).state_dict()
    torch.manual_seed(2)
    model = build_model(name, **options, num_classes=4, img_size=side, drop_path_rate=0.1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = initialise(model, open_weights(tmp_path / "w.safetensors"))
    own = model.state_dict()
    head = {key for key in own if key.startswith(heads(name))}
    assert len(head) == 2 and {key for key, line in report.items() if line == "expected: new"} == head
    # the heads of file and model have the same keys, which are reported as new
    assert {key for key, line in report.items() if line == "used"} == set(source) - head and set(report) == set(source)
    assert all(torch.equal(own[key], before[key]) for key in head)
    assert all(torch.equal(own[key], source[key]) for key in set(source) - head)


@pytest.mark.parametrize(
    ("theirs", "ours", "reused"),
    [
        (["cat", "dog", "cow"], ["cat", "dog", "cow"], True),
        (["cat", "dog", "cow"], ["dog", "cat", "cow"], False),
        (["cat", "dog", "cow"], ["cat", "dog", "owl"], False),
        (["0", "1", "2"], ["cat", "dog", "cow"], True),
        (["0", "2", "1"], ["cat", "dog", "cow"], False),
        (["cat", "dog", "cow"], None, True),
    ],
)
def test_a_head_is_reused_for_the_same_names_in_the_same_order(tmp_path, theirs, ours, reused):
    torch.manual_seed(1)
    source = save_model(tmp_path / "w.safetensors", NANO, classes=theirs, depth=1)
    model = build_model(NANO, num_classes=3, depth=1)
    before = model.head.weight.clone()
    report = initialise(model, open_weights(tmp_path / "w.safetensors"), ours)
    assert torch.equal(model.head.weight, source.head.weight if reused else before)
    assert report["head.weight"] == ("used" if reused else "expected: new") and report["norm.weight"] == "used"


@pytest.mark.parametrize(("family", "options"), [("vittt", {}), ("vim", {}), ("vittt", {"pool": "mid"})])
def test_initialise_at_another_size_resamples_the_positions(tmp_path, family, options):
    name = f"{family}_nano_patch16_144"
    source = save_model(tmp_path / "w.safetensors", name, **options)
    model = build_model(name, **options, num_classes=10, img_size=(48, 80))
    report = initialise(model, open_weights(tmp_path / "w.safetensors"))
    shared = source.prefix_positions(81) if family == "vim" else ()  # in Vim, the class token keeps its own row
    patches = remove_tokens(source.pos_embed, shared).mT.reshape(1, 64, 9, 9)
    expected = F.interpolate(patches, size=(3, 5), mode="bicubic", align_corners=False).flatten(2).mT
    expected = insert_tokens(expected, source.pos_embed[:, list(shared)], model.prefix_positions(15) if shared else ())
    torch.testing.assert_close(model.pos_embed, expected)
    assert report["pos_embed"] == "used"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "max"}, "built with no options, but it is wanted with {'pool': 'max'}"),
        ({"num_classes": 4}, r"does not fit vittt_nano_.*: blocks\.1\.mixer\.W0 missing$"),
    ],
)
def test_initialise_refuses_other_models_and_weights_without_a_key_and_changes_nothing(tmp_path, options, message):
    source = build_model(NANO, num_classes=10, img_size=144)
    if "num_classes" in options:
        del source.blocks[1].mixer.W0
    save_model(tmp_path / "w.safetensors", NANO, model=source)
    model = build_model(NANO, **{"num_classes": 10, **options}, img_size=144)
    with state_unchanged(model), pytest.raises(UserError, match=message):
        initialise(model, open_weights(tmp_path / "w.safetensors"))
