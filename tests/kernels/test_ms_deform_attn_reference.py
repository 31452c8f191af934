"""The reference of deformable attention, and the torch backend beside it, against numbers and rules from elsewhere."""

import pytest
import torch

from kernels.ms_deform_attn import ms_deform_attn
from kernels.ms_deform_attn.reference import ms_deform_attn_formula
from kernels.tools.ms_deform_attn_cases import draw_points

BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])
# sides of two levels, and what the equation gives for the inputs of `fixture`, computed elsewhere by explicit loops
SHAPES = ((4, 6), (2, 3))
EXPECTED = [[0.28087756, 0.15436048, -0.29950334, -0.35414631], [0.16073304, 0.16679308, -0.21483559, -0.33336349]]
EXPECTED += [[0.03331726, 0.10855848, 0.30952757, 0.22544672]]


def fixture():
    """value, locations, weights: B 1, two heads of two channels, three queries, two levels, two points."""
    s, m, k = torch.meshgrid(torch.arange(30.0), torch.arange(2.0), torch.arange(2.0), indexing="ij")
    value = torch.sin(0.37 * (4 * s + 2 * m + k).double() + 0.2)[None]
    axes = [torch.arange(n, dtype=torch.float64) for n in (3, 2, 2, 2)]
    q, m, l, p = torch.meshgrid(*axes, indexing="ij")
    sign = torch.where(q % 2 == 1, 1.0, -1.0)
    x = 0.08 + 0.23 * q + 0.17 * m + 0.11 * l - 0.29 * p * sign
    y = 0.9 - 0.31 * q + 0.07 * m - 0.13 * l + 0.19 * p
    weights = torch.cos(0.5 * q + 1.1 * m + 0.7 * l + 0.3 * p).flatten(2).softmax(-1).view(1, 3, 2, 2, 2)
    return value, torch.stack([x, y], -1)[None], weights


@BACKENDS
def test_numbers_from_elsewhere(backend):
    value, locations, weights = fixture()
    out = ms_deform_attn(value, SHAPES, locations, weights, backend=backend)
    assert (out.flatten(2)[0] - torch.tensor(EXPECTED, dtype=torch.float64)).abs().max() < 1e-7


def test_against_loops_over_numbers():
    """Sample by sample, neighbour by neighbour, in Python's own numbers."""
    shapes = ((3, 5), (2, 2), (1, 4))
    value, locations, weights, _ = draw_points(0, shapes, (2, 4, 2, 3, 2), 3)
    expected = torch.zeros(2, 4, 2, 3, dtype=torch.float64)
    for b, q, m, level, p in torch.cartesian_prod(*map(torch.arange, weights.shape)).tolist():
        h, w = shapes[level]
        first = sum(rows * columns for rows, columns in shapes[:level])
        x, y = (locations[b, q, m, level, p].tolist()[axis] * (w, h)[axis] - 0.5 for axis in (0, 1))
        for i in range(h):
            for j in range(w):
                share = max(0.0, 1 - abs(x - j)) * max(0.0, 1 - abs(y - i))
                expected[b, q, m] += weights[b, q, m, level, p] * share * value[b, first + i * w + j, m]
    torch.testing.assert_close(ms_deform_attn_formula(value, shapes, locations, weights), expected)


@BACKENDS
def test_a_ramp_is_interpolated_exactly(backend):
    """value = 3 j − 2 i + 0.5 at pixel (i, j), sampled at any (x, y) between the centres, and at centres."""
    h, w = 5, 7
    i, j = torch.meshgrid(torch.arange(h).double(), torch.arange(w).double(), indexing="ij")
    x = torch.rand(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * (w - 1)
    y = torch.rand(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * (h - 1)
    x[:5], y[:5] = x[:5].round(), y[:5].round()
    locations = torch.stack([(x + 0.5) / w, (y + 0.5) / h], -1).view(1, 30, 1, 1, 1, 2)
    ramp = (3 * j - 2 * i + 0.5).view(1, h * w, 1, 1)
    out = ms_deform_attn(ramp, ((h, w),), locations, torch.ones(1, 30, 1, 1, 1).double(), backend=backend)
    torch.testing.assert_close(out.flatten(), 3 * x - 2 * y + 0.5)


@BACKENDS
def test_the_edge_fades_to_nothing(backend):
    """Along both axes: 1 + x of the value for x in (−1, 0), and 0 from −1 and from w on."""
    value = torch.full((1, 12, 1, 1), 2.0, dtype=torch.float64)
    x = torch.tensor([-1e9, -3.0, -1.0, -0.75, -0.5, -0.25, 0.0, 3.0, 3.25, 4.0, 50.0], dtype=torch.float64)
    share = torch.tensor([0.0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 0.75, 0, 0]).double()
    for axis, shapes in ((0, ((3, 4),)), (1, ((4, 3),))):
        locations = torch.full((1, len(x), 1, 1, 1, 2), 0.5, dtype=torch.float64)
        locations[..., axis] = ((x + 0.5) / 4).view(1, -1, 1, 1, 1)
        out = ms_deform_attn(value, shapes, locations, torch.ones(1, len(x), 1, 1, 1).double(), backend=backend)
        torch.testing.assert_close(out.flatten(), 2 * share)
        assert (out.flatten()[share == 0] == 0).all()
