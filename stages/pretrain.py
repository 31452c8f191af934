"""`repro pretrain`: train a classifier from scratch (Table 1; on the embedded digits in the mini profile)."""

import dataclasses
import functools
import math
import os
import shutil
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.config import bounded, load_section, params_hash, section_keys
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.ranks import Ranks, joined, launch
from repro.core.record import hash_files, make_identity, read_json, write_json, write_record
from repro.core.runtime import (
    Runtime,
    choose_device,
    device_label,
    device_slug,
    load_runtime,
    seed_everything,
    torch_dtype,
)
from repro.data.settings import TransformSettings
from repro.engine.params import LoopParams, OptimParams
from repro.tasks.params import MixParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainParams:
    """A cell of the `pretrain:` section, or of `baselines:`.

    Args:
        model: registered name.
        options: what `timm.create_model` gets beside it, e.g. design, pool, chunk_size, w0.
        data: a cell of `prepare_data`.
        seed: of initialisation, order and augmentation.
        epochs: passes over the training data.
        batch_size: images per step, of all GPUs together.
        drop_path: stochastic depth, linear from 0 to this over the blocks.
        evaluate_every: epochs between evaluations; the last is always evaluated.
        snapshot_epochs: finished epochs after which the weights are kept (0: before training), for `explain`.
        precision: `fp32`, `bf16` or `fp16` (autocast; the inner learner is fp32 inside in all), `auto` for bf16 on GPUs and fp32 else.
        ema_decay: of a moving average of the weights, which is then what counts; null for none.
        max_bad_steps: steps in a row with a loss or gradient that is not finite before the run stops and explains the last one.
        max_unreadable: training images that may be unreadable before the run stops.
        optim, mix, transform: optimiser and schedule; softened targets; image to tensor.
    """

    model: str
    options: dict[str, str | int | float | bool] = dataclasses.field(default_factory=dict)
    data: str
    seed: int = bounded(0, ge=0)
    epochs: int = bounded(ge=1)
    batch_size: int = bounded(ge=1)
    drop_path: float = bounded(ge=0, le=1)
    evaluate_every: int = bounded(1, ge=1)
    snapshot_epochs: tuple[int, ...] = bounded((), ge=0)
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
        late = [epoch for epoch in self.snapshot_epochs if epoch > self.epochs]
        if late:
            raise ValueError(f"snapshot_epochs: {late[0]} is after the last epoch, {self.epochs}")


CellOption = Annotated[str | None, typer.Option(help="One cell of the section in params.yaml; all of them without it.")]
GpusOption = Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU, started by torchrun.")]
ReplayOption = Annotated[Path | None, typer.Option(help="Run the step of this dump again, and show it.")]


def command(cell: CellOption = None, gpus: GpusOption = None, replay_bad_step: ReplayOption = None) -> None:
    """Train a classifier; a stopped run continues where it was."""
    train("pretrain", cell, gpus, replay_bad_step)


def train(stage: str, cell: str | None, gpus: int | None, replay_bad_step: Path | None) -> None:
    """Train the cells of a section, this one's or that of `baselines`."""
    paths = find_root()
    runtime = load_runtime(paths)
    if replay_bad_step is not None and cell is None:
        cell = replay_bad_step.absolute().parent.name.rpartition("-")[0]  # the folder of a run's state
        if cell not in section_keys(paths.params, stage):
            raise UserError(f"{stage}: {replay_bad_step} lies in no folder of a run; say with --cell which one it is of")
    cells = {
        name: load_section(PretrainParams, paths.params, stage, name) for name in ([cell] if cell else section_keys(paths.params, stage))
    }
    if replay_bad_step is not None:
        if gpus is not None:
            raise UserError(f"{stage}: --replay-bad-step runs in one process; leave --gpus out")
        replay(replay_bad_step, cells[cell], paths, runtime, stage, cell)
    elif gpus is not None and "WORLD_SIZE" not in os.environ:
        for name, params in cells.items():  # said at once, and not by every process
            _check_before_launch(params, paths, stage, name, gpus)
        launch(gpus, [stage, *(["--cell", cell] if cell else [])])
    else:
        with joined(choose_device(runtime.device).type) as ranks:
            for name, params in cells.items():
                run(params, paths, runtime, stage, name, ranks)


def state_folder(params: PretrainParams, paths: Paths, stage: str, cell: str) -> Path:
    """Where the state of this run waits; another one for other parameters, so that no run continues a different one."""
    return paths.run_state(stage, cell, params_hash(params)[:16])


def run(params: PretrainParams, paths: Paths, runtime: Runtime, stage: str, cell: str, ranks: Ranks = Ranks()) -> None:
    """Train one cell and write results/<stage>/<cell>/{weights.safetensors, snapshots/, recipe.json, curve.csv, metrics.json, run.json}.

    Raises:
        UserError: data, model name, options or number of processes that do not fit, or the state of a run on other data, before
            anything is written.
    """
    from repro.engine.checkpoint import Checkpointer
    from repro.engine.loop import fit, write_curve
    from repro.engine.watch import Watch
    from repro.models.registry import family_module, kernel_backend
    from repro.models.weights import save_weights
    from repro.tasks import recipe

    started = time.monotonic()
    made = _Made.of(params, paths, runtime, f"{stage}.{cell}", ranks)
    folder, state = paths.cell(stage, cell), state_folder(params, paths, stage, cell)
    if ranks.first:
        write_json(state / "run.json", _same_run(state, made.manifest_path, ranks.world_size))
    # beside the state and not in the results: DVC empties these before it starts a stage, also one that continues
    snapshots = state / "snapshots"
    snapshots.mkdir(parents=True, exist_ok=True)

    def snapshot(epoch: int, model: Any) -> None:
        if epoch in params.snapshot_epochs:
            save_weights(snapshots / f"epoch_{epoch:03d}.safetensors", model, **made.described)

    backend = kernel_backend(made.task.model, torch_dtype(made.settings.precision))
    facts = {"world_size": ranks.world_size, "micro_batch": made.micro_batch, "accumulate": made.settings.accumulate}
    facts |= {"device": device_label(made.device), "dtype": made.settings.precision}
    asked = dataclasses.asdict(params)
    resolved = recipe.resolve(asked, **facts, backend=backend, train_images=len(made.task.train.dataset))
    departures = recipe.departures(asked, resolved)
    if ranks.first:
        print("\n".join(recipe.lines(resolved, departures)), flush=True)
    checkpointer = Checkpointer(state)
    watches: list[Watch] = []
    new_watch = functools.partial(
        Watch, paths.logs(stage, cell), device=made.device, jsonl=runtime.jsonl, tensorboard=runtime.tensorboard,
        flop_per_image=made.flop_per_image() if runtime.peak_tflops else None,
        peak_flop_per_s=runtime.peak_tflops and runtime.peak_tflops * 1e12, every=runtime.log_every_steps,
        world_size=ranks.world_size, rank=ranks.rank,
    )  # fmt: skip
    try:
        done, model = fit(
            made.task, params.optim, made.settings, device=made.device, ranks=ranks, checkpointer=checkpointer, snapshot=snapshot,
            watch=lambda step: watches.append(new_watch(resumed_step=step)) or watches[-1],
        )  # fmt: skip
    finally:
        made.task.train.close()
        made.task.val.close()
    unreadable = int(ranks.sum([len(made.task.train.dataset.unreadable())])[0])
    if not ranks.first:
        return

    save_weights(folder / "weights.safetensors", model, **made.described)
    shutil.rmtree(folder / "snapshots", ignore_errors=True)
    shutil.copytree(snapshots, folder / "snapshots")
    write_curve(folder / "curve.csv", done.curve)
    write_json(folder / "recipe.json", {"recipe": resolved, "departures_from_the_paper": departures})
    last = done.curve[-1]
    metrics = {
        "model": params.model,
        "options": params.options,
        "data": made.kind,
        "top1_percent": last["top1_percent"],
        "top5_percent": last["top5_percent"],
        "val_loss": last["val_loss"],
        "val_images": last["images"],
        "train_loss": last.get("train_loss"),
        "params": sum(p.numel() for p in model.parameters()),
        "epochs": params.epochs,
        "steps": last["step"],
        "batch_size": params.batch_size,
        "skipped_steps": done.bad_steps,
        "skip_rate_percent": 100 * done.bad_steps / last["step"],
        "unreadable_images": unreadable,
    }
    for name in ("train_loss", "val_loss"):
        if metrics[name] is None or not math.isfinite(metrics[name]):
            metrics |= {name: None, f"{name}_reason": "not finite in any step of the last epoch" if name == "train_loss" else "not finite"}
    identity = make_identity(
        paths.root,
        [f"stages.{stage}", family_module(params.model)],
        params,
        data_manifest=made.manifest_path,
        device=device_label(made.device) + (f", {ranks.world_size} processes" if ranks.world_size > 1 else ""),
        dtype=made.settings.precision,
        backend=backend,
    )
    write_record(folder, metrics, identity, time.monotonic() - started)
    if made.device.type == "cuda":  # what `repro plan` counts with; it is another one at each run, so it is no output of the graph
        speed = {"model": params.model, "options": params.options, "processes": ranks.world_size, **watches[-1].summary()}
        write_record(paths.measured(device_slug(made.device)) / "pretrain", speed, identity, time.monotonic() - started, name=cell)
    checkpointer.clear()
    print(f"{cell}: top-1 {last['top1_percent']:.2f} % on {metrics['val_images']} held-out images of {made.kind}")


def replay(dump_path: Path, params: PretrainParams, paths: Paths, runtime: Runtime, stage: str, cell: str) -> None:
    """Run the step of a dump again, on this process alone, and print what each layer gave.

    Raises:
        UserError: no dump, or one of another model or other data.
    """
    from repro.engine.checkpoint import set_rng_state
    from repro.engine.guard import diagnose, load_dump

    dump = load_dump(dump_path)
    for rank, seen in enumerate(dump["ranks"]):
        made = _Made.of(params, paths, runtime, f"{stage}.{cell}", Ranks(rank=rank, world_size=dump["world_size"]))
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
            made.task.train.close()
            made.task.val.close()
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Made:
    """What a run is made of; `described` goes into weights files."""

    task: Any
    settings: LoopParams
    device: Any
    micro_batch: int
    kind: str
    manifest_path: Path
    described: dict[str, Any]

    def flop_per_image(self) -> float:
        """FLOP of a forward pass, twice its multiply-adds, counted on one image."""
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        image = self.task.eval_input(self.task.train.dataset[(0, 0)][0].unsqueeze(0))
        model = self.task.model.eval()
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model(image)
        return counter.get_total_flops()

    @classmethod
    def of(cls, params: PretrainParams, paths: Paths, runtime: Runtime, where: str, ranks: Ranks) -> "_Made":
        import torch

        from repro.data.imagenet import ImageFolder, eval_transform, train_transform
        from repro.data.loader import EvalLoader, TrainLoader
        from repro.data.manifest import open_root, read_manifest
        from repro.models.registry import build_model
        from repro.tasks.classification import Classification

        share = ranks.share(params.batch_size, f"{where}.batch_size")
        micro = min(runtime.micro_batch or share, share)
        if share % micro or ((params.mix.mixup or params.mix.cutmix) and micro % 2):
            raise UserError(f"runtime.micro_batch: {micro} does not fit {share} images of a process; take an even number that divides it")
        device = choose_device(runtime.device)
        if device.type == "cuda" and ranks.world_size > 1:
            device = torch.device("cuda", ranks.local_rank)
        precision = params.precision if params.precision != "auto" else "bf16" if device.type == "cuda" else "fp32"
        manifest_path = paths.cell("prepare_data", params.data) / "manifest.json"
        manifest = read_manifest(manifest_path)
        tree = open_root(runtime.data_root(paths, manifest.kind), manifest)
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
        train = TrainLoader(train_set, batch_size=share, seed=params.seed, **here)
        val = EvalLoader(val_set, batch_size=micro, **here)
        return cls(
            task=Classification(
                model, train, val, batch_size=params.batch_size, transform=params.transform, mix=params.mix,
                num_classes=len(tree.classes), device=device, ranks=ranks,
            ),
            settings=LoopParams(
                epochs=params.epochs, evaluate_every=params.evaluate_every, precision=precision, accumulate=share // micro,
                ema_decay=params.ema_decay, max_bad_steps=params.max_bad_steps, save_every_steps=runtime.save_every_steps,
            ),
            device=device,
            micro_batch=micro,
            kind=manifest.kind,
            manifest_path=manifest_path,
            described={
                "name": params.model, "options": options, "preprocessing": params.transform.preprocessing(), "classes": list(tree.classes),
            },
        )  # fmt: skip


def _check_before_launch(params: PretrainParams, paths: Paths, stage: str, cell: str, processes: int) -> None:
    from repro.data.manifest import read_manifest

    Ranks(world_size=processes).share(params.batch_size, f"{stage}.{cell}.batch_size")
    manifest_path = paths.cell("prepare_data", params.data) / "manifest.json"
    images = read_manifest(manifest_path).splits["train"].images
    if images < params.batch_size:
        raise UserError(f"{stage}.{cell}.batch_size: {params.batch_size}, and there are only {images} training images; make it smaller")
    _same_run(state_folder(params, paths, stage, cell), manifest_path, processes)


def _same_run(state: Path, manifest_path: Path, processes: int) -> dict[str, Any]:
    """What a run is continued by; refuse one that began on other data, or with another number of processes."""
    found = {"data_manifest": hash_files(manifest_path.parent, [manifest_path.name]), "processes": processes}
    note = state / "run.json"
    if note.is_file() and any(state.glob("step_*.pt")):
        before = read_json(note)
        if before["data_manifest"] != found["data_manifest"]:
            raise UserError(f"{manifest_path}: changed since this run began ({state}); restore the data, or remove that folder to start anew")
        if before["processes"] != processes:
            raise UserError(
                f"{state}: was stopped with {before['processes']} process(es) and is continued with {processes}; take the same number, "
                "or remove the folder to start anew"
            )
    return found
