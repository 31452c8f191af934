"""Probes: one step equals the operator, more steps equal gradient descent by autograd, and so do ascent and q = k."""

import pytest
import timm
import torch
import torch.nn.functional as F

import repro.models  # noqa: F401
from kernels import ttt_linear, ttt_linear_bidir
from kernels.ttt_linear.reference import Arguments
from repro.inference.inner import OverrideTTTLinear
from repro.inference.probes import Probe, inner_loop

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


@pytest.mark.parametrize("steps", [2, 3])
def test_more_steps_are_descent_on_the_chunk(arguments, steps):
    """By autograd on Σ c[n−1] lr_t ℓ_t; outputs are the operator's for the chunk, from the state before its end."""
    o = arguments
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
    found = {}
    for name in ("steps=1", "steps=4", "ascent"):
        probe = Probe(name)
        probe(arguments, run)
        found[name] = probe.inner_losses()
    assert found["steps=4"][1] < found["steps=1"][1] < found["steps=1"][0]
    assert found["ascent"][1] > found["ascent"][0]


def test_a_probe_reaches_every_layer_and_one_step_changes_nothing():
    torch.manual_seed(0)
    model, images = timm.create_model("vittt_nano_patch16_144", num_classes=3).eval(), torch.randn(2, 3, 48, 48)
    with torch.inference_mode():
        alone = model(images)
        with OverrideTTTLinear(Probe("steps=1")):
            torch.testing.assert_close(model(images), alone)
        with OverrideTTTLinear(Probe("ascent")):
            assert not torch.allclose(model(images), alone, atol=1e-4)


@pytest.mark.parametrize("name", ["steps", "steps=0", "steps=-1", "steps=two", "ascent=1", "descent", ""])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="known: steps=K, ascent, q_is_k"):
        Probe(name)


def test_a_model_without_inner_learner_has_nothing_to_probe():
    probe = Probe("ascent")
    with torch.no_grad(), OverrideTTTLinear(probe):
        timm.create_model("deit_nano_patch16_144").eval()(torch.zeros(1, 3, 144, 144))
    with pytest.raises(ValueError, match="no inner learner"):
        probe.inner_losses()
