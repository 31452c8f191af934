"""Functions that the ledger calls: errors of the paper's equations in fp64, and properties of its inner learners.

Every error is relative to the largest value of the side that the paper states. An unknown name raises a `ValueError`.
"""

import functools
from typing import Any

import torch

from ...models import fast_weights
from ...models.inner import MODELS, learn
from ...models.ladder_vit3 import ViT3Ladder
from ..identities import choose, find_error
from .sides import CHUNK, GRID, IDENTITIES, OF_LACT, SEED, TOKENS, WIDTH, draw_lact, unroll_mlp


@functools.cache
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
    return find_error(*choose(IDENTITIES, name, "equation of the paper")())


@functools.cache
def theorem_error(name: str) -> float:
    """Return the error of Theorem `5.1`, `5.2` or `5.3` for an MLP whose layers all learn, token by token, by autograd.

    Theorem 5.1 takes one step, 5.2 a sequence, and 5.3 a sequence with momentum.
    """
    tokens, momentum = choose({"5.1": (1, False), "5.2": (TOKENS, False), "5.3": (TOKENS, True)}, name, "theorem")
    return find_error(*unroll_mlp(tokens, momentum))


@functools.cache
def lact_error(name: str) -> float:
    """Return the error of an equation derived from LaCT's recurrence W ← W − η_t M(ΔW_t), ΔW_t = ∇L + α_t ΔW_{t−1}.

    `eq1`: Eq. 1.
    `eq1_repaired`: with Σ_j η_j M(Σ_{i≤j} β_i^j φ_iᵀ v_i) in place of its sum.
    `eq1_without_muon`, `coefficient`: without M, where token i has the weight η_i Σ_j β_i^j.
    `coefficient_repaired`: with the weight Σ_j η_j β_i^j in its place.
    `mask`: without M and rates, the momentum matrix is the mask of the attention, as Appendix H.1 says.
    """
    return find_error(*choose(OF_LACT, name, "equation of LaCT")())


@functools.cache
def mirrored_training_error() -> float:
    """Return the largest difference between a training whose inner loop descends, and a mirrored one that ascends.

    Both train a ViT³ for four steps of AdamW with weight decay and clipping, on the same images. The second model has
    the first one's initial weights, except that the value rows of its heads are negated. The difference is taken over
    all losses, and over the final weights after negating those rows again. The inner convolution descends in both, as
    in the authors' code.
    """

    def train(step: str) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(SEED)
        model = ViT3Ladder(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5, step=step)
        turned = {name: find_values(model, name) for name, _ in model.named_parameters()}
        if step == "ascent":
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight[turned[name]] *= -1
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
        losses = []
        for _ in range(4):
            images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4,))
            loss = torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        if step == "ascent":
            for name, weight in weights.items():
                weight[turned[name]] *= -1
        return losses, weights

    with torch.random.fork_rng(devices=[]):
        down, up = train("own"), train("ascent")
    of_weights = max((down[1][name] - weight).abs().max().item() for name, weight in up[1].items())
    return max(of_weights, *(abs(a - b) for a, b in zip(down[0], up[0], strict=True)))


def find_values(model: ViT3Ladder, name: str) -> slice:
    """Return the rows of a ViT³'s parameter that project to the heads' values; an empty slice for other parameters."""
    if ".attn.qkv." not in name:
        return slice(0)
    return slice(2 * model.embed_dim, 3 * model.embed_dim)


@functools.cache
def reads_static_kernel(step: str) -> bool:
    """Tell whether LaCT after a step of the ablation chain is o = φ(q) S, with φ independent of keys and values.

    There are twice as many queries as features, so a matrix S that fits all outputs exists only if this holds.
    """
    loop, weights, (_, k, v), rates, momentum = draw_lact(step)
    q = torch.randn(1, 1, 2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = learn(loop, weights, q, k, v, GRID, rates, momentum)
    features = MODELS[loop.model].prepare(weights, q, GRID)[-1]
    state = torch.linalg.lstsq(features[0, 0], out[0, 0]).solution
    return find_error(features @ state, out) < 1e-10


@functools.cache
def parallel_error(step: str) -> float:
    """Return the largest error of a step's parallel form against the recurrent one, over outputs and gradients."""
    found = {}
    for form in ("parallel", "recurrent"):
        loop, weights, tokens, rates, momentum = draw_lact(step, order="before")
        given = [tensor.requires_grad_() for tensor in (*weights, *tokens, rates, momentum) if tensor is not None]
        out = fast_weights.learn(loop, weights, *tokens, GRID, rates, momentum, form)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        gradients = torch.autograd.grad((out * cotangent).sum(), given, allow_unused=True)
        found[form] = [out.detach(), *(each for each in gradients if each is not None)]
    return max(find_error(ours, stated) for ours, stated in zip(found["parallel"], found["recurrent"], strict=True))


@functools.cache
def order_error(step: str, norm: str | None = None) -> float:
    """Return how much the outputs change, relative to the largest one, when two chunks of keys and values are swapped.

    A state that is a sum over chunks does not change. Momentum is switched off, because its weights depend on the
    position of a chunk. `norm` is that of `InnerLoop`; None keeps the step's own.
    """
    changes = {"momentum": False} | ({} if norm is None else {"norm": norm})
    loop, weights, (q, k, v), rates, _ = draw_lact(step, **changes)
    swapped = [*range(CHUNK, 2 * CHUNK), *range(CHUNK), *range(2 * CHUNK, TOKENS)]
    first = learn(loop, weights, q, k, v, GRID, rates)
    moved = None if rates is None else rates[:, :, swapped]
    return find_error(learn(loop, weights, q, k[:, :, swapped], v[:, :, swapped], GRID, moved), first)


@functools.cache
def momentum_error(chunks: int, form: str) -> float:
    """Return the error of the momenta M_j = G_j + α_j M_{j−1} over chunks in fp32, against the recurrence in fp64.

    α_j is the mean over a chunk of 256 tokens, around ½. The form `ours` computes the weights from differences of
    cumulative logarithms. The form `divided` is that of the authors' code, cumprod(α) · cumsum(G / (cumprod(α) +
    1e-8)), which fails once cumprod(α) is no larger than 1e-8.
    """
    generator = torch.Generator().manual_seed(SEED)
    alpha = torch.randn(chunks, 256, generator=generator, dtype=torch.float64).sigmoid().mean(1)
    steps = torch.randn(chunks, WIDTH * WIDTH, generator=generator, dtype=torch.float64)
    moving, stated = torch.zeros(WIDTH * WIDTH, dtype=torch.float64), []
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
