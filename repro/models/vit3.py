"""ViT3, vision test-time training in the shell of DeiT: ViT3-T/S/B, and a nano for tests and the embedded data sets.

Every block trains two kinds of small models on its tokens, by one step of full-batch gradient descent per image, and
applies them to its queries: a gated linear unit in each head, and one depth-wise 3x3 convolution on the grid. There is
no position embedding and no class token. `import repro.models` registers the models with timm.

Shape suffixes: B batch, N tokens (h·w), C width, d head dimension.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.dispatch import compute_dtype, no_autocast

from .backbone import register_sizes, rename_prefixes
from .image_model import Grid
from .inner import InnerLoop, learn
from .shell import NANO_PATCH16_144, ClassFreeViT, build_cpe, require_choice

INNER_SCALE = 1 / 3  # scale s of both inner losses, independent of the head dimension
_SHARED: dict[str, Any] = {"scale": INNER_SCALE, "damping": True}  # options of most inner loops here
# inner loops of the heads by step of the ablation chain; `own` is ViT3. In V1 the gate SiLU(x w2) is static, so w1
# alone learns, from values v ⊙ SiLU(k w2). V6 removes the damping, which ViT3 has in place of LaCT's Muon. In `as_run`
# the value is v ⊙ (k w1): the paper's code keeps that line of the gated unit. Without `as_run`, the step is the
# gradient of the loss itself
STEPS: dict[str, InnerLoop] = {
    "own": InnerLoop(model="glu", **_SHARED),
    "ascent": InnerLoop(model="glu", direction="ascent", **_SHARED),
    "q_is_k": InnerLoop(model="glu", q_is_k=True, **_SHARED),
    "v1": InnerLoop(model="fc", **_SHARED),
    "v3": InnerLoop(model="fc", **_SHARED),
    "v3_as_run": InnerLoop(model="fc", **_SHARED),
    "v6": InnerLoop(model="fc", scale=INNER_SCALE),
    "v6_as_run": InnerLoop(model="fc", scale=INNER_SCALE),
}
WITHOUT_GATE = ("v3", "v6")  # steps without w2; the `as_run` steps keep it without effect
# products with a d x d matrix outside the learner, by step: the gates of keys and queries, or k w1
_FURTHER_PRODUCTS = {"v1": 2, "v3_as_run": 1, "v6_as_run": 1}
Rotation = tuple[Tensor, Tensor]  # cosines and sines (N, C/2)


class InnerTraining(nn.Module):
    """TTT block: Linear, inner steps per image, read-out, Linear.

    With keys k, values v and queries q of one head, the inner loss and the step on each fast weight w are

        L = −(s/N) Σ_n ⟨F(k_n), v_n⟩,    g = ∂L/∂w,    w' = w − g / (‖g‖ + 1),    s = 1/3,

    and the output is F(q) under w'. The heads learn F(x) = (x w1) · SiLU(x w2), with one ‖g‖ per output column, over
    the input axis; the convolution learns F = w3 (zero-padded), with one ‖g‖ per channel, over its window. See `inner`.

    Args:
        dim: width C, a multiple of the heads.
        num_heads: heads of the gated linear unit; the convolution is as wide as one head.
        step: a name of `STEPS`, the inner loop of the heads.
        inner_steps: inner steps of heads and convolution.

    Raises:
        ValueError: a width that is not a multiple of the heads.
    """

    # an attribute, so that a probe can replace it on one layer; called with positional arguments, as the probes expect
    learn = staticmethod(learn)

    def __init__(self, dim: int, num_heads: int, step: str = "own", inner_steps: int = 1):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"embed_dim {dim} is not a multiple of num_heads {num_heads}")
        self.num_heads, self.head_dim, self.step = num_heads, dim // num_heads, step
        self.loop = dataclasses.replace(STEPS[step], epochs=inner_steps)
        # `step` and `loop` are those of the heads; the convolution takes only `q_is_k` from them
        self.conv_loop = InnerLoop(model="dwconv", epochs=inner_steps, q_is_k=self.loop.q_is_k, **_SHARED)
        d = self.head_dim
        self.split_sizes = [3 * dim, 3 * d]  # q, k, v of the heads, then those of the convolution
        self.qkv = nn.Linear(dim, sum(self.split_sizes))
        self.w1 = nn.Parameter(torch.empty(1, num_heads, d, d))
        self.w2 = nn.Parameter(torch.empty(1, num_heads, d, d))
        self.w3 = nn.Parameter(torch.empty(d, 1, 3, 3))
        self.proj = nn.Linear(dim + d, dim)
        for weight in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(weight, std=0.02)
        if step in WITHOUT_GATE:  # drawn first, so that a seed gives all steps the same w1 and w3
            del self.w2

    def forward(self, x_BNC: Tensor, grid: Grid, rotation: Rotation | None = None) -> Tensor:
        """Map normalised tokens (B, N, C), row-major on an (h, w) grid, to (B, N, C), in their dtype or autocast's.

        With a `rotation`, `rotate` turns the heads' queries and keys before they are split into heads.
        """
        projected = self.qkv(x_BNC)
        # fp32 also under autocast, because g is small: at initialisation (ViT3-T, 196 tokens) nine of ten terms e·F'(k)
        # are subnormal in fp16, and in bf16 one of eight elements of w does not change at all
        with no_autocast(x_BNC.device.type):
            heads, conv = projected.to(compute_dtype(projected.dtype)).split(self.split_sizes, dim=-1)
            if rotation is not None:
                width = self.num_heads * self.head_dim
                qk, v = heads.split([2 * width, width], dim=-1)
                heads = torch.cat((rotate(qk.unflatten(-1, (2, -1)), rotation).flatten(-2), v), dim=-1)
            out = torch.cat((self._learn_heads(heads), self._learn_conv(conv, grid)), dim=-1)
        return self.proj(out.to(projected.dtype))

    def _learn_heads(self, qkv: Tensor) -> Tensor:
        """Learn and read the heads: (B, N, 3C) -> (B, N, C).

        The step `v1` gates values and outputs by SiLU(x w2); steps `*_as_run` keep the factor k w1 that the authors'
        code has on the values (see `STEPS`). The learner of the heads ignores its grid, (1, N).
        `papers.kv_binding.formulas` calls this method, too.
        """
        q, k, v = (x.contiguous() for x in self._split(qkv, self.num_heads))  # for batched products
        w1 = self.w1.to(k.dtype)
        weights = [w1[0], self.w2[0]] if self.loop.model == "glu" else [w1[0]]
        if self.step == "v1":
            w2 = self.w2.to(k.dtype)
            v = v * F.silu(k @ w2)
        elif self.step.endswith("_as_run"):
            v = v * (k @ w1)
        out = self.learn(self.loop, weights, q, k, v, (1, k.shape[2]))
        if self.step == "v1":
            out = F.silu(q @ w2) * out
        # gives w2 a zero gradient instead of none, so that weight decay acts on it as in the paper's code
        elif self.step.endswith("_as_run"):
            out = out + 0 * self.w2.sum()
        return out.transpose(1, 2).flatten(2)

    def _learn_conv(self, qkv: Tensor, grid: Grid) -> Tensor:
        """Learn and read the convolution: (B, N, 3d) -> (B, N, d)."""
        q, k, v = self._split(qkv, 1)
        return self.learn(self.conv_loop, [self.w3[None]], q, k, v, grid)[:, 0]

    def _split(self, qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Split (B, N, 3·heads·d) into q, k and v, each (B, heads, N, d)."""
        return qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def param_terms(self) -> dict[str, int]:
        """Return named counts of parameters."""
        C, d = self.proj.out_features, self.head_dim
        qkv, proj = 3 * C + 3 * d, C + d  # outputs of the first linear layer, inputs of the second
        gates = 0 if self.step in WITHOUT_GATE else C * d
        return {"projections": (C + 1) * qkv + (proj + 1) * C, "inner_start": C * d + gates + 9 * d}

    def mac_terms(self, grid: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds on an (h, w) grid; see `InnerLoop.count_macs`.

        ViT3's own step has 6·N·C·d in the heads (K, Kᵀ and Q, each with two d x d matrices) and 2·9·N·d in the
        convolution (its weight gradient, and its output). The damping is element-wise and not counted.
        """
        N, C, d = grid[0] * grid[1], self.proj.out_features, self.head_dim
        of_head = self.loop.count_macs(N, d) + _FURTHER_PRODUCTS.get(self.step, 0) * N * d * d
        return {
            "projections": N * C * (3 * C + 3 * d + C + d),
            "inner_glu": self.num_heads * of_head,
            "inner_conv": self.conv_loop.count_macs(N, d),
        }


class ViT3(ClassFreeViT):
    """ViT3 in timm's conventions, as a `PlainBackbone`; no parameter depends on the image size.

    Args:
        step, inner_steps: see `InnerTraining`.
        kwargs: see `ClassFreeViT`.

    Raises:
        ValueError: an unknown step, or sizes that do not fit.
    """

    def __init__(self, *, num_heads: int = 6, step: str = "own", inner_steps: int = 1, **kwargs: Any):
        require_choice("step", step, tuple(STEPS))

        def build_mixer(dim: int) -> tuple[nn.Module, nn.Conv2d]:
            cpe = build_cpe(dim)  # first, because recorded trainings depend on the order of the random draws
            return InnerTraining(dim, num_heads, step, inner_steps), cpe

        super().__init__(build_mixer, num_heads=num_heads, positions="none", **kwargs)


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict; the names differ only in the patch embedding."""
    return rename_prefixes(state_dict, {"patch_embed.proj.": "patch_embed."})


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate channels (2j, 2j + 1) of x (B, N, ..., C), as (real, imaginary) parts, by angle j of their token."""
    cos, sin = (part.reshape(len(part), *(1,) * (x.ndim - 3), -1) for part in rotation)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)


register_sizes(
    ViT3,
    {
        # 6.149 M parameters; the paper trains it with drop path 0
        "vit3_tiny_patch16_224": {"embed_dim": 192, "num_heads": 6},
        "vit3_small_patch16_224": {"embed_dim": 384, "num_heads": 6},  # 23.799 M; drop path 0.1
        "vit3_base_patch16_224": {"embed_dim": 768, "num_heads": 12},  # 90.056 M; drop path 0.4
        # for tests and the embedded data sets: heads as wide as those of ViT3-T, 9x9 tokens
        "vit3_nano_patch16_144": NANO_PATCH16_144,
    },
)
