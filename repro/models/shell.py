"""ViT without class token around any token mixer, the shell of Study, T5, LaCT and ViT3.

There are three choices of position embedding. Blocks are a mixer and an MLP after LayerNorms, and the head reads the
mean of the tokens. A family supplies the mixer: a module `mixer(x_BNC, grid)` with `param_terms()` and
`mac_terms(grid)`, the named counts of one layer. It has `init_weights()` if it has parameters besides linear layers and
convolutions. The shell adds its own counts.

Shape suffixes: B batch, N tokens (h·w), C width.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from timm.layers import DropPath, LayerScale, Mlp
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from ..core.errors import did_you_mean
from .backbone import Backbone, fit_table, resample_positions
from .image_model import Grid, init_linear

Positions = Literal["table", "block_table", "none"]
EPS = 1e-6  # of the LayerNorms; `inner_mixer` takes it for key norms and linear attention, too
# for the embedded data sets: one token per pixel of a scanned digit
NANO_PATCH4_32 = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2, "position_std": 0.3}
# for tests and the embedded data sets: 9x9 tokens
NANO_PATCH16_144 = {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 2}


class SoftmaxMixer(Attention):
    """timm's softmax attention as a mixer; it ignores the grid."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__(dim, num_heads, qkv_bias=True)

    def forward(self, x_BNC: Tensor, grid: Grid) -> Tensor:
        """Map normalised tokens (B, N, C) to (B, N, C)."""
        return super().forward(x_BNC)

    def param_terms(self) -> dict[str, int]:
        """Return named counts of parameters."""
        C = self.proj.in_features
        return {"projections": 4 * C * C + 4 * C}

    def mac_terms(self, grid: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds on an (h, w) grid."""
        N, C = grid[0] * grid[1], self.proj.in_features
        return {"projections": N * 4 * C * C, "attention": 2 * N * N * C}


class BlockTable(nn.Module):
    """Position embedding of one block: a learned vector per grid position, plus one shared vector.

    ViT3's design study has 0.9 M parameters more than DeiT-S without class token, and their place is unpublished. A
    table of this size in every block matches all twelve printed counts.
    """

    def __init__(self, dim: int, grid: Grid, std: float):
        super().__init__()
        self.grid, self.std = grid, std
        self.table = nn.Parameter(torch.empty(1, grid[0] * grid[1], dim))
        self.shift = nn.Parameter(torch.zeros(dim))
        self.register_load_state_dict_pre_hook(_fit_table)

    def resize(self, grid: Grid) -> None:
        """Resample the table for another grid of patches, once instead of in every pass, as a new parameter."""
        with torch.no_grad():
            table = resample_positions(self.table, self.grid, grid)
        self.table, self.grid = nn.Parameter(table, self.table.requires_grad), grid

    def init_weights(self) -> None:
        """Initialise the table trunc_normal with std `std`."""
        nn.init.trunc_normal_(self.table, std=self.std)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Add the table, resampled if needed, and the shared vector to tokens (B, N, C) on an (h, w) grid."""
        return tokens + resample_positions(self.table, self.grid, grid) + self.shift


def _fit_table(module: BlockTable, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Resample a block's table before loading; PyTorch calls it with the state dict and the module's prefix."""
    fit_table(state, f"{prefix}table", module.table, module.grid, resample_positions)


class Block(nn.Module):
    """Optional position embedding and convolution (CPE), then a mixer and an MLP, each after a LayerNorm.

    Mixer and MLP are residual branches, with a layer scale if `layer_scale`, and with stochastic depth of rate
    `drop_path`.
    """

    def __init__(
        self,
        dim: int,
        mixer: nn.Module,
        cpe: nn.Conv2d | None,
        positions: BlockTable | None,
        *,
        hidden: int,
        layer_scale: bool,
        norm_eps: float,
        drop_path: float,
    ):
        super().__init__()
        self.positions, self.cpe = positions, cpe
        self.norm1, self.attn = nn.LayerNorm(dim, eps=norm_eps), mixer
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=norm_eps), Mlp(dim, hidden)
        self.ls1, self.ls2 = (LayerScale(dim) if layer_scale else nn.Identity() for _ in range(2))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Map tokens (B, N, C), row-major on an (h, w) grid, to (B, N, C)."""
        if self.positions is not None:
            tokens = self.positions(tokens, grid)
        tokens = add_convolved(tokens, self.cpe, grid)
        tokens = tokens + self.drop_path(self.ls1(self.attn(self.norm1(tokens), grid)))
        return tokens + self.drop_path(self.ls2(self.mlp(self.norm2(tokens))))


class ClassFreeViT(Backbone):
    """ViT without class token in timm's conventions, as a `PlainBackbone`.

    Args:
        build_mixer: maps the width C to a block's mixer and its depth-wise convolution before it (CPE) or None. The
            family builds both, and so decides which gets the first random numbers of a seed.
        num_heads: heads, which must divide the width.
        positions: `table` adds a table to the patches, `block_table` one in every block (see `BlockTable`), or `none`.
        position_std: std of the initial position tables.
        mlp_ratio: hidden units of an MLP, as a multiple of the width.
        layer_scale: whether each residual branch has a learned scale per channel.
        norm_eps: eps of the LayerNorms.
        kwargs: see `Backbone`; `pool` is always the mean.

    Raises:
        ValueError: heads that do not divide the width, or unknown positions.
    """

    def __init__(
        self,
        build_mixer: Callable[[int], tuple[nn.Module, nn.Conv2d | None]],
        *,
        num_heads: int,
        positions: Positions = "table",
        position_std: float = 0.02,
        mlp_ratio: float = 4.0,
        layer_scale: bool = False,
        norm_eps: float = EPS,
        **kwargs: Any,
    ):
        super().__init__(pool="mean", **kwargs)
        require_choice("positions", positions, get_args(Positions))
        C = self.embed_dim
        if C % num_heads:
            raise ValueError(f"embed_dim {C} is not a multiple of num_heads {num_heads}")
        self.num_heads, self.positions, self.position_std = num_heads, positions, position_std
        self.hidden, self.layer_scale, self.norm_eps = int(mlp_ratio * C), layer_scale, norm_eps
        if positions == "table":
            self.pos_embed = nn.Parameter(torch.empty(1, self.grid_size[0] * self.grid_size[1], C))
        self.blocks = nn.ModuleList(
            Block(
                C,
                *build_mixer(C),
                BlockTable(C, self.grid_size, position_std) if positions == "block_table" else None,
                hidden=self.hidden,
                layer_scale=layer_scale,
                norm_eps=norm_eps,
                drop_path=rate,
            )
            for rate in self.drop_path_rates
        )
        self.norm = nn.LayerNorm(C, eps=norm_eps)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise Linear trunc_normal 0.02, biases 0, positions trunc_normal with std `position_std`.

        Convolutions keep PyTorch's default. Mixers initialise their other parameters: every submodule's `init_weights`
        is called. `vit3.InnerTraining` has none, because it draws its weights when it is built.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)
            elif module is not self and hasattr(module, "init_weights"):
                module.init_weights()
        if self.positions == "table":
            nn.init.trunc_normal_(self.pos_embed, std=self.position_std)

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Return patch tokens with positions (B, N, C) of images (B, C, H, W), and the grid; raises as `patches`."""
        tokens, grid = self.patches(x)
        return tokens + resample_positions(
            self.pos_embed, self.grid_size, grid
        ) if self.positions == "table" else tokens, grid

    def _resize(self, grid: Grid) -> None:
        """Resample the tables of the blocks once; a block would otherwise do it in each forward pass."""
        super()._resize(grid)
        for module in self.modules():
            if isinstance(module, BlockTable):
                module.resize(grid)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the position tables, as in DeiT."""
        return {name for name, _ in self.named_parameters() if name == "pos_embed" or name.endswith("positions.table")}

    def param_terms(self) -> dict[str, int]:
        """Return named counts that add up to the model's parameters."""
        C, L, hidden, block = self.embed_dim, self.depth, self.hidden, self.blocks[0]
        N = self.grid_size[0] * self.grid_size[1]
        return {
            "patch_embed": self.patch_embed.weight.numel() + C,
            "positions": {"table": N * C, "block_table": L * (N + 1) * C, "none": 0}[self.positions],
            "cpe": L * 10 * C * (block.cpe is not None),
            "layer_norms": L * 4 * C + 2 * C,
            "layer_scale": L * 2 * C * self.layer_scale,
            **{name: L * count for name, count in block.attn.param_terms().items()},
            "mlp": L * (2 * C * hidden + hidden + C),
            "head": self.num_classes * (C + 1),
        }

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds for one image of (H, W) pixels."""
        C, L, block = self.embed_dim, self.depth, self.blocks[0]
        grid = self.grid_of(*image_size)
        N = grid[0] * grid[1]
        return {
            "patch_embed": N * self.patch_embed.weight.numel(),
            "cpe": L * N * 9 * C * (block.cpe is not None),
            **{name: L * count for name, count in block.attn.mac_terms(grid).items()},
            "mlp": L * N * 2 * C * self.hidden,
            "head": C * self.num_classes,
        }


def require_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise a ValueError with a suggestion unless the option has a known value."""
    if value not in known:
        raise ValueError(f"{name} {value!r}: not known{did_you_mean(str(value), known)}")


def build_cpe(dim: int) -> nn.Conv2d:
    """Build a depth-wise 3x3 convolution that keeps the grid."""
    return nn.Conv2d(dim, dim, 3, padding=1, groups=dim)


def add_convolved(x_BNC: Tensor, convolve: nn.Conv2d | None, grid: Grid) -> Tensor:
    """Add to tokens (B, N, C) their convolution on the (h, w) grid, if there is one."""
    if convolve is None:
        return x_BNC
    return x_BNC + convolve(x_BNC.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)
