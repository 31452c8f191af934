"""Functions that the ledger calls: errors of the paper's equations in fp64, and properties of its inner learners.

Every error is relative to the largest value of the side that the paper states. An unknown name raises a `ValueError`.
Both sides of an equation are computed as tensors, with row vectors, as in the paper: q, k, v (T, d) are rows, and a
weight is (inputs, outputs).
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ttt_linear.plain import ttt_linear_plain

from ...models import fast_weights
from ...models.inner import MODELS, NORM_EPS, InnerLoop, learn
from ...models.ladder_vit3 import ViT3Ladder
from ...models.muon import newton_schulz
from ...models.vit3 import InnerTraining
from ..identities import apply_delta_rule, choose, find_error

_SEED, _TOKENS, _WIDTH = 0, 12, 8
_CHUNK = 3  # tokens of a chunk
_GRID = (1, _TOKENS)  # rows and columns of the tokens; only convolutions read them
_RATE = 1 / (3 * _TOKENS)  # s/N of ViT³'s heads


@cache
def identity_error(name: str) -> float:
    """Return the error of an equation.

    `negated_loss`: gradient ascent on LaCT's loss gives the same outputs as gradient descent with −v for v.
    `zero_start`: one linear layer that starts at zero is causal linear attention.
    `delta_rule`: one linear layer with the squared error is W ← W − kᵀ(kW − v).
    `gated_unit`, `convolution`: the two inner learners of ViT³ as in Section 5.4 and Appendix G, at its rate s/N and
    without its damping.
    `gated_unit_without_rate`: the gated unit as printed, without that rate.
    `damped_unit`: the gated unit with its damping, which divides each output channel by 1 + the norm of its step.
    `norm_of_static`: LaCT's norm of the weights returns weights that do not learn unchanged.
    `rate_in_value`: the learning rate of a token can be absorbed into its value.
    `v6_of_lact`: step V6 of LaCT is o = q(W + Σ kᵀv).
    `v6_as_run`, `v6_derived`: the same for ViT³, as the authors ran it, and with the gradient of its loss and the
    factor s/N.
    `v6_as_run_repaired`: as the authors ran it, it is o = q(W + (s/N) Σ kᵀ(v ⊙ kW)).
    """
    return find_error(*choose(_IDENTITIES, name, "equation of the paper")())


@cache
def theorem_error(name: str) -> float:
    """Return the error of Theorem `5.1`, `5.2` or `5.3` for an MLP whose layers all learn, token by token, by autograd.

    Theorem 5.1 takes one step, 5.2 a sequence, and 5.3 a sequence with momentum.
    """
    tokens, momentum = choose({"5.1": (1, False), "5.2": (_TOKENS, False), "5.3": (_TOKENS, True)}, name, "theorem")
    return find_error(*_unroll_mlp(tokens, momentum))


@cache
def lact_error(name: str) -> float:
    """Return the error of an equation derived from LaCT's recurrence W ← W − η_t M(ΔW_t), ΔW_t = ∇L + α_t ΔW_{t−1}.

    `eq1`: Eq. 1.
    `eq1_repaired`: with Σ_j η_j M(Σ_{i≤j} β_i^j φ_iᵀ v_i) in place of its sum.
    `eq1_without_muon`, `coefficient`: without M, where token i has the weight η_i Σ_j β_i^j.
    `coefficient_repaired`: with the weight Σ_j η_j β_i^j in its place.
    `mask`: without M and rates, the momentum matrix is the mask of the attention, as Appendix H.1 says.
    """
    return find_error(*choose(_OF_LACT, name, "equation of LaCT")())


@cache
def mirrored_training_error() -> float:
    """Return the largest difference between a training whose inner loop descends, and a mirrored one that ascends.

    Both train a ViT³ for four steps of AdamW with weight decay and clipping, on the same images. The second model has
    the first one's initial weights, except that the value rows of its heads are negated. The difference is taken over
    all losses, and over the final weights after negating those rows again. The inner convolution descends in both, as
    in the authors' code.
    """

    width = 16

    def mirror(weights: Mapping[str, Tensor]) -> None:
        """Negate the rows that project to the heads' values."""
        for name, weight in weights.items():
            if ".attn.qkv." in name:
                weight[2 * width : 3 * width] *= -1

    def train(step: str) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(_SEED)
        model = ViT3Ladder(img_size=32, patch_size=8, embed_dim=width, depth=2, num_heads=2, num_classes=5, step=step)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}  # they share memory
        if step == "ascent":
            mirror(weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
        losses = []
        for _ in range(4):
            images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4,))
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        if step == "ascent":
            mirror(weights)
        return losses, weights

    with torch.random.fork_rng(devices=[]):
        down, up = train("own"), train("ascent")
    of_weights = max((down[1][name] - weight).abs().max().item() for name, weight in up[1].items())
    return max(of_weights, *(abs(a - b) for a, b in zip(down[0], up[0], strict=True)))


@cache
def reads_static_kernel(step: str) -> bool:
    """Tell whether LaCT after a step of the ablation chain is o = φ(q) S, with φ independent of keys and values.

    There are twice as many queries as features, so a matrix S that fits all outputs exists only if this holds.
    """
    drawn = _draw_lact(step)
    q = torch.randn(1, 1, 2 * _WIDTH, _WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = learn(**drawn | {"q": q})
    features = MODELS[drawn["loop"].model].prepare(drawn["weights"], q, _GRID)[-1]
    state = torch.linalg.lstsq(features[0, 0], out[0, 0]).solution
    return find_error(features @ state, out) < 1e-10


@cache
def parallel_error(step: str) -> float:
    """Return the largest error of a step's parallel form against the recurrent one, over outputs and gradients."""
    found = {}
    for form in ("parallel", "recurrent"):
        drawn = _draw_lact(step, order="before")
        tensors = (*drawn["weights"], *(drawn[name] for name in ("q", "k", "v", "rates", "momentum")))
        given = [tensor.requires_grad_() for tensor in tensors if tensor is not None]
        out = fast_weights.learn(**drawn, form=form)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        gradients = torch.autograd.grad((out * cotangent).sum(), given, allow_unused=True)
        found[form] = [out.detach(), *(each for each in gradients if each is not None)]
    return max(find_error(ours, stated) for ours, stated in zip(found["parallel"], found["recurrent"], strict=True))


@cache
def order_error(step: str, norm: str | None = None) -> float:
    """Return how much the outputs change, relative to the largest one, when two chunks of keys and values are swapped.

    A state that is a sum over chunks does not change, if all queries read the last one: the loop's order is `end`.
    Momentum is switched off, because its weights depend on the position of a chunk. `norm` is that of `InnerLoop`; None
    keeps the step's own.
    """
    changes = {"momentum": False} | ({} if norm is None else {"norm": norm})
    drawn = _draw_lact(step, **changes)
    swapped = [*range(_CHUNK, 2 * _CHUNK), *range(_CHUNK), *range(2 * _CHUNK, _TOKENS)]
    moved = {name: drawn[name][:, :, swapped] for name in ("k", "v", "rates") if drawn[name] is not None}
    return find_error(learn(**drawn | moved), learn(**drawn))


@cache
def momentum_error(chunks: int, form: str) -> float:
    """Return the error of the momenta M_j = G_j + α_j M_{j−1} over chunks in fp32, against the recurrence in fp64.

    α_j is the mean over a chunk of 256 tokens, around ½. The form `ours` computes the weights from differences of
    cumulative logarithms. The form `divided` is that of the authors' code, cumprod(α) · cumsum(G / (cumprod(α) +
    1e-8)), which fails once cumprod(α) is no larger than 1e-8.
    """
    generator = torch.Generator().manual_seed(_SEED)
    alpha = torch.randn(chunks, 256, generator=generator, dtype=torch.float64).sigmoid().mean(1)
    steps = torch.randn(chunks, _WIDTH * _WIDTH, generator=generator, dtype=torch.float64)
    moving, stated = torch.zeros(_WIDTH * _WIDTH, dtype=torch.float64), []
    for step, factor in zip(steps, alpha, strict=True):
        moving = step + factor * moving
        stated.append(moving)
    alpha, steps = alpha.float(), steps.float()
    if choose({"ours": False, "divided": True}, form, "form of the momenta"):
        products = alpha.cumprod(0)[:, None]
        found = products * (steps / (products + 1e-8)).cumsum(0)
    else:
        found = fast_weights.decay_matrix(alpha) @ steps
    return find_error(found.double(), torch.stack(stated))


def _draw_operands() -> tuple[Tensor, ...]:
    """Draw q, k, v (T, d), then three weights (d, d) with variance 1/d."""
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randn(3, _TOKENS, _WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, _WIDTH, _WIDTH, generator=generator, dtype=torch.float64) / _WIDTH**0.5
    return *tokens, *weights


def _draw_lact(step: str, **changes: Any) -> dict[str, Any]:
    """Draw the arguments of `learn` for a step of LaCT's ablation chain, with one image and one head.

    A chunk has `_CHUNK` tokens. `changes` are of `InnerLoop`. q, k and v are (1, 1, T, d); `rates` and `momentum` are
    None where the step has none. The matrices of `_draw_operands` are LaCT's parameters here, (outputs, inputs), and
    `learn` gets their transposes, (inputs, outputs).
    """
    loop = InnerLoop(**{**fast_weights.LACT_STEPS[step], "chunk_size": _CHUNK, **changes})
    q, k, v, first, last, second = _draw_operands()
    generator = torch.Generator().manual_seed(1)
    rates = momentum = None
    if loop.rate == "per_weight":
        # columns for `first`, `last`, `second`, so that `last` has the same rates where it learns alone
        drawn = torch.rand(1, 1, _TOKENS, 3, generator=generator, dtype=torch.float64)
        rates = drawn[..., [0, 2, 1] if len(loop.learned) == 3 else [1]]
    if loop.momentum:
        momentum = torch.rand(1, 1, _TOKENS, generator=generator, dtype=torch.float64)
    weights = [first] if loop.model == "fc" else [first, second, last]
    start = [weight.mT[None].clone() for weight in weights]
    tokens = {name: x[None, None].clone() for name, x in (("q", q), ("k", k), ("v", v))}
    return {"loop": loop, "weights": start, **tokens, "grid": _GRID, "rates": rates, "momentum": momentum}


def _negated_loss() -> tuple:
    """Run LaCT with ascent on its loss, and with descent and −v."""
    ascending, descending = _draw_lact("ascent"), _draw_lact("own")
    return learn(**ascending), learn(**descending | {"v": -descending["v"]})


def _zero_start() -> tuple:
    """Run one linear layer from zero with a step after each token, and causal linear attention."""
    drawn = _draw_lact("v6", chunk_size=1, order="after")
    q, k, v, *_ = _draw_operands()
    return learn(**drawn | {"weights": [0 * drawn["weights"][0]]})[0, 0], (q @ k.mT).tril() @ v


def _delta_rule() -> tuple:
    """Run our loop with chunks of one token and rates of 1, and the delta rule, with keys of length 1."""
    q, k, v, W, *_ = _draw_operands()
    k = k / k.norm(dim=-1, keepdim=True)
    ones = torch.ones(1, _TOKENS, 1, dtype=q.dtype), torch.ones(1, dtype=q.dtype)
    found = ttt_linear_plain(*(x[None, :, None] for x in (q, k, v)), *ones, W[None], chunk_size=1)[0, :, 0]
    return found, apply_delta_rule(q, k, v, W)


def _gated_unit(rate: float, damping: bool = False) -> tuple:
    """Compute the gated unit after one step by our learner, and by the text with φ_{t+1} from autograd."""
    q, k, v, gate, linear, _ = _draw_operands()
    loop = InnerLoop(model="glu", scale=1 / 3, damping=damping)
    found = learn(loop, [linear[None], gate[None]], *(x[None, None] for x in (q, k, v)), (3, 4))[0, 0]
    moving = gate.clone().requires_grad_()
    loss = -_RATE * (F.silu(k @ moving) * (k @ linear) * v).sum()
    (step,) = torch.autograd.grad(loss, moving)
    values = rate * v * F.silu(k @ gate)
    if damping:
        step = step / (step.norm(dim=0) + 1)
        values = values / ((k.mT @ values).norm(dim=0) + 1)  # a factor for each output channel
    return found, F.silu(q @ (gate - step)) * (q @ linear + (q @ k.mT) @ values)


def _convolution() -> tuple:
    """Compute ViT³'s depth-wise 3×3 learner, and attention between the windows around the tokens."""
    q, k, v, *_ = _draw_operands()
    grid = (3, 4)
    kernel = torch.randn(_WIDTH, 1, 3, 3, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    loop = InnerLoop(model="dwconv", scale=1 / 3)
    found = learn(loop, [kernel[None]], *(x[None, None] for x in (q, k, v)), grid)[0, 0]

    def windows(x: Tensor) -> Tensor:
        """Unfold the 3×3 neighbourhoods, (T, d) -> (d, T, 9)."""
        return F.unfold(x.mT.reshape(1, _WIDTH, *grid), 3, padding=1).view(_WIDTH, 9, _TOKENS).mT

    scores = windows(q) @ windows(k).mT  # (d, T, T)
    stated = windows(q) @ kernel.view(_WIDTH, 9, 1) + scores @ v.mT.unsqueeze(-1) / (3 * _TOKENS)
    return found, stated[..., 0].mT


def _norm_of_static() -> tuple:
    """Apply LaCT's norm, which gives each row its initial length again, to weights that did not learn."""
    *_, W = _draw_operands()
    norms = W.norm(dim=-1, keepdim=True)
    return W / (norms + NORM_EPS) * norms, W


def _rate_in_value() -> tuple:
    """Run LaCT without rates on values times the rates, and with rates."""
    drawn = _draw_lact("v3")
    absorbed = {"loop": _draw_lact("v4")["loop"], "v": drawn["v"] * drawn["rates"], "rates": None}
    return learn(**drawn | absorbed), learn(**drawn)


def _v6_of_lact() -> tuple:
    """Run step V6 of LaCT, and compute q(W + Σ kᵀv)."""
    q, k, v, W, *_ = _draw_operands()
    return learn(**_draw_lact("v6"))[0, 0], q @ (W.mT + k.mT @ v)


def _v6_of_vit3(step: str, factor: float, values: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple:
    """Compute the heads of a step of ViT³, and q(W + factor · Σ kᵀ values(k, v, W))."""
    q, k, v, W, *_ = _draw_operands()
    training = InnerTraining(_WIDTH, 1, step).double()
    with torch.no_grad():
        training.w1.copy_(W.view_as(training.w1))
        found = training._learn_heads(torch.cat((q, k, v), -1)[None])[0]
    return found, q @ (W + factor * k.mT @ values(k, v, W))


def _unroll_mlp(tokens: int, momentum: bool) -> tuple:
    """Compute the outputs (T, d) of x -> SiLU(x Θ) W, which learns by autograd on each token, and the theorem's."""
    q, k, v, first, last, _ = _draw_operands()
    rate = 0.1
    decay = torch.zeros(tokens, dtype=q.dtype)
    if momentum:
        decay = torch.rand(tokens, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    beta = _multiply_decays(decay)
    weights, moving, start = [first, last], [0, 0], last
    found, stated, features, values = [], [], [], []
    for t in range(tokens):
        each = [weight.clone().requires_grad_() for weight in weights]
        feature = F.silu(k[t] @ each[0])
        predicted = feature @ each[1]
        loss = (predicted - v[t]).square().sum() / 2
        *steps, error = torch.autograd.grad(loss, [*each, predicted])
        moving = [step + decay[t] * before for step, before in zip(steps, moving, strict=True)]
        weights = [weight - rate * step for weight, step in zip(weights, moving, strict=True)]
        features.append(feature.detach())
        values.append(-rate * error)
        gathered = sum(torch.outer(features[i], values[i]) * beta[i, : t + 1].sum() for i in range(t + 1))
        found.append(F.silu(q[t] @ weights[0]) @ weights[1])
        stated.append(F.silu(q[t] @ weights[0]) @ (start + gathered))
    return torch.stack(found), torch.stack(stated)


def _multiply_decays(alpha: Tensor) -> Tensor:
    """Return the products α_{i+1} ... α_j as [i, j], with 0 for j < i, (T) -> (T, T)."""
    beta = torch.eye(len(alpha), dtype=alpha.dtype)
    for i in range(len(alpha)):
        beta[i, i + 1 :] = alpha[i + 1 :].cumprod(0)
    return beta


def _recur_lact(muon: bool, rates: bool = True) -> tuple:
    """Run LaCT's recurrence by the paper's definitions with one learned matrix.

    Returns:
        The outputs (T, d), and (q, k, v, initial weight, η, β, M) for the derived equations; β is that of
        `_multiply_decays`.
    """
    q, k, v, start, _, _ = _draw_operands()
    generator = torch.Generator().manual_seed(1)
    eta, alpha = torch.rand(2, _TOKENS, generator=generator, dtype=q.dtype)
    eta = eta if rates else torch.ones_like(eta)
    shape = (lambda step: newton_schulz(step, "lact")) if muon else (lambda step: step)
    W, moving, outs = start, 0, []
    for t in range(_TOKENS):
        moving = torch.outer(k[t], v[t]) + alpha[t] * moving
        W = W + eta[t] * shape(moving)
        outs.append(q[t] @ W)
    return torch.stack(outs), (q, k, v, start, eta, _multiply_decays(alpha), shape)


def _eq1(repaired: bool) -> tuple:
    """Compute Eq. 1, as printed or `repaired` (see `lact_error`), and LaCT's recurrence with Muon."""
    found, (q, k, v, start, eta, beta, shape) = _recur_lact(muon=True)
    stated = []
    for t in range(_TOKENS):
        if repaired:
            steps = [eta[j] * shape((k[: j + 1] * beta[: j + 1, j, None]).mT @ v[: j + 1]) for j in range(t + 1)]
        else:
            steps = [shape(torch.outer(k[i], v[i] * eta[i] * beta[i, i : t + 1].sum())) for i in range(t + 1)]
        stated.append(q[t] @ (start + sum(steps)))
    return torch.stack(stated), found


def _coefficient(kind: str) -> tuple:
    """Compute masked attention and the recurrence without Muon.

    The weight of token i at t is `printed` η_i Σ_j β_i^j, `repaired` Σ_j η_j β_i^j, or `mask` β_i^t.
    """
    found, (q, k, v, start, eta, beta, _) = _recur_lact(muon=False, rates=kind != "mask")
    weights = {"printed": beta.cumsum(1) * eta[:, None], "repaired": (beta * eta).cumsum(1), "mask": beta}[kind]
    return q @ start + ((q @ k.mT) * weights.mT.tril()) @ v, found


# name in `identity_error` -> function that computes both sides, (ours, the side that the paper states)
_IDENTITIES: dict[str, Callable[[], tuple]] = {
    "negated_loss": _negated_loss,
    "zero_start": _zero_start,
    "delta_rule": _delta_rule,
    "gated_unit": partial(_gated_unit, _RATE),
    "gated_unit_without_rate": partial(_gated_unit, 1),
    "convolution": _convolution,
    "damped_unit": partial(_gated_unit, _RATE, damping=True),
    "norm_of_static": _norm_of_static,
    "rate_in_value": _rate_in_value,
    "v6_of_lact": _v6_of_lact,
    "v6_as_run": partial(_v6_of_vit3, "v6_as_run", 1, lambda k, v, W: v),
    "v6_derived": partial(_v6_of_vit3, "v6", _RATE, lambda k, v, W: v),
    "v6_as_run_repaired": partial(_v6_of_vit3, "v6_as_run", _RATE, lambda k, v, W: v * (k @ W)),
}
# the same for `lact_error`: (the derived equation, the recurrence, to whose largest value the error is relative)
_OF_LACT: dict[str, Callable[[], tuple]] = {
    "eq1": partial(_eq1, repaired=False),
    "eq1_repaired": partial(_eq1, repaired=True),
    "eq1_without_muon": partial(_coefficient, "printed"),
    "coefficient": partial(_coefficient, "printed"),
    "coefficient_repaired": partial(_coefficient, "repaired"),
    "mask": partial(_coefficient, "mask"),
}
