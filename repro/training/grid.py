"""Training many variants of a model, one process each, beside the graph: finished ones are not trained again, a stopped
call continues.
"""

import dataclasses
import time
from collections.abc import Mapping

from ..core.errors import RunError
from ..core.noise import find_noise
from ..core.record import make_identity, read_record, write_record
from ..core.runtime import choose_device, device_label
from ..core.ui import print_table
from ..measure.speed import RowSpec, measure
from .cells import find_finished_seeds, remove_states, train_cell
from .job import Cell
from .pool import Work, run_all

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
    for name in variants.keys() - waiting.keys():
        remove_states(variants[name].cell, variants[name].cell.params.seeds)
    works = {name: _make_work(variant) for name, variant in waiting.items()}
    one = next(iter(variants.values())).cell
    failed = run_all(works, jobs, one.runtime, one.paths.root)
    for name, variant in variants.items():
        if speed and name not in failed:
            _measure(name, variant)
    if failed:
        reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
        raise RunError(f"{one.stage}: {len(failed)} of {len(variants)} failed, the others are done: {reasons}")


def train_one(name: str, variant: Variant, *, speed: bool) -> None:
    """Train one variant in this process. Raises as `train_cell`."""
    if variant.missing:
        train_cell(variant.cell)
    if speed:
        _measure(name, variant)


def measure_throughput(cell: Cell) -> float | None:
    """Measure a trained classifier and write speed.json into the cell's folder; images per second, or None with the
    reason there.

    The batch is 64, or the largest power of two below that for which memory suffices; weights and inputs are fp32 on a
    CPU and fp16 on a GPU. `noisy` has the reasons of `core.noise.find_noise`.

    Raises:
        RunError: the measuring process broke.
    """
    from ..models.registry import family_module

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
    metrics |= {
        "batch_size": batch_size,
        "noisy": find_noise(row),
        "weights_hash": _hash_weights(cell, "metrics.json"),
        **shown,
    }
    if row["status"] != "ok":
        metrics |= {f"{name}_reason": row["reason"] for name in ("throughput_img_per_s", "latency_ms")}
    code = [f"stages.{cell.stage}", "repro.measure.speed", family_module(params.model)]
    identity = make_identity(cell.paths.root, code, params, backend=str(row["backend"]), **shown)
    write_record(cell.folder, metrics, identity, time.monotonic() - started, name="speed")
    return row["throughput_img_per_s"]


def _make_work(variant: Variant) -> Work:
    cell = variant.cell
    return Work(arguments=(cell.stage, *variant.arguments), log=cell.paths.logs(cell.stage, cell.name) / "output.txt")


def _has_throughput(cell: Cell) -> bool:
    """Whether the cell's folder has a speed.json of the weights that lie there."""
    return (cell.folder / "speed.json").is_file() and _hash_weights(cell, "speed.json") == _hash_weights(
        cell, "metrics.json"
    )


def _hash_weights(cell: Cell, record: str) -> str:
    return read_record(cell.folder / record)["metrics"]["weights_hash"]


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
    every = [variant.cell.params for variant in variants.values()]
    one, models = every[0], ", ".join(dict.fromkeys(params.model for params in every))
    lengths = " or ".join(str(count) for count in dict.fromkeys(params.epochs for params in every))
    shared = f"{len(variants)} variants of {models} on {one.data}, {lengths} epochs, {len(one.seeds)} seed(s)"
    print(f"{shared}: {waiting} trainings to do", flush=True)
