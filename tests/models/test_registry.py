"""The PlainBackbone protocol: going through its parts is going through the model."""

import pytest
import timm
import torch

import repro.models  # noqa: F401
from repro.models.registry import PlainBackbone, PlainViT, as_plain_backbone


def run_parts(backbone: PlainBackbone, image: torch.Tensor) -> torch.Tensor:
    tokens, grid = backbone.embed(image)
    assert grid == (image.shape[2] // backbone.patch_size, image.shape[3] // backbone.patch_size)
    assert tokens.shape[1] == grid[0] * grid[1] + len(backbone.prefix_positions(grid[0] * grid[1]))
    for block in backbone.blocks:
        tokens = block(tokens, grid)
    return backbone.norm(tokens)


@pytest.mark.parametrize("pool", ["mean", "head", "mid", "double"])
def test_vittt_is_a_plain_backbone(pool):
    torch.manual_seed(0)
    model = timm.create_model("vittt_nano_patch16_144", pool=pool).eval()
    image = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        torch.testing.assert_close(run_parts(as_plain_backbone(model), image), model.forward_features(image))
    assert as_plain_backbone(model) is model


def test_deit_is_wrapped():
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=2, dynamic_img_size=True).eval()
    image = torch.randn(2, 3, 64, 96)
    backbone = as_plain_backbone(model)
    assert isinstance(backbone, PlainViT) and backbone.prefix_positions(24) == (0,)
    with torch.no_grad():
        torch.testing.assert_close(run_parts(backbone, image), model.forward_features(image))


def test_what_cannot_be_wrapped_is_refused():
    with pytest.raises(TypeError, match="ResNet"):
        as_plain_backbone(timm.create_model("resnet10t"))
    with pytest.raises(ValueError, match="dynamic_img_size"):
        as_plain_backbone(timm.create_model("deit_tiny_patch16_224", depth=1))
