"""Building any registered model for any image size, with fused or unfused attention, in memory or on the meta device."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from timm.layers import set_fused_attn, use_fused_attn

from ..models.registry import build_model


@contextlib.contextmanager
def fused_attention(enabled: bool) -> Iterator[None]:
    """Within the context, models are built with PyTorch's fused attention, or with two matrix products and a softmax.

    timm reads this switch when it constructs an attention layer, so a model keeps what it was built with.
    """
    before, experimental = use_fused_attn(), use_fused_attn(experimental=True)
    set_fused_attn(enabled)
    try:
        yield
    finally:
        set_fused_attn(before, experimental)


def create(
    name: str, options: Mapping[str, Any], image_size: tuple[int, int], *, fused: bool = True, device: str | torch.device = "cpu"
) -> torch.nn.Module:
    """A model in eval mode for images (B, 3, H, W).

    Args:
        name: registered name, e.g. `vittt_tiny_patch16_224` or `regnety_040`.
        options: further arguments of the model.
        image_size: (H, W) in pixels. A model with a fixed input size is built for it; the others take any.
        fused: whether attention layers use PyTorch's fused kernel.
        device: `meta` builds shapes without memory.

    Raises:
        ValueError: an unknown name, or options that the model refuses.
    """
    with fused_attention(fused):
        try:
            with torch.device(device):
                return build_model(name, img_size=image_size, **options).eval()
        except NotImplementedError:
            if torch.device(device).type != "meta":
                raise
            # some constructors compute with values (RegNet calls torch.unique), which the meta device does not have
            return build_model(name, img_size=image_size, **options).to("meta").eval()
