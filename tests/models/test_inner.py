"""Inner learners: every closed form against autograd through the printed loss, and the identities that follow from the
equations.
"""

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
# the twelve inner models: name, width, depth
TWELVE = [
    ("fc", 1, 2),
    ("silu_fc", 1, 2),
    ("glu", 1, 2),
    ("swiglu", 1, 2),
    ("mlp", 1, 2),
    ("mlp", 2, 2),
    ("mlp", 4, 2),
    ("mlp", 1, 3),
    ("mlp_residual", 1, 2),
    ("mlp_identity", 1, 2),
    ("conv", 1, 2),
    ("dwconv", 1, 2),
]
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
each_model = pytest.mark.parametrize(
    ("model", "width", "depth"), TWELVE, ids=["-".join(map(str, case)) for case in TWELVE]
)


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
    """Weights (h, *shape), q, k, v (B, h, N, d) and token rates (B, h, N) in fp64, of which every one asks for its
    gradient.
    """
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


# a root of a weighted sum is no sum over tokens: a token rate weights the error signal of rmse, which is of no loss
LEARNERS = [(loss, options) for loss in LOSSES for options in SETTINGS if loss != "rmse" or "rate" not in options]


@each_model
@pytest.mark.parametrize(
    ("loss", "options"), LEARNERS, ids=["-".join(map(str, (loss, *options.values()))) for loss, options in LEARNERS]
)
def test_closed_forms_equal_autograd(model, width, depth, loss, options):
    """Output and outer gradients of q, k, v, the rates and every weight; those of a loss that does not depend on one
    are zero.
    """
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
def test_values_get_no_outer_gradient_through_mae(model, width, depth):
    """∂²L/∂v̂∂v is zero: whatever comes before v, such as W_V, keeps its start. Equality, for every rate, batch and
    epoch.
    """
    for options in ({}, {"lr": 10.0, "epochs": 3}, {"batches": 4, "damping": True}):
        loop = build(model, width, depth, loss="mae", **options)
        weights, q, k, v, _ = draw(loop)
        x = torch.randn(IMAGES, HEADS, N, 5, dtype=torch.float64)
        W_V = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
        learn(loop, weights, q, k, x @ W_V + v, GRID).square().sum().backward()
        assert torch.equal(W_V.grad, torch.zeros_like(W_V)) and torch.equal(v.grad, torch.zeros_like(v))
        # what does not pass through v learns; a sign is constant in W too
        assert k.grad.any() or model in ("fc", "conv", "dwconv")
        assert q.grad.any()


@each_model
def test_values_get_no_outer_gradient_through_smooth_l1_far_from_the_prediction(model, width, depth):
    loop = build(model, width, depth, loss="smooth_l1")
    weights, q, k, v, _ = draw(loop)
    v = (3 * v.detach()).requires_grad_()
    far = (read_out(loop, weights, k, GRID) - v).abs() > 1
    learn(loop, weights, q, k, v, GRID).square().sum().backward()
    assert 0.2 < far.double().mean() < 0.95
    assert not v.grad[far].any() and v.grad[~far].all()


@each_model
def test_ascent_is_descent_with_the_other_sign_of_the_values_bit_for_bit(model, width, depth):
    for options in ({}, {"damping": True, "epochs": 2, "batches": 3, "rate": "dynamic"}):
        weights, q, k, v, rates = draw(build(model, width, depth))
        used = rates if options else None
        up = learn(build(model, width, depth, direction="ascent", **options), weights, q, k, v, GRID, used)
        down = learn(build(model, width, depth, **options), weights, q, k, -v, GRID, used)
        assert torch.equal(up, down)
    other = [
        learn(build(model, width, depth, loss="mse", direction=way), weights, q, k, sign * v, GRID)
        for way, sign in (("ascent", 1), ("descent", -1))
    ]
    assert relative(*other) > 1e-3  # no law of losses in general


@pytest.mark.parametrize("model", ["fc", "conv", "dwconv"])
def test_epochs_batches_and_rate_are_one_factor_for_linear_models_and_the_dot_product(model):
    """Its gradient does not depend on W; the mean over a batch of N/m makes m batches a rate of m."""
    weights, q, k, v, _ = draw(InnerLoop(model=model))
    outs = [
        learn(InnerLoop(model=model, **options), weights, q, k, v, GRID)
        for options in (
            {"lr": 6.0},
            {"epochs": 6},
            {"lr": 2.0, "epochs": 3},
            {"batches": 6},
            {"batches": 3, "epochs": 2},
            {"scale": 6 * D**-0.5},
        )
    ]
    assert max(relative(out, outs[0]) for out in outs) < 1e-13
    weights, q, k, v, _ = draw(InnerLoop(model="mlp"))
    assert relative(*(learn(InnerLoop(**{name: 3}), weights, q, k, v, GRID) for name in ("epochs", "batches"))) > 1e-3


@each_model
def test_a_token_rate_is_a_scale_of_the_value(model, width, depth):
    weights, q, k, v, rates = draw(build(model, width, depth))
    weighted = learn(build(model, width, depth, rate="dynamic"), weights, q, k, v, GRID, rates)
    assert relative(weighted, learn(build(model, width, depth), weights, q, k, rates[..., None] * v, GRID)) < 1e-13


def test_the_rate_of_a_linear_model_and_mse_is_a_scale_of_key_and_value():
    """Eq. 7: √η k and √η v in place of k and v."""
    weights, q, k, v, rates = draw(InnerLoop(model="fc"))
    weighted = learn(InnerLoop(model="fc", loss="mse", rate="dynamic"), weights, q, k, v, GRID, rates)
    root = rates[..., None].sqrt()
    assert relative(weighted, learn(InnerLoop(model="fc", loss="mse"), weights, q, root * k, root * v, GRID)) < 1e-13


def test_epochs_of_a_linear_model_and_mse_are_richardsons_iteration():
    """W_E = M^E W_0 + Σ_{j<E} M^j c KᵀV with M = I − c KᵀK; it grows without bound once c·λ_max(KᵀK) > 2."""
    loop = InnerLoop(model="fc", loss="mse", epochs=7, lr=0.5)
    weights, _, k, v, _ = draw(loop)
    c = loop.lr * D**-0.5 / N
    M = torch.eye(D, dtype=torch.float64) - c * (k.mT @ k)
    power, total = torch.eye(D, dtype=torch.float64), torch.zeros_like(M)
    for _ in range(loop.epochs):
        total, power = total + power, M @ power
    (learned,) = adapt(loop, weights, k, v, GRID)
    assert relative(learned, power @ weights[0] + total @ (c * (k.mT @ v))) < 1e-13
    largest = torch.linalg.eigvalsh(k.mT @ k).max().item() * D**-0.5 / N
    solved = torch.linalg.lstsq(k, v).solution
    for lr, diverges in ((1.9 / largest, False), (2.1 / largest, True)):
        early, late = (
            adapt(InnerLoop(model="fc", loss="mse", lr=lr, epochs=e), weights, k, v, GRID)[0] - solved
            for e in (20, 200)
        )
        assert (late.abs().max() > 10 * early.abs().max()) == diverges


def test_a_last_layer_of_w_plus_identity_is_the_mlp_from_another_start():
    for loss in LOSSES:
        weights, q, k, v, _ = draw(InnerLoop())
        shifted = [weights[0], weights[1] + torch.eye(D, dtype=torch.float64)]
        ours = learn(InnerLoop(model="mlp_identity", loss=loss, epochs=2), weights, q, k, v, GRID)
        assert relative(ours, learn(InnerLoop(loss=loss, epochs=2), shifted, q, k, v, GRID)) < 1e-13


def test_a_residual_changes_no_step_of_the_dot_product():
    weights, q, k, v, _ = draw(InnerLoop())
    ours = learn(InnerLoop(model="mlp_residual", epochs=2), weights, q, k, v, GRID)
    assert relative(ours, learn(InnerLoop(epochs=2), weights, q, k, v, GRID) + q) < 1e-13


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention without normaliser, (s/N)·(q kᵀ) v, by its N x N scores."""
    return D**-0.5 / N * (q @ k.mT) @ v


def slope(z: Tensor) -> Tensor:
    z = z.detach().requires_grad_()
    return torch.autograd.grad(F.silu(z).sum(), z)[0]


def test_one_full_batch_is_linear_attention():
    """What each model reads out, written with attention and no learned weights W* at all."""
    found = {}
    for model in ("fc", "silu_fc", "glu", "swiglu", "mlp"):
        W, q, k, v, _ = draw(InnerLoop(model=model))
        found[model] = learn(InnerLoop(model=model), W, q, k, v, GRID), W, q, k, v
    ours, W, q, k, v = found["fc"]
    assert relative(ours, q @ W[0] + attend(q, k, v)) < 1e-13
    delta = learn(InnerLoop(model="fc", loss="mse"), W, q, k, v, GRID)
    assert relative(delta, q @ W[0] + attend(q, k, v - k @ W[0])) < 1e-13
    damped = learn(InnerLoop(model="fc", damping=True), W, q, k, v, GRID)
    # one for each output channel
    factor = 1 / (torch.linalg.vector_norm(D**-0.5 / N * k.mT @ v, dim=-2, keepdim=True) + 1)
    assert relative(damped, q @ W[0] + attend(q, k, v) * factor) < 1e-13
    ours, W, q, k, v = found["silu_fc"]
    assert relative(ours, F.silu(q @ W[0] + attend(q, k, v * slope(k @ W[0])))) < 1e-13
    ours, W, q, k, v = found["glu"]
    z1, z2 = k @ W[0], k @ W[1]
    linear, gate = attend(q, k, v * F.silu(z2)), attend(q, k, v * z1 * slope(z2))
    assert relative(ours, (q @ W[0] + linear) * F.silu(q @ W[1] + gate)) < 1e-13
    alone = learn(InnerLoop(model="glu", only=(0,)), W, q, k, v, GRID)
    assert relative(alone, (q @ W[0] + linear) * F.silu(q @ W[1])) < 1e-13
    ours, W, q, k, v = found["mlp"]
    z = k @ W[0]
    hidden = F.silu(q @ W[0] + attend(q, k, (v @ W[1].mT) * slope(z)))
    assert relative(ours, hidden @ W[1] + attend(hidden, F.silu(z), v)) < 1e-13
    ours, W, q, k, v = found["swiglu"]
    z1, z2, back = k @ W[0], k @ W[1], v @ W[2].mT
    hidden = F.silu(q @ W[0] + attend(q, k, back * z2 * slope(z1))) * (q @ W[1] + attend(q, k, back * F.silu(z1)))
    assert relative(ours, hidden @ W[2] + attend(hidden, F.silu(z1) * z2, v)) < 1e-13


def patches(x: Tensor) -> Tensor:
    """Every token's 3x3 window with zeros outside the grid: (B, h, N, d) -> (B, h, N, d, 9)."""
    image = x.mT.reshape(IMAGES * HEADS, D, *GRID)
    return F.unfold(image, 3, padding=1).reshape(IMAGES, HEADS, D, 9, N).movedim(-1, 2)


def test_convolutions_are_linear_attention_between_windows():
    W, q, k, v, _ = draw(InnerLoop(model="conv"))
    start = torch.einsum("bhncj,hocj->bhno", patches(q), W[0].flatten(-2))
    ours = learn(InnerLoop(model="conv"), W, q, k, v, GRID)
    assert relative(ours, start + attend(patches(q).flatten(-2), patches(k).flatten(-2), v)) < 1e-13
    W, q, k, v, _ = draw(InnerLoop(model="dwconv"))
    scores = torch.einsum("bhncj,bhmcj->bhcnm", patches(q), patches(k))  # nine products for each channel
    attended = D**-0.5 / N * torch.einsum("bhcnm,bhmc->bhnc", scores, v)
    start = torch.einsum("bhncj,hcj->bhnc", patches(q), W[0].flatten(-3))
    assert relative(learn(InnerLoop(model="dwconv"), W, q, k, v, GRID), start + attended) < 1e-13


# multiply-adds in units of N·d², as a person counts the products: forward on keys, backward, forward on queries
PRODUCTS = {
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


@each_model
def test_multiply_adds_by_hand(model, width, depth):
    products = PRODUCTS[model, width, depth]
    assert build(model, width, depth).count_macs(196, 64) == products * 196 * 64**2
    # ten inner batches change nothing, and a loss that needs v̂ adds the last linear layer
    assert build(model, width, depth, batches=10).count_macs(196, 64) == products * 196 * 64**2
    last = {"fc": 1, "swiglu": 1, "mlp": width, "mlp_residual": 1, "mlp_identity": 1, "conv": 9, "dwconv": 9 / 64}.get(
        model, 0
    )
    assert build(model, width, depth, loss="mae").count_macs(196, 64) == (products + last) * 196 * 64**2
    # a further epoch repeats all but the queries' part: 4 products of the two-layer MLP
    queries = {"fc": 1, "silu_fc": 1, "glu": 2, "swiglu": 3, "conv": 9, "dwconv": 9 / 64}.get(
        model, width * 2 if depth == 2 else 3
    )
    assert build(model, width, depth, epochs=3).count_macs(196, 64) == (3 * products - 2 * queries) * 196 * 64**2


def test_a_prediction_without_error_takes_no_step_and_has_finite_gradients():
    for loss in LOSSES[1:]:
        loop = InnerLoop(loss=loss)
        weights, q, k, _, _ = draw(loop)
        v = read_out(loop, weights, k, GRID).detach().requires_grad_()
        learn(loop, weights, q, k, v, GRID).square().sum().backward()
        assert all(each.grad.isfinite().all() for each in (q, k, v, *weights))
        assert all(torch.equal(W[0], start) for W, start in zip(adapt(loop, weights, k, v, GRID), weights, strict=True))


@each_model
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
    exact = learn(
        loop, [weight.detach().float().double() for weight in weights], *(each.double() for each in low), GRID
    )
    with torch.autocast("cpu", dtype=dtype):
        out = learn(loop, [weight.detach().float() for weight in weights], *low, GRID)
    assert out.dtype == dtype and (out == exact.to(dtype)).double().mean() > 0.98


def test_inner_batches_cover_the_tokens_once_in_order():
    for tokens, batches in itertools.product((7, 12, 196), (1, 2, 3, 4, 7)):
        parts = InnerLoop(batches=batches).split(tokens)
        assert [token for first, end in parts for token in range(first, end)] == list(range(tokens))
        assert {end - first for first, end in parts} <= {tokens // batches, -(-tokens // batches)} and len(
            parts
        ) == batches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "mpl"}, "inner model 'mpl': not known; did you mean 'mlp'?"),
        ({"loss": "l1"}, "inner loss 'l1': not known"),
        ({"direction": "up"}, "inner direction 'up': not known"),
        ({"rate": "token"}, "inner rate 'token': not known"),
        ({"epochs": 0}, "inner epochs 0: expected 1 or more"),
        ({"width": 0}, "inner width 0"),
        ({"order": "after", "epochs": 2}, "inner order after"),
        ({"model": "glu", "width": 2}, "inner width 2: the inner model glu has width 1"),
        ({"model": "fc", "depth": 3}, "inner depth 3: the inner model fc has no choice of depth"),
        ({"depth": 1}, "inner depth 1: an mlp has 2 layers or more; one layer is the inner model fc"),
        ({"model": "mlp_identity", "width": 2}, "inner width 2"),
        ({"model": "glu", "only": (2,)}, r"inner only \(2,\): expected places"),
        ({"only": ()}, r"inner only \(\): expected places"),
    ],
)
def test_what_a_learner_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        InnerLoop(**options)


def test_what_a_learner_cannot_run_is_refused():
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
