"""ViT3, vision test-time training in the shell of DeiT: ViT3-T/S/B, and a nano for tests and the embedded data sets.

Every block learns two small models on its own tokens, by one step of full-batch gradient descent per image, and reads them out: a
gated linear unit for each head, and beside the heads one depth-wise 3x3 convolution on the grid. There is no position embedding
and no class token. `import repro.models` registers the models with timm.

Shape suffixes: B batch, N tokens (h·w), C width, d head dimension; image-like tensors are (1, B·d, h, w), a group per channel.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from .backbone import Grid, register_sizes, rename_prefixes
from .inner import full_precision
from .shell import ClassFreeViT, build_cpe

INNER_SCALE = 1 / 3  # of both inner losses, independent of the head dimension
Rotation = tuple[Tensor, Tensor]  # cosines and sines (N, C/2)


class InnerTraining(nn.Module):
    """The TTT block: Linear, one inner step per image, read-out, Linear.

    With keys k, values v and queries q of one head, the inner loss and the step on each fast weight w are

        L = −(s/N) Σ_n ⟨F(k_n), v_n⟩,    g = ∂L/∂w,    w' = w − g / (‖g‖ + 1),    s = 1/3,

    and the output is F(q) under w'. The heads learn F(x) = (x w1) · SiLU(x w2), with one ‖g‖ per output column, over the input
    axis; the convolution learns F = w3 (zero-padded), with one ‖g‖ per channel, over its 3x3 window. The gradients are closed forms
    that autograd differentiates, so the outer gradient is that of the whole step.

    The width C must be a multiple of the heads of the gated linear unit; the convolution is as wide as one head.
    """

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"embed_dim {dim} is not a multiple of num_heads {num_heads}")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        d = self.head_dim
        self.split_sizes = [3 * dim, 3 * d]  # q, k, v of the heads, then those of the convolution
        self.qkv = nn.Linear(dim, sum(self.split_sizes))
        self.w1 = nn.Parameter(torch.empty(1, num_heads, d, d))
        self.w2 = nn.Parameter(torch.empty(1, num_heads, d, d))
        self.w3 = nn.Parameter(torch.empty(d, 1, 3, 3))
        self.proj = nn.Linear(dim + d, dim)
        for weight in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, x_BNC: Tensor, grid: Grid, rotation: Rotation | None = None) -> Tensor:
        """Normalised tokens (B, N, C), row-major on an (h, w) grid -> (B, N, C) in their dtype (under autocast in that of the mode).

        With a `rotation`, the queries and keys of the heads are turned by `rotate` before they are split into heads.
        """
        projected = self.qkv(x_BNC)
        # fp32 also under autocast, because g is small: at initialisation (T, 196 tokens) nine of ten terms e·F'(k) are subnormal in
        # fp16, and in bf16 one of eight elements of w does not move at all
        with full_precision(x_BNC.device.type):
            heads, conv = projected.to(torch.promote_types(projected.dtype, torch.float32)).split(self.split_sizes, dim=-1)
            if rotation is not None:
                qk, v = heads.split([2 * self.proj.out_features, self.proj.out_features], dim=-1)
                heads = torch.cat((rotate(qk.unflatten(-1, (2, -1)), rotation).flatten(-2), v), dim=-1)
            out = torch.cat((self._learn_glu(heads), self._learn_conv(conv, grid)), dim=-1)
        return self.proj(out.to(projected.dtype))

    def _learn_glu(self, qkv: Tensor) -> Tensor:
        """(B, N, 3C) -> (B, N, C)."""
        B, N, _ = qkv.shape
        # one copy for all three, into the layout of batched products
        q, k, v = qkv.view(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).contiguous()
        w1, w2 = self.w1.to(k.dtype), self.w2.to(k.dtype)
        z1, z2 = k @ w1, k @ w2
        sigmoid = z2.sigmoid()
        gate = z2 * sigmoid
        slope = sigmoid * (1 + z2 - gate)  # SiLU'(z2)
        scale = -INNER_SCALE / N
        w1 = _descend(w1, scale * (k.mT @ (v * gate)), dim=-2)
        w2 = _descend(w2, scale * (k.mT @ (v * z1 * slope)), dim=-2)
        return ((q @ w1) * F.silu(q @ w2)).transpose(1, 2).reshape(B, N, -1)

    def _learn_conv(self, qkv: Tensor, grid: Grid) -> Tensor:
        """(B, N, 3d) -> (B, N, d), as one convolution whose groups are the images and channels, each with its own window."""
        B, N, _ = qkv.shape
        d = self.head_dim
        q, k, v = qkv.view(B, N, 3, d).permute(2, 0, 3, 1).reshape(3, 1, B * d, *grid)
        w3 = self.w3.to(k.dtype).repeat(B, 1, 1, 1)
        g3 = conv2d_weight(k, w3.shape, v, padding=1, groups=B * d)  # Σ_p k[p + offset] v[p], without unfolding k
        w3 = _descend(w3, (-INNER_SCALE / N) * g3, dim=(-2, -1))
        return F.conv2d(q, w3, padding=1, groups=B * d).view(B, d, N).transpose(1, 2)

    def param_terms(self) -> dict[str, int]:
        """Named counts of parameters."""
        C, d = self.proj.out_features, self.head_dim
        qkv, proj = 3 * C + 3 * d, C + d  # outputs of the first linear layer, inputs of the second
        return {"projections": (C + 1) * qkv + (proj + 1) * C, "inner_start": 2 * C * d + 9 * d}

    def mac_terms(self, grid: Grid) -> dict[str, int]:
        """Named counts of multiply-adds on an (h, w) grid.

        The inner step has 6·N·C·d in the heads (K, its transpose and Q, each with two d x d matrices) and 2·9·N·d in the
        convolution (the gradient of its window, and its output); the damping is element-wise and free.
        """
        N, C, d = grid[0] * grid[1], self.proj.out_features, self.head_dim
        return {"projections": N * C * (3 * C + 3 * d + C + d), "inner_glu": 6 * N * C * d, "inner_conv": 2 * 9 * N * d}


class ViT3(ClassFreeViT):
    """ViT3 in the shell; no parameter depends on the image size.

    Args:
        num_heads: heads of the inner gated linear unit.
        kwargs: see `ClassFreeViT`.
    """

    def __init__(self, *, num_heads: int = 6, **kwargs: Any):
        def build_mixer(dim: int) -> tuple[nn.Module, nn.Conv2d]:
            cpe = build_cpe(dim)
            return InnerTraining(dim, num_heads), cpe

        super().__init__(build_mixer, num_heads=num_heads, positions="none", **kwargs)


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the official release under our names; they differ only for the patch convolution."""
    return rename_prefixes(state_dict, {"patch_embed.proj.": "patch_embed."})


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the channels 2j and 2j + 1 of x (B, N, ..., C), as real and imaginary part, by the angle j of their token."""
    cos, sin = (part.reshape(len(part), *(1,) * (x.ndim - 3), -1) for part in rotation)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)


def _descend(w: Tensor, g: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """w − g / (‖g‖ + 1), with the norm over `dim`."""
    return w - g / (torch.linalg.vector_norm(g, dim=dim, keepdim=True) + 1)


register_sizes(
    ViT3,
    {
        "vit3_tiny_patch16_224": {"embed_dim": 192, "num_heads": 6},  # 6.149 M parameters; the paper trains it with drop path 0
        "vit3_small_patch16_224": {"embed_dim": 384, "num_heads": 6},  # 23.799 M; drop path 0.1
        "vit3_base_patch16_224": {"embed_dim": 768, "num_heads": 12},  # 90.056 M; drop path 0.4
        # for tests and the embedded data sets: heads as wide as those of ViT3-T, 9x9 tokens
        "vit3_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 2},
    },
)
