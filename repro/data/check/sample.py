"""The sample of images that a check decodes, and the processes that decode it."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from ...core.errors import RunError
from ...core.ui import track

_CHUNK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depth:
    """How many images are decoded, and how. What a directory listing or the annotations say is always checked in full.

    Args:
        full: whether to decode every file.
        sample: otherwise the number of images to decode, half of them from each split.
        seed: seed of the sample.
        workers: processes that decode; 1 decodes in this one.
    """

    full: bool = False
    sample: int = 2000
    seed: int = 0
    workers: int = 1


def draw_sample(sizes: Mapping[str, int], depth: Depth) -> dict[str, list[int]]:
    """For each split the sorted indices to decode: an equal share of the sample, or more where another split has too few.

    Args:
        sizes: split -> number of its files.
        depth: size and seed of the sample.
    """
    chosen, left = {}, depth.sample
    for place, split in enumerate(sorted(sizes, key=lambda split: (sizes[split], split))):
        share = sizes[split] if depth.full else min(sizes[split], left // (len(sizes) - place))
        rng = np.random.Generator(np.random.PCG64((depth.seed, place)))
        chosen[split] = np.sort(rng.permutation(sizes[split])[:share]).tolist()
        left -= share
    return {split: chosen[split] for split in sizes}


def describe_sample(chosen: int, total: int, depth: Depth) -> str:
    """`all 50,000`, or `1,000 of 50,000` and how to check the rest."""
    return f"all {total:,}" if chosen == total else f"{chosen:,} of {total:,} (a sample, seed {depth.seed}; --full takes all)"


def run_parallel(function: Callable[[Any], Any], items: Sequence[Any], workers: int, label: str) -> Iterator[Any]:
    """`function` of each item, in order, with progress.

    Args:
        function: a function of a module, which worker processes can import; it returns what is wrong instead of raising.
        items: its arguments.
        workers: processes; 1 calls the function in this one.
        label: what is being done, for the progress.

    Raises:
        RunError: a worker process died.
    """
    with contextlib.ExitStack() as stack:
        results: Iterator[Any] = map(function, items)
        if workers > 1 and len(items) > _CHUNK:
            pool = ProcessPoolExecutor(workers, initializer=_start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
            # this forks all workers before the bar starts a thread, whose locks they could inherit
            results = pool.map(function, items, chunksize=_CHUNK)
        try:
            yield from track(results, label, len(items))
        except BrokenProcessPool:
            raise RunError(f"{label}: a process died, most likely for lack of memory; lower --workers") from None


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group; the main process ends the pool
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this worker when the main process was killed; otherwise it would wait for work for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)
