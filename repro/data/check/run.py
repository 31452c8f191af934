"""Frame of a kind's check: the sample of images to decode, and the processes that decode it."""

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
from ..findings import PrintAll, Reporter, count
from ..kinds import KINDS, Kind, load_function

# format of a part -> its check, called with (folder, kind, report, depth)
_CHECKS = {"folders": "folders.check_tree", "coco": "dense.check_coco", "ade20k": "dense.check_ade20k"}
_CHUNK = 16  # files that a decoding process takes at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depth:
    """The number of images to decode, and how. Directory listings and annotations are always checked in full."""

    full: bool = False  # decode every file
    sample: int = 2000  # otherwise the number of images to decode, an equal share of each split
    seed: int = 0  # seed of the sample
    workers: int = 1  # processes that decode; 1 decodes in the calling process
    max_pixels: int = Runtime.max_pixels  # largest image that is decoded


def run_check(kind: str, root: Path, depth: Depth, *, emit: Callable[[str], None] = print) -> None:
    """Check a data set and pass each line of the report to `emit`. Nothing is written.

    Raises:
        UserError: the kind is unknown, or the root does not exist.
        RunError: errors were found, or a decoding process died.
    """
    if kind not in KINDS:
        raise UserError(f"kind {kind!r}: unknown{did_you_mean(kind, KINDS)}")
    row, report = KINDS[kind], PrintAll(root, emit)
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "no such folder"
        raise UserError(f"{root}: {problem}; give the folder that holds {row.layout} (docs/data.md)")
    check_parts(row, root, report, depth)
    warned = count(report.num_warnings, "warning")
    if report.num_errors:
        errors = count(report.num_errors, "error")
        raise RunError(f"data check {kind}: {errors}, {warned} in {root}; the lines above say what to do")
    emit(f"{kind} at {root}: no errors, {warned}")


def check_parts(row: Kind, root: Path, report: Reporter, depth: Depth) -> None:
    """Check a data set of a kind, part by part; raises as `folders.check_tree`."""
    for part, prefix in row.parts.items():
        load_function(f"check.{_CHECKS[part]}")(root / prefix, row, report, depth)


def draw_sample(sizes: Mapping[str, int], depth: Depth) -> dict[str, list[int]]:
    """Draw the sorted indices of the files to decode in each split, given the number of files of each.

    Each split gets an equal share of the sample, and the larger ones the shares that smaller ones cannot fill.
    """
    chosen, left = {}, depth.sample
    # from the smallest split up, so that what it leaves unused goes to the larger ones
    for place, split in enumerate(sorted(sizes, key=lambda split: (sizes[split], split))):
        share = sizes[split] if depth.full else min(sizes[split], left // (len(sizes) - place))
        rng = np.random.Generator(np.random.PCG64((depth.seed, place)))
        chosen[split] = np.sort(rng.permutation(sizes[split])[:share]).tolist()
        left -= share
    return {split: chosen[split] for split in sizes}


def describe_extent(chosen: int, total: int, depth: Depth) -> str:
    """Return `all 50,000`, or `1,000 of 50,000` with a hint at --full."""
    if chosen == total:
        return f"all {total:,}"
    return f"{chosen:,} of {total:,} (a sample, seed {depth.seed}; --full takes all)"


def run_parallel(function: Callable[[Any], Any], items: Sequence[Any], workers: int) -> Iterator[Any]:
    """Yield `function(item)` for each item, in order, with a progress bar; raises RunError if a worker process died.

    `function` decodes files. It must be importable by worker processes, and must return a fault instead of raising it.
    With one worker it runs in the calling process.
    """
    with contextlib.ExitStack() as stack:
        results: Iterator[Any] = map(function, items)
        if workers > 1 and len(items) > _CHUNK and choose_workers(workers):
            pool = ProcessPoolExecutor(workers, initializer=_start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
            # fork all workers before the bar starts its thread: a forked child would inherit that thread's locks in any
            # state
            results = pool.map(function, items, chunksize=_CHUNK)
        try:
            yield from track(results, "decoding", len(items))
        except BrokenProcessPool:
            raise RunError("decoding: a process died, most likely for lack of memory; lower --workers") from None


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group; the main process ends the pool
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_with_parent()
