"""Receptive fields of models with a known field: computed by hand, or limited by what a design can see."""

import functools
import math

import numpy as np
import pytest
import timm
import torch
from torch import nn

import repro.models  # noqa: F401
from repro.inference.erf import compute_receptive_field, describe_field, find_centre, get_last_features
from tests.slow import first

# model, side in pixels, and the pixel by hand at the centre of its central unit
UNITS = [
    ("resnet_nano", 144, 2 * 32),  # layers that are padded so that position i stays at pixel i·stride
    ("deit_nano_patch16_144", 144, 4 * 16 + 7.5),  # patches, of which this is the middle
    ("vmamba_nano_144", 144, 2 * 32),
    ("convnext_atto", 144, 2 * 32 + 15.5),  # patches of patches, of which the last column and row are cut off
    ("resnet_nano", 160, 2 * 32),
    ("vim_nano_patch16_144", 144, 4 * 16 + 7.5),
    ("mambavision_nano_144", 144, 2 * 32),
    ("hvit3_nano_144", 144, 2 * 32),
    ("hvit3_nano_144", 150, 2 * 32),
    ("pvt_v2_b0", 128, 2 * 32),  # keys are reduced by patches, beside the padded layers
    ("poolformerv2_s12", 224, 3 * 32 + 1),  # of a stem of seven pixels that is padded by two
]


@pytest.mark.parametrize("depth", [1, 3])
def test_uniform_convolutions_give_repeated_convolution(depth):
    """n layers of 3x3 ones: the contribution at (i, j) from the centre is the product of two trinomial coefficients."""
    stack = nn.Sequential(*(nn.Conv2d(3 if i == 0 else 1, 1, 3, padding=1, bias=False) for i in range(depth))).double()
    for layer in stack:
        nn.init.ones_(layer.weight)
    row = functools.reduce(np.convolve, [np.ones(3)] * depth)
    expected = torch.from_numpy(np.pad(np.outer(row, row), 7 - depth))
    field = compute_receptive_field(stack, torch.rand(5, 3, 15, 15, dtype=torch.float64), batch_size=2)
    torch.testing.assert_close(field, 3 * expected)  # three colours
    shape = describe_field(field, (7, 7), patch=1)
    assert shape.share_within[0] == pytest.approx(float(expected[7, 7] / expected.sum()))
    assert shape.share_within[-1] == pytest.approx(1) and shape.share_ahead == pytest.approx(0.5)


def test_the_support_is_that_of_the_layers_and_signs_do_not_cancel():
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 5, padding=2)).double()
    field = compute_receptive_field(stack, torch.randn(4, 3, 21, 21, dtype=torch.float64))
    assert (field >= 0).all()
    seen = field.nonzero()
    assert seen.min(0).values.tolist() == [7, 7] and seen.max(0).values.tolist() == [13, 13] and len(seen) == 49


def test_radii_and_anisotropy_of_known_fields():
    ring = torch.zeros(65, 65, dtype=torch.float64)
    ring[32, 32] = 1.0
    shape = describe_field(ring, (32, 32))
    assert (shape.radius_50_px, shape.radius_90_px, shape.share_ahead) == (0, 0, None)

    even = torch.ones(129, 129, dtype=torch.float64)
    shape = describe_field(even, (64, 64))
    assert shape.radius_50_px == pytest.approx(129 * math.sqrt(0.5 / math.pi), abs=1)  # the circle of half the area
    assert shape.share_within[40] == pytest.approx(math.pi * 40**2 / 129**2, rel=0.02)
    assert shape.anisotropy == pytest.approx(0, abs=1e-12) and shape.share_ahead == pytest.approx(0.5)

    ray = torch.zeros(129, 129, dtype=torch.float64)
    ray[64, 65:] = 1.0
    for field, ahead in ((ray, 1), (ray.T, 1), (ray.flip(1), 0)):
        shape = describe_field(field, (64, 64))
        # all of each ring in one of eight sectors
        assert shape.anisotropy == pytest.approx(7 / 8, abs=0.01) and shape.share_ahead == ahead
    with pytest.raises(ValueError, match="has no shape"):
        describe_field(0 * even, (64, 64))


@pytest.mark.parametrize(("design", "ahead"), [("conv1d", False), ("dual", True), ("conv2d", True)])
def test_one_direction_sees_nothing_ahead(design, ahead):
    """Causality of the scan: with only a forward scan, no token depends on a later one."""
    torch.manual_seed(0)
    model = timm.create_model("vittt_nano_patch16_144", design=design, depth=2, num_classes=0).eval()
    field = compute_receptive_field(get_last_features(model), torch.randn(2, 3, 80, 80))
    shape = describe_field(field, find_centre(model, (80, 80)))
    assert (shape.share_ahead > 0.2) if ahead else (shape.share_ahead == 0)
    assert find_centre(model, (80, 80)) == (39.5, 39.5)


@pytest.mark.parametrize(("name", "size", "centre"), first(UNITS, 4))
def test_the_centre_is_where_the_central_unit_looks(name, size, centre):
    """The centre of gravity of an untrained model's field is there, and not where a neighbouring unit's would be."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=0).eval()
    assert find_centre(model, (size, size)) == (centre, centre)
    field = compute_receptive_field(get_last_features(model), torch.randn(4, 3, size, size))
    place = torch.arange(size, dtype=field.dtype)
    found = [float((field.sum(1 - axis) * place).sum() / field.sum()) for axis in (0, 1)]
    assert found == pytest.approx([centre, centre], abs=3)


def test_a_model_without_feature_maps_is_refused():
    with pytest.raises(ValueError, match="no feature maps"):
        get_last_features(timm.create_model("vgg11"))
