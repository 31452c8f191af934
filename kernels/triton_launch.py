"""What the operators' Triton files share: which dtypes run, and how a kernel is launched and tuned."""

import contextlib
import functools
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch.nn import Parameter

from .dispatch import find_gpu

INTERPRETED = bool(triton.knobs.runtime.interpret)
# the arguments that a kernel's choice of a config depends on, of those that it has; a new kernel's own are added here
TUNING_KEYS = "bucket", "D", "CHUNK", "HIDDEN", "M", "C", "L", "P", "KEEP", "PASS", "CONVOLVE"
# the arguments that a kernel must find full of zeros: it adds to them, or leaves some to other configs, whose programs
# are more; a new kernel's own are added here
ZEROED = ("partial_ptr",)

Candidates = Callable[..., list[triton.Config]]

# what was the fastest in this process, or read from disk
CHOSEN: dict[tuple, triton.Config] = {}
# what is compiled, its config, and the places of its arguments among the given ones and the config's, by all that it is
# compiled for: it spares a host Triton's binder
READY: dict[tuple, tuple[Any, triton.Config, list[int]]] = {}
MOST_READY = 4096  # some ten a layout of images; at more, all are forgotten, and found again
# whether a choice is kept on disk and read from there; not where several processes share a GPU, whose times mean nothing
KEEP_CHOICES = True


@functools.cache
def require_cache() -> None:
    """Give Triton a cache folder of this process, with a warning, where its own cannot be written (a read-only home)."""
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
    """Why kernels for these dtypes cannot run a leading argument of `dtype`, or None where they can."""
    if dtype not in dtypes:
        return f"{leading} is {dtype}, expected one of {', '.join(map(str, dtypes))}"
    if INTERPRETED and dtype == torch.bfloat16:
        return f"{leading} is torch.bfloat16, which Triton's interpreter does not have; expected torch.float32 or torch.float16"
    return None


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's own is made for kernels, and takes a host microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1, likewise."""
    return 1 << (n - 1).bit_length()


def direction_bits(reverse: Sequence[bool]) -> int:
    """A bit for each direction, 1 where it is scanned from the last token."""
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

    They are tried once per value of `TUNING_KEYS`, of which the kernel has `bucket`, per dtypes and kind of GPU. Under
    the interpreter, and where torch is to be deterministic, it is the first one, untried. `grid` may be a function of
    the config's constants.

    Raises:
        RuntimeError: a CUDA graph is being captured and nothing is chosen yet. Trying synchronises, which would end the
            capture; and another config would be loaded inside it, and give other bits than outside.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        if INTERPRETED:
            config = config or candidates(*sizes)[0]
            kernel[grid](**arguments, **config.all_kwargs())
            return
        is_fixed = torch.are_deterministic_algorithms_enabled()
        chosen = config and tuple(config.all_kwargs().items())
        # what Triton compiles an argument for, and more: where all are equal, what is compiled is the same
        tensors = torch.Tensor, Parameter
        told = [(x.dtype, x.data_ptr() % 16) if type(x) in tensors else x for x in arguments.values()]
        # a kernel is hashed by its source, which takes as long as all the rest; it lives as long as its module
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
            if is_capturing(device):
                raise RuntimeError(f"{kernel.__name__}: run it once at these sizes before a CUDA graph is captured")
            tuner = tuned(kernel, candidates, *sizes)
            tuner[grid](**arguments | {"bucket": device_bucket(arguments["bucket"], device)})
            CHOSEN[key] = tuner.best_config
            return
        if len(READY) >= MOST_READY:
            READY.clear()
        # all of its options, as the tuner passes them: others would be another kernel to Triton, to load once more
        compiled, names = kernel[grid](**arguments, **config.all_kwargs()), [*arguments, *config.kwargs]
        READY[same] = compiled, config, [names.index(name) for name in kernel.arg_names]


def _run(compiled: Any, size: tuple[int, int, int], values: Sequence[object]) -> None:
    """As `compiled[size](*values)`, half of whose time goes to the hooks that nobody has added."""
    hooks, driver = triton.knobs.runtime, triton.runtime.driver.active
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a chain of hooks, or in older versions one
            compiled[size](*values)
            return
    stream = driver.get_current_stream(driver.get_current_device())
    compiled.run(*size, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def device_bucket(bucket: int, device: torch.device) -> int:
    """A tuning key's bucket, below 65,536, for this kind of GPU: two of one architecture do not share a choice."""
    gpu = find_gpu(device)
    kind = zlib.crc32(f"{gpu.name}, {gpu.multi_processor_count}".encode()) >> 17 if gpu else 0
    return (kind << 16) + bucket


@functools.cache
def tuned(kernel, candidates: Candidates, *sizes: object):
    """The kernel with its candidates for `sizes`, tuned per value of `TUNING_KEYS` and dtypes; the choice is kept on
    disk where `KEEP_CHOICES` says so.

    All candidates run on the same arguments, and last of all the chosen one, whose results are kept: those `ZEROED` are
    zeros again before each run. A candidate that does not fit the device's shared memory or registers counts as
    infinitely slow.
    """
    key, zeroed = ([name for name in names if name in kernel.arg_names] for names in (TUNING_KEYS, ZEROED))
    return triton.autotune(candidates(*sizes), key=key, reset_to_zero=zeroed, cache_results=KEEP_CHOICES)(kernel)
