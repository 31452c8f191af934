"""H-ViT3, the hierarchical ViT3: H-ViT3-T/S/B, and a nano for tests and the embedded data sets.

Each stage uses the TTT block of ViT3, with rotary position embeddings (RoPE) of its queries and keys. The stem, the
downsampling and the MLP are convolutional. `import repro.models` registers the models with timm.

Shape suffixes: B batch, N tokens (h·w), C width of a stage, d head dimension.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from .backbone import register_sizes, rename_prefixes
from .hierarchy import Hierarchy, Stage
from .image_model import Grid
from .shell import build_cpe
from .vit3 import InnerTraining, Rotation

EPS = 1e-5  # eps of the LayerNorms, as in the release
_ROTARY_BASE = 10000.0  # base of RoPE's frequencies


def rotations(grid: Grid, dim: int, *, dtype: torch.dtype, device: torch.device) -> Rotation:
    """Compute the cosines and sines, each (h·w, C/2), of the angles by which RoPE turns channel pairs, C = `dim`.

    With m = C/4 and θ_j = 10000^(−j/m), the first m pairs of the token in row y and column x are turned by y·θ_j and
    the other m by x·θ_j. C is the width of all heads together, so the first half of the heads encodes the row and the
    second half the column.
    """
    (h, w), m = grid, dim // 4
    theta = _ROTARY_BASE ** (-torch.arange(m, dtype=dtype, device=device) / m)
    rows, columns = (torch.arange(n, dtype=dtype, device=device)[:, None] * theta for n in grid)
    cos, sin = (
        torch.cat((turn(rows)[:, None].expand(h, w, m), turn(columns).expand(h, w, m)), dim=-1).flatten(0, 1)
        for turn in (torch.cos, torch.sin)
    )
    return cos, sin


class PaddedConvs(nn.Module):
    """Convolutions on maps that are zero-padded at the right and at the bottom to multiples of the stride."""

    def __init__(self, stride: int, *layers: nn.Module):
        super().__init__()
        self.stride, self.conv = stride, nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', ⌈H/stride⌉, ⌈W/stride⌉)."""
        down, right = (-side % self.stride for side in x.shape[-2:])
        return self.conv(F.pad(x, (0, right, 0, down)) if down or right else x)


class ConvMlp(nn.Module):
    """MLP with a depth-wise 3x3 convolution: u = GELU(fc1 x), u = GELU(u + dwc(u)), fc2 u, hidden width 4C."""

    def __init__(self, dim: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dwc = nn.Conv2d(4 * dim, 4 * dim, 3, padding=1, groups=4 * dim)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Map tokens (B, N, C), row-major on an (h, w) grid, to (B, N, C)."""
        hidden = F.gelu(self.fc1(tokens))
        hidden = F.gelu(hidden + _to_tokens(self.dwc(_to_map(hidden, grid))))
        return self.fc2(hidden)


class HViT3Block(nn.Module):
    """Depth-wise convolution (CPE), TTT block and MLP, all residual; the last two after a LayerNorm."""

    def __init__(self, dim: int, num_heads: int, drop_path: float):
        super().__init__()
        self.cpe = build_cpe(dim)
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.attn = InnerTraining(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = ConvMlp(dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Map (B, C, h, w) to the same shape; `rotation` has the RoPE angles of the grid."""
        grid = x.shape[-2:]
        tokens = _to_tokens(x + self.cpe(x))
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens), grid, rotation))
        return _to_map(tokens + self.drop_path(self.mlp(self.norm2(tokens), grid)), grid)


class HViT3Stage(Stage):
    """Stage whose blocks share the RoPE angles of its grid."""

    def forward(self, x: Tensor, *, recompute: bool = False) -> Tensor:
        """Map (B, C, h, w) to the same shape; the angles are computed once, in at least fp32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        rotation = rotations(tuple(x.shape[-2:]), x.shape[1], dtype=dtype, device=x.device)
        # in channels-last layout, maps and tokens are views of each other
        return self.run_blocks(x.contiguous(memory_format=torch.channels_last), rotation, recompute=recompute)


class HViT3(Hierarchy):
    """H-ViT3 in timm's conventions. No parameter and no buffer depends on the image size.

    The stem pads images to multiples of 4, and each downsampling pads odd grids to even ones.

    Args:
        num_heads: heads of the inner gated linear unit, one number per stage.
        kwargs: see `Hierarchy`.

    Raises:
        ValueError: a width that is not a multiple of 4, or not of its heads.
    """

    param_patterns: ClassVar = {
        "stem": r"^patch_embed\.",
        "downsampling": r"\.downsample\.",
        "cpe": r"\.cpe\.",
        "layer_norms": r"\.norm[12]\.",
        "projections": r"\.attn\.(qkv|proj)\.",
        "inner_start": r"\.attn\.w",
        "mlp": r"\.mlp\.",
        "batch_norm": r"^norm\.",
        "head": r"^head\.",
    }

    def __init__(self, *, num_heads: Sequence[int], **kwargs: Any):
        super().__init__(**kwargs)
        if odd := [width for width in self.widths if width % 4]:
            raise ValueError(f"width {odd[0]} is not a multiple of 4, as rotations by row and by column need")
        if len(num_heads) != len(self.widths):
            raise ValueError(f"num_heads {list(num_heads)}: expected one for each of the {len(self.widths)} stages")
        self.num_heads = tuple(num_heads)
        self.patch_embed = _stem(self.in_chans, self.widths[0])
        leads = [*(_downsampling(before, after) for before, after in pairwise(self.widths)), None]
        self.stages = nn.ModuleList(
            HViT3Stage([HViT3Block(width, heads, rate) for rate in rates], lead)
            for width, heads, rates, lead in zip(self.widths, num_heads, self.drop_path_rates, leads, strict=True)
        )
        self.norm = nn.BatchNorm2d(self.num_features)
        self.init_weights()

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds for one image of (H, W) pixels.

        `InnerTraining.mac_terms` counts the TTT blocks. Padded positions count, too.
        """
        grids = self.grids_of(*image_size)
        sizes = [h * w for h, w in grids]
        e, half = self.widths[0], self.widths[0] // 2
        terms = {"stem": sizes[0] * (4 * (9 * self.in_chans * half + 2 * 9 * half**2) + 9 * half * 4 * e + 4 * e * e)}
        terms |= dict.fromkeys(("downsampling", "cpe", "projections", "inner_glu", "inner_conv", "mlp"), 0)
        for grid, N, C, L, stage in zip(grids, sizes, self.widths, self.depths, self.stages, strict=True):
            terms["cpe"] += L * N * 9 * C
            for name, count in stage.blocks[0].attn.mac_terms(grid).items():
                terms[name] += L * count
            terms["mlp"] += L * N * (8 * C * C + 9 * 4 * C)
        for N, (before, C) in zip(sizes[1:], pairwise(self.widths), strict=True):
            terms["downsampling"] += 4 * N * before * 4 * C + N * (9 * 4 * C + 4 * C * C)
        return terms | {"head": self.num_features * self.num_classes}


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the official state dict, and drop its tables of rotations, which belong to one image size."""
    kept = {key: value for key, value in state_dict.items() if not key.endswith("rope.rotations")}
    return rename_prefixes(kept, {"layers.": "stages."})


def _stem(in_chans: int, dim: int) -> PaddedConvs:
    """Build the layers from images to the first stage's map: four 3x3 convolutions, two of stride 2, and a 1x1 one."""
    half = dim // 2
    first = [_conv(before, half, stride) for before, stride in ((in_chans, 2), (half, 1), (half, 1))]
    return PaddedConvs(4, *first, _conv(half, 4 * dim, 2), _conv(4 * dim, dim, kernel=1, act=False))


def _downsampling(before: int, after: int) -> PaddedConvs:
    """Build the layers between two stages, by their widths: an inverted bottleneck of stride 2."""
    hidden = 4 * after
    wide = (
        _conv(before, hidden, kernel=1, bias=True, norm=False),
        _conv(hidden, hidden, 2, groups=hidden, bias=True, norm=False),
    )
    return PaddedConvs(2, *wide, _conv(hidden, after, kernel=1, bias=True, act=False))


def _conv(
    before: int,
    after: int,
    stride: int = 1,
    *,
    kernel: int = 3,
    groups: int = 1,
    bias: bool = False,
    norm: bool = True,
    act: bool = True,
) -> nn.Sequential:
    """Build a convolution with optional BatchNorm and ReLU."""
    layers = OrderedDict(conv=nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=bias))
    if norm:
        layers["norm"] = nn.BatchNorm2d(after)
    if act:
        layers["act"] = nn.ReLU()
    return nn.Sequential(layers)


def _to_tokens(x: Tensor) -> Tensor:
    """Flatten (B, C, h, w) to (B, h·w, C)."""
    return x.flatten(2).transpose(1, 2)


def _to_map(tokens: Tensor, grid: Grid) -> Tensor:
    """View tokens (B, h·w, C) as a channels-last map (B, C, h, w)."""
    # unflatten before permute, so that the batch stride of a single image is that of a whole image; with another
    # stride, BatchNorm2d returns wrong gradients
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


_SMALL = {"widths": (64, 128, 320, 512), "num_heads": (2, 4, 10, 16)}
register_sizes(
    HViT3,
    {
        # 28.704 M parameters; the paper's recipe has drop path 0.2
        "hvit3_tiny_224": {**_SMALL, "depths": (1, 3, 9, 4)},
        "hvit3_small_224": {**_SMALL, "depths": (2, 6, 18, 8)},  # 54.362 M; drop path 0.4
        # 94.369 M; 0.6
        "hvit3_base_224": {"widths": (96, 192, 448, 640), "num_heads": (3, 6, 14, 20), "depths": (2, 6, 18, 8)},
        # for tests and the embedded data sets: grids of 36, 18, 9 and 5 tokens a side
        "hvit3_nano_144": {
            "img_size": 144,
            "widths": (16, 32, 64, 96),
            "num_heads": (1, 2, 4, 6),
            "depths": (1, 1, 2, 1),
        },
    },
    first_conv="patch_embed.conv.0.conv",
)
