"""Functions that the ledger of T5 calls: counts by the paper's convention, and checks of its equations in fp64."""

import functools
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models import linearize
from ...models.inner import learn
from ...models.inner_mixer import LOOPS, InnerMixer, KeyNorm, attend_linearly
from ...models.registry import build_model
from ..identities import choose, find_error
from .recipe import RELEASED

_WIDTH, _DEPTH, _TOKENS = 192, 12, 196  # of T5-T at 224²


def recipe_setting(key: str) -> Any:
    """Return a value of the release's recipe by its key path, e.g. `epochs` or `optim.lr`; the text prints none."""
    return RELEASED[key]


def neighbours_macs_g(window: int) -> Fraction:
    """Return the multiply-adds (1e9) of neighbourhood attention in T5-T at 224².

    Each token has scores and a weighted sum over window² keys.
    """
    return Fraction(_DEPTH * 2 * _TOKENS * window**2 * _WIDTH, 10**9)


def in_tenths(value: float) -> Fraction:
    """Round a number to one decimal, as the paper prints it, and return it as an exact fraction."""
    return Fraction(round(10 * value), 10)


@functools.cache
def foreign_weights(inner: str) -> int:
    """Count the values of q, k, v and MLPs of a T5-T that differ from the teacher's, bit for bit, after inheritance."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        teacher = build_model("t5_softmax_tiny_patch16_224")
        student = build_model("t5_tiny_patch16_224", inner=inner)
    # parameters with a constant initial value, such as biases of 0, would be equal even without inheritance
    with torch.no_grad():
        for index, weight in enumerate(teacher.parameters()):
            weight.add_(torch.linspace(0.5, 1, weight.numel()).view_as(weight) + index)
    linearize.inherit(student, linearize.read_shell(teacher, "the teacher"), "the student")
    stated, found = teacher.state_dict(), student.state_dict()
    names = [name for name in stated if ".qkv." in name or ".mlp." in name]
    return sum(int((found[name] != stated[name]).sum()) for name in names)


def identity_error(name: str) -> float:
    """Return the error of an equation of the text in fp64, relative to the largest value of the side that it states.

    `two_layers`: softmax attention is σ(q·W1)·W2 with W1 = Kᵀ, W2 = V and the row-wise softmax as σ.
    `single_layer`: linear attention is φ(q)·W with W = φ(K)ᵀV, each row divided by φ(q)·φ(K)ᵀ1.
    `inner_step`: our two-layer inner learner is SiLU(q·W1')·W2' with W' = W − ∂L/∂W by autograd; L is the mean of
    −d^-½·⟨F(k), v⟩.
    `shifted_gradient`: to first order in δ, ∂L/∂W1 at k + δ has the term of the text and a second one with σ''.
    `instance_norm`: the norm of the keys is (k − mean)/√(var + ε) over the tokens, with the release's ε = 1.
    `half_neighbours`: with neighbourhood attention, a mixer returns half of its output and half of the inner learner's.

    Raises:
        ValueError: another name.
    """
    return find_error(*choose(_IDENTITIES, name, "equation of the text")(*_draw()))


def shift_error(what: str) -> float:
    """Return how much the output of attention changes in fp64 when one vector is added to all keys.

    The change is relative to the largest output. `what` is `softmax` for softmax attention, or a norm of the keys
    (`KeyNorm`) before a SwiGLU inner learner.
    """
    q, k, v, delta = _draw()
    if what == "softmax":
        before, after = (_attend(q, keys, v) for keys in (k, k + delta))
    else:
        mixer = InnerMixer(q.shape[-1], 2, "swiglu", what).double()
        _fill(mixer)
        with torch.no_grad():
            before, after = (mixer.mix(q, keys, v, (3, 4)) for keys in (k, k + delta))
    return find_error(after, before)


def _draw() -> tuple:
    """Draw q, k, v (2, 12, 8) and a shift (8,) of the keys in fp64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 12, 8, generator=generator, dtype=torch.float64)
    return q, k, v, torch.randn(8, generator=generator, dtype=torch.float64)


def _fill(mixer: InnerMixer) -> None:
    """Replace the mixer's weights by larger random ones; with the small initial ones its outputs would vanish."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) / 2)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax attention without the scale d^-½, as the text writes it."""
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def _two_layers(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> tuple:
    W1, W2 = k.mT, v
    return (q @ W1).softmax(-1) @ W2, _attend(q, k, v)


def _single_layer(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> tuple:
    wide_q, wide_k = F.elu(q) + 1, F.elu(k) + 1
    scores = wide_q @ wide_k.mT
    stated = scores / (scores.sum(-1, keepdim=True) + 1e-6) @ v
    return attend_linearly(q[:, None], k[:, None], v[:, None], [])[:, 0], stated


def _inner_step(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> tuple:
    N, d = k.shape[1:]
    generator = torch.Generator().manual_seed(1)
    W1, W2 = torch.randn(2, d, d, generator=generator, dtype=torch.float64)
    found = learn(LOOPS["2layer"], [W1[None], W2[None]], q[:, None], k[:, None], v[:, None], (3, 4))[:, 0]
    stated = []
    for each_q, each_k, each_v in zip(q, k, v, strict=True):
        weights = [W1.clone().requires_grad_(), W2.clone().requires_grad_()]
        loss = -((F.silu(each_k @ weights[0]) @ weights[1]) * each_v).sum() / (N * d**0.5)
        steps = torch.autograd.grad(loss, weights)
        stated.append(F.silu(each_q @ (W1 - steps[0])) @ (W2 - steps[1]))
    return found, torch.stack(stated)


def _shifted_gradient(_: Tensor, k: Tensor, v: Tensor, delta: Tensor) -> tuple:
    k, v = k[0, 0], v[0, 0]
    generator = torch.Generator().manual_seed(1)
    W1, W2 = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)

    def slope(z: Tensor) -> Tensor:
        """Compute SiLU'(z)."""
        return torch.sigmoid(z) * (1 + z * (1 - torch.sigmoid(z)))

    def gradient(keys: Tensor) -> Tensor:
        """Compute ∂/∂W1 of −vᵀ W2 σ(W1 k) by autograd; vectors are columns, as in the text."""
        W = W1.clone().requires_grad_()
        return torch.autograd.grad(-(v @ (W2 @ F.silu(W @ keys))), W, create_graph=True)[0]

    _, along = torch.autograd.functional.jvp(gradient, k, delta)
    _, curvature = torch.autograd.functional.jvp(slope, W1 @ k, W1 @ delta)  # σ''(W1 k) ⊙ W1 δ
    text = -torch.outer((W2.mT @ v) * slope(W1 @ k), delta)
    return along, text - torch.outer((W2.mT @ v) * curvature, k)


def _instance_norm(_: Tensor, k: Tensor, __: Tensor, ___: Tensor) -> tuple:
    return KeyNorm("instance")(k), F.instance_norm(k.mT, eps=1.0).mT


def _half_neighbours(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> tuple:
    def mix(neighbours: int) -> Tensor:
        """Run a mixer with neighbourhood attention in windows of so many tokens a side; 0: without it."""
        mixer = InnerMixer(q.shape[-1], 1, "swiglu", "instance", neighbours=neighbours).double()
        _fill(mixer)
        with torch.no_grad():
            return mixer.mix(q, k, v, (3, 4))

    # this window covers the whole grid from every token, so neighbourhood attention equals softmax attention
    wide = 5
    near = _attend(q * q.shape[-1] ** -0.5, k, v)
    return mix(wide), 0.5 * mix(0) + 0.5 * near


# name -> function of what `_draw` returns: (our side of the equation, the side that the text states)
_IDENTITIES = {
    "two_layers": _two_layers,
    "single_layer": _single_layer,
    "inner_step": _inner_step,
    "shifted_gradient": _shifted_gradient,
    "instance_norm": _instance_norm,
    "half_neighbours": _half_neighbours,
}
