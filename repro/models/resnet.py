"""A nano ResNet-18 for the embedded data sets, built from timm's class; the published sizes are timm's own models."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet

from .backbone import default_cfg

default_cfgs = generate_default_cfgs(
    {"resnet_nano.untrained": {**default_cfg(144), "first_conv": "conv1.0", "classifier": "fc"}}
)

official_state_dict = dict  # weights published for timm's class already have its names


@register_model
def resnet_nano(pretrained: bool = False, **kwargs: Any) -> ResNet:
    """Build a ResNet with one basic block per stage (8, 16, 32, 64 channels) after a deep stem; 0.08 M parameters."""
    sizes = {"layers": (1, 1, 1, 1), "channels": (8, 16, 32, 64), "stem_type": "deep", "stem_width": 4}
    return build_model_with_cfg(ResNet, "resnet_nano", pretrained, block=BasicBlock, **sizes | kwargs)
