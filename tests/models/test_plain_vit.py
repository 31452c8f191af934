"""Models outside the PlainBackbone protocol; what the protocol gives of those inside is in test_all_families.py."""

import pytest
import timm

from repro.models.plain_vit import as_plain_backbone


def test_what_cannot_be_wrapped_is_refused():
    with pytest.raises(TypeError, match="ResNet"):
        as_plain_backbone(timm.create_model("resnet10t"))
    with pytest.raises(ValueError, match="dynamic_img_size"):
        as_plain_backbone(timm.create_model("deit_tiny_patch16_224", depth=1))
