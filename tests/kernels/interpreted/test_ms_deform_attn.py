"""What is deformable attention's own among the tests of its kernels: levels of any shape, points at edges and outside,
other configs.
"""

import pytest
import torch

from kernels.ms_deform_attn import ms_deform_attn, triton_bwd, triton_fwd
from kernels.ms_deform_attn.reference import Arguments
from kernels.tools.cases import ROUNDING
from kernels.tools.check import poisoned_memory, relative_error
from kernels.tools.ms_deform_attn_cases import CASES, draw_points
from tests.slow import slow

INPUTS = CASES.INPUTS

# (B,Q,M,L,P), C and the levels: rows and channels that fill no block, single pixels and rows, as many levels as there
# may be
SIZES = [
    ((1, 1, 1, 1, 1), 1, ((1, 1),)),
    ((2, 13, 3, 1, 3), 5, ((4, 3),)),
    ((2, 5, 2, 3, 4), 16, ((4, 6), (2, 3), (1, 2))),
    ((1, 7, 1, 4, 2), 3, ((1, 5), (4, 1), (2, 2), (1, 1))),
]


def draw(shapes, samples, channels):
    """value, locations, weights and dout in fp32."""
    return [x.float() for x in draw_points(0, shapes, samples, channels)]


def differentiate(inputs, shapes, backend="triton"):
    value, locations, weights, dout = inputs
    leaves = [x.detach().requires_grad_() for x in (value, locations, weights)]
    with poisoned_memory():
        out = ms_deform_attn(leaves[0], shapes, *leaves[1:], backend=backend)
        return out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def assert_near(results, expected, limit=1e-5, low=0.0):
    """Of a norm of at least 1; `low` more for what is in the dtype of value."""
    for name, a, b in zip(("out", *INPUTS), results, expected, strict=True):
        assert relative_error(a, b, 1.0) < limit + (low if name in ("out", "value") else 0.0), name


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float16)], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("samples", "channels", "shapes"), SIZES, ids=str)
def test_levels_of_any_shape(samples, channels, shapes, dtype):
    value, locations, weights, dout = inputs = draw(shapes, samples, channels)
    results = differentiate([value.to(dtype), locations, weights, dout.to(dtype)], shapes)
    assert_near(results, differentiate([x.double() for x in inputs], shapes, "reference"), low=ROUNDING[dtype])


def test_many_samples_in_one_cell():
    """More than a program takes at once, and pixels that no sample comes near: their gradient is zero."""
    shapes = ((4, 5),)
    value, locations, weights, dout = draw(shapes, (2, 40, 2, 1, 3), 8)
    # between the columns 1 and 2, the rows 1 and 2
    inputs = value, (locations % 1 * 0.98 + 1.5) / torch.tensor([5, 4]), weights, dout
    results = differentiate(inputs, shapes)
    assert_near(results, differentiate([x.double() for x in inputs], shapes, "reference"))
    reached = results[1].abs().sum((0, 2, 3)) > 0
    assert torch.equal(reached.nonzero().flatten(), torch.tensor([6, 7, 11, 12]))


def test_far_outside_there_is_nothing():
    value, locations, weights, dout = draw(((3, 4),), (1, 6, 2, 1, 2), 3)
    far = locations + torch.tensor([-3.0, 3.0, 1e4, -1e9, 1e20, -1e30]).view(1, 6, 1, 1, 1, 1)
    assert all((x == 0).all() for x in differentiate([value, far, weights, dout], ((3, 4),)))


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_nan_at_a_point_fills_its_query_and_head(bad):
    """In the output and in the point's own gradients; nothing else is touched."""
    inputs = draw(((3, 4),), (1, 6, 2, 1, 2), 3)
    expected = differentiate(inputs, ((3, 4),))
    inputs[1][0, 4, 1, 0, 1] = float(bad)
    out, dvalue, *gradients = differentiate(inputs, ((3, 4),))
    assert out[0, 4, 1].isnan().all() and out.isnan().sum() == 3 and dvalue.isfinite().all()
    for found, before in zip(gradients, expected[2:], strict=True):
        assert found[0, 4, 1, 0, 1].isnan().all() and found.isnan().sum() == before[0, 4, 1, 0, 1].numel()


def test_on_pixels_and_at_edges_as_the_reference():
    """Whole pixel coordinates from −2 to beyond the map, exact in fp32: the value itself, and the derivative from the
    right.
    """
    i, j = torch.meshgrid(torch.arange(-2.0, 6), torch.arange(-2.0, 6), indexing="ij")
    locations = ((torch.stack([j, i], -1) + 0.5) / 4).view(1, 64, 1, 1, 1, 2)
    value, _, weights, dout = draw(((4, 4),), (1, 64, 1, 1, 1), 3)
    assert_near(
        *(differentiate([value, locations, weights, dout], ((4, 4),), backend) for backend in ("triton", "reference")),
        1e-6,
    )


def test_nan_in_a_pixel_stays_around_it():
    value, locations, weights, _ = draw(((4, 5),), (1, 40, 2, 1, 1), 3)
    value[0, 7, 1, 2] = float("nan")  # row 1, column 2
    x, y = (locations[0, :, 1, 0, 0] * torch.tensor([5, 4]) - 0.5).unbind(-1)
    near = ((x - 2).abs() < 1) & ((y - 1).abs() < 1)
    bad = ms_deform_attn(value, ((4, 5),), locations, weights, backend="triton").isnan()
    assert 0 < near.sum() < 40 and torch.equal(bad[0, :, 1, 2], near) and bad.sum() == near.sum()


@pytest.mark.slow
def test_other_configs():
    value, locations, weights, dout = draw(((3, 4), (2, 2)), (1, 11, 2, 2, 2), 24)
    arguments = Arguments(value, [3, 4, 2, 2], locations, weights)
    rows, pixels = triton_fwd.configs(24), triton_bwd.configs(24)
    expected = triton_fwd.forward(arguments, rows[0]), *triton_bwd.backward(dout, arguments, rows[0], pixels[0])
    for one, other in ((rows[1], pixels[1]), (rows[2], pixels[2]), (rows[3], pixels[0])):
        assert_near(
            (triton_fwd.forward(arguments, one), *triton_bwd.backward(dout, arguments, one, other)), expected, 2e-6
        )
