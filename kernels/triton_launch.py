"""What the operators' Triton files share: which dtypes run, and how a kernel is launched and tuned."""

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
# the arguments that a kernel's choice of a config depends on, of those that it has; a new kernel's own are added here
TUNING_KEYS = "bucket", "D", "CHUNK", "M", "C", "L", "P", "KEEP"

Candidates = Callable[..., list[triton.Config]]


def dtype_obstacle(leading: str, dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> str | None:
    """Why kernels for these dtypes cannot run a leading argument of `dtype`, or None where they can."""
    if dtype not in dtypes:
        return f"{leading} is {dtype}, expected one of {', '.join(map(str, dtypes))}"
    if INTERPRETED and dtype == torch.bfloat16:
        return f"{leading} is torch.bfloat16, which Triton's interpreter does not have; expected torch.float32 or torch.float16"
    return None


def direction_bits(reverse: Sequence[bool]) -> int:
    """A bit for each direction, 1 where it is scanned from the last token."""
    return sum(flag << r for r, flag in enumerate(reverse))


def launch(
    kernel,
    candidates: Candidates,
    sizes: tuple,
    grid: tuple[int] | Callable,
    arguments: dict[str, object],
    device: torch.device,
    config: triton.Config | None,
) -> None:
    """Run `kernel` with `config`; without one, tune it, or take the first candidate where nothing can be tried.

    That is where torch is to be deterministic, and while a CUDA graph is captured: tuning synchronises, which would end
    the capture. `candidates` gives the configs for `sizes`.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        tries = (
            config is None
            and not INTERPRETED
            and not torch.are_deterministic_algorithms_enabled()
            and not is_capturing(device)
        )
        if tries:
            if "bucket" in arguments and device.type == "cuda":
                multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
                arguments = arguments | {"bucket": device_bucket(arguments["bucket"], multiprocessors)}
            tuned(kernel, candidates, *sizes)[grid](**arguments)
            return
        config = config or candidates(*sizes)[0]
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.maxnreg}
        kernel[grid](**arguments, **config.kwargs, **options)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def device_bucket(bucket: int, multiprocessors: int) -> int:
    """A tuning key's bucket for GPUs with so many multiprocessors: two GPUs of one architecture do not share a choice,
    in memory or on disk.
    """
    return (multiprocessors << 16) + bucket


@functools.cache
def tuned(kernel, candidates: Candidates, *sizes: object):
    """The kernel with its candidates for `sizes`, tuned per value of `TUNING_KEYS` and dtypes; the choice is kept on
    disk.

    A candidate that does not fit the device's shared memory or registers counts as infinitely slow.
    """
    key = [name for name in TUNING_KEYS if name in kernel.arg_names]
    return triton.autotune(candidates(*sizes), key=key, cache_results=True)(kernel)
