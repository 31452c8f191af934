"""What detection and segmentation share: their cells' params, the backbone with its weights, and what every result says."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.config import bounded
from repro.core.errors import UserError
from repro.core.paths import Paths
from repro.core.ranks import Ranks
from repro.core.record import make_identity, read_json, write_record, write_text
from repro.core.runtime import Runtime, device_label, device_slug, seed_everything, torch_dtype
from repro.engine.params import LoopParams, OptimParams

from .training import Job, Outcome, device_of, precision_on, same_run, state_folder

RandomOption = Annotated[bool, typer.Option("--random", help="Start from random weights; written under results/measured.")]
EpochsOption = Annotated[int | None, typer.Option(min=1, help="So many epochs instead; written under results/measured.")]
EXAMPLES = 4  # pictures of the validation split that are drawn with what was found in them


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseParams:
    """What cells of `detect:` and `segment:` have in common.

    Args:
        model: registered name of the backbone.
        options: what `timm.create_model` gets beside it.
        weights: the backbone's file, from the checkout's root: of `repro pretrain`, or of an official release; null for random ones.
        weights_sha256: the file's, 16 hex digits or more; needed where no record beside the file says it.
        data: a cell of `prepare_data`.
        seed: of initialisation, order and augmentation.
        epochs: passes over the training data, or as often `steps_per_epoch`.
        steps_per_epoch: steps between two looks at the validation split, where recipes count steps; null for a pass.
        batch_size: images per step, of all GPUs together.
        drop_path: stochastic depth of the backbone, linear from 0 to this over the blocks, and of the adapter's extractors.
        freeze_backbone: train the adapter and the heads alone.
        recompute_blocks: recompute the backbone's activations in the backward pass.
        evaluate_every: epochs between evaluations; the last is always evaluated.
        snapshot_epochs: finished epochs after which the weights are kept.
        precision: see `repro.engine.params.LoopParams`; `auto` for bf16 on GPUs and fp32 else.
        max_bad_steps: steps in a row with a loss or gradient that is not finite before the run stops and explains the last one.
        optim: optimiser and schedule.
    """

    model: str
    options: dict[str, str | int | float | bool] = dataclasses.field(default_factory=dict)
    weights: str | None
    weights_sha256: str | None = None
    data: str
    seed: int = bounded(0, ge=0)
    epochs: int = bounded(ge=1)
    steps_per_epoch: int | None = bounded(None, ge=1)
    batch_size: int = bounded(ge=1)
    drop_path: float = bounded(ge=0, le=1)
    freeze_backbone: bool = False
    recompute_blocks: bool = False
    evaluate_every: int = bounded(1, ge=1)
    snapshot_epochs: tuple[int, ...] = bounded((), ge=0)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    max_bad_steps: int = bounded(20, ge=1)
    optim: OptimParams

    def __post_init__(self) -> None:
        late = [epoch for epoch in (*self.snapshot_epochs, *self.optim.milestones) if epoch > self.epochs]
        if late:
            raise ValueError(f"snapshot_epochs or optim.milestones: {late[0]} is after the last epoch, {self.epochs}")
        reserved = {"num_classes", "img_size", "drop_path_rate"} & set(self.options)
        if reserved:
            raise ValueError(f"options: {min(reserved)} follows from the weights or from drop_path; leave it out")
        stated = self.weights_sha256
        if stated is not None and (len(stated) < 16 or set(stated.lower()) - set("0123456789abcdef")):
            raise ValueError(f"weights_sha256: {stated!r}, expected 16 hex digits or more")


def options_given(random: bool, epochs: int | None) -> list[str]:
    """The command line's options again."""
    return [*(["--random"] if random else []), *(["--epochs", str(epochs)] if epochs else [])]


def varied(params: Any, random: bool, epochs: int | None) -> tuple[Any, str]:
    """A cell with the options of the command line, and what they add to its name; milestones move with the epochs."""
    suffix = ""
    if random:
        params = dataclasses.replace(params, weights=None, weights_sha256=None)
        suffix += "_random"
    if epochs:
        milestones = tuple(max(1, round(milestone * epochs / params.epochs)) for milestone in params.optim.milestones)
        optim = dataclasses.replace(params.optim, milestones=milestones)
        snapshots = tuple(epoch for epoch in params.snapshot_epochs if epoch <= epochs)
        params = dataclasses.replace(params, epochs=epochs, optim=optim, snapshot_epochs=snapshots)
        suffix += f"_{epochs}epochs"
    return params, suffix


def check_before_launch(params: Any, paths: Paths, cell: str, processes: int, *, stage: str) -> None:
    """Raise where so many processes cannot train a cell."""
    Ranks(world_size=processes).share(params.batch_size, f"{stage}.{cell}.batch_size")
    check_weights(params, paths, f"{stage}.{cell}")
    same_run(state_folder(params, paths, stage, cell), inputs_of(params, paths), processes)


def inputs_of(params: Any, paths: Paths) -> tuple[Path, ...]:
    """The files that a run depends on beside the code: the data's manifest, and the backbone's weights."""
    weights = (paths.root / params.weights,) if params.weights else ()
    return paths.cell("prepare_data", params.data) / "manifest.json", *weights


def check_weights(params: Any, paths: Paths, where: str) -> None:
    """Refuse a weights file of which nothing says that it is the right one.

    Raises:
        UserError: no such file, an empty one, or one of another hash than its record or the params say.
    """
    if params.weights is None:
        return
    path = paths.root / params.weights
    if not path.is_file():
        raise UserError(f"{where}.weights: {path}: no such file; run its stage first")
    if not path.stat().st_size:
        raise UserError(f"{where}.weights: {path}: is empty; get it again")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    record = path.parent / "metrics.json"
    stated = params.weights_sha256 or (read_json(record)["metrics"].get("weights") if record.is_file() else None)
    if stated is None:
        raise UserError(
            f"{where}.weights: nothing says which file {path} should be; if it is the right one, add weights_sha256: {found[:16]}"
        )
    if not found.startswith(stated.lower()):
        raise UserError(f"{where}.weights: {path}: has SHA-256 {found[:16]}..., expected {stated}; get the right file")


def build_backbone(params: Any, paths: Paths, where: str, features: Literal["last", "each"]) -> tuple[Any, dict[str, str]]:
    """The adapter around the cell's backbone, its weights loaded, and the line of every key.

    Raises:
        UserError: a model or weights that do not fit; see also `check_weights`.
    """
    from repro.models.checkpoints import open_weights
    from repro.models.pyramid import build_pyramid, load_backbone

    check_weights(params, paths, where)
    options, checkpoint = dict(params.options), None
    if params.weights is not None:
        checkpoint = open_weights(paths.root / params.weights, model=params.model)
        options |= checkpoint.size_option  # positions are as long as the training's images were large
    try:
        adapter = build_pyramid(
            params.model, options=options, features=features, drop_path_rate=params.drop_path, freeze_backbone=params.freeze_backbone
        )
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    adapter.set_grad_checkpointing(params.recompute_blocks)
    report = load_backbone(adapter, checkpoint) if checkpoint else dict.fromkeys(adapter.state_dict(), "expected: new")
    return adapter, report


def report_lines(report: Mapping[str, str]) -> list[str]:
    """A load report as it is printed: how many keys were used, and which parts are expected to be new or not needed."""
    parts: dict[str, dict[str, int]] = {}
    for key, what in report.items():
        counts = parts.setdefault(what, {})
        part = key.split(".")[0]
        counts[part] = counts.get(part, 0) + 1
    return [f"{what}: " + ", ".join(f"{part} ({count})" for part, count in counts.items()) for what, counts in parts.items()]


def describe(task: str, adapter: Any, parts: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """What weights files say of a dense model: the backbone, the classes, and the params of which the rest is built."""
    name, options = adapter.built_from
    built_with = {key: dataclasses.asdict(part) for key, part in parts.items()}
    return {
        "name": name,
        "options": dict(options),
        "preprocessing": built_with["transform"],
        "classes": list(classes),
        "task": {"name": task, **built_with},
    }


def placed(model: Any, runtime: Runtime, ranks: Ranks) -> Any:
    """The model on its device, compiled or in channels-last order where asked, with batch norms over all GPUs."""
    import torch

    device = device_of(runtime, ranks)
    if ranks.world_size > 1 and device.type == "cuda":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device)
    if runtime.channels_last:
        model.to(memory_format=torch.channels_last)
    if runtime.compile:
        model.backbone.compile()
    return model


def loop_params(params: Any, runtime: Runtime, ranks: Ranks, where: str) -> tuple[LoopParams, int]:
    """The loop's settings, and the images of a process that go through the model at once."""
    share = ranks.share(params.batch_size, f"{where}.batch_size")
    micro = min(runtime.micro_batch or share, share)
    if share % micro:
        raise UserError(f"runtime.micro_batch: {micro} does not fit {share} images of a process; take a number that divides it")
    settings = LoopParams(
        epochs=params.epochs,
        evaluate_every=params.evaluate_every,
        precision=precision_on(params.precision, device_of(runtime, ranks)),
        accumulate=share // micro,
        max_bad_steps=params.max_bad_steps,
        save_every_steps=runtime.save_every_steps,
    )
    return settings, share


def prepare(params: Any, runtime: Runtime) -> None:
    """Threads and seeds, before a model is built."""
    import torch

    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    seed_everything(params.seed)


def folder_of(paths: Paths, runtime: Runtime, ranks: Ranks, stage: str, cell: str, suffix: str) -> Path:
    """Where a cell's results go: its own folder, or, where the command line changed it, one under results/measured."""
    return paths.measured(device_slug(device_of(runtime, ranks))) / stage / f"{cell}{suffix}" if suffix else paths.cell(stage, cell)


def examples_of(instances: Any) -> Iterator[tuple[Any, int]]:
    """The mask, as large as its image, and the label of every training target, for `repro.tasks.threshold`."""
    import torch

    from repro.data.detection import decode_mask

    for place in range(len(instances.names)):
        targets = instances.targets(place)
        for target in range(targets.start, targets.stop):
            mask = decode_mask(instances.segmentation(target), *instances.sizes[place].tolist())
            yield torch.from_numpy(mask), int(instances.labels[target])


def write_result(
    job: Job, outcome: Outcome, metrics: Mapping[str, Any], report: Mapping[str, str], paths: Paths, ranks: Ranks, seconds: float
) -> None:
    """Write load_report.txt, metrics.json and run.json, and forget the state.

    metrics: those of `training.Outcome.metrics`, of the task, and how the backbone began.
    """
    from repro.models.registry import family_module, kernel_backend

    params = job.params
    write_text(job.folder / "load_report.txt", "".join(f"{what:<22} {key}\n" for key, what in report.items()))
    about = {"model": params.model, "options": params.options, "initial": params.weights or "random", "batch_size": params.batch_size}
    identity = make_identity(
        paths.root,
        [f"stages.{job.stage}", family_module(params.model)],
        params,
        data_manifest=job.inputs[0],
        device=device_label(job.device) + (f", {ranks.world_size} processes" if ranks.world_size > 1 else ""),
        dtype=job.settings.precision,
        backend=kernel_backend(job.task.model.backbone, torch_dtype(job.settings.precision)),
    )
    write_record(job.folder, {**about, **outcome.metrics(), **metrics}, identity, seconds)
    outcome.forget()
