"""TTT-Linear as an operator: compilation, autocast, checkpointing, FLOP count, backends, and what it says to wrong arguments."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernels import selected_backend, ttt_linear, ttt_linear_bidir
from kernels.ttt_linear.op import _backward_op, _forward_op

NAMES = ("q", "k", "v", "lr", "token_scale", "W0", "b0", "ln_weight", "ln_bias")


def require_grad(inputs):
    return tuple(x.detach().requires_grad_() for x in inputs)


@pytest.mark.parametrize(("R", "H"), [(1, 1), (2, 2)])
def test_opcheck(make_inputs, R, H):
    inputs = require_grad(make_inputs(1, 11, H, 4, 4, R=R))
    options = (4, [False, True][-R:], 1e-6, "torch")
    torch.library.opcheck(_forward_op, (*inputs, *options, True))
    torch.library.opcheck(_forward_op, (*(x.detach() for x in inputs), *options, False))
    out, states = _forward_op(*inputs, *options, True)
    torch.library.opcheck(_backward_op, (out.detach(), states, *(x.detach() for x in inputs), *options))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(make_inputs, dynamic):
    def loss(*inputs):
        return ttt_linear_bidir(*inputs, chunk_size=4).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for B, T in ((1, 19), (2, 40)):
        inputs = require_grad(make_inputs(B, T, 2, 8, 4, R=2, dtype=torch.float32))
        expected = torch.autograd.grad(loss(*inputs), inputs)
        assert all(map(torch.equal, torch.autograd.grad(compiled(*inputs), inputs), expected))
    with torch.inference_mode():
        assert torch.equal(compiled(*inputs), loss(*inputs))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_autocast_does_not_reach_inside(make_inputs, backend):
    inputs = require_grad(make_inputs(1, 19, 2, 8, 4, R=2, dtype=torch.float32))
    plain = ttt_linear_bidir(*inputs, chunk_size=4, backend=backend)
    expected = torch.autograd.grad(plain.square().sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = ttt_linear_bidir(*inputs, chunk_size=4, backend=backend)
    # autograd's own operations follow an autocast that is on during the backward pass; the operator does not
    with torch.autocast("cpu", torch.bfloat16, enabled=backend == "torch"):
        gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert torch.equal(out, plain)
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(make_inputs, reentrant):
    inputs = require_grad(make_inputs(1, 200, 2, 8, 4, R=2))

    def layer(*x):
        return ttt_linear_bidir(*x, chunk_size=4)

    expected = torch.autograd.grad(layer(*inputs).square().sum(), inputs)
    checkpoint(layer, *inputs, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(inputs, expected, strict=True))


def test_only_the_gradients_that_are_wanted(make_inputs):
    inputs = make_inputs(1, 9, 1, 4, 4, R=2)
    everything = require_grad(inputs)
    expected = torch.autograd.grad(ttt_linear_bidir(*everything, chunk_size=4).square().sum(), everything)
    for i, name in enumerate(NAMES):
        some = [x.clone().requires_grad_(i == j) for j, x in enumerate(inputs)]
        ttt_linear_bidir(*some, chunk_size=4).square().sum().backward()
        assert [x.grad is not None for x in some] == [i == j for j in range(9)], name
        assert torch.equal(some[i].grad, expected[i])
    assert not ttt_linear_bidir(*inputs, chunk_size=4).requires_grad


def test_second_derivative_is_refused(make_inputs):
    inputs = require_grad(make_inputs(1, 5, 1, 4, 4))
    out = ttt_linear(*inputs, chunk_size=4, backend="torch")
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative; backend='reference' has"):
        gradient.sum().backward()


def flops(inputs, chunk, backend, backward):
    with FlopCounterMode(display=False) as counter:
        out = ttt_linear_bidir(*inputs, chunk_size=chunk, backend=backend)
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "and backward"])
@pytest.mark.parametrize(("T", "chunk"), [(32, 16), (37, 16), (5, 8)], ids=["even", "ragged", "one short chunk"])
def test_flops_equal_those_of_the_reference(make_inputs, T, chunk, backward):
    inputs = require_grad(make_inputs(2, T, 3, 8, chunk, R=2))
    assert flops(inputs, chunk, "torch", backward) == flops(inputs, chunk, "reference", backward)


def test_flops_are_those_of_the_paper(make_inputs):
    """(3d + 2b)·D multiply-adds per token and direction, also counted without memory or arithmetic, on the meta device."""
    inputs = make_inputs(2, 48, 3, 64, 16, R=2)
    for backend in ("torch", "reference"):
        for device in ("cpu", "meta"):
            there = tuple(x.to(device) for x in inputs)
            assert flops(there, 16, backend, False) == 2 * (3 * 64 + 2 * 16) * (3 * 64) * 48 * 2 * 2


def test_exports(make_inputs):
    class Layer(torch.nn.Module):
        def forward(self, *inputs):
            return ttt_linear_bidir(*inputs, chunk_size=4, backend="reference")

    inputs = make_inputs(1, 9, 2, 4, 4, R=2, dtype=torch.float32)
    exported = torch.export.export(Layer(), inputs)
    assert not any(node.target is torch.ops.vision_ttt.ttt_linear.default for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(*inputs), Layer()(*inputs))


def test_selected_backend():
    assert selected_backend("auto", "cpu") == "torch"
    assert selected_backend("torch", torch.device("cpu")) == "torch"
    assert selected_backend("reference", "cpu") == "reference"
    with pytest.raises(ValueError, match="'triton': q is on cpu, expected a CUDA device .*; use auto, torch or reference"):
        selected_backend("triton", "cpu")
    with pytest.raises(ValueError, match="'tritno', expected one of auto, triton, torch, reference"):
        selected_backend("tritno", "cpu")


QKV = (1, 6, 2, 4)
WRONG = {
    "not a tensor": ({"lr": 0.1}, TypeError, "lr is float, expected a tensor"),
    "integer q": ({"q": torch.zeros(QKV, dtype=torch.long)}, TypeError, "q is torch.int64, expected one of fp64, fp32, "),
    "k of another dtype": ({"k": torch.zeros(QKV, dtype=torch.bfloat16)}, TypeError, "k is bf16, expected fp32 beside q in fp32"),
    "fp64 beside fp32": ({"W0": torch.zeros(2, 4, 4).double()}, TypeError, "W0 is fp64, expected fp32 beside q in fp32"),
    "rank of q": ({"q": torch.zeros(1, 6, 8)}, ValueError, r"q has shape \(1, 6, 8\), expected \(B,T,H,D\)"),
    "no tokens": ({"q": torch.zeros(1, 0, 2, 4)}, ValueError, "every size at least 1"),
    "v of another shape": ({"v": torch.zeros(1, 6, 2, 5)}, ValueError, r"v has shape \(1, 6, 2, 5\), expected \(1, 6, 2, 4\)"),
    "lr": ({"lr": torch.zeros(1, 6)}, ValueError, r"lr has shape \(1, 6\), expected \(1, 6, 2\)"),
    "token_scale": ({"chunk_size": 5}, ValueError, r"token_scale has shape \(4,\), expected \(5,\)"),
    "W0": ({"W0": torch.zeros(4, 4)}, ValueError, r"W0 has shape \(4, 4\), expected \(2, 4, 4\)"),
    "ln_bias": ({"ln_bias": torch.zeros(4)}, ValueError, r"ln_bias has shape \(4,\), expected \(2, 4\)"),
    "device": ({"b0": torch.zeros(2, 4, device="meta")}, ValueError, "b0 is on meta, expected q's device cpu"),
    "chunk_size 0": ({"chunk_size": 0}, ValueError, "chunk_size is 0, expected at least 1"),
    "chunk_size of another type": ({"chunk_size": 4.0}, TypeError, "chunk_size is 4.0, expected an integer"),
    "eps": ({"eps": 0.0}, ValueError, "eps is 0.0, expected a number above 0"),
    "reverse": ({"reverse": 1}, TypeError, "reverse is 1, expected True or False"),
    "backend": ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    "triton on the CPU": ({"backend": "triton"}, ValueError, r"q has shape \(1, 6, 2, 4\): .*q is on cpu, expected a CUDA device"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(make_inputs, case):
    changed, error, message = WRONG[case]
    arguments = dict(zip(NAMES, make_inputs(1, 6, 2, 4, 4, dtype=torch.float32), strict=True)) | {"chunk_size": 4} | changed
    with pytest.raises(error, match=message) as caught:
        ttt_linear(**arguments)
    assert "\n" not in str(caught.value)


def test_bidir_wants_two_directions(make_inputs):
    with pytest.raises(ValueError, match=r"q has shape \(1, 6, 1, 2, 4\), expected \(B,T,2,H,D\)"):
        ttt_linear_bidir(*make_inputs(1, 6, 2, 4, 4, R=1), chunk_size=4)
    with pytest.raises(ValueError, match=r"token_scale has shape \(4,\), expected \(2, 4\)"):
        inputs = make_inputs(1, 6, 2, 4, 4, R=2)
        ttt_linear_bidir(*inputs[:4], inputs[4][0], *inputs[5:], chunk_size=4)
