"""`repro explain`: what a trained model's inner learner does with a person's own pictures, and what it is good for."""

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.config import section_keys
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.runtime import choose_device, device_label, load_runtime
from repro.data.settings import TransformSettings

from .predict import pictures_in

Map = Literal["gmm", "erf", "reconstruction"]
BATCH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in eval mode, its registered name, the transform of its images, and its classes where its weights name them."""

    model: Any
    name: str
    transform: TransformSettings
    classes: tuple[str, ...] | None


def command(
    images: Annotated[list[Path] | None, typer.Argument(help="Pictures of any size; a folder stands for those in it.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A .safetensors file of this project, or with --model an official one; by default the first cell of `pretrain`.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A registered name; without --weights timm's published weights.")] = None,
    map: Annotated[Map, typer.Option(help="Gradient Magnitude Map, effective receptive field, or reconstruction loss by token.")] = "gmm",
    probe: Annotated[str | None, typer.Option(help="Instead: accuracy with a changed inner loop, of steps=K, ascent, q_is_k.")] = None,
    data: Annotated[str, typer.Option(help="With --probe: a cell of `prepare_data`.")] = "digits",
    output: Annotated[Path, typer.Option("--output", "-o", help="The figure.")] = Path("explained.png"),
) -> None:
    """Show where the inner learner's gradients, a model's receptive field or the inner loss lie; or change the inner loop."""
    paths = find_root()
    if weights is None and model is None:
        weights = paths.cell("pretrain", section_keys(paths.params, "pretrain")[0]) / "weights.safetensors"
    if bool(images) == bool(probe):
        raise UserError("explain: give pictures to draw a map, or --probe NAME to measure on a data set")
    if probe:
        run_probe(paths, probe, data, weights, model)
    else:
        run(images, weights, model, map, output, choose_device(load_runtime(paths).device))


def run(images: list[Path], weights: Path | None, model: str | None, map: Map, output: Path, device: Any) -> None:
    """Draw a map of the pictures: gmm a row for each (two with a snapshot of epoch 0), erf and reconstruction averaged over them.

    Raises:
        UserError: weights or a picture that cannot be read, or a map that the model does not have; nothing is written then.
    """
    from repro.explain import draw, inner

    if output.suffix.lower() != ".png":
        raise UserError(f"{output}: the figure is a PNG; name it so")
    subject = open_subject(weights, model, device)
    shown, inputs = _read(pictures_in(images), subject.transform, device)
    count = f"{len(shown)} picture" + ("s" if len(shown) > 1 else "")
    of = "/".join(weights.parts[-2:]) if weights else "published weights"
    caption = f"{subject.name}, {of}, {count}; {device_label(device)}"
    if map == "erf":
        shape, field = field_of(subject, inputs)
        draw.field_figure(output, {subject.name: field}, {subject.name: shape}, caption)
        print(f"half of the contributions within {shape.radius_50_px:.1f} px, 90 % within {shape.radius_90_px:.1f} px, anisotropy {shape.anisotropy:.3f}")
    else:
        others = snapshots_of(weights) if weights else {}
        try:
            if map == "gmm":
                states = {"before": open_subject(others[0], None, device)} if 0 in others else {}
                maps = {state: inner.gradient_maps(each.model, inputs) for state, each in {**states, "after": subject}.items()}
                tops = {state: {name: top.cpu().numpy() for name, top in inner.marked(subject.model, found).items()} for state, found in maps.items()}
                draw.gradient_figure(output, shown, {state: found.cpu().numpy() for state, found in maps.items()}, tops, caption)
            else:
                states = {f"epoch {epoch}": open_subject(file, None, device) for epoch, file in others.items()} or {"trained": subject}
                losses = {state: inner.reconstruction_losses(each.model, inputs).cpu().numpy() for state, each in states.items()}
                draw.reconstruction_figure(output, losses, caption)
        except ValueError as error:
            raise UserError(f"{weights or subject.name}: {error}; use --map erf") from None
    size = subject.transform.image_size
    print(f"{output}: {count}, resized to a short side of {round(size / subject.transform.crop_pct)} px, of which the centre {size}x{size} was seen")


def run_probe(paths: Paths, name: str, data: str, weights: Path | None, model: str | None) -> None:
    """Print the accuracy of a model on a validation split, as it is and with a changed inner loop, and what the literature found.

    Raises:
        UserError: an unknown probe; weights, or data, that do not fit.
    """
    from repro.data.manifest import open_root, read_manifest

    runtime = load_runtime(paths)
    manifest = read_manifest(paths.cell("prepare_data", data) / "manifest.json")
    subject = open_subject(weights, model, choose_device(runtime.device))
    tree = open_root(runtime.data_root(paths, manifest.kind), manifest)
    if subject.classes is not None and subject.classes != tree.classes:
        raise UserError(f"{weights}: was trained on other classes ({len(subject.classes)}) than {data} has ({len(tree.classes)})")
    found, said = probe(subject, tree, name, runtime.workers)
    before, _ = probe(subject, tree, "steps=1", runtime.workers)
    change = found["top1_percent"] - before["top1_percent"]
    print(f"{subject.name} on {data}, {found['images']} images: top-1 {before['top1_percent']:.2f} %, with {name} {found['top1_percent']:.2f} % ({change:+.2f})")
    for which, numbers in (("as it is", before), (f"with {name}", found)):
        print(f"inner loss of a chunk before and after its steps, {which}: {numbers['inner_loss_before']:.3f}, {numbers['inner_loss_after']:.3f}")
    print(f"Liu et al. found: {said}")


def probe(subject: Subject, tree: Any, name: str, workers: int) -> tuple[dict[str, float], str]:
    """Accuracy and inner losses over a tree's validation split with a changed inner loop, and what the literature found.

    Raises:
        UserError: an unknown probe, or a model without inner learner.
    """
    from repro.data.imagenet import ImageFolder, ToInput, eval_transform
    from repro.data.loader import EvalLoader
    from repro.explain.operator import Answer
    from repro.explain.probes import Probe
    from repro.tasks.classification import accuracy

    device = next(subject.model.parameters()).device
    loader = EvalLoader(ImageFolder(tree, "val", eval_transform(subject.transform)), batch_size=BATCH, workers=workers, device=device)
    try:
        changed = Probe(name)
        with Answer(changed):
            numbers = accuracy(subject.model, loader, ToInput(subject.transform, device))
        before, after = changed.inner_losses()
    except ValueError as error:
        raise UserError(f"explain: {error}") from None
    finally:
        loader.close()
    return {"top1_percent": numbers["top1_percent"], "images": numbers["images"], "inner_loss_before": before, "inner_loss_after": after}, changed.literature


def open_subject(weights: Path | None, model: str | None, device: Any) -> Subject:
    """A model in eval mode: of this project's file; with a name, of an official file, or without a file of timm's published weights.

    Raises:
        UserError: a file that cannot be read or does not fit. RunError: published weights that cannot be fetched.
    """
    from repro.models.weights import build_from_weights
    from repro.tasks.published import OfficialFile, build_published, find_published, is_timms

    classes = None
    if model is None:
        network, metadata = build_from_weights(weights)
        name, preprocessing, classes = metadata["model"], metadata["preprocessing"], tuple(metadata["classes"])
    elif weights is not None and not is_timms(model):
        official = OfficialFile(weights, model)
        name, preprocessing = model, official.preprocessing
        network = official.build(preprocessing["input_size"][-1])
    else:
        published = find_published(model)
        name, preprocessing = published.full_name, published.preprocessing
        network = build_published(published, preprocessing["input_size"][-1], weights)
    transform = TransformSettings.from_preprocessing(preprocessing)
    return Subject(model=network.to(device).eval().requires_grad_(False), name=name, transform=transform, classes=classes)


def field_of(subject: Subject, inputs: Any) -> tuple[Any, Any]:
    """The receptive field of a model's central unit: its `Shape`, and the contributions (H,W)."""
    from repro.explain import erf

    field = erf.receptive_field(erf.last_features(subject.model), inputs)
    return erf.describe(field, erf.centre_of(subject.model, tuple(inputs.shape[-2:]))), field.cpu().numpy()


def snapshots_of(weights: Path) -> dict[int, Path]:
    """The snapshots beside a weights file, by epoch."""
    found = {re.fullmatch(r"epoch_(\d+)", file.stem): file for file in (weights.parent / "snapshots").glob("epoch_*.safetensors")}
    return dict(sorted((int(match[1]), file) for match, file in found.items() if match))


def _read(files: list[Path], transform: TransformSettings, device: Any) -> tuple[list[Any], Any]:
    """Pictures as the model sees them, (H,W,3) uint8 each, and its inputs (N,3,H,W)."""
    import torch
    from PIL import Image

    from repro.data.imagenet import ToInput, eval_transform
    from repro.data.pixels import read_pixels

    seen = []
    for file in files:
        seen.append(torch.as_tensor(eval_transform(transform)(Image.fromarray(read_pixels(file)))))
        with warnings.catch_warnings(action="ignore"), Image.open(file) as image:  # large ones were read already
            frames = getattr(image, "n_frames", 1)
        if frames > 1:
            print(f"{file}: an animation of {frames} frames; the first is shown")
    stacked = torch.stack(seen)
    return list(stacked.permute(0, 2, 3, 1).numpy()), ToInput(transform, device)(stacked)
