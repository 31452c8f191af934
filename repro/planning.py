"""The plan of a params file: the stages that would run, and their time where it was measured. Nothing is started.

The time of a training is seeds × epochs × images over its measured images per second; evaluations count if they were in
the measured time. Times that were not measured on a device are unknown; none is computed from a data sheet.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .core.config import build, load_sections, params_hash
from .core.errors import UserError, blame
from .core.paths import Paths
from .core.record import read_json
from .core.runtime import cpu_name
from .core.ui import print_table
from .data.cells import manifest_path, suggest_data
from .data.manifest import read_manifest
from .models.registry import require_known
from .papers import load_papers
from .report.answer import PIPELINE_FILE
from .report.records import Source
from .report.results import Results
from .runs.cells import describe_speed

_CLASSIFIERS = ("pretrain", "linearize", "ablate", "ablate_linearize", "pretrain_seeds")  # these share measured speeds


class Speed(NamedTuple):
    """The measured speed of a training: images per second, the peak of GPU memory in GiB, and the source of both."""

    img_per_s: float
    memory_gib: float | None
    basis: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A stage or one of its cells.

    Args:
        unit: its name for `dvc repro`.
        work: seeds × epochs × images of a training; empty for others.
        speed: speed of a training; None if it was not measured, and for other stages.
        hours: hours on one device; None if unknown.
        basis: the source of the hours.
    """

    unit: str
    work: str = ""
    speed: Speed | None = None
    hours: float | None = None
    basis: str = "not measured; this command measures it"


def plan_rows(stages: Mapping[str, Any], params_file: Path, paths: Paths, gpu: str | None) -> list[PlanRow]:
    """Make a row for every section of a params file that is a stage, or for each of its cells.

    Args:
        stages: the table of stages.
        gpu: a part of the name of a GPU; None plans for this machine's CPU.

    Raises:
        UserError: wrong parameters.
    """
    sections = load_sections(params_file)
    micro_batch = (sections.get("runtime") or {}).get("micro_batch")
    built = {
        name: _build_params(stages[name], name, content) if name in stages else {None: None}
        for name, content in sections.items()
        if name != "runtime"
    }
    planner = Planner(paths, gpu, _read_results(paths, stages), built.get("prepare_data", {}), micro_batch)
    return [planner.plan(name, cell, params) for name, cells in built.items() for cell, params in cells.items()]


@dataclasses.dataclass(frozen=True)
class Planner:
    """The planner of single stages and cells.

    Args:
        gpu: a part of the name of a GPU; None for this machine's CPU.
        results: the records and rows of speed.
        data: cell of prepare_data -> its params.
        micro_batch: `runtime.micro_batch`.
    """

    paths: Paths
    gpu: str | None
    results: Results
    data: Mapping[str, Any]
    micro_batch: int | None = None

    def plan(self, stage: str, cell: str | None, params: Any) -> PlanRow:
        """Make the row of a stage or of one of its cells; raise a UserError for unknown data or an unknown model.

        The speed of a training is that of this cell's last run, else the slowest of an equal training in the results.
        """
        unit = f"{stage}@{cell}" if cell else stage
        if not hasattr(params, "seeds"):  # no training
            seconds, basis = self._find_run(stage, cell, params)
            return PlanRow(unit=unit, hours=seconds / 3600, basis=basis) if seconds else PlanRow(unit=unit)
        with blame(f"{stage}.{cell}", ValueError):
            require_known(params.model)
        images = self._count_images(stage, cell, params)
        total = len(params.seeds) * params.epochs * images
        work = f"{len(params.seeds)} × {params.epochs} × {images:,}"
        alike = self._list_alike(stage, params)
        memory = max((each.memory_gib for each in alike if each.memory_gib), default=None)
        seconds, basis = self._find_run(stage, cell, params)
        if seconds:
            speed = Speed(total / seconds, memory, basis)
        elif alike:  # the slowest
            speed = min(alike, key=lambda each: each.img_per_s)._replace(memory_gib=memory)
        else:
            return PlanRow(unit=unit, work=work)
        hours = total / speed.img_per_s / 3600
        return PlanRow(unit=unit, work=work, speed=speed, hours=hours, basis=speed.basis)

    def _count_images(self, stage: str, cell: str | None, params: Any) -> int:
        """Count the images of an epoch, from the manifest of the data or, without one, as `prepare_data` expects."""
        if params.data not in self.data:
            where = f"{stage}.{cell}.data: {params.data}"
            raise UserError(f"{where}: prepare_data has no such cell{suggest_data(self.paths, params.data, self.data)}")
        if params.steps_per_epoch:
            return params.steps_per_epoch * params.batch_size
        file = manifest_path(self.paths, params.data)
        return read_manifest(file).splits["train"].images if file.is_file() else self.data[params.data].expected.train

    def _list_alike(self, stage: str, params: Any) -> list[Speed]:
        """List the speeds on this GPU of trainings and rows of `repro efficiency --mode train` that match the params.

        Model, input size and precision must agree. The memory counts only if the micro-batch agrees, too, and the
        training kept the same tensors besides the model (`keeps`).
        """
        if self.gpu is None:
            return []
        found, micro_batch = [], min(self.micro_batch or params.batch_size, params.batch_size)
        wanted = json.loads(json.dumps(describe_speed(params, micro_batch)))  # lists for tuples, as in a record
        key = self.results.model_key(wanted, params.model)
        recomputes = wanted["keeps"]["recompute_blocks"]
        near = _CLASSIFIERS if stage in _CLASSIFIERS else (stage,)
        for source in self.results.sources:
            metrics, rate = source.metrics, source.metrics.get("throughput_img_per_s")
            # only records of the speed of a training have a transform
            if not rate or "transform" not in metrics or not self._is_here(source.device):
                continue
            section, dtype = source.path.split("/")[-2], source.identity.get("dtype")
            # the names that are on; an older record does not have every name that `keeps` has now
            kept, keeps = ({key for key, is_kept in each["keeps"].items() if is_kept} for each in (metrics, wanted))
            is_same = metrics["transform"] == wanted["transform"] and params.precision in ("auto", dtype)
            is_same &= ("recompute_blocks" in kept) == recomputes  # it takes time, too
            if section in near and is_same and self.results.model_key(metrics, source.path) == key:
                held = metrics["micro_batch"] == wanted["micro_batch"] and kept == keeps and section == stage
                found.append(_measured(rate / metrics["processes"], held and metrics["peak_memory_mib"], source))
        # rows of speed have classifiers alone: a dense task has no `image_size`, and a denoiser another key
        side = getattr(params.transform, "image_size", None)
        for row, source in (each for rows in self.results.speed_rows.values() for each in rows):
            if (row["mode"], row["status"], row["image_size"]) != ("train", "ok", [side, side]):
                continue
            is_same = row["batch_size"] == micro_batch and params.precision in ("auto", row["dtype"]) and not recomputes
            if is_same and self._is_here(row["device"]) and self.results.model_key(row, source.path) == key:
                held = not any(wanted["keeps"].values())
                found.append(_measured(row["throughput_img_per_s"], held and row["peak_memory_mib"], source))
        return found

    def _find_run(self, stage: str, cell: str | None, params: Any) -> tuple[float | None, str]:
        """Return the seconds of the last run with these params on this device, and the device's name.

        A training may have had other seeds and epochs; its time is scaled. The seconds are None without such a run.
        """
        pipeline = self.paths.results / PIPELINE_FILE
        noted = read_json(pipeline).get("stages", {}) if pipeline.is_file() else {}
        for source in self.results.sources:
            is_own = (source.stage, source.cell) == (stage, cell) or source.place == f"{stage}/{cell}"
            if params is None or not is_own or not self._is_here(source.device):
                continue
            run, like, times = self.paths.root / source.run_file, params, 1.0
            if source.most_seeds:  # of a training
                seeds, epochs = source.metrics["seeds"], source.metrics["epochs"]
                times = params.epochs * len(params.seeds) / (epochs * len(seeds))
                like = dataclasses.replace(params, seeds=tuple(seeds)).with_epochs(epochs)
            seconds = read_json(run)["seconds"] if run.is_file() else noted.get(source.unit)
            if seconds is not None and params_hash(like) == source.identity["params_hash"]:
                cpu = (source.identity.get("machine") or {}).get("cpu")
                other = f"another CPU: {cpu or source.device}" if cpu != cpu_name() else "this CPU"
                return seconds * times, source.device if self.gpu else other
        return None, ""

    def _is_here(self, device: str) -> bool:
        """Tell whether a record's device is the one of the plan; for a CPU's plan every CPU is."""
        return not device.startswith("cuda") if self.gpu is None else self.gpu.lower() in device.lower()


def list_gpus(stages: Mapping[str, Any], paths: Paths) -> list[str]:
    """Return the names of the GPUs that have a record or a row in the results; `stages` is the table of stages."""
    sources = _read_results(paths, stages).sources
    return sorted({each.device.removeprefix("cuda: ") for each in sources if each.device.startswith("cuda")})


def _read_results(paths: Paths, stages: Mapping[str, Any]) -> Results:
    """Read all records, also of stages that are not `shown`, such as `pretrain_seeds`: they have times, too."""
    scores = {name: stage.scores for name, stage in stages.items() if stage.purpose == "graph"}
    return Results(paths, load_papers().values(), scores)


def print_plan(rows: Sequence[PlanRow], gpu: str | None, paths: Paths) -> None:
    """Print the rows and the total, in hours for a GPU and in minutes for a CPU."""
    unit, per_hour = ("hours", 1) if gpu else ("minutes", 60)
    table = []
    for row in rows:
        rate, memory = (row.speed.img_per_s, row.speed.memory_gib) if row.speed else (None, None)
        shown = [row.work or "–", _format(rate), _format(row.hours and row.hours * per_hour)]
        table.append([row.unit, *shown, *([_format(memory)] if gpu else []), row.basis])
    total = _format(sum(row.hours or 0.0 for row in rows) * per_hour)
    table.append(["total of what was measured", "", "", total, *([""] if gpu else []), ""])
    print_table(
        ["dvc repro", "seeds × epochs × images", "img/s", unit, *(["GPU GiB"] if gpu else []), "measured on"], table
    )
    if unknown := sum(row.hours is None for row in rows):
        print(f"not in the total: {unknown} of {len(rows)} rows, of which nothing was measured here")
    if gpu is None and (pipeline := paths.results / PIPELINE_FILE).is_file():
        noted = read_json(pipeline)
        print(f"the last run of all stages: {noted['seconds'] / 60:.1f} minutes, {noted['jobs']} at once")


def _measured(rate: float, memory_mib: float | bool | None, source: Source) -> Speed:
    """Return the speed of a record or row; its memory is unknown where `memory_mib` is None or False."""
    return Speed(rate, memory_mib / 1024 if memory_mib else None, f"{source.device} ({source.path})")


def _build_params(stage: Any, name: str, content: Any) -> dict[str | None, Any]:
    """Return cell -> its params; the key is None for a stage without cells."""
    if not stage.cells:
        return {None: build(stage.params, content, name)}
    cells = content or {}
    if not isinstance(cells, Mapping):
        raise UserError(f"{name}: expected a mapping of cells")
    return {cell: build(stage.params, cell_content, f"{name}.{cell}") for cell, cell_content in cells.items()}


def _format(value: float | None) -> str:
    """Format a number with about two significant digits."""
    if not value:
        return "–" if value is None else "0"
    if value < 0.01:
        return "<0.01"
    return f"{value:.2f}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
