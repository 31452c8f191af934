"""Gradient maps, receptive fields and reconstruction losses of trained cells, in numbers and figures.

This is the work of `repro visualize`.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import RunError, UserError
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime, choose_device, device_label, prepare_process
from ..data.cells import open_cell
from ..data.tree import Tree
from ..models.checkpoints import open_weights
from ..models.registry import kernel_backend
from . import draw, inner
from .classifier import Classifier, load_classifier, subsample
from .explain import find_snapshots, measure_field
from .params import VisualizeParams
from .probes import run_probe

PROFILE_STEP_PX = 16  # distance of the radii whose shares are recorded
_INK = 0.5  # mean brightness, as a share of the maximum, from which a patch of a digit counts as ink


def visualize(params: VisualizeParams, paths: Paths, runtime: Runtime) -> None:
    """Write results/visualize/{metrics.json, run.json} and three figures.

    A receptive field whose weights are missing is left blank in the figure, and is null with a reason in the record.
    The names of states, such as `before` and `epoch 0`, label the figures and are keys of the record, which
    `papers.vision_ttt.sections` reads.

    Raises:
        UserError: missing data, or missing weights or snapshots of the cell.
    """
    started = time.monotonic()
    device = choose_device(runtime.device)
    prepare_process(runtime)
    cell = open_cell(paths, runtime, params.data)
    tree = cell.open_tree()
    weights = paths.artifacts(paths.cell("pretrain", params.cell) / "metrics.json") / "weights.safetensors"
    snapshots = find_snapshots(weights)
    if 0 not in snapshots:
        raise UserError(
            f"{weights.parent}: no snapshot of epoch 0; add 0 to pretrain.{params.cell}.snapshot_epochs and train it again"
        )
    classifier = load_classifier(open_weights(weights), device)
    states = {epoch: load_classifier(open_weights(file), device) for epoch, file in snapshots.items()}
    chosen, folder = subsample(tree, params.images, params.seed), paths.results / "visualize"
    images = classifier.read_images(chosen)
    inputs = classifier.to_inputs(images)
    caption = f"{params.cell}, {tree.kind.reported_split} images of {params.data}; {device_label(device)}"

    metrics: dict[str, Any] = {
        "cell": params.cell,
        "model": classifier.name,
        "data": cell.name,
        "kind": cell.kind,
        "image_size": classifier.transform.image_size,
        "held_out_images": len(images),
        "gradient_magnitude": _compare_gradients(
            {"before": states[0], "after": classifier}, images, inputs, params.shown, cell.kind, folder, caption
        ),
    }
    losses = {
        f"epoch {epoch}": inner.compute_reconstruction_losses(each.model, inputs).cpu()
        for epoch, each in states.items()
    }
    mean = f"forward scan, mean over {len(images)} images"
    draw.draw_losses(folder / "fig11_reconstruction.png", losses, f"{caption}; {mean}")
    metrics["reconstruction_loss"] = {
        state.replace(" ", "_"): _summarise_losses(found) for state, found in losses.items()
    }
    metrics["receptive_fields"] = _compare_fields(params, paths, tree, device, folder)
    measured = subsample(tree, params.probe_images, params.seed)
    metrics["probes"] = {
        name: run_probe(classifier, measured, name, runtime.workers) for name in ("steps=1", *params.probes)
    }
    identity = make_identity(
        paths.root,
        params,
        data_manifest=cell.manifest_path,
        device=device_label(device),
        dtype="fp32",
        backend=kernel_backend(classifier.model, torch.float32),
    )
    write_record(folder / "metrics.json", metrics, identity, time.monotonic() - started)
    _print_summary(metrics)


def _compare_gradients(
    states: dict[str, Classifier], images: Tensor, inputs: Tensor, shown: int, kind: str, folder: Path, caption: str
) -> dict[str, Any]:
    """Draw Fig. 3 for the model before and after training; return the numbers of each state."""
    model = states["after"].model
    maps = {state: inner.compute_gradient_maps(each.model, inputs).cpu() for state, each in states.items()}
    tops = {state: inner.mark_tokens(model, found) for state, found in maps.items()}
    # evenly spaced, since images are sorted by class
    places = torch.linspace(0, len(inputs) - 1, min(shown, len(inputs))).long()
    draw.draw_gradients(
        folder / "fig3_gradient_magnitude.png",
        list(images[places].permute(0, 2, 3, 1).numpy()),
        {state: found[places] for state, found in maps.items()},
        {state: {name: top[places] for name, top in found.items()} for state, found in tops.items()},
        caption,
    )
    grid = tuple(maps["after"].shape[-2:])
    first, ink = inner.find_first_chunks(model, grid), _find_ink(images, grid) if kind == "digits" else None
    return {state: _summarise_gradients(maps[state], tops[state], first, ink) for state in maps}


def _find_ink(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return a mask (N,h,w) of the patches that are ink in images of digits (N,3,H,W)."""
    return F.adaptive_avg_pool2d(images.float().mean(1, keepdim=True) / 255, grid)[:, 0] >= _INK


def _summarise_gradients(maps: Tensor, tops: dict[str, Tensor], first: Tensor, ink: Tensor | None) -> dict[str, Any]:
    """Compute shares in percent for maps (N,L,h,w), with masks `tops` and `ink` (N,h,w), and `first` (h,w).

    They are the shares of gradients in marked tokens and in first chunks, and of ink in marked tokens. `top30` is
    marked among all tokens, `later_top30` among those after the first chunks. Each share of ink is recorded with the
    share among all tokens of the same region.
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
        return found | {"ink": None, "ink_reason": "only for digits is it known which pixels are the object"}
    found["ink"] = {"top30_percent": _percent(ink[tops["all"]]), "all_percent": _percent(ink)}
    if not first.all():
        found["ink"] |= {"later_top30_percent": _percent(ink[tops["later"]]), "later_percent": _percent(ink[:, ~first])}
    return found


def _percent(shares: Tensor) -> float:
    """Return the mean of shares, or of a mask, in percent."""
    return 100 * float(shares.double().mean())


def _summarise_losses(losses: Tensor) -> dict[str, Any]:
    """Compute, for losses (L,T), each layer's mean, the smallest, and the mean coefficient of variation over tokens."""
    mean = losses.mean(1)
    variation = float((losses.std(1, correction=0) / mean).mean())
    return {"mean_by_layer": mean.tolist(), "smallest": float(losses.min()), "variation_over_tokens": variation}


def _compare_fields(
    params: VisualizeParams, paths: Paths, tree: Tree, device: torch.device, folder: Path
) -> dict[str, Any]:
    """Draw Fig. 8; return the numbers of each model."""
    chosen = subsample(tree, params.field_images, params.seed)
    fields, shapes, numbers = {}, {}, {}
    for label, source in params.receptive_fields.items():
        try:
            file = paths.find(source.weights) if source.weights else None
            if file is not None and not file.is_file():
                raise RunError(f"{source.weights} is missing")
            classifier = load_classifier(open_weights(file, model=source.model), device)
        except RunError as error:
            numbers[label], fields[label] = {"reason": str(error), "radius_50_px": None}, str(error)
            continue
        shape, fields[label] = measure_field(classifier, classifier.to_inputs(classifier.read_images(chosen)))
        shapes[label] = shape
        numbers[label] = {
            "model": classifier.name,
            "image_size": classifier.transform.image_size,
            **dataclasses.asdict(shape),
        }
        if source.weights:
            numbers[label]["weights"] = source.weights
        profile = list(enumerate(shape.share_within))[::PROFILE_STEP_PX]
        numbers[label]["share_within"] = {f"{radius}_px": share for radius, share in profile}
        if shape.share_ahead is None:
            numbers[label]["share_ahead_reason"] = "nothing outside the central patch contributes"
    images = f"mean over {params.field_images} {tree.kind.reported_split} images of {params.data}"
    caption = f"contributions of pixels to the central unit, {images}; {device_label(device)}"
    draw.draw_fields(folder / "fig8_receptive_field.png", fields, shapes, caption)
    return numbers


def _print_summary(metrics: dict[str, Any]) -> None:
    """Print the main numbers of the record of `visualize`, a line each."""
    for state, numbers in metrics["gradient_magnitude"].items():
        on_ink = f", {numbers['ink']['top30_percent']:.0f} % on ink" if numbers["ink"] else ""
        print(
            f"top 30 % of the gradients {state} training: {numbers['top30_in_first_chunks_percent']:.0f} % in first chunks{on_ink}"
        )
    for label, field in metrics["receptive_fields"].items():
        print(f"{label}: {field['reason']}" if "reason" in field else f"{label}: anisotropy {field['anisotropy']:.3f}")
    for name, numbers in metrics["probes"].items():
        print(
            f"{name}: top-1 {numbers['top1_percent']:.2f} %, inner loss after its steps {numbers['inner_loss_after']:.2f}"
        )
