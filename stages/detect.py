"""`repro detect`: Mask R-CNN on an adapted backbone (Table 2, left; on the embedded scenes in the mini profile)."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

from repro.core.paths import Paths
from repro.core.ranks import Ranks
from repro.core.record import atomic
from repro.core.runtime import Runtime, seed_everything
from repro.data.settings import DetectionTransformSettings
from repro.tasks.detection.params import MaskRcnnParams

from . import Stage, dense
from .training import CellOption, GpusOption, Job, device_of, fit_job, train_cells

TASK = "detect"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectParams(dense.DenseParams):
    """A cell of the `detect:` section.

    Args:
        mask_rcnn: sizes of the detector.
        transform: how large its inputs are, and their random changes.
    """

    mask_rcnn: MaskRcnnParams = MaskRcnnParams()
    transform: DetectionTransformSettings


STAGE = Stage(
    params=DetectParams,
    cells=True,
    task="detect",
    scores={"ap_box_percent": "box AP", "ap50_box_percent": "AP50", "ap_mask_percent": "mask AP", "ap50_mask_percent": "AP50"},
)


def command(
    cell: CellOption = None, gpus: GpusOption = None, random: dense.RandomOption = False, epochs: dense.EpochsOption = None
) -> None:
    """Train a detector on a pretrained backbone, and measure box and mask AP; a stopped run continues where it was."""
    train_cells(
        TASK,
        DetectParams,
        cell,
        gpus,
        functools.partial(run, random=random, epochs=epochs),
        functools.partial(dense.check_before_launch, stage=TASK),
        dense.options_given(random, epochs),
    )


def run(
    params: DetectParams,
    paths: Paths,
    runtime: Runtime,
    cell: str,
    ranks: Ranks = Ranks(),
    *,
    random: bool = False,
    epochs: int | None = None,
) -> None:
    """Train one cell and write results/detect/<cell>/{weights.safetensors, snapshots/, curve.csv, load_report.txt, examples/, metrics.json}.

    Raises:
        UserError: data or a backbone that do not fit, or are not what their records say, before anything is written.
    """
    started = time.monotonic()
    params, suffix = dense.varied(params, random, epochs)
    job, report, data = _made(params, paths, runtime, cell, suffix, ranks)
    if ranks.first:
        print("\n".join(dense.report_lines(report)), flush=True)
    outcome = fit_job(job, paths, runtime, ranks)
    if outcome is None:
        return
    last, task = outcome.state.curve[-1], job.task
    scores = {name: last[name] for name in last if name.endswith("_percent")}
    metrics = {"data": data, "val_images": last["images"], **scores}
    if data == "scenes":
        metrics["without_learning"] = _without_learning(task)
    _draw_examples(job, outcome.model.eval())
    dense.write_result(job, outcome, metrics, report, paths, ranks, time.monotonic() - started)
    where = f"{last['images']} held-out images of {data}"
    print(
        f"{cell}{suffix}: box AP {scores['ap_box_percent']:.1f} %, AP50 {scores['ap50_box_percent']:.1f} %, mask AP {scores['ap_mask_percent']:.1f} % on {where}"
    )


def build(backbone: Any, num_classes: int, params: MaskRcnnParams) -> Any:
    """The detector around an adapter."""
    from repro.tasks.detection.mask_rcnn import MaskRcnn

    return MaskRcnn(backbone, num_classes, params)


def _made(params: DetectParams, paths: Paths, runtime: Runtime, cell: str, suffix: str, ranks: Ranks) -> tuple[Job, Mapping[str, str], str]:
    """What a run is made of, the report of the backbone's weights, and the kind of the data."""
    from repro.data.cells import open_cell
    from repro.data.detection import CocoDetection
    from repro.data.loader import EvalLoader, TrainLoader
    from repro.tasks.detection.task import Detection

    where = f"{TASK}.{cell}"
    settings, share = dense.loop_params(params, runtime, ranks, where)
    device = device_of(runtime, ranks)
    inputs = dense.inputs_of(params, paths)
    data = open_cell(paths, runtime, params.data)
    splits = {split: data.open_instances(split) for split in ("train", "val")}
    dense.prepare(params, runtime)
    adapter, report = dense.build_backbone(params, paths, where, "last")
    classes = splits["train"].classes
    model = dense.placed(build(adapter, len(classes), params.mask_rcnn), runtime, ranks)
    if ranks.rank:  # the weights are the same everywhere, what is drawn while training is not
        seed_everything(params.seed + ranks.rank)

    train_set = CocoDetection(splits["train"], params.transform, training=True, seed=params.seed)
    val_set = CocoDetection(splits["val"], params.transform, training=False)
    here = {"workers": runtime.workers, "device": device, "rank": ranks.rank, "world_size": ranks.world_size}
    train = TrainLoader(
        train_set, batch_size=share, seed=params.seed, groups=train_set.groups, batches_per_epoch=params.steps_per_epoch, **here
    )
    val = EvalLoader(val_set, batch_size=1, **here)
    task = Detection(
        model,
        train,
        val,
        batch_size=params.batch_size,
        annotations=splits["val"].file,
        category_ids=splits["val"].category_ids,
        device=device,
        ranks=ranks,
    )
    described = dense.describe(TASK, adapter, {"mask_rcnn": params.mask_rcnn, "transform": params.transform}, classes)
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


def _without_learning(task: Any) -> dict[str, float | None]:
    """The same scores of a threshold and the nearest training example's class."""
    import torch

    from repro.data.pixels import read_pixels
    from repro.tasks.detection.evaluate import coco_metrics, to_results
    from repro.tasks.threshold import Threshold

    found, val = Threshold(dense.examples_of(task.train.dataset.instances)), task.val.dataset.instances
    results = []
    for place, image_id in enumerate(val.image_ids.tolist()):
        image = torch.from_numpy(read_pixels(val.path(place))).permute(2, 0, 1)  # at its own size, as the annotations are
        results += to_results(image_id, found.detect(image), task.category_ids)
    scores = coco_metrics(task.annotations, results)
    return {name: value for name, value in scores.items() if value is not None}


def _draw_examples(job: Job, model: Any) -> None:
    from repro.tasks.detection.draw import draw

    dataset = job.task.val.dataset
    for index in range(min(dense.EXAMPLES, len(dataset))):
        image, target = dataset[(0, index)]
        (found,) = model.detect([image], [tuple(image.shape[1:])])
        with atomic(job.folder / "examples" / f"{target['image_id']}.png") as temporary:
            draw(image, found, dataset.instances.classes).save(temporary, "PNG")
