"""How kernels are launched where no GPU can show it: tuned, untuned, or only compiled; and what is compiled ahead."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import triton

from kernels import triton_launch
from kernels.tools import ahead
from kernels.tools.cases import DTYPES
from kernels.tools.operators import OPERATORS

CONFIGS = [triton.Config({}, num_warps=warps) for warps in (4, 2, 1)]
GPU = torch.device("cuda", 0)


class Kernel:
    """Takes the place of a jitted function and of its tuned form, and notes how it is called."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda **arguments: self.calls.append(("run", arguments.get("num_warps"), arguments["bucket"]))

    def warmup(self, *, grid, **arguments):
        self.calls.append(("compile", arguments["num_warps"], arguments["bucket"]))


@pytest.fixture
def kernel(monkeypatch):
    """A kernel on a GPU with 132 multiprocessors that is not there."""
    found, tuned = Kernel(), Kernel()
    tuned.calls = found.calls
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(triton_launch, "tuned", lambda kernel, candidates, *sizes: tuned)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def launch(kernel, config=None):
    triton_launch.launch(kernel, lambda: CONFIGS, (), (1,), {"bucket": 5}, GPU, config)
    return kernel.calls


def test_it_is_tuned_by_device_and_size(kernel):
    """num_warps None: the tuner chooses. The key tells GPUs of one architecture apart."""
    ((how, warps, bucket),) = launch(kernel)
    assert (how, warps) == ("run", None) and bucket == triton_launch.device_bucket(5, 132)
    assert len({triton_launch.device_bucket(bucket, count) for bucket in (5, 6) for count in (114, 132)}) == 4


def test_nothing_is_tried_while_a_graph_is_captured(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launch(kernel) == [("run", 4, 5)]


def test_a_given_config_runs(kernel):
    assert launch(kernel, CONFIGS[2]) == [("run", 1, 5)]


def test_only_compiling_compiles_what_would_be_tried_and_runs_nothing(kernel, monkeypatch):
    with triton_launch.compiling_only():
        assert launch(kernel) == [("compile", warps, 5) for warps in (4, 2, 1)]
        kernel.calls.clear()
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert launch(kernel) == [("compile", 4, 5)]
        kernel.calls.clear()
        assert launch(kernel, CONFIGS[1]) == [("compile", 2, 5)]
    kernel.calls.clear()
    assert launch(kernel) == [("run", 4, 5)]


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_compiled_ahead_is_what_checks_and_bench_call(name):
    """Every special size in every dtype, and every kind of shape that is timed, forward alone and with the backward pass."""
    cases = OPERATORS[name]
    tasks = list(ahead.plan(cases))
    assert len(set(tasks)) == len(tasks)
    both = {(task.sizes, task.dtype) for task in tasks if task.passes == ahead.BOTH_PASSES}
    assert {(sizes, dtype) for sizes in (cases.TYPICAL, *(sizes for _, sizes in cases.variants())) for dtype in DTYPES} <= both

    def kind(sizes):
        return {key: value for key, value in vars(sizes).items() if key not in ("batch", "tokens")}

    for passes in (ahead.FORWARD, ahead.BOTH_PASSES):
        timed = [kind(task.sizes) for task in tasks if task.passes == passes and task.dtype == "bf16" and task.every_config]
        assert all(kind(sizes) in timed for sizes in cases.shapes())


def test_a_call_that_cannot_be_compiled_is_reported(monkeypatch):
    """Here there is no GPU: each task fails, in a process of its own, and that is all."""
    if torch.cuda.is_available():
        pytest.skip("it would compile")
    cases = OPERATORS["bi_wkv"]
    first = next(ahead.plan(cases))
    monkeypatch.setattr(ahead, "plan", lambda cases: [first])
    outcome = ahead.compile_ahead([cases], 120.0)
    assert (outcome.tasks, outcome.done, outcome.processes) == (1, 0, 1) and len(outcome.problems) == 1
