"""Loops that hold no lock of Python's, shared among as many threads as PyTorch has."""

import concurrent.futures
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def run(loop: Callable, tasks: int, *arguments: Any) -> None:
    """Call `loop(first, last, *arguments)` for ranges that cover the tasks, on as many threads as PyTorch has; tensors
    go as arrays.
    """
    arrays = [each.detach().numpy() if isinstance(each, torch.Tensor) else each for each in arguments]
    threads = min(torch.get_num_threads(), tasks)
    if threads == 1:
        loop(0, tasks, *arrays)
        return
    parts = min(tasks, 4 * threads)  # several for each, since a thread may be held up by others
    ends = [tasks * i // parts for i in range(parts + 1)]
    pool = _pool(threads, os.getpid())
    for done in [pool.submit(loop, first, last, *arrays) for first, last in itertools.pairwise(ends)]:
        done.result()


def lay_flat(x: torch.Tensor) -> tuple[np.ndarray, tuple[int, ...]]:
    """What loops take of rows that lie apart, such as slices of longer ones: all numbers from the first to the last, in
    memory's order, and the strides of all axes but the last.

    A tensor whose last axis is no contiguous row is copied.
    """
    x = x.detach() if x.stride(-1) == 1 else x.detach().contiguous()
    numbers = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((numbers,), (1,)).numpy(), x.stride()[:-1]


def split(scans: int, channels: int, block: int) -> tuple[int, int]:
    """(tasks, channels of each) for so many scans of channels: all, or a multiple of `block` where there would be fewer
    tasks than threads.
    """
    blocks = -(-channels // block)
    span = -(-blocks // min(blocks, -(-torch.get_num_threads() // scans))) * block
    return scans * -(-channels // span), span


@functools.cache
def _pool(threads: int, process: int) -> concurrent.futures.ThreadPoolExecutor:
    """The threads of a process: a forked one does not have its parent's."""
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="scan")
