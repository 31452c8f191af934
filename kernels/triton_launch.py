"""Shared parts of the operators' Triton files: the dtypes that run, and the launch and tuning of a kernel."""

import contextlib
import functools
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
import triton
from torch.nn import Parameter
from torch.torch_version import TorchVersion

from .dispatch import find_gpu

INTERPRETED = bool(triton.knobs.runtime.interpret)
# arguments on which a kernel's choice of a config depends, if it has them; add those of a new kernel here
TUNING_KEYS = "bucket", "D", "CHUNK", "HIDDEN", "M", "C", "L", "P", "KEEP", "PASS", "CONVOLVE"
# arguments that a kernel must find full of zeros, since it adds to them, or leaves unwritten what a config with more
# programs would write; add those of a new kernel here
ZEROED = ("partial_ptr",)

Candidates = Callable[..., list[triton.Config]]  # see `launch`

# a kernel, its device, dtypes and `TUNING_KEYS` -> the fastest config, as found in this process or read from disk
CHOSEN: dict[tuple, triton.Config] = {}
# properties for which a kernel is compiled -> (compiled kernel, its config, the places of its arguments among the given
# ones and the config's); a launch from here saves the host the time of Triton's binder
READY: dict[tuple, tuple[Any, triton.Config, list[int]]] = {}
# entries of READY: a layout of images takes about ten; above the limit all are dropped, and found again
MOST_READY = 4096
# whether choices are kept on disk; they are not where several processes share a GPU, since their times mean nothing
KEEP_CHOICES = True


@functools.cache
def require_cache() -> None:
    """Give Triton a temporary cache folder, with a warning, if its own cannot be written (as in a read-only home)."""
    try:
        os.makedirs(triton.knobs.cache.dir, exist_ok=True)
        writable = os.access(triton.knobs.cache.dir, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        folder = tempfile.mkdtemp(prefix="triton-")
        why = f"{triton.knobs.cache.dir} cannot be written; kernels are compiled into {folder}, anew in each process"
        warnings.warn(f"{why}. TRITON_CACHE_DIR names another folder", stacklevel=2)
        triton.knobs.cache.dir = folder


def dtype_obstacle(leading: str, dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> str | None:
    """Return why kernels for these dtypes cannot run a leading argument of `dtype`; None if they can."""
    if dtype not in dtypes:
        return f"{leading} is {dtype}, expected one of {', '.join(map(str, dtypes))}"
    if INTERPRETED and dtype == torch.bfloat16:
        return f"{leading} is torch.bfloat16, which Triton's interpreter does not have; expected torch.float32 or torch.float16"
    if INTERPRETED and TorchVersion(triton.__version__) < (3, 7) and TorchVersion(version("numpy")) >= (2, 4):
        return f"the interpreter of Triton {triton.__version__} runs no loops with NumPy {version('numpy')}; take numpy<2.4"
    return None


def ceil_div(a: int, b: int) -> int:
    """Return ⌈a / b⌉; Triton's own function is made for kernels, and takes the host microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n >= 1, without Triton's own function, see `ceil_div`."""
    return 1 << (n - 1).bit_length()


def direction_bits(reverse: Sequence[bool]) -> int:
    """Return an integer with one bit per direction, which is 1 if the direction is scanned from the last token."""
    return sum(flag << r for r, flag in enumerate(reverse))


def launch(
    kernel,
    candidates: Candidates,
    sizes: tuple,
    grid: tuple[int, ...] | Callable,
    arguments: dict[str, object],
    device: torch.device,
    config: triton.Config | None,
) -> None:
    """Run `kernel` with `config`; without one, with the fastest of its `candidates` for `sizes`.

    The candidates are tried once per value of `TUNING_KEYS`, dtypes and kind of GPU. Under the interpreter, and with
    torch's deterministic algorithms, the first candidate runs without a trial.

    Args:
        kernel: a Triton kernel. One that may run without a config has an argument `bucket`, one of `TUNING_KEYS`, which
            it must not read: a trial passes another value, see `device_bucket`.
        candidates: the arguments `sizes` -> the configs among which it is tuned; the first is the untuned default. The
            same function at every call, since tuners are kept by it.
        sizes: what the candidates depend on, such as the dtype; hashable.
        grid: the numbers of programs, or a function of the config's constants that returns them.
        arguments: the kernel's by name, without the config's constants.
        device: that of the tensors.
        config: the one to run, which is not tuned then.

    Raises:
        RuntimeError: a CUDA graph is being captured and no config is chosen yet. A trial synchronises, which would end
            the capture. Any other config would be loaded within the capture, and give other bits than outside it.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        if INTERPRETED:
            config = config or candidates(*sizes)[0]
            kernel[grid](**arguments, **config.all_kwargs())
            return
        is_fixed = torch.are_deterministic_algorithms_enabled()
        chosen = config and tuple(config.all_kwargs().items())
        # more than Triton compiles an argument for: if all of it is equal, the compiled kernel is the same
        tensors = torch.Tensor, Parameter
        told = [(x.dtype, x.data_ptr() % 16) if type(x) in tensors else x for x in arguments.values()]
        # by id: hashing a kernel by its source takes as long as all the rest, and a kernel lives as long as its module
        same = id(kernel), device, is_fixed, chosen, sizes, *arguments, *told
        if (ready := READY.get(same)) is not None:
            compiled, config, places = ready
            size = grid(config.kwargs) if callable(grid) else grid
            values = [*arguments.values(), *config.kwargs.values()]
            _run(compiled, (*size, 1, 1)[:3], [values[place] for place in places])
            return
        require_cache()
        dtypes = (x.dtype for x in arguments.values() if isinstance(x, torch.Tensor))
        key = kernel, device, sizes, *dtypes, *map(arguments.get, TUNING_KEYS)
        config = config or (candidates(*sizes)[0] if is_fixed else CHOSEN.get(key))
        if config is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{kernel.__name__}: run it once at these sizes before a CUDA graph is captured")
            tuner = tuned(kernel, candidates, *sizes)
            tuner[grid](**arguments | {"bucket": device_bucket(arguments["bucket"], device)})
            CHOSEN[key] = tuner.best_config
            return
        if len(READY) >= MOST_READY:
            READY.clear()
        # all options of the config, as the tuner passes them: with others Triton would load another kernel
        compiled, names = kernel[grid](**arguments, **config.all_kwargs()), [*arguments, *config.kwargs]
        READY[same] = compiled, config, [names.index(name) for name in kernel.arg_names]


def _run(compiled: Any, size: tuple[int, int, int], values: Sequence[object]) -> None:
    """Run `compiled[size](*values)`; without launch hooks, skip the code for hooks, which takes half of the time."""
    hooks, driver = triton.knobs.runtime, triton.runtime.driver.active
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a chain of hooks, or a single hook in older versions
            compiled[size](*values)
            return
    stream = driver.get_current_stream(driver.get_current_device())
    compiled.run(*size, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def device_bucket(bucket: int, device: torch.device) -> int:
    """Return a tuning key's bucket, below 65,536, combined with a hash of this kind of GPU.

    Thus two kinds of GPU of one architecture do not share a choice on disk. The result has 31 bits: to Triton a larger
    integer has another type, for which a trial would compile kernels that no other launch takes.
    """
    gpu = find_gpu(device)
    kind = zlib.crc32(f"{gpu.name}, {gpu.multi_processor_count}".encode()) >> 17 if gpu else 0
    return (kind << 16) + bucket


@functools.cache
def tuned(kernel, candidates: Candidates, *sizes: object):
    """Return the kernel with its candidates for `sizes`, tuned per value of `TUNING_KEYS` and dtypes.

    All candidates run on the same arguments, and the chosen one runs last: its results are kept. The arguments
    `ZEROED` are set to zero before each run. A candidate that does not fit the device's shared memory or registers
    counts as infinitely slow. The choice is kept on disk if `KEEP_CHOICES` is true.
    """
    key, zeroed = ([name for name in names if name in kernel.arg_names] for names in (TUNING_KEYS, ZEROED))
    return triton.autotune(candidates(*sizes), key=key, reset_to_zero=zeroed, cache_results=KEEP_CHOICES)(kernel)
