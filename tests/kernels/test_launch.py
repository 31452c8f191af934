"""How kernels are launched where no GPU can show it: tuned or untuned."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import triton

from kernels import triton_launch

CONFIGS = [triton.Config({}, num_warps=warps) for warps in (4, 2, 1)]
GPU = torch.device("cuda", 0)


class Kernel:
    """Takes the place of a jitted function and of its tuned form, and notes how it is called."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda **arguments: self.calls.append(("run", arguments.get("num_warps"), arguments["bucket"]))


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
    # a training in an earlier test asks for them
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
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
