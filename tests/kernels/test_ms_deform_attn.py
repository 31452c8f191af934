"""What is deformable attention's own among its tests: levels of any shape, points outside, NaN in a pixel, sizes from
an image, its errors.
"""

import pytest
import torch

from kernels.ms_deform_attn import ms_deform_attn, selected_backend
from kernels.tools.cases import ROUNDING
from kernels.tools.check import poisoned_memory, relative_error
from kernels.tools.ms_deform_attn_cases import CASES, Sizes, draw_points

INPUTS, draw = CASES.INPUTS, CASES.draw

# (B,Q,M,L,P), C and the levels: single pixels, single rows, one level and many, sides that are multiples of nothing
SIZES = [
    ((1, 1, 1, 1, 1), 1, ((1, 1),)),
    ((2, 13, 3, 1, 4), 5, ((7, 5),)),
    ((2, 5, 2, 3, 3), 8, ((4, 6), (2, 3), (1, 2))),
    ((1, 7, 1, 5, 2), 3, ((1, 9), (9, 1), (2, 2), (1, 1), (3, 2))),
]
COCO = ((100, 168), (50, 84), (25, 42))  # the maps of an image of 800 by 1344 pixels
BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])


def differentiate(inputs, shapes, backend):
    value, locations, weights, dout = inputs
    leaves = [x.detach().requires_grad_() for x in (value, locations, weights)]
    out = ms_deform_attn(leaves[0], shapes, *leaves[1:], backend=backend)
    return out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))


@pytest.mark.parametrize(("samples", "channels", "shapes"), SIZES, ids=str)
def test_levels_of_any_shape(samples, channels, shapes):
    inputs = draw_points(0, shapes, samples, channels)
    with poisoned_memory():
        results = differentiate(inputs, shapes, "torch")
    for name, a, b in zip(("out", *INPUTS), results, differentiate(inputs, shapes, "reference"), strict=True):
        assert relative_error(a, b, 1.0) < 1e-12, name


def test_far_outside_there_is_nothing():
    value, locations, weights, dout = (x.float() for x in draw_points(0, ((3, 4),), (1, 6, 2, 1, 2), 3))
    far = locations + torch.tensor([-3.0, 3.0, 1e4, -1e9, 1e20, -1e30]).view(1, 6, 1, 1, 1, 1)
    for backend in ("torch", "reference"):
        with poisoned_memory():
            assert all((x == 0).all() for x in differentiate([value, far, weights, dout], ((3, 4),), backend))


@BACKENDS
@pytest.mark.parametrize("which", [1, 2], ids=["location", "weight"])
def test_nan_at_a_point_fills_its_query_and_head(which, backend):
    *inputs, _ = draw_points(0, ((3, 4),), (1, 6, 2, 1, 2), 3)
    inputs[which][0, 4, 1, 0, 1] = float("nan")
    bad = ms_deform_attn(inputs[0], ((3, 4),), *inputs[1:], backend=backend).isnan()
    assert bad[0, 4, 1].all() and bad.sum() == 3


@BACKENDS
def test_nan_in_a_pixel_stays_around_it(backend):
    shapes = ((4, 5),)
    value, locations, weights, _ = draw_points(0, shapes, (1, 40, 2, 1, 1), 3)
    value[0, 7, 1, 2] = float("nan")  # row 1, column 2
    x, y = (locations[0, :, 1, 0, 0] * torch.tensor([5, 4]) - 0.5).unbind(-1)
    near = ((x - 2).abs() < 1) & ((y - 1).abs() < 1)
    assert 0 < near.sum() < 40
    bad = ms_deform_attn(value, shapes, locations, weights, backend=backend).isnan()
    assert torch.equal(bad[0, :, 1, 2], near) and bad.sum() == near.sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("queries", "shapes"), [(22050, COCO[1:2]), (4200, COCO)], ids=["extractor", "injector"])
def test_as_many_tokens_as_coco_has(queries, shapes, dtype):
    """Under autocast and in half precision: finite, and as exact in a map of 168 columns as in a small one."""
    inputs = draw_points(0, shapes, (1, queries, 2, len(shapes), 4), 4)
    low = [inputs[0].to(dtype), inputs[1].float(), inputs[2].float(), inputs[3].to(dtype)]
    with torch.autocast("cpu", dtype):
        results = differentiate(low, shapes, "torch")
    assert all(x.isfinite().all() for x in results)
    with torch.no_grad():
        expected = ms_deform_attn(inputs[0], shapes, *inputs[1:3], backend="reference")
    assert relative_error(results[0], expected) < 1e-4 + ROUNDING[dtype]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_with_sizes_from_an_image(dynamic):
    """To one graph, with the levels' sizes taken from a tensor's shape, as a model takes them."""

    def loss(image, value, locations, weights):
        h, w = image.shape
        return ms_deform_attn(value, ((h, w), (2, 2)), locations, weights).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch, queries, sides in ((1, 7, (3, 4)), (2, 9, (5, 3))):
        drawn = draw_points(0, (sides, (2, 2)), (batch, queries, 2, 2, 2), 3)
        image, inputs = torch.empty(sides), [x.float().requires_grad_() for x in drawn[:-1]]
        expected = torch.autograd.grad(loss(image, *inputs), inputs)
        assert all(map(torch.equal, torch.autograd.grad(compiled(image, *inputs), inputs), expected))


def test_nothing_but_the_inputs_is_kept():
    sizes = Sizes(batch=2, tokens=6, heads=2, head_dim=3)
    inputs, kept = [x.requires_grad_() for x in draw(0, sizes)[:-1]], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        ms_deform_attn(inputs[0], sizes.shapes(), *inputs[1:])
    assert sorted(kept) == sorted(x.data_ptr() for x in inputs)


def test_sizes_that_triton_does_not_take():
    """Asked of a GPU that need not exist."""
    assert selected_backend("auto", "cuda", head_dim=48, levels=3, dtype=torch.bfloat16) == "triton"
    for unsupported in ({"head_dim": 257}, {"levels": 5}):
        assert selected_backend("auto", "cuda", **unsupported) == "torch"
    with pytest.raises(
        ValueError, match="'triton': there are 5 levels, expected at most 4; use auto, torch or reference"
    ):
        selected_backend("triton", "cuda", levels=5)


SHAPES = ((3, 4), (2, 2))
WRONG = {
    "tokens": (
        {"value": torch.zeros(2, 15, 2, 3)},
        r"value has shape \(2, 15, 2, 3\), expected \(B,S,M,C\) with S 16, the sum of h·w",
    ),
    "flat shapes": (
        {"shapes": (3, 4)},
        r"shapes is \(3, 4\), expected a pair \(h, w\) of ints of at least 1 for each level",
    ),
    "no shapes": ({"shapes": ()}, r"shapes is \(\), expected a pair"),
    "a float": ({"shapes": ((3, 4.0), (2, 2))}, "shapes is .*, expected a pair"),
    "an empty map": ({"shapes": ((0, 4), (4, 4))}, "shapes is .*, expected a pair"),
    "no queries": (
        {"locations": torch.zeros(2, 0, 2, 2, 2, 2)},
        r"expected \(B,Q,M,L,P,2\) with every size at least 1",
    ),
    "rank of locations": (
        {"locations": torch.zeros(2, 5, 2, 4, 2)},
        r"locations has shape \(2, 5, 2, 4, 2\), expected",
    ),
    "levels": (
        {"locations": torch.zeros(2, 5, 2, 3, 2, 2)},
        r"expected \(2, 5, 2, 2, 2, 2\) beside value .*, 2 levels, Q 5 and P 2",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    changed, message = WRONG[case]
    inputs = draw_points(0, SHAPES, (2, 5, 2, 2, 2), 3)[:-1]
    arguments = dict(zip(INPUTS, (x.float() for x in inputs), strict=True)) | {"shapes": SHAPES} | changed
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(**arguments)
