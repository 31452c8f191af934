"""ViT³ and Vittt with other inner learners: the authors' tensors, autograd, and both forms of Vittt's."""

import pytest
import torch
import torch.nn.functional as F

from kernels.ttt_linear.reference import ttt_linear_dual
from repro.models.inner import InnerLoop
from repro.models.ttt_mixer import STEPS as VITTT_STEPS
from repro.models.ttt_mixer import TTTMixer
from repro.models.vit3 import STEPS, InnerTraining
from tests.models.helpers import below, nano, read_data, relative, shaken

TOLERANCE = 1e-5
# mode of the authors' code -> our step, with the loop where it has no name: V1 without damping is what their V6 shares
# with V3
MODES = {
    "dot_product": ("own", None),
    "ga_dot_product": ("ascent", None),
    "no_query_dot_product": ("q_is_k", None),
    "only_w1": ("v1", None),
    "only_w1_no_muon": ("v1", InnerLoop(model="fc", scale=1 / 3)),
    "only_w1_straight_qk": ("v3_as_run", None),
}


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return read_data("lact.npz", "vit3_ladder/")


@pytest.mark.parametrize("mode", MODES)
def test_a_step_as_run_is_that_of_the_authors_code(reference, mode):
    step, loop = MODES[mode]
    training = InnerTraining(24, 3, step)
    training.loop = loop or training.loop
    training.load_state_dict(below(reference, "state_dict/"))
    x = reference["x"].clone().requires_grad_()
    out = training(x, tuple(reference["grid"].tolist()))
    (out * reference["cot"]).sum().backward()
    found = {"out": out, "grad_x": x.grad, "grad_w1": training.w1.grad, "grad_w3": training.w3.grad}
    for name, ours in found.items():
        assert relative(ours, reference[f"{mode}/{name}"]) < TOLERANCE, name


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("step", [step for step in STEPS if not step.endswith("_as_run")])
def test_a_step_as_derived_follows_its_loss(step, steps):
    """By autograd on −(s/N) Σ⟨F(k), v⟩, s = 1/3, each step of a weight divided by its norm + 1."""
    torch.manual_seed(0)
    training = shaken(InnerTraining(12, 2, step, steps)).double()
    x, grid, C, N = torch.randn(1, 12, 12, dtype=torch.float64), (3, 4), 12, 12
    found = training(x, grid)

    d = C // 2
    parts = training.qkv(x)[0].split([C] * 3 + [d] * 3, -1)
    q, k, v = (part.view(N, 2, d).transpose(0, 1) for part in parts[:3])
    q2, k2, v2 = (part.T.view(1, d, *grid) for part in parts[3:])
    q, q2 = (k, k2) if step == "q_is_k" else (q, q2)
    sign = -1 if step == "ascent" else 1
    is_gated, is_damped = step not in ("v3", "v6"), STEPS[step].damping

    def heads(W, x):
        return (x @ W[0]) * F.silu(x @ W[1]) if is_gated else x @ W[0]

    weights = [training.w1[0], training.w2[0]] if is_gated else [training.w1[0]]
    learned = range(1 if step == "v1" or not is_gated else 2)
    kernel = training.w3
    for _ in range(steps):
        loss = -(heads(weights, k) * v).sum() / (3 * N)
        gradients = torch.autograd.grad(loss, [weights[place] for place in learned], retain_graph=True)
        for place, G in zip(learned, gradients, strict=True):
            G = G / (G.norm(dim=-2, keepdim=True) + 1) if is_damped else G
            weights[place] = weights[place] - sign * G
        read_loss = -(F.conv2d(k2, kernel, padding=1, groups=d) * v2).sum() / (3 * N)
        (G,) = torch.autograd.grad(read_loss, kernel, retain_graph=True)
        kernel = kernel - G / (torch.linalg.vector_norm(G, dim=(1, 2, 3), keepdim=True) + 1)
    read = heads(weights, q).transpose(0, 1).reshape(N, C), F.conv2d(q2, kernel, padding=1, groups=d).view(d, N).T
    stated = training.proj(torch.cat(read, -1))[None]
    assert relative(found, stated) < 1e-12


@pytest.mark.parametrize(("ladder", "family"), [("ladder_vit3", "vit3"), ("ladder_vittt", "vittt")])
def test_the_unchanged_ladder_is_the_model_itself(ladder, family):
    x = torch.randn(2, 3, 144, 144, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, plain = shaken(nano(ladder)).double(), nano(family).double()
    plain.load_state_dict(model.state_dict())
    assert relative(model(x), plain(x)) < 1e-12


# --- Vittt ------------------------------------------------------------------------------------------------------------------------


def mixer_of(step: str, **options) -> TTTMixer:
    return shaken(nano("ladder_vittt", step=step, **options)).double().blocks[0].mixer


@pytest.mark.parametrize("step", ["plain", "dot"])
def test_a_mixer_that_reduces_computes_the_learner_that_its_step_says(step):
    """From its own projections, by the reference or, for the dot product, by sums over all earlier tokens."""
    mixer = mixer_of(step)
    x = torch.randn(2, 81, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, o = mixer._project(x)
    scans = []
    for r, reverse in enumerate(o.reverse):
        q, k, v = (t[:, :, r] for t in (o.q, o.k, o.v))
        lr = o.lr if o.lr.ndim == 3 else o.lr[:, :, r]
        if step == "plain":
            how = {"inner": "plain", "chunk_size": o.chunk_size, "reverse": reverse}
            scan = ttt_linear_dual(q, k, v - k, lr, o.token_scale[r], o.W0[r], **how)
        else:
            order = range(80, -1, -1) if reverse else range(81)
            W, scan = o.W0[r].expand(2, -1, -1, -1), torch.zeros_like(q)
            for start in range(0, 81, 16):
                chunk = list(order)[start : start + 16]
                for place, t in enumerate(chunk):
                    seen = chunk[: place + 1]
                    steps = torch.einsum("bsh,bshi,bshj->bhij", lr[:, seen], k[:, seen], (v - k)[:, seen])
                    scan[:, t] = torch.einsum("bhi,bhij->bhj", q[:, t], W + o.token_scale[r][place] * steps)
                W = W + o.token_scale[r][len(chunk) - 1] * steps
        scans.append(scan + q)
    stated = mixer.out_proj(mixer._merge(torch.stack(scans, 2).flatten(3), gate))
    assert relative(mixer(x), stated) < 1e-12


@pytest.mark.parametrize("step", ["plain", "dot"])
def test_both_forms_of_a_model_agree_with_all_gradients(step):
    model = shaken(nano("ladder_vittt", step=step)).double()
    x = torch.randn(1, 3, 144, 144, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = {}
    for backend in ("recurrent", "parallel"):
        model.set_backend(backend)
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        found[backend] = [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        assert model.selected_backend(torch.float64) == backend
    for ours, stated in zip(found["parallel"], found["recurrent"], strict=True):
        assert not stated.any() or relative(ours, stated) < 1e-9


def test_ascent_of_vittt_turns_the_rates():
    """Up the loss is down it with rates below 0: the first chunk's second token reads W + step in place of W − step."""
    own, ascent = mixer_of("own"), mixer_of("ascent")
    ascent.load_state_dict(own.state_dict())
    x = torch.randn(1, 81, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ascent.learning_rate(x), -own.learning_rate(x)) and not torch.allclose(own(x), ascent(x))


def test_with_keys_for_queries_nobody_reads_the_queries_convolution():
    model = nano("ladder_vittt", step="q_is_k")
    assert not [name for name, _ in model.named_parameters() if "conv_q" in name]
    _, arguments = model.blocks[0].mixer._project(torch.randn(1, 81, 64))
    assert arguments.q is arguments.k


@pytest.mark.parametrize("step", VITTT_STEPS)
def test_parallel_says_what_is_in_the_way(step):
    model = nano("ladder_vittt", step=step)
    model.set_backend("parallel")
    if step in ("plain", "dot"):
        model(torch.randn(1, 3, 144, 144))
        return
    with pytest.raises(ValueError, match="the LayerNorm of the inner learner stands .*; use step plain or dot"):
        model(torch.randn(1, 3, 144, 144))
