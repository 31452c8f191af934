"""Multi-scale deformable attention as an operator: compilation, autocast, checkpointing, memory, FLOP count, backends, errors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernels.ms_deform_attn import ms_deform_attn, selected_backend
from kernels.ms_deform_attn.op import _backward_op, _forward_op

SHAPES = ((3, 4), (2, 2))
FLAT = [3, 4, 2, 2]


@pytest.fixture
def make(make_deform_inputs):
    """make(B=2, Q=5, dtype=fp64, requires_grad=True, shapes=SHAPES) -> value, locations, weights; 2 heads of 3 channels, 2 points."""

    def leaves(B=2, Q=5, dtype=torch.float64, requires_grad=True, shapes=SHAPES):
        return [x.requires_grad_(requires_grad) for x in make_deform_inputs(B, Q, 2, 3, 2, shapes, dtype=dtype)[:3]]

    return leaves


def attend(value, locations, weights, backend="auto"):
    return ms_deform_attn(value, SHAPES, locations, weights, backend=backend)


def test_opcheck(make):
    value, locations, weights = make()
    torch.library.opcheck(_forward_op, (value, FLAT, locations, weights, "torch"))
    value, locations, weights = (x.detach() for x in (value, locations, weights))
    dout = torch.ones(2, 5, 2, 3).double()
    torch.library.opcheck(_backward_op, (dout, value, FLAT, locations, weights, "torch"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(make, dynamic):
    """With the levels' sizes taken from a tensor's shape, as a model takes them from its image."""

    def loss(image, value, locations, weights):
        h, w = image.shape
        return ms_deform_attn(value, ((h, w), (2, 2)), locations, weights).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for B, Q, sides in ((1, 7, (3, 4)), (2, 9, (5, 3))):
        image, inputs = torch.empty(sides), make(B, Q, torch.float32, shapes=(sides, (2, 2)))
        expected = torch.autograd.grad(loss(image, *inputs), inputs)
        assert all(map(torch.equal, torch.autograd.grad(compiled(image, *inputs), inputs), expected))
    with torch.inference_mode():
        assert torch.equal(compiled(image, *inputs), loss(image, *inputs))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_autocast_does_not_reach_inside(make, backend):
    inputs = make(dtype=torch.float32)
    plain = attend(*inputs, backend)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*inputs, backend)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert torch.equal(out, plain)
    for a, b in zip(gradients, torch.autograd.grad(plain.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(make, reentrant):
    inputs = make()
    expected = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    checkpoint(attend, *inputs, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(inputs, expected, strict=True))


def test_nothing_but_the_inputs_is_kept(make):
    inputs, kept = make(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        attend(*inputs)
    assert sorted(kept) == sorted(x.data_ptr() for x in inputs)


def test_only_the_gradients_that_are_wanted(make):
    inputs = make(requires_grad=False)
    expected = torch.autograd.grad(attend(*(everything := make())).square().sum(), everything)
    for i in range(3):
        some = [x.clone().requires_grad_(i == j) for j, x in enumerate(inputs)]
        attend(*some).square().sum().backward()
        assert [x.grad is not None for x in some] == [i == j for j in range(3)]
        assert torch.equal(some[i].grad, expected[i])
    assert not attend(*inputs).requires_grad


def test_second_derivative(make):
    inputs = make()
    (gradient,) = torch.autograd.grad(attend(*inputs, "torch").square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative; backend='reference' has"):
        gradient.sum().backward()
    (gradient,) = torch.autograd.grad(attend(*inputs, "reference").square().sum(), inputs[0], create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops(make, device):
    """By hand: a sample's channel is four neighbours and a weight; back, it is multiplied with four and added to four."""
    inputs = [x.detach().to(device).requires_grad_() for x in make()]
    channels_of_samples = 2 * 5 * 2 * 2 * 2 * 3
    with FlopCounterMode(display=False) as counter:
        out = attend(*inputs)
    assert counter.get_total_flops() == 2 * (4 + 1) * channels_of_samples
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * (4 + 4) * channels_of_samples


def test_selected_backend():
    assert selected_backend("auto", "cpu") == "torch"
    # asked of a GPU that need not exist
    assert selected_backend("auto", "cuda", head_dim=48, levels=3, dtype=torch.bfloat16) == "triton"
    for unsupported in ({"dtype": torch.float64}, {"head_dim": 257}, {"levels": 5}):
        assert selected_backend("auto", "cuda", **unsupported) == "torch"
    with pytest.raises(ValueError, match="'triton': there are 5 levels, expected at most 4; use auto, torch or reference"):
        selected_backend("triton", "cuda", levels=5)
    with pytest.raises(ValueError, match="'triton': value is on cpu, expected a CUDA device .*; use auto, torch or reference"):
        selected_backend("triton", "cpu")
    with pytest.raises(ValueError, match="'tritno', expected one of auto, triton, torch, reference"):
        selected_backend("tritno", "cpu")


def test_shapes_on_a_gpu_that_need_not_exist(make):
    with FakeTensorMode():
        value, locations, weights = (x.detach().to("cuda", torch.float32) for x in make())
        out = _forward_op(value, FLAT, locations, weights, "auto")
        gradients = _backward_op(out, value, FLAT, locations, weights, "auto")
    assert out.device.type == "cuda" and out.shape == (2, 5, 2, 3)
    assert [g.shape for g in gradients] == [value.shape, locations.shape, weights.shape]


WRONG = {
    "not a tensor": ({"weights": 0.1}, TypeError, "weights is float, expected a tensor"),
    "integer value": ({"value": torch.zeros(2, 16, 2, 3).long()}, TypeError, "value is torch.int64, expected one of fp64, fp32, "),
    "fp64 beside fp32": ({"weights": torch.zeros(2, 5, 2, 2, 2).double()}, TypeError, "weights is fp64, expected fp32 beside value in"),
    "fp16 beside fp32": ({"locations": torch.zeros(2, 5, 2, 2, 2, 2).half()}, TypeError, "locations is fp16, expected fp32 beside"),
    "rank of value": ({"value": torch.zeros(2, 16, 6)}, ValueError, r"value has shape \(2, 16, 6\), expected \(B,S,M,C\) with S 16"),
    "tokens": ({"value": torch.zeros(2, 15, 2, 3)}, ValueError, r"value has shape \(2, 15, 2, 3\), expected \(B,S,M,C\) with S 16"),
    "flat shapes": ({"shapes": (3, 4)}, ValueError, r"shapes is \(3, 4\), expected a pair \(h, w\) of ints of at least 1 for each"),
    "no shapes": ({"shapes": ()}, ValueError, r"shapes is \(\), expected a pair"),
    "a float": ({"shapes": ((3, 4.0), (2, 2))}, ValueError, "shapes is .*, expected a pair"),
    "an empty map": ({"shapes": ((0, 4), (4, 4))}, ValueError, "shapes is .*, expected a pair"),
    "no queries": ({"locations": torch.zeros(2, 0, 2, 2, 2, 2)}, ValueError, r"expected \(B,Q,M,L,P,2\) with every size at least 1"),
    "rank of locations": ({"locations": torch.zeros(2, 5, 2, 4, 2)}, ValueError, r"locations has shape \(2, 5, 2, 4, 2\), expected"),
    "levels": ({"locations": torch.zeros(2, 5, 2, 3, 2, 2)}, ValueError, r"expected \(2, 5, 2, 2, 2, 2\) beside value .*, 2 levels, Q 5"),
    "weights": ({"weights": torch.zeros(2, 5, 2, 2, 3)}, ValueError, r"weights has shape .*, expected \(2, 5, 2, 2, 2\)"),
    "device": ({"weights": torch.zeros(2, 5, 2, 2, 2, device="meta")}, ValueError, "weights is on meta, expected value's device cpu"),
    "backend": ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    "triton on the CPU": ({"backend": "triton"}, ValueError, r"ms_deform_attn: value has shape .*: .*value is on cpu, expected a CUDA"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(make, case):
    changed, error, message = WRONG[case]
    names = "value", "locations", "weights"
    arguments = dict(zip(names, make(dtype=torch.float32), strict=True)) | {"shapes": SHAPES} | changed
    with pytest.raises(error, match=message) as caught:
        ms_deform_attn(**arguments)
    assert "\n" not in str(caught.value)
