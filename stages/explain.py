"""`repro explain`: what a trained model's inner learner does with a person's own pictures, and what it is good for."""

import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from repro.core.config import section_keys
from repro.core.errors import UserError
from repro.core.paths import Paths, find_root
from repro.core.runtime import choose_device, device_label, load_runtime
from repro.data.settings import TransformSettings

from . import Stage
from .predict import pictures_in
from .subject import field_of, open_subject, probe, snapshots_of

Map = Literal["gmm", "erf", "reconstruction"]

STAGE = Stage(purpose="use")


def command(
    images: Annotated[list[Path] | None, typer.Argument(help="Pictures of any size; a folder stands for those in it.")] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="A file of this project, or with --model an official one; by default of the first cell of `pretrain`."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A registered name; without --weights timm's published weights.")] = None,
    map: Annotated[Map, typer.Option(help="Gradient Magnitude Map, effective receptive field, or loss of each token.")] = "gmm",
    probe: Annotated[str | None, typer.Option(help="Instead: accuracy with an inner loop changed by steps=K, ascent or q_is_k.")] = None,
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
        half, most = f"{shape.radius_50_px:.1f} px", f"{shape.radius_90_px:.1f} px"
        print(f"half of the contributions within {half}, 90 % within {most}, anisotropy {shape.anisotropy:.3f}")
    else:
        others = snapshots_of(weights) if weights else {}
        try:
            if map == "gmm":
                states = {"before": open_subject(others[0], None, device)} if 0 in others else {}
                states["after"] = subject
                maps = {state: inner.gradient_maps(each.model, inputs).cpu() for state, each in states.items()}
                tops = {state: inner.marked(subject.model, found) for state, found in maps.items()}
                draw.gradient_figure(output, shown, maps, tops, caption)
            else:
                states = {f"epoch {epoch}": open_subject(file, None, device) for epoch, file in others.items()}
                states = states or {"trained": subject}
                losses = {state: inner.reconstruction_losses(each.model, inputs).cpu() for state, each in states.items()}
                draw.reconstruction_figure(output, losses, caption)
        except ValueError as error:
            raise UserError(f"{weights or subject.name}: {error}; use --map erf") from None
    size = subject.transform.image_size
    resized = f"resized to a short side of {round(size / subject.transform.crop_pct)} px"
    print(f"{output}: {count}, {resized}, of which the centre {size}x{size} was seen")


def run_probe(paths: Paths, name: str, data: str, weights: Path | None, model: str | None) -> None:
    """Print the accuracy of a model on a validation split, as it is and with a changed inner loop, and what the literature found.

    Raises:
        UserError: an unknown probe; weights, or data, that do not fit.
    """
    from repro.data.cells import open_cell

    runtime = load_runtime(paths)
    prepared = open_cell(paths, runtime, data)
    subject = open_subject(weights, model, choose_device(runtime.device))
    tree = prepared.open_tree()
    if subject.classes is not None and subject.classes != tree.classes:
        raise UserError(f"{weights}: was trained on other classes ({len(subject.classes)}) than {data} has ({len(tree.classes)})")
    found, said = probe(subject, tree, name, runtime.workers)
    before, _ = probe(subject, tree, "steps=1", runtime.workers)
    scores = [numbers["top1_percent"] for numbers in (before, found)]
    change = f"top-1 {scores[0]:.2f} %, with {name} {scores[1]:.2f} % ({scores[1] - scores[0]:+.2f})"
    print(f"{subject.name} on {data}, {found['images']} images: {change}")
    for which, numbers in (("as it is", before), (f"with {name}", found)):
        losses = f"{numbers['inner_loss_before']:.3f}, {numbers['inner_loss_after']:.3f}"
        print(f"inner loss of a chunk before and after its steps, {which}: {losses}")
    print(f"Liu et al. found: {said}")


def _read(files: list[Path], transform: TransformSettings, device: Any) -> tuple[list[Any], Any]:
    """Pictures as the model sees them, (H,W,3) uint8 each, and its inputs (N,3,H,W)."""
    import torch
    from PIL import Image

    from repro.data.classification import ToInput, eval_transform
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
