"""Calls in processes of their own, side by side, each process replaced where its GPU is lost.

An illegal address in a kernel ends every later use of the GPU in its process: what comes after would be blamed.
"""

import multiprocessing
import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

Answer = tuple[Any, bool]  # what a call returns: its result, and whether its process must not be used again


def run_in_lanes(
    tasks: Iterable[Hashable],
    call: Callable[[Any], Answer],
    lanes: int,
    died: Callable[[Any], Any],
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Hashable, Any]]:
    """Yield (task, result) of each task, in the order of the tasks, from so many processes.

    `call` is found by its name in the new processes. `died`: task -> its result where the process ended. Once `is_late`
    no further task is begun.
    """
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    done: queue.SimpleQueue = queue.SimpleQueue()
    for number, task in enumerate(tasks):
        waiting.put((number, task))

    def run_lane() -> None:
        executor = None
        try:
            while not is_late():
                number, task = waiting.get_nowait()
                executor = executor or ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
                try:
                    result, is_lost = executor.submit(call, task).result()
                except BrokenProcessPool:
                    result, is_lost = died(task), True
                done.put((number, task, result))
                if is_lost:
                    executor.shutdown()
                    executor = None
        except queue.Empty:
            pass
        finally:
            if executor:
                executor.shutdown()
            done.put(None)

    threads = [threading.Thread(target=run_lane, daemon=True) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    left, early, coming = lanes, {}, 0
    while left:
        if (answer := done.get()) is None:
            left -= 1
            continue
        number, *answer = answer
        early[number] = tuple(answer)
        while coming in early:
            yield early.pop(coming)
            coming += 1
