"""What holds for every operator of `kernels.tools.operators`, on the backend that runs here: `torch`, or under Triton's
interpreter `triton`.

`test_interpreted.py` runs this file a second time with TRITON_INTERPRET=1. A new operator is tested here once its cases
are listed.
"""

import dataclasses
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from kernels.decompositions import DECOMPOSITIONS
from kernels.dispatch import compute_dtype
from kernels.tools import around_cases, check
from kernels.tools.bench import BOTH_PASSES, FORWARD, count_work
from kernels.tools.cases import ROUNDING
from kernels.tools.operators import INTERPRETED, OPERATORS
from kernels.ttt_linear import triton_fwd
from tests.kernels.helpers import EXACT, interpreted, once


@pytest.fixture(params=OPERATORS)
def cases(request):
    return OPERATORS[request.param]


BACKENDS = ["triton"] if INTERPRETED else ["numba", "torch"]


def take_backend(request, cases):
    """Each backend of the custom op that runs here."""
    if request.param == "numba" and "numba" not in cases.CPU_BACKENDS:
        pytest.skip("the operator has no such backend")
    return request.param


backend = pytest.fixture(params=BACKENDS)(take_backend)
any_backend = pytest.fixture(params=BACKENDS if INTERPRETED else [*BACKENDS, "reference"])(take_backend)


def draw(cases, dtype=EXACT, sizes=None, seed=0):
    """The inputs as leaves and dout, as a layer has them under autocast to `dtype`, fp32 or fp64; see `Cases.cast`."""
    *inputs, dout = cases.cast(cases.draw(seed, sizes or cases.SMALL), dtype)
    return [x.requires_grad_() for x in inputs], dout


def differentiate(function, inputs):
    out = function(*inputs)
    return out, *torch.autograd.grad(out.square().sum(), inputs)


def operator(cases, backend, sizes=None):
    function = cases.bind(sizes or cases.SMALL)
    return lambda *inputs: function(*inputs, backend=backend)


def run_forward(op, arguments, backend):
    """The results of a custom op by name, with the states that it keeps if it keeps any."""
    results = op.forward(*arguments, backend, *[True] * bool(op.kept))
    return dict(zip(("out", "states"), results, strict=True)) if op.kept else {"out": results}


def assert_equal(results, expected):
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def list_special(cases):
    """The rows of one seed."""
    return [case for case in cases.CASES if len(case.seeds) == 1 and not case.on_gpu_alone]


def every_size(cases):
    """Ragged and special sizes, and whether they are left to `make test-all`.

    `make test`, and the interpreter, which is slow, take every length with the other sizes in turn. numba compiles each
    width of TTT-Linear's heads for half a minute, so `make test` takes the narrowest; `test_ttt_linear.py` has the
    tokens that are alike.
    """
    for i, sizes in enumerate(cases.ragged):
        if i % 4 in (0, 3) or not INTERPRETED:
            yield sizes, i % 4 not in (0, 3)
    for case in list_special(cases):
        is_wider = case.what == "head width" and case.sizes.head_dim != triton_fwd.WIDTHS[0]
        yield case.sizes, getattr(case.sizes, "alike", False) or (is_wider and not INTERPRETED)
    if not INTERPRETED:
        yield cases.TYPICAL, False


def get_operation(name):
    return getattr(torch.ops.vision_ttt, name).default


EVERY_SIZE = [
    pytest.param(cases, sizes, marks=[pytest.mark.slow] * is_slow, id=f"{cases.NAME}-{i}")
    for cases in OPERATORS.values()
    for i, (sizes, is_slow) in enumerate(every_size(cases))
]


@pytest.mark.parametrize(("cases", "sizes"), EVERY_SIZE)
def test_output_and_every_gradient_against_fp64(cases, sizes):
    """At ragged and special sizes, with memory full of NaN; results have the dtypes of the inputs. Low precision is
    computed in fp32, so the usual size alone is tried in every dtype.
    """
    if INTERPRETED:
        rows = [check.compare(cases, "", sizes, dtype, seeds=[0]) for dtype in ("fp32", "fp16")]
        assert all(row["passed"] for row in rows), [row for row in rows if not row["passed"]]
        return
    inputs, want = check.draw_case(cases, sizes, 0)
    low = (torch.float16, torch.bfloat16) if sizes is cases.TYPICAL else ()
    for backend, dtype in itertools.product(cases.CPU_BACKENDS, (torch.float64, torch.float32, *low)):
        if (backend, dtype, getattr(sizes, "head_dim", 0)) == ("numba", torch.float64, 64):
            continue  # which numba compiles for long; `test_gradcheck` and `test_ttt_linear.py` have fp64 at 16 and 20
        given = cases.cast(inputs, dtype)
        with check.poisoned_memory():
            got = check.differentiate(cases, given, sizes, backend)
        errors = check.relative_errors(got, want, cases.FLOOR)
        own = {name: 1e-9 if dtype == torch.float64 else cases.limit(name, torch.float32, sizes) for name in errors}
        limits = {name: own[name] + (ROUNDING[dtype] if got[name].dtype == dtype else 0.0) for name in errors}
        assert check.judge_errors(errors, limits)["passed"], (backend, dtype, errors, limits)
        out_dtype = compute_dtype(dtype) if getattr(sizes, "full_precision", False) else dtype
        assert [x.dtype for x in got.values()] == [out_dtype, *(x.dtype for x in given[:-1] if x is not None)]


SCANS = {name: cases for name, cases in OPERATORS.items() if get_operation(name) in DECOMPOSITIONS}
SCANNED = [
    pytest.param(name, sizes, id=f"{name}-{i}")
    for name, cases in SCANS.items()
    for i, sizes in enumerate([*cases.ragged[::2], *(case.sizes for case in list_special(cases))])
]


@once
@pytest.mark.parametrize(("name", "sizes"), SCANNED)
def test_a_decomposition_gives_the_output_of_the_reference(name, sizes):
    assert set(SCANS) == {"ttt_linear", "selective_scan", "bi_wkv"}
    cases, inputs = SCANS[name], SCANS[name].draw(0, sizes)[:-1]
    out, _ = DECOMPOSITIONS[get_operation(name)](*cases.arguments(inputs, sizes), "auto", False)
    torch.testing.assert_close(out, cases.bind(sizes)(*inputs, backend="reference"), rtol=1e-10, atol=1e-10)


def test_memory_is_poisoned():
    with check.poisoned_memory():
        x = torch.zeros(3)
        empty = (torch.empty(3), torch.empty_like(x), x.new_empty(3), torch.empty_strided((3,), (1,)))
        assert all(y.isnan().all() for y in empty)


@once
def test_gradcheck(cases, any_backend):
    inputs, _ = draw(cases)
    assert torch.autograd.gradcheck(operator(cases, any_backend), inputs, fast_mode=True)


def test_opcheck(cases, backend):
    inputs, _ = draw(cases)
    detached = [x.detach() for x in inputs]
    op, keep = cases.op.CUSTOM_OP, bool(cases.op.CUSTOM_OP.kept)
    arguments = cases.arguments(detached, cases.SMALL)
    torch.library.opcheck(op.forward, (*cases.arguments(inputs, cases.SMALL), backend, *[True] * keep))
    torch.library.opcheck(op.forward, (*arguments, backend, *[False] * keep))
    results = run_forward(op, arguments, backend)
    torch.library.opcheck(op.backward, (results["out"], *(results[name] for name in op.kept), *arguments, backend))


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=[once, pytest.mark.slow])])
def test_compiles_to_one_graph(cases, dynamic, backend):
    torch.compiler.reset()
    function = operator(cases, backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    inputs, _ = draw(cases, torch.float32)
    for given in (inputs, draw(cases, torch.float32, dataclasses.replace(cases.SMALL, batch=5))[0]):
        assert_equal(differentiate(compiled, given), differentiate(function, given))
    with torch.inference_mode():
        assert torch.equal(compiled(*inputs), function(*inputs))


def test_autocast_does_not_reach_inside(cases, any_backend):
    inputs, _ = draw(cases, torch.float32)
    function = operator(cases, any_backend)
    expected = differentiate(function, inputs)
    with torch.autocast("cpu", torch.float16):
        out = function(*inputs)
    # autograd's own operations follow an autocast that is on during the backward pass; the operator does not
    with torch.autocast("cpu", torch.float16, enabled=any_backend != "reference"):
        gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert_equal((out, *gradients), expected)


def test_parameters_in_low_precision(cases, backend):
    """They give what fp32 parameters of the same values give, with gradients in their own dtype."""
    low = [x.detach().half() for x in draw(cases)[0]]
    own = dict(zip(cases.INPUTS, low, strict=True))
    as_fp32 = [(x if name in cases.ACTIVATIONS else x.float()).requires_grad_() for name, x in own.items()]
    low = [x.clone().requires_grad_() for x in low]
    results, expected = (differentiate(operator(cases, backend), given) for given in (low, as_fp32))
    assert {x.dtype for x in results} == {torch.float16}
    assert_equal(results, [x.half() for x in expected])


@once
def test_only_the_gradients_that_are_wanted(cases, backend):
    inputs, _ = draw(cases)
    _, *expected = differentiate(operator(cases, backend), inputs)
    for i, gradient in enumerate(expected):
        some = [x.detach().clone().requires_grad_(i == j) for j, x in enumerate(inputs)]
        operator(cases, backend)(*some).square().sum().backward()
        assert [x.grad is not None for x in some] == [i == j for j in range(len(inputs))]
        assert torch.equal(some[i].grad, gradient)
    assert not operator(cases, backend)(*(x.detach() for x in inputs)).requires_grad


def test_what_is_kept_for_a_backward_pass(cases, monkeypatch, backend):
    """Its inputs and what is named alone, by the storages that autograd holds; without a gradient no states."""
    op, sizes, held, asked = cases.op.CUSTOM_OP, cases.ragged[-1], {}, []
    inputs, _ = draw(cases, torch.float32, sizes)
    plain, run = [x.detach() for x in inputs], operator(cases, backend, sizes)

    def keep(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = run(*inputs)
    for x in inputs:
        held.pop(x.untyped_storage().data_ptr(), None)
    results = run_forward(op, cases.arguments(plain, sizes), backend)
    assert out.requires_grad and sorted(held.values()) == sorted(results[name].nbytes for name in op.kept)
    if not op.kept:
        return
    alone, states = op.forward(*cases.arguments(plain, sizes), backend, False)
    assert torch.equal(alone, out) and states.numel() == 0
    compute = op._compute
    monkeypatch.setattr(op, "_compute", lambda *values: asked.append(values[-1]) or compute(*values))
    run(*inputs)
    run(*plain)
    with torch.no_grad():
        run(*inputs)
    assert asked == [True, False, False]


@once
def test_the_second_derivative_is_refused(cases, backend):
    inputs, _ = draw(cases)
    leading = inputs[cases.INPUTS.index(cases.op.CUSTOM_OP.leading)]
    (gradient,) = torch.autograd.grad(operator(cases, backend)(*inputs).square().sum(), leading, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{cases.NAME}: this backend has no second derivative; backend='ref"):
        gradient.sum().backward()
    (gradient,) = torch.autograd.grad(operator(cases, "reference")(*inputs).square().sum(), leading, create_graph=True)
    gradient.square().sum().backward()


@once
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops_are_the_same_everywhere(cases, device, backend):
    """`test_bench.py` has the counts by hand. On the meta device there is neither memory nor arithmetic."""
    forward, both = (count_work(cases, cases.SMALL, passes)[1] for passes in (FORWARD, BOTH_PASSES))
    inputs = [x.detach().to(device).requires_grad_() for x in draw(cases)[0]]
    backend = "torch" if device == "meta" else backend
    with FlopCounterMode(display=False) as counter:
        out = operator(cases, backend)(*inputs)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == both - forward


LAYOUTS = {
    "a part of wider rows": lambda x: torch.stack([x, -x], -1)[..., 0],
    "transposed": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_are_left_alone_and_may_be_strided(cases, layout, backend):
    """They give what their contiguous copies give, and so does a dout in that layout."""
    inputs, dout = draw(cases)
    strided = [LAYOUTS[layout](x.detach()) for x in (*inputs, dout)]
    plain, before = ([x.clone(memory_format=torch.contiguous_format) for x in strided] for _ in range(2))
    results, expected = (check.differentiate(cases, given, cases.SMALL, backend) for given in (strided, plain))
    for name in expected:
        torch.testing.assert_close(results[name], expected[name], msg=name)
    assert_equal(strided, before)


def test_images_are_apart(cases, any_backend):
    """One alone is as among others. A NaN in one image reaches its own output alone; in a parameter, the output."""
    function, axis = operator(cases, any_backend), cases.OUT_BATCH
    sizes = [dataclasses.replace(cases.SMALL, batch=b) for b in (2, 3)]
    inputs, three = ([x.detach() for x in draw(cases, sizes=each)[0]] for each in sizes)
    per_image = [x.shape != y.shape for x, y in zip(inputs, three, strict=True)]  # else the images share it
    expected = function(*inputs)
    alone = function(*(x[1:2] if own else x for x, own in zip(inputs, per_image, strict=True)))
    torch.testing.assert_close(alone, expected.narrow(axis, 1, 1))
    for i, (name, own) in enumerate(zip(cases.INPUTS, per_image, strict=True)):
        bad = inputs[i].clone()
        bad[1 if own else ...] = float("nan")
        out = function(*inputs[:i], bad, *inputs[i + 1 :])
        assert out.select(axis, 1).isnan().any(), name
        if own:
            torch.testing.assert_close(out.select(axis, 0), expected.select(axis, 0), msg=name)


def test_choice_of_a_backend(cases):
    """What a mistake says is in `wrong_arguments`."""
    # also under the interpreter, which is slow
    assert cases.select("auto", cases.SMALL, torch.float32, "cpu") == cases.CPU_BACKENDS[0]
    for asked in ("torch", "reference", *BACKENDS[:INTERPRETED]):
        assert cases.select(asked, cases.SMALL, torch.float32, "cpu") == asked
    if not INTERPRETED:  # asked of a GPU that need not exist
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            expected = "torch" if dtype == torch.float64 else "triton"
            assert cases.select("auto", cases.TYPICAL, dtype, "cuda") == expected


# operator, changed sizes, the backend that is asked for and where, and the one that runs or why it cannot
REQUESTS = [
    ("ttt_linear", {"chunk_size": 64, "head_dim": 128}, "auto", "cuda", "triton"),
    ("ttt_linear", {"chunk_size": 12, "head_dim": 64}, "auto", "cuda", "torch"),
    ("ttt_linear", {"chunk_size": 16, "head_dim": 48}, "auto", "cuda", "torch"),
    ("ttt_linear", {"head_dim": 10}, "auto", "cpu", "torch"),  # no multiple of a vector
    ("selective_scan", {}, "numba", "cuda", "u is on cuda, expected the CPU"),
    ("ms_deform_attn", {}, "numba", "cpu", "this operator has no loops for it"),
    ("ms_deform_attn", {"head_dim": 48, "levels": 3}, "auto", "cuda", "triton"),
    ("ms_deform_attn", {"head_dim": 257}, "auto", "cuda", "torch"),
    ("ms_deform_attn", {"levels": 5}, "auto", "cuda", "torch"),
    ("ms_deform_attn", {"levels": 5}, "triton", "cuda", "there are 5 levels, expected at most 4"),
]


@once
@pytest.mark.parametrize(("name", "changed", "backend", "device", "found"), REQUESTS)
def test_sizes_and_devices_that_a_backend_does_not_take(name, changed, backend, device, found):
    """Also of a GPU that need not exist."""
    request = backend, dataclasses.replace(OPERATORS[name].SMALL, **changed), torch.float16, device
    if backend == "auto":
        assert OPERATORS[name].select(*request) == found
    else:
        with pytest.raises(ValueError, match=f"backend '{backend}': {found}; use auto, torch or"):
            OPERATORS[name].select(*request)


@once
def test_shapes_on_a_gpu_that_need_not_exist(cases):
    """Fake tensors on CUDA: shapes, dtypes and device of results and gradients, without running anything."""
    op = cases.op.CUSTOM_OP
    *inputs, dout = cases.cast(cases.draw(0, cases.TYPICAL), torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [x.to("cuda") for x in inputs]
        arguments = cases.arguments(inputs, cases.TYPICAL)
        results = run_forward(op, arguments, "auto")
        gradients = op.backward(results["out"], *(results[name] for name in op.kept), *arguments, "auto")
    assert {x.device.type for x in (*results.values(), *gradients)} == {"cuda"}
    assert (results["out"].shape, results["out"].dtype) == (dout.shape, torch.bfloat16)
    assert results.get("states", torch.zeros(0)).dtype == torch.float32
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in inputs]


def wrong_arguments(cases, inputs):
    """(what is changed, the changed inputs and backend, the error, the message) of mistakes with any operator."""
    leading = cases.op.CUSTOM_OP.leading
    lead = inputs[leading]
    dtypes, names = "expected one of fp64, fp32, bf16, fp16", "expected one of auto, triton, numba, torch, reference"
    yield "dtype of the leading one", {leading: lead.long()}, TypeError, f"{leading} is torch.int64, {dtypes}"
    wrong_rank = f"{leading} has shape {tuple(lead.shape[1:])}, expected (B,"
    yield "rank of the leading one", {leading: lead[0]}, ValueError, wrong_rank
    yield "nothing in it", {leading: lead[:0]}, ValueError, "with every size at least 1"
    yield "backend", {"backend": "cuda"}, ValueError, f"backend is 'cuda', {names}"
    no_gpu = f"backend 'triton': {leading} is on cpu, expected a CUDA device"
    yield "triton on the CPU", {"backend": "triton"}, ValueError, no_gpu
    for name, x in inputs.items():
        yield f"{name} no tensor", {name: 0.5}, TypeError, f"{name} is float, expected a tensor"
        if name == leading:
            continue
        shape = (len(x) + 1, *x.shape[1:])
        yield f"shape of {name}", {name: x.new_zeros(shape)}, ValueError, f"{name} has shape {shape}, expected "
        message = f"{name} is fp16, expected fp32 beside {leading} in fp32"
        yield f"dtype of {name}", {name: x.half()}, TypeError, message
        meta = f"{name} is on meta, expected {leading}'s device cpu"
        yield f"device of {name}", {name: x.to("meta")}, ValueError, meta


# those around the scan check nothing: a model arranges their arguments
CHECKED = [name for name, cases in OPERATORS.items() if cases not in around_cases.CASES]


@once
@pytest.mark.parametrize("cases", CHECKED, indirect=True)
def test_wrong_arguments(cases, backend):
    """One line that names the operator, the argument, what it is and what is expected."""
    inputs = dict(zip(cases.INPUTS, (x.detach() for x in draw(cases, torch.float32)[0]), strict=True))
    for what, changed, error, message in wrong_arguments(cases, inputs):
        given = inputs | {"backend": backend} | changed
        with pytest.raises(error) as caught:
            cases.bind(cases.SMALL)(*(given[name] for name in cases.INPUTS), backend=given["backend"])
        text = str(caught.value)
        assert message in text and "\n" not in text, (what, text)
        assert what == "backend" or text.startswith(cases.NAME), (what, text)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_that_the_interpreted_kernels_do_not_take(cases, dtype, backend):
    inputs, leading = draw(cases, dtype)[0], cases.op.CUSTOM_OP.leading
    with pytest.raises(ValueError, match=f"{cases.NAME}: .*{leading} is {dtype}.*; use auto, torch or reference"):
        operator(cases, backend)(*inputs)


@once
def test_transforms_of_derivatives(cases):
    """Forward mode agrees with a central difference, and vmap of a gradient with one gradient after the other."""
    inputs, _ = draw(cases)
    inputs = [x.detach() for x in inputs]
    function = operator(cases, "auto")
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs]

    def moved(step):
        return function(*(x + step * dx for x, dx in zip(inputs, tangents, strict=True)))

    difference = (moved(1e-6) - moved(-1e-6)) / 2e-6
    _, slope = torch.func.jvp(function, tuple(inputs), tuple(tangents))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(inputs, tangents, strict=True)]
        dual_slope = forward_ad.unpack_dual(function(*duals)).tangent
    scale = difference.abs().max()
    for found in (slope, dual_slope):
        assert (found - difference).abs().max() <= 1e-6 * scale

    pairs = [torch.stack([x, 1.01 * x]) for x in inputs]
    loss = torch.func.grad(lambda *inputs: function(*inputs).square().sum())
    together = torch.func.vmap(loss)(*pairs)
    alone = torch.stack([loss(*(x[i] for x in pairs)) for i in range(2)])
    torch.testing.assert_close(together, alone)
