"""Base class of hierarchical backbones: timm's interface over four stages of falling resolution and growing width.

A family adds its stem, the blocks of its stages, the downsampling between them, and its final norm. Shared code does
the rest: feature maps for dense tasks, the head, stochastic depth and gradient checkpointing. `pyramid.NativePyramid`
makes a `Hierarchy` the backbone of a detector or a segmenter.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from timm.layers import calculate_drop_path_rates, to_2tuple
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .backbone import rename_keys
from .image_model import Grid, ImageModel, check_rates, init_linear

STRIDES = (4, 8, 16, 32)  # strides of the stages


class Stage(nn.Module):
    """Blocks on maps of one width and one grid, and the downsampling to the next stage.

    A family overrides `forward` around `run_blocks` if its blocks share a tensor that depends on the grid, or work on
    windows of the map.

    Args:
        blocks: each maps (B, C, h, w) to the same shape; further arguments come from `run_blocks`.
        downsample: maps (B, C, h, w) to the next stage's input (B, C', ⌈h/2⌉, ⌈w/2⌉); None in the last stage.
    """

    def __init__(self, blocks: Sequence[nn.Module], downsample: nn.Module | None = None):
        super().__init__()
        self.blocks, self.downsample = nn.ModuleList(blocks), downsample

    def forward(self, x: Tensor, *, recompute: bool = False) -> Tensor:
        """Map (B, C, h, w) to the same shape, before `downsample`; `recompute` turns on gradient checkpointing."""
        return self.run_blocks(x, recompute=recompute)

    def run_blocks(self, x: Tensor, *shared: Any, recompute: bool) -> Tensor:
        """Call the blocks in turn as `block(x, *shared)`; return a batch of no images unchanged.

        Blocks with batch norms in training are not recomputed.
        """
        if x.shape[0] == 0:
            return x
        for block in self.blocks:
            again = recompute and torch.is_grad_enabled() and not _counts_batches(block)
            x = checkpoint(block, x, *shared) if again else block(x, *shared)
        return x


def _counts_batches(block: nn.Module) -> bool:
    """Tell whether a second run on a batch would count it twice in the statistics of a batch norm."""
    return any(isinstance(module, _BatchNorm) and module.training for module in block.modules())


class Hierarchy(ImageModel):
    """Four stages whose grids are those of strides 4, 8, 16 and 32, for images of any size of at least 32 x 32 pixels.

    Grids are rounded up: the stage of stride s has ⌈H/s⌉ x ⌈W/s⌉ positions. A subclass sets `patch_embed`, which maps
    images (B, in_chans, H, W) to (B, widths[0], ⌈H/4⌉, ⌈W/4⌉); `stages`, a ModuleList of four `Stage`s; and `norm`,
    which keeps the shape of the last map; then it calls `init_weights`. A subclass with a closed form of its
    multiply-adds implements `mac_terms(image_size)`, as in `Backbone`, and sets `param_patterns`.

    Args:
        img_size: image height and width that the model is built for; it takes other sizes, too.
        in_chans, num_classes: image channels; outputs of the head, 0 for no head.
        widths, depths: channels and number of blocks of each stage.
        drop_path_rate: rate of stochastic depth in the last block; `drop_path_rates`, a list for each stage, rise
            linearly from 0 to it.

    Raises:
        ValueError: a rate outside 0 to 1, other than four widths and depths, or an image smaller than 32 x 32.
    """

    patch_embed: nn.Module
    stages: nn.ModuleList
    norm: nn.Module
    param_patterns: ClassVar[Mapping[str, str]]  # term of `param_terms` -> regular expression of its parameters' names

    def __init__(
        self,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        *,
        widths: Sequence[int],
        depths: Sequence[int],
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        check_rates(drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        if not len(widths) == len(depths) == len(STRIDES):
            raise ValueError(f"{len(widths)} widths and {len(depths)} depths, expected {len(STRIDES)} of each")
        self.img_size, self.in_chans, self.num_classes = to_2tuple(img_size), in_chans, num_classes
        self.widths, self.depths = tuple(widths), tuple(depths)
        self.num_features = self.head_hidden_size = self.widths[-1]
        self.drop_path_rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.global_pool = self.pooled_by = "avg"
        self.grids_of(*self.img_size)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": width, "reduction": stride}
            for i, (width, stride) in enumerate(zip(self.widths, STRIDES, strict=True))
        ]

    def init_weights(self) -> None:
        """Initialise Linear weights by trunc_normal 0.02, their biases by 0; other modules keep their values."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)

    def param_terms(self) -> dict[str, int]:
        """Return named counts that add up to the model's parameters.

        The first pattern that is found in a parameter's name counts; StopIteration if there is none.
        """
        terms = dict.fromkeys(self.param_patterns, 0)
        for name, parameter in self.named_parameters():
            term = next(term for term, pattern in self.param_patterns.items() if re.search(pattern, name))
            terms[term] += parameter.numel()
        return terms

    def grids_of(self, height: int, width: int) -> list[Grid]:
        """Return the (h, w) of each stage for an image in pixels; ValueError for a side below the largest stride."""
        if height < STRIDES[-1] or width < STRIDES[-1]:
            raise ValueError(f"image size {height}x{width}: height and width must be at least {STRIDES[-1]}")
        return [(-(-height // stride), -(-width // stride)) for stride in STRIDES]

    def embed(self, x: Tensor) -> Tensor:
        """Map images (B, in_chans, H, W) to the first stage's (B, widths[0], ⌈H/4⌉, ⌈W/4⌉); raises as `grids_of`."""
        self.check_image_size(*x.shape[-2:])
        self.grids_of(*x.shape[-2:])
        return self.patch_embed(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (B, in_chans, H, W) to the last map after the final norm, (B, widths[-1], ⌈H/32⌉, ⌈W/32⌉)."""
        return self.norm(self._run(x, len(self.stages))[-1])

    def pool_features(self, x: Tensor) -> Tensor:
        """Average a normalised map (B, C, h, w) to (B, C)."""
        return x.mean(dim=(2, 3))

    def set_pooling(self, name: str, num_classes: int) -> None:
        """Pool by `avg`, or not at all by ""; without pooling there can be no head (ValueError)."""
        if not name and num_classes:
            raise ValueError("global_pool '': a map has no logits; take num_classes 0 with it")
        super().set_pooling(name, num_classes)

    def set_input_size(self, img_size: int | Grid | None = None, patch_size: int | Grid | None = None) -> None:
        """Set the image size in pixels that the model is built for; no parameter depends on it."""
        if patch_size is not None:
            raise ValueError(f"patch_size {patch_size}: the stem of this model has no patches of another size")
        self.img_size = to_2tuple(self.img_size if img_size is None else img_size)
        self.grids_of(*self.img_size)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        return_prefix_tokens: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Return the maps of selected stages before their downsampling, as timm's feature interface defines it.

        Args:
            indices: the last n stages (an int), all stages (None), or a list of stages.
            norm: whether to apply the final norm to the last stage's map.
            stop_early: whether to skip the stages after the last selected one.
            output_fmt: `NCHW` for (B, widths[i], h, w) or `NLC` for (B, h·w, widths[i]).
            return_prefix_tokens: must be False, because there are no class tokens.

        Returns:
            The maps if `intermediates_only`, else (the last map that was computed, maps). If all stages ran, the last
            map is that of `forward_features`.

        Raises:
            ValueError: another `output_fmt`, or `return_prefix_tokens`.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} is not NCHW or NLC")
        if return_prefix_tokens:
            raise ValueError("return_prefix_tokens: a hierarchical model has no class tokens")
        take, last = feature_take_indices(len(self.stages), indices)
        maps = self._run(x, last + 1 if stop_early else len(self.stages))
        whole = len(maps) == len(self.stages)
        final = self.norm(maps[-1]) if whole and (norm or not intermediates_only) else maps[-1]
        chosen = [final if norm and i == len(self.stages) - 1 else maps[i] for i in take]
        if output_fmt == "NLC":
            chosen = [each.flatten(2).transpose(1, 2) for each in chosen]
        return chosen if intermediates_only else (final, chosen)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last index and, if asked, norm and head; return the absolute indices."""
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        self.stages[-1].downsample = None
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0)
        return take

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns that assign parameters to layers, for layer-wise learning-rate decay.

        A downsampling belongs to the block before it, the norm to the last one.
        """
        if coarse:
            return {"stem": r"^patch_embed", "blocks": [(r"^stages\.(\d+)", None), (r"^norm", (99999,))]}
        blocks = (
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^stages\.(\d+)\.downsample", (99999,)),
            (r"^norm", (99999,)),
        )
        return {"stem": r"^patch_embed", "blocks": list(blocks)}

    def _run(self, x: Tensor, count: int) -> list[Tensor]:
        """Return the maps of the first `count` stages."""
        x, maps = self.embed(x), []
        for stage in self.stages:
            x = stage(x, recompute=self.grad_checkpointing)
            maps.append(x)
            if len(maps) == count:
                break
            x = stage.downsample(x)
        return maps


def rename_by_pattern(state_dict: Mapping[str, Tensor], patterns: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename the keys of a state dict by regular expressions and their replacements; raises as `rename_keys`.

    Only the first pattern that matches a key's beginning counts, so a general pattern comes last. Other keys stay, so
    that a strict load reports them.
    """

    def rename(key: str) -> str:
        for pattern, replacement in patterns.items():
            if re.match(pattern, key):
                return re.sub(pattern, replacement, key)
        return key

    return rename_keys(state_dict, rename)
