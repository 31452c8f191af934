"""`repro evaluate`: accuracy of any registered model on a prepared data set, at any resolution."""

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import Annotated

import typer

from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.record import make_identity, write_record
from repro.core.runtime import Runtime, choose_device, device_label, device_slug, load_runtime
from repro.data.settings import TransformSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What an evaluation depends on beside the data: the model, its weights (a hash of the file, or `timm`), the transform."""

    model: str
    weights: str
    transform: TransformSettings


def command(
    data: Annotated[str, typer.Option(help="A cell of `prepare_data`, e.g. digits or imagenet.")],
    weights: Annotated[Path | None, typer.Option(help="A .safetensors file of this project; model and preprocessing come from it.")] = None,
    model: Annotated[str | None, typer.Option(help="A registered name; with --weights it must be the file's.")] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="With --model alone: timm's published weights for it.")] = False,
    image_size: Annotated[int | None, typer.Option(min=1, help="Side in pixels, where it is not the one of the training.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 64,
) -> None:
    """Measure top-1 and top-5 accuracy on the validation split; written under results/measured."""
    paths = find_root()
    asked = {"data": data, "weights": weights, "model": model, "pretrained": pretrained, "image_size": image_size, "batch_size": batch_size}
    run(paths, load_runtime(paths), **asked)


def run(
    paths: Paths,
    runtime: Runtime,
    *,
    data: str,
    weights: Path | None,
    model: str | None,
    pretrained: bool,
    image_size: int | None,
    batch_size: int,
) -> None:
    """Evaluate, print one line, write results/measured/<device>/evaluate/<model>_<data>_<size>_<weights>/metrics.json.

    Raises:
        UserError: nothing to evaluate, or weights, model, classes, image size and data that do not belong together.
    """
    import torch

    from repro.data.imagenet import ImageFolder, eval_transform
    from repro.data.loader import EvalLoader
    from repro.data.manifest import open_root, read_manifest
    from repro.models.registry import family_module, kernel_backend
    from repro.models.weights import load_weights, read_metadata
    from repro.tasks.classification import accuracy

    started = time.monotonic()
    if weights is not None and pretrained:
        raise UserError("evaluate: --weights and --pretrained name two sets of weights; give one")
    if weights is None and not (model and pretrained):
        raise UserError("evaluate: an untrained model has no accuracy; give --weights FILE, or --model NAME --pretrained")
    manifest_path = paths.cell("prepare_data", data) / "manifest.json"
    manifest = read_manifest(manifest_path)
    tree = open_root(runtime.data_root(paths, manifest.kind), manifest)
    device = choose_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    if weights is not None:
        metadata = read_metadata(weights)
        name = model or metadata["model"]
        network = _build(name, **(metadata["options"] if name == metadata["model"] else {}))
        load_weights(weights, network, name=name)
        if metadata["classes"] != list(tree.classes):
            raise UserError(f"{weights}: was trained on other classes ({len(metadata['classes'])}) than {data} has ({len(tree.classes)})")
        transform = TransformSettings.from_preprocessing(metadata["preprocessing"], image_size)
    else:
        name, network = model, _build(model, pretrained=True, img_size=image_size)
        transform = TransformSettings.from_preprocessing(network.pretrained_cfg, image_size)
        if network.num_classes != len(tree.classes):
            raise UserError(f"{model}: has {network.num_classes} classes, {data} has {len(tree.classes)}")
    network.to(device).eval()
    loader = EvalLoader(ImageFolder(tree, "val", eval_transform(transform)), batch_size=batch_size, workers=runtime.workers, device=device)
    try:
        numbers = accuracy(network, loader, device)
    except (ValueError, AssertionError) as error:  # a size that the model cannot take
        raise UserError(f"{name}: {error}") from None
    finally:
        loader.close()

    # which weights: two files of one model, or two variants of it, are two results
    digest = "timm" if weights is None else hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    options = {} if weights is None else {k: v for k, v in metadata["options"].items() if k not in ("num_classes", "img_size")}
    metrics = {**numbers, "model": name, "options": options, "data": manifest.kind, "image_size": transform.image_size, "weights": digest}
    identity = make_identity(
        paths.root,
        ["stages.evaluate", family_module(name)],
        Evaluated(model=name, weights=digest, transform=transform),
        data_manifest=manifest_path,
        device=device_label(device),
        dtype="fp32",
        backend=kernel_backend(network, torch.float32),
    )
    folder = paths.measured(device_slug(device)) / "evaluate" / f"{name}_{data}_{transform.image_size}_{digest[:8]}"
    write_record(folder, metrics, identity, time.monotonic() - started)
    scores = f"top-1 {numbers['top1_percent']:.2f} %, top-5 {numbers['top5_percent']:.2f} %"
    print(f"{name} on {data} at {transform.image_size}: {scores} of {numbers['images']} images")


def _build(name: str, **options):
    from repro.models.registry import build_model

    try:
        return build_model(name, **options)
    except (ValueError, RuntimeError, OSError) as error:  # timm has no published weights of that name, or cannot fetch them
        raise UserError(f"evaluate: {error}") from None
