"""Vittt, the backbone of Vision-TTT (sections 4.2 and 4.3): Vittt-T/S/B, and a nano for tests and the embedded data
sets.

One class is the whole family: its arguments select among the six designs of the paper's route (Table 3), the class
strategies (Table 4), the chunk sizes (Fig. 7a) and the initial states (Fig. 7b). `import repro.models` registers the
models with timm.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import fused_block
from .backbone import Backbone, insert_tokens, register_sizes, resample_positions
from .graphs import Graphs
from .image_model import Grid, init_linear
from .read_block import choose_block, count_class_rows
from .reading import Reading
from .shell import require_choice
from .ttt_mixer import (
    DESIGNS,
    REDUCIBLE,
    STEPS,
    W0_MODES,
    Design,
    Step,
    W0Mode,
    design_has,
    name_conv1d,
    ttt_linear_macs,
)
from .vittt_block import EPS, POOLS, Pool, class_positions


class Vittt(Backbone):
    """The backbone of Vision-TTT in timm's conventions, as a `PlainBackbone`.

    Args:
        design: which design of the paper's route (Table 3); `conv2d` is Vittt.
        pool: class strategy (Table 4).
        num_heads: heads of the inner learner, which must divide the width.
        chunk_size: tokens per inner gradient step, the paper's b (Fig. 7a); 0 takes the whole sequence as one chunk.
        w0: initial states of the inner learner (Fig. 7b).
        reading: the interpretation of the paper, a `Reading` or its text.
        step: the inner learner; see `repro.models.ttt_mixer.STEPS`.
        kwargs: see `Backbone`.

    Raises:
        ValueError: an unknown design, pool, w0, reading or step, or sizes that do not fit.
    """

    graphs: Graphs | None = None  # CUDA graphs, after `freeze` on a GPU

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
        require_choice("design", design, DESIGNS)
        require_choice("pool", pool, POOLS)
        require_choice("w0", w0, W0_MODES)
        require_choice("step", step, STEPS)
        reading = Reading.of(reading)
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
        options = {"design": design, "chunk_size": chunk_size, "w0": w0, "pool": pool, "step": step}
        build = choose_block(reading)
        self.blocks = nn.ModuleList(
            build(D, num_heads, num_patches + num_class_tokens, drop_path=rate, **options)
            for rate in self.drop_path_rates
        )
        self.norm = nn.LayerNorm(D, eps=EPS)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise Linear and embeddings trunc_normal 0.02, biases 0; not convolutions and mixers.

        A mixer, which has initialised itself, is recognised by the name `mixer` in its block.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and ".mixer." not in name:
                init_linear(module)
        for name in ("pos_embed", "cls_token", "cls_pos_embed"):
            if (embedding := getattr(self, name, None)) is not None:
                nn.init.trunc_normal_(embedding, std=0.02)

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]:
        """Return the ascending positions of the class tokens in the sequence; see `class_positions`."""
        return class_positions(self.pool, num_patches)

    def freeze(self, graphs: int = 8) -> "Vittt":
        """Precompute the weights' kernel layouts, 25 operations per block, for inference; return the model.

        On a GPU, forward passes also become CUDA graphs: one for each layout of images after three eager calls, at most
        `graphs` (0: none). They keep the memory of the largest pass. Passes remain eager for batches of more than
        65,536 tokens, in deterministic mode, and under gradients, hooks, modes, profilers, compilers or other captures.

        Each forward pass compares the weights' identities, addresses and version counters. A block with changed weights
        is no longer frozen, and computes as before. `train()` and loading end the freeze at once. `eval()` does not,
        nor does a move or cast that changes nothing. A copy of the model is not frozen.

        Some writes go unnoticed. PyTorch does not count in-place writes through `.data`, `.numpy()` or a storage, nor
        the step of a fused optimiser. A graph of `torch.compile` compares nothing, so only `train()`, loading, moving
        and casting reach it. Call `freeze` again after any other write.

        Raises:
            ValueError: a weight is an inference tensor, which has no version counter; or a negative number of graphs.
        """
        if graphs < 0:
            raise ValueError(f"graphs {graphs} is negative; 0 captures none")
        self._drop_graphs()
        for block in self.blocks:
            fused_block.freeze(block, self.grid_size[0] * self.grid_size[1])
        self.graphs = Graphs(self, graphs) if graphs and next(self.parameters()).is_cuda else None
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes), by a CUDA graph if the model is frozen on a GPU."""
        if torch.compiler.is_compiling() or self.graphs is None:
            return super().forward(x)
        return self.graphs(self, super().forward, x)

    def train(self, mode: bool = True) -> "Vittt":
        """Set the training mode; `train(True)` ends `freeze`, `train(False)` does not."""
        if mode:
            self._drop_graphs()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> "Vittt":
        """Move or cast the model, as `to`, `cuda` and `half` ask; drop the graphs if that changed a weight."""
        super()._apply(*args, **kwargs)
        if self.graphs is not None:  # drop them now, because they keep the old weights' memory
            self.graphs.drop_stale(self)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load weights; drop the graphs, which would read the old ones."""
        self._drop_graphs()
        super()._load_from_state_dict(*args, **kwargs)

    def _drop_graphs(self) -> None:
        """Free all captured passes; the blocks stay frozen."""
        if self.graphs is not None:
            self.graphs.drop()

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Return tokens (B, T, D) with positions and class tokens of images (B, C, H, W), and the patch grid."""
        tokens, grid = self.patches(x)
        if self.pos_embed is not None:
            tokens = tokens + resample_positions(self.pos_embed, self.grid_size, grid)
        positions = self.prefix_positions(grid[0] * grid[1])
        if positions:
            extra = self.cls_token if self.cls_pos_embed is None else self.cls_token + self.cls_pos_embed
            tokens = insert_tokens(tokens, extra.expand(tokens.shape[0], -1, -1), positions)
        # `positions=patches_and_class` without class tokens: the extra row is a parameter without effect
        elif self.cls_pos_embed is not None:
            tokens = tokens + 0 * self.cls_pos_embed
        return tokens, grid

    def _resize(self, grid: Grid) -> None:
        """Resample the positions; ValueError for `chunk_size` 0, whose token scale is as long as the sequence."""
        if not self.chunk_size:
            raise ValueError("chunk_size 0: the learned scale of the tokens is of the image size that was built for")
        super()._resize(grid)

    def class_feature(self, tokens: Tensor) -> Tensor:
        """Compute the class feature (B, D) of normalised tokens (B, T, D) by the class strategy."""
        if self.pool == "mean":
            return tokens.mean(dim=1)
        if self.pool == "max":  # not a maximum per channel: the token with the largest norm
            return tokens[torch.arange(tokens.shape[0], device=tokens.device), tokens.norm(dim=-1).argmax(dim=1)]
        num_patches = tokens.shape[1] - self.cls_token.shape[1]
        return tokens[:, list(self.prefix_positions(num_patches))].mean(dim=1)

    def param_terms(self) -> dict[str, int]:
        """Return named counts that add up to the model's parameters."""
        D, L, H, R, reading = self.embed_dim, self.depth, self.num_heads, self.directions, self.reading
        hidden = int(8 * D / 3)
        patches = self.grid_size[0] * self.grid_size[1]
        class_tokens = len(self.prefix_positions(patches))
        rows = patches * (reading.positions != "none") + count_class_rows(reading, class_tokens)
        biases = reading.gate_bias * design_has(self.design, "gating") + reading.out_bias
        states = {"per_direction": R, "shared": 1, "frozen": 0}[self.w0]  # a frozen W0 is a buffer, not a parameter
        inner_norms = (1 if reading.inner_norm == "shared" else R) * (self.step not in REDUCIBLE)
        scales = {"per_direction": R, "shared": 1, "fixed": 0}[reading.token_scale]
        post_norms = {"merged": 1, "per_direction": R, "none": 0}[reading.post_norm]
        return {
            "patch_embed": self.patch_embed.weight.numel() + D,
            "pos_embed": rows * D,
            "class_tokens": class_tokens * D,
            "layer_norms": L * 4 * D + 2 * D,
            "projections": L * self.num_projections * D * D,
            "projection_biases": L * D * biases,
            "conv1d": L * R * self.num_conv1d * (reading.conv1d_kernel + reading.conv1d_bias) * D,
            "dwconv": L * (9 + reading.dwconv_bias) * D * design_has(self.design, "conv2d"),
            "learning_rate": L * self.num_rates * (D * H + H),
            "inner_state": L * states * H * (D // H) ** 2,
            "inner_bias_and_norm": L * inner_norms * 3 * D,
            "token_scale": L * scales * (self.chunk_size or patches + class_tokens),
            "post_norm": L * post_norms * 2 * D,
            "swiglu": L * (3 * D * hidden + (2 * hidden + D) * reading.swiglu_bias),
            "head": self.num_classes * (D + 1),
        }

    def mac_terms(self, image_size: Grid) -> dict[str, int]:
        """Return named counts of multiply-adds for one image of (H, W) pixels.

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
            "learning_rate": L * T * self.num_rates * D * H,
            "inner_learner": L * R * ttt_linear_macs(T, H, D // H, self.chunk_size, self.step),
            "swiglu": L * T * 3 * D * int(8 * D / 3),
            "head": D * self.num_classes,
        }

    @property
    def directions(self) -> int:
        """Number of directions of the scan, 1 or 2."""
        return 2 if design_has(self.design, "dual") else 1

    @property
    def num_conv1d(self) -> int:
        """Number of Conv1d per direction; with the step `q_is_k` none for the queries, which are not used."""
        names = name_conv1d(self.design, self.reading)
        return len(names) - (self.step == "q_is_k" and "conv_q" in names)

    @property
    def num_rates(self) -> int:
        """Number of inner learning rates of a token in a head."""
        return self.directions if self.reading.learning_rate == "per_direction" else 1

    @property
    def num_projections(self) -> int:
        """Number of D x D projections of a mixer: k, v and an unshared q per direction, plus gate and output."""
        return (
            self.directions * (2 if design_has(self.design, "share_qk") else 3) + design_has(self.design, "gating") + 1
        )

    def no_weight_decay(self) -> set[str]:
        """Return embeddings, class tokens, and the inner norm, bias and token scale; W0 and the projections decay.

        They are found by the ends of their names, so a renamed parameter would decay.
        """
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
