"""Training many variants of a model, one process each, beside the graph: what is done is not trained again, a stopped call continues."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.errors import Interrupted, RunError
from ..core.runtime import Runtime, choose_device, usable_cores
from ..core.ui import print_table
from .cells import find_finished_seeds, train_cell
from .job import Cell
from .throughput import has_throughput, measure_throughput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant of a grid.

    Args:
        cell: how it is trained, and its folder.
        changes: what it changes of the model, for people.
        arguments: of the command line that trains this variant alone.
    """

    cell: Cell
    changes: str
    arguments: tuple[str, ...]

    @property
    def missing(self) -> list[int]:
        """The seeds that are still to be trained."""
        finished = find_finished_seeds(self.cell)
        return [seed for seed in self.cell.params.seeds if seed not in finished]


def train_grid(variants: Mapping[str, Variant], *, jobs: int, speed: bool) -> None:
    """Show the plan, train what is missing, then measure the throughputs one after the other on the quiet machine.

    Args:
        variants: name -> variant, of one stage.
        jobs: how many are trained at once, each in a process of its own.
        speed: whether to measure throughputs.

    Raises:
        UserError: a folder holds a record of other parameters; before anything is trained.
        Interrupted: a signal came; what is finished is kept. RunError: variants failed; the others are done.
    """
    waiting = {name: variant for name, variant in variants.items() if variant.missing}
    _show_plan(variants)
    failed = _train_all(waiting, jobs)
    for name, variant in variants.items():
        if speed and name not in failed:
            _measure(name, variant)
    if failed:
        reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
        stage = next(iter(variants.values())).cell.stage
        raise RunError(f"{stage}: {len(failed)} of {len(variants)} failed, the others are done: {reasons}")


def train_one(name: str, variant: Variant, *, speed: bool) -> None:
    """Train one variant in this process. Raises as `train_cell`."""
    if variant.missing:
        train_cell(dataclasses.replace(variant.cell, runtime=_limit_threads(variant.cell.runtime)))
    if speed:
        _measure(name, variant)


def _measure(name: str, variant: Variant) -> None:
    if not has_throughput(variant.cell):
        rate = measure_throughput(variant.cell)
        print(f"{name}: {'no throughput' if rate is None else f'{rate:.0f} images/s'}", flush=True)


def _show_plan(variants: Mapping[str, Variant]) -> None:
    rows, waiting = [], 0
    for name, variant in variants.items():
        missing = variant.missing
        waiting += len(missing)
        done = "done" if missing or has_throughput(variant.cell) else "measure its speed"
        rows.append([name, variant.changes, f"train seeds {', '.join(map(str, missing))}" if missing else done])
    print_table(["variant", "what it changes", "to do"], rows)
    one = next(iter(variants.values())).cell.params
    shared = f"{len(variants)} variants of {one.model} on {one.data}, {one.epochs} epochs, {len(one.seeds)} seed(s)"
    print(f"{shared}: {waiting} trainings to do", flush=True)


def _train_all(waiting: Mapping[str, Variant], jobs: int) -> dict[str, str]:
    """Train in `jobs` processes at once; variant -> the error of those that failed."""
    from .loop import catch_signals

    queue = list(waiting.items())
    running: dict[int, tuple[str, subprocess.Popen, Path, float]] = {}
    total, finished, failed, told, began = len(queue), 0, {}, False, time.monotonic()
    with catch_signals(twice=True) as received:
        while running or (queue and not received):
            for slot in [slot for slot in range(jobs) if slot not in running and queue and not received]:
                name, variant = queue.pop(0)
                log = variant.cell.paths.logs(variant.cell.stage, variant.cell.name) / "output.txt"
                running[slot] = (name, _start(variant, _find_environment(slot, jobs, variant.cell.runtime), log), log, time.monotonic())
                print(f"{name}: training, output in {log.relative_to(variant.cell.paths.root)}", flush=True)
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
        raise Interrupted(received[0], f"{finished} of {total} variants ended, each with its state kept")
    return failed


def _start(variant: Variant, environment: Mapping[str, str], log: Path) -> subprocess.Popen:
    log.parent.mkdir(parents=True, exist_ok=True)
    command: Sequence[str] = [sys.executable, "-m", "repro", variant.cell.stage, *variant.arguments]
    with open(log, "w", encoding="utf-8") as stream:
        # in a session of its own: a Ctrl-C in the terminal reaches it through this process alone, and once
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


def _limit_threads(runtime: Runtime) -> Runtime:
    """The threads that a process was given limit those of params.yaml, which all processes share."""
    given = os.environ.get("OMP_NUM_THREADS")
    return dataclasses.replace(runtime, threads=min(runtime.threads, int(given))) if runtime.threads and given else runtime
