"""Token mixer in place of softmax attention in a ViT: an inner learner for each head, or linear attention.

The design study of ViT3, T5 and DiT5 share this mixer; see `repro.models.inner` for the learners.

Shape suffixes: B batch, N tokens (h·w), C width, h heads, d head dimension (C = h·d).
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.dispatch import compute_dtype, no_autocast

from .image_model import Grid
from .inner import InnerLoop, learn
from .neighbours import attend_to_neighbours
from .shell import EPS, add_convolved, build_cpe

Start = Literal["random", "identity"]
KeyNormKind = Literal["none", "instance", "no_std", "no_mean", "layer", "rms"]
Convolution = Literal["none", "v", "qk"]
STARTS, KEY_NORMS = get_args(Start), get_args(KeyNormKind)

# the learners of T5: one step on all tokens at rate 1, with the dot product times d^-½ as loss
LOOPS = {
    "gate": InnerLoop(model="glu"),
    "2layer": InnerLoop(model="mlp", depth=2),
    "3layer": InnerLoop(model="mlp", depth=3),
    "swiglu": InnerLoop(model="swiglu"),
}


class KeyNorm(nn.Module):
    """Norm of the keys without parameters, before they are split into heads.

    `instance` is (k - mean) / √(var + 1) over the tokens, per image and channel, as in the release. `no_std` leaves the
    division out, and `no_mean` the subtraction. `layer` and `rms` normalise over the channels of a token.

    `bench.fvcore` counts `instance` by a hook on this module, and counts nothing where the module is not called.
    """

    def __init__(self, kind: KeyNormKind):
        super().__init__()
        self.kind = kind

    def forward(self, k_BNC: Tensor) -> Tensor:
        """Normalise keys (B, N, C) in at least fp32; shape and dtype are kept."""
        if self.kind == "none":
            return k_BNC
        with no_autocast(k_BNC.device.type):
            k = k_BNC.to(compute_dtype(k_BNC.dtype))
            if self.kind == "layer":
                k = F.layer_norm(k, k.shape[-1:], eps=EPS)
            elif self.kind == "rms":
                k = F.rms_norm(k, k.shape[-1:], eps=EPS)
            else:
                var, mean = torch.var_mean(k, dim=1, keepdim=True, correction=0)
                k = k if self.kind == "no_mean" else k - mean
                k = k if self.kind == "no_std" else k * (var + 1).rsqrt()
            return k.to(k_BNC.dtype)


class InnerMixer(nn.Module):
    """Mixer with an inner learner or linear attention in each head, between two linear projections.

    The keys are normalised. Then a residual depth-wise convolution is applied to q and k, or to v. With `neighbours`,
    half of the output is neighbourhood attention of the raw q, k and v. If the learner has a dynamic rate, the rate of
    a token in a head is the sigmoid of a linear map of the token.

    Args:
        dim, num_heads: width C, a multiple of the heads h.
        inner: an inner learner or its name in `LOOPS`; `linear` for linear attention with φ(x) = elu(x) + 1; `projqk`
            for linear attention of k·W1 and q·W2. Any other name also gives linear attention, so the caller must check
            it.
        key_norm: see `KeyNorm`.
        dwc: what is convolved: `none`, `v` or `qk`.
        neighbours: side of the window of neighbourhood attention, an odd number; 0 for none.
        affine: whether q and k first get a learned scale and offset per channel.
        start: initial inner weights; `identity` sets the last one to I.

    Raises:
        ValueError: `start` is `identity` and the last inner weight is not a square matrix, or the learner's rate is
            `per_weight`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        inner: InnerLoop | str,
        key_norm: KeyNormKind = "none",
        dwc: Convolution = "none",
        neighbours: int = 0,
        *,
        affine: bool = False,
        start: Start = "random",
    ):
        super().__init__()
        self.num_heads, self.neighbours, self.start = num_heads, neighbours, start
        found = LOOPS.get(inner, inner)
        self.loop = found if isinstance(found, InnerLoop) else None
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        has_rate = self.loop is not None and self.loop.rate == "dynamic"
        if self.loop is not None and self.loop.rate == "per_weight":
            raise ValueError("inner_rate per_weight: this mixer gives no rate for each weight; take fixed or dynamic")
        self.rate = nn.Linear(dim, num_heads, bias=False) if has_rate else None
        self.key_norm = KeyNorm(key_norm)
        for name in "qkv":
            setattr(self, f"dwc_{name}", build_cpe(dim) if dwc != "none" and name in dwc else None)
        # axes: (q or k, C, scale or offset)
        self.affine = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(2, dim, 1)) if affine else None
        d = dim // num_heads
        shapes = self.loop.shapes(d) if self.loop else [(d, d)] * (2 if inner == "projqk" else 0)
        if start == "identity" and (len(shapes[-1]) != 2 or shapes[-1][0] != shapes[-1][1]):
            raise ValueError(
                f"inner_start identity: the last weight of {self.loop.model} at width {self.loop.width} is no square matrix"
            )
        # the training of denoisers finds the inner weights by these names, for a learning rate of their own
        # (`tasks.generation.task`)
        self.weight_names = tuple(f"w{i + 1}" for i in range(len(shapes)))
        for name, shape in zip(self.weight_names, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(num_heads, *shape)))

    @property
    def weights(self) -> list[nn.Parameter]:
        """The initial weights of the inner learner, or the projections of linear attention, each (h, *shape)."""
        return [getattr(self, name) for name in self.weight_names]

    def init_weights(self) -> None:
        """Initialise the inner weights trunc_normal 0.02; convolutions keep PyTorch's default.

        The model must call it, as `ClassFreeViT` and `Denoiser` do: before, the inner weights are uninitialised memory.
        """
        for weight in self.weights:
            nn.init.trunc_normal_(weight, std=0.02)
        if self.start == "identity":
            with torch.no_grad():
                self.weights[-1].copy_(torch.eye(self.weights[-1].shape[-1]))

    def new_parameters(self) -> set[str]:
        """Return the names of the parameters that softmax attention does not have."""
        return {name for name, _ in self.named_parameters() if not name.startswith(("qkv.", "proj."))}

    def forward(self, x_BNC: Tensor, grid: Grid) -> Tensor:
        """Map normalised tokens (B, N, C), row-major on (h, w), to (B, N, C), in their dtype or autocast's."""
        rates = None if self.rate is None else self.rate(x_BNC).sigmoid().mT
        return self.proj(self.mix(*self.qkv(x_BNC).chunk(3, dim=-1), grid, rates))

    def mix(self, q_BNC: Tensor, k_BNC: Tensor, v_BNC: Tensor, grid: Grid, rates_BhN: Tensor | None = None) -> Tensor:
        """Mix projected queries, keys and values (B, N, C), with a dynamic rate's token rates (B, h, N), to (B, N, C).

        `inference.attention` calls it with the outputs of `qkv`, so all that acts on them belongs here.
        """
        q, k, v = q_BNC, k_BNC, v_BNC
        if self.affine is not None:
            scale, offset = self.affine.unbind(-1)
            q, k = q * scale[0] + offset[0], k * scale[1] + offset[1]
        k = self.key_norm(k)
        q, k, v = (
            add_convolved(x, convolve, grid) for x, convolve in ((q, self.dwc_q), (k, self.dwc_k), (v, self.dwc_v))
        )
        heads = [self._split(x) for x in (q, k, v)]
        if self.loop is None:
            out = attend_linearly(*heads, self.weights)
        else:
            out = learn(self.loop, self.weights, *heads, grid, rates_BhN)
        if self.neighbours:
            near = attend_to_neighbours(*(self._split(x) for x in (q_BNC, k_BNC, v_BNC)), grid, self.neighbours)
            out = 0.5 * out + 0.5 * near
        return out.transpose(1, 2).flatten(2)

    def param_terms(self) -> dict[str, int]:
        """Return named counts of parameters."""
        C, d = self.proj.in_features, self.proj.in_features // self.num_heads
        shapes = self.loop.shapes(d) if self.loop else [(d, d)] * len(self.weight_names)
        return {
            "projections": 4 * C * C + 4 * C,
            "inner_start": self.num_heads * sum(math.prod(shape) for shape in shapes),
            "token_rate": C * self.num_heads * (self.rate is not None),
            "scales": 4 * C * (self.affine is not None),
            "convolutions": 10 * C * self._count_convolutions(),
        }

    def mac_terms(self, grid: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds on an (h, w) grid; see `InnerLoop.count_macs` for an inner learner."""
        N, C, d = grid[0] * grid[1], self.proj.in_features, self.proj.in_features // self.num_heads
        inner = self.loop.count_macs(N, d) if self.loop else (2 + len(self.weight_names)) * N * d * d
        return {
            "projections": N * 4 * C * C,
            "inner_learner": self.num_heads * inner,
            "token_rate": N * C * self.num_heads * (self.rate is not None),
            "neighbours": 2 * N * min(self.neighbours, grid[0]) * min(self.neighbours, grid[1]) * C,
            "convolutions": N * 9 * C * self._count_convolutions(),
        }

    def _count_convolutions(self) -> int:
        """Return how many of q, k and v are convolved."""
        return sum(convolve is not None for convolve in (self.dwc_q, self.dwc_k, self.dwc_v))

    def _split(self, x_BNC: Tensor) -> Tensor:
        """Split (B, N, C) into heads (B, h, N, d), contiguous for batched products."""
        return x_BNC.unflatten(2, (self.num_heads, -1)).transpose(1, 2).contiguous()


def attend_linearly(q: Tensor, k: Tensor, v: Tensor, projections: list[Tensor]) -> Tensor:
    """Compute linear attention φ(q)(φ(k)ᵀv) / φ(q)(φ(k)ᵀ1) with φ(x) = elu(x) + 1.

    q, k, v and the result are (B, h, N, d), the result in the dtype of q; the computation is in at least fp32. With
    `projections` W1 and W2 (h, d, d), k·W1 and q·W2 take the place of k and q.
    """
    with no_autocast(q.device.type):
        dtype = compute_dtype(q.dtype)
        wide_q, wide_k, wide_v = (each.to(dtype) for each in (q, k, v))
        if projections:
            wide_k, wide_q = wide_k @ projections[0].to(dtype), wide_q @ projections[1].to(dtype)
        wide_q, wide_k = F.elu(wide_q) + 1, F.elu(wide_k) + 1
        total = (wide_q * wide_k.sum(dim=-2, keepdim=True)).sum(-1, keepdim=True)
        return (wide_q @ (wide_k.mT @ wide_v) / (total + EPS)).to(q.dtype)
