"""Building a model by its name, and the PlainBackbone protocol, under which dense tasks use every family."""

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from .backbone import Grid


def build_model(name: str, *, img_size: int | tuple[int, int] | None = None, **options: Any) -> nn.Module:
    """`timm.create_model` for this project's families and timm's own, with errors of one line.

    Args:
        name: registered name.
        img_size: what the model is built for; left out for models that take images of any size.
        options: what else the model takes.

    Raises:
        ValueError: an unknown name, or options that the model refuses.
    """
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=1)
        raise ValueError(f"{name}: no such model" + (f"; did you mean {close[0]!r}?" if close else "; timm.list_models() names all"))
    sized = {} if img_size is None else {"img_size": img_size}
    try:
        try:
            return timm.create_model(name, **sized, **options)
        except TypeError as error:
            if not sized or "img_size" not in str(error):
                raise
            return timm.create_model(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{name}: cannot be built with {sized | options}: {error}") from None


def family_module(name: str) -> str:
    """The module that a registered model comes from: `repro.models.vittt`, or one of timm's."""
    return timm.model_entrypoint(name).__module__


def kernel_backend(model: nn.Module, dtype: torch.dtype) -> str:
    """The implementation of the model's own operators that runs on its device for activations of `dtype`, for a result's identity.

    `torch` for models without operators of their own.
    """
    return model.selected_backend(dtype) if hasattr(model, "selected_backend") else "torch"


@runtime_checkable
class PlainBackbone(Protocol):
    """A non-hierarchical backbone whose tokens can be worked on between blocks.

    `embed(x)` turns an image (B, C, H, W) into tokens (B, T, D) and their (h, w) grid; each of `blocks`, called as
    `block(tokens, (h, w))`, returns tokens of the same shape; `norm` ends them. `prefix_positions(h·w)` says where class tokens
    sit in the sequence, ascending: what is injected between blocks touches the other tokens only.
    """

    embed_dim: int
    patch_size: int
    blocks: Sequence[Callable[[Tensor, Grid], Tensor]]
    norm: nn.Module

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]: ...

    def prefix_positions(self, num_patches: int) -> tuple[int, ...]: ...


class PlainViT(nn.Module):
    """timm's VisionTransformer (ViT, DeiT) under the PlainBackbone protocol. The model inside is used, not copied.

    Args:
        model: a VisionTransformer made with `dynamic_img_size=True`, so that timm resamples its position embedding.

    Raises:
        TypeError: another kind of model.
        ValueError: a VisionTransformer of one fixed image size.
    """

    def __init__(self, model: VisionTransformer):
        super().__init__()
        if not isinstance(model, VisionTransformer):
            raise TypeError(f"PlainViT wraps timm's VisionTransformer, got {type(model).__name__}")
        if not model.dynamic_img_size:
            raise ValueError("this VisionTransformer takes one image size only; create it with dynamic_img_size=True")
        self.model = model
        self.embed_dim, self.patch_size = model.embed_dim, model.patch_embed.patch_size[0]

    @property
    def blocks(self) -> list[Callable[[Tensor, Grid], Tensor]]:
        """timm's blocks; attention has no use for the grid."""
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


def as_plain_backbone(model: nn.Module) -> PlainBackbone:
    """The model itself where it fulfils the protocol, else timm's ViT wrapped.

    Raises:
        TypeError: the model is neither.
    """
    return model if isinstance(model, PlainBackbone) else PlainViT(model)
