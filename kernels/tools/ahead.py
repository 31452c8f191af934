"""Compiles kernels in parallel processes before they are needed.

The checks of TTT-Linear alone compile some fifty kernels; one after the other that takes minutes, of which a GPU sees nothing. Triton
keeps what it compiles on disk, so that other processes can do it. Each calls an operator as a check or the bench will, with launches
replaced by compilations; it needs the GPU, whose architecture the binaries are for, but runs nothing on it.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait

import torch

from ..triton_launch import compiling_only
from . import check
from .bench import BOTH_PASSES, FORWARD
from .cases import DTYPES, Cases, Sizes

MOST_PROCESSES = 8  # each has a CUDA context of some 400 MiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A call whose kernels are compiled: in every config that tuning would try, or in the default one."""

    operator: str
    sizes: Sizes
    dtype: str
    passes: str
    every_config: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How many of the tasks are done, by how many processes, in how many seconds; what went wrong, a line each."""

    tasks: int
    done: int
    processes: int
    seconds: float
    problems: list[str]


def compile_ahead(chosen: Iterable[Cases], seconds: float) -> Outcome:
    """Compile what the checks and the bench of these operators need, for at most so many seconds.

    Whatever goes wrong is reported and costs nothing else: what is not compiled now is compiled when it is needed.
    """
    started = time.monotonic()
    tasks = [task for cases in chosen for task in plan(cases)]
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(tasks))
    executor = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    futures = [executor.submit(compile_task, task) for task in tasks]
    done, _ = wait(futures, timeout=None if seconds == float("inf") else max(0.0, seconds))
    executor.shutdown(wait=True, cancel_futures=True)
    problems = [problem for future in done for problem in _read_problem(future)]
    taken = time.monotonic() - started
    return Outcome(tasks=len(tasks), done=len(done) - len(problems), processes=processes, seconds=taken, problems=problems)


def plan(cases: Cases) -> Iterator[Task]:
    """The calls of one operator that need kernels of their own, the longest compilations first."""
    found: dict[Task, None] = {}
    for dtype in ("fp32", "bf16", "fp16"):
        for passes in (BOTH_PASSES, FORWARD):
            timed = [sizes for sizes in _one_of_each_kind(cases) if dtype == "bf16"]
            for sizes in (cases.TYPICAL, *timed):
                found[Task(operator=cases.NAME, sizes=sizes, dtype=dtype, passes=passes, every_config=True)] = None
        for _, sizes in cases.variants():
            found[Task(operator=cases.NAME, sizes=sizes, dtype=dtype, passes=BOTH_PASSES, every_config=False)] = None
    yield from found


def compile_task(task: Task) -> None:
    """Call the operator with launches replaced by compilations."""
    from .operators import OPERATORS

    cases = OPERATORS[task.operator]
    inputs = check.cast(cases, cases.draw(0, task.sizes, "cuda"), DTYPES[task.dtype])
    with compiling_only(), contextlib.nullcontext() if task.every_config else check.poisoned_memory():
        if task.passes == BOTH_PASSES:
            check.differentiate(cases, inputs, task.sizes, "triton")
            return
        with torch.inference_mode():
            cases.bind(task.sizes)(*inputs[:-1], backend="triton")


def _one_of_each_kind(cases: Cases) -> list[Sizes]:
    """Of the sizes that are timed one sample of the shortest of each kind: the number of tokens and of samples compiles nothing new."""
    kinds: dict[tuple, Sizes] = {}
    for sizes in sorted(cases.shapes(), key=lambda sizes: sizes.tokens):
        kind = tuple((name, value) for name, value in vars(sizes).items() if name not in ("batch", "tokens"))
        kinds.setdefault(kind, dataclasses.replace(sizes, batch=1))
    return list(kinds.values())


def _read_problem(future) -> list[str]:
    error = future.exception()
    return [check.failure(error)["reason"]] if error else []
