"""What numba's loops share: functions against fp64, results for any number of threads, machines without numba."""

import dataclasses
import math
import sys

import numba
import numpy as np
import pytest
import torch
from numba.core.caching import NullCache

from kernels import cpu_around, cpu_learner, cpu_loops, cpu_scan, cpu_wkv, dispatch
from kernels.tools import around_cases, check
from kernels.tools.operators import OPERATORS
from repro.models import fused_block
from tests.conftest import run_python
from tests.models.helpers import nano, shaken

BITS = """
import hashlib, torch
from kernels.ttt_linear import ttt_linear
torch.manual_seed(0)
q, k, v = (torch.randn(1, 81, 1, 64, requires_grad=True) for _ in range(3))
shared = torch.rand(1, 81, 1) / 64, 1 / torch.arange(1, 17.0), torch.randn(1, 64, 64) / 50, *torch.randn(3, 1, 64)
out = ttt_linear(q, k, v, *shared, backend="numba")
results = out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))
print(hashlib.sha256(b"".join(each.numpy().tobytes() for each in results)).hexdigest())
"""
FORK = """
import os, torch
from kernels.around.op import CONV_NORM
from kernels.around.reference import ConvNorm
x, weight = torch.randn(1, 9, 4), torch.randn(4, 3, 3)
compute = lambda: CONV_NORM(ConvNorm(x, weight, x[0, 0], x[0, 1], 3, 1e-6), "numba")
for threads in (1, 2):
    torch.set_num_threads(threads)
    expected = compute()
    child = os.fork()
    if not child:
        os._exit(not torch.equal(compute(), expected))
    print(torch.get_num_threads(), os.waitpid(child, 0)[1])
"""
LOOPS = [name for name, cases in OPERATORS.items() if "numba" in cases.CPU_BACKENDS]


def softplus(x):
    return torch.nn.functional.softplus(x, threshold=1000)


# our function, PyTorch's, the largest argument of which the result does not underflow
FUNCTIONS = {
    "exp2": (numba.vectorize(lambda x: cpu_loops.exp2(x)), torch.exp2, 125.0),
    "sigmoid": (numba.vectorize(lambda x: cpu_loops.sigmoid(x)), torch.sigmoid, 80.0),
    "softplus": (numba.vectorize(lambda x: cpu_loops.softplus(x)), softplus, 80.0),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtype):
    """Within a few roundings of fp64, over all of the range that does not underflow."""
    function, expected, largest = FUNCTIONS[name]
    x = np.concatenate([np.linspace(-largest, largest, 20_001), np.linspace(-1, 1, 2_001), [0.0]]).astype(dtype)
    out = function(x)
    want = expected(torch.from_numpy(x).double()).numpy()
    # the polynomials' coefficients are themselves of fp64
    spacing = np.finfo(dtype).eps * (1 if dtype == np.float32 else 4)
    # what is rounded before 2ˣ weighs |x| times as much after it
    limit = 4 * spacing if name == "exp2" else spacing * (4 + 2 * np.abs(x))
    assert (np.abs(out - want) <= limit * np.abs(want)).all()
    assert out[-1] == pytest.approx(want[-1], rel=float(4 * spacing))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_at_what_is_no_number(dtype):
    x = np.array([math.nan, math.inf, -math.inf, 5000.0, -5000.0], dtype)
    wanted = {"exp2": [math.inf, 0, math.inf, 0], "sigmoid": [1, 0, 1, 0], "softplus": [math.inf, 0, 5000, 0]}
    for name, expected in wanted.items():
        with np.errstate(invalid="ignore"):
            out = FUNCTIONS[name][0](x)
        assert np.isnan(out[0]) and out[1:].tolist() == pytest.approx(expected, abs=1e-37), name


@pytest.mark.parametrize("name", LOOPS)
def test_no_number_of_threads_changes_a_bit(name):
    """One thread has all channels of a task; many threads share them where there are fewer tasks than threads."""
    cases = OPERATORS[name]
    channels = {"channels": 200} if hasattr(cases.TYPICAL, "channels") else {}
    sizes = dataclasses.replace(cases.TYPICAL, batch=1, **channels)
    given = cases.cast(cases.draw(0, sizes), torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            results.append(check.differentiate(cases, given, sizes, "numba"))
    finally:
        torch.set_num_threads(before)
    if cases in around_cases.CASES:  # their gradients are PyTorch's
        results = [{"out": result["out"]} for result in results]
    for other in results[1:]:
        for key, expected in results[0].items():
            torch.testing.assert_close(other[key], expected, rtol=1e-5, atol=1e-6)
            if key not in ("B", "C"):  # sums over the channels, of which each thread has some
                assert torch.equal(other[key], expected), key


@pytest.mark.parametrize("reason", ["not installed", "cannot be imported: .*NumPy 2.5."])
def test_without_numba_torch_runs(reason, monkeypatch, tmp_path):
    """It is not there, or refuses the NumPy that is: said to who asks for it."""
    selects = {name: OPERATORS[name].select for name in LOOPS}
    for name, select in selects.items():
        assert select("auto", OPERATORS[name].SMALL, torch.float32, "cpu") == "numba"
    monkeypatch.setattr(dispatch, "numba_obstacle", dispatch.numba_obstacle.__wrapped__)
    if reason == "not installed":
        monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda package: None)
    else:
        (tmp_path / "numba.py").write_text('raise ImportError("Numba needs NumPy 2.4 or less. Got NumPy 2.5.")')
        monkeypatch.syspath_prepend(tmp_path)
    for name, select in selects.items():
        monkeypatch.delitem(sys.modules, "numba", raising=False)
        assert select("auto", OPERATORS[name].SMALL, torch.float32, "cpu") == "torch"
        with pytest.raises(ValueError, match=f"backend 'numba': the package numba .*{reason}; use auto, torch or"):
            select("numba", OPERATORS[name].SMALL, torch.float32, "cpu")


def make_model(**options):
    return shaken(nano("vittt", **{"depth": 1, "embed_dim": 64, "num_heads": 1, "img_size": 48} | options))


def test_a_block_of_vittt():
    """Inference by loops is the plain path but for rounding; `tests/models/test_fused_block.py` has who sees the parts."""
    model, images = make_model(depth=2, img_size=80), torch.randn(2, 3, 48, 112)
    with torch.no_grad():
        assert fused_block.find_backend(model.blocks[0], torch.zeros(1, 1, 1)) == "numba"
        found = model.forward_features(images)
        model.set_backend("torch")
        assert check.relative_error(found, model.forward_features(images)) < 2e-6
        model.set_backend("auto")
        assert torch.equal(model.freeze().forward_features(images), found)


def test_a_layer_that_computes_something_else_is_called():
    """Such as a quantised or an adapted one, in the place of a plain one of the same weights."""

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    (block,), tokens = make_model().blocks, torch.randn(1, 9, 64)
    replaced = Doubled(block.mlp.fc2.in_features, 64)
    replaced.load_state_dict(block.mlp.fc2.state_dict())
    block.mlp.fc2 = replaced
    with torch.no_grad():
        assert check.relative_error(block(tokens, (3, 3)), block.forward_plainly(tokens, (3, 3))) < 2e-6


UNFIT = [{"pool": "head"}, {"design": "dual"}, {"step": "ascent"}, {"step": "q_is_k"}]
UNFIT += [{"reading": reading} for reading in ("swiglu_bias=false", "gate_activation=sigmoid")]


@pytest.mark.parametrize("other", UNFIT, ids=str)
def test_another_kind_of_block_is_left_and_frozen_as_it_is(other):
    """A kind that no backend's launches compute."""
    model, images = make_model(**other), torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        assert not fused_block.find_backend(model.blocks[0], torch.zeros(1, 1, 1))
        expected = model(images)
        assert torch.equal(model.freeze()(images), expected)


@pytest.mark.slow
def test_a_forked_child_computes_alone():
    """GNU's OpenMP would end it; and numba's threads leave PyTorch's number of them as it was."""
    assert run_python("-c", FORK).stdout.splitlines() == ["1 0", "2 0"]


@pytest.mark.parametrize("module", [cpu_around, cpu_learner, cpu_scan, cpu_wkv])
def test_what_loops_call_is_inlined(module):
    """A loop is kept in numba's cache; what it calls is not, and its own body would differ from the one in the loop."""
    functions = [each for each in vars(module).values() if hasattr(each, "targetoptions")]
    called = [each for each in functions if isinstance(each._cache, NullCache)]
    assert all(each.targetoptions.get("forceinline") for each in called)


@pytest.mark.slow
def test_the_process_that_compiles_computes_the_bits_of_the_others(tmp_path):
    first, second = (run_python("-c", BITS, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert first.stdout == second.stdout != "", second.stderr
