"""ViT-Adapter: four feature maps for dense tasks from any plain backbone, as Vision-RWKV configures it.

Convolutions turn the image into a spatial prior, which exchanges information with the backbone's tokens four times.
Before each quarter of the blocks, an injector adds the prior to the patch tokens; after it, an extractor adds the patch
tokens to the prior. Both use deformable attention. The adapter needs the PlainBackbone protocol and timm's methods
`reset_classifier` and `no_weight_decay`, and leaves class tokens unchanged.

Shape letters: B images of H x W pixels, D width, N = h·w patch tokens (h = H/16, w = W/16), K = 4N + N + N/4 tokens of
the prior on grids of strides 8, 16 and 32, M heads, L levels, P points.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from kernels.ms_deform_attn import ms_deform_attn, selected_backend

from .backbone import PlainBackbone, insert_tokens, remove_tokens, resample_positions, run_block
from .image_model import Grid, OperatorModel
from .shell import require_choice

EPS = 1e-6  # of all LayerNorms here
INTERACTIONS = 4  # of the prior with the patch tokens, one for each quarter of the blocks and for each map
EXTRA_EXTRACTORS = 2  # further extractors after the last interaction
STRIDES = (4, 8, 16, 32)  # of the four maps; images are padded to multiples of the largest
# of all plain backbones; an embedding that is not listed gets the learning rate of the last layer
EMBEDDINGS = "pos_embed", "cls_pos_embed", "cls_token", "reg_token", "dist_token"
Features = Literal["last", "each"]  # see `ViTAdapter`


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSize:
    """Hyper-parameters that depend on the backbone's width D."""

    num_heads: int  # heads M of every deformable attention
    value_ratio: float = 1.0  # width of the values as a multiple of D
    prior_channels: int = 64  # output channels of the spatial prior's stem
    num_points: int = 4  # sampling points P per query, head and level


_SIZES = {  # by the backbone's width D
    64: AdapterSize(num_heads=4, prior_channels=16, num_points=2),
    192: AdapterSize(num_heads=6),
    384: AdapterSize(num_heads=6),
    768: AdapterSize(num_heads=12, value_ratio=0.5),
}


def reference_points(grids: Sequence[Grid], device: torch.device) -> Tensor:
    """Return the cell centres ((i + 0.5)/w, (j + 0.5)/h) of consecutive (h, w) grids, row-major: fp32 (Q, 2)."""
    points = []
    for h, w in grids:
        x, y = ((torch.arange(n, dtype=torch.float32, device=device) + 0.5) / n for n in (w, h))
        points.append(torch.stack((x.expand(h, w), y[:, None].expand(h, w)), -1).flatten(0, 1))
    return torch.cat(points)


class DeformableAttention(nn.Module):
    """Multi-scale deformable attention; see `kernels.ms_deform_attn`.

    Each head of a query sums P bilinear samples per level around the query's reference point. The sampling offsets, in
    pixels of the level, and the logits of the attention weights are linear in the query. The softmax of the weights is
    over all points of all levels.

    Raises:
        ValueError: the width of the values is not a multiple of the number of heads.
    """

    def __init__(self, dim: int, num_levels: int, size: AdapterSize):
        super().__init__()
        inner, samples = int(size.value_ratio * dim), size.num_heads * num_levels * size.num_points
        if inner % size.num_heads:
            raise ValueError(f"values of width {inner} cannot be split into {size.num_heads} heads")
        self.sampling, self.backend = (size.num_heads, num_levels, size.num_points), "auto"  # `sampling`: M, L, P
        self.value_proj, self.output_proj = nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.offset_proj, self.weight_proj = nn.Linear(dim, 2 * samples), nn.Linear(dim, samples)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Point head m in direction 2πm/M, with equal weights; the larger coordinate of point p is p + 1 pixels.

        `ViTAdapter.init_weights` calls it after its rule for all Linear layers, whose values this replaces.
        """
        M, _, P = self.sampling
        for linear in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        for tensor in (self.offset_proj.weight, self.weight_proj.weight, self.weight_proj.bias):
            nn.init.zeros_(tensor)
        angle = torch.arange(M, dtype=torch.float64) * (2 * math.pi / M)
        direction = torch.stack((angle.cos(), angle.sin()), -1)
        direction /= direction.abs().amax(-1, keepdim=True)
        distance = torch.arange(1, P + 1, dtype=torch.float64)
        bias = self.offset_proj.bias.view(*self.sampling, 2)
        bias.copy_((direction[:, None, None] * distance[:, None]).expand_as(bias))

    def forward(self, query: Tensor, points: Tensor, value: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Attend from query (B, Q, D) at reference points (Q, 2) to value (B, S, D) on L consecutive (h, w) grids.

        Returns (B, Q, D). Points are (x, y) in [0, 1].
        """
        M, L, P = self.sampling
        offsets = self.offset_proj(query).unflatten(-1, (M, L, P, 2))
        weights = self.weight_proj(query).unflatten(-1, (M, L * P)).softmax(-1).unflatten(-1, (L, P))
        # offsets are in pixels of their level, locations are (x, y) relative to the map: hence (w, h), not (h, w)
        pixels = torch.tensor([[(w, h)] for h, w in grids], dtype=torch.float32, device=query.device)
        locations = points[:, None, None, None] + offsets / pixels
        value = self.value_proj(value).unflatten(-1, (M, -1))
        return self.output_proj(ms_deform_attn(value, grids, locations, weights, backend=self.backend).flatten(2))

    def selected_backend(self, dtype: torch.dtype) -> str:
        """Return the sampling's backend here for values of `dtype`; `set_backend` finds a layer by this name."""
        return selected_backend(self.backend, next(self.parameters()).device, dtype=dtype)


class Injector(nn.Module):
    """x + γ · attention(LN(x), LN(c)): patch tokens x (B, N, D) attend to the prior c (B, K, D)."""

    def __init__(self, dim: int, size: AdapterSize):
        super().__init__()
        self.query_norm, self.value_norm = nn.LayerNorm(dim, eps=EPS), nn.LayerNorm(dim, eps=EPS)
        self.attn = DeformableAttention(dim, 3, size)
        self.gamma = nn.Parameter(torch.zeros(dim))  # at 0 a pretrained backbone starts unchanged

    def forward(self, x: Tensor, points: Tensor, c: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return the patch tokens (B, N, D); `points` (N, 2) are the patch centres, `grids` those of the prior."""
        return x + self.gamma * self.attn(self.query_norm(x), points, self.value_norm(c), grids)


class ConvFFN(nn.Module):
    """Feed-forward network of the prior: Linear -> depth-wise 3x3 convolution -> GELU -> Linear.

    All levels share the convolution.
    """

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)

    def forward(self, c: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Map tokens (B, K, D) on consecutive grids to (B, K, D)."""
        maps = _to_maps(self.fc1(c), grids)
        return self.fc2(F.gelu(torch.cat([self.dwconv(level).flatten(2) for level in maps], 2).mT))


class Extractor(nn.Module):
    """c + attention(LN(c), LN(x)), then c + DropPath(ConvFFN(LN(c))): the prior c (B, K, D) attends to patches x."""

    def __init__(self, dim: int, size: AdapterSize, drop_path: float):
        super().__init__()
        self.query_norm, self.value_norm = nn.LayerNorm(dim, eps=EPS), nn.LayerNorm(dim, eps=EPS)
        self.attn = DeformableAttention(dim, 1, size)
        self.ffn_norm, self.ffn = nn.LayerNorm(dim, eps=EPS), ConvFFN(dim, dim // 4)
        self.drop_path = DropPath(drop_path)

    def forward(self, c: Tensor, points: Tensor, x: Tensor, grid: Grid, grids: Sequence[Grid]) -> Tensor:
        """Return the prior (B, K, D); `points` (K, 2) are its cell centres on `grids`, `grid` is the patches'."""
        c = c + self.attn(self.query_norm(c), points, self.value_norm(x), (grid,))
        return c + self.drop_path(self.ffn(self.ffn_norm(c), grids))


class SpatialPrior(nn.Module):
    """Convolutional stem with four maps of the image, of strides 4, 8, 16 and 32 and width D."""

    def __init__(self, dim: int, channels: int):
        super().__init__()
        widths = channels, 2 * channels, 4 * channels, 4 * channels

        def conv(before: int, after: int, stride: int) -> list[nn.Module]:
            """Build the layers of a 3x3 convolution with BatchNorm and ReLU, from `before` to `after` channels."""
            return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

        # modules, not functions: `bench.adapted` counts biases, ReLU and pooling by hooks
        stem = [
            *conv(3, channels, 2),
            *conv(channels, channels, 1),
            *conv(channels, channels, 1),
            nn.MaxPool2d(3, 2, 1),
        ]
        self.stages = nn.ModuleList(
            nn.Sequential(*layers) for layers in (stem, *(conv(a, b, 2) for a, b in pairwise(widths)))
        )
        self.projections = nn.ModuleList(nn.Conv2d(width, dim, 1) for width in widths)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (B, 3, H, W), H and W multiples of 32, to (B, D, H/4, W/4), ..., (B, D, H/32, W/32)."""
        maps, x = [], images
        for stage, projection in zip(self.stages, self.projections, strict=True):
            x = stage(x)
            maps.append(projection(x))
        return maps


class Pyramid(OperatorModel):
    """Base class of feature pyramids: the only interface that detectors and segmenters have to a backbone.

    It maps images (B, 3, H, W) to four maps (B, channels[i], H/strides[i], W/strides[i]), of strides 4, 8, 16 and 32.
    Images whose sides are not multiples of 32 are first padded with zeros at the right and at the bottom; a `Hierarchy`
    rounds its grids up instead.

    A subclass sets `channels`, and implements `forward`, `no_weight_decay`, `is_removed` and `group_matcher`. The last
    one returns timm's patterns for layer-wise decay. Its `prefix` is the pyramid's name within a larger model, dot
    included.

    The backbone is changed in place. If frozen, it is not trained and stays in eval mode; gradients pass through it.

    Attributes:
        built_from: the registered name of the backbone, and the options it was built with.
        trunk: the module whose state dict has the names of the backbone's weights.
        trunk_name: the name of `trunk` within the pyramid.
    """

    channels: tuple[int, ...]
    strides = STRIDES
    built_from: tuple[str, dict[str, Any]] | None = None
    trunk_name = "backbone"

    def __init__(self, backbone: nn.Module, freeze_backbone: bool):
        super().__init__()
        self.freeze_backbone = freeze_backbone
        self.backbone = backbone.requires_grad_(not freeze_backbone)

    @property
    def trunk(self) -> nn.Module:
        """The backbone, or timm's ViT inside it."""
        return self.get_submodule(self.trunk_name)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode as nn.Module does, but keep a frozen backbone in eval mode."""
        super().train(mode)
        if self.freeze_backbone:
            self.backbone.eval()
        return self

    def is_added(self, key: str) -> bool:
        """Return whether a key of the trunk belongs to a part that the pyramid may add to the backbone."""
        return False


class ClasslessViT(nn.Module):
    """timm's ViT or DeiT as a `PlainBackbone` for any image size, without class token.

    Every residual branch gets a layer scale that starts at 1. The model is changed in place, not copied. The position
    embedding keeps the unused row of the class token, so it has the length of the pretrained one, as the papers count.

    Raises:
        ValueError: a model with register tokens, without a position embedding, or with other blocks.
    """

    def __init__(self, model: VisionTransformer):
        super().__init__()
        scaled = all(hasattr(block, name) for block in model.blocks for name in ("ls1", "ls2"))
        if model.num_reg_tokens or model.pos_embed is None or not scaled:
            kind = type(model.blocks[0]).__name__
            raise ValueError(f"a ViT-Adapter takes positions, layer scales and no register tokens, not {kind}")
        self.model = model
        self.embed_dim, self.patch_size = model.embed_dim, model.patch_embed.patch_size[0]
        # nothing calls these here, and several ranks wait for the gradient of each parameter
        model.cls_token = model.dist_token = model.attn_pool = None
        model.fc_norm = nn.Identity()
        for block in model.blocks:
            for name in ("ls1", "ls2"):
                if isinstance(getattr(block, name), nn.Identity):
                    setattr(block, name, LayerScale(model.embed_dim, init_values=1.0))

    @property
    def blocks(self) -> list[Callable[[Tensor, Grid], Tensor]]:
        """timm's blocks; their global attention ignores the grid."""
        return [lambda tokens, grid, block=block: block(tokens) for block in self.model.blocks]

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        return self.model.norm

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Return the patch tokens (B, N, D) of images (B, C, H, W) with positions, and their grid.

        The position embedding is resampled if the grid differs from the one that the model was built for.
        """
        patches = self.model.patch_embed.proj(x)
        grid, built = tuple(patches.shape[-2:]), self.model.patch_embed.grid_size
        positions = resample_positions(self.model.pos_embed[:, -built[0] * built[1] :], built, grid)
        return self.model.norm_pre(self.model.pos_drop(patches.flatten(2).mT + positions)), grid

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]:
        """Return no positions: there are no class tokens."""
        return ()


class ViTAdapter(Pyramid):
    """A plain backbone with its adapter: four maps, all of the backbone's width.

    The adapter removes the backbone's head, and also its final norm unless `final_norm` is set. The prior's tokens c
    become the maps of strides 8, 16 and 32. The map of stride 4 is the upsampled map of stride 8 plus the prior's first
    map. The resized patch tokens are added to each map, and each map has a BatchNorm of its own.

    Args:
        backbone: a PlainBackbone with patches of 16 pixels and a multiple of 4 blocks.
        features: the patch tokens that are added. `last` adds those after the last block to every map (detection);
            `each` adds those after the i-th of the four interactions to the i-th map (segmentation).
        final_norm: whether to keep the backbone's final norm and apply it to the patch tokens before they are added.
            The tokens of a pretrained backbone can be so large that they drown the prior's detail.
        drop_path_rate: rate of stochastic depth in every extractor's FFN; the backbone's blocks have their own rates.
        freeze_backbone: see `Pyramid`.

    Raises:
        ValueError: a backbone that does not fit, or whose width is not in `_SIZES`.
    """

    def __init__(
        self,
        backbone: PlainBackbone,
        *,
        features: Features = "last",
        final_norm: bool = False,
        drop_path_rate: float = 0.0,
        freeze_backbone: bool = False,
    ):
        dim, depth = backbone.embed_dim, len(backbone.blocks)
        size = _SIZES.get(dim)
        if size is None:
            raise ValueError(f"no adapter is configured for width {dim}, only for {', '.join(map(str, _SIZES))}")
        if backbone.patch_size != 16 or depth % INTERACTIONS:
            found = f"this backbone has patches of {backbone.patch_size} pixels and {depth} blocks"
            raise ValueError(f"an adapter needs patches of 16 pixels and a multiple of 4 blocks; {found}")
        require_choice("features", features, get_args(Features))
        super().__init__(backbone, freeze_backbone)
        self.channels = (dim,) * len(STRIDES)
        self.embed_dim, self.depth, self.features = dim, depth, features
        if isinstance(backbone, ClasslessViT):  # the weights have the names of timm's ViT inside it
            self.trunk_name = "backbone.model"
        if not final_norm:
            self.trunk.norm = nn.Identity()
        elif isinstance(self.trunk.norm, nn.Identity):
            raise ValueError("it has no final norm; leave out final_norm")
        self.final_norm = final_norm
        self.trunk.reset_classifier(0)
        self.prior = SpatialPrior(dim, size.prior_channels)
        self.level_embed = nn.Parameter(torch.empty(3, dim))
        self.injectors = nn.ModuleList(Injector(dim, size) for _ in range(INTERACTIONS))
        self.extractors = nn.ModuleList(
            Extractor(dim, size, drop_path_rate) for _ in range(INTERACTIONS + EXTRA_EXTRACTORS)
        )
        self.up = nn.ConvTranspose2d(dim, dim, 2, stride=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(dim) for _ in range(4))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise everything but the backbone.

        Linear weights are trunc_normal 0.02, convolutions N(0, 2/fan_out), biases 0, the level embedding N(0, 1).
        """
        own = [module for name, module in self.named_modules() if not name.startswith("backbone.")]
        for module in own:
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            else:
                continue
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in own:
            if isinstance(module, DeformableAttention):
                module.init_weights()
        nn.init.normal_(self.level_embed)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (B, 3, H, W) to (B, D, H/4, W/4), (B, D, H/8, W/8), (B, D, H/16, W/16) and (B, D, H/32, W/32)."""
        images = pad_to_stride(images)
        finest, *levels = self.prior(images)  # the map of stride 4 takes no part in the interactions
        grids = [tuple(level.shape[-2:]) for level in levels]
        c = torch.cat([level.flatten(2).mT + embed for level, embed in zip(levels, self.level_embed, strict=True)], 1)
        c, taken = self._interact(images, c, grids)

        levels = _to_maps(c, grids)
        levels = [self.up(levels[0]) + finest, *levels]
        maps = []
        for norm, level, patches in zip(self.norms, levels, taken, strict=True):
            (patch_map,) = _to_maps(self.backbone.norm(patches), grids[1:2])
            maps.append(norm(level + F.interpolate(patch_map, level.shape[-2:], mode="bilinear", align_corners=False)))
        return maps

    def _interact(self, images: Tensor, c: Tensor, grids: list[Grid]) -> tuple[Tensor, list[Tensor]]:
        """Return the prior (B, K, D) after all extractors, and the patch tokens (B, N, D) for each of the four maps."""
        tokens, grid = self.backbone.embed(images)
        positions = self.backbone.prefix_positions(grid[0] * grid[1])
        centres, prior_centres = (reference_points(each, images.device) for each in ([grid], grids))
        blocks, step, taken = list(self.backbone.blocks), self.depth // INTERACTIONS, []
        for i, injector in enumerate(self.injectors):
            patches = injector(remove_tokens(tokens, positions), centres, c, grids)
            tokens = insert_tokens(patches, tokens[:, list(positions)], positions)
            for block in blocks[i * step : (i + 1) * step]:
                tokens = run_block(block, tokens, grid, recompute=self.grad_checkpointing)
            taken.append(remove_tokens(tokens, positions))
            end = i + 1 if i < INTERACTIONS - 1 else None  # the last interaction has the further extractors, too
            for extractor in self.extractors[i:end]:
                c = extractor(c, prior_centres, taken[-1], grid, grids)
        return c, taken if self.features == "each" else taken[-1:] * INTERACTIONS

    def group_matcher(self, coarse: bool = False, prefix: str = "") -> dict[str, Any]:
        """Return timm's patterns: the embeddings are layer 0, block i is layer i + 1, all else is the last layer."""
        backbone = rf"^{re.escape(prefix)}backbone\.(?:model\.)?"
        return {
            "stem": rf"{backbone}(?:patch_embed|{'|'.join(EMBEDDINGS)})",
            "blocks": [(rf"{backbone}blocks\.(\d+)", None)],
        }

    def no_weight_decay(self) -> set[str]:
        """Return the backbone's parameters without weight decay, except its embeddings.

        The embeddings decay like the level embedding, as in the official code. timm exempts vectors and biases itself.
        """
        return {f"{self.trunk_name}.{name}" for name in self.trunk.no_weight_decay() if not name.startswith(EMBEDDINGS)}

    def is_removed(self, key: str) -> bool:
        """Return whether a key belongs to the removed heads or pool, to a norm that is not kept, or to a ViT's prefix."""
        removed = ("fc_norm.", "head.", "head_dist.", "attn_pool.", *(() if self.final_norm else ("norm.",)))
        is_prefix = isinstance(self.backbone, ClasslessViT) and key in ("cls_token", "dist_token")
        return is_prefix or key.startswith(removed)

    def is_added(self, key: str) -> bool:
        """Return whether the key is a layer scale that was added to a ViT."""
        return isinstance(self.backbone, ClasslessViT) and re.search(r"\.ls[12]\.gamma$", key) is not None


def pad_to_stride(images: Tensor) -> Tensor:
    """Pad images (B, 3, H, W) with zeros at the right and at the bottom to multiples of the largest stride."""
    height, width = images.shape[-2:]
    return F.pad(images, (0, -width % STRIDES[-1], 0, -height % STRIDES[-1]))


def _to_maps(tokens: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Split tokens (B, Σ h·w, D) on consecutive grids into one map (B, D, h, w) per grid, channels-last views."""
    parts = tokens.split([h * w for h, w in grids], 1)
    return [part.mT.unflatten(2, grid) for part, grid in zip(parts, grids, strict=True)]
