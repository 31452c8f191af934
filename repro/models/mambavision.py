"""MambaVision: two stages of convolutions, then two of windows, which a selective scan mixes first and attention after
it.

The models are MambaVision-T/S/B and a nano. The modules of a block have the names of the release. `import repro.models`
registers the models with timm.

Shape suffixes: B images, b windows of all images, L = w² tokens of a window, C width of a stage, E = C/2 channels of
the scan, N states, R rank of the step size's projection.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import Attention, DropPath, LayerScale, Mlp
from torch import Tensor, nn

from kernels.selective_scan import selected_backend, selective_scan

from .as_built import are_as_built, built_conv, find_bias
from .backbone import register_sizes
from .hierarchy import Hierarchy, Stage, rename_by_pattern
from .image_model import Grid
from .vim import at_least_fp32

STATE_DIM = 8  # N
CONV_KERNEL = 3  # tokens
# the convolutions as built, by their names in the mixer; `are_as_built` compares with them
_CONVS = dict.fromkeys(("conv1d_x", "conv1d_z"), built_conv(nn.Conv1d, CONV_KERNEL, 0, bias=False))
MLP_RATIO = 4  # hidden width of an MLP as a multiple of C
EPS = 1e-5  # of all norms but the stem's
STEM_EPS = 1e-4
FIRST_OF_WINDOWS = 2  # index of the first stage with windows


class ConvBlock(nn.Module):
    """x + BN(conv(GELU(BN(conv(x))))) with 3x3 convolutions, tanh-approximated GELU and stochastic depth."""

    def __init__(self, dim: int, drop_path: float):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim, eps=EPS)
        self.act = nn.GELU(approximate="tanh")
        self.conv2, self.norm2 = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim, eps=EPS)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, h, w) to the same shape."""
        return x + self.drop_path(self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


class MambaVisionMixer(nn.Module):
    """Linear, two branches of half the channels with Conv1d and SiLU, a selective scan of one branch, join, Linear.

    The convolutions reach one token to each side. The scan has one direction and no gate. Its step size is softplus of
    the projection plus twice the bias: the release adds the bias in the projection and again in the scan, and its
    weights were trained with that. A new model's step size starts at softplus(0), since `Hierarchy.init_weights` zeroes
    this bias, too.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.inner, self.rank, self.backend = dim // 2, -(-dim // 16), "auto"
        E, N, R = self.inner, STATE_DIM, self.rank
        self.in_proj = nn.Linear(dim, dim, bias=False)
        self.conv1d_x = nn.Conv1d(E, E, CONV_KERNEL, groups=E, bias=False)
        self.conv1d_z = nn.Conv1d(E, E, CONV_KERNEL, groups=E, bias=False)
        self.x_proj = nn.Linear(E, R + 2 * N, bias=False)
        self.dt_proj = nn.Linear(R, E)
        self.A_log = nn.Parameter(torch.arange(1.0, N + 1).log().repeat(E, 1))
        self.D = nn.Parameter(torch.ones(E))
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x_bLC: Tensor) -> Tensor:
        """Map normalised tokens (b, L, C) of windows, row-major, to (b, L, C), in their dtype or autocast's."""
        u_bLE, z_bLE = F.silu(self._convolve(self.in_proj(x_bLC).transpose(1, 2))).transpose(1, 2).chunk(2, dim=-1)
        low, B_bLN, C_bLN = self.x_proj(u_bLE).split((self.rank, STATE_DIM, STATE_DIM), dim=-1)
        A = -torch.exp(at_least_fp32(self.A_log))
        # `dt_proj` has added its bias already; the scan adds it again, as in the release
        delta, bias = self.dt_proj(low), find_bias(self.dt_proj, low.new_zeros(self.rank))
        y = selective_scan(u_bLE, delta, A, B_bLN, C_bLN, self.D, None, bias, backend=self.backend)
        return self.out_proj(torch.cat((y, z_bLE), dim=-1))

    def _convolve(self, x_bCL: Tensor) -> Tensor:
        """Convolve both branches, half of the channels each: (b, C, L) -> (b, C, L).

        Convolutions that were replaced or have hooks are called, so that these take effect.
        """
        reach = CONV_KERNEL // 2
        if not are_as_built(self, _CONVS):
            branches = F.pad(x_bCL, (reach, reach)).chunk(2, dim=1)
            return torch.cat((self.conv1d_x(branches[0]), self.conv1d_z(branches[1])), dim=1)
        # one convolution for both branches; as a 2-D convolution of height 1 it needs no transposed copy
        weight = torch.cat((self.conv1d_x.weight, self.conv1d_z.weight)).unsqueeze(2)
        return F.conv2d(x_bCL.unsqueeze(2), weight, padding=(0, reach), groups=len(weight)).squeeze(2)

    def selected_backend(self, dtype: torch.dtype) -> str:
        """Return the backend of the selective scan that runs here for activations of `dtype`.

        `set_backend` finds a layer by the name of this method.
        """
        return selected_backend(self.backend, self.A_log.device, state_dim=STATE_DIM, dtype=dtype)


class WindowBlock(nn.Module):
    """x + g1 · Mixer(LN(x)), then x + g2 · MLP(LN(x)), with stochastic depth; g1 and g2 are the layer scale.

    Args:
        mixer: a scan or attention.
        layer_scale: initial value of g1 and g2; None for no layer scale.
    """

    def __init__(self, dim: int, mixer: nn.Module, layer_scale: float | None, drop_path: float):
        super().__init__()
        self.norm1, self.mixer = nn.LayerNorm(dim, eps=EPS), mixer
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=EPS), Mlp(dim, MLP_RATIO * dim)
        self.ls1, self.ls2 = (LayerScale(dim, layer_scale) if layer_scale else nn.Identity() for _ in range(2))
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (b, L, C) of windows to the same shape."""
        tokens = tokens + self.drop_path(self.ls1(self.mixer(self.norm1(tokens))))
        return tokens + self.drop_path(self.ls2(self.mlp(self.norm2(tokens))))


class WindowStage(Stage):
    """Stage that cuts its map into windows, runs all blocks on them, and joins the windows again.

    The map is zero-padded at the right and at the bottom to multiples of the window; padded positions are tokens, too.
    """

    def __init__(self, blocks: Sequence[nn.Module], downsample: nn.Module | None, window: int):
        super().__init__(blocks, downsample)
        self.window = window

    def forward(self, x: Tensor, *, recompute: bool = False) -> Tensor:
        """Map (B, C, h, w) to the same shape, a channels-last view."""
        side, (h, w) = self.window, x.shape[-2:]
        rows, columns = -(-h // side), -(-w // side)
        if (rows * side, columns * side) != (h, w):
            x = F.pad(x, (0, columns * side - w, 0, rows * side - h))
        # (B, rows, columns, side, side, C)
        windows = x.permute(0, 2, 3, 1).unflatten(2, (columns, side)).unflatten(1, (rows, side)).transpose(2, 3)
        tokens = self.run_blocks(windows.flatten(3, 4).flatten(0, 2), recompute=recompute)
        joined = (
            tokens.view(-1, rows, columns, side, side, tokens.shape[-1]).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        )
        return joined[:, :h, :w].permute(0, 3, 1, 2)


class MambaVision(Hierarchy):
    """MambaVision in timm's conventions.

    No parameter depends on the image size or the windows, but the output depends on the windows. In a window stage of
    d blocks, the first ⌈d/2⌉ blocks scan and the others use attention.

    Args:
        stem: channels after the first convolution.
        num_heads, windows: attention heads and window sides of the last two stages. At 224 pixels the default windows
            are the whole grids; the release enlarges them for dense tasks.
        layer_scale: initial layer scale of the last two stages; None for no layer scale.
        kwargs: see `Hierarchy`.

    Raises:
        ValueError: a width that is not a multiple of its heads, or a window smaller than 1.
    """

    param_patterns: ClassVar = {
        "stem": r"^patch_embed\.conv",
        "conv_blocks": r"\.blocks\.\d+\.conv",
        "downsampling": r"\.downsample\.",
        "batch_norms": r"^patch_embed\.norm|^stages\.[01]\.blocks\.\d+\.norm|^norm\.",
        "scan_projections": r"\.mixer\.(in|out)_proj\.",
        "conv1d": r"\.mixer\.conv1d_",
        "scan": r"\.mixer\.(x_proj|dt_proj|A_log|D)",
        "attention": r"\.mixer\.(qkv|proj)\.",
        "layer_norms": r"\.norm[12]\.",
        "mlp": r"\.mlp\.",
        "layer_scale": r"\.ls[12]\.",
        "head": r"^head\.",
    }

    def __init__(
        self,
        *,
        stem: int = 64,
        num_heads: Sequence[int] = (8, 16),
        windows: Sequence[int] = (14, 7),
        layer_scale: float | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        later = self.widths[FIRST_OF_WINDOWS:]
        if not len(num_heads) == len(windows) == len(later):
            raise ValueError(
                f"num_heads {list(num_heads)} and windows {list(windows)}: expected one of each for the last two stages"
            )
        if bad := [side for side in windows if side < 1]:
            raise ValueError(f"windows {list(windows)}: a side is {bad[0]}, expected at least 1")
        if odd := [(width, heads) for width, heads in zip(later, num_heads, strict=True) if width % heads or width % 2]:
            raise ValueError(f"width {odd[0][0]} is not a multiple of 2 and of its {odd[0][1]} heads")
        self.stem, self.windows, self.layer_scale = stem, tuple(windows), layer_scale
        convs = OrderedDict()
        for number, (before, after) in enumerate(((self.in_chans, stem), (stem, self.widths[0])), 1):
            convs[f"conv{number}"] = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
            convs[f"norm{number}"] = nn.BatchNorm2d(after, eps=STEM_EPS)
            convs[f"act{number}"] = nn.ReLU()
        self.patch_embed = nn.Sequential(convs)
        leads = [
            *(nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False) for before, after in pairwise(self.widths)),
            None,
        ]
        stages: list[Stage] = []
        for i, (width, rates, lead) in enumerate(zip(self.widths, self.drop_path_rates, leads, strict=True)):
            if i < FIRST_OF_WINDOWS:
                stages.append(Stage([ConvBlock(width, rate) for rate in rates], lead))
                continue
            mixers = [MambaVisionMixer(width) for _ in range(scan_blocks(len(rates)))]
            heads = num_heads[i - FIRST_OF_WINDOWS]
            mixers += [Attention(width, num_heads=heads, qkv_bias=True) for _ in range(len(rates) - len(mixers))]
            blocks = [WindowBlock(width, mixer, layer_scale, rate) for mixer, rate in zip(mixers, rates, strict=True)]
            stages.append(WindowStage(blocks, lead, windows[i - FIRST_OF_WINDOWS]))
        self.stages = nn.ModuleList(stages)
        self.norm = nn.BatchNorm2d(self.num_features, eps=EPS)
        self.init_weights()

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds for an image of (H, W) pixels, padded positions of windows included.

        The scan has 4 per token, channel and state.
        """
        stages = self._window_stages(image_size)
        return self.paper_mac_terms(image_size) | {
            "conv1d": sum(scans * tokens * CONV_KERNEL * C for tokens, _, C, scans, _ in stages),
            "scan": sum(scans * tokens * 4 * (C // 2) * STATE_DIM for tokens, _, C, scans, _ in stages),
            # qkᵀ, and the sum of the values
            "attention_products": sum(others * tokens * 2 * window * C for tokens, window, C, _, others in stages),
        }

    def paper_mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Return the counts by the authors' convention: 2-D convolutions and linear layers alone.

        `bench.flops` finds the method by its name.
        """
        sizes = [h * w for h, w in self.grids_of(*image_size)]
        height, width = (-(-side // 2) for side in image_size)
        stages, N = self._window_stages(image_size), STATE_DIM
        convs = list(zip(self.depths, sizes, self.widths, strict=True))[:FIRST_OF_WINDOWS]
        downsampled = zip(sizes[1:], pairwise(self.widths), strict=True)
        return {
            "stem": height * width * 9 * self.in_chans * self.stem + sizes[0] * 9 * self.stem * self.widths[0],
            "conv_blocks": sum(depth * L * 18 * C * C for depth, L, C in convs),
            "downsampling": sum(L * 9 * before * C for L, (before, C) in downsampled),
            # of a scan: from and to C channels; from E = C/2 to the low rank ⌈C/16⌉, B and C, and from the low rank to E
            "scan_projections": sum(
                scans * tokens * (2 * C * C + C // 2 * (2 * -(-C // 16) + 2 * N)) for tokens, _, C, scans, _ in stages
            ),
            "attention": sum(others * tokens * 4 * C * C for tokens, _, C, _, others in stages),
            "mlp": sum((scans + others) * tokens * 2 * MLP_RATIO * C * C for tokens, _, C, scans, others in stages),
            "head": self.num_features * self.num_classes,
        }

    def _window_stages(self, image_size: Grid) -> list[tuple[int, int, int, int, int]]:
        """Return (tokens of all windows of an image, tokens of one window, width, scans, other blocks) of each stage.

        These are the stages with windows.
        """
        found = []
        stages = list(zip(self.grids_of(*image_size), self.widths, self.depths, strict=True))[FIRST_OF_WINDOWS:]
        for ((h, w), C, depth), side in zip(stages, self.windows, strict=True):
            tokens, scans = -(-h // side) * -(-w // side) * side**2, scan_blocks(depth)
            found.append((tokens, side**2, C, scans, depth - scans))
        return found


def scan_blocks(depth: int) -> int:
    """Return how many of a window stage's blocks scan: the first half, rounded up."""
    return (depth + 1) // 2


# official names -> ours, for `rename_by_pattern`
_RENAMED = {
    r"^patch_embed\.conv_down\.0\.": "patch_embed.conv1.",
    r"^patch_embed\.conv_down\.1\.": "patch_embed.norm1.",
    r"^patch_embed\.conv_down\.3\.": "patch_embed.conv2.",
    r"^patch_embed\.conv_down\.4\.": "patch_embed.norm2.",
    r"^levels\.(\d+)\.downsample\.reduction\.0\.": r"stages.\1.downsample.",
    r"^levels\.(\d+)\.blocks\.(\d+)\.gamma_([12])$": r"stages.\1.blocks.\2.ls\3.gamma",
    r"^levels\.": "stages.",
}


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict.

    If some keys begin with `encoder.`, all others are dropped, as in the release. A missing `num_batches_tracked` of a
    BatchNorm becomes 0, which matters only for further training without momentum.
    """
    encoder = {key.removeprefix("encoder."): value for key, value in state_dict.items() if key.startswith("encoder.")}

    found = rename_by_pattern(encoder or state_dict, _RENAMED)
    for key in [key for key in found if key.endswith(".running_mean")]:
        found.setdefault(f"{key.removesuffix('running_mean')}num_batches_tracked", torch.tensor(0))
    return found


register_sizes(
    MambaVision,
    {
        # 31.794 M parameters; drop path 0.2
        "mambavision_tiny_224": {"widths": (80, 160, 320, 640), "stem": 32, "depths": (1, 3, 8, 4), "crop_pct": 1.0},
        "mambavision_small_224": {
            "widths": (96, 192, 384, 768),
            "depths": (3, 3, 7, 5),
            "crop_pct": 0.93,
        },  # 50.141 M; drop path 0.2
        # 97.685 M; drop path 0.3
        "mambavision_base_224": {
            "widths": (128, 256, 512, 1024),
            "depths": (3, 3, 10, 5),
            "layer_scale": 1e-5,
            "crop_pct": 1.0,
        },
        # for tests and the embedded data sets: grids of 36, 18, 9 and 5 positions a side
        "mambavision_nano_144": {
            "img_size": 144,
            "widths": (16, 32, 64, 128),
            "stem": 8,
            "depths": (1, 1, 2, 2),
            "num_heads": (2, 4),
            "windows": (9, 5),
        },
    },
    first_conv="patch_embed.conv1",
)
