"""`repro segment`: UperNet on an adapted backbone (Table 2, right; on the embedded scenes in the mini profile)."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from repro.core.paths import Paths
from repro.core.ranks import Ranks
from repro.core.record import atomic
from repro.core.runtime import Runtime, seed_everything
from repro.tasks.segmentation.params import SegmentationTransformSettings, UperNetParams

from . import Stage, dense
from .training import CellOption, GpusOption, Job, device_of, fit_job, train_cells

TASK = "segment"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentParams(dense.DenseParams):
    """A cell of the `segment:` section.

    Args:
        upernet: widths of the heads.
        transform: how an image and its label map are resized, cropped and changed, and the windows of evaluation.
    """

    upernet: UperNetParams = UperNetParams()
    transform: SegmentationTransformSettings


STAGE = Stage(params=SegmentParams, cells=True, task="segment", scores={"miou_percent": "mIoU", "aacc_percent": "pixels"})


def command(
    cell: CellOption = None, gpus: GpusOption = None, random: dense.RandomOption = False, epochs: dense.EpochsOption = None
) -> None:
    """Train a segmenter on a pretrained backbone, and measure mIoU; a stopped run continues where it was."""
    train_cells(
        TASK,
        SegmentParams,
        cell,
        gpus,
        functools.partial(run, random=random, epochs=epochs),
        functools.partial(dense.check_before_launch, stage=TASK),
        dense.options_given(random, epochs),
    )


def run(
    params: SegmentParams,
    paths: Paths,
    runtime: Runtime,
    cell: str,
    ranks: Ranks = Ranks(),
    *,
    random: bool = False,
    epochs: int | None = None,
) -> None:
    """Train one cell and write results/segment/<cell>/{weights.safetensors, snapshots/, curve.csv, load_report.txt, examples/, metrics.json}.

    Raises:
        UserError: data or a backbone that do not fit, or are not what their records say, before anything is written.
    """
    from repro.data.cells import open_cell

    started = time.monotonic()
    params, suffix = dense.varied(params, random, epochs)
    job, report, data = _made(params, paths, runtime, cell, suffix, ranks)
    if ranks.first:
        print("\n".join(dense.report_lines(report)), flush=True)
    outcome = fit_job(job, paths, runtime, ranks)
    if outcome is None:
        return
    last, task = outcome.state.curve[-1], job.task
    scores = {name: last[name] for name in ("miou_percent", "macc_percent", "aacc_percent")}
    metrics = {"data": data, "val_images": last["images"], **scores, "class_iou_percent": _known(task.class_iou_percent)}
    if data == "scenes":
        metrics["without_learning"] = _without_learning(task, open_cell(paths, runtime, params.data).open_instances("train"))
    _draw_examples(job, outcome.model.eval())
    dense.write_result(job, outcome, metrics, report, paths, ranks, time.monotonic() - started)
    print(f"{cell}{suffix}: mIoU {scores['miou_percent']:.1f} % on {last['images']} held-out images of {data}")


def build(backbone: Any, num_classes: int, params: UperNetParams, transform: SegmentationTransformSettings) -> Any:
    """The segmenter around an adapter."""
    from repro.tasks.segmentation.upernet import build_upernet

    return build_upernet(backbone, params, num_classes=num_classes, window=transform.crop_size, stride=transform.stride)


def _made(
    params: SegmentParams, paths: Paths, runtime: Runtime, cell: str, suffix: str, ranks: Ranks
) -> tuple[Job, Mapping[str, str], str]:
    """What a run is made of, the report of the backbone's weights, and the kind of the data."""
    from repro.data.cells import open_cell
    from repro.data.loader import EvalLoader, TrainLoader
    from repro.tasks.segmentation.data import AdeSegmentation
    from repro.tasks.segmentation.task import Segmentation

    where = f"{TASK}.{cell}"
    settings, share = dense.loop_params(params, runtime, ranks, where)
    device = device_of(runtime, ranks)
    inputs = dense.inputs_of(params, paths)
    data = open_cell(paths, runtime, params.data)
    splits = {split: data.open_pairs(split) for split in ("train", "val")}
    dense.prepare(params, runtime)
    adapter, report = dense.build_backbone(params, paths, where, "each")
    classes = splits["train"].classes
    model = dense.placed(build(adapter, len(classes), params.upernet, params.transform), runtime, ranks)
    if ranks.rank:  # the weights are the same everywhere, what is drawn while training is not
        seed_everything(params.seed + ranks.rank)

    train_set = AdeSegmentation(splits["train"], params.transform, training=True, seed=params.seed)
    val_set = AdeSegmentation(splits["val"], params.transform, training=False)
    here = {"workers": runtime.workers, "device": device, "rank": ranks.rank, "world_size": ranks.world_size}
    train = TrainLoader(train_set, batch_size=share, seed=params.seed, batches_per_epoch=params.steps_per_epoch, **here)
    val = EvalLoader(val_set, batch_size=1, **here)
    task = Segmentation(
        model, train, val, batch_size=params.batch_size, transform=params.transform, classes=classes, device=device, ranks=ranks
    )
    described = dense.describe(TASK, adapter, {"upernet": params.upernet, "transform": params.transform}, classes)
    folder = dense.folder_of(paths, runtime, ranks, TASK, cell, suffix)
    job = Job(
        stage=TASK,
        cell=f"{cell}{suffix}",
        params=params,
        task=task,
        settings=settings,
        device=device,
        inputs=inputs,
        described=described,
        folder=folder,
    )
    return job, report, data.kind


def _known(class_iou: Mapping[str, float | None]) -> dict[str, Any]:
    """The IoU of each class, with the reason where there is none."""
    reasons = {f"{name}_reason": "neither labelled nor predicted" for name, iou in class_iou.items() if iou is None}
    return {**class_iou, **reasons}


def _without_learning(task: Any, annotations: Any) -> dict[str, float]:
    """The same scores of a threshold, the nearest training example's class, and everywhere else the most frequent other class."""
    import numpy as np
    import torch

    from repro.tasks.segmentation.data import IGNORED
    from repro.tasks.segmentation.task import measure
    from repro.tasks.threshold import Threshold

    train, val = task.train.dataset.pairs, task.val.dataset.pairs
    found, objects = Threshold(dense.examples_of(annotations)), len(annotations.classes)
    counts = sum(np.bincount(train.read(index)[1].ravel(), minlength=IGNORED + 1) for index in range(len(train)))
    background = int(counts[objects + 1 :].argmax()) + objects  # the first classes are the objects

    def label_map(image: Any, size: tuple[int, int]) -> Any:
        return found.label_map(image[0], background + 1) - 1

    def batches() -> Iterator[Any]:
        for pixels, values in map(val.read, range(len(val))):  # at their own size
            yield torch.from_numpy(pixels).permute(2, 0, 1)[None], torch.from_numpy(values - np.uint8(1))[None]

    return measure(label_map, batches(), len(task.classes))[0]


def _draw_examples(job: Job, model: Any) -> None:
    from repro.tasks.segmentation.draw import draw, predict

    task = job.task
    for index in range(min(dense.EXAMPLES, len(task.val.dataset))):
        image, _ = task.val.dataset[(0, index)]
        labels = predict(model, image, job.params.transform, job.device)
        with atomic(job.folder / "examples" / f"{task.val.dataset.name(index).rpartition('.')[0]}.png") as temporary:
            draw(image, labels, task.classes).save(temporary, "PNG")
