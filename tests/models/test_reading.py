"""The switches of a reading: against parameters and multiply-adds by hand, and against Algorithm 1."""

import dataclasses
import functools

import pytest
import timm
import torch
import torch.nn.functional as F

from repro.core.errors import UserError
from repro.models.checkpoints import initialise, open_weights
from repro.models.read_block import ReadMixer
from repro.models.reading import Reading
from repro.models.registry import build_model
from repro.models.weights import open_file
from tests.models.helpers import count, nano, rewrite_description, save_model, shaken
from tests.models.test_vittt import mixer_by_hand

NANO = "vittt_nano_patch16_144"
D, L, H, T, HIDDEN = 192, 12, 3, 196, 512  # Vittt-T at 224 pixels
# switch=value -> what it adds to the parameters and to the multiply-adds of Vittt-T, by hand; every value but the
# defaults
CHANGES = {
    "gate_activation=sigmoid": (0, 0),
    "gate_input=conv1d": (0, 0),
    "gate_bias=true": (L * D, 0),
    "out_bias=true": (L * D, 0),
    "conv1d_arrival=query_with_gate": (0, 0),
    "conv1d_arrival=together": (0, 0),
    "conv1d_kernel=3": (-L * 2 * 2 * D, -L * T * 2 * 2 * D),
    "conv1d_bias=false": (-L * 2 * 2 * D, 0),
    "conv1d_count=1": (-L * 2 * (4 * D + D), -L * T * 2 * 4 * D),
    "dwconv_place=after_norm": (0, 0),
    "dwconv_residual=false": (0, 0),
    "dwconv_bias=true": (L * D, 0),
    "dwconv_class_tokens=one_pixel": (0, 0),
    "post_norm=per_direction": (L * 2 * D, 0),
    "post_norm=none": (-L * 2 * D, 0),
    "post_norm_place=after_gate": (0, 0),
    "residual=normalised": (0, 0),
    "learning_rate=per_direction": (L * (D * H + H), L * T * D * H),
    "eta_base=0.1": (0, 0),
    "inner_norm=shared": (-L * 3 * D, 0),
    "inner_target=v": (0, 0),
    "inner_residual=false": (0, 0),
    "token_scale=shared": (-L * 16, 0),
    "token_scale=fixed": (-L * 2 * 16, 0),
    "token_scale_start=one": (0, 0),
    "w0_std=0.1": (0, 0),
    "rotary=chunk": (0, 0),
    "positions=patches_and_class": (D, 0),
    "positions=none": (-T * D, 0),
    "swiglu_bias=false": (-L * (2 * HIDDEN + D), 0),
}
MIXER = [text for text in CHANGES if not text.startswith(("dwconv", "residual", "positions", "swiglu"))]


def test_every_value_of_every_switch_is_tried():
    named = {text.partition("=")[0] for text in CHANGES}
    assert named == {field.name for field in dataclasses.fields(Reading)}


@functools.cache
def count_tiny(text, **options):
    """Parameters, which the model's terms add up to, and multiply-adds of Vittt-T in a reading."""
    with torch.device("meta"):
        model = timm.create_model("vittt_tiny_patch16_224", **options, reading=text)
    assert sum(model.param_terms().values()) == count(model)
    return count(model), sum(model.mac_terms((224, 224)).values())


@pytest.mark.parametrize(
    ("options", "text", "params", "macs"),
    [
        *(({}, text, *counts) for text, counts in CHANGES.items()),
        # Conv1d of a kernel 4 with bias for 192 channels in one direction
        ({"design": "gating"}, "conv1d_arrival=together", -L * 5 * D, -L * T * 4 * D),
        ({"design": "gating"}, "conv1d_arrival=query_with_gate", 0, 0),
        ({"design": "conv1d"}, "conv1d_arrival=together", 0, 0),
        ({"design": "dual"}, "post_norm=per_direction", L * 2 * D, 0),
        ({"design": "conv1d"}, "post_norm=per_direction", 0, 0),  # one direction
        ({"pool": "head"}, "dwconv_class_tokens=one_pixel", 0, L * 9 * D),
        ({"pool": "head"}, "positions=patches_and_class", 0, 0),  # the class token has its row in either
        ({"pool": "double"}, "positions=none", -(T + 2) * D, 0),
    ],
)
def test_parameters_and_multiply_adds_by_hand(options, text, params, macs):
    plain, changed = (count_tiny(text=each, **options) for each in ("", text))
    assert changed[0] - plain[0] == params and changed[1] - plain[1] == macs


@pytest.mark.parametrize("text", [text for text in CHANGES if text not in MIXER] + ["rotary=chunk"])
def test_forward_and_backward_pass(text):
    model = shaken(nano("vittt", reading=text, pool="double" if "class_tokens" in text else "mean"))
    images = torch.randn(2, 3, 48, 64)
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        unused = "token_scale" in name or (name == "cls_pos_embed" and text == "positions=patches_and_class")
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert unused or parameter.grad.any(), name


TOGETHER = ["post_norm=per_direction,post_norm_place=after_gate", "gate_bias=true,gate_input=conv1d"]
ON_CONV1D = [text for text in MIXER if "conv1d" in text]  # where the convolutions of a gating mixer are others


@pytest.mark.parametrize(
    ("design", "text"),
    [*(("conv2d", text) for text in [*MIXER, *TOGETHER]), *(("gating", text) for text in [*ON_CONV1D, TOGETHER[1]])],
)
def test_mixer_equals_algorithm_1_by_hand_in_every_reading(design, text):
    torch.manual_seed(0)
    mixer = shaken(ReadMixer(32, 2, 5, design=design, chunk_size=4, reading=Reading.of(text)).double())
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    with torch.no_grad():
        ours = mixer(x)
    torch.testing.assert_close(ours, mixer_by_hand(mixer, x).detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("place", ["before_norm", "after_norm"])
@pytest.mark.parametrize("base", ["stream", "normalised"])
def test_block_in_every_order_of_convolution_norm_and_residual(place, residual, base):
    text = f"dwconv_place={place},dwconv_residual={str(residual).lower()},residual={base},dwconv_bias=true"
    block = shaken(nano("vittt", reading=text, embed_dim=16)).double().blocks[1]
    y = torch.randn(2, 12, 16, dtype=torch.float64)

    def convolve(t):
        image = t.mT.reshape(2, 16, 3, 4)
        out = F.conv2d(image, block.dwconv.weight, block.dwconv.bias, padding=1, groups=16).flatten(2).mT
        return out + t if residual else out

    def norm(t):
        return F.layer_norm(t, (16,), block.norm1.weight, block.norm1.bias, 1e-6)

    x = norm(convolve(y)) if place == "before_norm" else convolve(norm(y))
    stream = convolve(y) if place == "before_norm" and residual else y
    middle = (stream if base == "stream" else x) + block.mixer(x)
    expected = middle + block.mlp(block.norm2(middle))
    torch.testing.assert_close(block(y, (3, 4)), expected)


def test_a_class_token_as_an_image_of_one_pixel_meets_the_centre_of_the_kernel():
    block = shaken(nano("vittt", pool="head", reading="dwconv_class_tokens=one_pixel")).blocks[0]
    x = torch.randn(2, 13, 64)
    expected = x[:, 0] * (1 + block.dwconv.weight[:, 0, 1, 1])
    torch.testing.assert_close(block._convolve(x, (3, 4))[:, 0], expected)


def test_initial_values_follow_the_reading():
    torch.manual_seed(0)
    mixer = ReadMixer(192, 3, 196, reading=Reading(w0_std=0.1, token_scale_start="one", eta_base=0.5))
    assert abs(mixer.W0.std().item() - 0.1) < 0.005
    assert (mixer.scale_per_token(16) == 1).all()
    x = torch.zeros(1, 2, 192)
    torch.testing.assert_close(mixer.learning_rate(x), torch.full((1, 2, 3), 0.5 * 0.5 / 64))


def test_text_and_reading_are_the_same():
    assert str(Reading()) == "" and Reading.of("") == Reading()
    for text in CHANGES:
        assert str(Reading.of(text)) == text and Reading.of(text) != Reading()
    both = Reading.of("post_norm=none, gate_activation=sigmoid")
    assert str(both) == "gate_activation=sigmoid,post_norm=none"
    assert Reading.of(dataclasses.asdict(both)) == Reading.of(both) == both
    for number in (1 / 3, 1e-7, 2.0**70):
        assert Reading.of(str(Reading(eta_base=number))) == Reading(eta_base=number)


def test_a_weights_file_names_its_reading(tmp_path):
    model = save_model(tmp_path / "w.safetensors", NANO, reading="post_norm=none,rotary=chunk")
    opened = open_weights(tmp_path / "w.safetensors")
    assert opened.options["reading"] == "post_norm=none,rotary=chunk"
    images = torch.randn(1, 3, 144, 144)
    with torch.no_grad():
        torch.testing.assert_close(opened.build()(images), model.eval()(images), rtol=0, atol=0)
    with pytest.raises(UserError, match="post_norm=none"):
        initialise(build_model(NANO, num_classes=10), opened)
    described = rewrite_description(tmp_path / "w.safetensors")
    assert described["reading"] == dataclasses.asdict(Reading(post_norm="none", rotary="chunk"))


@pytest.mark.parametrize(("design", "expected"), [("gating", "conv1d_arrival=together"), ("conv2d", None)])
def test_a_file_from_before_the_switches_keeps_its_meaning(tmp_path, design, expected):
    model = build_model(NANO, num_classes=10, design=design, reading="conv1d_arrival=together")
    save_model(tmp_path / "old.safetensors", NANO, model=model, design=design)
    rewrite_description(tmp_path / "old.safetensors", lambda described: described.pop("reading"))
    assert open_file(tmp_path / "old.safetensors")[1]["options"].get("reading") == expected
    images = torch.randn(1, 3, 144, 144)
    with torch.no_grad():
        ours = open_weights(tmp_path / "old.safetensors").build()(images)
        # the default reading may take another path on CPUs than the others
        torch.testing.assert_close(ours, model.eval()(images), rtol=1e-4, atol=1e-7)


def test_a_reading_that_this_version_does_not_know_is_refused(tmp_path):
    save_model(tmp_path / "w.safetensors", NANO)
    rewrite_description(
        tmp_path / "w.safetensors", lambda described: described["reading"].update(gate_activation="relu")
    )
    message = r"w\.safetensors: reading: gate_activation=relu: expected one of gelu, sigmoid"
    with pytest.raises(UserError, match=message):
        open_weights(tmp_path / "w.safetensors")
