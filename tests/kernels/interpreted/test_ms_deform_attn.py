"""The Triton kernels of multi-scale deformable attention against the reference and its autograd in fp64 on the same inputs."""

import pytest
import torch

from kernels.ms_deform_attn import ms_deform_attn, triton_bwd, triton_fwd
from kernels.ms_deform_attn.op import _backward_op, _forward_op

NAMES = ("out", "value", "locations", "weights")
UNIT_ROUNDOFF = {torch.float32: 0.0, torch.float16: 2.0**-11}
# B, Q, M, C, P and the levels: rows and channels that fill no block, single pixels and rows, as many levels as there may be
SIZES = [
    (1, 1, 1, 1, 1, ((1, 1),)),
    (2, 13, 3, 5, 3, ((4, 3),)),
    (2, 5, 2, 16, 4, ((4, 6), (2, 3), (1, 2))),
    (1, 7, 1, 3, 2, ((1, 5), (4, 1), (2, 2), (1, 1))),
]


def out_and_gradients(inputs, shapes, cotangent, backend):
    value, locations, weights = inputs = [x.detach().requires_grad_() for x in inputs]
    out = ms_deform_attn(value, shapes, locations, weights, backend=backend)
    return out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))


def errors(results, expected):
    """max |a − b| over the largest element, or over 1 where all of them vanish."""
    found = {}
    for name, a, b in zip(NAMES, results, expected, strict=True):
        a, b = a.detach().double(), b.detach().double()
        assert a.isfinite().all(), name
        found[name] = ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
    return found


def test_they_are_interpreted():
    assert triton_fwd.INTERPRETED


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=["fp32", "fp16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_out_and_every_gradient(make_deform_inputs, poisoned_memory, size, dtype):
    *size, shapes = size
    *inputs, cotangent = make_deform_inputs(*size, shapes, dtype=dtype)
    results = out_and_gradients(inputs, shapes, cotangent, "triton")
    found = errors(results, out_and_gradients([x.double() for x in inputs], shapes, cotangent, "torch"))
    assert all(found[n] < 1e-5 + (UNIT_ROUNDOFF[dtype] if n in ("out", "value") else 0) for n in NAMES), found
    assert [x.dtype for x in results] == [dtype, *(x.dtype for x in inputs)]


def test_many_samples_in_one_cell(make_deform_inputs, poisoned_memory):
    """More than a program takes at once, and pixels that no sample comes near: their gradient is zero."""
    shapes = ((4, 5),)
    value, locations, weights, cotangent = make_deform_inputs(2, 40, 2, 8, 3, shapes, dtype=torch.float32)
    inputs = value, (locations % 1 * 0.98 + 1.5) / torch.tensor([5, 4]), weights  # between the columns 1 and 2, the rows 1 and 2
    results = out_and_gradients(inputs, shapes, cotangent, "triton")
    assert max(errors(results, out_and_gradients([x.double() for x in inputs], shapes, cotangent, "reference")).values()) < 1e-5
    reached = results[1].abs().sum((0, 2, 3)) > 0
    assert torch.equal(reached.nonzero().flatten(), torch.tensor([6, 7, 11, 12]))


def test_far_outside_there_is_nothing(make_deform_inputs, poisoned_memory):
    value, locations, weights, cotangent = make_deform_inputs(1, 6, 2, 3, 2, ((3, 4),), dtype=torch.float32)
    far = torch.tensor([-3.0, 3.0, 1e4, -1e9, 1e20, -1e30])
    inputs = value, locations + far.view(1, 6, 1, 1, 1, 1), weights
    assert all((x == 0).all() for x in out_and_gradients(inputs, ((3, 4),), cotangent, "triton"))


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_nan_at_a_point_fills_its_query_and_head(make_deform_inputs, bad):
    """In the output and in the point's own gradients, and nothing else is touched."""
    value, locations, weights, cotangent = make_deform_inputs(1, 6, 2, 3, 2, ((3, 4),), dtype=torch.float32)
    expected = out_and_gradients([value, locations, weights], ((3, 4),), cotangent, "triton")
    locations[0, 4, 1, 0, 1] = float(bad)
    out, dvalue, *gradients = out_and_gradients([value, locations, weights], ((3, 4),), cotangent, "triton")
    assert out[0, 4, 1].isnan().all() and out.isnan().sum() == 3 and dvalue.isfinite().all()
    for found, before in zip(gradients, expected[2:], strict=True):
        assert found[0, 4, 1, 0, 1].isnan().all() and found.isnan().sum() == before[0, 4, 1, 0, 1].numel()


def test_on_pixels_and_at_edges_as_the_reference(make_deform_inputs):
    """Whole pixel coordinates from −2 to beyond the map, exact in fp32: the value itself, and the derivative from the right."""
    i, j = torch.meshgrid(torch.arange(-2.0, 6), torch.arange(-2.0, 6), indexing="ij")
    locations = ((torch.stack([j, i], -1) + 0.5) / 4).view(1, 64, 1, 1, 1, 2)
    value, _, weights, cotangent = make_deform_inputs(1, 64, 1, 3, 1, ((4, 4),), dtype=torch.float32)
    results = [out_and_gradients([value, locations, weights], ((4, 4),), cotangent, backend) for backend in ("triton", "reference")]
    assert max(errors(*results).values()) < 1e-6


def test_a_pixel_s_nan_stays_around_it(make_deform_inputs):
    value, locations, weights, _ = make_deform_inputs(1, 20, 2, 3, 1, ((4, 5),), dtype=torch.float32)
    value[0, 7, 1, 2] = float("nan")  # row 1, column 2
    x, y = (locations[0, :, 1, 0, 0] * torch.tensor([5, 4]) - 0.5).unbind(-1)
    near = ((x - 2).abs() < 1) & ((y - 1).abs() < 1)
    bad = ms_deform_attn(value, ((4, 5),), locations, weights, backend="triton").isnan()
    assert 0 < near.sum() < 20 and torch.equal(bad[0, :, 1, 2], near) and bad.sum() == near.sum()


def test_other_configs(make_deform_inputs, poisoned_memory):
    value, locations, weights, dout = make_deform_inputs(1, 11, 2, 24, 2, ((3, 4), (2, 2)), dtype=torch.float32)
    arguments = value, [3, 4, 2, 2], locations, weights
    rows, pixels = triton_fwd.configs(24), triton_bwd.configs(24)
    expected = triton_fwd.forward(*arguments, rows[0]), *triton_bwd.backward(dout, *arguments, rows[0], pixels[0])
    for one, other in ((rows[1], pixels[1]), (rows[2], pixels[2]), (rows[3], pixels[0])):
        results = triton_fwd.forward(*arguments, one), *triton_bwd.backward(dout, *arguments, one, other)
        assert max(errors(results, expected).values()) < 2e-6


def test_repeatable_to_the_bit(make_deform_inputs):
    *inputs, cotangent = make_deform_inputs(2, 20, 2, 8, 4, ((3, 3),), dtype=torch.float16)
    assert all(map(torch.equal, *(out_and_gradients(inputs, ((3, 3),), cotangent, "triton") for _ in range(2))))


def test_strided_and_low_precision_inputs(make_deform_inputs):
    """Points in value's dtype, other strides, and what sum() hands back: the bits of plain ones of the same values."""
    value, locations, weights, _ = (x.half() for x in make_deform_inputs(2, 5, 2, 4, 2, ((3, 4),)))
    dout = torch.ones((), dtype=torch.float16).expand(2, 5, 2, 4)
    plain = out_and_gradients([value, locations.float(), weights.float()], ((3, 4),), dout.clone(), "triton")
    other = out_and_gradients([value.mT.contiguous().mT, locations, weights.mT.contiguous().mT], ((3, 4),), dout, "triton")
    assert other[2].dtype == other[3].dtype == torch.float16
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(plain, other, strict=True))


def test_opcheck(make_deform_inputs):
    value, locations, weights, dout = make_deform_inputs(1, 3, 2, 4, 2, ((2, 3),), dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for x in (value, locations, weights)]
    torch.library.opcheck(_forward_op, (leaves[0], [2, 3], *leaves[1:], "triton"))
    torch.library.opcheck(_backward_op, (dout, value, [2, 3], locations, weights, "triton"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_that_the_kernels_do_not_take(make_deform_inputs, dtype):
    value, locations, weights, _ = make_deform_inputs(1, 3, 2, 4, 2, ((2, 3),), dtype=dtype)
    with pytest.raises(ValueError, match=f"value has shape .*: .*value is {dtype}.*; use auto, torch or reference"):
        ms_deform_attn(value, ((2, 3),), locations, weights, backend="triton")
