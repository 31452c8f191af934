"""timm's VisionTransformer (ViT, DeiT) under the PlainBackbone protocol, as the backbone of a ViT-Adapter."""

from collections.abc import Callable

from timm.layers import LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from .backbone import Grid, resample_positions


class ClasslessViT(nn.Module):
    """The ViT of ViT-Adapter: without a class token, and with a layer scale, initially 1, on every branch. Takes any image size.

    timm's model is used and not copied. The position embedding keeps the row of the class token, unused: it then has the length of
    the pretrained one, and the model the number of parameters that the papers report.

    Args:
        model: a VisionTransformer with at most a class token; it is changed in place.

    Raises:
        ValueError: a model with register tokens or without a position embedding.
    """

    def __init__(self, model: VisionTransformer):
        super().__init__()
        if model.num_reg_tokens or model.pos_embed is None:
            raise ValueError("a ViT with register tokens or without a position embedding cannot be the backbone of a ViT-Adapter")
        self.model = model
        self.embed_dim, self.patch_size = model.embed_dim, model.patch_embed.patch_size[0]
        model.cls_token = None
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
        """Image (B, C, H, W) -> patch tokens (B, N, D) with positions, resampled for other grids than the built one, and the grid."""
        patches = self.model.patch_embed.proj(x)
        grid, built = tuple(patches.shape[-2:]), self.model.patch_embed.grid_size
        positions = resample_positions(self.model.pos_embed[:, -built[0] * built[1] :], built, grid)
        return self.model.norm_pre(self.model.pos_drop(patches.flatten(2).mT + positions)), grid

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]:
        """Empty: there are no class tokens."""
        return ()
