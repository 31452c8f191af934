"""Accuracy and time of trained classifiers at larger images than those of their training, for `repro resolution`."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..bench.speed import describe_samples, read_load, time_in_turn
from ..core.errors import UserError
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime, choose_device, device_label, prepare_process, torch_dtype
from ..core.ui import Progress
from ..data.cells import open_cell
from ..data.loader import EvalLoader
from ..data.tree import Tree
from ..models.checkpoints import open_weights
from ..models.registry import kernel_backend
from ..tasks.classification.task import accuracy
from .classifier import Classifier, load_classifier, one_line_errors, require_same_classes, require_sizes
from .params import ResolutionParams


def measure_resolution(params: ResolutionParams, paths: Paths, runtime: Runtime) -> None:
    """Write results/resolution/{metrics.json, run.json}.

    Each model is evaluated on all images of the reported split at each size, and its forward pass is timed on a batch
    of that size. Position embeddings are resampled as for any other image size.

    Raises:
        UserError: missing data or weights, weights of other classes or another size, a size that a model does not take.
    """
    started = time.monotonic()
    device = choose_device(runtime.device)
    prepare_process(runtime)
    cell = open_cell(paths, runtime, params.data)
    tree, rows, backends = cell.open_tree(), [], set()
    checkpoints = {family: open_weights(paths.find(weights)) for family, weights in params.models.items()}
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
            scores = _evaluate(classifiers, tree, params, runtime.workers, progress)
            for family, classifier in classifiers.items():
                row = {
                    "family": family,
                    "model": classifier.name,
                    "weights_hash": classifier.checkpoint.hash,
                    "image_size": [size, size],
                    **scores[family],
                    **_time(classifier, params),
                }
                rows.append(row)
                backends.add(kernel_backend(classifier.model, torch_dtype("fp32")))
                found = f"top-1 {row['top1_percent']:.2f} %, {row['latency_ms']:.3g} ms for each image"
                progress.print(f"{classifier.name} at {size}: {found}")
    # all sizes of a family together, in the order of the params; the sort keeps the order of the sizes
    rows.sort(key=lambda row: list(checkpoints).index(row["family"]))
    folder, split = paths.results / "resolution", cell.row.reported_split
    metrics = {
        "data_set": cell.name,
        "split": split,
        "held_out_images": images,
        "train_image_size": trained.pop(),
        "evaluated": rows,
    }
    identity = make_identity(
        paths.root,
        params,
        data_manifest=cell.manifest_path,
        device=device_label(device),
        dtype="fp32",
        backend="/".join(sorted(backends)),
    )
    write_record(folder / "metrics.json", metrics, identity, time.monotonic() - started)


def _evaluate(
    classifiers: Mapping[str, Classifier], tree: Tree, params: ResolutionParams, workers: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Map family to scores, see `accuracy`.

    A batch is read once for all models with the same crop and interpolation, the only settings besides the image size
    that `eval_transform` reads. Mean and std are applied by each model's `to_inputs`.
    """
    alike: dict[tuple, list[str]] = {}
    for family, classifier in classifiers.items():
        settings = classifier.transform
        alike.setdefault((settings.crop_pct, settings.crop_mode, settings.interpolation), []).append(family)
    scores = {}
    for families in alike.values():
        first = classifiers[families[0]]
        loader = EvalLoader(
            first.open_dataset(tree), batch_size=params.batch_size, workers=workers, device=first.device
        )
        targets, logits = [], {family: [] for family in families}
        with contextlib.closing(loader):
            for images, labels in loader:
                targets.append(labels)
                for family in families:
                    logits[family].append(_classify(classifiers[family], images))
                progress.update(progress.done + len(labels) * len(families))
        for family in families:  # `accuracy` takes the logits for the images of a model that changes nothing
            scores[family] = accuracy(nn.Identity(), zip(logits[family], targets, strict=True), nn.Identity())
    return scores


def _classify(classifier: Classifier, images: Tensor) -> Tensor:
    """Compute the logits of uint8 images, on the CPU, where those of all images wait for `accuracy`."""
    with torch.inference_mode(), one_line_errors(classifier.name, classifier.transform.image_size):
        return classifier.model(classifier.to_inputs(images)).float().cpu()


def _time(classifier: Classifier, params: ResolutionParams) -> dict[str, Any]:
    """Time the forward pass of a batch; return the columns of a row of speed, in milliseconds per image."""
    size, device = classifier.transform.image_size, classifier.device
    inputs = torch.zeros(params.batch_size, 3, size, size, device=device)
    about = read_load() | {"device": device_label(device), "threads": torch.get_num_threads()}
    with torch.inference_mode():
        samples = time_in_turn({"model": lambda: classifier.model(inputs)}, device.type, params.repeats)["model"]
    return describe_samples([sample / params.batch_size for sample in samples]) | about
