"""The scheduler of `repro run`: it runs the stages of dvc.yaml, several at once if their inputs are complete."""

import graphlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from .core.children import catch_signals, start_logged
from .core.errors import Interrupted, RunError
from .core.paths import Paths, describe_missing_results
from .core.runtime import RUN_BEGAN, Runtime, choose_device, share_machine, usable_cores
from .graph import find_needs


def run_stages(paths: Paths, table: Mapping[str, Any], runtime: Runtime, *, jobs: int | None, force: bool) -> None:
    """Bring every stage up to date by `dvc repro`, `jobs` of them at once, each with its share of the threads or GPUs.

    Of the stages that can run, the one with the longest chain of dependants starts first. A stage that measures speed
    runs alone, with all threads. If a stage fails, its dependants do not run, and the others do.

    Args:
        table: name -> `stages.Stage`.
        jobs: the number of processes; by default that of GPUs, or of usable cores without a GPU.
        force: whether to run stages that are up to date, too.

    Raises:
        RunError: a stage failed.
        Interrupted: a signal came, and every stage has saved its state and ended.
    """
    if jobs is None:
        jobs = usable_cores()
        if choose_device(runtime.device).type == "cuda":
            import torch

            jobs = torch.cuda.device_count()
    needs = find_needs(paths.root)
    alone = {name for name in needs if getattr(table.get(name.partition("@")[0]), "alone", False)}
    # the report, which is the last stage, computes the time of the whole run from this
    began = {RUN_BEGAN: f"{time.time()} {jobs}"}
    # `needs` has the stages with the longest chain of dependants first, and ready ones start in this order
    graph, order, ready = graphlib.TopologicalSorter(needs), list(needs).index, []
    graph.prepare()
    # number of a share of the machine -> (stage that uses it, its process, its start)
    running: dict[int, tuple[str, subprocess.Popen, float]] = {}
    failed: dict[str, str] = {}
    finished, told = 0, False
    try:
        with catch_signals(twice=True) as received:
            while True:
                ready = sorted([*ready, *graph.get_ready()], key=order)
                while not received and (
                    name := _choose_next(ready, {name for name, *_ in running.values()}, alone, jobs)
                ):
                    ready.remove(name)
                    slot = min({*range(jobs)} - running.keys())
                    share = share_machine(slot, 1 if name in alone else jobs, runtime)
                    running[slot] = name, _start(paths, name, began | share, force=force), time.monotonic()
                if not running:
                    break
                if received and not told:  # only once: a second signal would end a stage before it has saved its state
                    told = True
                    for _, process, _ in running.values():
                        os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.1)
                for slot, (name, process, start) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[slot]
                    finished += 1
                    said = _find_error(paths, name) if process.returncode else "done"
                    if not process.returncode:
                        graph.done(name)  # a failed stage is never done, so its dependants never become ready
                    elif not received:
                        failed[name] = said
                    print(f"[{finished} of {len(needs)}] {name}: {said} ({time.monotonic() - start:.0f} s)", flush=True)
    finally:
        if missing := describe_missing_results(paths.root):
            print(missing, flush=True)
    if received:
        raise Interrupted(received[0], f"{finished} of {len(needs)} ended, each with its state kept")
    if failed:
        said = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise RunError(f"{len(failed)} of {len(needs)} stages failed, and {len(needs) - finished} did not run: {said}")


def _choose_next(ready: Sequence[str], running: Set[str], alone: Set[str], jobs: int) -> str | None:
    """Return the first stage that may start next to the running ones; None if there is none."""
    if len(running) == jobs or running & alone:
        return None
    return next((name for name in ready if not (running and name in alone)), None)


def _start(paths: Paths, name: str, environment: Mapping[str, str], *, force: bool) -> subprocess.Popen:
    """Start DVC for one stage. After a SIGINT, DVC waits for the stage to end; a SIGTERM kills DVC alone."""
    # dvc.yaml calls `repro`, which lies next to this Python even if the virtual environment is not activated
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    command = ("dvc", "--wait-for-lock", "repro", "--single-item", *(["--force"] if force else []), name)
    environment, log = {**environment, "PATH": path}, _log(paths, name)
    print(f"{name}: running, output in {log.relative_to(paths.root)}", flush=True)
    return start_logged("repro.core.children", *command, log=log, environment=environment, folder=paths.root)


def _log(paths: Paths, name: str) -> Path:
    """Return the file of a stage's output."""
    return paths.logs("run", name) / "output.txt"


def _find_error(paths: Paths, name: str) -> str:
    """Return this project's error line from a stage's output, if any, and the output's last line, which is DVC's.

    DVC's line has the exit code, or names the lock file of a dead process that must be removed.
    """
    lines = _log(paths, name).read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    own = [line.removeprefix("repro: ") for line in lines if line.startswith("repro: ")]
    return "; ".join([*own[-1:], lines[-1], f"output in {_log(paths, name).relative_to(paths.root)}"])
