"""Accuracy of trained models on a prepared data set, at one or several image sizes, for `repro evaluate`."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.csvfile import write_csv
from ..core.errors import RunError, UserError
from ..core.figures import save_png
from ..core.paths import Paths
from ..core.record import make_identity, write_record
from ..core.runtime import Runtime, choose_device, device_label, device_slug, prepare_process, torch_dtype
from ..core.ui import Progress, print_error
from ..data.cells import DataCell, open_cell
from ..data.findings import show_few
from ..data.kinds import IMAGENET_1K
from ..data.tree import Tree
from ..models.checkpoints import Checkpoint, open_weights
from ..models.published import Published
from ..models.registry import kernel_backend
from .classifier import Classifier, load_classifier, one_line_errors, require_same_classes, require_sizes, subsample
from .params import EvaluatedParams, EvaluateRequest

LIMIT_SEED = 0  # seed of the images that a limit draws: the same ones for every model
# columns of a curve, as far as its rows have them
CURVE = ("image_size", "top1_percent", "top5_percent", "held_out_loss", "held_out_images")
# () -> (models with published weights and their image sides in pixels; reason -> labels of the rows without weights)
FindModels = Callable[[], tuple[Sequence[tuple[Published, int]], dict[str, list[str]]]]
FindPrinted = Callable[[str, int], str | None]  # (registered name, side in pixels) -> percent as printed in the paper


def evaluate(
    paths: Paths,
    runtime: Runtime,
    data: str,
    request: EvaluateRequest,
    *,
    find_models: FindModels,
    find_printed: FindPrinted,
) -> None:
    """Evaluate each model at each size, print a line for each, and write the records.

    A record is results/replications/<device>/evaluate/<model>_<data>_<size>_<weights>.json; for a user's own set the
    folder is results/own/<set>/<device>/evaluate/. A limit, and a dtype other than fp32, are appended to the name.
    Several sizes also give <model>_<data>_<weights>/curve.{csv,png}. If one of several models fails, a line on stderr
    reports it and the others are evaluated.

    Args:
        data: a cell of `prepare_data`.
        request: models or weights, sizes, batch size, limit and dtype.
        find_models: returns the models of the paper's table, for `request.table1`.
        find_printed: returns the accuracy that the paper prints for a model, which is shown next to a full score.

    Raises:
        UserError: nothing to evaluate; weights, model, classes, image size, limit and data that do not match; or
            non-finite logits.
        RunError: weights that cannot be downloaded, or too little GPU memory; with several models, after the last.
    """
    request.check()
    models = _open_models(request, find_models)
    cell = open_cell(paths, runtime, data)
    if request.limit is not None:
        split = cell.row.reported_split
        check_limit(request.limit, cell.manifest.splits[split].images, split)
    tree = cell.open_tree()
    for checkpoint, _ in models:
        _require_fitting(checkpoint, tree.classes, data)
    subjects = [(each, request.image_sizes or (size or each.image_size,)) for each, size in models]
    if tree.kind.other_splits and any(checkpoint.classes is None for checkpoint, _ in subjects):
        print(f"{data}: the weights name no classes; their logits are taken in the order {show_few(tree.classes)}")
    if request.limit is not None:
        tree = subsample(tree, request.limit, LIMIT_SEED)
    prepare_process(runtime)
    evaluation = _Evaluation(paths, runtime, cell, tree, choose_device(runtime.device), request, find_printed)
    failed = []
    for checkpoint, sizes in subjects:
        try:
            evaluation.run(checkpoint, sizes)
        except (UserError, RunError) as error:
            if len(subjects) == 1:
                raise
            failed.append(checkpoint.name)
            print_error(error)
    if failed:
        raise RunError(f"evaluate: {len(failed)} of {len(subjects)} models were not evaluated: {', '.join(failed)}")


def check_limit(limit: int, images: int, split: str) -> None:
    """Raise UserError for a limit that excludes no image, or whose score would look like one of a whole split."""
    if limit >= images:
        raise UserError(
            f"evaluate: --limit {limit}: the split {split} has {images} images; leave out --limit to use all of them"
        )
    if limit == IMAGENET_1K.val:  # reports recognise a full score by this number of images
        raise UserError(
            f"evaluate: --limit {limit}: is the size of ImageNet-1K's split and would be taken for it; give another number"
        )


def _open_models(request: EvaluateRequest, find_models: FindModels) -> list[tuple[Checkpoint, int | None]]:
    """Return the asked checkpoints, each with the image size of the paper's table; nothing is built or downloaded."""
    if request.weights is not None:
        model = request.models[0] if request.models else None
        return [(open_weights(request.weights, model=model).require_classifier(), None)]
    if request.table1:
        rows, left_out = find_models()
        for reason, labels in left_out.items():
            print(f"left out: {', '.join(labels)}: {reason}", flush=True)
        return [(open_weights(None, model=published.full_name), size) for published, size in rows]
    return [(open_weights(None, model=name), None) for name in request.models]


def _require_fitting(checkpoint: Checkpoint, classes: Sequence[str], data: str) -> None:
    """Raise a UserError where a checkpoint's classes are not those of the data."""
    require_same_classes(checkpoint, classes, data)
    if checkpoint.num_classes not in (None, len(classes)):
        # published weights with their tag, which `where` leaves out for those of a paper's row
        where = checkpoint.path or ".".join(filter(None, (checkpoint.model, checkpoint.facts["weights_tag"])))
        raise UserError(f"{where}: has {checkpoint.num_classes} classes, {data} has {len(classes)}")


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """The common state of all models of one call."""

    paths: Paths
    runtime: Runtime
    cell: DataCell
    tree: Tree
    device: torch.device
    request: EvaluateRequest
    find_printed: FindPrinted

    def run(self, checkpoint: Checkpoint, sizes: Sequence[int]) -> None:
        """Evaluate one model at all its sizes."""
        if len(sizes) > 1:
            require_sizes(checkpoint, self.device, sizes)
        rows = [self._evaluate(load_classifier(checkpoint, self.device, size)) for size in sizes]
        if len(rows) > 1:
            folder = self.paths.artifacts(self._file(checkpoint))
            _write_curve(folder, rows, f"{checkpoint.name} on {self.cell.name}")
            print(f"{checkpoint.name} on {self.cell.name}: curve in {folder.relative_to(self.paths.root)}")

    def _file(self, checkpoint: Checkpoint, size: int | None = None) -> Path:
        """Return the file of a record; its name must hold all that changes the scores, or a record replaces another."""
        parts = [checkpoint.name, self.cell.name, *([str(size)] if size else []), checkpoint.hash[:8]]
        parts += [f"limit{self.request.limit}"] if self.request.limit else []
        parts += [self.request.dtype] if self.request.dtype != "fp32" else []
        return self.cell.records(self.paths, device_slug(self.device)) / "evaluate" / f"{'_'.join(parts)}.json"

    def _evaluate(self, classifier: Classifier) -> dict[str, Any]:
        """Measure, record and print the accuracy of a model at one size; return the record's metrics."""
        started = time.monotonic()
        request, checkpoint, size = self.request, classifier.checkpoint, classifier.transform.image_size
        split = self.cell.row.reported_split
        images = len(self.tree.splits[split].names)
        with (
            Progress(f"{classifier.name} at {size}", images, unit="images") as progress,
            one_line_errors(classifier.name, size),
        ):
            scores = classifier.measure_accuracy(
                self.tree,
                batch_size=request.batch_size,
                workers=self.runtime.workers,
                dtype=request.dtype,
                progress=progress,
            )
        if not math.isfinite(scores["held_out_loss"]):
            advice = "use --dtype fp32 or bf16" if request.dtype == "fp16" else "its training went wrong"
            raise UserError(f"{checkpoint.where} at {size}: logits are not finite in {request.dtype}; {advice}")
        metrics = {
            **scores,
            "model": checkpoint.name,
            "data": self.cell.name,
            "kind": self.cell.kind,
            "split": split,
            **checkpoint.facts,
            "weights_hash": checkpoint.hash,
            "image_size": size,
            "train_image_size": checkpoint.image_size,
        }
        if request.limit is not None:
            metrics |= {"limit": request.limit, "limit_seed": LIMIT_SEED}
        identity = make_identity(
            self.paths.root,
            EvaluatedParams(
                model=checkpoint.name, weights_hash=checkpoint.hash, transform=classifier.transform, limit=request.limit
            ),
            data_manifest=self.cell.manifest_path,
            device=device_label(self.device),
            dtype=request.dtype,
            backend=kernel_backend(classifier.model, torch_dtype(request.dtype)),
        )
        write_record(self._file(checkpoint, size), metrics, identity, time.monotonic() - started)
        print(f"{self._format_score(checkpoint, metrics)}, {progress.rate:.0f} img/s", flush=True)
        return metrics

    def _format_score(self, checkpoint: Checkpoint, metrics: dict[str, Any]) -> str:
        """Return a model's scores at one size in a line, with the paper's number where it may stand beside them."""
        tag = f" ({checkpoint.facts['weights_tag']})" if "weights_tag" in checkpoint.facts else ""
        where = f"{checkpoint.name}{tag} on {self.cell.name} at {metrics['image_size']}, {self.request.dtype}"
        limited = " (--limit: not a full score)" if self.request.limit else ""
        # a score compares with the paper only for the plain model on all images
        comparable = self.cell.kind == "imagenet" and not self.request.limit and checkpoint.facts.get("options") == {}
        printed = self.find_printed(checkpoint.name, metrics["image_size"]) if comparable else None
        scores = f"top-1 {metrics['top1_percent']:.2f} %"
        if "top5_percent" in metrics:
            scores += f", top-5 {metrics['top5_percent']:.2f} %"
        return f"{where}: {scores} on {metrics['held_out_images']} {metrics['split']} images{limited}" + (
            f" (Table 1: {printed} %)" if printed else ""
        )


def _write_curve(folder: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Write `curve.csv` (a row per image size) and `curve.png` (top-1 over the size, the training size marked).

    `rows` are the metrics of one model's evaluations; `title` names model and data.
    """
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: row["image_size"])
    write_csv(folder / "curve.csv", rows, [name for name in CURVE if name in rows[0]])
    trained, sizes = rows[0]["train_image_size"], [row["image_size"] for row in rows]
    limited = " (--limit: not a full score)" if "limit" in rows[0] else ""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(sizes, [row["top1_percent"] for row in rows], marker="o")
    axes.axvline(trained, linestyle="--", color="grey", label=f"trained at {trained} pixels")
    axes.set(xlabel="image size (pixels)", ylabel="top-1 accuracy (%)")
    axes.set_title(f"{title}, {rows[0]['held_out_images']} images{limited}", fontsize="medium")
    axes.set_xticks(sorted({*sizes, trained}))
    axes.grid(alpha=0.3)
    axes.legend()
    save_png(figure, folder / "curve.png")
