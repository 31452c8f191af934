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
from timm.layers import DropPath, Mlp
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from .backbone import Backbone, Grid, init_linear, register_sizes, rename_prefixes
from .inner import full_precision

EPS = 1e-6
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


class ViT3Block(nn.Module):
    """Tokens + depth-wise convolution, then the TTT block and an MLP, each after a LayerNorm and with a residual and stochastic depth."""

    def __init__(self, dim: int, num_heads: int, drop_path: float):
        super().__init__()
        self.cpe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.attn = InnerTraining(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = Mlp(dim, 4 * dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) on an (h, w) grid, row-major -> (B, N, C)."""
        image = tokens.transpose(1, 2).unflatten(2, grid)  # a channels-last view, no copy
        tokens = tokens + self.cpe(image).flatten(2).transpose(1, 2)
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens), grid))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


class ViT3(Backbone):
    """ViT3 in timm's conventions, as a `PlainBackbone`; no parameter depends on the image size.

    Args:
        num_heads: heads of the inner gated linear unit.
        kwargs: see `Backbone`; `pool` is always the mean.
    """

    def __init__(self, *, num_heads: int = 6, **kwargs: Any):
        super().__init__(pool="mean", **kwargs)
        self.num_heads = num_heads
        self.blocks = nn.ModuleList(ViT3Block(self.embed_dim, num_heads, rate) for rate in self.drop_path_rates)
        self.norm = nn.LayerNorm(self.embed_dim, eps=EPS)
        self.init_weights()

    def init_weights(self) -> None:
        """Linear trunc_normal 0.02 with zero bias, convolutions by PyTorch's default; TTT blocks initialise their fast weights."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)

    def param_terms(self) -> dict[str, int]:
        """Named counts of parameters that add up to the model's own."""
        C, L, d = self.embed_dim, self.depth, self.embed_dim // self.num_heads
        qkv, proj = 3 * C + 3 * d, C + d  # outputs of the first linear layer, inputs of the second
        return {
            "patch_embed": self.patch_embed.weight.numel() + C,
            "cpe": L * (9 * C + C),
            "layer_norms": L * 4 * C + 2 * C,
            "projections": L * ((C + 1) * qkv + (proj + 1) * C),
            "inner_start": L * (2 * C * d + 9 * d),
            "mlp": L * (8 * C * C + 5 * C),
            "head": self.num_classes * (C + 1),
        }

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Named counts of multiply-adds for one image of (H, W) pixels.

        The inner step has 6·N·C·d in the heads (K, its transpose and Q, each with two d x d matrices) and 2·9·N·d in the
        convolution (the gradient of its window, and its output); the damping is element-wise and free.
        """
        C, L, d = self.embed_dim, self.depth, self.embed_dim // self.num_heads
        h, w = self.grid_of(*image_size)
        N = h * w
        return {
            "patch_embed": N * self.patch_embed.weight.numel(),
            "cpe": L * N * 9 * C,
            "projections": L * N * C * (3 * C + 3 * d + C + d),
            "inner_glu": L * 6 * N * C * d,
            "inner_conv": L * 2 * 9 * N * d,
            "mlp": L * N * 8 * C * C,
            "head": C * self.num_classes,
        }


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
