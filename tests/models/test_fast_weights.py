"""LaCT's fast weights: the releases' tensors, autograd, and the parallel form of every learner that has one."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm import create_model

from repro.models.fast_weights import LACT_STEPS, choose_form, decay_matrix, find_obstacle, learn, learn_in_parallel
from repro.models.inner import InnerLoop
from repro.models.inner import learn as learn_recurrently
from repro.models.lact import FastWeights
from repro.models.muon import newton_schulz
from tests.models.helpers import assert_official_part, below, read_data, relative

NAMES = {"to_qkv": "qkv", "o_proj": "proj", "c_proj": "proj", "lr_proj": "rates", "lr_fc": "rates", "o_norm": "norm"}
REDUCIBLE = [name for name, options in LACT_STEPS.items() if find_obstacle(InnerLoop(**options)) is None]
CAUSAL = {"order": "before", "chunk_size": 8}
GRID = (1, 0)  # which no learner here reads
RELEASED = (0, 2, 1)  # places of our weights among those of the releases, W0, W1 and W2, which are (outputs, inputs)


def lact(step: str = "own", **changes) -> InnerLoop:
    return InnerLoop(**{**LACT_STEPS[step], **changes})


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return read_data("lact.npz")


def causal(reference: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    """Weights; q, k, v; rates; momentum, as `learn` takes them: the heads of one image."""
    weights = [reference[f"causal/w{place}"].mT for place in RELEASED]
    tokens = [reference[f"causal/{name}"][None] for name in "qkv"]
    rates = torch.cat([reference[f"causal/lr{place}"] for place in RELEASED], -1)[None]
    return weights, tokens, rates, reference["causal/momentum"][None, ..., 0]


def drawn(loop: InnerLoop, tokens: int, d: int = 6) -> tuple:
    """Arguments of `learn`, fp64, that have gradients."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "requires_grad": True}
    weights = [torch.randn(3, *shape, **options) for shape in loop.shapes(d)]
    q, k, v = (torch.randn(2, 3, tokens, d, **options) for _ in range(3))
    rates = torch.rand(2, 3, tokens, len(loop.learned), **options) if loop.rate != "fixed" else None
    momentum = torch.rand(2, 3, tokens, **options) if loop.momentum else None
    return weights, q, k, v, rates, momentum


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(("kind", "name"), [("lact", "llm"), ("nvs", "nvs")])
def test_newton_schulz_is_the_releases(reference, kind, name, tall):
    G = reference[f"newton_schulz_{name}/G"]
    found = newton_schulz(G.mT if tall else G, kind)
    assert relative(found, reference[f"newton_schulz_{name}/{'tall_' * tall}fp32"]) < 1e-5
    if kind == "nvs" and not tall:
        assert relative(newton_schulz(G, "frobenius"), reference["newton_schulz_nvs/steps0_fp32"]) < 1e-6


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("muon", ["none", "lact"])
@pytest.mark.parametrize(("norm", "name"), [("state", "postnorm"), ("copy", "prenorm")])
def test_the_causal_learner_is_the_releases(reference, norm, name, muon, momentum):
    weights, tokens, rates, factors = causal(reference)
    loop = lact(norm=norm, muon=muon, momentum=momentum, **CAUSAL)
    found = learn_recurrently(loop, weights, *tokens, GRID, rates, factors if momentum else None)[0]
    key = f"causal/{name}_{'muon' if muon == 'lact' else 'sgd'}{'_momentum' * momentum}"
    assert relative(found, reference[key]) < 1e-5


def test_its_gradients_are_the_releases(reference):
    weights, tokens, rates, factors = causal(reference)
    leaves = [x.clone().requires_grad_() for x in (*weights, *tokens, *rates.unbind(-1))]
    loop = lact(muon="none", **CAUSAL)
    out = learn_recurrently(loop, leaves[:3], *leaves[3:6], GRID, torch.stack(leaves[6:], -1), factors)[0]
    (out * reference["causal/cot"]).sum().backward()
    for name, leaf in zip(("w0", "w2", "w1", "q", "k", "v", "lr0", "lr2", "lr1"), leaves, strict=True):
        expected = reference[f"causal/grads_of_postnorm_sgd_momentum/{name}"]
        found = leaf.grad.mT if name.startswith("w") else leaf.grad
        assert relative(found.reshape(expected.shape), expected) < 1e-4, name


@pytest.mark.parametrize("name", [name for name in LACT_STEPS if name != "own"])
def test_each_step_of_the_ladder_is_that_of_the_papers_code(reference, name):
    weights, tokens, rates, factors = causal(reference)
    loop = lact(name, **CAUSAL)
    given = [reference["causal/ladder/s0"].mT] if loop.model == "fc" else weights
    rates = rates if len(loop.learned) == 3 else rates[..., 2:]
    rest = (rates if loop.rate != "fixed" else None, factors if loop.momentum else None)
    expected = reference[f"causal/ladder/{'gradient_ascent' if name == 'ascent' else name.replace('v', 'V')}"]
    for form in ("recurrent", *(["parallel"] if name in REDUCIBLE else [])):
        assert relative(learn(loop, given, *tokens, GRID, *rest, form)[0], expected) < 1e-5, form


OPTIONS = (
    {"loss": "mse"},
    {"loss": "smooth_l1"},
    {"damping": True},
    {"epochs": 2},
    {"steps": 3},
    {"batches": 3, "chunk_size": 0},
    {"reduction": "mean"},
    {"lr": 0.5},
    {"rate": "dynamic"},
    {"rate": "per_weight"},
    {"momentum": True},
    {"muon": "lact"},
    {"direction": "ascent"},
    {"scale": 0.3},
    {"q_is_k": True},
    {"model": "mlp", "depth": 3, "only": (2,)},
    *({"order": order} for order in ("before", "after", "end")),
)


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_a_parallel_form_is_the_recurrent_one_or_is_refused(changes):
    loop = lact("v6", **{"chunk_size": 4, **changes})
    weights, *given = drawn(loop, 10)
    if find_obstacle(loop) is None:
        both = [learn(loop, weights, *given[:3], GRID, *given[3:], form)[0] for form in ("recurrent", "parallel")]
        assert relative(*both) < 1e-10
    else:
        with pytest.raises(ValueError, match="backend parallel"):
            learn_in_parallel(loop, weights, *given)


@pytest.mark.parametrize(("name", "muon"), [("bidirectional", "none"), ("bidirectional_muon", "lact")])
def test_the_bidirectional_layer_is_the_releases(reference, name, muon):
    """As meant: the release assigns the orthogonal step to the weight, so that its layer with Muon forgets it."""
    part = below(reference, f"{name}/")
    part["out"] = part["out" if muon == "none" else "out_as_meant_fp32"]
    layer = FastWeights(24, 3, lact(momentum=False, muon=muon, width=2))

    def rename(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {".".join(NAMES.get(word, word) for word in key.split(".")): value for key, value in state.items()}

    out = assert_official_part(layer, part, run=lambda layer, x: layer(x, (3, 7)), rename=rename, backward=1e-4)
    assert {"w0", "w1"} <= set(below(part, "grads/"))
    if muon == "lact":
        assert relative(out, part["out_as_released_fp32"]) > 0.5


@pytest.mark.parametrize(("steps", "muon"), [(0, "frobenius"), (5, "nvs")])
def test_the_layer_for_novel_views_is_the_releases(reference, steps, muon):
    """It learns on the first tokens and reads all; its matrices are stored transposed, its rates with their own order."""
    part = below(reference, f"nvs_steps{steps}/")
    state = below(part, "state_dict/")
    for name in ("w0", "w1", "w2"):
        state[name].requires_grad_()
    x, count = part["x"].clone().requires_grad_(), int(part["update_tokens"])
    q, k, v = F.silu(x @ state["to_qkv.weight"].mT).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    q, k = (each / (each.norm(dim=-1, keepdim=True) + 1e-5) for each in (q, k))
    shift = 0.01 + math.log(-math.expm1(-0.01))
    rates = F.softplus(x @ state["lr_fc.weight"].mT + state["lr_fc.bias"] + shift)
    rates = rates.unflatten(2, (3, 3)).permute(0, 3, 1, 2)
    weights = [state[f"w{place}"] for place in RELEASED]
    loop = lact(momentum=False, muon=muon, norm="detached")
    k, v, rates = (each[:, :, :count] for each in (k, v, rates[..., RELEASED]))
    out = learn_recurrently(loop, weights, q, k, v, GRID, rates)
    out = F.rms_norm(out, (8,), state["o_norm.weight"], 1e-5).transpose(1, 2).flatten(2) @ state["c_proj.weight"].mT
    assert relative(out, part["out"]) < 1e-5
    (out * part["cot"]).sum().backward()
    assert relative(x.grad, part["grad_x"]) < 1e-4
    for name in ("w0", "w1"):
        assert relative(state[name].grad, part[f"grads/{name}"]) < 1e-4


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (7, 2), (29, 1), (29, 2)])
@pytest.mark.parametrize("order", ["before", "after", "end"])
@pytest.mark.parametrize("name", REDUCIBLE)
def test_parallel_is_recurrent(name, order, tokens, steps):
    """Outputs and gradients, also where the last chunk is short or the only one."""
    for chunk_size in (8, 0):
        loop = lact(name, order=order, chunk_size=chunk_size, steps=steps)
        weights, q, k, v, *rest = drawn(loop, tokens)
        leaves = [*weights, q, k, v, *(x for x in rest if x is not None)]
        one, other = (learn(loop, weights, q, k, v, GRID, *rest, form) for form in ("recurrent", "parallel"))
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        torch.manual_seed(1)
        cot = torch.randn_like(one)
        options = {"allow_unused": True, "materialize_grads": True}
        # Newton–Schulz multiplies the rounding of singular values that are zero, as a single token's are
        limit = {"rtol": 1e-10, "atol": 1e-10} if loop.muon == "none" else {"rtol": 1e-7, "atol": 1e-6}
        found = [torch.autograd.grad((out * cot).sum(), leaves, **options) for out in (one, other)]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, **limit)


@pytest.mark.parametrize(
    ("name", "part"), [("own", "W1 and W2 learn"), ("ascent", "W1 and W2 learn"), ("v1", "norm state")]
)
def test_what_does_not_reduce_says_which_part_is_in_the_way(name, part):
    loop = lact(name, chunk_size=8)
    with pytest.raises(ValueError, match=f"backend parallel: {part}.*use recurrent"):
        learn_in_parallel(loop, *drawn(loop, 16))
    with pytest.raises(ValueError, match=part):
        choose_form(loop, "parallel", torch.device("cpu"))
    model = create_model("lact_nano_patch4_32", step=name)
    model.set_backend("parallel")
    with pytest.raises(ValueError, match=part):
        model(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("chunks", [16, 1024])
def test_momentum_over_many_chunks_loses_nothing(chunks):
    """In fp32 against the recurrence in fp64; a quotient of cumulated products underflows from 26 chunks on."""
    torch.manual_seed(0)
    factors = torch.rand(chunks) * 0.5 + 0.25
    steps, moving, expected = torch.randn(chunks, 5), torch.zeros(5, dtype=torch.float64), []
    for factor, step in zip(factors.double(), steps.double(), strict=True):
        moving = step + factor * moving
        expected.append(moving)
    assert relative((decay_matrix(factors) @ steps).double(), torch.stack(expected)) < 1e-5


def test_decays_at_the_ends_of_their_range():
    found = decay_matrix(torch.tensor([0.3, 0.0, 1.0, 0.5], dtype=torch.float64))
    expected = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0.5, 0.5, 1]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-300, rtol=1e-12)
