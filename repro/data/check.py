"""Checking a data set before days are spent on it: findings as lines, the sample that is decoded, the processes that decode it."""

import contextlib
import dataclasses
import difflib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import RunError, UserError

HOLDS = {
    "imagenet": "train/<wnid>/ and val/<wnid>/",
    "digits": "train/digit_<0-9>/ and val/digit_<0-9>/",
    "connect": "train/{apart,joined}/ and val/{apart,joined}/",
    "coco": "train2017/, val2017/ and annotations/",
    "ade20k": "ADEChallengeData2016, or is that folder,",
}
_SHOWN = 10
_CHUNK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depth:
    """How many files are decoded, and how. What a directory listing or the annotations say is always checked in full.

    Args:
        full: decode every file.
        sample: otherwise so many images, half of them from each split.
        seed: of the sample.
        workers: processes that decode; 1 decodes in this one.
    """

    full: bool = False
    sample: int = 2000
    seed: int = 0
    workers: int = 1


class Report:
    """The findings of one check; each is a line for `emit` as soon as it is made.

    Args:
        emit: takes one line, `ok|warning|error` first.
    """

    def __init__(self, emit: Callable[[str], None] = print):
        self.emit, self.errors, self.warnings = emit, 0, 0

    def ok(self, text: str) -> None:
        """Something that is as it should be."""
        self.emit(f"ok       {text}")

    def warning(self, where: object, what: str, advice: str) -> None:
        """Something that a run survives."""
        self.warnings += 1
        self.emit(f"warning  {where}: {what}; {advice}")

    def error(self, where: object, what: str, advice: str) -> None:
        """Something that breaks a run, or its numbers."""
        self.errors += 1
        self.emit(f"error    {where}: {what}; {advice}")

    def error_each(self, found: Sequence[tuple[object, str]], advice: str) -> None:
        """One error for each (where, what): the first ten as lines, the rest as their number."""
        for where, what in found[:_SHOWN]:
            self.error(where, what, advice)
        if (rest := len(found) - _SHOWN) > 0:
            self.errors += rest
            self.emit(f"error    ... and {rest:,} more like this")

    def counts(self, where: object, found: int, expected: int, what: str, advice: str) -> bool:
        """Compare a count with the expected one; True where they are equal."""
        if found == expected:
            self.ok(f"{where}: {found:,} {what}")
        else:
            self.error(where, f"{found:,} {what}, {expected:,} expected", advice)
        return found == expected


class Progress:
    """A rich bar on a terminal, else a plain line now and then; both on stderr, since stdout is the report's.

    Args:
        label: what is being done.
        total: how many steps that takes.
    """

    def __init__(self, label: str, total: int):
        self.label, self.total, self.done, self._bar = label, total, 0, None
        self._started = time.monotonic()
        self._next_line = self._started + 2  # what is over by then needs no line

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self.label, total=self.total)
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        """Count one step."""
        self.done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done)
        elif now >= self._next_line:
            self._next_line = now + 10
            rate = self.done / (now - self._started)
            left = (self.total - self.done) / rate
            print(f"{self.label}: {self.done:,} of {self.total:,}, {rate:,.0f}/s, {left:,.0f} s left", file=sys.stderr, flush=True)


def check_root(kind: str, root: Path, depth: Depth, report: Report) -> None:
    """Check the data set of a kind at `root`; what is found goes to the report.

    Raises:
        UserError: an unknown kind, or no such folder. RunError: a decoding process died.
    """
    if kind not in HOLDS:
        close = difflib.get_close_matches(kind, HOLDS, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(HOLDS)}"
        raise UserError(f"kind {kind!r}: not known; {advice}")
    if not root.is_dir():
        problem = "is no folder" if root.exists() else "no such folder"
        raise UserError(f"{root}: {problem}; give the folder that holds {HOLDS[kind]} (docs/data.md)")
    if kind == "coco":
        from .check_dense import check_coco

        check_coco(root, report, depth)
    elif kind == "ade20k":
        from .check_dense import check_ade20k

        check_ade20k(root, report, depth)
    else:
        from .check_tree import check_connect, check_digits, check_imagenet

        {"imagenet": check_imagenet, "digits": check_digits, "connect": check_connect}[kind](root, report, depth)


def choose(sizes: Mapping[str, int], depth: Depth) -> dict[str, list[int]]:
    """For each split the sorted indices to decode: an equal share of the sample, or more where another split has too few.

    Args:
        sizes: split -> number of files in it.
    """
    chosen, left = {}, depth.sample
    for place, split in enumerate(sorted(sizes, key=lambda split: (sizes[split], split))):
        share = sizes[split] if depth.full else min(sizes[split], left // (len(sizes) - place))
        rng = np.random.Generator(np.random.PCG64((depth.seed, place)))
        chosen[split] = np.sort(rng.permutation(sizes[split])[:share]).tolist()
        left -= share
    return {split: chosen[split] for split in sizes}


def of_all(chosen: int, total: int, depth: Depth) -> str:
    """`all 50,000`, or `1,000 of 50,000`, for a finding."""
    return f"all {total:,}" if chosen == total else f"{chosen:,} of {total:,} (a sample, seed {depth.seed}; --full takes all)"


def inspect(function: Callable[[Any], Any], items: Sequence[Any], workers: int, label: str) -> Iterator[Any]:
    """`function` of each item, in order, with progress.

    Args:
        function: of a module, since worker processes run it; it returns what is wrong instead of raising.

    Raises:
        RunError: a worker process died.
    """
    with contextlib.ExitStack() as stack:
        results = map(function, items)
        if workers > 1 and len(items) > _CHUNK:
            pool = ProcessPoolExecutor(workers, initializer=_start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
            # forks all workers before the bar starts a thread, whose locks they could inherit
            results = pool.map(function, items, chunksize=_CHUNK)
        progress = stack.enter_context(Progress(label, len(items)))
        try:
            for result in results:
                progress.advance()
                yield result
        except BrokenProcessPool:
            raise RunError(f"{label}: a process died, mostly for want of memory; lower --workers") from None


def list_folder(folder: Path) -> tuple[dict[str, int], list[str]]:
    """({file name: bytes}, [names of folders]) of a folder, sorted, without hidden entries.

    Raises:
        UserError: it cannot be read.
    """
    files, folders = {}, []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(entry.name)
                else:
                    try:
                        files[entry.name] = entry.stat().st_size
                    except FileNotFoundError:
                        files[entry.name] = 0  # a link that leads nowhere
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}") from None
    return dict(sorted(files.items())), sorted(folders)


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group; the main process ends the pool
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this worker when the main process was killed: it would wait for work for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)
