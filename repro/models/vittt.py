"""Vittt, the backbone of Vision-TTT (sections 4.2 and 4.3): Vittt-T/S/B and a nano for tests and for the embedded data sets.

One class holds the whole family: the six snapshots of the design route (Table 3), the class strategies (Table 4), the chunk
size (Fig. 7a) and the initial states (Fig. 7b) are its arguments. `import repro.models` registers the models with timm.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DropPath, SwiGLU, calculate_drop_path_rates, resample_abs_pos_embed, to_2tuple
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from .ttt_mixer import DESIGNS, W0_MODES, Design, TTTMixer, W0Mode, design_has

Pool = Literal["mean", "max", "head", "mid", "double"]
POOLS: tuple[Pool, ...] = ("mean", "max", "head", "mid", "double")  # Table 4: MeanPool, MaxPool, Head-, Mid-, DoubleClassTok
EPS = 1e-6


class VitttBlock(nn.Module):
    """Eq. 9: tokens + DWConv, then the TTT mixer and SwiGLU, each on a LayerNorm and with a residual.

    Args:
        dim, num_heads, num_tokens, design, chunk_size, w0: see `Vittt` and `TTTMixer`.
        pool: class strategy, which says where class tokens sit; they skip the convolution.
        drop_path: stochastic depth of both residual branches.
    """

    def __init__(self, dim: int, num_heads: int, num_tokens: int, *, design: Design, chunk_size: int, w0: W0Mode, pool: Pool, drop_path: float):
        super().__init__()
        self.pool = pool
        # bias-free: only that fits the paper's 0.02/0.04/0.08 M parameters
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False) if design_has(design, "conv2d") else None
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.mixer = TTTMixer(dim, num_heads, num_tokens, design=design, chunk_size=chunk_size, w0=w0, eps=EPS)
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = SwiGLU(dim, int(8 * dim / 3))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, T, D) on an (h, w) grid, row-major, class tokens where `class_positions` puts them -> (B, T, D)."""
        if self.dwconv is not None:
            tokens = tokens + self._convolve(tokens, grid)
        tokens = tokens + self.drop_path(self.mixer(self.norm1(tokens)))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))

    def _convolve(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        positions = class_positions(self.pool, grid[0] * grid[1])
        patches = remove_tokens(tokens, positions)
        image = patches.transpose(1, 2).unflatten(2, grid)  # a channels-last view, no copy
        out = self.dwconv(image).flatten(2).transpose(1, 2)
        return insert_tokens(out, out.new_zeros(out.shape[0], len(positions), out.shape[2]), positions)


class Vittt(nn.Module):
    """Vision-TTT backbone in timm's conventions, under the PlainBackbone protocol of `repro.models.registry`.

    Args:
        img_size: image height and width that the position embedding is made for; others are interpolated per forward.
        patch_size: side of a patch in pixels; H and W of every image must be multiples of it.
        in_chans: channels of the image.
        num_classes: outputs of the head; 0 leaves it out.
        embed_dim: width D.
        depth: blocks.
        num_heads: heads of the inner learner.
        design: snapshot of the design route (Table 3); `conv2d` is Vittt.
        pool: class strategy (Table 4).
        chunk_size: tokens per inner gradient step, the paper's b (Fig. 7a); 0 takes the whole sequence as one chunk.
        w0: initial states of the inner learner (Fig. 7b).
        drop_rate: dropout in front of the head.
        drop_path_rate: stochastic depth, linear from 0 to this over the blocks.

    Raises:
        ValueError: an unknown design, pool or w0, or sizes that do not fit.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        design: Design = "conv2d",
        pool: Pool = "mean",
        chunk_size: int = 16,
        w0: W0Mode = "per_direction",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        for name, value, known in (("design", design, DESIGNS), ("pool", pool, POOLS), ("w0", w0, W0_MODES)):
            if value not in known:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
        if chunk_size < 0:
            raise ValueError(f"chunk_size {chunk_size} is negative; 0 takes the whole sequence as one chunk")
        self.img_size, self.patch_size, self.num_classes = to_2tuple(img_size), patch_size, num_classes
        self.embed_dim = self.num_features = self.head_hidden_size = embed_dim
        self.depth, self.num_heads = depth, num_heads
        self.design, self.pool, self.chunk_size, self.w0 = design, pool, chunk_size, w0
        self.grad_checkpointing = False
        self.grid_size = self._grid(*self.img_size)

        num_patches = self.grid_size[0] * self.grid_size[1]
        num_class_tokens = len(class_positions(pool, num_patches))
        self.patch_embed = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)
        self.pos_embed = nn.Parameter(torch.empty(1, num_patches, embed_dim))
        if num_class_tokens:
            self.cls_token = nn.Parameter(torch.empty(1, num_class_tokens, embed_dim))
            self.cls_pos_embed = nn.Parameter(torch.empty(1, num_class_tokens, embed_dim))
        drop_path = calculate_drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.ModuleList(
            VitttBlock(
                embed_dim, num_heads, num_patches + num_class_tokens,
                design=design, chunk_size=chunk_size, w0=w0, pool=pool, drop_path=drop_path[i],
            )  # fmt: skip
            for i in range(depth)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=EPS)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.feature_info = [{"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size} for i in range(depth)]
        self.init_weights()

    def init_weights(self) -> None:
        """Linear trunc_normal 0.02 and zero bias, embeddings trunc_normal 0.02, convolutions PyTorch's default; mixers do their own."""
        mixer_modules = {module for block in self.blocks for module in block.mixer.modules()}
        for module in self.modules():
            if isinstance(module, nn.Linear) and module not in mixer_modules:
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.prefix_positions(1):
            nn.init.trunc_normal_(self.cls_token, std=0.02)
            nn.init.trunc_normal_(self.cls_pos_embed, std=0.02)

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]:
        """Positions of the class tokens in the token sequence, ascending; empty for the pooling strategies."""
        return class_positions(self.pool, num_patches)

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Image (B, C, H, W) -> tokens (B, T, D) with positions and class tokens, and the (h, w) grid of the patches.

        Raises:
            ValueError: H or W is not a multiple of the patch size.
        """
        grid = self._grid(*x.shape[-2:])
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = tokens + resample_abs_pos_embed(self.pos_embed, list(grid), list(self.grid_size), num_prefix_tokens=0, antialias=False)
        positions = self.prefix_positions(grid[0] * grid[1])
        if positions:
            tokens = insert_tokens(tokens, (self.cls_token + self.cls_pos_embed).expand(len(tokens), -1, -1), positions)
        return tokens, grid

    def forward_features(self, x: Tensor) -> Tensor:
        """Image (B, C, H, W) -> tokens (B, T, D) after the final LayerNorm, class tokens at `prefix_positions`."""
        tokens, grid = self.embed(x)
        for block in self.blocks:
            tokens = self._run_block(block, tokens, grid)
        return self.norm(tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, T, D) -> class feature (B, D) by the pooling strategy, then logits (B, num_classes)."""
        if self.pool == "mean":
            feature = x.mean(dim=1)
        elif self.pool == "max":
            feature = x[torch.arange(len(x), device=x.device), x.norm(dim=-1).argmax(dim=1)]
        else:
            num_patches = x.shape[1] - self.cls_token.shape[1]
            feature = x[:, list(self.prefix_positions(num_patches))].mean(dim=1)
        feature = self.head_drop(feature)
        return feature if pre_logits else self.head(feature)

    def forward(self, x: Tensor) -> Tensor:
        """Image (B, C, H, W) -> logits (B, num_classes), or the class feature (B, D) when there is no head."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Patch tokens after chosen blocks, as timm's feature interface wants them.

        Args:
            x: image (B, C, H, W).
            indices: the last n blocks if int, all if None, else these blocks.
            norm: apply the final LayerNorm to the intermediates.
            stop_early: leave out the blocks after the last index.
            output_fmt: `NCHW` for (B, D, h, w) or `NLC` for (B, h·w, D); class tokens are left out.
            intermediates_only: do not return the final tokens.

        Returns:
            The intermediates, or (final tokens as of `forward_features`, intermediates).
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} is not NCHW or NLC")
        take, last = feature_take_indices(len(self.blocks), indices)
        tokens, grid = self.embed(x)
        positions = self.prefix_positions(grid[0] * grid[1])
        intermediates = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            tokens = self._run_block(block, tokens, grid)
            if i in take:
                patches = remove_tokens(self.norm(tokens) if norm else tokens, positions)
                intermediates.append(patches.transpose(1, 2).unflatten(2, grid).contiguous() if output_fmt == "NCHW" else patches)
        return intermediates if intermediates_only else (self.norm(tokens), intermediates)

    def prune_intermediate_layers(self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True) -> list[int]:
        """Drop the blocks after the last index, and on request the final norm and the head; returns the absolute indices."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0)
        return take

    def set_backend(self, backend: str) -> None:
        """Which implementation of TTT-Linear every layer runs: see `kernels.ttt_linear`."""
        for block in self.blocks:
            block.mixer.backend = backend

    def selected_backend(self, dtype: torch.dtype) -> str:
        """The implementation of TTT-Linear that runs on this model's device, at its own image size, for activations of `dtype`."""
        return self.blocks[0].mixer.selected_backend(dtype)

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for `num_classes`; the class strategy belongs to the architecture, so `global_pool` may only repeat it."""
        if global_pool not in (None, self.pool):
            raise ValueError(f"global_pool {global_pool!r}: the class strategy of a built Vittt is fixed ({self.pool}); build it with pool=...")
        self.num_classes = num_classes
        device, dtype = self.pos_embed.device, self.pos_embed.dtype
        self.head = nn.Linear(self.embed_dim, num_classes, device=device, dtype=dtype) if num_classes else nn.Identity()
        if num_classes:
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Embeddings, class tokens and the inner learner's norm, bias and token scale; W0 and the projections decay."""
        exempt = ("pos_embed", "cls_token", "cls_pos_embed", "mixer.ln_weight", "mixer.ln_bias", "mixer.b0", "mixer.token_scale")
        return {name for name, _ in self.named_parameters() if name.endswith(exempt)}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        """Patterns that put parameters into layers, for layer-wise learning-rate decay."""
        return {"stem": r"^cls_token|^cls_pos_embed|^pos_embed|^patch_embed", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def _run_block(self, block: VitttBlock, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, tokens, grid)
        return block(tokens, grid)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        p = self.patch_size
        if height < p or width < p or height % p or width % p:
            raise ValueError(f"image size {height}x{width}: height and width must be positive multiples of the patch size {p}")
        return height // p, width // p


def class_positions(pool: Pool, num_patches: int) -> tuple[int, ...]:
    """Where the class tokens of a strategy sit in the token sequence, ascending."""
    return {"head": (0,), "mid": (num_patches // 2,), "double": (0, num_patches + 1)}.get(pool, ())


def remove_tokens(tokens: Tensor, positions: tuple[int, ...]) -> Tensor:
    """(B, T, D) -> (B, T - len(positions), D) without the tokens at the ascending `positions`."""
    if not positions:
        return tokens
    starts, ends = (0, *(p + 1 for p in positions)), (*positions, tokens.shape[1])
    return torch.cat([tokens[:, a:b] for a, b in zip(starts, ends, strict=True)], dim=1)


def insert_tokens(tokens: Tensor, extra: Tensor, positions: tuple[int, ...]) -> Tensor:
    """The inverse of `remove_tokens`: extra (B, n, D) goes to the n ascending `positions` of the result."""
    pieces, done = [], 0
    for i, position in enumerate(positions):
        pieces += [tokens[:, done : position - i], extra[:, i : i + 1]]
        done = position - i
    return torch.cat([*pieces, tokens[:, done:]], dim=1) if positions else tokens


def _cfg(input_size: int) -> dict:
    return {
        "num_classes": 1000, "input_size": (3, input_size, input_size), "pool_size": None, "crop_pct": 0.875, "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD, "first_conv": "patch_embed", "classifier": "head",
        "fixed_input_size": False, "license": "apache-2.0",
    }  # fmt: skip


default_cfgs = generate_default_cfgs(
    {
        "vittt_tiny_patch16_224.untrained": _cfg(224),
        "vittt_small_patch16_224.untrained": _cfg(224),
        "vittt_base_patch16_224.untrained": _cfg(224),
        "vittt_nano_patch16_144.untrained": _cfg(144),
    }
)


def _create(variant: str, pretrained: bool, **kwargs) -> Vittt:
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        Vittt, variant, pretrained, feature_cfg={"out_indices": out_indices, "feature_cls": "getter"}, **kwargs
    )


@register_model
def vittt_tiny_patch16_224(pretrained: bool = False, **kwargs) -> Vittt:
    """Vittt-T: D 192, 3 heads, 6.983 M parameters."""
    return _create("vittt_tiny_patch16_224", pretrained, **{"embed_dim": 192, "num_heads": 3, **kwargs})


@register_model
def vittt_small_patch16_224(pretrained: bool = False, **kwargs) -> Vittt:
    """Vittt-S: D 384, 6 heads, 26.365 M parameters."""
    return _create("vittt_small_patch16_224", pretrained, **{"embed_dim": 384, "num_heads": 6, **kwargs})


@register_model
def vittt_base_patch16_224(pretrained: bool = False, **kwargs) -> Vittt:
    """Vittt-B: D 768, 12 heads, 102.329 M parameters."""
    return _create("vittt_base_patch16_224", pretrained, **{"embed_dim": 768, "num_heads": 12, **kwargs})


@register_model
def vittt_nano_patch16_144(pretrained: bool = False, **kwargs) -> Vittt:
    """A small Vittt for tests and for the embedded data sets: D 64, 4 blocks, one head, 9x9 tokens (a ragged last chunk)."""
    return _create("vittt_nano_patch16_144", pretrained, **{"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 1, **kwargs})
