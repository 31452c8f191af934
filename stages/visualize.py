"""`repro visualize`: gradient magnitude maps, receptive fields and reconstruction losses (Fig. 3, 8 to 11), and their numbers."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from repro.core.config import bounded, load_section
from repro.core.errors import RunError, UserError
from repro.core.paths import Paths, find_root
from repro.core.record import make_identity, write_record
from repro.core.runtime import Runtime, choose_device, device_label, load_runtime

from . import Stage
from .evaluate import some
from .subject import field_of, open_subject, probe, snapshots_of

RADII = 16  # pixels between the distances whose shares are recorded
INK = 0.5  # of full brightness: a patch of a digit is ink from this mean on


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldSource:
    """A model of Fig. 8: a file of this project, or with `model` an official one, or `model` alone for timm's published weights."""

    weights: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.weights is None and self.model is None:
            raise ValueError("weights: missing, and no model is named whose published weights could be taken")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisualizeParams:
    """The `visualize:` section.

    Args:
        cell: of `pretrain`, with a snapshot of epoch 0: its gradients, reconstruction losses and probes.
        data: a cell of `prepare_data`; images are of its validation split.
        seed: draws them.
        images: over which maps and losses are averaged (the paper: 128).
        shown: of these, in the figure of gradients, evenly from class to class.
        receptive_fields: label -> model, in the order of Fig. 8.
        field_images: over which receptive fields are averaged.
        probes: changes of the inner loop, see `repro.explain.probes`.
        probe_images: on which their accuracy is measured, at most.
    """

    cell: str
    data: str
    seed: int = bounded(0, ge=0)
    images: int = bounded(128, ge=1)
    shown: int = bounded(3, ge=1)
    receptive_fields: dict[str, FieldSource]
    field_images: int = bounded(ge=1)
    probes: tuple[str, ...] = ()
    probe_images: int = bounded(ge=1)


STAGE = Stage(params=VisualizeParams, cost="repro.planning.costs:charge_unknown")


def command() -> None:
    """Draw what the inner learner does, and where models look, and measure both."""
    paths = find_root()
    run(load_section(VisualizeParams, paths.params, "visualize"), paths, load_runtime(paths))


def run(params: VisualizeParams, paths: Paths, runtime: Runtime) -> None:
    """Write results/visualize/{metrics.json, run.json} and the four figures beside them.

    A receptive field whose weights are missing is left blank and recorded as null with the reason.

    Raises:
        UserError: data, or the weights or snapshots of the cell, that are missing.
    """
    import torch

    from repro.data.cells import open_cell
    from repro.explain import draw, inner
    from repro.models.registry import family_module, kernel_backend

    started = time.monotonic()
    device = choose_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    data = open_cell(paths, runtime, params.data)
    tree, manifest_path, manifest = data.open_tree(), data.manifest_path, data.manifest
    weights = paths.cell("pretrain", params.cell) / "weights.safetensors"
    snapshots = snapshots_of(weights)
    if 0 not in snapshots:
        raise UserError(f"{weights.parent}: no snapshot of epoch 0; add 0 to pretrain.{params.cell}.snapshot_epochs and train it")
    subject = open_subject(weights, None, device)
    states = {epoch: open_subject(file, None, device) for epoch, file in snapshots.items()}
    chosen, folder = _part(tree, params.images, params.seed), paths.results / "visualize"
    pixels, inputs = _images(chosen, subject.transform, device)
    caption = f"{params.cell}, validation images of {params.data}; {device_label(device)}"

    maps = {state: inner.gradient_maps(each.model, inputs).cpu() for state, each in (("before", states[0]), ("after", subject))}
    tops = {state: inner.marked(subject.model, found) for state, found in maps.items()}
    shown = torch.linspace(0, len(inputs) - 1, min(params.shown, len(inputs))).long()  # images come by class
    draw.gradient_figure(
        folder / "fig3_gradient_magnitude.png",
        list(pixels[shown].permute(0, 2, 3, 1).numpy()),
        {state: found[shown] for state, found in maps.items()},
        {state: {name: top[shown] for name, top in found.items()} for state, found in tops.items()},
        caption,
    )
    metrics: dict[str, Any] = {"cell": params.cell, "data": manifest.kind, "images": len(inputs)}
    grid = tuple(maps["after"].shape[-2:])
    first, ink = inner.first_chunks(subject.model, grid), _ink(pixels, grid) if manifest.kind == "digits" else None
    metrics["gradient_magnitude"] = {state: _gradient_numbers(maps[state], tops[state], first, ink) for state in maps}

    losses = {f"epoch {epoch}": inner.reconstruction_losses(each.model, inputs).cpu() for epoch, each in states.items()}
    draw.reconstruction_figure(folder / "fig11_reconstruction.png", losses, f"{caption}; forth direction, mean over {len(inputs)} images")
    metrics["reconstruction_loss"] = {state.replace(" ", "_"): _loss_numbers(found) for state, found in losses.items()}

    metrics["receptive_fields"], modules = _fields(params, paths, tree, device, folder)

    measured = _part(tree, params.probe_images, params.seed)
    metrics["probes"] = {name: probe(subject, measured, name, runtime.workers)[0] for name in ("steps=1", *params.probes)}

    identity = make_identity(
        paths.root,
        ["stages.visualize", family_module(subject.name), *modules],
        params,
        data_manifest=manifest_path,
        device=device_label(device),
        dtype="fp32",
        backend=kernel_backend(subject.model, torch.float32),
    )
    write_record(folder, metrics, identity, time.monotonic() - started)
    for state, numbers in metrics["gradient_magnitude"].items():
        on_ink = f", {numbers['ink']['top30_percent']:.0f} % on ink" if numbers["ink"] else ""
        print(f"top 30 % of the gradients {state} training: {numbers['top30_in_first_chunks_percent']:.0f} % in first chunks{on_ink}")
    for label, field in metrics["receptive_fields"].items():
        print(f"{label}: {field['reason']}" if "reason" in field else f"{label}: anisotropy {field['anisotropy']:.3f}")
    for name, numbers in metrics["probes"].items():
        print(f"{name}: top-1 {numbers['top1_percent']:.2f} %, inner loss after its steps {numbers['inner_loss_after']:.2f}")


def _part(tree: Any, count: int, seed: int) -> Any:
    return some(tree, min(count, len(tree.splits["val"].names)), seed)


def _images(tree: Any, transform: Any, device: Any) -> tuple[Any, Any]:
    """The validation images of a tree, (N,3,H,W) uint8, and as inputs of a model."""
    import torch

    from repro.data.classification import ImageFolder, ToInput, eval_transform

    dataset = ImageFolder(tree, "val", eval_transform(transform))
    pixels = torch.stack([torch.as_tensor(dataset[(0, index)][0]) for index in range(len(dataset))])
    return pixels, ToInput(transform, device)(pixels)


def _ink(pixels: Any, grid: tuple[int, int]) -> Any:
    """Which patches of digits are ink: (N,3,H,W) -> (N,h,w) bool."""
    import torch.nn.functional as F

    return F.adaptive_avg_pool2d(pixels.float().mean(1, keepdim=True) / 255, grid)[:, 0] >= INK


def _gradient_numbers(maps: Any, tops: Any, first: Any, ink: Any) -> dict[str, Any]:
    """Of maps (N,L,h,w), in percent: what marked tokens and first chunks have of all gradients, and how many tokens are ink.

    `top30` are marked among all tokens, `later` among those beyond the directions' first chunks; the shares of tokens that are ink
    anyhow stand beside theirs.
    """
    mean = maps.mean(1)
    total = mean.sum((1, 2))
    found: dict[str, Any] = {
        "mean_by_layer": maps.mean((0, 2, 3)).tolist(),
        "top30_share_percent": _percent((mean * tops["all"]).sum((1, 2)) / total),
        "top30_in_first_chunks_percent": _percent(first.expand_as(mean)[tops["all"]]),
        "first_chunks_share_percent": _percent((mean * first).sum((1, 2)) / total),
        "first_chunks_tokens_percent": _percent(first),
    }
    if ink is None:
        return found | {"ink": None, "ink_reason": "only digits say which pixels are the object"}
    found["ink"] = {"top30_percent": _percent(ink[tops["all"]]), "all_percent": _percent(ink)}
    if not first.all():
        found["ink"] |= {"later_top30_percent": _percent(ink[tops["later"]]), "later_percent": _percent(ink[:, ~first])}
    return found


def _percent(shares: Any) -> float:
    return 100 * float(shares.double().mean())


def _loss_numbers(losses: Any) -> dict[str, Any]:
    """Of losses (L,T): mean of each layer, the smallest, and how uneven tokens are (deviation over mean, mean of layers)."""
    mean = losses.mean(1)
    uneven = float((losses.std(1, correction=0) / mean).mean())
    return {"mean_by_layer": mean.tolist(), "smallest": float(losses.min()), "variation_over_tokens": uneven}


def _fields(params: VisualizeParams, paths: Paths, tree: Any, device: Any, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Draw Fig. 8; the numbers of each model and the modules that their families lie in."""
    import torch

    from repro.explain import draw, erf
    from repro.models.registry import family_module

    chosen = _part(tree, params.field_images, params.seed)
    fields, shapes, numbers, modules = {}, {}, {}, []
    for label, source in params.receptive_fields.items():
        try:
            file = paths.root / source.weights if source.weights else None
            if file is not None and not file.is_file():
                raise RunError(f"{source.weights} is missing")
            subject = open_subject(file, source.model, device)
        except RunError as error:
            numbers[label], fields[label] = {"reason": str(error), "radius_50_px": None}, str(error)
            continue
        shapes[label], fields[label] = field_of(subject, _images(chosen, subject.transform, device)[1])
        modules.append(family_module(subject.name.partition(".")[0]))
        numbers[label] = {"model": subject.name, "image_size": subject.transform.image_size, **dataclasses.asdict(shapes[label])}
        profile = list(enumerate(shapes[label].share_within))[::RADII]
        numbers[label]["share_within"] = {f"{radius}_px": share for radius, share in profile}
        if shapes[label].share_ahead is None:
            numbers[label]["share_ahead_reason"] = "nothing outside the central patch contributes"
    images = f"mean over {params.field_images} validation images of {params.data}"
    about = f"contributions of pixels to the central unit, {images}; {device_label(device)}"
    draw.field_figure(folder / "fig8_receptive_field.png", fields, shapes, about)
    even = torch.ones(next((field.shape for field in fields.values() if not isinstance(field, str)), (1, 1)), dtype=torch.float64)
    middle = tuple((side - 1) / 2 for side in even.shape)
    label = f"even over {even.shape[0]} × {even.shape[1]} px"
    draw.radial_figure(folder / "fig8_radial_profile.png", shapes, (label, erf.describe(even, middle)), about)
    return numbers, modules
