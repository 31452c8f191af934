"""Calls in processes of their own, side by side, each process replaced where its GPU is lost.

An illegal address in a kernel ends every later use of the GPU in its process: later work would be blamed.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any


def run_in_lanes(
    tasks: Iterable[Any],
    call: Callable[[Any], tuple[Any, bool]],
    lanes: int,
    died: Callable[[Any], Any],
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Any, Any]]:
    """Yield (task, result) of each task, in the order of the tasks, from `lanes` processes.

    `call`: task -> its result, and whether its process must not be used again; it is found by its name in the new
    processes. `died`: task -> its result where the process ended. Once `is_late` no further task is begun.
    """
    idle: list[ProcessPoolExecutor] = []

    def run(task: Any) -> tuple[Any, Any] | None:
        if is_late():
            return None
        try:
            executor = idle.pop()
        except IndexError:
            executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
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
