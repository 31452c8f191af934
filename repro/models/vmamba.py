"""VMamba: selective scans along the rows and the columns of a grid, each forward and back; VMamba-T/S/B and a nano.

These are the v2 models of its release (`v05_noz`): no gate, one state per channel, an MLP in every block. The modules
of a block's scan have the names of the release. `import repro.models` registers the models with timm.

Shape suffixes: B images, L = h·w positions, C width of a stage, E channels of the scan, K routes, N states, R rank of
the step size's projection. Inside a stage, maps are (B, h, w, C).
"""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm2d, Mlp
from torch import Tensor, nn

from kernels.selective_scan import selected_backend, selective_scan_routes

from .backbone import register_sizes
from .hierarchy import Hierarchy, Stage, rename_by_pattern
from .image_model import Grid
from .vim import at_least_fp32, init_step_bias

STATE_DIM = 1  # N
MLP_RATIO = 4  # hidden width of an MLP as a multiple of C
EPS = 1e-5  # of all norms
# routes: rows, columns, reversed rows, reversed columns; that is two sequences, each scanned in both directions. They
# must alternate: `SS2D.forward` and `_add_routes` split the routes so
REVERSE = (False, False, True, True)
ROUTES, SEQUENCES = 4, 2


class SS2D(nn.Module):
    """Mixer SS2D: Linear, depth-wise 3x3 convolution and SiLU, sum of four selective scans, LayerNorm, Linear.

    All routes read the same channels. Each has its own projections to step size, B and C, its own rates and skips.

    Args:
        dim: width C.
        expand: ratio E/C.
    """

    def __init__(self, dim: int, expand: int):
        super().__init__()
        self.dim, self.inner, self.rank, self.backend = dim, expand * dim, -(-dim // 16), "auto"
        E, N, R = self.inner, STATE_DIM, self.rank
        self.in_proj = nn.Linear(dim, E, bias=False)
        self.conv2d = nn.Conv2d(E, E, 3, padding=1, groups=E, bias=False)
        self.x_proj_weight = nn.Parameter(torch.empty(ROUTES, R + 2 * N, E))
        self.dt_projs_weight = nn.Parameter(torch.empty(ROUTES, E, R))
        self.dt_projs_bias = nn.Parameter(torch.empty(ROUTES, E))
        self.A_logs = nn.Parameter(torch.empty(ROUTES * E, N))
        self.Ds = nn.Parameter(torch.empty(ROUTES * E))
        self.out_norm = nn.LayerNorm(E, eps=EPS)
        self.out_proj = nn.Linear(E, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters of the scan; the convolution keeps PyTorch's default.

        The projections of the scan are plain parameters. As Linear layers they would lose these values to
        `Hierarchy.init_weights`, which also sets biases to 0.
        """
        for weight, fan_in in ((self.x_proj_weight, self.inner), (self.dt_projs_weight, self.rank)):
            nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5)
        init_step_bias(self.dt_projs_bias)
        nn.init.zeros_(self.A_logs)  # log of the state index, which is 1
        nn.init.ones_(self.Ds)

    def forward(self, x: Tensor) -> Tensor:
        """Map a normalised map (B, h, w, C) to the same shape, in its dtype or autocast's."""
        B, h, w, _ = x.shape
        E, N, R, L = self.inner, STATE_DIM, self.rank, h * w
        v = F.silu(self.conv2d(self.in_proj(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        u_BL2E = _to_sequences(v)
        rows = u_BL2E.view(B * L, SEQUENCES, E).transpose(0, 1)
        # one product for both routes of a sequence, by weights (2, 2·(R + 2N), E); `parts` (K, B·L, R + 2N) is then in
        # the order of REVERSE
        weight = self.x_proj_weight.unflatten(0, (-1, SEQUENCES)).transpose(0, 1).flatten(1, 2)
        parts = torch.bmm(rows, weight.mT).unflatten(-1, (-1, R + 2 * N)).permute(2, 0, 1, 3).flatten(0, 1)
        low, B_rows, C_rows = parts.split((R, N, N), dim=-1)
        delta = torch.bmm(low, self.dt_projs_weight.mT)
        delta, B_BLKN, C_BLKN = (part.unflatten(1, (B, L)).permute(1, 2, 0, 3) for part in (delta, B_rows, C_rows))
        A = -torch.exp(at_least_fp32(self.A_logs)).view(ROUTES, E, N)
        skip, bias = self.Ds.view(ROUTES, E), self.dt_projs_bias
        # full precision, because fp16 overflows before the norm
        options = {"reverse": REVERSE, "full_precision": True, "backend": self.backend}
        y = selective_scan_routes(u_BL2E, delta, A, B_BLKN, C_BLKN, skip, None, bias, **options)
        # the norm's own dtype, or the scan's if the norm was replaced by a layer without parameters
        dtype = next(self.out_norm.parameters(), self.Ds).dtype
        return self.out_proj(self.out_norm(_add_routes(y, (h, w)).to(dtype)).to(v.dtype))

    def selected_backend(self, dtype: torch.dtype) -> str:
        """Return the backend of the selective scan that runs here for activations of `dtype`.

        `set_backend` finds a layer by the name of this method.
        """
        return selected_backend(self.backend, self.A_logs.device, state_dim=STATE_DIM, dtype=dtype)


def _to_sequences(x: Tensor) -> Tensor:
    """Flatten a map (B, h, w, E) row-major and column-major: (B, L, 2, E)."""
    return torch.stack((x.flatten(1, 2), x.transpose(1, 2).flatten(1, 2)), 2)


def _add_routes(y: Tensor, grid: Grid) -> Tensor:
    """Sum the routes' outputs (B, L, K, E), each in the order of its sequence, on the grid: (B, h, w, E)."""
    by_rows, by_columns = y.unflatten(2, (-1, SEQUENCES)).sum(2).unbind(2)
    return by_rows.unflatten(1, grid) + by_columns.unflatten(1, grid[::-1]).transpose(1, 2)


class VMambaBlock(nn.Module):
    """x + SS2D(LN(x)), then x + MLP(LN(x)), each with stochastic depth."""

    def __init__(self, dim: int, expand: int, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.mixer = SS2D(dim, expand)
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = Mlp(dim, MLP_RATIO * dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, h, w, C) to the same shape."""
        x = x + self.drop_path(self.mixer(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VMambaStage(Stage):
    """Stage with channels-last blocks, the layout of linear layers and the scan."""

    def forward(self, x: Tensor, *, recompute: bool = False) -> Tensor:
        """Map (B, C, h, w) to the same shape, a channels-last view."""
        return self.run_blocks(x.permute(0, 2, 3, 1), recompute=recompute).permute(0, 3, 1, 2)


class VMamba(Hierarchy):
    """VMamba in timm's conventions; no parameter depends on the image size, and no map is padded.

    Args:
        expand: ratio E/C of the scan's channels to the stage's.
        kwargs: see `Hierarchy`.
    """

    param_patterns: ClassVar = {
        "stem": r"^patch_embed\.conv",
        "downsampling": r"\.downsample\.conv\.",
        "layer_norms": "norm",
        "projections": r"\.mixer\.(in|out)_proj\.",
        "depthwise": r"\.mixer\.conv2d\.",
        "scan": r"\.mixer\.(x_proj|dt_proj|A_log|D)",
        "mlp": r"\.mlp\.",
        "head": r"^head\.",
    }

    def __init__(self, *, expand: int = 2, **kwargs: Any):
        super().__init__(**kwargs)
        self.expand = expand
        C = self.widths[0]
        self.patch_embed = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(self.in_chans, C // 2, 3, stride=2, padding=1),
                norm1=LayerNorm2d(C // 2, eps=EPS),
                act=nn.GELU(),
                conv2=nn.Conv2d(C // 2, C, 3, stride=2, padding=1),
                norm2=LayerNorm2d(C, eps=EPS),
            )
        )
        leads = [*(_downsampling(before, after) for before, after in pairwise(self.widths)), None]
        self.stages = nn.ModuleList(
            VMambaStage([VMambaBlock(width, expand, rate) for rate in rates], lead)
            for width, rates, lead in zip(self.widths, self.drop_path_rates, leads, strict=True)
        )
        self.norm = LayerNorm2d(self.num_features, eps=EPS)
        self.init_weights()

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds for one image of (H, W) pixels; the scan has 4 per state and route."""
        sizes, layers = self._layer_macs(image_size)
        return layers | {"scan": 4 * self._count_scanned(sizes) * STATE_DIM}

    def paper_mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Return the counts by fvcore's convention, which the authors and Table 1 use for VMamba's FLOPs.

        Besides convolutions and linear layers, each output element of a LayerNorm counts 5, each input element of the
        pooling 1, and the scan 9·N + 1 per position, channel and route. `bench.flops` finds the method by its name.
        """
        sizes, layers = self._layer_macs(image_size)
        C, (height, width) = self.widths[0], (-(-side // 2) for side in image_size)
        # outputs of the LayerNorms of the stem, the downsampling, the blocks (the third one of E channels) and the end
        normed = height * width * (C // 2) + sizes[0] * C
        normed += sum(L * C for L, C in zip(sizes[1:], self.widths[1:], strict=True))
        normed += sum(
            L * depth * (2 + self.expand) * C for L, depth, C in zip(sizes, self.depths, self.widths, strict=True)
        )
        normed += sizes[-1] * self.num_features
        return layers | {
            "scan": (9 * STATE_DIM + 1) * self._count_scanned(sizes),
            "layer_norm": 5 * normed,
            "pooling": sizes[-1] * self.num_features,
        }

    def _count_scanned(self, sizes: Sequence[int]) -> int:
        """Count the scanned elements of an image, over positions, channels, routes and blocks; see `_layer_macs`."""
        return sum(
            L * depth * ROUTES * self.expand * C for L, depth, C in zip(sizes, self.depths, self.widths, strict=True)
        )

    def _layer_macs(self, image_size: Grid) -> tuple[list[int], dict[str, int]]:
        """Return the positions of each stage, and the multiply-adds of convolutions and linear layers."""
        sizes = [h * w for h, w in self.grids_of(*image_size)]
        height, width = (-(-side // 2) for side in image_size)
        C = self.widths[0]
        terms = {"stem": height * width * 9 * self.in_chans * (C // 2) + sizes[0] * 9 * (C // 2) * C}
        terms |= dict.fromkeys(("downsampling", "projections", "depthwise", "scan_projections", "mlp"), 0)
        for L, C, depth in zip(sizes, self.widths, self.depths, strict=True):
            E, R = self.expand * C, -(-C // 16)
            terms["projections"] += depth * L * 2 * C * E
            terms["depthwise"] += depth * L * 9 * E
            terms["scan_projections"] += depth * L * ROUTES * E * (R + 2 * STATE_DIM + R)
            terms["mlp"] += depth * L * 2 * MLP_RATIO * C * C
        for L, (before, C) in zip(sizes[1:], pairwise(self.widths), strict=True):
            terms["downsampling"] += L * 9 * before * C
        return sizes, terms | {"head": self.num_features * self.num_classes}


def _downsampling(before: int, after: int) -> nn.Sequential:
    """Build the layers between two stages, by their widths: a 3x3 convolution of stride 2, and a norm."""
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(before, after, 3, stride=2, padding=1), norm=LayerNorm2d(after, eps=EPS))
    )


# official names -> ours, for `rename_by_pattern`
_RENAMED = {
    r"^patch_embed\.0\.": "patch_embed.conv1.",
    r"^patch_embed\.2\.": "patch_embed.norm1.",
    r"^patch_embed\.5\.": "patch_embed.conv2.",
    r"^patch_embed\.7\.": "patch_embed.norm2.",
    r"^layers\.(\d+)\.downsample\.1\.": r"stages.\1.downsample.conv.",
    r"^layers\.(\d+)\.downsample\.3\.": r"stages.\1.downsample.norm.",
    r"^layers\.(\d+)\.blocks\.(\d+)\.norm\.": r"stages.\1.blocks.\2.norm1.",
    r"^layers\.(\d+)\.blocks\.(\d+)\.op\.": r"stages.\1.blocks.\2.mixer.",
    r"^layers\.": "stages.",
    r"^classifier\.": "",
}
# linear layers that the release may keep as 1x1 convolutions
_LINEAR = re.compile(r"\.(in_proj|out_proj|fc1|fc2)\.weight$")


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict.

    Linear layers that the file stores as 1x1 convolutions (out, in, 1, 1) become (out, in).
    """
    found = rename_by_pattern(state_dict, _RENAMED)
    return {
        key: value[..., 0, 0] if _LINEAR.search(key) and value.shape[2:] == (1, 1) else value
        for key, value in found.items()
    }


_SMALL = {"widths": (96, 192, 384, 768)}
register_sizes(
    VMamba,
    {
        # 30.249 M parameters; the release's `s1l8`, drop path 0.2
        "vmamba_tiny_224": {**_SMALL, "depths": (2, 2, 8, 2), "expand": 1},
        "vmamba_small_224": {**_SMALL, "depths": (2, 2, 15, 2)},  # 50.148 M; `s2l15`, drop path 0.3
        # 88.558 M; `s2l15`, drop path 0.6
        "vmamba_base_224": {"widths": (128, 256, 512, 1024), "depths": (2, 2, 15, 2)},
        # for tests and the embedded data sets: grids of 36, 18, 9 and 5 positions a side
        "vmamba_nano_144": {"img_size": 144, "widths": (16, 32, 64, 128), "depths": (1, 1, 2, 1), "expand": 1},
    },
    first_conv="patch_embed.conv1",
)
