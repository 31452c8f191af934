"""Vision-RWKV: VRWKV-T/S/B, and a nano for tests and the embedded data sets.

`import repro.models` registers the models with timm. Parameters have the names of the official release, except for
three outer names that all families here share; see `official_state_dict`. Official weights were trained with the CUDA
kernel of the release. It departs slightly from the paper's equation, which runs here; see `kernels.bi_wkv.reference`.

Shape letters: B images, T tokens on an (h, w) grid, C channels.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from kernels.bi_wkv import bi_wkv, selected_backend

from .backbone import Backbone, register_sizes, rename_prefixes, resample_positions
from .image_model import Grid, init_linear

EPS = 1e-5  # of all norms
PAPER_WKV_MACS = 29  # multiply-adds of Bi-WKV per token and channel, as the authors count them
SHIFT_PARTS = 4  # Q-Shift takes a quarter of the channels each from the left, right, upper and lower neighbour


def q_shift(tokens: Tensor, grid: Grid) -> Tensor:
    """Shift tokens (B,T,C), row-major on an (h, w) grid: each quarter of the channels comes from one neighbour.

    Quarter j has the channels ⌊jC/4⌋ to ⌊(j+1)C/4⌋; the quarters come from the left, right, upper and lower neighbour.
    The grid is zero-padded.
    """
    h, w = grid
    x = tokens.unflatten(1, grid)
    C = x.shape[-1]
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    neighbours = (padded[:, 1:-1, :w], padded[:, 1:-1, 2:], padded[:, :h, 1:-1], padded[:, 2:, 1:-1])
    edges = [C * j // SHIFT_PARTS for j in range(SHIFT_PARTS + 1)]
    parts = [y[..., a:b] for y, (a, b) in zip(neighbours, pairwise(edges), strict=True)]
    return torch.cat(parts, -1).flatten(1, 2)


class SpatialMix(nn.Module):
    """W_o(σ(r) ⊙ Bi-WKV(w/T, u/T, k, v)), where r, k and v are projections of mixtures of tokens and Q-Shift.

    The initial values depend on `layer` and `depth`, the index of the block and the number of blocks; see
    `init_weights`.
    """

    def __init__(self, dim: int, layer: int, depth: int):
        super().__init__()
        self.layer, self.depth, self.backend = layer, depth, "auto"
        self.spatial_decay, self.spatial_first = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.spatial_mix_k, self.spatial_mix_v, self.spatial_mix_r = (
            nn.Parameter(torch.empty(1, 1, dim)) for _ in range(3)
        )
        self.key, self.value, self.receptance, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def init_weights(self) -> None:
        """Set the "fancy" initial values of the release, for layer l of L and channel i of C.

        The decay is −5 + 8 (i/(C−1))^(0.7 + 1.3 l/(L−1)), the bonus ln 0.3 + ½(((i+1) mod 3) − 1). With p = 1 − l/L,
        the mixtures are (i/C)^p for k, (i/C)^p + 0.3 l/(L−1) for v, and (i/C)^(p/2) for r.
        """
        dim = len(self.spatial_decay)
        i = torch.arange(dim, dtype=torch.float64)
        rise, p = self.layer / max(1, self.depth - 1), 1 - self.layer / self.depth
        mix = (i / dim) ** p
        with torch.no_grad():
            self.spatial_decay.copy_(-5 + 8 * (i / max(1, dim - 1)) ** (0.7 + 1.3 * rise))
            self.spatial_first.copy_(math.log(0.3) + 0.5 * ((i + 1) % 3 - 1))
            self.spatial_mix_k.copy_(mix)
            self.spatial_mix_v.copy_(mix + 0.3 * rise)
            self.spatial_mix_r.copy_((i / dim).pow(p / 2))

    def selected_backend(self, dtype: torch.dtype) -> str:
        """Return the backend of Bi-WKV that runs on this layer's device for activations of `dtype`.

        `set_backend` finds a layer by the name of this method.
        """
        return selected_backend(self.backend, self.spatial_decay.device, dtype=dtype)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Map (B,T,C) to (B,T,C); decay and bonus are divided by this image's number T of tokens."""
        shifted = q_shift(x, grid)
        k = self.key(shifted.lerp(x, self.spatial_mix_k))
        v = self.value(shifted.lerp(x, self.spatial_mix_v))
        r = self.receptance(shifted.lerp(x, self.spatial_mix_r))
        T = x.shape[1]
        return self.output(
            torch.sigmoid(r) * bi_wkv(self.spatial_decay / T, self.spatial_first / T, k, v, backend=self.backend)
        )


class ChannelMix(nn.Module):
    """σ(W_r mix_r(x)) ⊙ W_v relu(W_k mix_k(x))², where W_k has 4·C outputs; the arguments are those of `SpatialMix`."""

    def __init__(self, dim: int, layer: int, depth: int):
        super().__init__()
        self.layer, self.depth = layer, depth
        self.spatial_mix_k, self.spatial_mix_r = (nn.Parameter(torch.empty(1, 1, dim)) for _ in range(2))
        self.key, self.value = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)

    def init_weights(self) -> None:
        """Set both mixtures to (i/C)^(1 − l/L)."""
        dim = self.spatial_mix_k.shape[-1]
        mix = (torch.arange(dim, dtype=torch.float64) / dim) ** (1 - self.layer / self.depth)
        with torch.no_grad():
            self.spatial_mix_k.copy_(mix)
            self.spatial_mix_r.copy_(mix)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Map (B,T,C) to (B,T,C)."""
        shifted = q_shift(x, grid)
        hidden = torch.relu(self.key(shifted.lerp(x, self.spatial_mix_k))).square()
        return torch.sigmoid(self.receptance(shifted.lerp(x, self.spatial_mix_r))) * self.value(hidden)


class VRWKVBlock(nn.Module):
    """x + att(ln1 x), then x + ffn(ln2 x); with `post_norm` x + γ1 ln1(att(x)), then x + γ2 ln2(ffn(x)).

    Block 0 begins with an additional norm, ln0. `gamma` is the initial value of γ1 and γ2, `drop_path` the rate of
    stochastic depth in both residual branches.
    """

    def __init__(self, dim: int, layer: int, depth: int, *, post_norm: bool, gamma: float, drop_path: float):
        super().__init__()
        self.post_norm, self.gamma = post_norm, gamma
        if layer == 0:
            self.ln0 = nn.LayerNorm(dim, eps=EPS)
        self.ln1, self.ln2 = nn.LayerNorm(dim, eps=EPS), nn.LayerNorm(dim, eps=EPS)
        self.att, self.ffn = SpatialMix(dim, layer, depth), ChannelMix(dim, layer, depth)
        if post_norm:
            self.gamma1, self.gamma2 = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Map tokens (B,T,C), row-major on an (h, w) grid, to (B,T,C)."""
        if hasattr(self, "ln0"):
            tokens = self.ln0(tokens)
        if self.post_norm:
            tokens = tokens + self.drop_path(self.gamma1 * self.ln1(self.att(tokens, grid)))
            return tokens + self.drop_path(self.gamma2 * self.ln2(self.ffn(tokens, grid)))
        tokens = tokens + self.drop_path(self.att(self.ln1(tokens), grid))
        return tokens + self.drop_path(self.ffn(self.ln2(tokens), grid))


class VRWKV(Backbone):
    """Vision-RWKV in timm's conventions, as a `PlainBackbone`.

    Args:
        post_norm: norms after the mixers and a layer scale (S, B) instead of norms before them (T); see `VRWKVBlock`.
        gamma: initial value of the layer scale: 1 for S, 1e-5 for B.
        kwargs: see `Backbone`; `pool` is always the mean. The release trains T, S and B with a drop path rate of 0, 0.3
            and 0.5.
    """

    def __init__(self, *, post_norm: bool = False, gamma: float = 1.0, **kwargs: Any):
        super().__init__(pool="mean", **kwargs)
        C, depth = self.embed_dim, self.depth
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid_size[0] * self.grid_size[1], C))
        self.blocks = nn.ModuleList(
            VRWKVBlock(C, i, depth, post_norm=post_norm, gamma=gamma, drop_path=rate)
            for i, rate in enumerate(self.drop_path_rates)
        )
        self.norm = nn.LayerNorm(C, eps=EPS)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise Linear trunc_normal 0.02, biases and positions 0, mixers by their own rule; not the patches."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)
            elif isinstance(module, (SpatialMix, ChannelMix)):
                module.init_weights()
            elif isinstance(module, VRWKVBlock) and module.post_norm:
                nn.init.constant_(module.gamma1, module.gamma)
                nn.init.constant_(module.gamma2, module.gamma)
        nn.init.zeros_(self.pos_embed)

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Return tokens (B, T, D) with positions of images (B, C, H, W), and the (h, w) grid of the patches."""
        tokens, grid = self.patches(x)
        return tokens + resample_positions(self.pos_embed, self.grid_size, grid), grid

    def reported_mac_terms(self, grid: Grid) -> tuple[str, dict[str, int]]:
        """Return the operator whose multiply-adds the papers count differently, and the papers' count for one image.

        `bench.adapted` finds the method by its name, and would keep our count without it.
        """
        return "vision_ttt.bi_wkv", {"bi_wkv": self.depth * PAPER_WKV_MACS * grid[0] * grid[1] * self.embed_dim}

    def no_weight_decay(self) -> set[str]:
        """Return norms and biases, as in the release; timm also exempts other vectors, but see `decayed_vectors`."""
        norms = {f"{name}." for name, module in self.named_modules() if isinstance(module, nn.LayerNorm)}
        return {name for name, _ in self.named_parameters() if name.endswith(".bias") or name.startswith(tuple(norms))}

    def decayed_vectors(self) -> set[str]:
        """Return the decay, the bonus and the layer scale, on which the release uses weight decay.

        `training.optim.build_optimizer` finds the method by its name; under another name these vectors would not decay.
        """
        vectors = {name for name, parameter in self.named_parameters() if parameter.ndim == 1}
        return vectors - self.no_weight_decay()


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict: `layers`, `patch_embed.projection` and the last `ln1` differ here."""
    return rename_prefixes(
        state_dict, {"layers.": "blocks.", "patch_embed.projection.": "patch_embed.", "ln1.": "norm."}
    )


register_sizes(
    VRWKV,
    {
        "vrwkv_tiny_patch16_224": {"embed_dim": 192},  # 6,155,176 parameters
        "vrwkv_small_patch16_224": {"embed_dim": 384, "post_norm": True},  # 23,820,136
        "vrwkv_base_patch16_224": {"embed_dim": 768, "post_norm": True, "gamma": 1e-5},  # 93,645,544
        # for tests and the embedded data sets: 9x9 tokens
        "vrwkv_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4},
    },
)
