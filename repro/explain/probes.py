"""Probes: a trained model runs with a changed inner loop, after Liu et al., "Test-Time Training with KV Binding Is
Secretly Linear
Attention" (sections 4.1, 4.2 and 4.4).

A probe changes only the inner loop, in every layer and direction, and keeps the weights. Liu et al. changed the number
of steps in this way too. For ascent and q = k, however, they trained their models with the change, so that the models
could adapt.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.ttt_linear.reference import Arguments, ttt_linear_dual

from .inner import Run

KNOWN = "steps=K, ascent, q_is_k"
# kind -> what it changes beside the number of steps, and what Liu et al. report
_KINDS: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "steps": (
        lambda o: o,
        "more inner steps at inference fit the inner loss better and make the task's score worse (LaCT, Fig. 1)",
    ),
    "ascent": (
        lambda o: o._replace(lr=-o.lr),
        "top-1 on ImageNet-1K 79.61 % with ascent, 79.34 % with descent (ViT3, Table 1), both trained that way; we do not retrain",
    ),
    "q_is_k": (
        lambda o: o._replace(q=o.k),
        "top-1 on ImageNet-1K 79.18 % with k for q, 79.34 % without (ViT3, Table 1), both trained that way; we do not retrain",
    ),
}


def parse_probe(name: str) -> tuple[str, int]:
    """The kind of a probe, and its inner steps; a ValueError for an unknown name."""
    kind, _, count = name.partition("=")
    if kind not in _KINDS or (kind == "steps") != (count.isdecimal() and int(count) > 0) or (count and kind != "steps"):
        raise ValueError(f"probe {name}: no such probe; known: {KNOWN}")
    return kind, int(count or 1)


def describe_reported(name: str) -> str:
    """What Liu et al. report of a probe."""
    return _KINDS[parse_probe(name)[0]][1]


class Probe:
    """A replacement for `repro.explain.inner.OverrideTTTLinear` that runs a changed inner loop and records how well it
    fits.

    Args:
        name: `steps=K` for K >= 1 inner steps per chunk, `ascent` for steps along the gradient, `q_is_k` for k in place
            of q (also in the residual of f(q) = q + LN(qW + β)). `steps=1` is the unchanged model.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, name: str):
        kind, self.steps = parse_probe(name)
        self._change, _ = _KINDS[kind]
        self._before = self._after = self._count = 0.0

    def __call__(self, arguments: Arguments, run: Run) -> Tensor:
        out, before, after = inner_loop(self._change(arguments), self.steps)
        self._before += float(before.sum(dtype=torch.float64))
        self._after += float(after.sum(dtype=torch.float64))
        self._count += before.numel()
        return out

    def inner_losses(self) -> tuple[float, float]:
        """Mean loss of the tokens of a chunk before and after its inner steps, over all calls so far; without any, a
        ValueError.
        """
        if not self._count:
            raise ValueError("the model has no inner learner of Vision-TTT")
        return self._before / self._count, self._after / self._count


def inner_loop(arguments: Arguments, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """TTT-Linear with several inner gradient steps per chunk, each from the state that the previous one reached.

    All steps but the last move the state of the whole chunk, W ← W − Kᵀ(c[n−1] lr ⊙ G), so that a token also learns
    from the later tokens of its chunk; the last step is the unchanged dual form. A single step is the operator itself.

    Returns:
        out (B,T,R,H,D) in the dtype of q, and the loss (B,T,R,H) of each token at the start state and at the end state
        of its chunk.
    """
    found = [_one_direction(arguments, r, steps) for r in range(len(arguments.reverse))]
    return tuple(torch.stack(parts, 2) for parts in zip(*found, strict=True))


def _one_direction(arguments: Arguments, r: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    B, T, _, H, D = arguments.q.shape
    # each image has its own state, so images become heads of one image
    tokens = *(x[:, :, r] for x in arguments[:3]), arguments.lr
    q, k, v, lr = (x.flip(1) if arguments.reverse[r] else x for x in tokens)
    q, k, v, lr = (x.transpose(0, 1).reshape(1, T, B * H, *x.shape[3:]) for x in (q, k, v, lr))
    c = arguments.token_scale[r]
    W, b, gamma, mu = (x[r].repeat(B, *[1] * (x.ndim - 2)) for x in arguments[5:9])
    outs, before, after = [], [], []
    for start in range(0, T, arguments.chunk_size):
        Q, K, V, rate = (x[:, start : start + arguments.chunk_size] for x in (q, k, v, lr))
        n = K.shape[1]
        learn = functools.partial(
            ttt_linear_dual, Q, K, V, rate, c[:n], chunk_size=n, eps=arguments.eps, return_inner=True
        )
        out, inner = learn(W, b, gamma, mu)
        before.append(inner.loss)
        for _ in range(steps):
            last, change = out, (c[n - 1] * rate.unsqueeze(-1) * inner.gradient)[0]
            W = W - torch.einsum("nhi,nhj->hij", K[0], change)
            b = b - change.sum(0)
            out, inner = learn(W, b, gamma, mu)
        outs.append(last)
        after.append(inner.loss)
    joined = (torch.cat(parts, 1).view(T, B, H, *parts[0].shape[3:]).transpose(0, 1) for parts in (outs, before, after))
    return tuple(x.flip(1) if arguments.reverse[r] else x for x in joined)
