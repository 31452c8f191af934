"""Pyramids of plain and of hierarchical backbones: channels, strides, layers, and weights with every key accounted for."""

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import repro.models  # noqa: F401  registers the models
from repro.core.errors import UserError
from repro.models.adapter import ViTAdapter
from repro.models.checkpoints import open_weights
from repro.models.pyramid import NativePyramid, build_pyramid, load_backbone
from tests.models import helpers
from tests.models.helpers import frozen_statistics, layer_scales, save_model, shaken
from tests.slow import first

NANO, DEIT = "vittt_nano_patch16_144", "deit_nano_patch16_144"
SWIN, CONVNEXT = "swin_tiny_patch4_window7_224", "convnext_tiny"
SMALL_SWIN = {"embed_dim": 8, "depths": (1, 2, 2, 1), "num_heads": (1, 1, 2, 2), "window_size": 4}
SMALL_CONVNEXT = {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 24)}
NATIVE = [
    (SWIN, SMALL_SWIN, (8, 16, 32, 64)),
    (CONVNEXT, SMALL_CONVNEXT, (8, 12, 16, 24)),
    ("resnet_nano", {}, (8, 16, 32, 64)),
    ("swinv2_tiny_window8_256", SMALL_SWIN, (8, 16, 32, 64)),
]
WIDTHS = {"hvit3": (16, 32, 64, 96), "vmamba": (16, 32, 64, 128), "mambavision": (16, 32, 64, 128)}
OURS = [(f"{family}_nano_144", {}, widths) for family, widths in WIDTHS.items()]
ALL_NATIVE = [*NATIVE, *OURS]
ADAPTED = [(NANO, {}, (64,) * 4), ("deit_nano_patch16_144", {}, (64,) * 4)]


def trained(folder: Path, name: str = NANO, side: int = 144, **options) -> tuple[Path, torch.nn.Module]:
    """The file that a training of a classifier leaves, and its model."""
    path = folder / "weights.safetensors"
    return path, save_model(path, name, side=side, **options)


def native(name: str, options: dict, **kwargs) -> NativePyramid:
    torch.manual_seed(0)
    return build_pyramid(name, options=options, **kwargs).eval()


@pytest.mark.parametrize(("name", "options", "channels"), [*ALL_NATIVE, *ADAPTED])
@torch.no_grad()
def test_channels_and_strides(name, options, channels):
    """Images are padded to multiples of 32: 70 x 90 pixels give the maps of 96 x 96. A hierarchy of ours is not padded,
    and its sides are rounded up.
    """
    pyramid, is_ours = native(name, options), (name, options, channels) in OURS
    assert pyramid.channels == channels and pyramid.strides == (4, 8, 16, 32)
    assert isinstance(pyramid, ViTAdapter if "nano_patch" in name else NativePyramid)
    assert pyramid.built_from == (name, options) and not (is_ours and {norm.eps for norm in pyramid.norms} != {1e-5})
    image = torch.randn(2, 3, 70, 90)
    padded = image if is_ours else F.pad(image, (0, 6, 0, 26))
    maps, of_padded, (h, w) = pyramid(image), pyramid(padded), padded.shape[-2:]
    grids = [(-(-h // stride), -(-w // stride)) for stride in pyramid.strides]
    assert [tuple(m.shape) for m in maps] == [(2, c, *grid) for c, grid in zip(channels, grids, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(maps, of_padded, strict=True))


@pytest.mark.parametrize(("name", "options", "channels"), NATIVE)
def test_native_maps_are_timms_with_a_norm(name, options, channels):
    """timm's own `features_only` model of the same weights, for this size and full windows, before our norms."""
    swin = "swin" in name
    # where the last maps of a Swin are smaller than its windows
    pyramid = native(name, {**options, **({"img_size": 64} if swin else {})})
    size = {"img_size": 128, "always_partition": True} if swin else {}
    how = {"features_only": True, "feature_cls": "getter", "out_indices": pyramid.indices}
    theirs = timm.create_model(name, **options, **size, **how).eval()
    own = {f"model.{key}": value for key, value in pyramid.backbone.state_dict().items()}
    theirs.load_state_dict(own | {key: value for key, value in theirs.state_dict().items() if "head." in key})
    image = torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        for found, norm, expected in zip(pyramid(image), pyramid.norms, theirs(image), strict=True):
            mean, var = expected.mean(1, keepdim=True), expected.var(1, keepdim=True, correction=0)
            torch.testing.assert_close(found, (expected - mean) / (var + norm.eps).sqrt(), rtol=1e-4, atol=1e-5)


LEARNING = [
    *ALL_NATIVE,
    (NANO, {"pool": "double"}, (64,) * 4),
    *((f"{family}_nano_patch16_144", {}, (64,) * 4) for family in ("deit", "vim")),
]


@pytest.mark.parametrize(("name", "options", "channels"), LEARNING)
def test_every_parameter_gets_a_gradient_and_a_frozen_backbone_none(name, options, channels):
    image = torch.randn(2, 3, 64, 96)
    for frozen in (False, True):
        # statistics of a batch would take its gradient from the bias before them
        pyramid = frozen_statistics(shaken(native(name, options, freeze_backbone=frozen)))
        assert pyramid.backbone.training != frozen
        assert not (frozen and any(m.training for m in pyramid.backbone.modules()))
        sum((m * torch.randn_like(m)).sum() for m in pyramid(image)).backward()
        trained = {name for name, p in pyramid.named_parameters() if p.grad is not None and p.grad.any()}
        learning = {n for n, _ in pyramid.named_parameters() if not (frozen and n.startswith("backbone."))}
        assert trained == learning


@pytest.mark.parametrize(("name", "options", "channels"), [*NATIVE[:3], OURS[0], *ADAPTED])
def test_recomputing_blocks_changes_nothing(name, options, channels):
    rate = 0.5 if (name, options, channels) in ADAPTED else 0.0
    pyramid = frozen_statistics(shaken(native(name, options, drop_path_rate=rate)))
    helpers.assert_recomputing_changes_nothing(pyramid, torch.randn(2, 3, 64, 64))


@pytest.mark.parametrize(
    ("name", "options", "backend"),
    [
        *first(
            [("resnet_nano", {}, "aot_eager"), (SWIN, SMALL_SWIN, "aot_eager"), (CONVNEXT, SMALL_CONVNEXT, "aot_eager")]
        ),
        pytest.param(NANO, {"pool": "mid"}, "aot_eager", marks=pytest.mark.slow),
        pytest.param("deit_nano_patch16_144", {}, "eager", marks=pytest.mark.slow),
    ],
)
def test_pyramids_compile_into_one_graph(name, options, backend):
    """For an image that is no multiple of 32."""
    pyramid, image = shaken(native(name, options)), torch.randn(1, 3, 40, 64)
    with torch.no_grad():
        compiled = torch.compile(pyramid, fullgraph=True, backend=backend)(image)
        torch.testing.assert_close(compiled, pyramid(image))


def test_layer_decay_of_a_swin_is_timms_with_the_new_parts_last():
    """By hand: the embedding, six blocks (a stage's merging belongs to its first block), then everything else."""
    found = layer_scales(helpers.DenseModel(native(SWIN, SMALL_SWIN)), 0.5)
    blocks = "0.blocks.0 1.blocks.0 1.blocks.1 2.blocks.0 2.blocks.1 3.blocks.0"
    layers = ["patch_embed", *(f"layers.{block}" for block in blocks.split())]
    for number, layer in enumerate(layers):
        own = {scale for name, scale in found.items() if name.startswith(f"pyramid.backbone.{layer}.")}
        assert own == {0.5 ** (len(layers) - number)}, layer
    merging = {found[f"pyramid.backbone.layers.{i}.downsample.reduction.weight"] for i in (1, 2, 3)}
    assert merging == {0.5**5, 0.5**3, 0.5**1}
    assert {scale for name, scale in found.items() if name.startswith(("pyramid.norms", "head"))} == {1.0}


def test_exemptions_from_weight_decay_are_the_backbones():
    pyramid = native(SWIN, SMALL_SWIN)
    tables = {name for name, _ in pyramid.named_parameters() if name.endswith("relative_position_bias_table")}
    assert pyramid.no_weight_decay() == tables and len(tables) == 6
    assert native("resnet_nano", {}).no_weight_decay() == set()


def test_a_size_that_a_swin_does_not_take_is_one_line():
    pyramid = native(SWIN, {**SMALL_SWIN, "strict_img_size": True, "img_size": 64})
    pyramid(torch.zeros(1, 3, 64, 64))
    message = r"SwinTransformer does not take images of 96x64 pixels: Input height \(96\)"
    with pytest.raises(UserError, match=message) as caught:
        pyramid(torch.zeros(1, 3, 90, 64))
    assert "\n" not in str(caught.value)


def test_layer_decay_without_a_matcher_is_one_line(monkeypatch):
    monkeypatch.delattr(timm.models.resnet.ResNet, "group_matcher")
    with pytest.raises(UserError, match="ResNet does not say which layers it has"):
        native("resnet_nano", {}).group_matcher()


def test_a_swin_of_smaller_images_is_resampled_to_full_windows(tmp_path):
    """Trained at 64 pixels, its last two stages have windows of 4 and 2."""
    path, model = trained(tmp_path, SWIN, side=64, **SMALL_SWIN)
    pyramid = build_pyramid(SWIN, options=SMALL_SWIN)
    report = load_backbone(pyramid, open_weights(path, model=SWIN))
    key = "layers.3.blocks.0.attn.relative_position_bias_table"
    assert model.state_dict()[key].shape == (9, 2) and report[key] == "used"
    assert pyramid.backbone.state_dict()[key].shape == (49, 2)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        *((name, options, "own") for name, options, _ in (NATIVE[0], *OURS)),
        *((name, options, "timm") for name, options, _ in NATIVE),
        *((f"{family}_nano_patch16_144", {}, "own") for family in ("vim", "deit")),
        (NANO, {"pool": "double", "design": "dual", "w0": "frozen"}, "own"),
    ],
)
def test_every_key_of_a_classifier_is_accounted_for(tmp_path, name, options, kind):
    if kind == "own":
        path, model = trained(tmp_path, name, side=144 if "nano_patch" in name else 128, **options)
    else:
        torch.manual_seed(1)
        model, path = timm.create_model(name, num_classes=10, **options), tmp_path / "theirs.pth"
        torch.save({"model": model.state_dict()}, path)
    pyramid = build_pyramid(name, options=options)
    report = load_backbone(pyramid, open_weights(path, model=name))
    state = model.state_dict()
    own = (pyramid.trunk if isinstance(pyramid, ViTAdapter) else pyramid.backbone).state_dict()
    not_needed = {key for key in state if key.startswith(("norm.", "head.", "fc."))}
    new = {key for key in pyramid.state_dict() if not key.startswith("backbone.")}
    scales = set()
    if "deit" in name:
        not_needed.add("cls_token")
        scales = {f"blocks.{i}.ls{j}.gamma" for i in range(4) for j in (1, 2)}
    assert {key for key in state if report[key] == "used"} == set(state) - not_needed == set(own) - scales
    assert not_needed
    assert {key for key in state if report[key] == "expected: not needed"} == not_needed
    new |= {f"backbone.model.{key}" for key in scales}
    assert {key for key, line in report.items() if line == "expected: new"} == new
    assert set(report.values()) == {"used", "expected: not needed", "expected: new"}
    assert all(torch.equal(own[key], state[key]) for key in set(state) - not_needed)


@pytest.mark.parametrize("name", [NANO, "deit_nano_patch16_144"])
def test_a_final_norm_that_is_kept_is_loaded(tmp_path, name):
    path, model = trained(tmp_path, name)
    adapter = build_pyramid(name, options={"img_size": 144}, final_norm=True)
    report = load_backbone(adapter, open_weights(path, model=name))
    assert report["norm.weight"] == report["norm.bias"] == "used" and report["head.weight"] == "expected: not needed"
    assert torch.equal(adapter.trunk.norm.weight, model.norm.weight)


def lost_key(key, **options):
    state = timm.create_model("deit_nano_patch16_144", **options).state_dict()
    del state[key]
    return state


@pytest.mark.parametrize(
    "name, options, change, message",
    [
        ("vim_nano_patch16_144", {}, None, "holds weights of vittt_nano_patch16_144, not of vim_nano_patch16_144"),
        (NANO, {"chunk_size": 8}, None, "built with no options, but it is wanted with {'chunk_size': 8}"),
        (NANO, {"img_size": 96}, None, r"pos_embed is \(1, 81, 64\), expected \(1, 36, 64\); build it"),
        (DEIT, {}, lambda: lost_key("blocks.1.attn.qkv.weight"), "blocks.1.attn.qkv.weight missing"),
        (DEIT, {}, lambda: lost_key("blocks.2.ls1.gamma", init_values=0.1), "blocks.2.ls1.gamma missing"),
        (DEIT, {}, lambda: {"x": torch.zeros(1)}, "pos_embed missing; .*; and 49 more"),
    ],
)
def test_what_is_refused_leaves_the_adapter_as_it_was(tmp_path, name, options, change, message):
    path, _ = trained(tmp_path)
    if change:
        save_file(change(), path)
    adapter = build_pyramid(name, options=options)
    with helpers.state_unchanged(adapter), pytest.raises(UserError, match=message):
        load_backbone(adapter, open_weights(path, model=name))


def test_the_random_numbers_after_loading_are_fixed(tmp_path):
    """They initialise a detector's heads: after our own file those that follow a build of its model, else the next."""
    path, _ = trained(tmp_path)
    swin = tmp_path / "swin.pth"
    torch.save(timm.create_model(SWIN, **SMALL_SWIN, num_classes=10).state_dict(), swin)
    ours = build_pyramid(NANO), open_weights(path), lambda: timm.create_model(NANO, num_classes=10)
    theirs = build_pyramid(SWIN, options=SMALL_SWIN), open_weights(swin, model=SWIN), lambda: None
    for pyramid, opened, draw in (ours, theirs):
        torch.manual_seed(3)
        load_backbone(pyramid, opened)
        found = torch.rand(4)
        torch.manual_seed(3)
        draw()
        assert torch.equal(torch.rand(4), found)


def test_recomputation_in_a_family_without_it_is_one_line():
    pyramid = native("twins_svt_small", {"depths": (1, 1, 1, 1)})
    pyramid.set_grad_checkpointing(False)
    with pytest.raises(UserError, match="recompute_blocks"):
        pyramid.set_grad_checkpointing(True)
