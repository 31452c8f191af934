"""Run a kind's check: the sample that it decodes, and the processes that decode it."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from ...core.children import leave_with_parent
from ...core.errors import RunError, UserError, did_you_mean
from ...core.runtime import Runtime, choose_workers
from ...core.ui import track
from ..findings import PrintAll, count
from ..kinds import KINDS, load_function

_CHUNK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depth:
    """How many images are decoded, and how. What a directory listing or the annotations say is always checked in full."""

    full: bool = False  # decode every file
    sample: int = 2000  # otherwise the number of images to decode, an equal share of each split
    seed: int = 0  # of the sample
    workers: int = 1  # processes that decode; 1 decodes in this one
    max_pixels: int = Runtime.max_pixels  # of an image


def run_check(kind: str, root: Path, depth: Depth, *, emit: Callable[[str], None] = print) -> None:
    """Check a data set. Nothing is written; `emit` takes the lines.

    Raises:
        UserError: an unknown kind, or no such root.
        RunError: errors were found, or a decoding process died.
    """
    if kind not in KINDS:
        raise UserError(f"kind {kind!r}: unknown{did_you_mean(kind, KINDS)}")
    row, report = KINDS[kind], PrintAll(root, emit)
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "no such folder"
        raise UserError(f"{root}: {problem}; give the folder that holds {row.layout} (docs/data.md)")
    load_function(row.check)(root, report, depth)
    warned = count(report.num_warnings, "warning")
    if report.num_errors:
        errors = count(report.num_errors, "error")
        raise RunError(f"data check {kind}: {errors}, {warned} in {root}; the lines above say what to do")
    emit(f"{kind} at {root}: no errors, {warned}")


def draw_sample(sizes: Mapping[str, int], depth: Depth) -> dict[str, list[int]]:
    """Draw the sorted indices to decode; `sizes` has the number of files of each split.

    Each split gets an equal share of the sample, or more where another has too few.
    """
    chosen, left = {}, depth.sample
    for place, split in enumerate(sorted(sizes, key=lambda split: (sizes[split], split))):
        share = sizes[split] if depth.full else min(sizes[split], left // (len(sizes) - place))
        rng = np.random.Generator(np.random.PCG64((depth.seed, place)))
        chosen[split] = np.sort(rng.permutation(sizes[split])[:share]).tolist()
        left -= share
    return {split: chosen[split] for split in sizes}


def describe_extent(chosen: int, total: int, depth: Depth) -> str:
    """`all 50,000`, or `1,000 of 50,000` and how to check the rest."""
    if chosen == total:
        return f"all {total:,}"
    return f"{chosen:,} of {total:,} (a sample, seed {depth.seed}; --full takes all)"


def run_parallel(function: Callable[[Any], Any], items: Sequence[Any], workers: int, label: str) -> Iterator[Any]:
    """`function` of each item, in order, with progress; raises RunError where a worker process died.

    The function is one of a module, which worker processes can import, and returns what is wrong instead of raising.
    With one worker this process calls it.
    """
    with contextlib.ExitStack() as stack:
        results: Iterator[Any] = map(function, items)
        if workers > 1 and len(items) > _CHUNK and choose_workers(workers):
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
    leave_with_parent()
