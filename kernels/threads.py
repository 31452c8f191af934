"""numba's loops shared among as many threads as PyTorch has."""

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from .cpu_loops import Loop


def run_loop(loop: "Loop", tasks: int, *arguments: Any, constants: tuple[tuple[Any, ...], ...] = ()) -> None:
    """Do a loop's tasks on as many threads as PyTorch has; tensors go as arrays, and tuples as what they hold."""
    import numba  # imports before torch would bring a second OpenMP

    arrays = [each for argument in arguments for each in (argument if isinstance(argument, tuple) else (argument,))]
    arrays = [each.detach().numpy() if isinstance(each, torch.Tensor) else each for each in arrays]
    threads = min(torch.get_num_threads(), tasks, numba.config.NUMBA_NUM_THREADS)
    if threads < 2 or _start_threads() != os.getpid():
        loop.alone(0, tasks, *constants, *arrays)
        return
    numba.set_num_threads(threads)
    loop.share(threads, tasks, constants, arrays)


def lay_flat(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What loops take of rows that lie apart, such as slices of longer ones: all numbers from the first to the last, in
    memory's order, and the strides of all axes but the last.

    A tensor whose last axis is no contiguous row is copied.
    """
    x = x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((numbers,), (1,)).numpy(), np.array(x.stride()[:-1])


def split(scans: int, channels: int, block: int) -> tuple[int, int]:
    """(tasks, channels of each): all channels, or a multiple of `block` where tasks would be fewer than threads."""
    blocks = -(-channels // block)
    span = -(-blocks // min(blocks, -(-torch.get_num_threads() // scans))) * block
    return scans * -(-channels // span), span


@functools.cache
def _start_threads() -> int:
    """Start OpenMP's threads for numba; return the process that has them, or 0 where numba finds no OpenMP.

    A child that is forked afterwards must not use them: GNU's OpenMP would end it. numba's own threads serve one caller
    at a time, and end a process that calls twice at once.
    """
    import numba

    if numba.config.THREADING_LAYER == "default":
        numba.config.THREADING_LAYER = "omp"
    before = torch.get_num_threads()
    try:
        numba.set_num_threads(1)
    except ValueError:
        return 0
    torch.set_num_threads(before)  # numba sets OpenMP's number to that of the processors
    return os.getpid() if numba.threading_layer() in ("omp", "tbb") else 0
