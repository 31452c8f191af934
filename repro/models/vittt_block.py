"""A block of Vittt in the default interpretation of the paper; `repro.models.read_block` has the alternatives."""

from typing import Any, Literal, get_args

import torch
from timm.layers import DropPath, SwiGLU
from torch import Tensor, nn

from . import fused_block
from .backbone import insert_tokens, remove_tokens
from .image_model import Grid
from .ttt_mixer import Design, TTTMixer, design_has

Pool = Literal["mean", "max", "head", "mid", "double"]  # Table 4: MeanPool, MaxPool, Head-, Mid-, DoubleClassTok
POOLS: tuple[Pool, ...] = get_args(Pool)
EPS = 1e-6


class VitttBlock(nn.Module):
    """Vittt block (Eq. 9): tokens + DWConv, then TTT mixer and SwiGLU, each residual and after a LayerNorm.

    Class tokens, whose positions depend on `pool`, skip the convolution. `drop_path` is the stochastic depth rate of
    both residual branches; the other arguments are those of `TTTMixer`.
    """

    mixer_class: type[TTTMixer] = TTTMixer
    frozen: fused_block.Frozen | None = None  # constants that `Vittt.freeze` precomputed
    # whether `fused_block` may compute it, if it has a convolution and no class tokens. A block that computes anything
    # else must set it to False, as `bench.probe` does by this name to measure the plain path
    is_fusible = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_tokens: int,
        *,
        design: Design,
        pool: Pool,
        drop_path: float,
        dwconv_bias: bool = False,
        swiglu_bias: bool = True,
        **learner: Any,
    ):
        super().__init__()
        self.pool = pool
        self.dwconv = None
        if design_has(design, "conv2d"):
            self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=dwconv_bias)
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.mixer = self.mixer_class(dim, num_heads, num_tokens, design=design, eps=EPS, **learner)
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = SwiGLU(dim, int(8 * dim / 3), bias=swiglu_bias)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def train(self, mode: bool = True) -> "VitttBlock":
        """Set the training mode; `train(True)` ends `Vittt.freeze`, `train(False)` does not."""
        if mode:
            self.frozen = None
        return super().train(mode)

    # eager inference notices by itself what the next two methods change; a compiled graph guards only on `frozen`

    def _apply(self, *args: Any, **kwargs: Any) -> "VitttBlock":
        """Move or cast the block, as `to`, `cuda` and `half` ask; `find_frozen` ends the freeze if a weight changed."""
        super()._apply(*args, **kwargs)
        fused_block.find_frozen(self)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load weights and end the freeze."""
        self.frozen = None
        super()._load_from_state_dict(*args, **kwargs)

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Map tokens (B, T, D), row-major on an (h, w) grid, with class tokens at `class_positions`, to (B, T, D)."""
        if backend := fused_block.find_backend(self, tokens):
            return fused_block.forward(self, tokens, grid, backend)
        return self.forward_plainly(tokens, grid)

    def forward_plainly(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Compute `forward` with plain PyTorch around the scan, the reference for `fused_block`.

        That module has its own code for inference on CPUs, for inference on GPUs and for training, so all must follow a
        change here.
        """
        if self.dwconv is not None:
            tokens = self._convolve(tokens, grid)
        tokens = tokens + self.drop_path(self.mixer(self.norm1(tokens)))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))

    def _convolve(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Add to the tokens their convolution on the grid."""
        positions = class_positions(self.pool, grid[0] * grid[1])
        out = self._convolve_patches(tokens, grid, positions)
        return tokens + insert_tokens(out, torch.zeros_like(tokens[:, list(positions)]), positions)

    def _convolve_patches(self, tokens: Tensor, grid: Grid, positions: tuple[int, ...]) -> Tensor:
        """Return the convolved patches (B, h·w, D) of tokens that have class tokens at `positions`."""
        image = remove_tokens(tokens, positions).transpose(1, 2).unflatten(2, grid)  # a channels-last view, no copy
        return self.dwconv(image).flatten(2).transpose(1, 2)


def class_positions(pool: Pool, num_patches: int) -> tuple[int, ...]:
    """Return the ascending positions of a strategy's class tokens in the sequence; none for pooling strategies."""
    return {"head": (0,), "mid": (num_patches // 2,), "double": (0, num_patches + 1)}.get(pool, ())
