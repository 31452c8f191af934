"""What the training stages share: which cells run on how many processes, how a stopped one is continued, and what is kept of it."""

import dataclasses
import functools
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from repro.core.config import load_section, params_hash, section_keys
from repro.core.errors import UserError
from repro.core.hashing import hash_files
from repro.core.paths import Paths, find_root
from repro.core.ranks import Ranks, joined, launch
from repro.core.record import read_json, write_json
from repro.core.runtime import Runtime, choose_device, load_runtime
from repro.engine.params import LoopParams

CellOption = Annotated[str | None, typer.Option(help="One cell of the section in params.yaml; all of them without it.")]
GpusOption = Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU, started by torchrun.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A cell that is ready to train.

    Args:
        stage, cell: the results are theirs.
        params: the cell's section; `optim` and `snapshot_epochs` are used here, and all of it names the state of the run.
        task: see `repro.engine.loop.Task`; its loaders are `train` and `val`.
        settings: of the loop.
        device: where the model lies.
        inputs: files that the run depends on; a stopped one is continued on the same alone.
        described: what weights files say beside the weights, see `repro.models.weights.save_weights`.
        folder: where results go, if not into the cell's.
        flop_per_image: counts the FLOP of a forward pass; None where that is not known.
    """

    stage: str
    cell: str
    params: Any
    task: Any
    settings: LoopParams
    device: Any
    inputs: tuple[Path, ...]
    described: Mapping[str, Any]
    folder: Path
    flop_per_image: Callable[[], float] | None = None

    def close(self) -> None:
        """End the loaders' processes."""
        self.task.train.close()
        self.task.val.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training leaves, on rank 0.

    Args:
        state: the final one, with the curve.
        model: with the weights that count.
        weights: first 16 hex digits of the SHA-256 of weights.safetensors.
        speed: see `repro.engine.watch.Watch.summary`.
        forget: removes the state that a next call would continue from; for when the record is written.
    """

    state: Any
    model: Any
    weights: str
    speed: Mapping[str, Any]
    forget: Callable[[], None]

    def metrics(self) -> dict[str, Any]:
        """The numbers that every training has."""
        last = self.state.curve[-1]
        found = {
            "params": sum(p.numel() for p in self.model.parameters()),
            "epochs": last["epoch"],
            "steps": last["step"],
            "skipped_steps": self.state.bad_steps,
            "skip_rate_percent": 100 * self.state.bad_steps / last["step"],
            "weights": self.weights,
            "train_loss": last.get("train_loss"),
        }
        if found["train_loss"] is None or not math.isfinite(found["train_loss"]):
            found |= {"train_loss": None, "train_loss_reason": "not finite in any step of the last epoch"}
        return found


def train_cells(
    stage: str,
    section: type,
    cell: str | None,
    gpus: int | None,
    run: Callable[[Any, Paths, Runtime, str, Ranks], None],
    check: Callable[[Any, Paths, str, int], None],
    arguments: Sequence[str] = (),
) -> None:
    """Train one cell of a section or all, here or, with `gpus`, in processes that torchrun starts.

    Args:
        section: dataclass of a cell.
        run: trains one cell in this process.
        check: raises where a cell cannot be trained by so many processes; then none is started.
        arguments: other options of the command line, for the processes that are started.
    """
    paths = find_root()
    runtime = load_runtime(paths)
    names = [cell] if cell else section_keys(paths.params, stage)
    cells = {name: load_section(section, paths.params, stage, name) for name in names}
    if gpus is not None and "WORLD_SIZE" not in os.environ:
        for name, params in cells.items():
            check(params, paths, name, gpus)
        launch(gpus, [stage, *(["--cell", cell] if cell else []), *arguments])
        return
    with joined(choose_device(runtime.device).type) as ranks:
        for name, params in cells.items():
            run(params, paths, runtime, name, ranks)


def state_folder(params: Any, paths: Paths, stage: str, cell: str) -> Path:
    """Where the state of this run waits; another one for other parameters, so that no run continues a different one."""
    return paths.run_state(stage, cell, params_hash(params)[:16])


def device_of(runtime: Runtime, ranks: Ranks) -> Any:
    """This process's device."""
    import torch

    device = choose_device(runtime.device)
    return torch.device("cuda", ranks.local_rank) if device.type == "cuda" and ranks.world_size > 1 else device


def precision_on(asked: str, device: Any) -> str:
    """`auto` resolved: bf16 on GPUs, fp32 else."""
    return asked if asked != "auto" else "bf16" if device.type == "cuda" else "fp32"


def same_run(state: Path, inputs: tuple[Path, ...], processes: int) -> dict[str, Any]:
    """What a run is continued by; refuse one that began on other inputs, or with another number of processes."""
    found = {"inputs": {file.name: hash_files(file.parent, [file.name]) for file in inputs}, "processes": processes}
    note = state / "run.json"
    if note.is_file() and any(state.glob("step_*.pt")):
        before = read_json(note)
        changed = next((file for file in inputs if before.get("inputs", {}).get(file.name) != found["inputs"][file.name]), None)
        if changed is not None:
            raise UserError(f"{changed}: changed since this run began ({state}); restore it, or remove that folder to start anew")
        if before["processes"] != processes:
            raise UserError(
                f"{state}: was stopped with {before['processes']} process(es) and is continued with {processes}; take the same number, "
                "or remove the folder to start anew"
            )
    return found


def fit_job(job: Job, paths: Paths, runtime: Runtime, ranks: Ranks) -> Outcome | None:
    """Train a job, or go on where an earlier call stopped; write weights.safetensors, snapshots/ and curve.csv into its folder.

    Returns:
        The outcome on rank 0, None on the others. Raises as `repro.engine.loop.fit`.
    """
    from repro.engine.checkpoint import Checkpointer
    from repro.engine.loop import fit, write_curve
    from repro.engine.watch import Watch
    from repro.models.weights import save_weights

    state = state_folder(job.params, paths, job.stage, job.cell)
    if ranks.first:
        write_json(state / "run.json", same_run(state, job.inputs, ranks.world_size))
    # beside the state and not in the results: DVC empties these before it starts a stage, also one that continues
    snapshots = state / "snapshots"
    snapshots.mkdir(parents=True, exist_ok=True)

    def snapshot(epoch: int, model: Any) -> None:
        if epoch in job.params.snapshot_epochs:
            save_weights(snapshots / f"epoch_{epoch:03d}.safetensors", model, **job.described)

    checkpointer = Checkpointer(state)
    watches: list[Watch] = []
    new_watch = functools.partial(
        Watch,
        paths.logs(job.stage, job.cell),
        device=job.device,
        jsonl=runtime.jsonl,
        tensorboard=runtime.tensorboard,
        flop_per_image=job.flop_per_image() if job.flop_per_image and runtime.peak_tflops else None,
        peak_flop_per_s=runtime.peak_tflops and runtime.peak_tflops * 1e12,
        every=runtime.log_every_steps,
        world_size=ranks.world_size,
        rank=ranks.rank,
    )
    try:
        done, model = fit(
            job.task,
            job.params.optim,
            job.settings,
            device=job.device,
            ranks=ranks,
            checkpointer=checkpointer,
            snapshot=snapshot,
            watch=lambda step: watches.append(new_watch(resumed_step=step)) or watches[-1],
        )
    finally:
        job.close()
    if not ranks.first:
        return None
    weights = job.folder / "weights.safetensors"
    save_weights(weights, model, **job.described)
    shutil.rmtree(job.folder / "snapshots", ignore_errors=True)
    shutil.copytree(snapshots, job.folder / "snapshots")
    write_curve(job.folder / "curve.csv", done.curve)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    return Outcome(state=done, model=model, weights=digest, speed=watches[-1].summary(), forget=checkpointer.clear)
