"""How kernels are launched where no GPU can show it: tuned or untuned."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from kernels import triton_launch
from kernels.around import triton_fwd
from kernels.around.reference import GatedLinear
from tests.kernels.compiled import KERNELS

CONFIGS = [triton.Config({"BLOCK": 8}, num_warps=warps) for warps in (4, 2, 1)]
GPU = torch.device("cuda", 0)


class Kernel:
    """Takes the place of a jitted function and of its tuned form, which finds the last config best; notes its calls."""

    best_config = CONFIGS[2]
    __name__ = "kernel"

    def __init__(self):
        self.calls = []
        self.arg_names = ["BLOCK", "bucket"]

    def __getitem__(self, grid):
        def run(**arguments):
            self.calls.append((arguments.get("num_warps"), arguments["bucket"]))
            return Compiled(self.calls, arguments.get("num_warps"))

        return run


class Compiled:
    """Takes the place of what Triton compiled; notes its warps and grid with its calls, whose values have no names."""

    def __init__(self, calls, warps):
        self.calls, self.warps = calls, warps

    function = packed_metadata = None

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *values):
        self.calls.append((self.warps, (x, y, z), *values))

    def __getitem__(self, grid):
        return lambda *values: self.calls.append((self.warps, "watched", *values))


@pytest.fixture
def kernel(monkeypatch):
    """A kernel on a GPU with 132 multiprocessors that is not there. Its `calls` are (warps, bucket); warps None: tried."""
    found, tuned = Kernel(), Kernel()
    tuned.calls = found.calls
    gpu = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132)
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(triton_launch, "CHOSEN", {})
    monkeypatch.setattr(triton_launch, "READY", {})
    monkeypatch.setattr(triton_launch, "tuned", lambda kernel, candidates, *sizes: tuned)
    monkeypatch.setattr(triton_launch, "find_gpu", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(type(triton.runtime.driver), "active", driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # a training in an earlier test asks for them
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    found.gpu = gpu
    return found


def launch(kernel, config=None, grid=(1,), **arguments):
    kernel.arg_names += [name for name in arguments if name not in kernel.arg_names]
    triton_launch.launch(kernel, lambda: CONFIGS, (), grid, {"bucket": 5, **arguments}, GPU, config)
    return kernel.calls


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "is_refused"),
    [("3.6.0", "2.4.1", True), ("3.6.0", "2.3.5", False), ("3.7.0", "2.4.1", False)],
)
def test_an_interpreter_that_numpy_breaks_is_refused(monkeypatch, triton_version, numpy_version, is_refused):
    monkeypatch.setattr(triton_launch, "INTERPRETED", True)
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(triton_launch, "version", {"numpy": numpy_version}.get)
    obstacle = triton_launch.dtype_obstacle("q", torch.float32, [torch.float32])
    assert (obstacle is not None) == is_refused


@pytest.mark.parametrize("other", [{"name": "NVIDIA H200"}, {"multi_processor_count": 114}])
def test_the_tuner_s_key_has_the_kind_of_gpu(kernel, other):
    """Two of one architecture share files on disk, whose names have what the tuner's key has."""
    launch(kernel)
    vars(kernel.gpu).update(other)
    triton_launch.CHOSEN.clear()  # as in a new process
    (first, bucket), (second, elsewhere) = launch(kernel)
    assert first is second is None and bucket != elsewhere and bucket % 2**16 == elsewhere % 2**16 == 5
    assert max(bucket, elsewhere) < 2**31  # Triton passes it as an int32


@pytest.mark.parametrize("changed", [{"bucket": 6}, {"PASS": 1}, {"HIDDEN": 512}, {"x_ptr": torch.zeros(1).half()}])
def test_another_size_pass_or_dtype_is_tuned_anew(kernel, changed):
    launch(kernel)
    assert launch(kernel)[1][0] == 1 and launch(kernel, **changed)[2][0] is None


def test_what_is_compiled_runs_again_by_itself(kernel):
    """With the values in the kernel's order, and a grid of its own; and not for what Triton might compile for anew."""
    x, y = torch.zeros(8), torch.ones(8)
    for given in (x, x, y):
        launch(kernel, grid=lambda config: (config["BLOCK"], 2), x_ptr=given, T=16)
    assert kernel.calls[2] == (1, (8, 2, 1), 8, 5, y, 16)
    for changed in ({"x_ptr": x[1:]}, {"x_ptr": x.bool()}, {"T": 17}):
        assert len(launch(kernel, **{"x_ptr": x, "T": 16, **changed})[-1]) == 2  # by Triton


def test_who_watches_launches_sees_what_runs_again(kernel, monkeypatch):
    for _ in range(2):
        launch(kernel)
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", lambda metadata: None)
    assert launch(kernel)[-1] == (1, "watched", 8, 5)


def test_a_capture_runs_what_was_chosen_before_it(kernel, monkeypatch):
    """What the tuner found best, and with what options it loaded it; nothing is tried, loaded or kept."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="^kernel: .*before"):
        launch(kernel)
    assert not triton_launch.CHOSEN and not kernel.calls
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch(kernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kept = dict(triton_launch.CHOSEN)
    assert launch(kernel)[-1][0] == 1 and kept == triton_launch.CHOSEN


def test_a_given_config_runs_and_deterministic_is_the_first_in_and_out_of_a_capture(kernel, monkeypatch):
    assert launch(kernel, CONFIGS[1]) == [(2, 5)]
    launch(kernel)
    launch(kernel)  # the tuner's choice is ready, and not taken
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert launch(kernel)[-1][0] == 4


def test_the_operators_around_the_scan_are_tuned_by_their_rows(monkeypatch):
    """A choice for 409,600 rows is not that for 196."""
    buckets = []
    monkeypatch.setattr(triton_fwd, "launch", lambda *arguments: buckets.append(arguments[4]["bucket"]))
    weight, bias = torch.empty(32, 16, device="meta"), torch.empty(32, device="meta")
    for batch, tokens in ((64, 6400), (1, 196), (2, 100)):
        triton_fwd.gated_linear(GatedLinear(torch.empty(batch, tokens, 16, device="meta"), weight, bias))
    assert buckets[0] != buckets[1] == buckets[2]


def test_every_tuned_kernel_has_a_bucket():
    """Without one in its key, the first size that is tuned decides for all, on every GPU."""
    tuners = []
    for kernels in KERNELS.values():
        sizes = kernels.sizes(torch.bfloat16)[2]
        found = dict.fromkeys((kernel, configs) for configs, kernel, _ in kernels.table.values())
        tuners += [
            (kernel, triton_launch.tuned(kernel, find, *sizes)) for kernel, find in found if len(find(*sizes)) > 1
        ]
    assert len(tuners) > 10 and all("bucket" in tuner.keys for _, tuner in tuners)
    passes = {tuple(tuner.keys) for kernel, tuner in tuners if "PASS" in kernel.arg_names}
    assert passes and all("PASS" in keys for keys in passes)


def test_what_is_ready_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(triton_launch, "MOST_READY", 3)
    for T in range(10):
        launch(kernel, CONFIGS[0], T=T)
        assert len(triton_launch.READY) == T % 3 + 1


def test_a_home_that_cannot_be_written(monkeypatch):
    """Triton compiles into a folder of the process, and a warning says so."""
    monkeypatch.setattr(triton.knobs.cache, "dir", "/proc/none")
    with pytest.warns(UserWarning, match="TRITON_CACHE_DIR names another folder"):
        triton_launch.require_cache.__wrapped__()
    folder = Path(triton.knobs.cache.dir)
    assert folder.is_dir()
    folder.rmdir()
