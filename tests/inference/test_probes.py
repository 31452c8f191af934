"""Probes: steps, ascent and q = k against the operator and autograd; those of ladders against sums by hand."""

import pytest
import timm
import torch
import torch.nn.functional as F

import repro.models  # noqa: F401
from kernels import ttt_linear, ttt_linear_bidir
from kernels.ttt_linear.reference import Arguments
from repro.inference.inner import OverrideTTTLinear
from repro.inference.probes import InnerLosses, Probe, change_options, inner_loop, is_rebuilt
from repro.models import lact, vit3
from repro.models.registry import build_model
from tests.models.helpers import shaken

B, T, H, D, CHUNK = 2, 11, 3, 16, 4  # a short last chunk


@pytest.fixture
def arguments():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, 2, H, D, dtype=torch.float64)
    lr = torch.rand(B, T, H, dtype=torch.float64) / D
    scale = 1 / torch.arange(1, CHUNK + 1, dtype=torch.float64).repeat(2, 1)
    W0, b0 = 0.2 * torch.randn(2, H, D, D, dtype=torch.float64), 0.2 * torch.randn(2, H, D, dtype=torch.float64)
    gamma, mu = 1 + 0.2 * torch.randn(2, H, D, dtype=torch.float64), 0.2 * torch.randn(2, H, D, dtype=torch.float64)
    return Arguments(q, k, v, lr, scale, W0, b0, gamma, mu, CHUNK, [False, True], 1e-6)


def run(o):
    return ttt_linear_bidir(*o[:9], chunk_size=o.chunk_size, eps=o.eps)


def test_one_step_is_the_operator(arguments):
    torch.testing.assert_close(inner_loop(arguments, 1)[0], run(arguments))
    torch.testing.assert_close(Probe("ascent")(arguments, run), run(arguments._replace(lr=-arguments.lr)))
    torch.testing.assert_close(Probe("q_is_k")(arguments, run), run(arguments._replace(q=arguments.k)))


def test_more_steps_are_descent_on_the_chunk(arguments):
    """By autograd on Σ c[n−1] lr_t ℓ_t; outputs are the operator's for the chunk, from the state before its end."""
    o, steps = arguments, 3
    out, before, after = inner_loop(o, steps)
    for image, r, h in ((0, 0, 0), (1, 1, 2)):
        order = list(range(T - 1, -1, -1)) if o.reverse[r] else list(range(T))
        W, b, gamma, mu = (x[r, h] for x in (o.W0, o.b0, o.ln_weight, o.ln_bias))

        def losses(W, b, chunk):
            k, v = o.k[image, chunk, r, h], o.v[image, chunk, r, h]
            return (F.layer_norm(k @ W + b, (D,), gamma, mu, o.eps) - (v - k)).square().sum(-1) / 2

        for start in range(0, T, CHUNK):
            chunk = order[start : start + CHUNK]
            rate = o.token_scale[r, len(chunk) - 1] * o.lr[image, chunk, h]
            torch.testing.assert_close(before[image, chunk, r, h], losses(W, b, chunk))
            for step in range(steps):
                if step == steps - 1:
                    parts = (x[image, chunk, r, h].view(1, -1, 1, D) for x in (o.q, o.k, o.v))
                    lr, scale = o.lr[image, chunk, h].view(1, -1, 1), o.token_scale[r, : len(chunk)]
                    last = ttt_linear(*parts, lr, scale, W[None], b[None], gamma[None], mu[None], chunk_size=len(chunk))
                    torch.testing.assert_close(out[image, chunk, r, h], last[0, :, 0])
                W, b = W.detach().requires_grad_(), b.detach().requires_grad_()
                dW, db = torch.autograd.grad((rate * losses(W, b, chunk)).sum(), (W, b))
                W, b = W - dW, b - db
            torch.testing.assert_close(after[image, chunk, r, h], losses(W, b, chunk))


def test_steps_lower_the_inner_loss_and_ascent_raises_it(arguments):
    probes = [Probe(name) for name in ("steps=4", "steps=1", "ascent")]
    for probe in probes:
        probe(arguments, run)
    (_, after_four), (before_one, after_one), (before_ascent, after_ascent) = (probe.losses.means() for probe in probes)
    assert after_four < after_one < before_one and before_ascent < after_ascent


@pytest.mark.parametrize("name", ["steps", "steps=0", "steps=two", "ascent=1", "descent"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="known: steps=K, ascent, q_is_k"):
        Probe(name)


def test_a_model_without_inner_learner_has_nothing_to_probe():
    probe = Probe("ascent")
    with torch.no_grad(), OverrideTTTLinear(probe):
        timm.create_model("deit_nano_patch16_144").eval()(torch.zeros(1, 3, 144, 144))
    with pytest.raises(ValueError, match="no inner learner"):
        probe.losses.means()


def build(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return shaken(build_model(name, num_classes=3, depth=1, **options)).double().eval()


def find_layer(model: torch.nn.Module, kind: type) -> torch.nn.Module:
    return next(module for module in model.modules() if isinstance(module, kind))


def observe(model: torch.nn.Module, layer: torch.nn.Module) -> tuple[torch.Tensor, tuple[float, float]]:
    """What the layer projects, and the mean losses; the model's output is as it was."""
    seen, losses = [], InnerLosses()
    layer.qkv.register_forward_hook(lambda module, inputs, out: seen.append(out))
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with losses.observe(model):
            found = model(images)
        assert torch.equal(found, model(images))
    return seen[0], losses.means()


def test_the_losses_of_vit3_are_those_of_its_heads():
    """V6: F(k) = k W with W ← W + (s/N) Σ kᵀv, so that both losses are sums of products."""
    model = build("ladder_vit3_nano_patch4_32", step="v6")
    layer = find_layer(model, vit3.InnerTraining)
    qkv, (before, after) = observe(model, layer)
    q, k, v = layer._split(qkv[..., : 3 * 48], 2)
    W = layer.w1[0]
    for found, weight in ((before, W), (after, W + k.mT @ v / (3 * 64))):
        assert found == pytest.approx(-((k @ weight) * v).sum(-1).mean().item())
    assert after < before


def test_the_losses_of_lact_are_those_at_the_end_of_all_chunks():
    model = build("lact_nano_patch4_32", step="v6", order="before")
    layer = find_layer(model, lact.FastWeights)
    qkv, (before, after) = observe(model, layer)
    q, k, v = F.silu(qkv).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    k = k / (k.norm(dim=-1, keepdim=True) + lact.EPS)
    for found, S in ((before, layer.s), (after, layer.s + v.mT @ k)):
        assert found == pytest.approx(-((k @ S.mT) * v).sum(-1).mean().item())


def test_the_layers_have_their_own_function_back_also_after_an_error():
    for name, kind in (("ladder_vit3_nano_patch4_32", vit3.InnerTraining), ("lact_nano_patch4_32", lact.FastWeights)):
        model = build(name)
        layer = find_layer(model, kind)
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


def test_only_ladders_are_probed_here():
    assert is_rebuilt("lact_tiny_patch16_224") and is_rebuilt("ladder_vit3_base_patch16_224")
    assert not is_rebuilt("ladder_vittt_tiny_patch16_224") and not is_rebuilt("vit3_tiny_patch16_224")
