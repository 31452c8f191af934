"""Base class of plain backbones: timm's interface and the PlainBackbone protocol, over blocks of equal width.

A family adds its blocks, final norm, embeddings and class feature. Shared code does the rest: patch embedding,
intermediate features, head replacement and gradient checkpointing.
"""

import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates, to_2tuple
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..core.errors import UserError, did_you_mean
from .image_model import Grid, ImageModel, PatchConv, check_rates

# arguments of timm that can name a file of weights; a string is only the name of a configuration, without a file
_PRETRAINED_CONFIGS = "pretrained_cfg", "pretrained_cfg_overlay"
_logger = logging.getLogger(__name__)


class PlainBackbone(Protocol):
    """A non-hierarchical backbone whose tokens other modules can change between two blocks.

    `embed(x)` turns an image (B, C, H, W) into tokens (B, T, D) and the (h, w) grid of the patches. Each of `blocks`,
    called as `block(tokens, (h, w))`, returns tokens of the same shape, and `norm` follows the last one.
    `prefix_positions(h·w)` lists the positions of the class tokens in ascending order; a module between blocks must
    change only the other tokens.

    `is_plain` checks only that these names exist. `pyramid.build_pyramid` asks for them first, so a hierarchical model
    must not have all of them.
    """

    embed_dim: int
    patch_size: int
    blocks: Sequence[Callable[[Tensor, Grid], Tensor]]
    norm: nn.Module

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]: ...

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]: ...


def is_plain(model: nn.Module) -> bool:
    """Return whether a model has the names of `PlainBackbone`.

    From Python 3.12 on, `isinstance` of a protocol does not find a module's submodules and parameters.
    """
    names = *PlainBackbone.__annotations__, "embed", "prefix_positions"
    return all(hasattr(model, name) for name in names)


class Backbone(ImageModel):
    """A backbone whose blocks map tokens (B, T, D) on an (h, w) grid to tokens of the same shape.

    A subclass sets `blocks` (each called as `block(tokens, grid)`) and `norm`. One with positions or class tokens
    overrides `embed`, `prefix_positions` and `class_feature`; by default there are only patches, and the class feature
    is their mean. One with closed-form counts implements `param_terms()` and `mac_terms(image_size)`: named counts that
    add up to the model's parameters, and to its multiply-adds for one image. `repro.bench.flops` uses them.

    The order in which layers are built and initialised decides which random numbers of a seed each gets. Recorded
    trainings depend on this order, here and in every subclass.

    Args:
        img_size: image height and width that the model is built for; `embed` adapts to others.
        patch_size: side of a patch in pixels; height and width of every image must be multiples of it.
        in_chans, embed_dim, depth, drop_rate: image channels, width D, number of blocks, dropout before the head.
        num_classes: outputs of the head; 0 builds no head.
        pool: class strategy, for subclasses; the default `class_feature` is always the mean. timm's `global_pool` is
            `avg` for `mean`, `max` for `max`, and `token` for the other strategies.
        drop_path_rate: rate of stochastic depth in the last block; `drop_path_rates`, one a block, rise linearly to it.
    """

    blocks: nn.ModuleList
    norm: nn.Module

    def __init__(
        self,
        img_size: int | Grid = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 12,
        *,
        pool: str = "mean",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        check_rates(drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        self.img_size, self.patch_size, self.num_classes = to_2tuple(img_size), patch_size, num_classes
        self.embed_dim = self.num_features = self.head_hidden_size = embed_dim
        self.depth, self.pool = depth, pool
        self.global_pool = self.pooled_by = _name_pooling(pool)
        self.drop_path_rates = calculate_drop_path_rates(drop_path_rate, depth)
        self.grid_size = self.grid_of(*self.img_size)
        self.patch_embed = PatchConv(in_chans, embed_dim, patch_size)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size} for i in range(depth)
        ]
        self.register_load_state_dict_pre_hook(_fit_positions)

    def grid_of(self, height: int, width: int) -> Grid:
        """Return the rows and columns of patches in an image; ValueError for sides that the patch does not divide."""
        p = self.patch_size
        if height < p or width < p or height % p or width % p:
            raise ValueError(
                f"image size {height}x{width}: height and width must be positive multiples of the patch size {p}"
            )
        return height // p, width // p

    def patches(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Return patch tokens (B, h·w, D), row-major, of images (B, C, H, W), and their grid; raises as `grid_of`."""
        self.check_image_size(*x.shape[-2:])
        grid = self.grid_of(*x.shape[-2:])
        return self.patch_embed(x).flatten(2).transpose(1, 2), grid

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Return the first block's input (B, T, D) for images (B, C, H, W), and the grid; raises as `patches`."""
        return self.patches(x)

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]:
        """Return the ascending positions of the class tokens in the sequence; empty for a family without them.

        Their number must not depend on `num_patches`: `pool_features` asks with one patch to learn it.
        """
        return ()

    def class_feature(self, tokens: Tensor) -> Tensor:
        """Compute the class feature (B, D) of normalised tokens (B, T, D)."""
        return tokens.mean(dim=1)

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to tokens (B, T, D) after the final norm, class tokens at `prefix_positions`."""
        tokens, grid = self.embed(x)
        for block in self.blocks:
            tokens = run_block(block, tokens, grid, recompute=self.grad_checkpointing)
        return self.norm(tokens)

    def pool_features(self, x: Tensor) -> Tensor:
        """Pool normalised tokens (B, T, D) to the class feature or the mean of the patches (B, D), by `global_pool`."""
        if self.global_pool == self.pooled_by:
            return self.class_feature(x)
        num_prefixes = len(self.prefix_positions(1))
        return remove_tokens(x, self.prefix_positions(x.shape[1] - num_prefixes)).mean(dim=1)

    def set_input_size(self, img_size: int | Grid | None = None, patch_size: int | Grid | None = None) -> None:
        """Resample the position tables once for images of another size in pixels, instead of in each forward pass.

        Raises:
            ValueError: another patch size, a size off the patch grid, or an option that ties the model to its size.
        """
        if patch_size is not None and to_2tuple(patch_size) != to_2tuple(self.patch_size):
            raise ValueError(f"patch_size {patch_size}: the patches of this model are {self.patch_size} pixels wide")
        size = to_2tuple(self.img_size if img_size is None else img_size)
        grid = self.grid_of(*size)
        if grid != self.grid_size:
            self._resize(grid)
        self.img_size, self.grid_size = size, grid

    def _resize(self, grid: Grid) -> None:
        """Resample the parameters that depend on the (h, w) grid of the patches."""
        if (table := getattr(self, "pos_embed", None)) is not None:
            with torch.no_grad():
                self.pos_embed = nn.Parameter(self.resample_table(table, self.grid_size, grid), table.requires_grad)

    def resample_table(self, table: Tensor, before: Grid, after: Grid) -> Tensor:
        """Resample `pos_embed` (1, T, D) from one grid of patches to another; rows of class tokens are kept."""
        # a family keeps the rows of class tokens in this table, as DeiT does, or in one of their own, as Vittt does
        shared = table.shape[1] > before[0] * before[1]
        rows, new_rows = (self.prefix_positions(h * w) if shared else () for h, w in (before, after))
        return resample_positions(table, before, after, rows, new_rows)

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
        """Return the patch tokens after selected blocks, as timm's feature interface defines it.

        Args:
            indices: the last n blocks (an int), all blocks (None), or a list of blocks.
            norm: whether to apply the final norm to the intermediates.
            stop_early: whether to skip the blocks after the last selected one.
            output_fmt: `NCHW` for (B, D, h, w) or `NLC` for (B, h·w, D).
            return_prefix_tokens: return pairs (patches, class tokens (B, n, D)) instead of the patches alone.

        Returns:
            The intermediates if `intermediates_only`, else (tokens as from `forward_features`, intermediates).

        Raises:
            ValueError: another `output_fmt`.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} is not NCHW or NLC")
        take, last = feature_take_indices(len(self.blocks), indices)
        tokens, grid = self.embed(x)
        positions = self.prefix_positions(grid[0] * grid[1])
        intermediates = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            tokens = run_block(block, tokens, grid, recompute=self.grad_checkpointing)
            if i in take:
                found = self.norm(tokens) if norm else tokens
                patches = remove_tokens(found, positions)
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
                intermediates.append((patches, found[:, list(positions)]) if return_prefix_tokens else patches)
        return intermediates if intermediates_only else (self.norm(tokens), intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last index and, if asked, final norm and head; return the absolute indices."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0)
        return take

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns for layer-wise learning-rate decay, where 99999 stands for the end of all blocks."""
        return {
            "stem": r"^cls_token|^cls_pos_embed|^pos_embed|^patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


def run_block(block: Callable[[Tensor, Grid], Tensor], tokens: Tensor, grid: Grid, *, recompute: bool) -> Tensor:
    """Run a block, with gradient checkpointing if `recompute`; return the tokens unchanged for a batch of no images."""
    if tokens.shape[0] == 0:
        return tokens
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, tokens, grid)
    return block(tokens, grid)


def remove_tokens(tokens: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Drop the tokens at the ascending `positions`: (B, T, D) -> (B, T - len(positions), D)."""
    if not positions:
        return tokens
    starts, ends = (0, *(p + 1 for p in positions)), (*positions, tokens.shape[1])
    return torch.cat([tokens[:, a:b] for a, b in zip(starts, ends, strict=True)], dim=1)


def insert_tokens(tokens: Tensor, extra: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Invert `remove_tokens`: put the n tokens of `extra` (B, n, D) at n ascending `positions` of the result."""
    pieces, done = [], 0
    for i, position in enumerate(positions):
        pieces += [tokens[:, done : position - i], extra[:, i : i + 1]]
        done = position - i
    return torch.cat([*pieces, tokens[:, done:]], dim=1) if positions else tokens


def resample_positions(
    embedding: Tensor, before: Grid, after: Grid, rows: tuple[int, ...] = (), new_rows: tuple[int, ...] = ()
) -> Tensor:
    """Resample positions (1, T, D) bicubically to another patch grid; class tokens' `rows` move to `new_rows`."""
    # under symbolic shapes the comparison must add no guard: such a graph always resamples, which at equal size is
    # the identity
    if all(statically_known_true(old == new) for old, new in zip(before, after, strict=True)):
        return embedding
    patches = remove_tokens(embedding, rows).float().unflatten(1, before).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, after, mode="bicubic").flatten(2).mT.to(embedding.dtype)
    return insert_tokens(patches, embedding[:, list(rows)], new_rows) if rows else patches


def _fit_positions(model: Backbone, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Resample `pos_embed` where timm (`checkpoint_path=FILE`) or PyTorch loads; `weights.load_state` refuses."""
    if (own := getattr(model, "pos_embed", None)) is not None:
        fit_table(state, f"{prefix}pos_embed", own, model.grid_size, model.resample_table)


def fit_table(state: dict[str, Tensor], key: str, own: Tensor, grid: Grid, resample: Callable[..., Tensor]) -> None:
    """Resample a position table (1, T, D) in a state dict, if it belongs to a square image of another size.

    Args:
        state, key: the state dict, which is changed in place, and the table's key.
        own, grid: the model's table and its patch grid.
        resample: (table, grid before, grid after) -> resampled table.
    """
    table = state.get(key)
    if table is None or table.ndim != 3 or table.shape[::2] != own.shape[::2] or table.shape == own.shape:
        return
    num_patches = table.shape[1] - (own.shape[1] - grid[0] * grid[1])
    side = math.isqrt(max(0, num_patches))
    if side > 0 and side * side == num_patches:
        _logger.info("%s: positions of %dx%d patches resampled to %dx%d", key, side, side, *grid)
        state[key] = resample(table, (side, side), grid)


def pad_for_scans(parts: Sequence[Tensor], count: int) -> Tensor:
    """Join the tokens (B, T, E) of R scans, with `count` zeros before each scan's first token: (B, T + count, R·E).

    `parts` are the forward scan and, at most, a backward one, both in the order of the image: the zeros of the backward
    scan follow the last token. Further parts would be dropped without an error.
    """
    sides = (count, 0), (0, count)
    return torch.cat([F.pad(part, (0, 0, *side)) for part, side in zip(parts, sides, strict=False)], dim=-1)


def convolve_scans(padded: Tensor, weights: Sequence[Tensor], bias: Tensor) -> Tensor:
    """Convolve the result of `pad_for_scans` depth-wise and causally, by weights (E, 1, K) in scan order: (B, T, R·E).

    It runs as a 2-D convolution of height 1, whose channels-last path needs no transposed copy. On CPUs that is several
    times faster than conv1d.
    """
    weight = torch.cat([weights[0], *(backward.flip(-1) for backward in weights[1:])]).unsqueeze(2)
    out = F.conv2d(padded.transpose(1, 2).unsqueeze(2), weight, bias, groups=len(weight))
    return out.squeeze(2).transpose(1, 2).contiguous()


def call_scans(layers: Sequence[nn.Module], parts: Sequence[Tensor], count: int) -> Tensor:
    """Compute `convolve_scans` of padded tokens (B, T, E) by calling the layers: (B, T, R·E).

    There is one layer for each scan, or one for all. `count` zeros go before a scan's first token.
    """
    given = [parts[0], *(part.flip(1) for part in parts[1:])]
    given = given if len(layers) == len(given) else [torch.cat(given, -1)]
    outs = [layer(F.pad(x.mT, (count, 0))).mT for layer, x in zip(layers, given, strict=True)]
    first, *others = torch.cat(outs, -1).chunk(len(parts), -1)
    return torch.cat([first, *(out.flip(1) for out in others)], -1)


def _name_pooling(pool: str) -> str:
    """Return timm's `global_pool` for a class strategy."""
    return {"mean": "avg", "max": "max"}.get(pool, "token")


def default_cfg(input_size: int, crop_pct: float = 0.875) -> dict[str, Any]:
    """Return a model's entries of timm's configuration; `input_size` is a side in pixels."""
    shape = (3, input_size, input_size)
    names = {"first_conv": "patch_embed", "classifier": "head", "license": "apache-2.0"}
    return {"input_size": shape, "crop_pct": crop_pct} | names


def rename_prefixes(state_dict: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """Replace the prefixes of a state dict's keys; keys without such a prefix stay. Raises as `rename_keys`.

    The first prefix that a key begins with counts.
    """

    def rename(key: str) -> str:
        old = next((prefix for prefix in prefixes if key.startswith(prefix)), "")
        return prefixes.get(old, "") + key.removeprefix(old)

    return rename_keys(state_dict, rename)


def rename_keys(state_dict: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    """Rename the keys of a state dict.

    Raises:
        UserError: two keys get the same new name, so one tensor would be lost.
    """
    sources: dict[str, str] = {}
    for key in state_dict:
        if (other := sources.setdefault(rename(key), key)) != key:
            raise UserError(f"both {other} and {key} are one tensor here, {rename(key)}; remove the wrong one")
    return {new: state_dict[old] for new, old in sources.items()}


def create(model_class: type[nn.Module], variant: str, pretrained: bool, **kwargs: Any) -> Any:
    """Build a registered `variant` as timm's entrypoints do, including `features_only`.

    Raises:
        TypeError: an option that the model does not have.
        ValueError: a `global_pool` that contradicts `pool`.
        RuntimeError: `pretrained` without a file of weights.
    """
    # by default `features_only` gives the maps of all stages of a hierarchy, and of the last three blocks of a ViT
    last = len(kwargs["depths"]) if "depths" in kwargs else min(3, kwargs.get("depth", 3))
    feature_cfg = {"out_indices": kwargs.pop("out_indices", last), "feature_cls": "getter"}
    if pretrained and all(isinstance(kwargs.get(name), str | None) for name in _PRETRAINED_CONFIGS):
        raise RuntimeError(
            f"{variant}: this project publishes no pretrained weights; `repro pretrain` trains them, and "
            "checkpoint_path or pretrained_cfg_overlay=dict(file=...) loads a file"
        )
    if not issubclass(model_class, ImageModel):
        return build_model_with_cfg(model_class, variant, pretrained, feature_cfg=feature_cfg, **kwargs)
    dynamic, pooling = kwargs.pop("dynamic_img_size", True), kwargs.pop("global_pool", None)
    # Vittt has an option `pool`: class tokens depend on it, so it must be known before the model is built
    if pooling and "pool" in inspect.signature(model_class).parameters:
        if "pool" in kwargs and _name_pooling(kwargs["pool"]) != pooling:
            raise ValueError(f"global_pool {pooling!r}: contradicts pool {kwargs['pool']!r}; leave one of them out")
        kwargs.setdefault("pool", {"avg": "mean", "token": "mid"}.get(pooling, pooling))
        pooling = None
    try:
        built = build_model_with_cfg(model_class, variant, pretrained, feature_cfg=feature_cfg, **kwargs)
    except TypeError as error:
        # Python's own message names the class's `__init__`; this one suggests the option that was meant
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None:
            raise
        parameters = [inspect.signature(base.__init__).parameters for base in model_class.__mro__]
        known = set().union(*parameters) - {"self", "args", "kwargs"}
        raise TypeError(f"no option {found[1]}{did_you_mean(found[1], known)}") from None
    model = built if isinstance(built, model_class) else built.model  # `features_only` wraps the model
    model.dynamic_img_size = dynamic
    if pooling is not None:
        model.set_pooling(pooling, model.num_classes)
    return built


def register_sizes(model_class: type[nn.Module], sizes: Mapping[str, Mapping[str, Any]], **names: str) -> None:
    """Register a family with timm, without weights.

    `sizes` maps the name of each model to the arguments that build it, and to the `crop_pct` of the release's
    evaluation if it is not 0.875. `names` replaces `first_conv` or `classifier` of `default_cfg`. Models are registered
    under the module of the class, where `weights.translate_official` looks for `official_state_dict`. An entry without
    `img_size` is registered for 224 pixels, which must be the default of the class.
    """
    module = model_class.__module__
    configs = {
        f"{name}.untrained": default_cfg(options.get("img_size", 224), options.get("crop_pct", 0.875)) | names
        for name, options in sizes.items()
    }
    # before `_register`: timm reads the configurations when a model is registered, and a model may have none
    sys.modules[module].default_cfgs = generate_default_cfgs(configs)
    for name, options in sizes.items():
        _register(model_class, name, module, {key: value for key, value in options.items() if key != "crop_pct"})


def _register(model_class: type[nn.Module], name: str, module: str, options: Mapping[str, Any]) -> None:
    """Register one model with timm, by a function that builds it from `options` and from the caller's, which win."""

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(model_class, name, pretrained, **{**options, **kwargs})

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = module
    setattr(sys.modules[module], name, register_model(entrypoint))
