"""The torch backend of multi-scale deformable attention against the reference and its autograd in fp64, and against itself."""

import pytest
import torch

from kernels.ms_deform_attn import ms_deform_attn

UNIT_ROUNDOFF = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# B, Q, M, C, P and the levels: single pixels, single rows, one level and many, sides that are no multiples of anything
SIZES = [
    (1, 1, 1, 1, 1, ((1, 1),)),
    (2, 13, 3, 5, 4, ((7, 5),)),
    (2, 5, 2, 8, 3, ((4, 6), (2, 3), (1, 2))),
    (1, 7, 1, 3, 2, ((1, 9), (9, 1), (2, 2), (1, 1), (3, 2))),
]
COCO = ((100, 168), (50, 84), (25, 42))  # the maps of an image of 800 by 1344 pixels


def out_and_gradients(inputs, shapes, cotangent, backend):
    value, locations, weights = inputs = [x.detach().requires_grad_() for x in inputs]
    out = ms_deform_attn(value, shapes, locations, weights, backend=backend)
    return out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_gradient_against_fp64(make_deform_inputs, poisoned_memory, size, dtype):
    *size, shapes = size
    *inputs, cotangent = make_deform_inputs(*size, shapes, dtype=dtype)
    results = out_and_gradients(inputs, shapes, cotangent, "torch")
    expected = out_and_gradients([x.double() for x in inputs], shapes, cotangent, "reference")
    for name, a, b in zip(("out", "value", "locations", "weights"), results, expected, strict=True):
        limit = (1e-13 if dtype == torch.float64 else 1e-5) + (UNIT_ROUNDOFF[dtype] if a.dtype == dtype else 0)
        assert ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() < limit, name
    assert [x.dtype for x in results] == [dtype, *(x.dtype for x in inputs)]


def test_far_outside_there_is_nothing(make_deform_inputs, poisoned_memory):
    shapes = ((3, 4),)
    value, locations, weights, cotangent = make_deform_inputs(1, 6, 2, 3, 2, shapes, dtype=torch.float32)
    far = locations + torch.tensor([-3.0, 3.0, 1e4, -1e9, 1e20, -1e30]).view(1, 6, 1, 1, 1, 1)
    for backend in ("torch", "reference"):
        results = out_and_gradients([value, far, weights], shapes, cotangent, backend)
        assert all((x == 0).all() for x in results)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("which", [1, 2], ids=["location", "weight"])
def test_nan_at_a_point_fills_its_query_and_head(make_deform_inputs, which, backend):
    *inputs, _ = make_deform_inputs(1, 6, 2, 3, 2, ((3, 4),), dtype=torch.float32)
    inputs[which][0, 4, 1, 0, 1] = float("nan")
    bad = ms_deform_attn(inputs[0], ((3, 4),), *inputs[1:], backend=backend).isnan()
    assert bad[0, 4, 1].all() and bad.sum() == 3


def test_a_pixel_s_nan_stays_around_it(make_deform_inputs):
    shapes = ((4, 5),)
    value, locations, weights, _ = make_deform_inputs(1, 20, 2, 3, 1, shapes)
    value[0, 7, 1, 2] = float("nan")  # row 1, column 2
    x, y = (locations[0, :, 1, 0, 0] * torch.tensor([5, 4]) - 0.5).unbind(-1)
    near = ((x - 2).abs() < 1) & ((y - 1).abs() < 1)
    assert 0 < near.sum() < 20
    for backend in ("torch", "reference"):
        bad = ms_deform_attn(value, shapes, locations, weights, backend=backend).isnan()
        assert torch.equal(bad[0, :, 1, 2], near) and bad.sum() == near.sum()


def test_points_in_a_low_precision(make_deform_inputs):
    """locations and weights of value's dtype: gradients in it, too."""
    *inputs, cotangent = (x.half() for x in make_deform_inputs(2, 5, 2, 3, 2, ((3, 4), (2, 2))))
    results = out_and_gradients(inputs, ((3, 4), (2, 2)), cotangent, "torch")
    expected = out_and_gradients([inputs[0], *(x.float() for x in inputs[1:])], ((3, 4), (2, 2)), cotangent, "torch")
    assert all(x.dtype == torch.float16 for x in results)
    assert all(torch.equal(a, b.half()) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("queries", "shapes"), [(22050, COCO[1:2]), (4200, COCO)], ids=["extractor", "injector"])
def test_as_many_tokens_as_coco_has(make_deform_inputs, queries, shapes, dtype):
    """Under autocast and half precision: finite, and as exact in a map of 168 columns as in a small one."""
    *inputs, cotangent = make_deform_inputs(1, queries, 2, 4, 4, shapes, dtype=dtype)
    with torch.autocast("cpu", dtype):
        results = out_and_gradients(inputs, shapes, cotangent, "torch")
    assert all(x.isfinite().all() for x in results)
    with torch.no_grad():
        expected = ms_deform_attn(inputs[0].double(), shapes, *(x.double() for x in inputs[1:]), backend="reference")
    assert ((results[0].double() - expected).norm() / expected.norm()).item() < 1e-4 + UNIT_ROUNDOFF[dtype]


def test_repeatable_to_the_bit(make_deform_inputs):
    *inputs, cotangent = make_deform_inputs(2, 50, 3, 8, 4, ((6, 7), (3, 4)), dtype=torch.float32)
    first, second = (out_and_gradients(inputs, ((6, 7), (3, 4)), cotangent, "torch") for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_inputs_are_left_alone_and_may_be_strided(make_deform_inputs):
    shapes = ((3, 4), (2, 2))
    value, locations, weights, cotangent = make_deform_inputs(2, 6, 2, 4, 3, shapes)
    strided = value.mT.contiguous().mT, locations[:, :1].expand_as(locations), torch.stack([weights] * 2, -1)[..., 0]
    plain, before = ([x.clone() for x in strided] for _ in range(2))
    results = out_and_gradients(strided, shapes, cotangent[..., :1].expand_as(cotangent), "torch")
    expected = out_and_gradients(plain, shapes, cotangent[..., :1].expand_as(cotangent).clone(), "torch")
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert all(map(torch.equal, strided, before))
