"""DiT, DiT3 and DiT5, diffusion transformers for class-conditional images: S, B, L and XL, and nanos for tests and the
embedded data sets.

A denoiser predicts the noise in a noisy input at a timestep, given a class: latents of a VAE with 4 channels, or
pixels. DiT mixes tokens by softmax attention. DiT3 mixes them by the TTT block of ViT3, after a depth-wise convolution
(CPE), which a DiT may have too. DiT5 replaces the softmax attention of a DiT by the mixer of T5 and inherits all other
weights. Positions are fixed sines and cosines of the grid, so every input whose sides the patch divides is valid.

Shape suffixes: B images, N tokens (h·w), C width; the input is (B, K, H, W).
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models import checkpoint
from torch import Tensor, nn

from ..core.errors import UserError
from .backbone import rename_keys
from .image_model import Grid, OperatorModel, PatchConv
from .inner import InnerLoop
from .inner_mixer import InnerMixer
from .registry import register_denoisers
from .shell import SoftmaxMixer, add_convolved, build_cpe, require_choice
from .t5 import official_state_dict as official_t5
from .vit3 import InnerTraining

EPS = 1e-6  # of the LayerNorms
MIXERS = ("softmax", "ttt", "t5")  # those of DiT, DiT3 and DiT5
WINDOW = 5  # side of the window of the neighbourhood attention in DiT5, in tokens
WAVES = 256  # sines and cosines that encode a timestep
LONGEST_PERIOD = 10_000.0  # base of the falling frequencies of timesteps and positions
T5_LOOP = InnerLoop(model="mlp", depth=2, loss="mse")  # the inner loop of DiT5; see `build_mixer`


class DiTBlock(nn.Module):
    """Transformer block with adaLN-Zero conditioning, after an optional depth-wise convolution (CPE).

    With (β1, γ1, α1, β2, γ2, α2) = Linear(SiLU(c)) of the condition c, the block adds α1 · mixer((1 + γ1) · LN(x) + β1)
    and then α2 · MLP((1 + γ2) · LN(x) + β2). The linear layer starts at zero, so the block without CPE starts as the
    identity.
    """

    def __init__(self, dim: int, num_heads: int, mixer: Literal["softmax", "ttt", "t5"], cpe: bool):
        super().__init__()
        self.cpe = build_cpe(dim) if cpe else None
        self.norm1 = nn.LayerNorm(dim, eps=EPS, elementwise_affine=False)
        # the training of denoisers finds the inner weights by this name, too (`tasks.generation.task`)
        self.attn = build_mixer(mixer, dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=EPS, elementwise_affine=False)
        self.mlp = Mlp(dim, 4 * dim, act_layer=functools.partial(nn.GELU, approximate="tanh"))
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, tokens: Tensor, grid: Grid, condition: Tensor) -> Tensor:
        """Map tokens (B, N, C), row-major on an (h, w) grid, to (B, N, C), given the condition (B, C)."""
        tokens = add_convolved(tokens, self.cpe, grid)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        mixed = _modulate(self.norm1(tokens), shift1, scale1)
        tokens = tokens + gate1 * self.attn(mixed, grid)
        return tokens + gate2 * self.mlp(_modulate(self.norm2(tokens), shift2, scale2))


class Denoiser(OperatorModel):
    """Class-conditional diffusion transformer: DiT, DiT3 with `mixer="ttt"`, or DiT5 with `mixer="t5"`.

    Args:
        patch_size: side of a patch; height and width of every input must be multiples of it.
        in_channels: input channels K: 4 for latents, 1 or 3 for pixels.
        embed_dim, depth, num_heads: width C, number of blocks, heads of the mixer.
        num_classes: number of classes; label `num_classes` means no class, for classifier-free guidance.
        mixer: the token mixer: `softmax`, `ttt` or `t5`.
        cpe: whether a depth-wise 3x3 convolution precedes each mixer; None means only with `ttt`.
        learn_sigma: whether the output has K more channels for the variance of a step; see
            `repro.tasks.generation.diffusion`.

    Raises:
        ValueError: an unknown mixer, or a width that is not a multiple of the heads and of 4.
    """

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 4,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        num_classes: int = 1000,
        *,
        mixer: Literal["softmax", "ttt", "t5"] = "softmax",
        cpe: bool | None = None,
        learn_sigma: bool = True,
    ):
        super().__init__()
        require_choice("mixer", mixer, MIXERS)
        if embed_dim % num_heads or embed_dim % 4:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads} and of 4")
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.embed_dim = embed_dim
        self.depth = depth
        self.num_heads = num_heads
        self.num_classes, self.mixer, self.learn_sigma = num_classes, mixer, learn_sigma
        self.cpe = mixer == "ttt" if cpe is None else cpe
        self.out_channels = 2 * in_channels if learn_sigma else in_channels
        self.patch_embed = PatchConv(in_channels, embed_dim, patch_size)
        self.time_embed = nn.Sequential(nn.Linear(WAVES, embed_dim), nn.SiLU(), nn.Linear(embed_dim, embed_dim))
        # the last row means no class; `inference.generate` counts the classes of released weights by these rows
        self.class_embed = nn.Embedding(num_classes + 1, embed_dim)
        self.blocks = nn.ModuleList(DiTBlock(embed_dim, num_heads, mixer, self.cpe) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=EPS, elementwise_affine=False)
        self.modulation = nn.Linear(embed_dim, 2 * embed_dim)
        self.head = nn.Linear(embed_dim, patch_size**2 * self.out_channels)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise as DiT does.

        Linear layers and patches are Xavier-uniform, biases 0, embeddings N(0, 0.02²), modulations and head 0. Mixers
        initialise their fast weights themselves; the CPE keeps PyTorch's default.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_embed.weight.view(self.embed_dim, -1))
        nn.init.zeros_(self.patch_embed.bias)
        for weight in (self.class_embed.weight, self.time_embed[0].weight, self.time_embed[2].weight):
            nn.init.normal_(weight, std=0.02)
        for block in self.blocks:
            if isinstance(block.attn, InnerMixer):
                block.attn.init_weights()
        for linear in (*(block.modulation for block in self.blocks), self.modulation, self.head):
            nn.init.zeros_(linear.weight)

    def new_parameters(self) -> set[str]:
        """Return the names of a DiT5's parameters that a DiT of the same shell does not have.

        There are none for a DiT3, too: `tasks.generation` takes a model with such names for a DiT5.
        """
        mixers = {name: module for name, module in self.named_modules() if isinstance(module, InnerMixer)}
        return {f"{name}.{own}" for name, mixer in mixers.items() for own in mixer.new_parameters()}

    def grid_of(self, height: int, width: int) -> Grid:
        """Return the rows and columns of patches in an input; ValueError for sides that the patch does not divide."""
        p = self.patch_size
        if height < p or width < p or height % p or width % p:
            raise ValueError(
                f"input of {height}x{width}: height and width must be positive multiples of the patch size {p}"
            )
        return height // p, width // p

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """Predict the noise (B, K, H, W), with `learn_sigma` (B, 2K, H, W).

        Args:
            x: noisy inputs (B, K, H, W).
            timesteps, labels: integers (B,).

        Raises:
            ValueError: sides that the patch does not divide.
        """
        grid = self.grid_of(*x.shape[-2:])
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        # to the dtype of the weights: under autocast the tokens are half, and the residual stream must not be
        dtype = next(self.parameters()).dtype
        tokens = tokens + embed_positions(grid, self.embed_dim, x.device).to(dtype)
        waves = _embed_timesteps(timesteps).to(dtype)
        condition = self.time_embed(waves) + self.class_embed(labels)
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, grid, condition)
            else:
                tokens = block(tokens, grid, condition)
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        patches = self.head(_modulate(self.norm(tokens), shift, scale))
        patches = patches.unflatten(2, (self.patch_size, self.patch_size, self.out_channels)).unflatten(1, grid)
        # (B, h, w, p, p, K) -> (B, K, h, p, w, p) -> (B, K, H, W)
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns that assign parameters to layers, for layer-wise learning-rate decay."""
        return {
            "stem": r"^patch_embed|^time_embed|^class_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^modulation|^head", (99999,))],
        }

    def param_terms(self) -> dict[str, int]:
        """Return named counts that add up to the model's parameters; releases also count the fixed N·C positions."""
        C, L = self.embed_dim, self.depth
        return {
            "patch_embed": self.patch_embed.weight.numel() + C,
            "time_embed": (WAVES + 1) * C + (C + 1) * C,
            "class_embed": (self.num_classes + 1) * C,
            "cpe": L * 10 * C * self.cpe,
            **{name: L * count for name, count in self.blocks[0].attn.param_terms().items()},
            "mlp": L * (8 * C * C + 5 * C),
            "modulation": L * 6 * C * (C + 1) + 2 * C * (C + 1),
            "head": (C + 1) * self.head.out_features,
        }

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds for one input (H, W); latents have an eighth of an image's sides."""
        C, L = self.embed_dim, self.depth
        grid = self.grid_of(*image_size)
        N = grid[0] * grid[1]
        return {
            "patch_embed": N * self.patch_embed.weight.numel(),
            "time_embed": (WAVES + C) * C,
            "cpe": L * N * 9 * C * self.cpe,
            **{name: L * count for name, count in self.blocks[0].attn.mac_terms(grid).items()},
            "mlp": L * N * 8 * C * C,
            "modulation": L * 6 * C * C + 2 * C * C,
            "head": N * C * self.head.out_features,
        }


def build_mixer(mixer: str, dim: int, num_heads: int) -> nn.Module:
    """Build a mixer by its name, for tokens of width C = `dim`.

    The mixer of DiT5 has a two-layer inner MLP with the squared error as inner loss, instance-normalised keys, a scale
    and an offset for q and k, and neighbourhood attention as half of its output. Any other name than `t5` and `ttt`
    builds softmax attention; `Denoiser` checks the names.
    """
    if mixer == "t5":
        return InnerMixer(dim, num_heads, T5_LOOP, "instance", "qk", WINDOW, affine=True)
    return InnerTraining(dim, num_heads) if mixer == "ttt" else SoftmaxMixer(dim, num_heads)


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Compute (1 + scale) · x + shift."""
    return x * (1 + scale) + shift


def _embed_timesteps(timesteps: Tensor) -> Tensor:
    """Encode timesteps (B,) as fp32 (B, 256): the cosines, then the sines, of t · 10000^(-i/128), i = 0..127."""
    rates = torch.exp(
        torch.arange(WAVES // 2, dtype=torch.float32, device=timesteps.device)
        * (-math.log(LONGEST_PERIOD) / (WAVES // 2))
    )
    angles = timesteps[:, None].float() * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def embed_positions(grid: Grid, dim: int, device: torch.device | str | None = None) -> Tensor:
    """Encode the positions of a grid as fp32 (h·w, dim): half the channels for the column, then half for the row.

    Each half has the sines and then the cosines of the index at dim/4 frequencies from 1 down to 1/10000.
    """
    rates = LONGEST_PERIOD ** (torch.arange(dim // 4, dtype=torch.float32, device=device) / -(dim // 4))
    rows, columns = (torch.outer(torch.arange(n, dtype=torch.float32, device=device), rates) for n in grid)
    rows, columns = (torch.cat((angles.sin(), angles.cos()), dim=-1) for angles in (rows, columns))
    h, w = grid
    return torch.cat((columns.expand(h, -1, -1), rows[:, None].expand(-1, w, -1)), dim=-1).flatten(0, 1)


# replaced in this order: the last entry would also match `final_layer.adaLN_modulation.1.`
_OFFICIAL = {
    "x_embedder.proj.": "patch_embed.",
    "t_embedder.mlp.": "time_embed.",
    "y_embedder.embedding_table.": "class_embed.",
    "final_layer.adaLN_modulation.1.": "modulation.",
    "final_layer.linear.": "head.",
    ".adaLN_modulation.1.": ".modulation.",
}


def official_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict of DiT, DiT3 or DiT5, and drop the fixed table of positions.

    Raises:
        UserError: a table of positions that differs from `embed_positions`, or two keys with one name here.
    """

    def rename(key: str) -> str:
        """Replace every official part of a key."""
        for theirs, ours in _OFFICIAL.items():
            key = key.replace(theirs, ours)
        return key

    # DiT5's release names these layers as T5's does
    is_t5 = any(".attn.q_conv2d." in key for key in state_dict)
    renamed = rename_keys(_join_scales(official_t5(state_dict) if is_t5 else state_dict), rename)
    if (table := renamed.pop("pos_embed", None)) is not None:
        side = math.isqrt(table.shape[1])  # of the grid; the next condition refuses another number of rows
        fixed = embed_positions((side, side), table.shape[2])
        if fixed.shape != table.shape[1:] or (table[0] - fixed).abs().max() > 1e-4:
            raise UserError(
                "pos_embed is not the fixed table of sines and cosines of a square grid; it was trained, or is of another model"
            )
    return renamed


def _join_scales(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join DiT5's scale and offset of q and k, each (1, 1, C, 2), to the `affine` of `InnerMixer`, (2, C, 2).

    The first axis of the result is q and k, the last one scale and offset. Without such keys nothing changes.

    Raises:
        UserError: one of a pair is missing, or the joined tensor is there, too.
    """
    joined = {key: value for key, value in state_dict.items() if not key.endswith(("qk_scale_ttt", "qk_offset_ttt"))}
    for stem in {key.rpartition("qk_")[0]: None for key in state_dict if key not in joined}:
        names = [f"{stem}qk_{name}_ttt" for name in ("scale", "offset")]
        both = [state_dict.get(name) for name in names]
        if any(each is None for each in both):
            raise UserError(f"one of {' and '.join(names)} is missing")
        if f"{stem}affine" in joined:
            raise UserError(f"both {names[0]} and {stem}affine are one tensor here; remove the wrong one")
        joined[f"{stem}affine"] = torch.stack([each[0, 0] for each in both], dim=-1).transpose(0, 1).contiguous()
    return joined


_SIZES = {
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "xlarge": {"embed_dim": 1152, "depth": 28, "num_heads": 16},
    # for tests and the embedded data sets, in pixels
    "nano": {"in_channels": 1, "embed_dim": 48, "depth": 3, "num_heads": 2, "num_classes": 10, "learn_sigma": False},
}
# sides of the patches with which each size is registered
PATCHES = {"small": (8, 4, 2), "base": (8, 4, 2), "large": (2,), "xlarge": (2,), "nano": (4, 1)}

for _family, _mixer in (("dit", "softmax"), ("dit3", "ttt"), ("dit5", "t5")):
    for _size, _patches in PATCHES.items():
        _named = {f"{_family}_{_size}_patch{p}": {"patch_size": p, "mixer": _mixer, **_SIZES[_size]} for p in _patches}
        register_denoisers(Denoiser, _named)
