"""Deformable attention's kernels in other configs; the rest of their tests is in `tests/kernels`."""

import pytest

from kernels.ms_deform_attn import triton_bwd, triton_fwd
from kernels.ms_deform_attn.reference import Arguments
from kernels.tools.check import relative_error
from kernels.tools.ms_deform_attn_cases import CASES, draw_points


@pytest.mark.slow
def test_other_configs():
    shapes = ((3, 4), (2, 2))
    value, locations, weights, dout = (x.float() for x in draw_points(0, shapes, (1, 11, 2, 2, 2), 24))
    arguments = Arguments(value, [3, 4, 2, 2], locations, weights)
    rows, pixels = triton_fwd.configs(24), triton_bwd.configs(24)
    expected = CASES.kernels(arguments, dout, rows[0], pixels[0])
    for configs in ((rows[1], pixels[1]), (rows[2], pixels[2]), (rows[3], pixels[0])):
        found = CASES.kernels(arguments, dout, *configs)
        assert all(relative_error(a, b, 1.0) < 2e-6 for a, b in zip(found, expected, strict=True))
