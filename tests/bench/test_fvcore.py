"""The count of fvcore: its handlers on single layers by hand, and the FLOPs that the papers of the ViT³ family print."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from repro.bench.flops import cost
from repro.bench.fvcore import count_extras, fvcore_terms


class Upsample(nn.Module):
    def __init__(self, mode: str):
        super().__init__()
        self.mode, self.parameter = mode, nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return F.interpolate(x, scale_factor=2, mode=self.mode)


VALUES = 3 * 8 * 12


@pytest.mark.parametrize(
    ("layer", "norms", "interpolation"),
    [
        (nn.LayerNorm(12), 5 * VALUES, 0),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.LayerNorm(12, elementwise_affine=False)), 4 * VALUES, 0),
        (nn.GroupNorm(3, 3), 5 * VALUES, 0),
        (nn.BatchNorm2d(3), 2 * VALUES, 0),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False)), VALUES, 0),
        (Upsample("bilinear"), 0, 4 * 4 * VALUES),
        (Upsample("nearest"), 0, 4 * VALUES),
        (nn.Sequential(nn.Conv2d(3, 5, 1), nn.GELU()), 0, 0),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_single_layers(layer, norms, interpolation, device):
    assert count_extras(layer.to(device).eval(), (8, 12)) == {"norms": norms, "interpolation": interpolation}


@pytest.mark.parametrize(
    ("name", "width", "tokens", "giga"),
    [
        ("vit3_tiny_patch16_224", 192, 196, 1.22),  # the authors' code, for T, S and B: 1.2235, 4.8169 and 17.956
        ("vit3_small_patch16_224", 384, 196, 4.82),
        ("vit3_base_patch16_224", 768, 196, 17.96),
        ("deit_tiny_patch16_224", 192, 197, 1.26),
        ("study_small_patch16_224", 384, 196, 4.58),
        ("dit3_small_patch8", 384, 16, 0.40),  # Table 10 of ViT3
        ("dit3_small_patch4", 384, 64, 1.57),
        ("dit3_small_patch2", 384, 256, 6.23),
        ("dit3_base_patch8", 768, 16, 1.51),
        ("dit3_base_patch4", 768, 64, 5.88),
        ("dit3_base_patch2", 768, 256, 23.35),
    ],
)
def test_models_of_the_papers(name, width, tokens, giga):
    """Two LayerNorms in each of twelve blocks, and one after; a denoiser's, of latents' size, have no scale."""
    image_size, per_value = ((32, 32), 4) if name.startswith("dit3") else ((224, 224), 5)
    counted = cost(name, {}, image_size)
    terms, norms = fvcore_terms(counted, name, {}, image_size), 25 * tokens * width * per_value
    assert terms == {"multiply_adds": counted.macs, "norms": norms, "interpolation": 0}
    assert round(sum(terms.values()) / 1e9, 2) == giga
