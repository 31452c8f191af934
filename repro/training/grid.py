"""Training many variants of a model, one process each, beside the graph: finished ones are not trained again, a stopped call continues."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import Interrupted, RunError
from ..core.record import make_identity, read_json, write_record
from ..core.runtime import Runtime, choose_device, device_label, usable_cores
from ..core.ui import print_table
from ..measure.speed import RowSpec, measure
from .cells import find_finished_seeds, train_cell
from .job import Cell

BATCHES = (64, 32, 16, 8, 4, 2, 1)  # the first is that of Fig. 6 of Vision-TTT
DTYPE = {"cpu": "fp32", "cuda": "fp16"}


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
        runtime, given = variant.cell.runtime, os.environ.get("OMP_NUM_THREADS")
        if runtime.threads and given:  # the threads that a process was given limit those of params.yaml, which all processes share
            runtime = dataclasses.replace(runtime, threads=min(runtime.threads, int(given)))
        train_cell(dataclasses.replace(variant.cell, runtime=runtime))
    if speed:
        _measure(name, variant)


def measure_throughput(cell: Cell) -> float | None:
    """Measure a trained classifier and write speed.json into the cell's folder; images per second, or None with the reason there.

    The batch is 64, or the largest power of two below that for which memory suffices; weights and inputs are fp32 on a CPU and fp16
    on a GPU.

    Raises:
        RunError: the measuring process broke.
    """
    started, params, threads = time.monotonic(), cell.params, cell.runtime.threads
    device, side = choose_device(cell.runtime.device), params.transform.image_size
    of = {"model": params.model, "options": params.options, "image_size": (side, side)}
    on = {"dtype": DTYPE[device.type], "device": device.type, "threads": threads}
    for batch_size in BATCHES:
        try:
            row = measure(RowSpec(**of, **on, batch_size=batch_size))
        except RuntimeError as error:
            raise RunError(f"{cell.where}: {error}") from None
        if row["status"] != "oom":
            break
    shown = {"device": device_label(device, threads), "dtype": on["dtype"]}  # the training may have had fewer threads
    metrics = {name: row[name] for name in ("throughput_img_per_s", "latency_ms", "macs_g", "backend")}
    metrics |= {"batch_size": batch_size, "weights_hash": _hash_weights(cell, "metrics.json"), **shown}
    if row["status"] != "ok":
        metrics |= {f"{name}_reason": row["reason"] for name in ("throughput_img_per_s", "latency_ms")}
    identity = make_identity(cell.paths.root, [f"stages.{cell.stage}"], params, backend=str(row["backend"]), **shown)
    write_record(cell.folder, metrics, identity, time.monotonic() - started, name="speed")
    return row["throughput_img_per_s"]


def _has_throughput(cell: Cell) -> bool:
    """Whether the cell's folder has a speed.json of the weights that lie there."""
    return (cell.folder / "speed.json").is_file() and _hash_weights(cell, "speed.json") == _hash_weights(cell, "metrics.json")


def _hash_weights(cell: Cell, record: str) -> str:
    return read_json(cell.folder / record)["metrics"]["weights_hash"]


def _measure(name: str, variant: Variant) -> None:
    if not _has_throughput(variant.cell):
        rate = measure_throughput(variant.cell)
        print(f"{name}: {'no throughput' if rate is None else f'{rate:.0f} images/s'}", flush=True)


def _show_plan(variants: Mapping[str, Variant]) -> None:
    rows, waiting = [], 0
    for name, variant in variants.items():
        missing = variant.missing
        waiting += len(missing)
        done = "done" if missing or _has_throughput(variant.cell) else "measure its speed"
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
    command = [sys.executable, "-m", "repro", variant.cell.stage, *variant.arguments]
    with open(log, "w", encoding="utf-8") as stream:
        # in its own session: a Ctrl-C in the terminal reaches it once, and only through this process
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
