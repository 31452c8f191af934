"""The reference of deformable attention, and the torch backend beside it, against loops and a rule."""

import pytest
import torch

from kernels.ms_deform_attn import ms_deform_attn
from kernels.tools.ms_deform_attn_cases import draw_points

BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])


@BACKENDS
def test_against_loops_over_numbers(backend):
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
    torch.testing.assert_close(ms_deform_attn(value, shapes, locations, weights, backend=backend), expected)


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
