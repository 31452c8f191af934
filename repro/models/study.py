"""The design study of ViT3: a DeiT without class token whose attention is replaced by an inner learner of any kind.

Small is DeiT-S, on which the study was made, and nano a model for the embedded data sets. Options choose the inner learner, see
`repro.models.inner.InnerLoop`; softmax attention in the same shell is one of the mixers. `import repro.models` registers the models
with timm.

Shape suffixes: B batch, N tokens (h·w), C width, h heads, d head dimension (C = h·d).
"""

import math
from typing import Any, Literal, get_args

import torch
from timm.layers import DropPath, Mlp
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from ..core.errors import did_you_mean
from .backbone import Backbone, Grid, init_linear, register_sizes, resample_positions
from .inner import InnerLoop, learn

EPS = 1e-6
Mixer = Literal["inner", "softmax"]
Positions = Literal["table", "block_table", "none"]
Start = Literal["random", "identity"]


class InnerMixer(nn.Module):
    """Linear to q, k and v, an inner learner for each head, Linear: in place of a head's softmax attention.

    With `loop.rate` dynamic, the rate of a token is the sigmoid of a linear map of it, one for each head.

    Args:
        dim, num_heads: width C, a multiple of the heads h.
        loop: the inner learner.
        start: of the inner weights; `identity` sets the last one, which must be square, to I.
    """

    def __init__(self, dim: int, num_heads: int, loop: InnerLoop, start: Start = "random"):
        super().__init__()
        self.num_heads, self.loop, self.start = num_heads, loop, start
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.rate = nn.Linear(dim, num_heads, bias=False) if loop.rate == "dynamic" else None
        shapes = loop.shapes(dim // num_heads)
        if start == "identity" and (len(shapes[-1]) != 2 or shapes[-1][0] != shapes[-1][1]):
            raise ValueError(f"inner_start identity: the last weight of {loop.model} at width {loop.width} is no square matrix")
        self.weight_names = tuple(f"w{i + 1}" for i in range(len(shapes)))
        for name, shape in zip(self.weight_names, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(num_heads, *shape)))

    def init_weights(self) -> None:
        """Draw the start of the inner learner: trunc_normal 0.02."""
        weights = [getattr(self, name) for name in self.weight_names]
        for weight in weights:
            nn.init.trunc_normal_(weight, std=0.02)
        if self.start == "identity":
            with torch.no_grad():
                weights[-1].copy_(torch.eye(weights[-1].shape[-1]))

    def forward(self, x_BNC: Tensor, grid: Grid) -> Tensor:
        """Normalised tokens (B, N, C), row-major on an (h, w) grid -> (B, N, C) in their dtype (under autocast in that of the mode)."""
        B, N, C = x_BNC.shape
        q, k, v = self.qkv(x_BNC).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).contiguous()
        rates = None if self.rate is None else self.rate(x_BNC).sigmoid().mT
        out = learn(self.loop, [getattr(self, name) for name in self.weight_names], q, k, v, grid, rates)
        return self.proj(out.transpose(1, 2).reshape(B, N, C))


class SoftmaxMixer(Attention):
    """timm's softmax attention as a mixer, which needs no grid."""

    def forward(self, x_BNC: Tensor, grid: Grid) -> Tensor:
        """Normalised tokens (B, N, C) -> (B, N, C)."""
        return super().forward(x_BNC)


class BlockTable(nn.Module):
    """A learned vector for each position of the grid, and one for all of them, which are added to the tokens.

    Nobody has published what holds the 0.9 M parameters of the study that DeiT-S without class token lacks. A table of this size in
    every block is what fits its twelve printed counts.
    """

    def __init__(self, dim: int, grid: Grid):
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.empty(1, grid[0] * grid[1], dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, N, C) on an (h, w) grid -> the same shape; another grid than the built one takes the resampled table."""
        return tokens + resample_positions(self.table, self.grid, grid) + self.shift


class Block(nn.Module):
    """Perhaps a table of positions, then a mixer and an MLP, each after a LayerNorm and with a residual and stochastic depth."""

    def __init__(self, dim: int, mixer: nn.Module, table: BlockTable | None, drop_path: float):
        super().__init__()
        self.positions = table
        self.norm1, self.attn = nn.LayerNorm(dim, eps=EPS), mixer
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=EPS), Mlp(dim, 4 * dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) on an (h, w) grid, row-major -> (B, N, C)."""
        if self.positions is not None:
            tokens = self.positions(tokens, grid)
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens), grid))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


class Study(Backbone):
    """The shell of the design study in timm's conventions, as a `PlainBackbone`; there is no class token.

    Args:
        num_heads: heads h.
        mixer: `inner` for an inner learner, or `softmax`.
        positions: `table` is added to the patches, `block_table` in every block (see `BlockTable`), or `none`.
        position_std: the deviation of the positions' start.
        inner_model, inner_width, inner_depth, inner_loss, inner_lr, inner_rate, inner_epochs, inner_batches, inner_damping: see
            `InnerLoop`.
        inner_start: `random`, or `identity` for the last inner weight.
        kwargs: see `Backbone`; `pool` is always the mean.

    A choice that is not known, or one of the inner learner without effect, is a ValueError.
    """

    def __init__(
        self,
        *,
        num_heads: int = 6,
        mixer: Mixer = "inner",
        positions: Positions = "block_table",
        position_std: float = 0.02,
        inner_model: str = "mlp",
        inner_width: int = 1,
        inner_depth: int = 2,
        inner_loss: str = "dot",
        inner_lr: float = 1.0,
        inner_rate: str = "fixed",
        inner_epochs: int = 1,
        inner_batches: int = 1,
        inner_damping: bool = False,
        inner_start: Start = "random",
        **kwargs: Any,
    ):
        super().__init__(pool="mean", **kwargs)
        chosen = {"mixer": (mixer, Mixer), "positions": (positions, Positions), "inner_start": (inner_start, Start)}
        for name, (value, known) in chosen.items():
            if value not in get_args(known):
                raise ValueError(f"{name} {value!r}: not known{did_you_mean(value, get_args(known))}")
        if self.embed_dim % num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} is not a multiple of num_heads {num_heads}")
        self.num_heads, self.mixer, self.positions, self.position_std = num_heads, mixer, positions, position_std
        self.loop = InnerLoop(
            model=inner_model,
            width=inner_width,
            depth=inner_depth,
            loss=inner_loss,
            lr=inner_lr,
            rate=inner_rate,
            epochs=inner_epochs,
            batches=inner_batches,
            damping=inner_damping,
        )
        if mixer == "softmax" and (self.loop != InnerLoop() or inner_start != "random"):
            raise ValueError("mixer softmax: has no inner learner, so leave its options out")
        if positions == "table":
            self.pos_embed = nn.Parameter(torch.empty(1, self.grid_size[0] * self.grid_size[1], self.embed_dim))
        self.blocks = nn.ModuleList(
            Block(
                self.embed_dim,
                InnerMixer(self.embed_dim, num_heads, self.loop, inner_start)
                if mixer == "inner"
                else SoftmaxMixer(self.embed_dim, num_heads, qkv_bias=True),
                BlockTable(self.embed_dim, self.grid_size) if positions == "block_table" else None,
                rate,
            )
            for rate in self.drop_path_rates
        )
        self.norm = nn.LayerNorm(self.embed_dim, eps=EPS)
        self.init_weights()

    def init_weights(self) -> None:
        """Linear trunc_normal 0.02 with zero bias, positions trunc_normal `position_std`, the patch convolution by PyTorch's default."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)
            elif isinstance(module, InnerMixer):
                module.init_weights()
            elif isinstance(module, BlockTable):
                nn.init.trunc_normal_(module.table, std=self.position_std)
        if self.positions == "table":
            nn.init.trunc_normal_(self.pos_embed, std=self.position_std)

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Image (B, C, H, W) -> patch tokens with positions (B, N, C), and their (h, w) grid; raises as `patches`."""
        tokens, grid = self.patches(x)
        return tokens + resample_positions(self.pos_embed, self.grid_size, grid) if self.positions == "table" else tokens, grid

    def no_weight_decay(self) -> set[str]:
        """The positions, as in DeiT."""
        return {name for name, _ in self.named_parameters() if name == "pos_embed" or name.endswith("positions.table")}

    def param_terms(self) -> dict[str, int]:
        """Named counts of parameters that add up to the model's own."""
        C, L, N, d = self.embed_dim, self.depth, self.grid_size[0] * self.grid_size[1], self.embed_dim // self.num_heads
        has_inner = self.mixer == "inner"
        inner = self.num_heads * sum(math.prod(shape) for shape in self.loop.shapes(d))
        return {
            "patch_embed": self.patch_embed.weight.numel() + C,
            "positions": {"table": N * C, "block_table": L * (N + 1) * C, "none": 0}[self.positions],
            "layer_norms": L * 4 * C + 2 * C,
            "projections": L * (4 * C * C + 4 * C),
            "inner_start": L * inner * has_inner,
            "token_rate": L * C * self.num_heads * (has_inner and self.loop.rate == "dynamic"),
            "mlp": L * (8 * C * C + 5 * C),
            "head": self.num_classes * (C + 1),
        }

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Named counts of multiply-adds for one image of (H, W) pixels; `InnerLoop.count_macs` has those of an inner learner."""
        C, L, d = self.embed_dim, self.depth, self.embed_dim // self.num_heads
        h, w = self.grid_of(*image_size)
        N, has_inner = h * w, self.mixer == "inner"
        return {
            "patch_embed": N * self.patch_embed.weight.numel(),
            "projections": L * N * 4 * C * C,
            "attention": L * 2 * N * N * C * (not has_inner),
            "inner_learner": L * self.num_heads * self.loop.count_macs(N, d) * has_inner,
            "token_rate": L * N * C * self.num_heads * (has_inner and self.loop.rate == "dynamic"),
            "mlp": L * N * 8 * C * C,
            "head": C * self.num_classes,
        }


register_sizes(
    Study,
    {
        # DeiT-S without its class token, 23.472 M parameters with the two-layer MLP
        "study_small_patch16_224": {"embed_dim": 384, "num_heads": 6},
        # for the embedded data sets: as many tokens, of a pixel each, as a scanned digit has pixels
        "study_nano_patch4_32": {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2, "position_std": 0.3},
        # the shell of the other families' nanos
        "study_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 2},
    },
)
