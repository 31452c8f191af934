"""DiT and DiT3 against the official release, against exact counts, and what a denoiser must do whatever its mixer is."""

import numpy as np
import pytest
import torch
from torch import Tensor

from repro.bench.build import build_eval_model
from repro.bench.counter import OperatorCounter
from repro.bench.flops import cost
from repro.core.errors import UserError
from repro.models.dit import Denoiser, DiTBlock, build_mixer, embed_positions, official_state_dict
from repro.models.registry import build_denoiser
from repro.models.weights import load_state, save_weights
from repro.tasks.generation.data import fill
from tests.models.helpers import DENOISERS, assert_official_part, below, denoiser, draw_noisy, read_data, relative


def test_block_equals_the_official_release():
    truth, block = read_data("dit3.npz", "block/"), DiTBlock(32, 4, "ttt", cpe=True)
    c = truth["c"].requires_grad_()

    def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key.replace("adaLN_modulation.1.", "modulation."): value for key, value in state.items()}

    assert_official_part(block, truth, run=lambda part, x: part(x, (4, 4), c), rename=rename, backward=1e-4)
    assert relative(c.grad, truth["grad_c"]) < 1e-4 and len(below(truth, "grads/")) == 5


def official_model(truth: dict[str, Tensor]) -> Denoiser:
    given = {name: int(value) for name, value in below(truth, "config/").items()}
    sizes = {"patch_size": given["patch_size"], "in_channels": given["in_channels"], "embed_dim": given["hidden_size"]}
    shape = {name: given[name] for name in ("depth", "num_heads", "num_classes")}
    model = Denoiser(**sizes, **shape, mixer="ttt")
    state = official_state_dict(below(truth, "state_dict/"))
    assert set(load_state(model, state, "file").values()) == {"used"}
    return model


def test_model_equals_the_official_release():
    truth = read_data("dit3.npz", "model/")
    model = official_model(truth)
    out = model(truth["x"], truth["t"], truth["y"])
    assert relative(out, truth["out"]) < 1e-5
    out.backward(truth["cot"])
    names = below(truth, "grads/")
    ours = dict.fromkeys(names)
    for key in ours:  # a parameter is found as a weight of the file is
        ours[key] = model.get_parameter(next(iter(official_state_dict({key: torch.zeros(1)}))))
    assert len(names) == 5
    for key, parameter in ours.items():
        assert relative(parameter.grad, names[key]) < 1e-4, key


def test_a_table_of_positions_that_is_not_the_fixed_one_is_refused():
    table = read_data("dit3.npz", "model/")["state_dict/pos_embed"]
    assert torch.allclose(embed_positions((4, 4), 32), table[0], atol=1e-6)
    assert official_state_dict({"pos_embed": table}) == {}
    for wrong in (table + 0.01, table[:, :15]):
        with pytest.raises(UserError, match="not the fixed table of sines and cosines"):
            official_state_dict({"pos_embed": wrong})


# parameters with the release's table of positions, multiply-adds in units of 1e9; DiT's as its
# paper counts them
COUNTS = {
    "dit_small_patch8": (33_148_160, 0.3580),
    "dit_small_patch4": (32_945_024, 1.4126),
    "dit_small_patch2": (32_963_360, 6.0557),
    "dit_base_patch8": (130_881_536, 1.4175),
    "dit_base_patch4": (130_475_648, 5.5652),
    "dit_base_patch2": (130_512_416, 23.0051),
    "dit_large_patch2": (458_102_816, 80.698),
    "dit_xlarge_patch2": (675_129_632, 118.621),
    "dit3_small_patch8": (34_972_928, 0.4036),
    "dit3_small_patch4": (34_769_792, 1.5667),
    "dit3_small_patch2": (34_788_128, 6.2191),
    "dit3_base_patch8": (134_521_856, 1.5086),
    "dit3_base_patch4": (134_115_968, 5.8729),
    "dit3_base_patch2": (134_152_736, 23.3301),
    "dit3_large_patch2": (467_804_192, 81.563),
    "dit3_xlarge_patch2": (689_410_976, 120.418),
    "dit5_small_patch8": (33_848_576, None),
    "dit5_small_patch4": (33_645_440, None),
    "dit5_small_patch2": (33_663_776, None),
    "dit5_base_patch8": (132_282_368, None),
    "dit5_base_patch4": (131_876_480, None),
    "dit5_base_patch2": (131_913_248, None),
    "dit5_large_patch2": (461_838_368, None),
    "dit5_xlarge_patch2": (680_548_640, None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_sizes(name):
    """On latents of 32x32, 1,000 classes; the releases leave out one of two products of the inner convolution."""
    total, macs_g = COUNTS[name]
    found, model = cost(name, {}, (32, 32)), build_eval_model(name, {}, (32, 32), device="meta")
    tokens = (32 // model.patch_size) ** 2
    assert found.num_params + tokens * model.embed_dim == total
    gradient_of_the_convolution = found.mac_terms.get("inner_conv", 0) // 2
    assert macs_g is None or (found.macs - gradient_of_the_convolution) / 1e9 == pytest.approx(macs_g, rel=2e-4)


@pytest.mark.parametrize("name", ["dit_small_patch8", "dit3_small_patch8", "dit5_small_patch8"])
def test_the_closed_form_is_what_the_counter_counts(name):
    model = build_eval_model(name, {"depth": 2}, (32, 32), fused=False, device="meta")
    numbers = (torch.zeros(1, dtype=torch.long, device="meta") for _ in range(2))
    inputs = (torch.empty(1, 4, 32, 32, device="meta"), *numbers)
    with torch.no_grad(), OperatorCounter() as counter:
        model(*inputs)
    assert counter.macs == sum(model.mac_terms((32, 32)).values())


def test_the_stream_is_that_of_the_weights_under_autocast():
    """Which add what half products give; a model of half weights has a half stream."""
    model, (x, t, y), seen = denoiser("dit_nano_patch4"), draw_noisy(), []
    model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(x, t, y)
        model.bfloat16()(x.bfloat16(), t, y)
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("name", "options"), DENOISERS)
def test_any_grid_and_its_places(name, options):
    """An input need not be square; a token's position is its column and then its row, in sines and cosines."""
    model = denoiser(name, **options)
    channels = 1 + ("learn_sigma" in options)
    x, t, y = draw_noisy()
    assert model(x, t, y).shape == (2, channels, 12, 20)
    assert embed_positions((3, 5), 24).view(3, 5, 24)[2, 4].tolist() == pytest.approx(
        [f(place / 10_000 ** (i / 6)) for place in (4, 2) for f in (np.sin, np.cos) for i in range(6)], abs=1e-6
    )
    for size in ((10, 12), (12, 2), (0, 12)):
        with pytest.raises(ValueError, match="positive multiples of the patch size 4"):
            model(torch.zeros(1, 1, *size), t[:1], y[:1])


def test_the_pixels_of_a_patch_come_back_to_their_places():
    """A head that says of each pixel its number in the patch."""
    model = denoiser("dit_nano_patch4", depth=1)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.arange(16.0))
        out = model(*draw_noisy())
    assert all(torch.equal(x, torch.arange(16.0).view(4, 4)) for x in (out[0, 0, :4, :4], out[1, 0, 8:, 16:]))


def test_it_begins_as_the_identity_that_predicts_nothing():
    """adaLN-Zero: new residuals and outputs are zero whatever the mixer is; time and class reach trained ones."""
    model = build_denoiser("dit3_nano_patch4")
    x, t, y = draw_noisy()
    assert not model(x, t, y).any()
    block, grid = model.blocks[0], (3, 5)
    tokens = torch.randn(2, 15, 48)
    image = tokens.mT.unflatten(2, grid)
    torch.testing.assert_close(block(tokens, grid, torch.randn(2, 48)), tokens + block.cpe(image).flatten(2).mT)
    weight = model.class_embed.weight.detach()
    assert weight.shape == (11, 48) and abs(weight.std().item() / 0.02 - 1) < 0.2
    trained = denoiser()
    with torch.no_grad():
        assert relative(trained(x, t, y + 1), trained(x, t, y)) > 1e-3
        assert relative(trained(x, t // 2, y), trained(x, t, y)) > 1e-3


def test_a_dit5_inherits_a_dit_bit_by_bit(tmp_path):
    """Everything that a DiT has is its own, whoever wrote the file; the rest is new; a DiT with a CPE does not fit."""
    teacher = denoiser("dit_nano_patch4")
    options = {"embed_dim": 24, "depth": 2}
    described = {"preprocessing": {"input_size": [1, 8, 8]}, "classes": [str(i) for i in range(10)]}
    own, foreign = tmp_path / "own.safetensors", tmp_path / "release.pt"
    save_weights(own, teacher, name="dit_nano_patch4", options=options, **described)
    torch.save(teacher.state_dict(), foreign)
    for file in (own, foreign):
        student = build_denoiser("dit5_nano_patch4", **options)
        before = {key: value.clone() for key, value in student.state_dict().items()}
        fates = fill(student, file, "dit5_nano_patch4")
        new = {key for key, fate in fates.items() if fate == "expected: new"}
        assert new == student.new_parameters() == set(student.state_dict()) - set(teacher.state_dict())
        for key, value in student.state_dict().items():
            assert torch.equal(value, before[key] if key in new else teacher.state_dict()[key]), key
    save_weights(own, student, name="dit5_nano_patch4", options=options, **described)
    again = build_denoiser("dit5_nano_patch4", **options)
    assert set(fill(again, own, "dit5_nano_patch4").values()) == {"used"}
    torch.save(denoiser("dit_nano_patch4", cpe=True).state_dict(), foreign)
    with pytest.raises(UserError, match="does not fit dit5_nano_patch4 .*cpe"):
        fill(again, foreign, "dit5_nano_patch4")


def test_the_mixer_of_a_dit5_is_the_releases():
    """Its tensors of one mixer, under the release's names, through the same translation as a whole file."""
    truth = read_data("t5.npz", "dit5_mixed_nat5/")
    state = {f"blocks.0.attn.{key}": value for key, value in below(truth, "state_dict/").items()}
    mixer = build_mixer("t5", 36, 3)
    ours = official_state_dict(state).items()
    mixer.load_state_dict({key.removeprefix("blocks.0.attn."): value for key, value in ours})
    assert relative(mixer(truth["x"], (6, 6)), truth["out"]) < 1e-5
    for missing in ("qk_scale_ttt", "qk_offset_ttt"):
        rest = {key: value for key, value in state.items() if key != f"blocks.0.attn.{missing}"}
        with pytest.raises(UserError, match="qk_offset_ttt is missing"):
            official_state_dict(rest)
