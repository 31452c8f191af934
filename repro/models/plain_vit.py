"""timm's VisionTransformer (ViT, DeiT) under the PlainBackbone protocol, with its class token or without."""

from collections.abc import Callable

from timm.layers import LayerScale, resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from .backbone import Grid, PlainBackbone


class PlainViT(nn.Module):
    """A wrapper around timm's model, which is used and not copied; class and register tokens stay.

    Args:
        model: a VisionTransformer built with `dynamic_img_size=True`, for which timm resamples the position embedding.

    Raises:
        TypeError: another kind of model.
        ValueError: a VisionTransformer for one image size.
    """

    def __init__(self, model: VisionTransformer):
        super().__init__()
        self._check(model)
        self.model = model
        self.embed_dim, self.patch_size = model.embed_dim, model.patch_embed.patch_size[0]

    def _check(self, model: nn.Module) -> None:
        if not isinstance(model, VisionTransformer):
            raise TypeError(f"PlainViT wraps timm's VisionTransformer, got {type(model).__name__}")
        if not model.dynamic_img_size:
            raise ValueError("this VisionTransformer takes one image size only; create it with dynamic_img_size=True")

    @property
    def blocks(self) -> list[Callable[[Tensor, Grid], Tensor]]:
        """timm's blocks; their global attention ignores the grid."""
        return [lambda tokens, grid, block=block: block(tokens) for block in self.model.blocks]

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        return self.model.norm

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Image (B, C, H, W) -> tokens (B, T, D), class token first, and the (h, w) grid."""
        grid = self.model.patch_embed.dynamic_feat_size(x.shape[-2:])
        tokens = self.model._pos_embed(self.model.patch_embed(x))
        return self.model.norm_pre(self.model.patch_drop(tokens)), grid

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]:
        """Class and register tokens come first."""
        return tuple(range(self.model.num_prefix_tokens))


class ClasslessViT(PlainViT):
    """The ViT of ViT-Adapter: without a class token, and with a layer scale, initially 1, on every branch. Takes any image size.

    The position embedding keeps the row of the class token, unused: it then has the length of the pretrained one, and the model
    the number of parameters that the papers report.

    Args:
        model: a VisionTransformer with at most a class token; it is changed in place.

    Raises:
        ValueError: a model with register tokens or without a position embedding.
    """

    def __init__(self, model: VisionTransformer):
        super().__init__(model)
        model.cls_token = None
        for block in model.blocks:
            for name in ("ls1", "ls2"):
                if isinstance(getattr(block, name), nn.Identity):
                    setattr(block, name, LayerScale(model.embed_dim, init_values=1.0))

    def _check(self, model: VisionTransformer) -> None:
        if model.num_reg_tokens or model.pos_embed is None:
            raise ValueError("a ViT with register tokens or without a position embedding cannot be the backbone of a ViT-Adapter")

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Image (B, C, H, W) -> patch tokens (B, N, D) with positions, resampled for other grids than the built one, and the grid."""
        patches = self.model.patch_embed.proj(x)
        grid, built = tuple(patches.shape[-2:]), self.model.patch_embed.grid_size
        positions = self.model.pos_embed[:, -built[0] * built[1] :]
        positions = resample_abs_pos_embed(positions, list(grid), list(built), num_prefix_tokens=0, antialias=False)
        return self.model.norm_pre(self.model.pos_drop(patches.flatten(2).mT + positions)), grid

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]:
        """Empty: there are no class tokens."""
        return ()


def as_plain_backbone(model: nn.Module) -> PlainBackbone:
    """The model itself if it fulfils the protocol, otherwise timm's ViT in a wrapper.

    Raises:
        TypeError, ValueError: the model is neither; see `PlainViT`.
    """
    return model if isinstance(model, PlainBackbone) else PlainViT(model)
