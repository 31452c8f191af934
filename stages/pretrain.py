"""`repro pretrain`: train a classifier from scratch (Table 1; on the embedded digits in the mini profile)."""

import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.config import bounded, load_section, section_keys
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.ranks import Ranks
from repro.core.record import make_identity, write_json, write_record
from repro.core.runtime import Runtime, device_label, device_slug, load_runtime, seed_everything, torch_dtype
from repro.data.settings import TransformSettings
from repro.engine.params import LoopParams, OptimParams
from repro.tasks.params import MixParams

from . import Stage
from .training import CellOption, GpusOption, Job, Outcome, device_of, fit_job, precision_on, same_run, state_folder, train_cells


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierParams:
    """How a classifier is trained, whatever its seed; the part that cells of `pretrain:`, `baselines:` and `ablate:` share.

    Args:
        model: registered name.
        options: what `timm.create_model` gets beside it, e.g. design, pool, chunk_size, w0.
        data: a cell of `prepare_data`.
        epochs: passes over the training data.
        batch_size: images per step, of all GPUs together.
        drop_path: stochastic depth, linear from 0 to this over the blocks.
        evaluate_every: epochs between evaluations; the last is always evaluated.
        precision: `fp32`, `bf16` or `fp16` (autocast; the inner learner is fp32 inside in all), `auto` for bf16 on GPUs and fp32 else.
        ema_decay: of a moving average of the weights, which is then what counts; null for none.
        max_bad_steps: steps in a row with a loss or gradient that is not finite before the run stops and explains the last one.
        max_unreadable: training images that may be unreadable before the run stops.
        optim, mix, transform: optimiser and schedule; softened targets; image to tensor.
    """

    model: str
    options: dict[str, str | int | float | bool] = dataclasses.field(default_factory=dict)
    data: str
    epochs: int = bounded(ge=1)
    batch_size: int = bounded(ge=1)
    drop_path: float = bounded(ge=0, le=1)
    evaluate_every: int = bounded(1, ge=1)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    ema_decay: float | None = bounded(None, gt=0, le=1)
    max_bad_steps: int = bounded(20, ge=1)
    max_unreadable: int = bounded(0, ge=0)
    optim: OptimParams
    mix: MixParams
    transform: TransformSettings

    def __post_init__(self) -> None:
        if self.batch_size % 2 and (self.mix.mixup or self.mix.cutmix):
            raise ValueError(f"batch_size: {self.batch_size} is odd, and mixup and cutmix pair the images of a batch")
        reserved = {"num_classes", "img_size", "drop_path_rate"} & set(self.options)
        if reserved:
            raise ValueError(f"options: {min(reserved)} follows from the data, from transform.image_size or from drop_path; leave it out")
        if self.optim.schedule != "cosine":
            raise ValueError(f"optim.schedule: {self.optim.schedule}, but a classifier is trained with the cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainParams(ClassifierParams):
    """A cell of the `pretrain:` section, or of `baselines:`.

    Args:
        seed: of initialisation, order and augmentation.
        snapshot_epochs: finished epochs after which the weights are kept (0: before training), for `explain`.
    """

    seed: int = bounded(0, ge=0)
    snapshot_epochs: tuple[int, ...] = bounded((), ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        late = [epoch for epoch in self.snapshot_epochs if epoch > self.epochs]
        if late:
            raise ValueError(f"snapshot_epochs: {late[0]} is after the last epoch, {self.epochs}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished training, on rank 0.

    Args:
        job, outcome: what was trained, and what it left.
        metrics: model, options, data (the kind), top-1 and top-5 in percent, loss and number of the held-out images, batch size, unreadable
            images, and those of `training.Outcome.metrics`.
        recipe: for recipe.json.
        backend: which implementation of the kernels ran.
    """

    job: Job
    outcome: Outcome
    metrics: dict[str, Any]
    recipe: dict[str, Any]
    backend: str

    def identity(self, paths: Paths, stage: str, params: Any, ranks: Ranks) -> dict:
        """See `repro.core.record.make_identity`."""
        from repro.models.registry import family_module

        return make_identity(
            paths.root,
            [f"stages.{stage}", family_module(params.model)],
            params,
            data_manifest=self.job.inputs[0],
            device=device_label(self.job.device) + (f", {ranks.world_size} processes" if ranks.world_size > 1 else ""),
            dtype=self.job.settings.precision,
            backend=self.backend,
        )


ReplayOption = Annotated[Path | None, typer.Option(help="Run the step of this dump again, and show it.")]

STAGE = Stage(params=PretrainParams, cells=True, task="classify", scores={"top1_percent": "top1", "top5_percent": "top5"})


def command(cell: CellOption = None, gpus: GpusOption = None, replay_bad_step: ReplayOption = None) -> None:
    """Train a classifier; a stopped run continues where it was."""
    train("pretrain", cell, gpus, replay_bad_step)


def train(stage: str, cell: str | None, gpus: int | None, replay_bad_step: Path | None) -> None:
    """Train the cells of a section, this one's or that of `baselines`."""
    if replay_bad_step is None:
        train_cells(
            stage, PretrainParams, cell, gpus, functools.partial(run, stage=stage), functools.partial(check_before_launch, stage=stage)
        )
        return
    paths = find_root()
    if gpus is not None:
        raise UserError(f"{stage}: --replay-bad-step runs in one process; leave --gpus out")
    cell = cell or replay_bad_step.absolute().parent.name.rpartition("-")[0]  # the folder of a run's state
    if cell not in section_keys(paths.params, stage):
        raise UserError(f"{stage}: {replay_bad_step} lies in no folder of a run; say with --cell which one it is of")
    params = load_section(PretrainParams, paths.params, stage, cell)
    replay(replay_bad_step, params, paths, load_runtime(paths), cell, stage)


def run(params: PretrainParams, paths: Paths, runtime: Runtime, cell: str, ranks: Ranks = Ranks(), *, stage: str = "pretrain") -> None:
    """Train one cell and write results/<stage>/<cell>/{weights.safetensors, snapshots/, recipe.json, curve.csv, metrics.json, run.json}.

    Raises:
        UserError: data, model name, options or number of processes that do not fit, or the state of a run on other data, before
            anything is written.
    """
    started = time.monotonic()
    done = train_one(params, paths, runtime, stage, cell, ranks)
    if done is None:
        return
    folder, metrics, identity = done.job.folder, done.metrics, done.identity(paths, stage, params, ranks)
    write_json(folder / "recipe.json", done.recipe)
    write_record(folder, metrics, identity, time.monotonic() - started)
    if done.job.device.type == "cuda":  # what `repro plan` counts with; it is another one at each run, so it is no output of the graph
        speed = {"model": params.model, "options": params.options, "processes": ranks.world_size, **done.outcome.speed}
        write_record(paths.measured(device_slug(done.job.device)) / "pretrain", speed, identity, time.monotonic() - started, name=cell)
    done.outcome.forget()
    print(f"{cell}: top-1 {metrics['top1_percent']:.2f} % on {metrics['val_images']} held-out images of {metrics['data']}")


def train_one(
    params: PretrainParams,
    paths: Paths,
    runtime: Runtime,
    stage: str,
    cell: str,
    ranks: Ranks,
    *,
    folder: Path | None = None,
    show: bool = True,
) -> Trained | None:
    """Train a classifier, or go on where an earlier call stopped, and write what `training.fit_job` writes.

    Args:
        folder: where to; the cell's own if None.
        show: print the recipe.

    Returns:
        None on other ranks than the first. Raises as `run`.
    """
    from repro.models.registry import kernel_backend
    from repro.tasks import recipe

    job, micro_batch, data = _made(params, paths, runtime, stage, cell, ranks)
    job = dataclasses.replace(job, folder=folder or job.folder)
    backend = kernel_backend(job.task.model, torch_dtype(job.settings.precision))
    facts = {"world_size": ranks.world_size, "micro_batch": micro_batch, "accumulate": job.settings.accumulate}
    facts |= {"device": device_label(job.device), "dtype": job.settings.precision}
    asked = dataclasses.asdict(params)
    resolved = recipe.resolve(asked, **facts, backend=backend, train_images=len(job.task.train.dataset))
    departures = recipe.departures(asked, resolved)
    if ranks.first and show:
        print("\n".join(recipe.lines(resolved, departures)), flush=True)
    outcome = fit_job(job, paths, runtime, ranks)
    unreadable = int(ranks.sum([len(job.task.train.dataset.unreadable())])[0])
    if outcome is None:
        return None
    last = outcome.state.curve[-1]
    metrics = {
        "model": params.model,
        "options": params.options,
        "data": data,
        "top1_percent": last["top1_percent"],
        "top5_percent": last["top5_percent"],
        "val_loss": last["val_loss"] if math.isfinite(last["val_loss"]) else None,
        "val_images": last["images"],
        "batch_size": params.batch_size,
        "unreadable_images": unreadable,
        **outcome.metrics(),
    }
    if metrics["val_loss"] is None:
        metrics["val_loss_reason"] = "not finite"
    noted = {"recipe": resolved, "departures_from_the_paper": departures}
    return Trained(job=job, outcome=outcome, metrics=metrics, recipe=noted, backend=backend)


def replay(dump_path: Path, params: PretrainParams, paths: Paths, runtime: Runtime, cell: str, stage: str) -> None:
    """Run the step of a dump again, on this process alone, and print what each layer gave.

    Raises:
        UserError: no dump, or one of another model or other data.
    """
    from repro.engine.checkpoint import set_rng_state
    from repro.engine.guard import diagnose, load_dump

    dump = load_dump(dump_path)
    for rank, seen in enumerate(dump["ranks"]):
        made, _, _ = _made(params, paths, runtime, stage, cell, Ranks(rank=rank, world_size=dump["world_size"]))
        try:
            made.task.model.load_state_dict(dump["model"])
        except RuntimeError:
            raise UserError(f"{dump_path}: is of another model than {stage}.{cell}") from None
        made.task.model.train()
        try:
            if made.task.describe(dump["epoch"], dump["number"]) != seen["batch"]:
                raise UserError(f"{dump_path}: its batch holds other images than {cell} has there now; the data or the seed changed")
            batch = next(iter(made.task.batches(dump["epoch"], dump["number"])))
            set_rng_state(seen["rng"])
            autocast = functools.partial(made.settings.autocast, made.device.type)
            found = diagnose(made.task, batch, autocast, dump["accumulate"], dump["scale"])
        finally:
            made.close()
        where = f"step {dump['step']}, process {rank} of {dump['world_size']}, part {found['part']} of {dump['accumulate']}"
        print(f"{where}: loss {found['loss']}")
        print(f"  images: {', '.join(seen['batch'][:4])}{', ...' if len(seen['batch']) > 4 else ''}")
        print(f"  first output that is not finite: {found['first_not_finite'] or 'none'}")
        for name, output in found["outputs"].items():
            print(f"  {name}: absmax {output['absmax']:.3g}, mean {output['mean']:.3g}, not finite {output['not_finite']}")
        bad = [name for name, gradient in found["gradients"].items() if gradient["not_finite"]]
        print(f"  gradients that are not finite: {', '.join(bad) or 'none'}")
        for name, losses in found["own"]["inner_losses"].items():
            print(f"  inner loss of {name}, per direction: mean {losses['mean']}, largest {losses['largest']}")


def _made(params: PretrainParams, paths: Paths, runtime: Runtime, stage: str, cell: str, ranks: Ranks) -> tuple[Job, int, str]:
    """What a run is made of, the images that go through the model at once, and the kind of the data."""
    import torch

    from repro.data.cells import open_cell
    from repro.data.classification import ImageFolder, eval_transform, train_transform
    from repro.data.loader import EvalLoader, TrainLoader
    from repro.models.registry import build_model
    from repro.tasks.classification import Classification

    where = f"{stage}.{cell}"
    share = ranks.share(params.batch_size, f"{where}.batch_size")
    micro = min(runtime.micro_batch or share, share)
    if share % micro or ((params.mix.mixup or params.mix.cutmix) and micro % 2):
        raise UserError(f"runtime.micro_batch: {micro} does not fit {share} images of a process; take an even number that divides it")
    device = device_of(runtime, ranks)
    precision = precision_on(params.precision, device)
    data = open_cell(paths, runtime, params.data)
    tree = data.open_tree()
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    seed_everything(params.seed)
    options = {**params.options, "num_classes": len(tree.classes), "img_size": params.transform.image_size}
    try:
        model = build_model(params.model, **options, drop_path_rate=params.drop_path).to(device)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if runtime.channels_last:
        model.to(memory_format=torch.channels_last)
    if runtime.compile:
        model.compile()
    if ranks.rank:  # the weights are the same everywhere, what is drawn while training is not
        seed_everything(params.seed + ranks.rank)

    train_set = ImageFolder(tree, "train", train_transform(params.transform), seed=params.seed, max_unreadable=params.max_unreadable)
    val_set = ImageFolder(tree, "val", eval_transform(params.transform))
    here = {"workers": runtime.workers, "device": device, "rank": ranks.rank, "world_size": ranks.world_size}
    train = TrainLoader(train_set, batch_size=share, seed=params.seed, groups=data.groups(tree), **here)
    val = EvalLoader(val_set, batch_size=micro, **here)
    task = Classification(
        model,
        train,
        val,
        batch_size=params.batch_size,
        transform=params.transform,
        mix=params.mix,
        num_classes=len(tree.classes),
        device=device,
        ranks=ranks,
    )
    job = Job(
        stage=stage,
        cell=cell,
        params=params,
        task=task,
        settings=LoopParams(
            epochs=params.epochs,
            evaluate_every=params.evaluate_every,
            precision=precision,
            accumulate=share // micro,
            ema_decay=params.ema_decay,
            max_bad_steps=params.max_bad_steps,
            save_every_steps=runtime.save_every_steps,
        ),
        device=device,
        inputs=(data.manifest_path,),
        described={
            "name": params.model,
            "options": options,
            "preprocessing": params.transform.preprocessing(),
            "classes": list(tree.classes),
        },
        folder=paths.cell(stage, cell),
        flop_per_image=functools.partial(_flop_per_image, task),
    )
    return job, micro, data.kind


def _flop_per_image(task: Any) -> float:
    """FLOP of a forward pass, twice its multiply-adds, counted on one image."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    image = task.eval_input(task.train.dataset[(0, 0)][0].unsqueeze(0))
    model = task.model.eval()
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops()


def check_before_launch(params: PretrainParams, paths: Paths, cell: str, processes: int, *, stage: str) -> None:
    from repro.data.manifest import read_manifest

    Ranks(world_size=processes).share(params.batch_size, f"{stage}.{cell}.batch_size")
    manifest_path = paths.cell("prepare_data", params.data) / "manifest.json"
    images = read_manifest(manifest_path).splits["train"].images
    if images < params.batch_size:
        raise UserError(f"{stage}.{cell}.batch_size: {params.batch_size}, and there are only {images} training images; make it smaller")
    same_run(state_folder(params, paths, stage, cell), (manifest_path,), processes)
