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


def build_eval_model(
    name: str,
    options: Mapping[str, Any],
    image_size: tuple[int, int],
    *,
    fused: bool = True,
    device: str | torch.device = "cpu",
) -> torch.nn.Module:
    """A registered model with options, in eval mode, for images (B, 3, H, W) of (H, W) pixels; see `fused_attention`.

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
