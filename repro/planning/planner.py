"""The plan of a params file: what its stages cost, and which numbers of the paper they would give. Nothing is started.

Hours of a training are its images over the throughput of one GPU. They leave out its evaluations (under 1 % of
ImageNet's 300 epochs) and a teacher's forward pass.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.adapted import pyramid_cost
from ..bench.flops import cost
from ..bench.params import ADAPTER
from ..bench.speed import row_id
from ..core.config import BY_HAND, build, load_sections, params_hash
from ..core.errors import UserError, blame, did_you_mean
from ..core.paths import Paths
from ..core.record import read_json
from ..core.runtime import cpu_name
from ..data.cells import manifest_path, suggest_data
from ..data.kinds import KINDS
from ..data.manifest import read_manifest
from ..papers import load_papers, load_primary
from ..report.answer import PIPELINE_FILE
from ..report.demands import Measurement, demands
from ..report.results import Results

CLASSIFIERS = ("pretrain", "linearize", "ablate")  # the stages that train classifiers, all of them alike
FREE = ("runtime", "report", "tune", BY_HAND)  # sections that no work of the plan is in
PASSES = 3  # a training step computes about three forward passes: one forward, and two for the gradients
FLOPS_PER_MAC = 2
BYTES_PER_VALUE = 4  # fp32
STRIDE = 32  # to multiples of which images of dense tasks are padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What a stage or one of its cells costs.

    Args:
        command: what would run it.
        hours: of one device; None where unknown.
        disk_gb: the most disk that it occupies, in units of 1e9 bytes; None where unknown.
        basis: how the hours come about.
        note: where a number in `basis` is known from.
        gives: the measurements that it yields, see `repro.report.demands`.
    """

    command: str
    hours: float | None
    disk_gb: float | None
    basis: str
    note: str = ""
    gives: frozenset[Measurement] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """The device that the work is planned for, and what it achieves.

    Args:
        given: `model` or `model[option=value]` -> training images per second.
        gpu: a part of the name of a GPU; None plans for a CPU, by the seconds of earlier runs alone.
        tflops: the GPU's peak in TFLOP/s, for models of unknown speed.
        utilisation: the share of that peak, in (0, 1], that training reaches.

    Raises:
        UserError: a number out of range.
    """

    given: dict[str, float] = dataclasses.field(default_factory=dict)
    gpu: str | None = "A100"
    tflops: float = 312.0
    utilisation: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.tflops < math.inf:
            raise UserError(f"plan: --tflops {self.tflops}: expected a number above 0")
        if not 0 < self.utilisation <= 1:
            raise UserError(f"plan: --utilisation {self.utilisation}: expected a share above 0 and at most 1")


@dataclasses.dataclass(frozen=True)
class CostPlan:
    """The costs of all stages in the order of the params file, and what the paper asks for.

    `needs` is table or figure -> for each number there, the measurements from which ours is computed, see
    `repro.report.demands`.
    """

    rows: list[PlanRow]
    needs: Mapping[str, list[set[Measurement]]]

    def total(self, name: str) -> float:
        """The sum of `hours` or `disk_gb` over the rows where it is known."""
        return sum(getattr(row, name) or 0.0 for row in self.rows)

    @property
    def unknown(self) -> list[str]:
        """The commands of rows whose hours or disk are unknown."""
        return [row.command for row in self.rows if None in (row.hours, row.disk_gb)]

    def find_places(self, row: PlanRow) -> dict[str, int]:
        """Table or figure -> how many of its numbers need a measurement of this row; those without any are left out."""
        counts = {place: sum(bool(need & row.gives) for need in needs) for place, needs in self.needs.items()}
        return {place: count for place, count in counts.items() if count}

    def count_covered(self) -> dict[str, tuple[int, int]]:
        """Table or figure -> (numbers whose measurements are all among those of the rows, all numbers)."""
        gives = frozenset().union(*(row.gives for row in self.rows))
        return {
            place: (sum(bool(need) and need <= gives for need in needs), len(needs))
            for place, needs in self.needs.items()
        }


def plan_costs(stages: Mapping[str, Any], params_file: Path, paths: Paths, rates: Rates) -> CostPlan:
    """Charge every stage of the table that params.yaml, or a profile, has a section for; records and manifests count
    where they exist.

    Raises:
        UserError: wrong parameters, or a given rate of a model that no cell trains.
    """
    scores = {name: stage.scores for name, stage in stages.items() if stage.purpose == "graph"}
    sections = {name: content for name, content in load_sections(params_file).items() if name not in FREE}
    params = {name: _build_params(stages[name], name, content) for name, content in sections.items() if name in stages}
    planner = Planner(paths, rates, Results(paths, load_papers().values(), scores), params.get("prepare_data", {}))
    rows = []
    for name in sections:
        units = params.get(name, {None: None})
        command = f"repro {name} --cell {{}}" if name in stages and stages[name].purpose != "graph" else None
        rows += [planner.charge(name, cell, own, command) for cell, own in units.items()]
    if unknown := sorted(rates.given.keys() - planner.trained):
        raise UserError(
            f"plan: --img-per-s {unknown[0]}: no cell trains this model{did_you_mean(unknown[0], sorted(planner.trained))}"
        )
    return CostPlan(rows, demands(load_primary().ledger))


class Planner:
    """Charges one stage or cell after the other.

    Args:
        paths: of the checkout.
        rates: the device, and what it achieves.
        results: the records.
        data: cell of prepare_data -> its params.
    """

    def __init__(self, paths: Paths, rates: Rates, results: Results, data: Mapping[str, Any]):
        self.paths, self.rates, self.results, self.data = paths, rates, results, data
        self.trained: set[str] = set()  # the names of the classifiers whose speed was asked for

    def charge(self, stage: str, cell: str | None, params: Any, command: str | None = None) -> PlanRow:
        """The row of a stage or of one of its cells; `command` runs it where `dvc repro` does not."""
        found: dict[str, Any]
        if hasattr(params, "seeds"):
            with blame(f"{stage}.{cell}", TypeError, ValueError, AssertionError):
                found = self._charge_training(stage, cell, params)
        elif stage == "prepare_data":
            found = self._charge_data(cell, params)
        elif stage == "complexity":
            found = {
                "hours": 0.0,
                "disk_gb": 0.0,
                "basis": "CPU only, under a minute",
                "gives": self._list_counts(params),
            }
        elif stage == "efficiency":  # the time after which every row would be stopped
            rows = len(params.models) * len(params.image_sizes)
            gives = frozenset((kind, model, "") for kind in ("fps", "memory_mib") for model, _ in params.models)
            found = {"hours": rows * params.budget_s / 3600, "disk_gb": 0.0, "gives": gives}
            found["basis"] = f"at most: {rows} rows of {params.budget_s:g} s"
        else:
            found = {"hours": None, "disk_gb": None, "basis": "no cost model for this stage"}
        if self.rates.gpu is None and params is not None and not found.get("basis", "").endswith(", given"):
            found |= self._find_seconds(stage, cell, params)
        unit = f"{stage}@{cell}" if cell else stage
        return PlanRow(command=command.format(cell) if command else f"dvc repro {unit}", **found)

    def find_data(self, stage: str, cell: str, name: str) -> tuple[str, int, int]:
        """The data set that a cell trains on: its kind, its classes and its training images, from its manifest or,
        before that is written, as expected; or a UserError.
        """
        if name not in self.data:
            where = f"{stage}.{cell}.data: {name}"
            raise UserError(f"{where}: prepare_data has no such cell{suggest_data(self.paths, name, self.data)}")
        file, about = manifest_path(self.paths, name), self.data[name]
        if not file.is_file():
            return about.kind, about.expected.classes, about.expected.train
        manifest = read_manifest(file)
        return about.kind, len(manifest.classes), manifest.splits["train"].images

    def find_measured(self, key: str, stages: Sequence[str]) -> tuple[float, str] | None:
        """Images per second of a model in the records of training of some stages on one GPU, and from where; the slowest
        of several.

        They are at results/measured/<device>/<stage>/<cell>.json.
        """
        found = []
        for record in self.results.sources:
            rate, processes = record.metrics.get("throughput_img_per_s"), record.metrics.get("processes")
            is_of_gpu = record.device.startswith("cuda") and self.rates.gpu.lower() in record.device.lower()
            # only records of training state their processes
            if rate and processes and is_of_gpu and record.path.split("/")[-2] in stages:
                if self.results.model_key(record.metrics, record.path) == key:
                    shown = f"{key}, {rate / processes:,.0f} img/s in training on {record.device} ({record.path})"
                    found.append((rate / processes, f"measured: {shown}"))
        return min(found, default=None)

    def _charge_training(self, stage: str, cell: str, params: Any) -> dict[str, Any]:
        """One training for each seed.

        The disk holds copies of the weights in fp32. A state is the weights, AdamW's two moments and, where there is
        one, the moving average. Until all seeds are done, each keeps two states, its snapshots twice and its weights; in
        addition there are one state that is being written, and the first seed's snapshots and weights in the results.
        For dense tasks, whose heads are not counted, the disk space is unknown, and estimated hours are a lower bound.
        """
        kind, classes, images = self.find_data(stage, cell, params.data)
        dense_size = _find_dense_size(params.transform)
        if dense_size:
            counted = pyramid_cost(params.model, dense_size, params.options)
        else:
            options = {**getattr(params, "model_options", params.options), "num_classes": classes}
            counted = cost(params.model, options, _find_size(params.transform))
        key = self.results.model_key({"model": params.model, "options": params.options}, params.model)
        speed, source, note = self._find_speed(stage, params.model, key, counted.macs)
        seen = params.steps_per_epoch * params.batch_size if params.steps_per_epoch else images
        epochs = "1 epoch" if params.epochs == 1 else f"{params.epochs} epochs"
        repeated = f"{len(params.seeds)} seeds of " if len(params.seeds) > 1 else ""
        bound = "at least, without the heads: " if dense_size and source == "estimated" else ""
        state, snapshots = 3 + bool(params.ema_decay), len(params.snapshot_epochs)
        copies = len(params.seeds) * (2 * state + 2 * snapshots + 1) + state + snapshots + 1
        return {
            "hours": len(params.seeds) * params.epochs * seen / speed / 3600,
            "disk_gb": None if dense_size else copies * counted.num_params * BYTES_PER_VALUE / 1e9,
            "basis": f"{bound}{repeated}{epochs} of {seen:,} images at {speed:,.0f} img/s, {source}",
            "note": note,
            "gives": frozenset({("accuracy", kind, key)}),
        }

    def _find_speed(self, stage: str, model: str, key: str, macs: int) -> tuple[float, str, str]:
        """Training images per second, whether they are given, measured or estimated, and from where: a classifier's as
        given, else as measured, else from the multiply-adds of the forward pass of one image.
        """
        rates = self.rates
        if stage in CLASSIFIERS:
            self.trained.update((model, key))
            if (given := rates.given.get(key, rates.given.get(model))) is not None:
                return given, "given", ""
        alike = CLASSIFIERS if stage in CLASSIFIERS else (stage,)
        if rates.gpu and (measured := self.find_measured(key, alike)):
            return measured[0], "measured", measured[1]
        peak = f"{rates.gpu}, {rates.tflops:g} TFLOP/s and {100 * rates.utilisation:g} % utilisation"
        note = f"estimated from multiply-adds, not measured: {peak}, a training step as {PASSES} forward passes"
        return rates.tflops * 1e12 * rates.utilisation / (PASSES * FLOPS_PER_MAC * macs), "estimated", note

    def _charge_data(self, cell: str, params: Any) -> dict[str, Any]:
        """No GPU time, and the size of a data set from its manifest or as published."""
        size_gb, source, file = KINDS[params.kind].size_gb, "as published", manifest_path(self.paths, cell)
        if file.is_file():
            size_gb = sum(split.bytes for split in read_manifest(file).splits.values()) / 1e9
            source = "from its manifest"
        elif not size_gb:
            source = "unknown until it is written"
        return {"hours": 0.0, "disk_gb": size_gb, "basis": f"CPU only; size {source}"}

    def _list_counts(self, params: Any) -> frozenset[Measurement]:
        """What counting gives."""

        def name(model: str, options: Mapping[str, Any], image_size: Any) -> str:
            return row_id(self.results.model_key({"model": model, "options": options}, model), {}, image_size)

        gives = set()
        for row in params.rows():
            macs = "macs_g_paper_convention" if row[0] == ADAPTER else "macs_g"
            gives |= {("params_m", name(*row), ""), (macs, name(*row), "")}
        fvcore = (row for group in params.groups if group.fvcore for row in group.rows())
        return frozenset(gives | {("macs_g_fvcore", name(*row), "") for row in fvcore})

    def _find_seconds(self, stage: str, cell: str | None, params: Any) -> dict[str, Any]:
        """The hours on a CPU, from what ran there before with these params and from nothing else, and how they are known.

        The seconds of a record are in run.json beside it, or for the last run of all stages in results/pipeline.json. A
        training over another number of epochs or seeds takes the same time for each.
        """
        results = self.results
        pipeline = results.paths.results / PIPELINE_FILE
        noted = read_json(pipeline).get("stages", {}) if pipeline.is_file() else {}
        for source in results.sources:
            outside = source.stage is None and source.path.endswith(f"/{stage}/{cell}/metrics.json")
            if (not outside and (source.stage, source.cell) != (stage, cell)) or source.device.startswith("cuda"):
                continue
            run, like, times = results.paths.root / source.run_file, params, 1.0
            if source.is_trained:
                seeds, epochs = source.metrics["seeds"], source.metrics["epochs"]
                times = params.epochs * len(params.seeds) / (epochs * len(seeds))
                like = dataclasses.replace(params, seeds=tuple(seeds)).with_epochs(epochs)
            seconds = read_json(run)["seconds"] if run.is_file() else noted.get(source.unit)
            if seconds is None or params_hash(like) != source.identity["params_hash"]:
                continue
            cpu = (source.identity.get("machine") or {}).get("cpu")
            basis = "measured on this CPU"
            if cpu != cpu_name():
                basis = f"an estimate: the seconds of another machine, {cpu or source.device}"
            basis += "" if times == 1 else f", times {times:.3g} for other epochs or seeds"
            return {"hours": seconds * times / 3600, "basis": basis, "note": ""}
        return {"hours": None, "basis": "not measured; this command measures it", "note": ""}


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
    """Read `MODEL=NUMBER` texts as images per second by model; anything else is a `UserError`."""
    rates = {}
    for text in texts:
        model, _, number = text.rpartition("=")
        try:
            rates[model] = float(number)
        except ValueError:
            rates[model] = math.nan
        if not model or not 0 < rates[model] < math.inf:
            raise UserError(f"plan: --img-per-s {text}: expected MODEL=NUMBER with a number above 0")
    return rates


def _build_params(stage: Any, name: str, content: Any) -> dict[str | None, Any]:
    """Cell -> its params; None -> those of a stage without cells."""
    if not stage.cells:
        return {None: build(stage.params, content, name)}
    cells = content or {}
    if not isinstance(cells, Mapping):
        raise UserError(f"{name}: expected a mapping of cells")
    return {cell: build(stage.params, cell_content, f"{name}.{cell}") for cell, cell_content in cells.items()}


def _find_dense_size(transform: Any) -> tuple[int, int] | None:
    """Height and width of the largest image that a detector or a segmenter trains on, padded; None for other tasks."""
    if hasattr(transform, "max_size"):
        sides = transform.min_size[-1], transform.max_size
    elif hasattr(transform, "crop_size"):
        sides = transform.crop_size, transform.crop_size
    else:
        return None
    return -(-sides[0] // STRIDE) * STRIDE, -(-sides[1] // STRIDE) * STRIDE


def _find_size(transform: Any) -> tuple[int, int]:
    """Height and width of an image that a classifier or a denoiser trains on."""
    return transform.shape[1:] if hasattr(transform, "shape") else (transform.image_size, transform.image_size)
