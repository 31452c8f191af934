"""Bi-WKV as an operator: compilation, autocast, checkpointing, FLOP count, backends, and what it says to wrong arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernels.bi_wkv import bi_wkv, selected_backend
from kernels.bi_wkv.op import _backward_op, _forward_op


def leaves(inputs):
    return [x.detach().requires_grad_() for x in inputs[:4]]


def test_opcheck(make_wkv):
    inputs = leaves(make_wkv(1, 11, 3))
    plain = [x.detach() for x in inputs]
    torch.library.opcheck(_forward_op, (*inputs, "torch", True))
    torch.library.opcheck(_forward_op, (*plain, "torch", False))
    out, states = _forward_op(*plain, "torch", True)
    torch.library.opcheck(_backward_op, (out, out, states, *plain, "torch"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(make_wkv, dynamic):
    def loss(*inputs):
        return bi_wkv(*inputs).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for B, T in ((1, 19), (2, 40)):
        inputs = leaves(make_wkv(B, T, 4, dtype=torch.float32))
        expected = torch.autograd.grad(loss(*inputs), inputs)
        assert all(map(torch.equal, torch.autograd.grad(compiled(*inputs), inputs), expected))
    with torch.inference_mode():
        assert torch.equal(compiled(*inputs), loss(*inputs))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_autocast_does_not_reach_inside(make_wkv, backend):
    inputs = leaves(make_wkv(1, 19, 4, dtype=torch.float32))
    plain = bi_wkv(*inputs, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        out = bi_wkv(*inputs, backend=backend)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert torch.equal(out, plain)
    for a, b in zip(gradients, torch.autograd.grad(plain.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(make_wkv, reentrant):
    inputs = leaves(make_wkv(1, 30, 4))
    expected = torch.autograd.grad(bi_wkv(*inputs).square().sum(), inputs)
    checkpoint(bi_wkv, *inputs, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(inputs, expected, strict=True))


def test_only_the_gradients_that_are_wanted(make_wkv):
    inputs = make_wkv(1, 9, 3)[:4]
    expected = torch.autograd.grad(bi_wkv(*(everything := leaves(inputs))).square().sum(), everything)
    for i in range(4):
        some = [x.clone().requires_grad_(i == j) for j, x in enumerate(inputs)]
        bi_wkv(*some).square().sum().backward()
        assert [x.grad is not None for x in some] == [i == j for j in range(4)]
        assert torch.equal(some[i].grad, expected[i])
    assert not bi_wkv(*inputs).requires_grad


def test_second_derivative(make_wkv):
    inputs = leaves(make_wkv(1, 5, 2))
    (gradient,) = torch.autograd.grad(bi_wkv(*inputs, backend="torch").square().sum(), inputs[2], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative; backend='reference' has"):
        gradient.sum().backward()
    (gradient,) = torch.autograd.grad(bi_wkv(*inputs, backend="reference").square().sum(), inputs[2], create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops(make_wkv, device):
    """By hand, forward: 2 sums in 2 directions and the token itself in both sums, a multiply-add each; twice that in FLOPs."""
    inputs = leaves([x.to(device) for x in make_wkv(2, 10, 3)])
    with FlopCounterMode(display=False) as counter:
        out = bi_wkv(*inputs)
    assert counter.get_total_flops() == 2 * (2 * 2 + 2) * 2 * 10 * 3
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * (6 + 2 + 1 + 2 + 2 + 4) * 2 * 10 * 3


def test_selected_backend():
    assert selected_backend("auto", "cpu") == "torch"
    assert selected_backend("auto", "cuda", dtype=torch.bfloat16) == "triton"  # asked of a GPU that need not exist
    assert selected_backend("auto", "cuda", dtype=torch.float64) == "torch"
    with pytest.raises(ValueError, match="'triton': k is on cpu, expected a CUDA device .*; use auto, torch or reference"):
        selected_backend("triton", "cpu")
    with pytest.raises(ValueError, match="'tritno', expected one of auto, triton, torch, reference"):
        selected_backend("tritno", "cpu")


def test_shapes_on_a_gpu_that_need_not_exist(make_wkv):
    with FakeTensorMode():
        inputs = [x.to("cuda", torch.float32) for x in make_wkv(2, 300, 5)[:4]]
        out, states = _forward_op(*inputs, "auto", True)
        gradients = _backward_op(out, out, states, *inputs, "auto")
    assert out.device.type == "cuda" and out.shape == states.shape == (2, 300, 5)
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


WRONG = {
    "not a tensor": ({"u": 0.1}, TypeError, "u is float, expected a tensor"),
    "integer k": ({"k": torch.zeros(1, 6, 4, dtype=torch.long)}, TypeError, "k is torch.int64, expected one of fp64, fp32, "),
    "v of another dtype": ({"v": torch.zeros(1, 6, 4).half()}, TypeError, "v is fp16, expected fp32 beside k in fp32"),
    "fp64 beside fp32": ({"w": torch.zeros(4).double()}, TypeError, "w is fp64, expected fp32 beside k in fp32"),
    "rank of k": ({"k": torch.zeros(6, 4)}, ValueError, r"k has shape \(6, 4\), expected \(B,T,C\)"),
    "no tokens": ({"k": torch.zeros(1, 0, 4)}, ValueError, "every size at least 1"),
    "v of another shape": ({"v": torch.zeros(1, 5, 4)}, ValueError, r"v has shape \(1, 5, 4\), expected \(1, 6, 4\)"),
    "w": ({"w": torch.zeros(1, 4)}, ValueError, r"w has shape \(1, 4\), expected \(4,\)"),
    "device": ({"u": torch.zeros(4, device="meta")}, ValueError, "u is on meta, expected k's device cpu"),
    "backend": ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    "triton on the CPU": ({"backend": "triton"}, ValueError, r"bi_wkv: k has shape \(1, 6, 4\): .*k is on cpu, expected a CUDA"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(make_wkv, case):
    changed, error, message = WRONG[case]
    arguments = dict(zip("wukv", make_wkv(1, 6, 4, dtype=torch.float32)[:4], strict=True)) | changed
    with pytest.raises(error, match=message) as caught:
        bi_wkv(**arguments)
    assert "\n" not in str(caught.value)
