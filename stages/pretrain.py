"""`repro pretrain`: train a classifier from scratch (Table 1; on the embedded digits in the mini profile)."""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.core.config import bounded, load_section, params_hash, section_keys
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.record import hash_files, make_identity, write_record
from repro.core.runtime import Runtime, choose_device, device_label, load_runtime, seed_everything
from repro.data.settings import TransformSettings
from repro.engine.params import OptimParams
from repro.tasks.params import MixParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainParams:
    """A cell of the `pretrain:` section.

    Args:
        model: registered name.
        options: what `timm.create_model` gets beside it, e.g. design, pool, chunk_size, w0.
        data: a cell of `prepare_data`.
        seed: of initialisation, order and augmentation.
        epochs: passes over the training data.
        batch_size: images per step.
        drop_path: stochastic depth, linear from 0 to this over the blocks.
        evaluate_every: epochs between evaluations; the last is always evaluated.
        snapshot_epochs: finished epochs after which the weights are kept (0: before training), for `explain`.
        precision: `fp32`, or `bf16` for autocast; the inner learner is fp32 inside either way.
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
    precision: Literal["fp32", "bf16"] = "fp32"
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


def command(cell: Annotated[str | None, typer.Option(help="One cell of the `pretrain:` section; all of them without it.")] = None) -> None:
    """Train a classifier; a stopped run continues where it was."""
    paths = find_root()
    runtime = load_runtime(paths)
    for name in [cell] if cell else section_keys(paths.params, "pretrain"):
        run(load_section(PretrainParams, paths.params, "pretrain", name), paths, runtime, name)


def state_folder(params: PretrainParams, paths: Paths, cell: str) -> Path:
    """Where the state of this run waits; another one for other parameters or other data, so that no run continues a different one."""
    manifest = paths.cell("prepare_data", params.data) / "manifest.json"
    data = hash_files(paths.root, [manifest.relative_to(paths.root).as_posix()])
    return paths.run_state("pretrain", cell, f"{params_hash(params)[:8]}{data[:8]}")


def run(params: PretrainParams, paths: Paths, runtime: Runtime, cell: str) -> None:
    """Train one cell and write results/pretrain/<cell>/{weights.safetensors, snapshots/, curve.csv, metrics.json, run.json}.

    Raises:
        UserError: data, model name or options that do not fit, before anything is written.
    """
    import torch

    from repro.data.imagenet import ImageFolder, eval_transform, train_transform
    from repro.data.loader import EvalLoader, TrainLoader
    from repro.data.manifest import open_root, read_manifest
    from repro.engine.checkpoint import Checkpointer
    from repro.engine.loop import fit, write_curve
    from repro.models.registry import build_model, family_module, kernel_backend
    from repro.models.weights import save_weights
    from repro.tasks.classification import Classification

    started = time.monotonic()
    manifest_path = paths.cell("prepare_data", params.data) / "manifest.json"
    manifest = read_manifest(manifest_path)
    tree = open_root(runtime.data_root(paths, manifest.kind), manifest)
    device = choose_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    seed_everything(params.seed)
    options = {**params.options, "num_classes": len(tree.classes), "img_size": params.transform.image_size}
    try:
        model = build_model(params.model, **options, drop_path_rate=params.drop_path).to(device)
    except ValueError as error:
        raise UserError(f"pretrain.{cell}: {error}") from None

    train_set = ImageFolder(tree, "train", train_transform(params.transform), seed=params.seed, max_unreadable=params.max_unreadable)
    val_set = ImageFolder(tree, "val", eval_transform(params.transform))
    train = TrainLoader(train_set, batch_size=params.batch_size, seed=params.seed, workers=runtime.workers, device=device)
    val = EvalLoader(val_set, batch_size=params.batch_size, workers=runtime.workers, device=device)
    task = Classification(model, train, val, batch_size=params.batch_size, mix=params.mix, num_classes=len(tree.classes), device=device)

    folder = paths.cell("pretrain", cell)
    described = {"name": params.model, "options": options, "preprocessing": params.transform.preprocessing(), "classes": list(tree.classes)}
    state = state_folder(params, paths, cell)
    checkpointer = Checkpointer(state)
    # beside the state and not in the results: DVC empties these before it starts a stage, also one that continues
    snapshots = state / "snapshots"
    snapshots.mkdir(parents=True, exist_ok=True)

    def snapshot(epoch: int) -> None:
        if epoch in params.snapshot_epochs:
            save_weights(snapshots / f"epoch_{epoch:03d}.safetensors", model, **described)

    try:
        curve = fit(
            task,
            params.optim,
            epochs=params.epochs,
            evaluate_every=params.evaluate_every,
            device=device,
            precision=params.precision,
            checkpointer=checkpointer,
            save_every_steps=runtime.save_every_steps,
            log_every_steps=runtime.log_every_steps,
            snapshot=snapshot,
        )
    finally:
        train.close()
        val.close()

    save_weights(folder / "weights.safetensors", model, **described)
    shutil.rmtree(folder / "snapshots", ignore_errors=True)
    shutil.copytree(snapshots, folder / "snapshots")
    write_curve(folder / "curve.csv", curve)
    last = curve[-1]
    metrics = {
        "model": params.model,
        "options": params.options,
        "data": manifest.kind,
        "top1_percent": last["top1_percent"],
        "top5_percent": last["top5_percent"],
        "val_loss": last["val_loss"],
        "val_images": last["images"],
        "train_loss": last["train_loss"],
        "params": sum(p.numel() for p in model.parameters()),
        "epochs": params.epochs,
        "steps": last["step"],
        "batch_size": params.batch_size,
        "unreadable_images": len(train_set.unreadable()),
    }
    identity = make_identity(
        paths.root,
        ["stages.pretrain", family_module(params.model)],
        params,
        data_manifest=manifest_path,
        device=device_label(device),
        dtype=params.precision,
        backend=kernel_backend(model, torch.bfloat16 if params.precision == "bf16" else torch.float32),
    )
    write_record(folder, metrics, identity, time.monotonic() - started)
    checkpointer.clear()
    print(f"{cell}: top-1 {last['top1_percent']:.2f} % on {metrics['val_images']} held-out images of {manifest.kind}")
