"""Counts, ours and fvcore's, against PyTorch's own counter, hand-written formulas, and what papers print."""

import pytest
import torch
import torchvision
from timm.layers import use_fused_attn
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from repro.bench import build
from repro.bench.counter import OperatorCounter, counted_macs
from repro.bench.flops import cost
from repro.bench.fvcore import count_extras
from repro.models.ttt_mixer import DESIGNS
from tests.slow import slow

NANO, TINY, DEIT = "vittt_nano_patch16_144", "vittt_tiny_patch16_224", "deit_tiny_patch16_224"
VIT3 = "vit3_nano_patch16_144"
MILLIONS = 5.877, 5.435, 5.889, 5.900, 6.962, 6.983  # of parameters of each design
VALUES = 3 * 8 * 12  # of an input of the layers that fvcore counts


def torch_macs(name, options, resolution, backend=None):
    """Half of what FlopCounterMode counts in a real forward pass."""
    model = build.build_eval_model(name, options, resolution, fused=False)
    if backend:
        model.set_backend(backend)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.zeros(1, 3, *resolution))
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    "name, options, million",
    [
        *((TINY, {"design": design}, million) for design, million in zip(DESIGNS, MILLIONS, strict=True)),
        ("vittt_small_patch16_224", {}, 26.365),
        ("vittt_base_patch16_224", {}, 102.329),
        (DEIT, {}, 5.717),
    ],
)
def test_parameters_of_the_published_models(name, options, million):
    assert round(cost(name, options, (224, 224)).num_params / 1e6, 3) == million


@pytest.mark.parametrize(
    "backend, name, options, resolution",
    [
        *(("reference", NANO, {"design": design}, (128, 128)) for design in DESIGNS),
        ("reference", NANO, {"pool": "max", "chunk_size": 8}, (64, 128)),
        ("reference", NANO, {"pool": "head", "chunk_size": 11}, (32, 80)),
        ("reference", NANO, {"pool": "mid", "chunk_size": 0}, (80, 32)),
        ("reference", NANO, {"pool": "double", "chunk_size": 6, "w0": "shared"}, (32, 80)),
        ("reference", NANO, {"num_classes": 0, "w0": "frozen"}, (64, 64)),
        ("reference", TINY, {"chunk_size": 4, "design": "conv1d"}, (64, 64)),
        ("reference", TINY, {}, (64, 32)),
        # a short last chunk: 81 tokens, 83 with two class tokens
        *(("torch", NANO, {"chunk_size": size}, (144, 144)) for size in (16, 64, 0)),
        *(("torch", NANO, options, (144, 144)) for options in ({"design": "conv1d"}, {"pool": "double"})),
        # other models, on unfused attention
        *((None, name, {}, (224, 224)) for name in ("regnety_002", "efficientnet_b0", "convnext_atto")),
        *((None, name, {}, (224, 224)) for name in ("swin_tiny_patch4_window7_224", "vit_tiny_patch16_224")),
        # ViTs of further parts, whose sides need be no multiple of the patch, of other blocks, or another MLP
        (None, "vit_tiny_patch16_224", {"depth": 1, "init_values": 1e-5}, (230, 224)),
        (None, "vit_small_patch16_18x2_224", {"depth": 1}, (224, 224)),
        (None, "aimv2_1b_patch14_224", {"depth": 1, "embed_dim": 64, "num_heads": 2}, (224, 224)),
    ],
)
def test_macs_equal_those_of_a_forward_pass(backend, name, options, resolution):
    """Of Vittt by a closed form, which is that of its equations and of the operator."""
    counted = cost(name, options, resolution)
    assert counted.method == "analytic" or backend is None
    assert counted.macs == torch_macs(name, options, resolution, backend)


def test_equation_14():
    """Omega(Vittt) = 6TD² + 6TDd + 4bTD per layer: projections and inner learner of both directions."""
    T, D, d, b = 6400, 192, 64, 16
    parts = cost(TINY, {}, (1280, 1280)).mac_terms
    assert parts["projections"] + parts["inner_learner"] == 12 * (6 * T * D**2 + 6 * T * D * d + 4 * b * T * D)


@pytest.mark.parametrize(
    "name, options", [(DEIT, {}), (VIT3, {}), (VIT3, {"num_classes": 0, "num_heads": 4, "depth": 1})]
)
@pytest.mark.parametrize("resolution", [(144, 144), (32, 80)])
def test_closed_forms_equal_the_operators(name, options, resolution):
    counted = cost(name, options, resolution)
    assert counted.method == "analytic"
    assert counted.macs == counted_macs(
        build.build_eval_model(name, options, resolution, fused=False, device="meta"), resolution
    )


@pytest.mark.parametrize(
    "operation, named",
    [
        (lambda x: torchvision.ops.nms(x[0, 0, :, :4], x[0, 0, :, 4], 0.5), "torchvision.nms"),
        (torch.fft.rfft2, "aten._fft_r2c"),
        (lambda x: nn.functional.grid_sample(x, x[..., :2], align_corners=False), "aten.grid_sampler_2d"),
    ],
)
def test_an_operator_that_cannot_be_counted_is_an_error(operation, named):
    with pytest.raises(ValueError, match=named), torch.no_grad(), OperatorCounter():
        operation(torch.ones(1, 3, 8, 8, device="meta"))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_grouped_convolutions(groups, transposed):
    """By hand: an output position of a 4 -> 8 channel convolution (transposed: an input's) meets 3x3 taps."""
    x, w = torch.ones(2, 4, 5, 6), torch.ones((4, 8 // groups, 3, 3) if transposed else (8, 4 // groups, 3, 3))
    grad_out = torch.ones(2, 8, 7, 8) if transposed else torch.ones(2, 8, 3, 4)
    positions = 2 * (5 * 6 if transposed else 3 * 4)
    for mask in ([True, False, True], [False, True, False], [True, True, False]):
        counter = OperatorCounter()
        with counter:
            shape = [8], [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups, mask
            torch.ops.aten.convolution_backward(grad_out, x, w, *shape)
        assert counter.macs == sum(mask[:2]) * positions * 4 * 8 // groups * 9


@pytest.mark.parametrize(
    "operation, macs",
    [
        (lambda x: torch.einsum("bchw,bcvw->bchv", x, x), 3 * 8 * 8 * 8),
        (lambda x: torch.nn.functional.linear(x, x.new_ones(5, 8)), 3 * 8 * 8 * 5),
        (lambda x: torch.nn.functional.conv2d(x, x.new_ones(3, 1, 3, 3), groups=3), 3 * 6 * 6 * 9),
        (lambda x: torch.softmax(x * 2 + 1, -1).mean(), 0),
        (lambda x: torch.nn.functional.interpolate(x, scale_factor=2, mode="bicubic"), 0),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_composite_operators_are_taken_apart(operation, macs, mode):
    counter = OperatorCounter()
    with mode(), counter:
        operation(torch.ones(1, 3, 8, 8))
    assert counter.macs == macs


@pytest.mark.parametrize(
    "name, options, resolution, message",
    [
        (TINY, {}, (224, 230), "224x230"),
        (DEIT, {}, (224, 230), "224x230"),
        (TINY, {"design": "conv3d"}, (224, 224), "conv3d"),
    ],
)
def test_what_cannot_be_counted_says_so(name, options, resolution, message):
    with pytest.raises(ValueError, match=message):
        cost(name, options, resolution)


def test_attention_switch_is_put_back():
    before = use_fused_attn()
    for fused in (True, False):
        with build.fused_attention(fused):
            assert use_fused_attn() == fused
            assert build.build_eval_model(DEIT, {}, (32, 32), fused=not fused).blocks[0].attn.fused_attn != fused
            assert use_fused_attn() == fused
    assert use_fused_attn() == before


@pytest.mark.parametrize(
    ("layer", "norms", "interpolation"),
    [
        (nn.LayerNorm(12), 5 * VALUES, 0),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.LayerNorm(12, elementwise_affine=False)), 4 * VALUES, 0),
        (nn.GroupNorm(3, 3), 5 * VALUES, 0),
        (nn.BatchNorm2d(3), 2 * VALUES, 0),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False)), VALUES, 0),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.Upsample(scale_factor=2, mode="bilinear")), 0, 4 * 4 * VALUES),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.Upsample(scale_factor=2)), 0, 4 * VALUES),
        (nn.Sequential(nn.Conv2d(3, 5, 1), nn.GELU()), 0, 0),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_single_layers_by_fvcore(layer, norms, interpolation, device):
    assert count_extras(layer.to(device).eval(), (8, 12)) == {"norms": norms, "interpolation": interpolation}


@pytest.mark.parametrize(
    ("name", "width", "tokens", "giga"),
    [
        ("vit3_tiny_patch16_224", 192, 196, 1.22),  # the authors' code, for T, S and B
        slow("vit3_small_patch16_224", 384, 196, 4.82),
        slow("vit3_base_patch16_224", 768, 196, 17.96),
        ("deit_tiny_patch16_224", 192, 197, 1.26),
        slow("study_small_patch16_224", 384, 196, 4.58),
        ("dit3_small_patch8", 384, 16, 0.40),  # Table 10 of ViT3
        slow("dit3_small_patch4", 384, 64, 1.57),
        slow("dit3_small_patch2", 384, 256, 6.23),
        slow("dit3_base_patch8", 768, 16, 1.51),
        slow("dit3_base_patch4", 768, 64, 5.88),
        slow("dit3_base_patch2", 768, 256, 23.35),
    ],
)
def test_models_of_the_papers_by_fvcore(name, width, tokens, giga):
    """Two LayerNorms in each of twelve blocks, and one after; a denoiser's, of latents' size, have no scale."""
    image_size, per_value = ((32, 32), 4) if name.startswith("dit3") else ((224, 224), 5)
    counted = cost(name, {}, image_size, fvcore=True)
    terms, norms = counted.fvcore_terms, 25 * tokens * width * per_value
    assert terms == {"multiply_adds": counted.macs, "norms": norms, "interpolation": 0}
    assert round(sum(terms.values()) / 1e9, 2) == giga
