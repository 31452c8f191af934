"""The operator with backend='triton': autograd, compilation, autocast, checkpointing, several processes, and its errors."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernels import selected_backend, ttt_linear, ttt_linear_bidir
from kernels.tools.ttt_linear_cases import Sizes, draw
from kernels.ttt_linear.op import _backward_op, _forward_op


@pytest.fixture
def inputs():
    """The nine inputs of `ttt_linear_bidir`, B 2, T 19, H 2, D 16, fp32 leaves."""
    return [x.float().requires_grad_() for x in draw(0, Sizes(batch=2, tokens=19, heads=2, head_dim=16))[:9]]


def out_and_gradients(function, inputs):
    out = function(*inputs)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


def triton(*inputs):
    return ttt_linear_bidir(*inputs, backend="triton")


def assert_near(results, expected, tolerance=1e-5):
    for a, b in zip(results, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def test_bidir_and_single_directions_agree_with_the_reference(inputs):
    expected = out_and_gradients(lambda *x: ttt_linear_bidir(*x, backend="reference"), inputs)
    assert_near(out_and_gradients(triton, inputs), expected)

    def two_calls(q, k, v, lr, *shared):
        outs = [
            ttt_linear(q[:, :, r], k[:, :, r], v[:, :, r], lr, *(x[r] for x in shared), reverse=r == 1, backend="triton") for r in (0, 1)
        ]
        return torch.stack(outs, 2)

    assert_near(out_and_gradients(two_calls, inputs), expected)


def test_opcheck(inputs):
    options = (16, [False, True], 1e-6, "triton")
    torch.library.opcheck(_forward_op, (*inputs, *options, True))
    detached = [x.detach() for x in inputs]
    torch.library.opcheck(_forward_op, (*detached, *options, False))
    out, states = _forward_op(*detached, *options, True)
    torch.library.opcheck(_backward_op, (out, states, *detached, *options))


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")),
    ],
)
def test_compiles_to_one_graph(inputs, backend, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(triton, fullgraph=True, backend=backend, dynamic=dynamic)
    for T in (19, 5):
        shorter = [x.detach()[:, :T].clone().requires_grad_() for x in inputs[:4]] + inputs[4:]
        assert all(map(torch.equal, out_and_gradients(compiled, shorter), out_and_gradients(triton, shorter)))
    with torch.inference_mode():
        assert torch.equal(compiled(*inputs), triton(*inputs))


def test_autocast_gives_low_precision_products_and_fp32_gradients(inputs):
    """As a layer under autocast: q, k, v come in low precision, parameters in fp32; autocast does not reach inside."""
    q, k, v, *rest = inputs
    halves = [x.detach().half().requires_grad_() for x in (q, k, v)]
    expected = out_and_gradients(triton, [*halves, *rest])
    with torch.autocast("cpu", torch.float16):
        out = triton(*halves, *rest)
        gradients = torch.autograd.grad(out.square().sum(), [*halves, *rest])
    assert out.dtype == torch.float16 and [x.dtype for x in gradients] == [torch.float16] * 3 + [torch.float32] * 6
    assert all(map(torch.equal, (out, *gradients), expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(inputs, reentrant):
    expected = out_and_gradients(triton, inputs)[1:]
    checkpoint(triton, *inputs, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(inputs, expected, strict=True))


def test_ddp(inputs, tmp_path):
    """DistributedDataParallel hooks on gradients of the operator: with one process they are those of the plain layer."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parameters_ = torch.nn.ParameterList(x.detach().clone() for x in inputs[4:])

        def forward(self, *tokens):
            return triton(*tokens, *self.parameters_)

    tokens, expected = [x.detach() for x in inputs[:4]], out_and_gradients(triton, inputs)[5:]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = torch.nn.parallel.DistributedDataParallel(Layer())
        layer(*tokens).square().sum().backward()
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(x.grad, g) for x, g in zip(layer.parameters(), expected, strict=True))


def test_flops_are_those_of_the_reference(inputs):
    counts = []
    for backend in ("triton", "reference"):
        with FlopCounterMode(display=False) as counter:
            ttt_linear_bidir(*inputs, backend=backend).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_second_derivative_is_refused(inputs):
    (gradient,) = torch.autograd.grad(triton(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative; backend='reference' has"):
        gradient.sum().backward()


def test_auto_on_a_cpu_is_the_torch_backend_also_under_the_interpreter():
    assert selected_backend("auto", "cpu") == "torch"
    assert selected_backend("triton", "cpu") == "triton"


@pytest.mark.parametrize(
    ("width", "chunk_size", "dtype", "message"),
    [
        (16, 12, torch.float32, "chunk_size is 12, expected one of 4, 8, 16, 32, 64"),
        (48, 16, torch.float32, r"q has shape \(1, 4, 1, 48\): .*q's last axis D is 48, expected one of 16, 32, 64, 128"),
        (256, 16, torch.float32, "q's last axis D is 256, expected one of 16, 32, 64, 128"),
        (16, 16, torch.float64, "q is torch.float64, expected one of torch.float32, torch.float16, torch.bfloat16"),
        (16, 16, torch.bfloat16, "q is torch.bfloat16, which Triton's interpreter does not have"),
    ],
)
def test_sizes_that_the_kernels_do_not_take(width, chunk_size, dtype, message):
    q, k, v, lr, *shared = draw(0, Sizes(batch=1, tokens=4, heads=1, head_dim=width, chunk_size=chunk_size, reverse=(False,)))[:9]
    given = [*(x[:, :, 0].to(dtype) for x in (q, k, v)), lr.to(dtype), *(x[0].to(dtype) for x in shared)]
    with pytest.raises(ValueError, match=message) as caught:
        ttt_linear(*given, chunk_size=chunk_size, backend="triton")
    assert "use auto, torch or reference" in str(caught.value) and "\n" not in str(caught.value)
    assert ttt_linear(*given, chunk_size=chunk_size, backend="auto").isfinite().all()


def test_a_layer_under_autocast():
    """fp16 tokens, fp32 parameters and states: the result and the gradients of the torch backend, as near as fp16 products are."""
    from repro.models.ttt_mixer import TTTMixer

    torch.manual_seed(0)
    mixer, x = TTTMixer(32, 2, 40), torch.randn(2, 40, 32)
    results = {}
    for mixer.backend in ("triton", "torch"):
        with torch.autocast("cpu", torch.float16):
            assert mixer.selected_backend(torch.float16) == mixer.backend
            out = mixer(x)
        assert out.dtype == torch.float16
        results[mixer.backend] = [out.float(), *torch.autograd.grad(out.float().square().sum(), list(mixer.parameters()))]
    assert_near(results["triton"], results["torch"], 2e-2)


def test_a_model_runs_on_it():
    """Vittt-nano: a ragged tail (81 tokens), both directions, the mixer's own strides; against the torch backend."""
    from repro.models.registry import build_model

    torch.manual_seed(0)
    model = build_model("vittt_nano_patch16_144", num_classes=10, depth=2)
    images = torch.randn(2, 3, 144, 144)
    results = {}
    for backend in ("triton", "torch"):
        model.set_backend(backend)
        loss = model(images).square().sum()
        results[backend] = torch.autograd.grad(loss, list(model.parameters()))
    assert_near(results["triton"], results["torch"], 1e-4)
