"""The selective scan as an operator: compilation, autocast, checkpointing, FLOP count, backends, messages on wrong arguments."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernels.selective_scan import selected_backend, selective_scan, selective_scan_bidir
from kernels.selective_scan.op import _backward_op, _forward_op

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")


def require_grad(inputs):
    return tuple(x if x is None else x.detach().requires_grad_() for x in inputs)


@pytest.mark.parametrize(("R", "gate"), [(1, True), (2, True), (2, False)])
def test_opcheck(make_scan_inputs, R, gate):
    u, delta, A, B, C, D, z, bias = make_scan_inputs(1, 11, 4, 3, R=R, gate=gate)
    inputs = require_grad((u, delta, A, B, C, D, z, bias))
    detached = (u, delta, A, B, C, D, z, bias)
    options = ([False, True][-R:], "torch")
    torch.library.opcheck(_forward_op, (*inputs, *options, True))
    torch.library.opcheck(_forward_op, (*detached, *options, False))
    out, states = _forward_op(*detached, *options, True)
    torch.library.opcheck(_backward_op, (out, states, *detached, *options))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(make_scan_inputs, dynamic):
    def loss(*inputs):
        return selective_scan_bidir(*inputs).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for B, T in ((1, 19), (2, 140)):
        inputs = require_grad(make_scan_inputs(B, T, 8, R=2, dtype=torch.float32))
        expected = torch.autograd.grad(loss(*inputs), inputs)
        assert all(map(torch.equal, torch.autograd.grad(compiled(*inputs), inputs), expected))
    with torch.inference_mode():
        assert torch.equal(compiled(*inputs), loss(*inputs))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_autocast_does_not_reach_inside(make_scan_inputs, backend):
    inputs = require_grad(make_scan_inputs(1, 19, 8, R=2, dtype=torch.float32))
    plain = selective_scan_bidir(*inputs, backend=backend)
    expected = torch.autograd.grad(plain.square().sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = selective_scan_bidir(*inputs, backend=backend)
        gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert torch.equal(out, plain)
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(make_scan_inputs, reentrant):
    inputs = require_grad(make_scan_inputs(1, 150, 8, R=2))
    expected = torch.autograd.grad(selective_scan_bidir(*inputs).square().sum(), inputs)
    checkpoint(selective_scan_bidir, *inputs, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(inputs, expected, strict=True))


def test_only_the_gradients_that_are_wanted(make_scan_inputs):
    inputs = make_scan_inputs(1, 9, 4, 3, R=2)
    everything = require_grad(inputs)
    expected = torch.autograd.grad(selective_scan_bidir(*everything).square().sum(), everything)
    for i, name in enumerate(NAMES):
        some = [x.clone().requires_grad_(i == j) for j, x in enumerate(inputs)]
        selective_scan_bidir(*some).square().sum().backward()
        assert [x.grad is not None for x in some] == [i == j for j in range(8)], name
        assert torch.equal(some[i].grad, expected[i])
    assert not selective_scan_bidir(*inputs).requires_grad


def test_second_derivative_is_refused(make_scan_inputs):
    inputs = require_grad(make_scan_inputs(1, 5, 4, 3))
    out = selective_scan(*inputs, backend="torch")
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative; backend='reference' has"):
        gradient.sum().backward()
    out = selective_scan(*inputs, backend="reference")
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    gradient.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops_are_those_of_the_paper(make_scan_inputs, device):
    """Ω(SSM) of Vim: 3 T·E·N + T·E·N multiply-adds a direction; twice that in the backward pass. Also on the meta device."""
    inputs = require_grad(x.to(device) for x in make_scan_inputs(2, 37, 8, R=2))
    with FlopCounterMode(display=False) as counter:
        out = selective_scan_bidir(*inputs)
    forward = counter.get_total_flops()
    assert forward == 2 * (3 + 1) * 37 * 8 * 16 * 2 * 2
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * forward


def test_exports(make_scan_inputs):
    class Layer(torch.nn.Module):
        def forward(self, *inputs):
            return selective_scan_bidir(*inputs, backend="reference")

    inputs = make_scan_inputs(1, 5, 4, 3, R=2, dtype=torch.float32)
    exported = torch.export.export(Layer(), inputs)
    assert not any(node.target is torch.ops.vision_ttt.selective_scan.default for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(*inputs), Layer()(*inputs))


def test_selected_backend():
    assert selected_backend("auto", "cpu") == "torch"
    assert selected_backend("torch", torch.device("cpu")) == "torch"
    assert selected_backend("reference", "cpu") == "reference"
    with pytest.raises(ValueError, match="'triton': u is on cpu, expected a CUDA device .*; use auto, torch or reference"):
        selected_backend("triton", "cpu")
    with pytest.raises(ValueError, match="'tritno', expected one of auto, triton, torch, reference"):
        selected_backend("tritno", "cpu")


WRONG = {
    "not a tensor": ({"D": 1.0}, TypeError, "D is float, expected a tensor"),
    "z not a tensor": ({"z": False}, TypeError, "z is bool, expected a tensor"),
    "integer u": ({"u": torch.zeros(1, 6, 4, dtype=torch.long)}, TypeError, "u is torch.int64, expected one of fp64, fp32, "),
    "B of another dtype": ({"B": torch.zeros(1, 6, 3).bfloat16()}, TypeError, "B is bf16, expected fp32 beside u in fp32"),
    "fp64 beside fp32": ({"A": torch.zeros(4, 3).double()}, TypeError, "A is fp64, expected fp32 beside u in fp32"),
    "rank of u": ({"u": torch.zeros(6, 4)}, ValueError, r"u has shape \(6, 4\), expected \(B,T,E\)"),
    "no tokens": ({"u": torch.zeros(1, 0, 4)}, ValueError, "every size at least 1"),
    "rank of A": ({"A": torch.zeros(4)}, ValueError, r"A has shape \(4,\), expected \(E,N\) with N at least 1"),
    "delta": ({"delta": torch.zeros(1, 6, 5)}, ValueError, r"delta has shape \(1, 6, 5\), expected \(1, 6, 4\)"),
    "A": ({"A": torch.zeros(5, 3)}, ValueError, r"A has shape \(5, 3\), expected \(4, 3\) beside u \(1, 6, 4\) and N 3"),
    "C": ({"C": torch.zeros(1, 6, 4)}, ValueError, r"C has shape \(1, 6, 4\), expected \(1, 6, 3\)"),
    "z": ({"z": torch.zeros(1, 4)}, ValueError, r"z has shape \(1, 4\), expected \(1, 6, 4\)"),
    "delta_bias": ({"delta_bias": torch.zeros(3)}, ValueError, r"delta_bias has shape \(3,\), expected \(4,\)"),
    "device": ({"D": torch.zeros(4, device="meta")}, ValueError, "D is on meta, expected u's device cpu"),
    "reverse": ({"reverse": 1}, TypeError, "reverse is 1, expected True or False"),
    "backend": ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    "triton on the CPU": ({"backend": "triton"}, ValueError, r"u has shape \(1, 6, 4\): .*u is on cpu, expected a CUDA device"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(make_scan_inputs, case):
    changed, error, message = WRONG[case]
    arguments = dict(zip(NAMES, make_scan_inputs(1, 6, 4, 3, dtype=torch.float32), strict=True)) | changed
    with pytest.raises(error, match=message) as caught:
        selective_scan(**arguments)
    assert "\n" not in str(caught.value)


def test_bidir_wants_two_directions(make_scan_inputs):
    with pytest.raises(ValueError, match=r"u has shape \(1, 6, 1, 4\), expected \(B,T,2,E\)"):
        selective_scan_bidir(*make_scan_inputs(1, 6, 4, 3, R=1))
    with pytest.raises(ValueError, match=r"A has shape \(4, 3\), expected \(2,E,N\) with N at least 1"):
        u, delta, A, *rest = make_scan_inputs(1, 6, 4, 3, R=2)
        selective_scan_bidir(u, delta, A[0], *rest)
