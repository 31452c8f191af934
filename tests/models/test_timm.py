"""timm's contract: what its test_models.py asks of every model, for the nano and the T size of every family."""

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.models.helpers import HIERARCHICAL, OWN, frozen_statistics, shaken

EVERY = (*OWN, *HIERARCHICAL)
MODELS = [name for name in timm.list_models("*_nano*") if name.startswith((*EVERY, "deit_nano", "resnet_nano"))]
TINY = ["study_small_patch16_224", *(name for name in timm.list_models("*tiny*") if name.startswith(EVERY))]
TIMM_CLASSES = ("deit_nano_patch16_144", "resnet_nano")  # built from classes of timm, which decide for themselves
OURS = [name for name in MODELS if name not in TIMM_CLASSES]
each = pytest.mark.parametrize("name", MODELS)
each_own = pytest.mark.parametrize("name", OURS)


def build(name, **options):
    few = {"depth": 2} if "_patch" in name else {}  # the blocks of a ViT are alike
    torch.manual_seed(0)
    return timm.create_model(name, **few, **options).eval()


def draw(model, batch_size=2, factor=1):
    side = factor * model.default_cfg["input_size"][-1]
    return torch.randn(batch_size, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", TINY)
def test_the_tiny_size_is_built_runs_and_learns(name):
    """timm's tests of forward, backward, default configuration and head in one pass, at a small image."""
    model = build(name, num_classes=42, img_size=64)
    names = dict(model.named_parameters())
    assert f"{model.default_cfg['classifier']}.weight" in names
    first = model.default_cfg["first_conv"]
    assert all(f"{each}.weight" in names for each in ([first] if isinstance(first, str) else first))
    assert model.default_cfg["input_size"] == (3, 224, 224)
    logits = frozen_statistics(model)(torch.randn(2, 3, 64, 64))
    logits.mean().backward()
    assert logits.shape == (2, 42) and logits.isfinite().all()
    assert [name for name, parameter in names.items() if parameter.requires_grad and parameter.grad is None] == []


@each
def test_the_head_is_taken_off_and_pooling_is_chosen(name):
    """`reset_classifier(0)` leaves pooled features, and `(0, "")` leaves them unpooled, as `global_pool=""` does; `avg` is
    the mean of the patches, without class tokens.
    """
    model = build(name)
    image = draw(model)
    features = model.forward_features(image)
    last = model.forward_intermediates(image, indices=1, norm=True, intermediates_only=True)[0]
    model.reset_classifier(0)
    assert model(image).shape == (2, model.num_features)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(image), features)
    headless = build(name, num_classes=0, global_pool="")
    headless.load_state_dict(model.state_dict())
    torch.testing.assert_close(headless(image), features)
    model.reset_classifier(0, "avg")
    torch.testing.assert_close(model(image), last.mean((2, 3)))
    model.reset_classifier(5, "avg")
    assert model(image).shape == (2, 5)


def test_class_tokens_of_vittt_are_timms_token():
    model = build("vittt_nano_patch16_144", global_pool="token")
    image = draw(model)
    asked = {"indices": 1, "return_prefix_tokens": True, "norm": True, "output_fmt": "NLC"}
    ((patches, prefix),) = model.forward_intermediates(image, **asked, intermediates_only=True)
    torch.testing.assert_close(model.forward_head(model.forward_features(image), pre_logits=True), prefix.mean(1))
    assert patches.shape == (2, 81, 64) and prefix.shape == (2, 1, 64)


@pytest.mark.parametrize(("global_pool", "pool"), [("avg", "mean"), ("token", "mid"), ("max", "max")])
@pytest.mark.parametrize("name", ["vittt_nano_patch16_144", "ladder_vittt_nano_patch16_144"])
def test_timms_name_of_a_pool_is_an_option_of_the_base_class_too(name, global_pool, pool):
    assert build(name, global_pool=global_pool).pool == pool


@pytest.mark.parametrize("pool", ["mean", "max", "head", "mid", "double"])
def test_a_pool_stays_beside_timms_name_of_its_kind_and_no_other(pool):
    global_pool = build("vittt_nano_patch16_144", pool=pool).global_pool
    assert build("vittt_nano_patch16_144", pool=pool, global_pool=global_pool).pool == pool
    with pytest.raises(ValueError, match=f"contradicts pool '{pool}'"):
        build("vittt_nano_patch16_144", pool=pool, global_pool="avg" if global_pool == "token" else "token")


@each_own
def test_intermediate_layers(name):
    model = build(name)
    image = draw(model)
    maps = model.forward_intermediates(image, indices=2, intermediates_only=True)
    tokens = model.forward_intermediates(image, indices=2, intermediates_only=True, output_fmt="NLC")
    for a, b in zip(tokens, maps, strict=True):
        torch.testing.assert_close(a, b.flatten(2).mT)


@each_own
def test_weights_of_another_image_size(name, tmp_path):
    """By `checkpoint_path`, as pretrained weights and by `set_input_size` they give what the model itself gives there."""
    model = shaken(build(name))
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "weights.safetensors")
    image = draw(model, factor=2)
    side, file = image.shape[-1], str(tmp_path / "weights.safetensors")
    expected = model(image)
    torch.testing.assert_close(build(name, img_size=side, checkpoint_path=file)(image), expected)
    overlay = {"file": file}
    loaded = build(name, img_size=side, pretrained=True, pretrained_cfg_overlay=overlay)
    torch.testing.assert_close(loaded(image), expected)
    model.set_input_size((side, side))
    assert model.img_size == (side, side)
    torch.testing.assert_close(model(image), expected)


def test_what_ties_a_model_to_its_size_is_refused():
    with pytest.raises(ValueError, match="chunk_size 0"):
        build("vittt_nano_patch16_144", chunk_size=0).set_input_size((288, 288))
    with pytest.raises(ValueError, match="patch_size"):
        build("vit3_nano_patch16_144").set_input_size(patch_size=8)


@each_own
def test_dynamic_img_size(name):
    larger = draw(build(name), factor=2)
    assert build(name, dynamic_img_size=True)(larger).shape == (2, 1000)
    with pytest.raises(ValueError, match="dynamic_img_size"):
        build(name, dynamic_img_size=False)(larger)


@each
def test_no_images_and_low_precision(name):
    """No images give no logits; weights of bf16, and autocast."""
    model = build(name)
    image = draw(model)
    assert model(image[:0]).shape == (0, 1000)
    expected = model(image)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(image)
    low = model.bfloat16()(image.bfloat16())
    assert low.dtype == torch.bfloat16
    for found in (mixed, low):
        assert (found.float() - expected).abs().max() <= 0.1 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", ["vittt_nano_patch16_144", "vim_nano_patch16_144", "hvit3_nano_144"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pretrained": True}, RuntimeError, "repro pretrain"),
        ({"global_pool": "map"}, ValueError, "global_pool|pool"),
        *(({"drop_path_rate": rate}, ValueError, "drop_path_rate") for rate in (-0.1, 1.1)),
    ],
)
def test_pretrained_weights_another_pooling_and_a_rate_outside_0_to_1_are_refused(name, options, error, message):
    with pytest.raises(error, match=message):
        build(name, **options)
