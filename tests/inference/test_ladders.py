"""Probes of the ladders: their inner losses against sums by hand, and which options they change."""

import pytest
import torch
import torch.nn.functional as F

from repro.inference.probes import InnerLosses, change_options, has_ladder
from repro.models import lact, vit3
from repro.models.registry import build_model
from tests.models.helpers import shaken


def build(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return shaken(build_model(name, num_classes=3, depth=1, **options)).double().eval()


def observe(model: torch.nn.Module) -> tuple[float, float]:
    losses = InnerLosses()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), losses.observe(model):
        found = model(images)
    with torch.no_grad():
        assert torch.equal(found, model(images))  # the output is as it was
    return losses.means


def test_the_losses_of_vit3_are_those_of_its_heads():
    """V6: F(k) = k W with W ← W + (s/N) Σ kᵀv, so that both losses are sums of products."""
    name = "ladder_vit3_nano_patch4_32"
    model = build(name, step="v6")
    seen = {}
    training = model.blocks[0].attn
    training.qkv.register_forward_hook(lambda module, inputs, out: seen.update(qkv=out))
    before, after = observe(model)
    q, k, v = training._split(seen["qkv"][..., : 3 * 48], 2)
    W = training.w1[0]
    moved = W + k.mT @ v / (3 * 64)
    found = (-((k @ weight) * v).sum(-1).mean().item() for weight in (W, moved))
    assert (before, after) == pytest.approx(tuple(found))
    assert after < before


def test_the_losses_of_lact_are_those_at_the_end_of_all_chunks():
    name = "lact_nano_patch4_32"
    model = build(name, step="v6", order="before")
    seen = {}
    layer = next(module for module in model.modules() if isinstance(module, lact.FastWeights))
    layer.qkv.register_forward_hook(lambda module, inputs, out: seen.update(qkv=out))
    before, after = observe(model)
    q, k, v = F.silu(seen["qkv"]).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    k = k / (k.norm(dim=-1, keepdim=True) + lact.EPS)
    for found, S in ((before, layer.s), (after, layer.s + v.mT @ k)):
        assert found == pytest.approx(-((k @ S.mT) * v).sum(-1).mean().item())


def test_the_layers_have_their_own_function_back_also_after_an_error():
    for name, kind in (("ladder_vit3_nano_patch4_32", vit3.InnerTraining), ("lact_nano_patch4_32", lact.FastWeights)):
        model = build(name)
        layer = next(module for module in model.modules() if isinstance(module, kind))
        with pytest.raises(RuntimeError, match="in the middle"), InnerLosses().observe(model):
            assert layer.learn is not kind.learn
            raise RuntimeError("in the middle")
        assert layer.learn is kind.learn


def test_a_probe_changes_one_option():
    assert change_options({"img_size": 32}, "steps=3") == {"img_size": 32, "inner_steps": 3}
    assert change_options({"step": "v1"}, "steps=3") == {"step": "v1", "inner_steps": 3}
    assert change_options({"step": "own"}, "ascent") == {"step": "ascent"}
    with pytest.raises(ValueError, match="probe q_is_k: the model was trained with step v1; probe one of step own"):
        change_options({"step": "v1"}, "q_is_k")
    with pytest.raises(ValueError, match="known: steps=K, ascent, q_is_k"):
        change_options({}, "descent")


def test_only_ladders_are_probed_here():
    assert has_ladder("lact_tiny_patch16_224") and has_ladder("ladder_vit3_base_patch16_224")
    assert not has_ladder("ladder_vittt_tiny_patch16_224") and not has_ladder("vit3_tiny_patch16_224")
