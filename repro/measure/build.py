"""Create any timm-registered model at any resolution, with fused or unfused attention, in memory or on the meta device."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from timm.layers import set_fused_attn, use_fused_attn

from ..models.registry import build_model


@contextlib.contextmanager
def fused_attention(enabled: bool) -> Iterator[None]:
    """Models built inside compute attention through PyTorch's fused kernel, or as two matmuls and a softmax.

    timm reads the switch when an attention layer is constructed, so a model keeps what it was built with.
    """
    before, experimental = use_fused_attn(), use_fused_attn(experimental=True)
    set_fused_attn(enabled)
    try:
        yield
    finally:
        set_fused_attn(before, experimental)


def create(
    name: str, options: Mapping[str, Any], resolution: tuple[int, int], *, fused: bool = True, device: str | torch.device = "cpu"
) -> torch.nn.Module:
    """A model in eval mode that takes (B, 3, H, W) images.

    Args:
        name: a name that timm knows, e.g. `vittt_tiny_patch16_224` or `regnety_040`.
        options: further keyword arguments of the model; unknown ones are the model's own error.
        resolution: (H, W) in pixels. Models with a fixed input size are built for it; the others take any.
        fused: whether attention layers use PyTorch's fused kernel.
        device: `meta` builds shapes without memory.

    Raises:
        ValueError: an unknown name, or options that the model refuses.
    """
    with fused_attention(fused):
        try:
            return _create(name, options, resolution, device).eval()
        except NotImplementedError:
            if torch.device(device).type != "meta":
                raise
            # some constructors compute with values (RegNet calls torch.unique), which the meta device does not have
            return _create(name, options, resolution, "cpu").to("meta").eval()


def _create(name: str, options: Mapping[str, Any], resolution: tuple[int, int], device: str | torch.device) -> torch.nn.Module:
    with torch.device(device):
        return build_model(name, img_size=resolution, **options)
