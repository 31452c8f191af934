"""Running commands of this project in several processes at once, each with its share of the machine and a log of its own."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import Interrupted
from ..core.runtime import Runtime, choose_device, usable_cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A process that is to run.

    Args:
        arguments: of the command line, from the verb on.
        log: takes what it prints.
    """

    arguments: tuple[str, ...]
    log: Path


def run_all(waiting: Mapping[str, Work], jobs: int, runtime: Runtime, root: Path) -> dict[str, str]:
    """Run everything that waits, `jobs` processes at once, and print what becomes of each; name -> the error of those that failed.

    Raises:
        Interrupted: a signal came; it was passed on, and each process has ended.
    """
    from .loop import catch_signals

    queue = list(waiting.items())
    running: dict[int, tuple[str, subprocess.Popen, Path, float]] = {}
    total, finished, failed, told, began = len(queue), 0, {}, False, time.monotonic()
    with catch_signals(twice=True) as received:
        while running or (queue and not received):
            for slot in [slot for slot in range(jobs) if slot not in running and queue and not received]:
                name, work = queue.pop(0)
                running[slot] = (name, _start(work, _find_environment(slot, jobs, runtime)), work.log, time.monotonic())
                print(f"{name}: training, output in {work.log.relative_to(root)}", flush=True)
            if received and not told:  # once: a second signal ends a process without its state saved
                told = True
                for _, process, _, _ in running.values():
                    process.send_signal(signal.SIGTERM)
            time.sleep(1.0 if received else 0.1)
            for slot, (name, process, log, started) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[slot]
                finished += 1
                last = _find_last_line(log)
                if process.returncode and not received:
                    failed[name] = last
                left = (time.monotonic() - began) / finished * (total - finished) / 60
                print(f"[{finished} of {total}, about {left:.0f} min left] {last} ({time.monotonic() - started:.0f} s)", flush=True)
    if received:
        raise Interrupted(received[0], f"{finished} of {total} ended, each with its state kept")
    return failed


def limit_threads(runtime: Runtime) -> Runtime:
    """The settings of a process of `run_all`: the threads that it was given limit those of params.yaml, which all processes share."""
    given = os.environ.get("OMP_NUM_THREADS")
    if runtime.threads and given:
        return dataclasses.replace(runtime, threads=min(runtime.threads, int(given)))
    return runtime


def _start(work: Work, environment: Mapping[str, str]) -> subprocess.Popen:
    work.log.parent.mkdir(parents=True, exist_ok=True)
    with open(work.log, "w", encoding="utf-8") as stream:
        # in its own session: a Ctrl-C in the terminal reaches it once, and only through this process
        command = [sys.executable, "-m", "repro", *work.arguments]
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def _find_last_line(log: Path) -> str:
    """The error in a log, which may stand before what the process still wrote when it ended, else the last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    return next((line for line in reversed(lines) if line.startswith("repro: ")), lines[-1]).removeprefix("repro: ")


def _find_environment(slot: int, jobs: int, runtime: Runtime) -> dict[str, str]:
    """The environment of a process: its GPU, or its share of the threads."""
    if choose_device(runtime.device).type == "cuda":
        import torch

        gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")
        return os.environ | {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
    threads = runtime.threads or int(os.environ.get("OMP_NUM_THREADS") or usable_cores())
    return os.environ | {"OMP_NUM_THREADS": str(max(1, threads // jobs))}
