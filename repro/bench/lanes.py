"""Parallel calls in worker processes ("lanes"); a worker whose GPU context is lost is replaced.

After an illegal memory access in a kernel, every later use of the GPU in the same process fails, so later tasks would
be blamed for it.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ..core.children import leave_with_parent


def run_in_lanes(
    tasks: Iterable[Any],
    call: Callable[[Any], tuple[Any, bool]],
    lanes: int,
    died: Callable[[Any], Any],
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Any, Any]]:
    """Yield (task, result) of each task, in the order of the tasks, from `lanes` worker processes.

    Args:
        call: task -> (result, whether its process must not be used again). It is pickled by name, because workers are
            spawned.
        died: task -> result, called if the worker ended without one.
        is_late: tells whether the time is up; then no further task begins, and those left yield nothing.
    """
    idle: list[ProcessPoolExecutor] = []  # threads need no lock: `pop` and `append` of a list are atomic

    def run(task: Any) -> tuple[Any, Any] | None:
        """Run a task in an idle worker, or in a new one where none is idle; return None if it is too late to begin."""
        if is_late():
            return None
        try:
            executor = idle.pop()
        except IndexError:
            spawn = multiprocessing.get_context("spawn")
            # a worker that outlives this process would go on measuring beside the next call
            executor = ProcessPoolExecutor(1, mp_context=spawn, initializer=leave_with_parent)
            opened.enter_context(executor)
        try:
            result, is_lost = executor.submit(call, task).result()
        except BrokenProcessPool:
            result, is_lost = died(task), True
        if is_lost:
            executor.shutdown()
        else:
            idle.append(executor)
        return task, result

    with contextlib.ExitStack() as opened, ThreadPoolExecutor(lanes) as threads:
        yield from filter(None, threads.map(run, tasks))
