"""Running commands in several processes at once, each with its share of the machine and a log of its own."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from ..core.children import PARENT, describe_death
from ..core.errors import Interrupted
from ..core.runtime import Runtime, choose_device, find_given_threads, usable_cores

# the lines with which DVC ends: of a command that failed, with its exit code, and of one that did not
_OF_DVC = re.compile(
    r"^(?:ERROR: .*, exited with (-?\d+)|WARNING: '.*' is empty\.|Use `dvc push` .*|Data and pipelines are up to date\.)$",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A process that is to run.

    Args:
        arguments: of the command line, behind the name of the module.
        log: takes what it prints.
        module: what Python runs. One of others is asked to end by a SIGINT to all its processes, as by a Ctrl-C, and
            not by a SIGTERM.
        after: the names of others that must have succeeded before it starts; those that nobody runs count as done.
        alone: whether nothing else may run meanwhile; it then has all threads.
        environment: variables that it has besides those of this process.
    """

    arguments: tuple[str, ...]
    log: Path
    module: str = "repro"
    after: tuple[str, ...] = ()
    alone: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def run_all(
    waiting: Mapping[str, Work], jobs: int, runtime: Runtime, root: Path, *, alike: bool = True
) -> dict[str, str]:
    """Run everything that waits, `jobs` processes at once, and print what becomes of each; name -> the error of those
    that failed.

    They start in the order of `waiting`, as far as what they need is done. What needs a failed one fails without having
    run. Where they take about the same time (`alike`), it is said how long the rest will take.

    Raises:
        Interrupted: a signal came; it was passed on, and each process has ended.
    """
    from ..training.loop import catch_signals

    queue = dict(waiting)
    running: dict[int, tuple[str, subprocess.Popen, float]] = {}
    total, finished, failed, told, began = len(queue), 0, {}, False, time.monotonic()
    with catch_signals(twice=True) as received:
        while running or (queue and not received):
            for slot in [slot for slot in range(jobs) if slot not in running and not received]:
                names = {name for name, _, _ in running.values()}
                if (name := _choose_next(queue, [waiting[each] for each in names], names | set(queue))) is None:
                    break
                work = queue.pop(name)
                environment = os.environ | work.environment | _share_machine(slot, 1 if work.alone else jobs, runtime)
                running[slot] = (name, _start(work, environment, root), time.monotonic())
                print(f"{name}: running, output in {work.log.relative_to(root)}", flush=True)
            if received and not told:  # once: a second signal ends a process without its state saved
                told = True
                for name, process, _ in running.values():
                    if waiting[name].module == "repro":
                        process.send_signal(signal.SIGTERM)
                    else:
                        os.killpg(process.pid, signal.SIGINT)
            time.sleep(1.0 if received else 0.1)
            for slot, (name, process, started) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[slot]
                finished += 1
                last = _find_outcome(waiting[name], process.returncode, root)
                if process.returncode and not received:
                    failed[name] = last
                    for other in _list_dependants(name, queue):
                        del queue[other]
                        failed[other] = f"not run, since {name} failed"
                        finished += 1
                left = (time.monotonic() - began) / finished * (total - finished) / 60
                ahead = f", about {left:.0f} min left" if alike else ""
                said = last if name.rpartition("@")[2] in last else f"{name}: {last}"
                print(f"[{finished} of {total}{ahead}] {said} ({time.monotonic() - started:.0f} s)", flush=True)
    if received:
        raise Interrupted(received[0], f"{finished} of {total} ended, each with its state kept")
    return failed


def _choose_next(queue: Mapping[str, Work], busy: Sequence[Work], open_names: Set[str]) -> str | None:
    """The first that waits for nothing; None if there is none, or what runs must run alone."""
    if any(work.alone for work in busy):
        return None
    ready = (name for name, work in queue.items() if not open_names & set(work.after) and not (work.alone and busy))
    return next(ready, None)


def _list_dependants(name: str, queue: Mapping[str, Work]) -> list[str]:
    """Those in the queue that need `name`, or one that needs it."""
    found = {name}
    while added := {other for other, work in queue.items() if other not in found and found & set(work.after)}:
        found |= added
    return [other for other in queue if other in found]


def _start(work: Work, environment: Mapping[str, str], root: Path) -> subprocess.Popen:
    work.log.parent.mkdir(parents=True, exist_ok=True)
    with open(work.log, "w", encoding="utf-8") as stream:
        # in its own session: a Ctrl-C in the terminal reaches it once, and only through this process
        # and if this process is killed, it ends too
        module = ["repro"] if work.module == "repro" else ["repro.core.children", work.module]
        command = [sys.executable, "-m", *module, *work.arguments]
        environment = {**environment, PARENT: str(os.getpid())}
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, cwd=root, env=environment, start_new_session=True
        )


def _find_outcome(work: Work, code: int, root: Path) -> str:
    """Which signal killed it; else the error in its log, which may come before what it still wrote when it ended; else
    the last line.
    """
    said = work.log.read_text(encoding="utf-8", errors="replace").strip()
    if work.module == "dvc":  # what it says itself hides the command's last line, but has the command's exit code
        code = next((int(given) for given in reversed(_OF_DVC.findall(said)) if given), code)
        said = _OF_DVC.sub("", said).strip()
    if death := describe_death(code):
        return f"{death}; output in {work.log.relative_to(root)}"
    lines = said.splitlines() or ["no output" if code else "done"]
    return next((line for line in reversed(lines) if line.startswith("repro: ")), lines[-1]).removeprefix("repro: ")


def _share_machine(slot: int, jobs: int, runtime: Runtime) -> dict[str, str]:
    """The variables that give a process its GPU, or its share of the threads."""
    if choose_device(runtime.device).type == "cuda":
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
    threads = runtime.threads or find_given_threads() or usable_cores()
    return {"OMP_NUM_THREADS": str(max(1, threads // jobs))}
