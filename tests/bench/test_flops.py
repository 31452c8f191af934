"""Counts against PyTorch's own counter, hand-written formulas, and the published sizes."""

import itertools

import pytest
import torch
from timm.layers import use_fused_attn
from torch.utils.flop_counter import FlopCounterMode

from repro.bench import build
from repro.bench.flops import OperatorCounter, cost, counted_macs
from repro.models.ttt_mixer import DESIGNS, W0_MODES, ttt_linear_macs
from repro.models.vittt import POOLS

NANO, TINY, DEIT = "vittt_nano_patch16_144", "vittt_tiny_patch16_224", "deit_tiny_patch16_224"
VIT3 = "vit3_nano_patch16_144"


def torch_macs(name, options, resolution, backend=None):
    """Half of what FlopCounterMode counts in a real forward pass."""
    model = build.create(name, options, resolution, fused=False)
    if backend:
        model.set_backend(backend)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.zeros(1, 3, *resolution))
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("name", [NANO, TINY])
@pytest.mark.parametrize("chunk_size", [16, 0])
def test_parameter_terms_add_up_to_the_model(name, chunk_size):
    combinations = list(itertools.product(DESIGNS, POOLS, W0_MODES))
    for design, pool, w0 in combinations if name == NANO else combinations[:: len(W0_MODES) * 2 + 1]:
        options = {"design": design, "pool": pool, "w0": w0, "chunk_size": chunk_size}
        resolution = (64, 96)
        counted = sum(p.numel() for p in build.create(name, options, resolution).parameters())
        assert sum(cost(name, options, resolution).param_terms.values()) == counted, options


@pytest.mark.parametrize(
    "name, options, million",
    [
        *(
            (TINY, {"design": design}, m)
            for design, m in zip(DESIGNS, (5.877, 5.435, 5.889, 5.900, 6.962, 6.983), strict=True)
        ),
        ("vittt_small_patch16_224", {}, 26.365),
        ("vittt_base_patch16_224", {}, 102.329),
        (DEIT, {}, 5.717),
    ],
)
def test_parameters_of_the_published_models(name, options, million):
    assert round(cost(name, options, (224, 224)).num_params / 1e6, 3) == million


def test_a_frozen_initial_state_is_no_parameter():
    learned, frozen = (cost(TINY, {"w0": w0}, (224, 224)).num_params for w0 in ("per_direction", "frozen"))
    assert learned - frozen == 12 * 2 * 3 * 64 * 64


@pytest.mark.parametrize(
    "name, options, resolution",
    [
        *((NANO, {"design": design}, (128, 128)) for design in DESIGNS),
        (NANO, {"pool": "max", "chunk_size": 8}, (64, 128)),
        (NANO, {"pool": "head", "chunk_size": 11}, (32, 80)),
        (NANO, {"pool": "mid", "chunk_size": 0}, (80, 32)),
        (NANO, {"pool": "double", "chunk_size": 6, "w0": "shared"}, (32, 80)),
        (NANO, {"num_classes": 0, "w0": "frozen"}, (64, 64)),
        (TINY, {"chunk_size": 4, "design": "conv1d"}, (64, 64)),
        (TINY, {}, (64, 32)),
    ],
)
def test_vittt_macs_equal_those_of_the_reference_path(name, options, resolution):
    counted = cost(name, options, resolution)
    assert counted.method == "analytic"
    assert counted.macs == torch_macs(name, options, resolution, backend="reference")


@pytest.mark.parametrize(
    "options", [{}, {"design": "conv1d"}, {"chunk_size": 64}, {"chunk_size": 0}, {"pool": "double"}]
)
def test_ragged_tail_agrees_with_the_formula_registered_for_the_op(options):
    resolution = (144, 144)  # 81 tokens, 83 with two class tokens
    assert cost(NANO, options, resolution).macs == torch_macs(NANO, options, resolution, backend="torch")


def test_inner_learner_by_hand():
    # 5 tokens in chunks of 2, 2 and 1, one head of 3: 3·5·3² for K·W, Q·W and the update, 2·3·(4 + 4 + 1) for Q·Kᵀ and
    # A·G
    assert ttt_linear_macs(5, 1, 3, 2) == 135 + 54
    assert ttt_linear_macs(5, 2, 3, 0) == 2 * (135 + 2 * 3 * 25)
    assert ttt_linear_macs(5, 1, 3, 64) == 135 + 2 * 3 * 25


def test_equation_14():
    """Omega(Vittt) = 6TD² + 6TDd + 4bTD per layer: projections and inner learner of both directions."""
    T, D, d, b = 6400, 192, 64, 16
    parts = cost(TINY, {}, (1280, 1280)).mac_terms
    assert parts["projections"] + parts["inner_learner"] == 12 * (6 * T * D**2 + 6 * T * D * d + 4 * b * T * D)


@pytest.mark.parametrize(
    "size, C, heads, giga", [("tiny", 192, 6, 1.2235), ("small", 384, 6, 4.8169), ("base", 768, 12, 17.956)]
)
def test_vit3_by_hand_and_by_the_convention_of_its_paper(size, C, heads, giga):
    """The paper counts with fvcore: 5 per element of a LayerNorm, and not the convolution's inner gradient."""
    N, d = 196, C // heads
    linear = C * (3 * C + 3 * d) + (C + d) * C + 8 * C * C
    inner = 6 * C * d + 2 * 9 * d
    by_hand = 12 * N * (linear + inner + 9 * C) + N * 768 * C + 1000 * C
    counted = cost(f"vit3_{size}_patch16_224", {}, (224, 224))
    assert counted.method == "analytic" and counted.macs == by_hand
    theirs = by_hand - 12 * N * 9 * d + 25 * N * 5 * C
    assert f"{theirs / 1e9:.5g}" == str(giga)


@pytest.mark.parametrize("options", [{}, {"num_classes": 0, "num_heads": 4, "depth": 1}])
@pytest.mark.parametrize("resolution", [(144, 144), (32, 80)])
def test_vit3_closed_form_equals_the_operators(options, resolution):
    counted, model = cost(VIT3, options, resolution), build.create(VIT3, options, resolution, device="meta")
    assert counted.macs == counted_macs(model, resolution)
    # PyTorch's own counter counts d² pairs for the d groups of the convolution's inner gradient
    d, inner_gradient = 64 // options.get("num_heads", 2), counted.mac_terms["inner_conv"] // 2
    assert torch_macs(VIT3, options, resolution) == counted.macs + (d - 1) * inner_gradient


@pytest.mark.parametrize("name, D", [(DEIT, 192), ("deit_base_patch16_224", 768)])
@pytest.mark.parametrize("resolution", [(224, 224), (1280, 1280), (64, 160)])
def test_deit_by_hand(name, D, resolution):
    N = resolution[0] * resolution[1] // 256
    T = N + 1
    by_hand = 12 * (12 * T * D**2 + 2 * T**2 * D) + N * 768 * D + 1000 * D
    assert cost(name, {}, resolution).macs == by_hand


@pytest.mark.parametrize("resolution", [(224, 224), (64, 160)])
def test_deit_closed_form_equals_the_counters(resolution):
    model = build.create(DEIT, {}, resolution, fused=False, device="meta")
    assert cost(DEIT, {}, resolution).method == "analytic"
    assert cost(DEIT, {}, resolution).macs == counted_macs(model, resolution) == torch_macs(DEIT, {}, resolution)


@pytest.mark.parametrize(
    "name", ["regnety_002", "efficientnet_b0", "convnext_atto", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"]
)
def test_other_models_are_counted_on_unfused_attention(name):
    counted = cost(name, {}, (224, 224))
    assert counted.num_params == sum(p.numel() for p in build.create(name, {}, (224, 224)).parameters())
    assert counted.macs == torch_macs(name, {}, (224, 224))


class _Toy(torch.nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))
        self.operation = operation

    def forward(self, x):
        return self.operation(x @ self.weight)


@torch.library.custom_op("repro_test::mystery_product", mutates_args=())
def mystery_product(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT


@mystery_product.register_fake
def _(x):
    return x.new_empty(*x.shape[:-1], x.shape[-2])


@pytest.mark.parametrize(
    "operation, named",
    [
        (mystery_product, "repro_test.mystery_product"),
        (torch.fft.rfft2, "aten._fft_r2c"),
        (
            lambda x: torch.nn.functional.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False),
            "aten.grid_sampler_2d",
        ),
    ],
)
def test_an_operator_that_cannot_be_counted_is_an_error(operation, named):
    with pytest.raises(ValueError, match=named):
        counted_macs(_Toy(operation).to("meta"), (8, 8))


@pytest.mark.parametrize("groups", [1, 2, 4])
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
        ("vittt_huge_patch16_224", {}, (224, 224), "no such model"),
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
            assert build.create(DEIT, {}, (32, 32), fused=not fused).blocks[0].attn.fused_attn != fused
            assert use_fused_attn() == fused
    assert use_fused_attn() == before
