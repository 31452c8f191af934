"""Construction of registered models for any image size and device, with fused or unfused attention."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from timm.layers import set_fused_attn, use_fused_attn

from ..models.registry import build_model


@contextlib.contextmanager
def fused_attention(enabled: bool) -> Iterator[None]:
    """Build models within the context with PyTorch's fused attention, or with two matrix products and a softmax.

    timm reads this switch when it constructs an attention layer, so a model keeps its kind of attention afterwards.
    """
    before, experimental = use_fused_attn(), use_fused_attn(experimental=True)
    set_fused_attn(enabled)
    try:
        yield
    finally:
        set_fused_attn(before, experimental)


def build_eval_model(
    name: str,
    options: Mapping[str, Any],
    image_size: tuple[int, int],
    *,
    fused: bool = True,
    device: str | torch.device = "cpu",
) -> torch.nn.Module:
    """Build a registered model in eval mode for images (B, 3, H, W) of `image_size` (H, W); see `fused_attention`.

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
            # some constructors need values, which the meta device lacks (RegNet calls torch.unique): build on the CPU
            return build_model(name, img_size=image_size, **options).to("meta").eval()
