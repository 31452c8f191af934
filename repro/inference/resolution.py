"""Trained classifiers at larger images than they were trained on: accuracy and time, the work of `repro resolution`."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..bench.speed import STEP_TIMERS, describe_samples, read_load
from ..core.errors import UserError
from ..core.figures import STYLES, new_figure, save_png
from ..core.noise import find_noise
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime, choose_device, device_label, torch_dtype
from ..core.ui import Progress
from ..data.cells import open_cell
from ..data.classification import ImageFolder, eval_transform
from ..data.loader import EvalLoader
from ..data.tree import Tree
from ..models.checkpoints import open_weights
from ..models.registry import family_module, kernel_backend
from ..tasks.classification.task import accuracy
from .classifier import Classifier, load_classifier, one_line_errors, require_same_classes, require_sizes
from .params import ResolutionParams

FIGURE = "accuracy_and_time.png"
WARM_UP = 2  # batches whose forward passes are not timed


def measure_resolution(params: ResolutionParams, paths: Paths, runtime: Runtime) -> None:
    """Write results/resolution/{metrics.json, run.json} and a figure beside them.

    Each model is evaluated on all images of the reported split at each size, and its forward passes of some of their
    batches are timed. Position embeddings are resampled as for any other image size.

    Raises:
        UserError: missing data or weights, weights of other classes or another size, a size that a model does not take.
    """
    started = time.monotonic()
    device = choose_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    cell = open_cell(paths, runtime, params.data)
    tree, rows, backends = cell.open_tree(), [], set()
    checkpoints = {family: open_weights(paths.root / weights) for family, weights in params.models.items()}
    trained = {checkpoint.require_classifier().image_size for checkpoint in checkpoints.values()}
    if len(trained) > 1:
        raise UserError(
            f"resolution.models: were trained at different image sizes ({', '.join(map(str, sorted(trained)))}); take one"
        )
    for checkpoint in checkpoints.values():
        require_same_classes(checkpoint, tree.classes, params.data)
        require_sizes(checkpoint, device, params.image_sizes)
    images = len(tree.splits[cell.row.reported_split].names)
    with Progress("resolution", images * len(checkpoints) * len(params.image_sizes), unit="images") as progress:
        for size in params.image_sizes:
            classifiers = {family: load_classifier(each, device, size) for family, each in checkpoints.items()}
            done = images * len(rows)
            found = _evaluate(
                classifiers, tree, size, params, runtime.workers, lambda n, done=done: progress.update(done + n)
            )
            backends |= {kernel_backend(each.model, torch_dtype("fp32")) for each in classifiers.values()}
            rows += found
            for row in found:
                said = f"top-1 {row['top1_percent']:.2f} %, {row['latency_ms']:.3g} ms for each image"
                progress.print(f"{row['model']} at {size}: {said}")
    rows.sort(key=lambda row: list(checkpoints).index(row["family"]))
    folder, split = paths.results / "resolution", cell.row.reported_split
    metrics = {
        "data_set": cell.name,
        "split": split,
        "held_out_images": images,
        "train_image_size": trained.pop(),
        "evaluated": rows,
    }
    modules = {family_module(checkpoint.model) for checkpoint in checkpoints.values()}
    identity = make_identity(
        paths.root,
        [__name__, *sorted(modules)],
        params,
        data_manifest=cell.manifest_path,
        device=device_label(device),
        dtype="fp32",
        backend="/".join(sorted(map(str, backends))),
    )
    draw_resolution(folder / FIGURE, metrics, device_label(device))
    write_record(folder, metrics, identity, time.monotonic() - started)


def draw_resolution(path: Path, metrics: dict[str, Any], device: str) -> Path:
    """Accuracy and time over the image size, a line for each family; times of noisy rows are hollow."""
    figure, (accuracy, times) = new_figure(2)
    for family in dict.fromkeys(row["family"] for row in metrics["evaluated"]):
        label, colour, marker, line = STYLES[family]
        rows = sorted(
            (row for row in metrics["evaluated"] if row["family"] == family), key=lambda row: row["image_size"]
        )
        sizes = [row["image_size"][0] for row in rows]
        style = {
            "color": colour,
            "marker": marker,
            "linestyle": line,
            "markersize": 5,
            "label": label.partition(",")[0],
        }
        accuracy.plot(sizes, [row["top1_percent"] for row in rows], **style)
        times.plot(sizes, [row["latency_ms"] for row in rows], **style)
        noisy = [row for row in rows if row["noisy"]]
        hollow = {"color": colour, "marker": marker, "markersize": 5, "linestyle": "none", "markerfacecolor": "white"}
        times.plot([row["image_size"][0] for row in noisy], [row["latency_ms"] for row in noisy], **hollow)
    ticks, trained = sorted({row["image_size"][0] for row in metrics["evaluated"]}), metrics["train_image_size"]
    for panel in (accuracy, times):
        panel.set_xticks(ticks, [f"{size}\n{size / trained:.2g}×" for size in ticks])
        panel.set_xlabel("image size: pixels, and times that of the training")
        panel.grid(True, linewidth=0.4, alpha=0.5)
    accuracy.set(ylabel="top-1 accuracy (%)", ylim=(0, 101))
    times.set(ylabel="time of a forward pass for each image (ms)", yscale="log")
    handles, labels = accuracy.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=9)
    remark = "; hollow: noisy" if any(row["noisy"] for row in metrics["evaluated"]) else ""
    title = f"nanos trained at {trained}², on {metrics['held_out_images']} {metrics['split']} images of {metrics['data_set']}; {device}{remark}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return save_png(figure, path)


def _evaluate(
    classifiers: Mapping[str, Classifier],
    tree: Tree,
    size: int,
    params: ResolutionParams,
    workers: int,
    tell: Callable[[int], None],
) -> list[dict[str, Any]]:
    """The rows of all models at one size: accuracy, and milliseconds of a forward pass for each image of a batch.

    A batch is read once for all models whose images are cut alike, and passes through one after the other. `tell` is
    called with the number of images that have, counted for each model.
    """
    done = 0
    alike: dict[tuple, list[str]] = {}
    for family, classifier in classifiers.items():
        alike.setdefault((classifier.transform.crop_pct, classifier.transform.interpolation), []).append(family)
    rows = {}
    for families in alike.values():
        transform, device = classifiers[families[0]].transform, classifiers[families[0]].device
        dataset = ImageFolder(tree, tree.kind.reported_split, eval_transform(transform))
        loader = EvalLoader(dataset, batch_size=params.batch_size, workers=workers, device=device)
        targets, logits, samples_ms = [], {name: [] for name in families}, {name: [] for name in families}
        try:
            for images, labels in loader:
                targets.append(labels)
                for name in families:
                    taken_ms, found = _time_forward(classifiers[name], images, size)
                    samples_ms[name].append(taken_ms / len(labels))
                    logits[name].append(found)
                done += len(labels) * len(families)
                tell(done)
        finally:
            loader.close()
        about = read_load() | {"device": device_label(device), "threads": torch.get_num_threads()}
        for name in families:
            checkpoint = classifiers[name].checkpoint
            row = {
                "family": name,
                "model": checkpoint.name,
                "weights_hash": checkpoint.hash,
                "image_size": [size, size],
            }
            row |= accuracy(nn.Identity(), zip(logits[name], targets, strict=True), nn.Identity())
            timed_ms = samples_ms[name][WARM_UP : WARM_UP + params.repeats] or samples_ms[name]
            row |= describe_samples(timed_ms) | about
            rows[name] = row | {"noisy": find_noise(row)}
    return [rows[name] for name in classifiers]


def _time_forward(classifier: Classifier, images: Tensor, size: int) -> tuple[float, Tensor]:
    """Milliseconds of a forward pass of uint8 images, and its logits on the CPU."""
    inputs, found = classifier.to_inputs(images), []
    with torch.inference_mode(), one_line_errors(classifier.name, size):
        taken_ms = STEP_TIMERS[classifier.device.type](lambda: found.append(classifier.model(inputs)))
    return taken_ms, found[0].float().cpu()
