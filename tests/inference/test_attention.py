"""Where tokens look: implicit attention against whole Jacobians, softmax weights, formulas and hand counts."""

import pytest
import timm
import torch

import repro.models  # noqa: F401
from repro.inference import attention
from repro.inference.attention import Look, choose_tokens, measure_implicit_attention, observe_attention
from repro.inference.draw import find_central
from repro.models.inner_mixer import InnerMixer
from repro.models.registry import build_model

GRID, HEADS, DIM = (3, 4), 2, 8


@pytest.mark.parametrize(
    ("inner", "dwc", "neighbours"),
    [("linear", "none", 0), ("gate", "v", 0), ("2layer", "none", 3), ("3layer", "none", 0), ("swiglu", "qk", 3)],
)
def test_implicit_attention_is_the_norm_of_the_jacobian(inner, dwc, neighbours):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, HEADS * DIM, dtype=torch.float64)
    mixer = InnerMixer(HEADS * DIM, HEADS, inner, dwc=dwc, neighbours=neighbours)
    mixer.init_weights()
    mixer = mixer.double().requires_grad_(False)
    tokens = [0, 6]
    found = measure_implicit_attention(lambda *qkv: mixer.mix(*qkv, GRID), q, k, v, HEADS, tokens)
    jacobian = torch.autograd.functional.jacobian(lambda v: mixer.mix(q, k, v, GRID), v)[:, tokens]
    by_head = jacobian.unflatten(5, (HEADS, DIM)).unflatten(2, (HEADS, DIM))
    squares = torch.einsum("bnhcbmhd->bhnm", by_head.square())  # of an image and a head with itself
    torch.testing.assert_close(found, squares.sqrt() / DIM**0.5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("vit_tiny_patch16_224", {}), ("t5_softmax_nano_patch4_32", {}), ("study_nano_patch4_32", {"mixer": "softmax"})],
)
def test_a_softmax_model_is_observed_as_its_own_blocks_compute_it(name, options):
    """Rebuilt from the input of each attention; a ViT's class token is not among the patches."""
    torch.manual_seed(0)
    side, prefix = (64, 1) if name.startswith("vit") else (32, 0)
    model = build_model(name, depth=2, img_size=side, **options).eval().double().requires_grad_(False)
    images = torch.randn(3, 3, side, side, dtype=torch.float64)
    look = observe_attention(model, images, batch_size=2)
    assert not any(module._forward_hooks for module in model.modules())
    inputs = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(images)
    tokens = [prefix + token for token in choose_tokens(look.grid)]
    for layer, (block, x) in enumerate(zip(model.blocks, inputs, strict=True)):
        q, k, _ = block.attn.qkv(x).unflatten(2, (3, block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)[:, :, tokens, prefix:]
        torch.testing.assert_close(look.share[layer], weights / weights.sum(-1, keepdim=True))
        keys = k.transpose(1, 2).flatten(2)[:, prefix:]
        expected = torch.stack([one.mean(0).norm() / one.norm(dim=1).mean() for one in keys]).mean()
        torch.testing.assert_close(look.shift_ratio[layer], expected)


@pytest.mark.parametrize(("name", "options"), [("t5_nano_patch4_32", {"neighbours": 3}), ("study_nano_patch4_32", {})])
def test_an_inner_learner_is_observed_in_batches(name, options):
    torch.manual_seed(0)
    model = build_model(name, **options).eval().requires_grad_(False)
    images = torch.randn(3, 3, 32, 48)
    whole, parts = (observe_attention(model, images, batch_size=size) for size in (3, 2))
    assert whole.grid == (8, 12) and whole.share.shape == (2, 3, model.num_heads, 25, 96)
    torch.testing.assert_close(whole.share, parts.share)
    torch.testing.assert_close(whole.share.sum(-1), torch.ones(whole.share.shape[:-1]))


@pytest.mark.parametrize(
    "name", ["resnet18", "vittt_nano_patch16_144", "vit_tiny_patch16_224", "eva02_tiny_patch14_224"]
)
def test_a_model_without_plain_attention_is_refused(name):
    model = timm.create_model(name, **({"qk_norm": True} if name.startswith("vit_") else {}))
    with pytest.raises(ValueError, match="no softmax attention"):
        observe_attention(model.eval(), torch.randn(1, 3, 224, 224))


def test_shift_ratios_of_known_keys():
    torch.manual_seed(0)
    keys = torch.randn(4, 1, 8).expand(4, 196, 8)
    torch.testing.assert_close(attention.measure_shift_ratio(keys), torch.ones(4))
    opposite = torch.cat([keys, -keys], 1)
    torch.testing.assert_close(attention.measure_shift_ratio(opposite), torch.zeros(4), atol=1e-6, rtol=0)
    independent = attention.measure_shift_ratio(torch.randn(64, 196, 192)).mean()
    assert independent == pytest.approx(1 / 14, rel=0.05)  # the paper's 0.07


def test_numbers_of_looks_that_are_known_by_hand():
    """On a line of three patches: looking at oneself, and looking at the first patch."""
    tokens = choose_tokens((1, 3))
    assert tokens == [0, 1, 2]
    itself = torch.eye(3).view(1, 1, 1, 3, 3)
    first = torch.tensor([1.0, 0.0, 0.0]).expand(1, 1, 1, 3, 3)
    how = {"shift_ratio": torch.tensor([0.5]), "grid": (1, 3)}
    looks = {name: Look(share=share, **how) for name, share in {"a": itself, "b": first}.items()}
    found = attention.summarise_looks(looks, "a")
    assert found["a"] == {"shift_ratio": [0.5], "reach_patches": [0.0], "peak_percent": [100.0]}
    assert found["b"]["reach_patches"] == [1.0]  # 0, 1 and 2 patches
    assert found["b"]["overlap_percent"] == [pytest.approx(100 / 3)]
    assert found["even"]["reach_patches"] == [pytest.approx((1 + 2 / 3 + 1) / 3)]
    assert found["even"]["peak_percent"] == found["even"]["overlap_percent"] == [pytest.approx(100 / 3)]


@pytest.mark.parametrize(("grid", "count"), [((8, 8), 25), ((14, 14), 25), ((3, 9), 15), ((1, 1), 1)])
def test_the_tokens_that_look_are_a_lattice(grid, count):
    tokens = choose_tokens(grid)
    assert len(tokens) == len(set(tokens)) == count and tokens == sorted(tokens)
    assert tokens[0] == 0 and tokens[-1] == grid[0] * grid[1] - 1


@pytest.mark.parametrize(
    ("grid", "place"), [((4, 4), (1, 1)), ((2, 5), (0, 2)), ((3, 4), (1, 1)), ((8, 8), (4, 4)), ((9, 9), (4, 4))]
)
def test_the_token_that_is_shown_is_in_the_middle(grid, place):
    tokens = choose_tokens(grid)
    assert divmod(tokens[find_central(tokens, grid)], grid[1]) == place
