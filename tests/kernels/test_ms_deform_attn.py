"""What is deformable attention's own: levels of any shape, points outside, NaN in a pixel, an image's sizes, errors."""

import pytest
import torch

from kernels.ms_deform_attn import ms_deform_attn
from kernels.tools.cases import ROUNDING, Random
from kernels.tools.check import poisoned_memory, relative_error
from kernels.tools.ms_deform_attn_cases import CASES, make_points
from tests.kernels.helpers import ANY_BACKEND, BACKEND, EXACT, INTERPRETED, once
from tests.slow import slow

INPUTS = CASES.INPUTS

# (B,Q,M,L,P), C and the levels: rows and channels that fill no block, single pixels and rows, as many levels as the
# kernels take
SIZES = [
    ((1, 1, 1, 1, 1), 1, ((1, 1),)),
    ((2, 13, 3, 1, 3), 5, ((4, 3),)),
    ((1, 5, 2, 3, 4), 16, ((4, 6), (2, 3), (1, 2))),
    ((1, 7, 1, 4, 2), 3, ((1, 5), (4, 1), (2, 2), (1, 1))),
]


def draw_points(seed, *sizes):
    """See `make_points`; fp64, of values of bf16 and, for locations and weights, of fp32."""
    return [x.double() for x in CASES.cast(make_points(Random(seed), *sizes), torch.bfloat16)]


def differentiate(inputs, shapes, backend):
    value, locations, weights, dout = inputs
    leaves = [x.detach().requires_grad_() for x in (value, locations, weights)]
    with poisoned_memory():
        out = ms_deform_attn(leaves[0], shapes, *leaves[1:], backend=backend)
        return out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def assert_near_reference(inputs, shapes, backend, dtype=EXACT):
    """Output and gradients, of a norm of at least 1; what is in the dtype of value has its rounding."""
    value, locations, weights, dout = (x.to(EXACT) for x in inputs)
    results = differentiate([value.to(dtype), locations, weights, dout.to(dtype)], shapes, backend)
    expected = differentiate([x.double() for x in inputs], shapes, "reference")
    for name, a, b in zip(("out", *INPUTS), results, expected, strict=True):
        limit = (1e-5 if INTERPRETED else 1e-12) + (ROUNDING[dtype] if name in ("out", "value") else 0.0)
        assert relative_error(a, b, 1.0) < limit, name
    return results


@pytest.mark.parametrize("backend", BACKEND)
@pytest.mark.parametrize("dtype", [EXACT, slow(torch.float16)] if INTERPRETED else [EXACT], ids=str)
@pytest.mark.parametrize(("samples", "channels", "shapes"), SIZES, ids=str)
def test_levels_of_any_shape(samples, channels, shapes, dtype, backend):
    assert_near_reference([x.float() for x in draw_points(0, shapes, samples, channels)], shapes, backend, dtype)


@pytest.mark.parametrize("backend", BACKEND)
def test_many_samples_in_one_cell_and_samples_on_pixels(backend):
    """More than a program takes at once; no gradient where no sample comes near; on a pixel, its value exactly."""
    shapes = ((4, 5),)
    value, locations, weights, dout = (x.float() for x in draw_points(0, shapes, (2, 40, 2, 1, 3), 8))
    # between the columns 1 and 2, the rows 1 and 2
    inputs = value, (locations % 1 * 0.98 + 1.5) / torch.tensor([5, 4]), weights, dout
    reached = assert_near_reference(inputs, shapes, backend)[1].abs().sum((0, 2, 3)) > 0
    assert torch.equal(reached.nonzero().flatten(), torch.tensor([6, 7, 11, 12]))
    i, j = torch.meshgrid(torch.arange(-2.0, 6), torch.arange(-2.0, 6), indexing="ij")
    locations = ((torch.stack([j, i], -1) + 0.5) / 4).view(1, 64, 1, 1, 1, 2)
    value, _, weights, dout = (x.float() for x in draw_points(0, ((4, 4),), (1, 64, 1, 1, 1), 3))
    assert_near_reference([value, locations, weights, dout], ((4, 4),), backend)


@pytest.mark.parametrize("backend", ANY_BACKEND)
def test_far_outside_there_is_nothing(backend):
    value, locations, weights, dout = (x.float() for x in draw_points(0, ((3, 4),), (1, 6, 2, 1, 2), 3))
    far = locations + torch.tensor([-3.0, 3.0, 1e4, -1e9, 1e20, -1e30]).view(1, 6, 1, 1, 1, 1)
    assert all((x == 0).all() for x in differentiate([value, far, weights, dout], ((3, 4),), backend))


@pytest.mark.parametrize("backend", ANY_BACKEND)
@pytest.mark.parametrize(("which", "bad"), [(1, "nan"), (2, "nan"), *([(1, "inf")] if INTERPRETED else [])])
def test_nan_at_a_point_fills_its_query_and_head(which, bad, backend):
    """A location's or a weight's: in the output and in the point's own gradients; nothing else is touched."""
    inputs = [x.to(EXACT) for x in draw_points(0, ((3, 4),), (1, 6, 2, 1, 2), 3)]
    inputs[which][0, 4, 1, 0, 1] = float(bad)
    out, dvalue, *gradients = differentiate(inputs, ((3, 4),), backend)
    assert out[0, 4, 1].isnan().all() and out.isnan().sum() == 3
    others = torch.ones(1, 6, 2, dtype=torch.bool)
    others[0, 4, 1] = False
    assert all(x[others].isfinite().all() for x in gradients)
    if which == 1 and backend == "triton":
        assert dvalue.isfinite().all() and all(x[0, 4, 1, 0, 1].isnan().all() for x in gradients)
        assert all(x[0, 4, 1, 0, 0].isfinite().all() for x in gradients)


@pytest.mark.parametrize("backend", ANY_BACKEND)
def test_nan_in_a_pixel_stays_around_it(backend):
    shapes = ((4, 5),)
    value, locations, weights, _ = (x.to(EXACT) for x in draw_points(0, shapes, (1, 40, 2, 1, 1), 3))
    value[0, 7, 1, 2] = float("nan")  # row 1, column 2
    x, y = (locations[0, :, 1, 0, 0] * torch.tensor([5, 4]) - 0.5).unbind(-1)
    near = ((x - 2).abs() < 1) & ((y - 1).abs() < 1)
    assert 0 < near.sum() < 40
    bad = ms_deform_attn(value, shapes, locations, weights, backend=backend).isnan()
    assert torch.equal(bad[0, :, 1, 2], near) and bad.sum() == near.sum()


@once
@pytest.mark.parametrize("backend", ANY_BACKEND)
def test_a_sample_has_its_share_of_every_pixel(backend):
    """1 − |x − j| of a column, and so of a row: anywhere, on pixels, at edges, and outside, where there is nothing."""
    shapes = ((3, 5), (2, 2), (1, 4))
    value, locations, weights, _ = draw_points(0, shapes, (2, 121, 2, 3, 2), 3)
    expected = torch.zeros(2, 121, 2, 3, dtype=torch.float64)
    weights[1, :, :, 0] = 0  # the other levels have sides in which edges are exact numbers
    parts = value.split([h * w for h, w in shapes], 1)
    for level, ((h, w), part) in enumerate(zip(shapes, parts, strict=True)):
        beyond = torch.tensor([-1e9, -3.0, -1.0, -0.75, -0.5, -0.25, 0.0], dtype=torch.float64)
        axes = [(torch.cat([beyond, side - 1 - beyond[[0, 2, 3, 6]]]) + 0.5) / side for side in (w, h)]
        locations[1, :, :, level] = torch.cartesian_prod(*axes)[:, None, None]
        x, y = (locations[:, :, :, level, :, None] * torch.tensor([w, h]) - 0.5).unbind(-1)
        i, j = torch.cartesian_prod(torch.arange(h), torch.arange(w)).unbind(-1)
        share = (1 - (x - j).abs()).clamp(min=0) * (1 - (y - i).abs()).clamp(min=0)
        expected += torch.einsum("bqmp,bqmps,bsmc->bqmc", weights[:, :, :, level], share, part)
    out = ms_deform_attn(value, shapes, locations, weights, backend=backend)
    torch.testing.assert_close(out, expected)
    assert (expected == 0).any() and (out[expected == 0] == 0).all()


@once
def test_compiles_with_sizes_from_an_image():
    """To one graph of any size, with the levels' sizes taken from a tensor's shape, as a model takes them."""

    def loss(image, value, locations, weights):
        h, w = image.shape
        return ms_deform_attn(value, ((h, w), (2, 2)), locations, weights).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, queries, sides in ((1, 7, (3, 4)), (2, 9, (5, 3))):
        drawn = draw_points(0, (sides, (2, 2)), (batch, queries, 2, 2, 2), 3)
        image, inputs = torch.empty(sides), [x.float().requires_grad_() for x in drawn[:-1]]
        expected = torch.autograd.grad(loss(image, *inputs), inputs)
        assert all(map(torch.equal, torch.autograd.grad(compiled(image, *inputs), inputs), expected))


SHAPES = ((3, 4), (2, 2))
WRONG = [
    {"value": torch.zeros(2, 15, 2, 3)},  # not the 16 tokens of the levels
    *({"shapes": shapes} for shapes in ((3, 4), (), ((3, 4.0), (2, 2)), ((0, 4), (4, 4)))),
    # no queries, an axis less, a level more
    *({"locations": torch.zeros(2, *shape)} for shape in ((0, 2, 2, 2, 2), (5, 2, 4, 2), (5, 2, 3, 2, 2))),
]


@once
@pytest.mark.parametrize("changed", WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(changed):
    inputs = draw_points(0, SHAPES, (2, 5, 2, 2, 2), 3)[:-1]
    arguments = dict(zip(INPUTS, (x.float() for x in inputs), strict=True)) | {"shapes": SHAPES} | changed
    with pytest.raises(ValueError, match=f"ms_deform_attn: {next(iter(changed))} "):
        ms_deform_attn(**arguments)
