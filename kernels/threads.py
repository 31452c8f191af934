"""Calls of numba's loops from PyTorch: tensors as arrays, and as many threads as PyTorch has."""

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from .cpu_loops import Loop


def run_loop(loop: "Loop", tasks: int, *arguments: Any, constants: tuple[tuple[Any, ...], ...] = ()) -> None:
    """Run a loop's tasks on as many threads as PyTorch has.

    Tensors are passed as arrays, and the values of a tuple as separate arguments.

    Args:
        loop: the loop.
        tasks: the number of its tasks.
        arguments: its arguments after the constants; one that is left out is a tensor without elements that has all its
            axes, see `cpu_loops.Loop.share`.
        constants: its tuples whose lengths the compiler knows, see `cpu_loops.Loop`.
    """
    import numba  # not at the top: if numba is imported before torch, it loads a second OpenMP

    arrays = [each for argument in arguments for each in (argument if isinstance(argument, tuple) else (argument,))]
    arrays = [each.detach().numpy() if isinstance(each, torch.Tensor) else each for each in arrays]
    threads = min(torch.get_num_threads(), tasks, numba.config.NUMBA_NUM_THREADS)
    if threads < 2 or _start_threads() != os.getpid():
        loop.alone(0, tasks, *constants, *arrays)
        return
    numba.set_num_threads(threads)
    loop.share(threads, tasks, constants, arrays)


def lay_flat(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return a tensor as a flat array, and the strides of all axes except the last, as the loops take them.

    The array has all elements from the tensor's first to its last in memory order. Rows may be slices of longer rows,
    and are not copied. A tensor whose last axis is not contiguous is copied.
    """
    x = x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((numbers,), (1,)).numpy(), np.array(x.stride()[:-1])


def split(scans: int, channels: int, block: int) -> tuple[int, int]:
    """Return (tasks, channels per task) for a number of scans, each of one image, or one image and route.

    A task has all channels, or fewer if there would be fewer tasks than threads, in a multiple of `block`.
    """
    blocks = -(-channels // block)
    span = -(-blocks // min(blocks, -(-torch.get_num_threads() // scans))) * block
    return scans * -(-channels // span), span


@functools.cache
def _start_threads() -> int:
    """Start OpenMP's threads for numba; return the id of this process, or 0 where numba finds no OpenMP.

    A child that is forked later must not use these threads: GNU's OpenMP would end it. numba's own thread pool is no
    alternative, since it serves one caller at a time and ends a process that calls twice at once.
    """
    import numba

    if numba.config.THREADING_LAYER == "default":
        numba.config.THREADING_LAYER = "omp"
    before = torch.get_num_threads()
    try:
        numba.set_num_threads(1)
    except ValueError:
        return 0
    torch.set_num_threads(before)  # numba has set OpenMP's number of threads to the number of processors
    return os.getpid() if numba.threading_layer() in ("omp", "tbb") else 0
