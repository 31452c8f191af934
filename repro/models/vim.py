"""Vision Mamba (Vim): bidirectional selective scans, with a class token in the middle of the sequence; Vim-T/S/B and a
nano.

`import repro.models` registers the models with timm. The modules of a block have the names of the official release, so
its state dicts differ from ours only in the three prefixes that `official_state_dict` renames.

Shape suffixes: B images, T tokens, D width, E = 2·D channels of the scan, N states, R rank of the step size's
projection.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, lecun_normal_
from torch import Tensor, nn

from kernels.dispatch import compute_dtype
from kernels.selective_scan import selected_backend, selective_scan_bidir

from .as_built import Built, are_as_built, built_conv
from .backbone import (
    Backbone,
    call_scans,
    convolve_scans,
    insert_tokens,
    pad_for_scans,
    register_sizes,
    rename_prefixes,
    resample_positions,
)
from .image_model import Grid, init_linear

STATE_DIM = 16  # N
CONV_KERNEL = 4  # tokens
EXPAND = 2  # E/D
EPS = 1e-5  # of all norms
PAPER_SCAN_MACS = 18  # multiply-adds per token, channel and state of both directions, in Eq. 13 of Vision-TTT
# the layers as built, by their names in the mixer; `are_as_built` compares with them
_CONVS = dict.fromkeys(("conv1d", "conv1d_b"), built_conv(nn.Conv1d, CONV_KERNEL, 0, bias=True))
_PROJECTIONS = dict.fromkeys(("x_proj", "x_proj_b"), Built((nn.Linear,), False))
_PROJECTIONS |= dict.fromkeys(("dt_proj", "dt_proj_b"), Built((nn.Linear,), True))
_STEP_SIZES = 1e-3, 0.1  # range of the log-uniform initial step sizes of a scan


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast x to fp32 if its precision is lower; the residual stream and the norms need it."""
    return x.to(compute_dtype(x.dtype))


@torch.no_grad()
def init_step_bias(bias: Tensor) -> None:
    """Draw a bias of the step size, so that softplus of it is log-uniform in `_STEP_SIZES`, as in Mamba."""
    low, high = (math.log(size) for size in _STEP_SIZES)
    size = torch.empty_like(bias).uniform_(low, high).exp_().clamp_(min=1e-4)
    bias.copy_(size + torch.log(-torch.expm1(-size)))  # softplus⁻¹(size)


class RMSNorm(nn.RMSNorm):
    """x · rsqrt(mean(x²) + eps) · weight, computed in at least fp32 and returned in the dtype of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D), D the normalised width, to the same shape."""
        weight = at_least_fp32(self.weight)
        return F.rms_norm(at_least_fp32(x).to(weight.dtype), self.normalized_shape, weight, self.eps).to(
            self.weight.dtype
        )


class VimMixer(nn.Module):
    """Bidirectional Mamba mixer: Linear, causal Conv1d and SiLU, gated selective scans, mean of both, Linear.

    The directions share the projections of input, gate and output. Parameters with `_b` in their name belong to the
    backward direction. The initial output projection is divided by √depth, where `depth` is the number of blocks.
    """

    def __init__(self, dim: int, depth: int):
        super().__init__()
        self.dim, self.inner, self.rank, self.backend = dim, EXPAND * dim, -(-dim // 16), "auto"
        E, N, R = self.inner, STATE_DIM, self.rank
        self.in_proj = nn.Linear(dim, 2 * E, bias=False)
        self.conv1d = nn.Conv1d(E, E, CONV_KERNEL, groups=E)
        self.x_proj = nn.Linear(E, R + 2 * N, bias=False)
        self.dt_proj = nn.Linear(R, E)
        self.A_log = nn.Parameter(torch.empty(E, N))
        self.D = nn.Parameter(torch.empty(E))
        self.conv1d_b = nn.Conv1d(E, E, CONV_KERNEL, groups=E)
        self.x_proj_b = nn.Linear(E, R + 2 * N, bias=False)
        self.dt_proj_b = nn.Linear(R, E)
        self.A_b_log = nn.Parameter(torch.empty(E, N))
        self.D_b = nn.Parameter(torch.empty(E))
        self.out_proj = nn.Linear(E, dim, bias=False)
        self.reset_parameters(depth)

    @torch.no_grad()
    def reset_parameters(self, depth: int) -> None:
        """Initialise rates, step sizes, skips and the output projection; the rest keeps PyTorch's defaults.

        The step size of the backward direction starts at softplus(0) = 0.69, as in the official release. There the
        general rule zeroes this bias, and only the bias of the forward direction is exempt.
        """
        init_step_bias(self.dt_proj.bias)
        nn.init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        nn.init.zeros_(self.dt_proj_b.bias)
        for rates in (self.A_log, self.A_b_log):
            rates.copy_(torch.arange(1, STATE_DIM + 1, dtype=rates.dtype, device=rates.device).log().expand_as(rates))
        for skip in (self.D, self.D_b):
            nn.init.ones_(skip)
        nn.init.kaiming_uniform_(self.out_proj.weight, a=math.sqrt(5))
        self.out_proj.weight.div_(math.sqrt(depth))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map normalised tokens (B, T, D), T >= 1, to (B, T, D), in their dtype or autocast's."""
        B, T, _ = x_BTD.shape
        x_BTE, z_BTE = self.in_proj(x_BTD).chunk(2, dim=-1)
        u = F.silu(self._convolve(x_BTE)).view(B, T, 2, self.inner)
        delta, B_BTRN, C_BTRN, bias = (
            self._project(u) if are_as_built(self, _PROJECTIONS) else self._call_projections(u)
        )
        A = -torch.exp(at_least_fp32(torch.stack((self.A_log, self.A_b_log))))
        skip = torch.stack((self.D, self.D_b))
        y = selective_scan_bidir(u, delta, A, B_BTRN, C_BTRN, skip, z_BTE, bias, backend=self.backend)
        return self.out_proj(y.mean(2))

    def _convolve(self, x_BTE: Tensor) -> Tensor:
        """Convolve for both directions: (B, T, E) -> (B, T, 2·E)."""
        if not are_as_built(self, _CONVS):
            return call_scans((self.conv1d, self.conv1d_b), (x_BTE, x_BTE), CONV_KERNEL - 1)
        padded = pad_for_scans((x_BTE, x_BTE), CONV_KERNEL - 1)
        weights, bias = (self.conv1d.weight, self.conv1d_b.weight), torch.cat((self.conv1d.bias, self.conv1d_b.bias))
        return convolve_scans(padded, weights, bias)

    def _project(self, u: Tensor) -> tuple[Tensor, ...]:
        """Project (B, T, 2, E) to step sizes (B, T, 2, E), B and C (B, T, 2, N), and the step sizes' bias (2, E)."""
        B, T, _, E = u.shape
        N, R = STATE_DIM, self.rank
        # one batched product for both directions, direction first; the scan takes views of the result without a copy
        rows = u.view(B * T, 2, E).transpose(0, 1)
        parts = torch.bmm(rows, torch.stack((self.x_proj.weight, self.x_proj_b.weight)).mT)
        low, B_rows, C_rows = parts.split((R, N, N), dim=-1)
        delta = torch.bmm(low, torch.stack((self.dt_proj.weight, self.dt_proj_b.weight)).mT)
        delta, B_BTRN, C_BTRN = (part.unflatten(1, (B, T)).permute(1, 2, 0, 3) for part in (delta, B_rows, C_rows))
        return delta, B_BTRN, C_BTRN, torch.stack((self.dt_proj.bias, self.dt_proj_b.bias))

    def _call_projections(self, u: Tensor) -> tuple[Tensor, ...]:
        """Compute `_project` by calling the layers; they add their biases, so the returned bias is 0."""
        parts = [layer(x) for layer, x in zip((self.x_proj, self.x_proj_b), u.unbind(2), strict=True)]
        low, *states = zip(*(part.split((self.rank, STATE_DIM, STATE_DIM), dim=-1) for part in parts), strict=True)
        delta = [layer(x) for layer, x in zip((self.dt_proj, self.dt_proj_b), low, strict=True)]
        found = [torch.stack(each, 2) for each in (delta, *states)]
        return *found, found[0].new_zeros(2, self.inner)

    def selected_backend(self, dtype: torch.dtype) -> str:
        """Return the backend of the selective scan that runs here for activations of `dtype`.

        `set_backend` finds a layer by the name of this method.
        """
        return selected_backend(self.backend, self.A_log.device, state_dim=STATE_DIM, dtype=dtype)


class VimBlock(nn.Module):
    """tokens + Mixer(RMSNorm(tokens)), with a residual stream of at least fp32."""

    def __init__(self, dim: int, depth: int, drop_path: float):
        super().__init__()
        self.mixer = VimMixer(dim, depth)
        self.norm = RMSNorm(dim, eps=EPS)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Map tokens (B, T, D) to (B, T, D); the scan ignores the grid."""
        return tokens + self.drop_path(self.mixer(self.norm(tokens)))


class Vim(Backbone):
    """Vision Mamba in timm's conventions, as a `PlainBackbone`.

    The official release adds a block's output to the residual stream in the next block, with the drop path rate of that
    block, from [0] + linspace(0, p). This equals the usual residual blocks here, with rates linspace(0, p).

    The arguments are those of `Backbone` except `pool`: the class token in the middle is the class feature.
    """

    def __init__(self, *, depth: int = 24, **kwargs: Any):
        super().__init__(depth=depth, pool="mid", **kwargs)
        D, num_patches = self.embed_dim, self.grid_size[0] * self.grid_size[1]
        self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        self.pos_embed = nn.Parameter(torch.empty(1, num_patches + 1, D))
        self.blocks = nn.ModuleList(VimBlock(D, depth, rate) for rate in self.drop_path_rates)
        self.norm = RMSNorm(D, eps=EPS)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise patches LeCun normal, head and embeddings trunc_normal 0.02, biases 0; not the mixers.

        A rule for all Linear layers would overwrite what `VimMixer.reset_parameters` has drawn.
        """
        lecun_normal_(self.patch_embed.weight)
        nn.init.zeros_(self.patch_embed.bias)
        for weight in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(weight, std=0.02)
        if self.num_classes:
            init_linear(self.head)

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]:
        """Return the position of the class token, in the middle of the sequence."""
        return (num_patches // 2,)

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Return tokens (B, T, D) with class token and positions of images (B, C, H, W), and the patch grid."""
        tokens, grid = self.patches(x)
        middle, built = (self.prefix_positions(h * w) for h, w in (grid, self.grid_size))
        tokens = insert_tokens(tokens, self.cls_token.to(tokens.dtype).expand(tokens.shape[0], -1, -1), middle)
        return at_least_fp32(tokens) + resample_positions(self.pos_embed, self.grid_size, grid, built, middle), grid

    def class_feature(self, tokens: Tensor) -> Tensor:
        """Return the class token (B, D) of normalised tokens (B, T, D), at the place of `prefix_positions`."""
        return tokens[:, (tokens.shape[1] - 1) // 2]

    def reported_mac_terms(self, grid: Grid) -> tuple[str, dict[str, int]]:
        """Return `blocks`, whose multiply-adds the papers count differently, and the papers' count for one image.

        The count is Eq. 13: 6TD² + 18·T·2D·16 per block, without convolutions and small projections. `bench.adapted`
        finds the method by its name. It takes `blocks` for all blocks, and any other word for the name of an operator.
        """
        D, T = self.embed_dim, grid[0] * grid[1] + 1
        return "blocks", {"eq_13": self.depth * (6 * T * D * D + PAPER_SCAN_MACS * T * EXPAND * D * STATE_DIM)}

    def no_weight_decay(self) -> set[str]:
        """Return the embeddings; timm exempts vectors and biases itself. A_log decays, as in the release."""
        return {"pos_embed", "cls_token"}


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict; unknown keys are kept, so that a strict load reports them."""
    return rename_prefixes(state_dict, {"layers.": "blocks.", "norm_f.": "norm.", "patch_embed.proj.": "patch_embed."})


register_sizes(
    Vim,
    {
        "vim_tiny_patch16_224": {"embed_dim": 192},  # 7.148 M parameters
        "vim_small_patch16_224": {"embed_dim": 384},  # 25.797 M
        "vim_base_patch16_224": {"embed_dim": 768},  # 97.598 M
        # for tests and the embedded data sets: 9x9 tokens and the class token
        "vim_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4},
    },
)
