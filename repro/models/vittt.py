"""Vittt, the backbone of Vision-TTT (sections 4.2 and 4.3): Vittt-T/S/B, and a nano for tests and the embedded data
sets.

One class is the whole family: its arguments select among the six designs of the paper's route (Table 3), the class
strategies (Table 4), the chunk sizes (Fig. 7a) and the initial states (Fig. 7b). `import repro.models` registers the
models with timm.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from timm.layers import DropPath, SwiGLU
from torch import Tensor, nn

from . import fused_block
from .backbone import Backbone, Grid, init_linear, insert_tokens, register_sizes, remove_tokens, resample_positions
from .reading import Reading
from .shell import require_choice
from .ttt_mixer import (
    DESIGNS,
    REDUCIBLE,
    STEPS,
    W0_MODES,
    Design,
    Step,
    TTTMixer,
    W0Mode,
    conv1d_names,
    design_has,
    ttt_linear_macs,
)

Pool = Literal["mean", "max", "head", "mid", "double"]  # Table 4: MeanPool, MaxPool, Head-, Mid-, DoubleClassTok
POOLS: tuple[Pool, ...] = get_args(Pool)
EPS = 1e-6


class VitttBlock(nn.Module):
    """Eq. 9: tokens + DWConv, then the TTT mixer and SwiGLU, each after a LayerNorm and with a residual.

    Class tokens, whose places depend on `pool`, skip the convolution. `drop_path` is the rate of both residual
    branches; the other arguments are those of `TTTMixer`. All of this is the default reading; `Reading` has the others.
    """

    constants: fused_block.Constants | None = None  # kept by `Vittt.freeze`

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_tokens: int,
        *,
        design: Design,
        pool: Pool,
        drop_path: float,
        reading: Reading,
        **learner: Any,
    ):
        super().__init__()
        self.pool, self.reading = pool, reading
        self.dwconv = None
        if design_has(design, "conv2d"):
            self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=reading.dwconv_bias)
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.mixer = TTTMixer(dim, num_heads, num_tokens, design=design, eps=EPS, reading=reading, **learner)
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = SwiGLU(dim, int(8 * dim / 3), bias=reading.swiglu_bias)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def train(self, mode: bool = True) -> "VitttBlock":
        """As every module; forgets what `Vittt.freeze` has kept, as moving, casting and loading do."""
        self.constants = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> "VitttBlock":
        self.constants = None
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.constants = None
        super()._load_from_state_dict(*args, **kwargs)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """(B, T, D) on an (h, w) grid, row-major, with class tokens at `class_positions` -> (B, T, D)."""
        if fused_block.can_fuse(self, tokens):
            return fused_block.forward(self, tokens, grid)
        return self.forward_plainly(tokens, grid)

    def forward_plainly(self, tokens: Tensor, grid: Grid) -> Tensor:
        """As `forward`, by plain PyTorch around the scan, which is what `fused_block` is tested against."""
        tokens, x = self._normalise(tokens, grid)
        tokens = (tokens if self.reading.residual == "stream" else x) + self.drop_path(self.mixer(x))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))

    def _normalise(self, tokens: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """The residual stream, and what the mixer is given; the convolution belongs to both, or to the latter alone."""
        if self.dwconv is None:
            return tokens, self.norm1(tokens)
        if self.reading.dwconv_place == "after_norm":
            return tokens, self._convolve(self.norm1(tokens), grid)
        convolved = self._convolve(tokens, grid)
        return (convolved if self.reading.dwconv_residual else tokens), self.norm1(convolved)

    def _convolve(self, tokens: Tensor, grid: Grid) -> Tensor:
        """The convolution on the grid, with the tokens themselves added unless the reading leaves them out."""
        positions = class_positions(self.pool, grid[0] * grid[1])
        image = remove_tokens(tokens, positions).transpose(1, 2).unflatten(2, grid)  # a channels-last view, no copy
        out = self.dwconv(image).flatten(2).transpose(1, 2)
        extra = tokens[:, list(positions)]
        if positions and self.reading.dwconv_class_tokens == "one_pixel":
            extra = self.dwconv(extra.flatten(0, 1)[..., None, None]).view_as(extra)
        elif self.reading.dwconv_residual:
            extra = torch.zeros_like(extra)
        out = insert_tokens(out, extra, positions)
        return tokens + out if self.reading.dwconv_residual else out


class Vittt(Backbone):
    """The backbone of Vision-TTT in timm's conventions, as a `PlainBackbone`.

    Args:
        num_heads: heads H of the inner learner.
        design: which design of the paper's route (Table 3); `conv2d` is Vittt.
        pool: class strategy (Table 4).
        chunk_size: tokens per inner gradient step, the paper's b (Fig. 7a); 0 takes the whole sequence as one chunk.
        w0: initial states of the inner learner (Fig. 7b).
        reading: how the paper is read where it leaves a choice, a `Reading` or its text.
        step: the inner learner, see `repro.models.ttt_mixer.STEPS`.
        kwargs: see `Backbone`.

    Raises:
        ValueError: an unknown design, pool, w0, reading or step, or sizes that do not fit.
    """

    def __init__(
        self,
        *,
        num_heads: int = 3,
        design: Design = "conv2d",
        pool: Pool = "mean",
        chunk_size: int = 16,
        w0: W0Mode = "per_direction",
        reading: Reading | str | Mapping[str, Any] = "",
        step: Step = "own",
        **kwargs: Any,
    ):
        require_choice("step", step, STEPS)
        reading = Reading.of(reading)
        for name, value, known in (("design", design, DESIGNS), ("pool", pool, POOLS), ("w0", w0, W0_MODES)):
            if value not in known:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
        if chunk_size < 0:
            raise ValueError(f"chunk_size {chunk_size} is negative; 0 takes the whole sequence as one chunk")
        super().__init__(pool=pool, **kwargs)
        self.num_heads = num_heads
        self.design = design
        self.chunk_size = chunk_size
        self.w0 = w0
        self.reading = reading
        self.step = step
        D, num_patches = self.embed_dim, self.grid_size[0] * self.grid_size[1]
        num_class_tokens = len(self.prefix_positions(num_patches))
        self.pos_embed = nn.Parameter(torch.empty(1, num_patches, D)) if reading.positions != "none" else None
        if num_class_tokens:
            self.cls_token = nn.Parameter(torch.empty(1, num_class_tokens, D))
        rows = count_class_rows(reading, num_class_tokens)
        self.cls_pos_embed = nn.Parameter(torch.empty(1, rows, D)) if rows else None
        options = {"design": design, "chunk_size": chunk_size, "w0": w0, "pool": pool, "reading": reading, "step": step}
        self.blocks = nn.ModuleList(
            VitttBlock(D, num_heads, num_patches + num_class_tokens, drop_path=rate, **options)
            for rate in self.drop_path_rates
        )
        self.norm = nn.LayerNorm(D, eps=EPS)
        self.init_weights()

    def init_weights(self) -> None:
        """Linear layers and embeddings trunc_normal 0.02, biases 0, convolutions by PyTorch's default; mixers
        initialise themselves.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and ".mixer." not in name:
                init_linear(module)
        for name in ("pos_embed", "cls_token", "cls_pos_embed"):
            if (embedding := getattr(self, name, None)) is not None:
                nn.init.trunc_normal_(embedding, std=0.02)

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]:
        """Positions of the class tokens in the token sequence, ascending; see `class_positions`."""
        return class_positions(self.pool, num_patches)

    def freeze(self) -> "Vittt":
        """Keep what the GPU's kernels make of the weights, some 25 small operations a block, from now on; for
        inference.

        Training, moving, casting or loading the model ends it. Another write to the weights does not, and must not
        happen.
        """
        for block in self.blocks:
            fused_block.freeze(block, self.grid_size[0] * self.grid_size[1])
        return self

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Image (B, C, H, W) -> tokens (B, T, D) with positions and class tokens, and the (h, w) grid of the patches."""
        tokens, grid = self.patches(x)
        if self.pos_embed is not None:
            tokens = tokens + resample_positions(self.pos_embed, self.grid_size, grid)
        positions = self.prefix_positions(grid[0] * grid[1])
        if positions:
            extra = self.cls_token if self.cls_pos_embed is None else self.cls_token + self.cls_pos_embed
            tokens = insert_tokens(tokens, extra.expand(len(tokens), -1, -1), positions)
        # the row of a class token that there is not: a parameter without an effect
        elif self.cls_pos_embed is not None:
            tokens = tokens + 0 * self.cls_pos_embed
        return tokens, grid

    def _resize(self, grid: Grid) -> None:
        if not self.chunk_size:
            raise ValueError("chunk_size 0: the learned scale of the tokens is of the image size that was built for")
        super()._resize(grid)

    def class_feature(self, tokens: Tensor) -> Tensor:
        """Normalised tokens (B, T, D) -> class feature (B, D) by the class strategy."""
        if self.pool == "mean":
            return tokens.mean(dim=1)
        if self.pool == "max":
            return tokens[torch.arange(len(tokens), device=tokens.device), tokens.norm(dim=-1).argmax(dim=1)]
        num_patches = tokens.shape[1] - self.cls_token.shape[1]
        return tokens[:, list(self.prefix_positions(num_patches))].mean(dim=1)

    def param_terms(self) -> dict[str, int]:
        """Named counts of parameters that add up to the model's own."""
        D, L, H, R, reading = self.embed_dim, self.depth, self.num_heads, self.directions, self.reading
        hidden, built_for = int(8 * D / 3), self.grid_size[0] * self.grid_size[1]
        class_tokens = len(self.prefix_positions(built_for))
        rows = built_for * (reading.positions != "none") + count_class_rows(reading, class_tokens)
        scales = {"per_direction": R, "shared": 1, "fixed": 0}[reading.token_scale]
        states = {"per_direction": R, "shared": 1, "frozen": 0}[self.w0]  # a frozen W0 is a buffer, not a parameter
        return {
            "patch_embed": self.patch_embed.weight.numel() + D,
            "pos_embed": rows * D,
            "class_tokens": class_tokens * D,
            "layer_norms": L * 4 * D + 2 * D,
            "projections": L * self.num_projections * D * D,
            "projection_biases": L * D * (reading.gate_bias * design_has(self.design, "gating") + reading.out_bias),
            "conv1d": L * R * self.num_conv1d * (reading.conv1d_kernel + reading.conv1d_bias) * D,
            "dwconv": L * (9 + reading.dwconv_bias) * D * design_has(self.design, "conv2d"),
            "learning_rate": L * self.num_rates * (D * H + H),
            "inner_state": L * states * H * (D // H) ** 2,
            "inner_bias_and_norm": L
            * (1 if reading.inner_norm == "shared" else R)
            * 3
            * D
            * (self.step not in REDUCIBLE),
            "token_scale": L * scales * (self.chunk_size or built_for + class_tokens),
            "post_norm": L * {"merged": 1, "per_direction": R, "none": 0}[reading.post_norm] * 2 * D,
            "swiglu": L * (3 * D * hidden + (2 * hidden + D) * reading.swiglu_bias),
            "head": self.num_classes * (D + 1),
        }

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Named counts of multiply-adds for one image of (H, W) pixels.

        Per token and layer: n·D² for the n projections, 3·D·hidden for SwiGLU, (3d + 2b)·D for the inner learner and
        4·D for each Conv1d in each direction, 9·D for DWConv and D·H for the learning rate, with d = D/H and chunks of
        b tokens. The paper's Eq. 14, 6TD² + 6TDd + 4bTD, is the projections and the inner learner of two directions.
        """
        D, L, H, R, reading = self.embed_dim, self.depth, self.num_heads, self.directions, self.reading
        h, w = self.grid_of(*image_size)
        class_tokens = len(self.prefix_positions(h * w))
        N, T = h * w, h * w + class_tokens
        convolved = N + class_tokens * (reading.dwconv_class_tokens == "one_pixel")
        return {
            "patch_embed": N * self.patch_embed.weight.numel(),
            "projections": L * T * self.num_projections * D * D,
            "conv1d": L * T * R * self.num_conv1d * reading.conv1d_kernel * D,
            "dwconv": L * convolved * 9 * D * design_has(self.design, "conv2d"),
            "learning_rate": L * T * D * H * self.num_rates,
            "inner_learner": L * R * ttt_linear_macs(T, H, D // H, self.chunk_size, self.step),
            "swiglu": L * T * 3 * D * int(8 * D / 3),
            "head": D * self.num_classes,
        }

    @property
    def directions(self) -> int:
        """Directions of the scan, 1 or 2."""
        return 2 if design_has(self.design, "dual") else 1

    @property
    def num_conv1d(self) -> int:
        """Conv1d of a direction: for the keys, for the queries where somebody reads them, or for both."""
        names = conv1d_names(self.design, self.reading)
        return len(names) - (self.step == "q_is_k" and "conv_q" in names)

    @property
    def num_rates(self) -> int:
        """Inner learning rates of a token and head: one, or one for each direction."""
        return self.directions if self.reading.learning_rate == "per_direction" else 1

    @property
    def num_projections(self) -> int:
        """D x D projections of a mixer: k, v and, before it is shared with k, q in each direction; the gate and the
        output once.
        """
        return (
            self.directions * (2 if design_has(self.design, "share_qk") else 3) + design_has(self.design, "gating") + 1
        )

    def no_weight_decay(self) -> set[str]:
        """Embeddings, class tokens, and the inner learner's norm, bias and token scale; W0 and the projections decay."""
        exempt = (
            "pos_embed",
            "cls_token",
            "cls_pos_embed",
            "mixer.ln_weight",
            "mixer.ln_bias",
            "mixer.b0",
            "mixer.token_scale",
        )
        return {name for name, _ in self.named_parameters() if name.endswith(exempt)}


def count_class_rows(reading: Reading, num_class_tokens: int) -> int:
    """Rows of the position embedding beyond those of the patches: one for each class token; T + 1 rows stand where
    there is none.
    """
    if reading.positions == "none":
        return 0
    return max(num_class_tokens, int(reading.positions == "patches_and_class"))


def class_positions(pool: Pool, num_patches: int) -> tuple[int, ...]:
    """The positions of a strategy's class tokens in the token sequence, ascending; none for the pooling strategies."""
    return {"head": (0,), "mid": (num_patches // 2,), "double": (0, num_patches + 1)}.get(pool, ())


register_sizes(
    Vittt,
    {
        "vittt_tiny_patch16_224": {"embed_dim": 192, "num_heads": 3},  # 6.983 M parameters
        "vittt_small_patch16_224": {"embed_dim": 384, "num_heads": 6},  # 26.365 M
        "vittt_base_patch16_224": {"embed_dim": 768, "num_heads": 12},  # 102.329 M
        # for tests and the embedded data sets: 9x9 tokens, so that the last chunk is shorter
        "vittt_nano_patch16_144": {"img_size": 144, "embed_dim": 64, "depth": 4, "num_heads": 1},
    },
)
