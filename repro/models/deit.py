"""A nano of DeiT for the embedded data sets; the published sizes are timm's, and so is the class."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer

from .backbone import default_cfg

default_cfgs = generate_default_cfgs({"deit_nano_patch16_144.untrained": {**default_cfg(144), "first_conv": "patch_embed.proj"}})


@register_model
def deit_nano_patch16_144(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """D 64, 4 blocks, one head of 64, a class token: as the other nanos."""
    feature_cfg = {"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"}
    sizes = {"img_size": 144, "patch_size": 16, "embed_dim": 64, "depth": 4, "num_heads": 1, **kwargs}
    return build_model_with_cfg(VisionTransformer, "deit_nano_patch16_144", pretrained, feature_cfg=feature_cfg, **sizes)
