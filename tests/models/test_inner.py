"""Inner learners: every closed form against autograd through the printed loss."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from repro.models.inner import LOSSES, MODELS, InnerLoop, error_signal, follow, learn, read_out
from tests.models.helpers import relative
from tests.slow import first

GRID = (3, 4)
N, D, HEADS, IMAGES = 12, 4, 2, 2
# the twelve inner models: name, width, depth -> multiply-adds in units of N·d², as a person counts the products: forward
# on keys, backward, forward on queries
TWELVE = {
    ("fc", 1, 2): 2,
    ("silu_fc", 1, 2): 3,
    ("glu", 1, 2): 6,
    ("swiglu", 1, 2): 9,
    ("mlp", 1, 2): 6,
    ("mlp", 2, 2): 12,
    ("mlp", 4, 2): 24,
    ("mlp", 1, 3): 10,
    ("mlp_residual", 1, 2): 6,
    ("mlp_identity", 1, 2): 6,
    ("conv", 1, 2): 18,
    ("dwconv", 1, 2): 18 / 64,
}
SETTINGS = [
    {},
    {"damping": True},
    {"damping": True, "epochs": 2, "batches": 2, "direction": "ascent"},
    {"epochs": 3, "scale": 1 / 3},
    {"batches": 4, "lr": 0.5},
    {"batches": 3, "rate": "dynamic"},
    {"batches": 5, "lr": 0.3},  # ragged: 2, 2, 3, 2, 3
    {"only": "last", "epochs": 2, "batches": 2},
]
NAMES = ["-".join(map(str, case)) for case in TWELVE]
each_model = pytest.mark.parametrize(("model", "width", "depth"), TWELVE, ids=NAMES)


def predict(model: str, W: list[Tensor], x: Tensor) -> Tensor:
    """F(x) of one image and head, as the paper writes it: (N, d) -> (N, d)."""
    if model in ("conv", "dwconv"):
        image = x.T.reshape(1, D, *GRID)
        return F.conv2d(image, W[0], padding=1, groups=D // W[0].shape[1]).reshape(D, -1).T
    if model == "fc":
        return x @ W[0]
    if model == "silu_fc":
        return F.silu(x @ W[0])
    if model == "glu":
        return (x @ W[0]) * F.silu(x @ W[1])
    if model == "swiglu":
        return (F.silu(x @ W[0]) * (x @ W[1])) @ W[2]
    a = x
    for weight in W[:-1]:
        a = F.silu(a @ weight)
    last = W[-1] + torch.eye(D, dtype=x.dtype) if model == "mlp_identity" else W[-1]
    return a @ last + (x if model == "mlp_residual" else 0)


def inner_loss(name: str, predicted: Tensor, v: Tensor, s: float, rates: Tensor) -> Tensor:
    """The loss of one inner batch, token by token weighted by its rate."""
    r, n = predicted - v, len(v)
    if name == "rmse":
        return (s / n * r.square().sum()).sqrt()
    per_token = {
        "dot": lambda: -(predicted * v).sum(-1),
        "mse": lambda: r.square().sum(-1) / 2,
        "mae": lambda: r.abs().sum(-1),
        "smooth_l1": lambda: F.smooth_l1_loss(predicted, v, reduction="none").sum(-1),
    }[name]()
    return s / n * (rates * per_token).sum()


def learn_by_autograd(loop: InnerLoop, weights: list[Tensor], q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> Tensor:
    """Image by image and head by head, with the inner gradients by autograd."""
    outs = []
    for b, h in itertools.product(range(IMAGES), range(HEADS)):
        W = [weight[h] for weight in weights]
        s, sign = loop.scale or D**-0.5, -1 if loop.direction == "descent" else 1
        for _ in range(loop.epochs):
            for i in range(loop.batches):
                part = slice(N * i // loop.batches, N * (i + 1) // loop.batches)
                predicted = predict(loop.model, W, k[b, h])[part]
                loss = inner_loss(loop.loss, predicted, v[b, h, part], s, rates[b, h, part])
                learning = range(len(W)) if loop.only is None else loop.only
                found = torch.autograd.grad(loss, [W[p] for p in learning], create_graph=True)
                for p, G in zip(learning, found, strict=True):
                    if loop.damping:  # one norm for each output unit: a column of a matrix, a kernel of a convolution
                        G = G / (G.square().sum(dim=0 if G.ndim == 2 else (1, 2, 3), keepdim=True).sqrt() + 1)
                    W[p] = W[p] + sign * loop.lr * G
        outs.append(predict(loop.model, W, q[b, h]))
    return torch.stack(outs).reshape(IMAGES, HEADS, N, D)


def draw(loop: InnerLoop, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Weights (h, *shape), q, k, v (B, h, N, d) and token rates (B, h, N) in fp64, which all ask for gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [0.5 * normal(HEADS, *shape) for shape in loop.shapes(D)]
    q, k, v = (normal(IMAGES, HEADS, N, D) for _ in range(3))
    rates = normal(IMAGES, HEADS, N).sigmoid()
    for each in (*weights, q, k, v, rates):
        each.requires_grad_()
    return weights, q, k, v, rates


def adapt(*arguments) -> list[Tensor]:
    """The weights after all learning."""
    *_, learned = follow(*arguments)
    return learned


def build(model: str, width: int, depth: int, **options) -> InnerLoop:
    loop = InnerLoop(model=model, width=width, depth=depth)
    if options.get("only") == "last":
        options["only"] = (len(loop.shapes(1)) - 1,)
    return InnerLoop(model=model, width=width, depth=depth, **options)


def pair_learners():
    """Each model with each loss, in settings that take turns; with all settings the matrices and the convolution."""
    for i, case in enumerate(TWELVE):
        for j, loss in enumerate(LOSSES):
            for number, options in enumerate(SETTINGS):
                # a root of a weighted sum is no sum over tokens: a token rate weights the error signal of rmse, which is
                # of no loss
                if loss == "rmse" and "rate" in options:
                    continue
                everything = case in (("glu", 1, 2), ("mlp", 1, 2), ("dwconv", 1, 2)) and loss in ("dot", "mae")
                if everything or number in {(i + 3 * j) % len(SETTINGS), (i + 3 * j + 1) % len(SETTINGS)}:
                    yield *case, loss, options


LEARNERS = [*pair_learners()]


@pytest.mark.parametrize(
    ("model", "width", "depth", "loss", "options"),
    LEARNERS,
    ids=["-".join(map(str, (*rest, *options.values()))) for *rest, options in LEARNERS],
)
def test_closed_forms_equal_autograd(model, width, depth, loss, options):
    """Output and outer gradients, which are zero where the loss does not depend on the input."""
    loop = build(model, width, depth, **options, loss=loss)
    weights, q, k, v, rates = draw(loop)
    used = rates if loop.rate == "dynamic" else None
    inputs = [q, k, v, *weights, *([rates] if used is not None else [])]
    cotangent = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = learn(loop, weights, q, k, v, GRID, used)
    truth = learn_by_autograd(loop, weights, q, k, v, torch.ones_like(rates) if used is None else rates)
    assert relative(ours, truth) < 1e-12
    found = torch.autograd.grad(ours, inputs, cotangent, allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(truth, inputs, cotangent, allow_unused=True, materialize_grads=True)
    for mine, theirs in zip(found, wanted, strict=True):
        if theirs.any():
            assert relative(mine, theirs) < 2e-12
        else:
            assert not mine.any()


def test_the_models_are_those_of_the_paper_and_no_more():
    assert {name for name, _, _ in TWELVE} == set(MODELS)


@each_model
def test_multiply_adds_by_hand(model, width, depth):
    products = TWELVE[model, width, depth]
    assert build(model, width, depth).count_macs(196, 64) == products * 196 * 64**2
    # ten inner batches change nothing, and a loss that needs v̂ adds the last linear layer
    assert build(model, width, depth, batches=10).count_macs(196, 64) == products * 196 * 64**2
    last = {"fc": 1, "swiglu": 1, "mlp": width, "mlp_residual": 1, "mlp_identity": 1, "conv": 9, "dwconv": 9 / 64}
    assert build(model, width, depth, loss="mae").count_macs(196, 64) == (products + last.get(model, 0)) * 196 * 64**2
    # a further epoch repeats all but the queries' part: 4 products of the two-layer MLP
    queries = {"fc": 1, "silu_fc": 1, "glu": 2, "swiglu": 3, "conv": 9, "dwconv": 9 / 64}
    queries = queries.get(model, width * 2 if depth == 2 else 3)
    assert build(model, width, depth, epochs=3).count_macs(196, 64) == (3 * products - 2 * queries) * 196 * 64**2


DAMPED = [InnerLoop(model=model, damping=True) for model in ("glu", "dwconv")]


@pytest.mark.parametrize(
    "loop", [*(InnerLoop(loss=loss) for loss in LOSSES[1:]), *DAMPED], ids=lambda loop: f"{loop.model}-{loop.loss}"
)
def test_a_prediction_without_error_takes_no_step_and_has_finite_gradients(loop):
    """For the dot product that is a value of 0, as of black images; the norm of a damped step has no gradient at 0."""
    weights, q, k, v, _ = draw(loop)
    v = torch.zeros_like(v) if loop.loss == "dot" else read_out(loop, weights, k, GRID).detach()
    v.requires_grad_()
    learn(loop, weights, q, k, v, GRID).square().sum().backward()
    assert all(each.grad.isfinite().all() for each in (q, k, v, *weights))
    assert all(torch.equal(W[0], start) for W, start in zip(adapt(loop, weights, k, v, GRID), weights, strict=True))


@pytest.mark.parametrize(("model", "width", "depth"), [("swiglu", 1, 2), ("mlp_identity", 1, 2), ("dwconv", 1, 2)])
def test_it_runs_where_autograd_does_not_exists_and_exports(model, width, depth):
    loop = build(model, width, depth, loss="rmse", epochs=2, batches=3)
    weights, q, k, v, _ = draw(loop)
    weights, q, k, v = [weight.detach() for weight in weights], q.detach(), k.detach(), v.detach()
    with torch.no_grad():
        expected = learn(loop, weights, q, k, v, GRID)
    with torch.inference_mode():
        assert torch.equal(learn(loop, weights, q, k, v, GRID), expected)

    class Learner(torch.nn.Module):
        def forward(self, q, k, v):
            return learn(loop, weights, q, k, v, GRID)

    exported = torch.export.export(Learner(), (q, k, v)).module()
    assert relative(exported(q, k, v), expected) < 1e-12


@pytest.mark.parametrize(("model", "width", "depth"), first(TWELVE))
def test_compiled_as_one_graph_equals_eager(model, width, depth):
    loop = build(model, width, depth, loss="mse", batches=2)
    weights, q, k, v, _ = draw(loop)
    results = []
    torch._dynamo.reset()  # the compiler stops after eight models of one function
    for function in (learn, torch.compile(learn, fullgraph=True, backend="aot_eager")):
        out = function(loop, weights, q, k, v, GRID)
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v, *weights])])
    for ours, truth in zip(*results, strict=True):
        assert relative(ours, truth) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_learning_is_fp32_under_autocast_and_for_low_precision(dtype):
    loop = InnerLoop(model="glu", damping=True)
    weights, q, k, v, _ = draw(loop)
    low = [each.detach().to(dtype) for each in (q, k, v)]
    own = [weight.detach().float() for weight in weights]
    exact = learn(loop, [weight.double() for weight in own], *(each.double() for each in low), GRID)
    with torch.autocast("cpu", dtype=dtype):
        out = learn(loop, own, *low, GRID)
    assert out.dtype == dtype and (out == exact.to(dtype)).double().mean() > 0.98


@pytest.mark.parametrize("model", ["fc", "mlp", "swiglu", "conv", "dwconv"])
def test_momentum_adds_a_share_of_the_step_before(model):
    """With the loss `dot` the last weight's gradients do not depend on it: W₂ − W₁ = −lr (G₂ + α G₁), α of each head."""
    last = len(InnerLoop(model=model).shapes(D)) - 1
    options = {"model": model, "loss": "dot", "batches": 2, "only": (last,)}
    weights, q, k, v, _ = draw(InnerLoop(**options))
    alpha = torch.rand(IMAGES, HEADS, 1, dtype=k.dtype, generator=torch.Generator().manual_seed(0))
    zero, one, two = [W[-1] for W in follow(InnerLoop(**options), weights, k, v, GRID)]
    moving = follow(InnerLoop(**options, momentum=True), weights, k, v, GRID, None, alpha.expand(-1, -1, N))
    _, first, second = [W[-1] for W in moving]
    shares = alpha[..., 0].reshape(IMAGES, HEADS, *(1,) * (one.ndim - 2))
    torch.testing.assert_close(second - first, two - one + shares * (one - zero))


def test_what_a_learner_cannot_run_is_refused():
    for name, wrong in (
        ("rate per_weight", {"model": "conv", "rate": "per_weight"}),
        ("batches 2", {"chunk_size": 4, "batches": 2}),
        ("only", {"model": "glu", "only": (0, 0)}),
    ):
        with pytest.raises(ValueError, match=f"inner {name}"):
            InnerLoop(**wrong)
    weights, q, k, v, rates = draw(InnerLoop())
    with pytest.raises(ValueError, match="inner batches 13: there are 12 tokens"):
        learn(InnerLoop(batches=13), weights, q, k, v, GRID)
    with pytest.raises(ValueError, match="inner rate dynamic: token rates are missing"):
        learn(InnerLoop(rate="dynamic"), weights, q, k, v, GRID)
    with pytest.raises(ValueError, match="inner rate fixed: token rates are given"):
        learn(InnerLoop(), weights, q, k, v, GRID, rates)
    with pytest.raises(ValueError, match="inner momentum True: factors are missing"):
        learn(InnerLoop(momentum=True), weights, q, k, v, GRID)
    with pytest.raises(ValueError, match="inner loss mse: needs the prediction"):
        error_signal("mse", None, v, 1.0)
