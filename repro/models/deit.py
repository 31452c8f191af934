"""A nano DeiT for the embedded data sets, built from timm's class; the published sizes are timm's own models."""

from typing import Any

from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from .backbone import create, default_cfg

default_cfgs = generate_default_cfgs(
    {"deit_nano_patch16_144.untrained": {**default_cfg(144), "first_conv": "patch_embed.proj"}}
)

official_state_dict = dict  # weights published for timm's class already have its names


@register_model
def deit_nano_patch16_144(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Build a DeiT of the size of the other nanos: D 64, 4 blocks, one head of 64; with a class token."""
    sizes = {"img_size": 144, "patch_size": 16, "embed_dim": 64, "depth": 4, "num_heads": 1}
    return create(
        VisionTransformer,
        "deit_nano_patch16_144",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        **sizes | kwargs,
    )
