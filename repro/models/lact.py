"""LaCT, fast weights that learn on large chunks of tokens, in the shell of a ViT without class token.

LaCT's authors publish models for language, novel views and videos, and a minimal layer that first learns all tokens and
then reads them. This is the minimal layer with the parts of the language model: learning rates per token and matrix,
momentum, Muon and weight norms. `step` removes these parts in the order of the paper on KV binding. Widths and heads
are this project's choice. `import repro.models` registers the models with timm.

Shape suffixes: B batch, N tokens (h·w), C width, h heads, d head dimension (C = h·d).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .backbone import register_sizes
from .fast_weights import LACT_STEPS, choose_form, learn
from .image_model import Grid
from .inner import InnerLoop
from .shell import NANO_PATCH4_32, NANO_PATCH16_144, ClassFreeViT, require_choice

EPS = 1e-5  # eps of the norms of q, k and the output
BASE_RATE = 0.01  # learning rate of every token where Linear(x) is 0, as in LaCT's models of images


class FastWeights(nn.Module):
    """LaCT's layer: Linear to q, k and v with SiLU, fast weights in each head, RMSNorm of each head, Linear.

    Queries and keys are scaled to length 1. The learning rates are softplus(Linear(x) + softplus⁻¹(0.01)), the momentum
    of a token is σ(Linear(x)).

    Args:
        dim, num_heads: width C, a multiple of the heads h.
        loop: a step of `repro.models.fast_weights.LACT_STEPS`, possibly with another schedule.

    Raises:
        ValueError: Muon with heads of width 1.
    """

    # an attribute, so that a probe can replace it on one layer; called with positional arguments, as the probes expect
    learn = staticmethod(learn)

    def __init__(self, dim: int, num_heads: int, loop: InnerLoop):
        super().__init__()
        self.num_heads, self.loop, self.backend = num_heads, loop, "auto"
        d = dim // num_heads
        if loop.muon != "none" and d < 2:
            raise ValueError(
                f"muon {loop.muon}: orthogonalises matrices, and a head of width {d} has vectors; use step v6 or fewer heads"
            )
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.rates = nn.Linear(dim, num_heads * len(loop.learned), bias=False) if loop.rate != "fixed" else None
        self.momentum = nn.Linear(dim, num_heads) if loop.momentum else None
        self.norm = nn.RMSNorm(d, eps=EPS)
        self.head_dim = d
        # LaCT's names and layout, (outputs, inputs): W1 is `w0`, W2 is `w2`, W3 is `w1`
        self.weight_names = ("s",) if loop.model == "fc" else ("w0", "w2", "w1")
        shapes = dict(zip(self.weight_names, loop.shapes(d), strict=True))
        for name in sorted(shapes):
            self.register_parameter(name, nn.Parameter(torch.empty(num_heads, *reversed(shapes[name]))))

    def init_weights(self) -> None:
        """Initialise the fast weights as N(0, 1/inputs), in the order of their names.

        The order decides which random numbers of a seed each gets.
        """
        for name in sorted(self.weight_names):
            weight = getattr(self, name)
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def selected_backend(self, dtype: torch.dtype) -> str:
        """Return the form that runs here; see `repro.models.fast_weights.choose_form`.

        `set_backend` finds a layer by the name of this method.
        """
        return choose_form(self.loop, self.backend, getattr(self, self.weight_names[0]).device)

    def forward(self, x_BNC: Tensor, grid: Grid) -> Tensor:
        """Map normalised tokens (B, N, C), row-major on (h, w), to (B, N, C), in their dtype or autocast's."""
        q, k, v = F.silu(self.qkv(x_BNC)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (x / (x.norm(dim=-1, keepdim=True) + EPS) for x in (q, k))
        rates = momentum = None
        if self.rates is not None:
            shift = BASE_RATE + math.log(-math.expm1(-BASE_RATE))  # softplus⁻¹
            given = F.softplus(self.rates(x_BNC).float() + shift).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            # LaCT's order is w0, w1, w2; that of the weights is w0, w2, w1
            rates = given if given.shape[-1] == 1 else given[..., [0, 2, 1]]
        if self.momentum is not None:
            momentum = self.momentum(x_BNC).sigmoid().mT
        weights = [getattr(self, name).mT for name in self.weight_names]
        out = self.learn(self.loop, weights, q, k, v, grid, rates, momentum, self.selected_backend(q.dtype))
        return self.proj(self.norm(out).transpose(1, 2).flatten(2))

    def param_terms(self) -> dict[str, int]:
        """Return named counts of parameters."""
        C, h = self.proj.in_features, self.num_heads
        return {
            "projections": 4 * C * C,
            "rates_and_momentum": h * (C * self._count_rates() + (C + 1) * self.loop.momentum),
            "inner_start": h * sum(rows * columns for rows, columns in self.loop.shapes(self.head_dim)),
            "inner_norms": self.head_dim,
        }

    def mac_terms(self, grid: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds of the recurrent form on an (h, w) grid."""
        N, C, h = grid[0] * grid[1], self.proj.in_features, self.num_heads
        return {
            "projections": N * 4 * C * C,
            "rates_and_momentum": N * h * C * (self._count_rates() + self.loop.momentum),
            "inner_learner": h * self.loop.count_macs(N, self.head_dim),
        }

    def _count_rates(self) -> int:
        """Return the learning rates of a token in a head: one for each matrix that learns, or none."""
        return 0 if self.rates is None else len(self.loop.learned)


class LaCT(ClassFreeViT):
    """ViT with LaCT's layer as mixer.

    Args:
        num_heads: heads h.
        step: `own`, `ascent`, `q_is_k`, or `v1` to `v6`; see `repro.models.fast_weights.LACT_STEPS`.
        muon, norm: options of `InnerLoop`; None keeps those of `step`.
        order, chunk_size, inner_steps: options `order`, `chunk_size` and `steps` of `InnerLoop`.
        inner_ratio: hidden units of the fast model, as a multiple of the head dimension; ignored by the steps from `v3`
            on, whose model is one matrix.
        kwargs: see `ClassFreeViT`.

    Raises:
        ValueError: an unknown choice, or a single chunk that is read before its own step.
    """

    def __init__(
        self,
        *,
        num_heads: int = 1,
        step: str = "own",
        muon: str | None = None,
        norm: str | None = None,
        order: str = "end",
        chunk_size: int = 64,
        inner_steps: int = 1,
        inner_ratio: float = 1.0,
        **kwargs: Any,
    ):
        require_choice("step", step, tuple(LACT_STEPS))
        chosen = {"muon": muon, "norm": norm, "width": inner_ratio if LACT_STEPS[step]["model"] == "swiglu" else None}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        loop = InnerLoop(**LACT_STEPS[step] | chosen, order=order, chunk_size=chunk_size, steps=inner_steps)
        super().__init__(lambda dim: (FastWeights(dim, num_heads, loop), None), num_heads=num_heads, **kwargs)
        tokens = math.prod(self.grid_size)
        if order == "before" and len(loop.split(tokens)) == 1:
            raise ValueError(
                f"order before: all {tokens} tokens are one chunk, whose step is never read; lower chunk_size"
            )


register_sizes(
    LaCT,
    {
        "lact_tiny_patch16_224": {"embed_dim": 192, "num_heads": 1},
        "lact_small_patch16_224": {"embed_dim": 384, "num_heads": 2},
        "lact_base_patch16_224": {"embed_dim": 768, "num_heads": 4},
        # for tests and the embedded data sets: one token per pixel of a scanned digit, in four chunks
        "lact_nano_patch4_32": {**NANO_PATCH4_32, "chunk_size": 16},
        "lact_nano_patch16_144": {**NANO_PATCH16_144, "chunk_size": 16},
    },
)
