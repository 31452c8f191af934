"""The cost functions that the stages name in their rows of the table.

Each takes a `Planner` and the stage's params, or {cell: params}, and returns rows. Hours of a training are its images
over the throughput of one GPU; its evaluations are left out (under 1 % of ImageNet's 300 epochs), and so is a teacher's
forward pass.
"""

from collections.abc import Mapping
from typing import Any

from ..bench.adapted import pyramid_cost
from ..bench.flops import cost
from ..bench.params import ADAPTER
from ..bench.speed import row_id
from ..data.kinds import KINDS
from .planner import Planner, PlanRow, TrainingData, TrainingSpeed

BYTES_PER_VALUE = 4  # fp32
STRIDE = 32  # to multiples of which images are padded


def charge_data(planner: Planner, cells: Mapping[str, Any]) -> list[PlanRow]:
    """Charge `prepare_data`: no GPU time, and the size of each data set from its manifest or as published."""
    rows = []
    for cell, params in cells.items():
        manifest = planner.find_manifest(cell)
        size_gb = (
            sum(split.bytes for split in manifest.splits.values()) / 1e9 if manifest else KINDS[params.kind].size_gb
        )
        source = "from its manifest" if manifest else "as published" if size_gb else "unknown until it is written"
        rows.append(
            PlanRow(command=planner.command(cell), hours=0.0, disk_gb=size_gb, basis=f"CPU only; size {source}")
        )
    return rows


def charge_classification(planner: Planner, cells: Mapping[str, Any]) -> list[PlanRow]:
    """Charge `pretrain`, `baselines`, `linearize` or `ablate`: one training for each seed.

    The disk holds copies of the weights in fp32. A state is the weights, AdamW's two moments and, where there is one,
    the moving average. Until all seeds are done, each keeps two states, its snapshots twice and its weights; in
    addition there are one state that is being written, and the first seed's snapshots and weights in the results.
    """
    rows = []
    for cell, params in cells.items():
        data = planner.find_data(cell, params.data)
        options = {**params.options, "num_classes": data.classes}
        counted = planner.count(cell, cost, params.model, options, (params.transform.image_size,) * 2)
        repeated = f"{len(params.seeds)} seeds of " if len(params.seeds) > 1 else ""
        epochs = "1 epoch" if params.epochs == 1 else f"{params.epochs} epochs"
        seen = f"{repeated}{epochs} of {_count_images(params, data) // params.epochs:,} images"
        disk_gb = _count_copies(params) * counted.num_params * BYTES_PER_VALUE / 1e9
        rows.append(
            _charge_training(planner, cell, params, data, planner.find_speed(params, counted.macs), seen, disk_gb)
        )
    return rows


def charge_detection(planner: Planner, cells: Mapping[str, Any]) -> list[PlanRow]:
    """Charge `detect`, with every image at the largest of the image sizes; see `_charge_dense`."""
    return [
        _charge_dense(planner, cell, params, (params.transform.min_size[-1], params.transform.max_size))
        for cell, params in cells.items()
    ]


def charge_segmentation(planner: Planner, cells: Mapping[str, Any]) -> list[PlanRow]:
    """Charge `segment`, whose images are crops; see `_charge_dense`."""
    return [_charge_dense(planner, cell, params, (params.transform.crop_size,) * 2) for cell, params in cells.items()]


def charge_generation(planner: Planner, cells: Mapping[str, Any]) -> list[PlanRow]:
    """Charge `generate`: one training for each seed, without the samples; the disk holds what `charge_classification`
    says.
    """
    rows = []
    for cell, params in cells.items():
        data = planner.find_data(cell, params.data)
        options = {**params.model_options, "num_classes": data.classes}
        counted = planner.count(cell, cost, params.model, options, params.transform.shape[1:])
        speed, images = planner.find_speed(params, counted.macs), len(params.seeds) * _count_images(params, data)
        row = PlanRow(
            command=f"repro generate --cell {cell}",  # no stage of the graph
            hours=images / speed.img_per_s / 3600,
            disk_gb=_count_copies(params) * counted.num_params * BYTES_PER_VALUE / 1e9,
            basis=f"{images:,} images at {speed.img_per_s:,.0f} img/s, {speed.source}",
            note=speed.note,
        )
        rows.append(row)
    return rows


def charge_complexity(planner: Planner, params: Any) -> list[PlanRow]:
    """Charge `complexity`, which takes seconds on a CPU."""
    gives = set()
    for model, options, image_size in params.rows():
        macs = "macs_g_paper_convention" if model == ADAPTER else "macs_g"
        row = row_id(planner.model_key(model, options), {}, image_size)
        gives |= {("params_m", row, ""), (macs, row, "")}
    for model, options, image_size in (row for group in params.groups if group.fvcore for row in group.rows()):
        gives.add(("macs_g_fvcore", row_id(planner.model_key(model, options), {}, image_size), ""))
    basis = "CPU only, under a minute"
    return [PlanRow(command=planner.command(), hours=0.0, disk_gb=0.0, basis=basis, gives=frozenset(gives))]


def charge_efficiency(planner: Planner, params: Any) -> list[PlanRow]:
    """Charge `efficiency` the time after which every row would be stopped: an upper bound."""
    rows = len(params.models) * len(params.image_sizes)
    gives = frozenset((kind, model, "") for kind in ("fps", "memory_mib") for model, _ in params.models)
    basis = f"at most: {rows} rows of {params.budget_s:g} s"
    return [
        PlanRow(command=planner.command(), hours=rows * params.budget_s / 3600, disk_gb=0.0, basis=basis, gives=gives)
    ]


def _charge_dense(planner: Planner, cell: str, params: Any, image_size: tuple[int, int]) -> PlanRow:
    """Charge one training for each seed of a backbone with its adapter or its own maps; the disk space is unknown.

    Where the speed is estimated, the heads are not counted, and the hours are a lower bound.
    """
    data = planner.find_data(cell, params.data)
    padded = tuple(-(-side // STRIDE) * STRIDE for side in image_size)
    counted = planner.count(cell, pyramid_cost, params.model, padded, params.options)
    speed = planner.find_speed(params, counted.macs)
    bound = "at least, without the heads: " if speed.source == "estimated" else ""
    seen = f"{bound}{len(params.seeds) * _count_images(params, data):,} images"
    return _charge_training(planner, cell, params, data, speed, seen, disk_gb=None)


def _charge_training(
    planner: Planner, cell: str, params: Any, data: TrainingData, speed: TrainingSpeed, seen: str, disk_gb: float | None
) -> PlanRow:
    """The row of a cell that is trained once for each seed; `seen` says which images that are."""
    return PlanRow(
        command=planner.command(cell),
        hours=len(params.seeds) * _count_images(params, data) / speed.img_per_s / 3600,
        disk_gb=disk_gb,
        basis=f"{seen} at {speed.img_per_s:,.0f} img/s, {speed.source}",
        note=speed.note,
        gives=frozenset({("accuracy", data.kind, planner.model_key(params.model, params.options))}),
    )


def _count_copies(params: Any) -> int:
    """The most copies of the weights that a training's states, snapshots and results are as large as."""
    state, snapshots = 3 + bool(params.ema_decay), len(params.snapshot_epochs)
    return len(params.seeds) * (2 * state + 2 * snapshots + 1) + state + snapshots + 1


def _count_images(params: Any, data: TrainingData) -> int:
    """The images that one training sees."""
    return params.epochs * (params.steps_per_epoch * params.batch_size if params.steps_per_epoch else data.images)
