"""Jobs: one training of a cell with one seed, built from the cell's task, resumed where it was stopped, and run."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.hashing import hash_file, hash_files, require_hash
from ..core.paths import Paths
from ..core.ranks import Ranks
from ..core.record import read_json, read_record, require_writable, write_json, write_text
from ..core.runtime import Runtime, choose_device, prepare_process, seed_everything
from ..data.cells import DataCell, manifest_path, open_cell
from ..tasks.spec import TaskSpec, name_statistic
from ..training.params import InitParams, TrainParams

# the parameters of a training and facts about the run -> what is merged into the record's identity, with the key
# `recipe`, and lines for people
Recipe = Callable[[TrainParams, Mapping[str, Any]], tuple[dict[str, Any], list[str]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a training stage.

    Args:
        stage, name: the stage, and the cell's name; together they name its results.
        params: the cell's section.
        spec: its task.
        paths, runtime: the checkout and its `runtime:` section.
        ranks: the processes that train together.
        record: the file of its record, see `repro.core.record.write_record`.
        recipe: compares how it is trained with what the paper prescribes; None: see `cells.describe_job`.
        reported: whether the trained model is evaluated on the reported split; not if the best of several cells is
            still to be chosen.
    """

    stage: str
    name: str
    params: TrainParams
    spec: TaskSpec
    paths: Paths
    runtime: Runtime
    ranks: Ranks = Ranks()
    record: Path
    recipe: Recipe | None = None
    reported: bool = True

    @property
    def folder(self) -> Path:
        """Return the folder of the cell's weights, curve and pictures, outside of Git."""
        return self.paths.artifacts(self.record)

    @property
    def is_of_graph(self) -> bool:
        """True for a cell of the pipeline: DVC runs it, and its record is made again by every run."""
        return self.record == self.paths.cell(self.stage, self.name) / "metrics.json"

    @property
    def where(self) -> str:
        """Return the cell's key path, for messages."""
        return f"{self.stage}.{self.name}"

    @property
    def init(self) -> Path | None:
        """Return the file of initial weights; None without one."""
        return self.paths.find(self.params.init.weights) if self.params.init else None

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Return the files, besides the code, that a run depends on: the data's manifest and the initial weights.

        Callers take the manifest from place 0 and the weights from place 1.
        """
        manifest = manifest_path(self.paths, self.params.data)
        return (manifest, self.init) if self.init else (manifest,)

    def state_folder(self, seed: int) -> Path:
        """Return the folder of the state of a run with one seed."""
        return self.paths.run_state(self.stage, self.name, self.params.state_key(seed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training that is ready to run.

    Args:
        cell, params: of the training; the parameters have one seed.
        task: see `repro.training.loop.Task`.
        accumulate: parts into which a batch of a process is cut.
        data: the prepared data set.
        described: the metadata of weights files, see `repro.models.weights.save_weights`.
        load_report: the fate of each key of the initial weights.
    """

    cell: Cell
    params: TrainParams
    task: Any
    accumulate: int
    data: DataCell
    described: Mapping[str, Any]
    load_report: Mapping[str, str]

    @property
    def precision(self) -> str:
        """`fp32`, `bf16` or `fp16`."""
        return self.params.resolve_precision(self.task.device)

    def close(self) -> None:
        """End the loaders' processes."""
        for loader in (self.task.train, *self.task.held_out.values()):
            loader.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of a training on rank 0.

    Args:
        metrics: the record of this seed.
        curve: a row per epoch.
        state: the folder from which a next call would continue; to be removed when the record is written.
        speed: see `repro.training.watch.Watch.summary`.
        earlier: the seconds and the CPU seconds that earlier calls had spent when they were stopped.
    """

    metrics: dict[str, Any]
    curve: list[dict[str, float]]
    state: Path
    speed: Mapping[str, Any]
    earlier: tuple[float, float]

    @property
    def folder(self) -> Path:
        """Return the folder of weights.safetensors, snapshots/, load_report.txt and, for some tasks, examples/."""
        return self.state / "result"


def build_job(cell: Cell, seed: int) -> Job:
    """Build the training of a cell with one seed: data, model, task and loaders. Nothing is written.

    Raises:
        UserError: data, model, options, weights or the number of processes do not fit.
    """
    import torch

    from ..data.loader import EvalLoader, TrainLoader

    params, runtime, spec, ranks = cell.params.with_seed(seed), cell.runtime, cell.spec, cell.ranks
    share, micro_batch = split_batch(params, runtime, ranks, cell.where)
    device = choose_device(runtime.device)
    if device.type == "cuda" and ranks.world_size > 1:
        device = torch.device("cuda", ranks.local_rank)
    data = open_cell(cell.paths, runtime, params.data)
    # the last held-out split is the reported one, see `repro.training.loop.Task`
    datasets = spec.open_datasets(data, params, data.row.held_out if cell.reported else data.row.held_out[:1])
    prepare_process(runtime)
    verify_init(cell)
    # from here on, everything that draws random numbers is in a fixed order, on which the results of a seed depend
    seed_everything(seed)
    model, load_report = spec.build_model(params, datasets.classes, cell.init, cell.where)
    described = spec.describe(model, params, datasets.classes)
    model = place_model(model, runtime, ranks, device)
    if ranks.rank:  # after the model is built with equal weights on all ranks, each draws its own random numbers
        seed_everything(seed + ranks.rank)

    here = {"workers": runtime.workers, "device": device, "rank": ranks.rank, "world_size": ranks.world_size}
    order = {"seed": seed, "groups": datasets.groups, "batches_per_epoch": params.steps_per_epoch}
    train = TrainLoader(datasets.train, batch_size=share, **order, **here)
    at_once = 1 if datasets.alone else micro_batch  # images per forward pass of an evaluation
    held_out = {split: EvalLoader(dataset, batch_size=at_once, **here) for split, dataset in datasets.held_out.items()}
    parts = {
        "model": model,
        "train": train,
        "held_out": held_out,
        "batch_size": params.batch_size,
        "device": device,
        "ranks": ranks,
    }
    task = spec.build_task(datasets, params, **parts)
    made = {"data": data, "described": described, "load_report": load_report}
    return Job(cell=cell, params=params, task=task, accumulate=share // micro_batch, **made)


def run_job(job: Job) -> Outcome | None:
    """Train, or continue where an earlier call stopped, and keep the results next to the run's state.

    Returns:
        The outcome on rank 0, None on the others. Raises as `repro.training.loop.fit`.
    """
    from ..models.weights import save_weights
    from ..training.checkpoint import Checkpointer
    from ..training.loop import fit
    from ..training.watch import Watch

    cell, seed, task = job.cell, job.params.seeds[0], job.task
    runtime, ranks, state = cell.runtime, cell.ranks, cell.state_folder(seed)
    if ranks.first:
        for folder in (cell.folder, cell.record.parent):  # fail now rather than after the last epoch
            require_writable(folder)
        write_json(state / "run.json", require_resumable(cell, seed, ranks.world_size))
    # next to the state and not in the results, which DVC empties before it starts a stage, even one that continues
    snapshots, result = state / "snapshots", state / "result"
    snapshots.mkdir(parents=True, exist_ok=True)

    def snapshot(epoch: int, model: Any) -> None:
        """Save the weights after an epoch that `snapshot_epochs` names; `fit` calls it after each one."""
        if epoch in job.params.snapshot_epochs:
            save_weights(snapshots / f"epoch_{epoch:03d}.safetensors", model, **job.described)

    logs = cell.paths.logs(cell.stage, cell.name) / state.name
    written = {"jsonl": runtime.jsonl, "tensorboard": runtime.tensorboard, "every": runtime.log_every_steps}
    if runtime.peak_tflops:
        flop_per_image = cell.spec.count_flop_per_image(task)
        written |= {"flop_per_image": flop_per_image, "peak_flop_per_s": runtime.peak_tflops * 1e12}
    watch = Watch(logs, device=task.device, ranks=ranks, **written)
    cadence = {"accumulate": job.accumulate, "save_every_steps": runtime.save_every_steps}
    checkpointer = Checkpointer(state)
    try:
        done, model = fit(task, job.params, **cadence, checkpointer=checkpointer, snapshot=snapshot, watch=watch)
        # in every process and before the loaders are closed: the summary of a linearisation evaluates a model
        summary = cell.spec.summarise(task, done.scores)
    finally:
        job.close()
    if not ranks.first:
        return None
    shutil.rmtree(result, ignore_errors=True)
    save_weights(result / "weights.safetensors", model, **job.described)
    shutil.copytree(snapshots, result / "snapshots")
    lines = [f"{fate:<22} {key}\n" for key, fate in job.load_report.items()]
    write_text(result / "load_report.txt", "".join(lines) or "random weights\n")
    if seed == cell.params.seeds[0]:
        cell.spec.draw_examples(task, model.eval(), job.params, job.described["classes"], result / "examples")
    metrics = {"seed": seed, **_count_run(done, model, task, cell.spec), **summary}
    metrics["weights_hash"] = hash_file(result / "weights.safetensors")
    about = {"curve": done.curve, "state": state, "speed": watch.summary(), "earlier": checkpointer.earlier}
    return Outcome(metrics=metrics, **about)


def split_batch(params: TrainParams, runtime: Runtime, ranks: Ranks, where: str) -> tuple[int, int]:
    """Return the images of a step on one process, and those of one forward pass.

    Raises:
        UserError: the batch cannot be split so.
    """
    share = ranks.share(params.batch_size, f"{where}.batch_size")
    micro_batch = min(runtime.micro_batch or share, share)
    if share % micro_batch or (params.needs_even_parts and micro_batch % 2):
        what = "an even number" if params.needs_even_parts else "a number"
        raise UserError(
            f"runtime.micro_batch: {micro_batch} does not fit {share} images of a process; take {what} that divides it"
        )
    return share, micro_batch


def place_model(model: Any, runtime: Runtime, ranks: Ranks, device: Any) -> Any:
    """Move a model to its device, synchronise batch norms over all GPUs, and apply the options of `runtime`."""
    import torch

    if ranks.world_size > 1 and device.type == "cuda":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device)
    if runtime.channels_last:  # not the whole model: an inner convolution has weights of five axes
        for layer in model.modules():
            if isinstance(layer, torch.nn.Conv2d):
                layer.to(memory_format=torch.channels_last)
    if runtime.compile:
        getattr(model, "backbone", model).compile()  # not a dense head, whose shapes depend on the data
    return model


def find_golden(paths: Paths, family: str) -> Path:
    """Return the file of a family's golden losses, which stand for its code, see `runs.golden`; it need not exist."""
    return paths.results / "golden" / f"{family}.json"


def hash_golden(paths: Paths, params: TrainParams) -> str | None:
    """Return the short hash of the golden losses of a training's family; None if the family has none."""
    file = find_golden(paths, params.family)
    return hash_file(file) if file.is_file() else None


def describe_init(paths: Paths, file: Path) -> InitParams:
    """Return the `init` section for a file of weights; a file below the project's root is named relative to it."""
    file = file.resolve()
    named = file.relative_to(paths.root.resolve()) if file.is_relative_to(paths.root.resolve()) else file
    return InitParams(weights=str(named), sha256=hash_file(file, digits=64))


def verify_init(cell: Cell) -> None:
    """Refuse initial weights that are not verified to be the right ones.

    Raises:
        UserError: no such file, an empty one, or one with another hash than its record or the parameters state.
    """
    init, path = cell.params.init, cell.init
    if init is None:
        return
    where = f"{cell.where}.init"
    if not path.is_file():
        raise UserError(f"{where}.weights: {path}: no such file; run its stage first")
    if not path.stat().st_size:
        raise UserError(f"{where}.weights: {path}: is empty; get it again")
    found, record = hash_file(path, digits=64), cell.paths.find_record(path)
    stated = init.sha256 or (read_record(record)["metrics"].get("weights_hash") if record else None)
    if stated is None:
        raise UserError(
            f"{where}.weights: no record of {path} states its hash; if it is the right file, add sha256: {found[:16]}"
        )
    require_hash(path, stated, named=f"{where}.weights: {path}", stated=f"{where}.sha256:")


def require_resumable(cell: Cell, seed: int, processes: int) -> dict[str, Any]:
    """Refuse to continue a run that began with other inputs or code, or in other processes, place or precision.

    Returns:
        {inputs, golden, processes, device, precision}, with which the next call is compared; an older one may lack some.
    """
    device = choose_device(cell.runtime.device)
    state, golden = cell.state_folder(seed), find_golden(cell.paths, cell.params.family)
    found = {
        "inputs": {file.name: hash_files(file.parent, [file.name]) for file in cell.inputs},
        "golden": hash_golden(cell.paths, cell.params),
        "processes": processes,
        "device": device.type,
        "precision": cell.params.resolve_precision(device),
    }
    note = state / "run.json"
    if note.is_file() and any(state.glob("step_*.pt")):
        before = found | read_json(note)  # what an older note lacks counts as unchanged
        changed = [file for file in cell.inputs if before["inputs"].get(file.name) != found["inputs"][file.name]]
        changed += [golden] if before["golden"] != found["golden"] else []
        if changed:
            raise UserError(
                f"{changed[0]}: changed since this run began ({state}); restore it, or remove that folder to start again"
            )
        was, now = ("{processes} process(es) on {device} in {precision}".format(**each) for each in (before, found))
        if was != now:
            raise UserError(
                f"{state}: the run was stopped with {was}, and now there are {now}; take the same, or remove the folder "
                "to start again"
            )
    return found


def _count_run(done: Any, model: Any, task: Any, spec: TaskSpec) -> dict[str, Any]:
    """Return the metrics of every training; if another split is reported, those of the curve begin with its split."""
    last, score = done.curve[-1], next(iter(spec.scores))  # the task's most important score
    of_curve = "" if task.curve_split == task.reported_split else f"{task.curve_split}_"
    found = {
        "num_params": sum(p.numel() for p in model.parameters()),
        "epochs": last["epoch"],
        "steps": last["step"],
        "skipped_steps": done.bad_steps,
        "skip_rate_percent": 100 * done.bad_steps / last["step"],
        "train_loss": last.get("train_loss"),
        "split": task.reported_split,
    }
    if of_curve:
        found |= {f"{of_curve}{name}": last[name] for name in spec.scores if name in last}
    if found["train_loss"] is None or not math.isfinite(found["train_loss"]):
        found |= {"train_loss": None, "train_loss_reason": "not finite in any step of the last epoch"}
    # the score of the last evaluation but one shows whether the training still improves
    evaluated = [row[score] for row in done.curve if score in row]
    name = f"{of_curve}{name_statistic(score, 'previous')}"
    if len(evaluated) > 1 and math.isfinite(evaluated[-2]):
        return found | {name: evaluated[-2]}
    return found | {name: None, f"{name}_reason": "not finite" if len(evaluated) > 1 else "evaluated once"}
