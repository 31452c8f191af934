"""Both sides of the paper's equations in fp64, as pairs of tensors; see `formulas`.

Row vectors, as in the paper: q, k, v (T, d) are rows, and a weight is (inputs, outputs).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ttt_linear.plain import ttt_linear_plain

from ...models.fast_weights import LACT_STEPS
from ...models.inner import NORM_EPS, InnerLoop, learn
from ...models.muon import newton_schulz
from ...models.vit3 import InnerTraining

SEED, TOKENS, WIDTH = 0, 12, 8
CHUNK = 3  # tokens of a chunk
GRID = (1, TOKENS)
_RATE = 1 / (3 * TOKENS)  # s/N of ViT³'s heads


def draw_operands() -> tuple:
    """Draw q, k, v (T, d), then three weights (d, d) with variance 1/d."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randn(3, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    return *tokens, *weights


def draw_lact(step: str, **changes: Any) -> tuple:
    """Draw the operands of a step of LaCT's ablation chain for one image and one head, with chunks of `CHUNK` tokens.

    Returns:
        (loop, initial weights, (q, k, v), rates or None, momentum or None); q, k, v are (1, 1, T, d).
    """
    loop = InnerLoop(**{**LACT_STEPS[step], "chunk_size": CHUNK, **changes})
    q, k, v, first, last, second = draw_operands()
    generator = torch.Generator().manual_seed(1)
    rates = momentum = None
    if loop.rate == "per_weight":
        drawn = torch.rand(1, 1, TOKENS, 3, generator=generator, dtype=torch.float64)
        rates = drawn[..., [0, 2, 1] if len(loop.learned) == 3 else [1]]
    if loop.momentum:
        momentum = torch.rand(1, 1, TOKENS, generator=generator, dtype=torch.float64)
    weights = [first] if loop.model == "fc" else [first, second, last]
    start = [weight.mT[None].clone() for weight in weights]
    return loop, start, tuple(x[None, None].clone() for x in (q, k, v)), rates, momentum


def _negated_loss() -> tuple:
    outs = []
    for step, sign in (("ascent", 1), ("own", -1)):
        loop, weights, (q, k, v), rates, momentum = draw_lact(step)
        outs.append(learn(loop, weights, q, k, sign * v, GRID, rates, momentum))
    return tuple(outs)


def _zero_start() -> tuple:
    loop, weights, tokens, _, _ = draw_lact("v6", chunk_size=1, order="after")
    q, k, v, *_ = draw_operands()
    return learn(loop, [0 * weights[0]], *tokens, GRID)[0, 0], (q @ k.mT).tril() @ v


def _delta_rule() -> tuple:
    q, k, v, W, *_ = draw_operands()
    k = k / k.norm(dim=-1, keepdim=True)
    ones = torch.ones(1, TOKENS, 1, dtype=q.dtype), torch.ones(1, dtype=q.dtype)
    found = ttt_linear_plain(*(x[None, :, None] for x in (q, k, v)), *ones, W[None], chunk_size=1)[0, :, 0]
    stated = []
    for each_q, each_k, each_v in zip(q, k, v, strict=True):
        W = W - torch.outer(each_k, each_k @ W - each_v)
        stated.append(each_q @ W)
    return found, torch.stack(stated)


def _gated_unit(rate: float, damping: bool = False) -> tuple:
    """Compute the gated unit after one step by our learner, and by the text with φ_{t+1} from autograd."""
    q, k, v, gate, linear, _ = draw_operands()
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
    q, k, v, *_ = draw_operands()
    grid = (3, 4)
    kernel = torch.randn(WIDTH, 1, 3, 3, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    loop = InnerLoop(model="dwconv", scale=1 / 3)
    found = learn(loop, [kernel[None]], *(x[None, None] for x in (q, k, v)), grid)[0, 0]

    def windows(x: Tensor) -> Tensor:
        """Unfold the 3×3 neighbourhoods, (T, d) -> (d, T, 9)."""
        return F.unfold(x.mT.reshape(1, WIDTH, *grid), 3, padding=1).view(WIDTH, 9, TOKENS).mT

    scores = windows(q) @ windows(k).mT  # (d, T, T)
    stated = windows(q) @ kernel.view(WIDTH, 9, 1) + scores @ v.mT.unsqueeze(-1) / (3 * TOKENS)
    return found, stated[..., 0].mT


def _norm_of_static() -> tuple:
    *_, W = draw_operands()
    norms = W.norm(dim=-1, keepdim=True)
    return W / (norms + NORM_EPS) * norms, W


def _rate_in_value() -> tuple:
    loop, weights, (q, k, v), rates, momentum = draw_lact("v3")
    without, *_ = draw_lact("v4")
    outs = learn(loop, weights, q, k, v, GRID, rates, momentum)
    return learn(without, weights, q, k, v * rates, GRID, None, momentum), outs


def _v6_of_lact() -> tuple:
    loop, weights, tokens, _, _ = draw_lact("v6")
    q, k, v, W, *_ = draw_operands()
    return learn(loop, weights, *tokens, GRID)[0, 0], q @ (W.mT + k.mT @ v)


def _v6_of_vit3(step: str, factor: float, values: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple:
    """Compute the heads of a step of ViT³, and q(W + factor · Σ kᵀ values(k, v, W))."""
    q, k, v, W, *_ = draw_operands()
    training = InnerTraining(WIDTH, 1, step).double()
    with torch.no_grad():
        training.w1.copy_(W.view_as(training.w1))
        found = training._learn_heads(torch.cat((q, k, v), -1)[None])[0]
    return found, q @ (W + factor * k.mT @ values(k, v, W))


def unroll_mlp(tokens: int, momentum: bool) -> tuple:
    """Compute the outputs (T, d) of x -> SiLU(x Θ) W, which learns by autograd on each token, and the theorem's."""
    q, k, v, first, last, _ = draw_operands()
    rate = 0.1
    decay = torch.zeros(tokens)
    if momentum:
        decay = torch.rand(tokens, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
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
        gathered = sum(
            torch.outer(feature, value) * sum(torch.prod(decay[i + 1 : j + 1]) for j in range(i, t + 1))
            for i, (feature, value) in enumerate(zip(features, values, strict=True))
        )
        found.append(F.silu(q[t] @ weights[0]) @ weights[1])
        stated.append(F.silu(q[t] @ weights[0]) @ (start + gathered))
    return torch.stack(found), torch.stack(stated)


def _recur_lact(muon: bool, rates: bool = True) -> tuple:
    """Run LaCT's recurrence by the paper's definitions with one learned matrix.

    Returns:
        The outputs (T, d), and (q, k, v, initial weight, η, β, M) for the derived equations; β[i, j] is the product of
        α_{i+1} ... α_j.
    """
    q, k, v, start, _, _ = draw_operands()
    generator = torch.Generator().manual_seed(1)
    eta, alpha = torch.rand(2, TOKENS, generator=generator, dtype=q.dtype)
    eta = eta if rates else torch.ones_like(eta)
    shape = (lambda step: newton_schulz(step, "lact")) if muon else (lambda step: step)
    W, moving, outs = start, 0, []
    for t in range(TOKENS):
        moving = torch.outer(k[t], v[t]) + alpha[t] * moving
        W = W + eta[t] * shape(moving)
        outs.append(q[t] @ W)
    beta = torch.zeros(TOKENS, TOKENS, dtype=q.dtype)
    for i in range(TOKENS):
        for j in range(i, TOKENS):
            beta[i, j] = torch.prod(alpha[i + 1 : j + 1])
    return torch.stack(outs), (q, k, v, start, eta, beta, shape)


def _eq1(repaired: bool) -> tuple:
    found, (q, k, v, start, eta, beta, shape) = _recur_lact(muon=True)
    stated = []
    for t in range(TOKENS):
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


IDENTITIES: dict[str, Callable[[], tuple]] = {
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
OF_LACT: dict[str, Callable[[], tuple]] = {
    "eq1": partial(_eq1, repaired=False),
    "eq1_repaired": partial(_eq1, repaired=True),
    "eq1_without_muon": partial(_coefficient, "printed"),
    "coefficient": partial(_coefficient, "printed"),
    "coefficient_repaired": partial(_coefficient, "repaired"),
    "mask": partial(_coefficient, "mask"),
}
