"""The plan of a params file: what its stages cost, and which numbers of the paper they would give."""

import dataclasses
import math
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..core.config import BY_HAND, build, load_yaml, params_hash
from ..core.errors import UserError, blame, did_you_mean
from ..core.paths import Paths
from ..core.record import read_json
from ..core.runtime import cpu_name
from ..data.cells import manifest_path, suggest_data
from ..data.manifest import Manifest, read_manifest
from ..papers import load_papers, load_primary
from ..report.answer import PIPELINE_FILE
from ..report.demands import Measurement, demands
from ..report.results import Results

CLASSIFIERS = ("pretrain", "baselines", "linearize", "ablate")  # the stages that train classifiers, all of them alike
PASSES = 3  # a training step computes about three forward passes: one forward, and two for the gradients
FLOPS_PER_MAC = 2


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
class TrainingData:
    """What a training reads: the kind of the data set, its classes and its training images."""

    kind: str
    classes: int
    images: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSpeed:
    """Training images per second on one GPU; `note` says where they come from, and is empty where the user gave them."""

    img_per_s: float
    source: Literal["given", "measured", "estimated"]
    note: str = ""


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

    def find_given(self, model: str, key: str) -> TrainingSpeed | None:
        """The speed that the user gave for a model, named with or without its options; None without one."""
        rate = self.given.get(key, self.given.get(model))
        return None if rate is None else TrainingSpeed(img_per_s=rate, source="given")

    def estimate(self, macs: int) -> TrainingSpeed:
        """The speed that follows from the multiply-adds of the forward pass of one image."""
        rate = self.tflops * 1e12 * self.utilisation / (PASSES * FLOPS_PER_MAC * macs)
        peak = f"{self.gpu}, {self.tflops:g} TFLOP/s and {100 * self.utilisation:g} % utilisation"
        note = f"estimated from multiply-adds, not measured: {peak}, a training step as {PASSES} forward passes"
        return TrainingSpeed(img_per_s=rate, source="estimated", note=note)


def find_measured(results: Results, key: str, stages: Collection[str], gpu: str) -> TrainingSpeed | None:
    """The speed of a model (see `Results.model_key`) in the records of training of some stages on a GPU; the slowest of
    several, or None.

    They lie at results/measured/<device>/<stage>/<cell>.json.
    """
    found = []
    for record in results.sources:
        rate, processes = record.metrics.get("throughput_img_per_s"), record.metrics.get("processes")
        # only records of training state their processes
        if not rate or not processes or not is_of_gpu(record.device, gpu) or record.path.split("/")[-2] not in stages:
            continue
        if results.model_key(record.metrics, record.path) == key:
            each = rate / processes
            note = f"measured: {key}, {each:,.0f} img/s in training on {record.device} ({record.path})"
            found.append(TrainingSpeed(img_per_s=each, source="measured", note=note))
    return min(found, key=lambda speed: speed.img_per_s, default=None)


def is_of_gpu(device: str, gpu: str) -> bool:
    """Whether a record's device is the GPU that a part of its name says."""
    return device.startswith("cuda") and gpu.lower() in device.lower()


def find_seconds(results: Results, stage: str, cell: str | None, params: Any) -> tuple[float, str] | None:
    """How long a stage or cell with these params takes on a CPU by its record, and how that is known; None without a
    record that fits.

    The seconds of the record are in run.json beside it, or for the last run of all stages in results/pipeline.json. A
    training over another number of epochs or seeds takes the same time for each.
    """
    pipeline = results.paths.results / PIPELINE_FILE
    noted = read_json(pipeline).get("stages", {}) if pipeline.is_file() else {}
    for source in results.sources:
        by_hand = source.stage is None and source.path.endswith(f"/{stage}/{cell}/metrics.json")
        if (not by_hand and (source.stage, source.cell) != (stage, cell)) or source.device.startswith("cuda"):
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
        basis = (
            "measured on this CPU"
            if cpu == cpu_name()
            else f"an estimate: the seconds of another machine, {cpu or source.device}"
        )
        return seconds * times, basis if times == 1 else f"{basis}, times {times:.3g} for other epochs or seeds"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """Answers the questions of the cost function of `stage`.

    Args:
        data: cell of prepare_data -> its params.
        trained: collects the names of the classifiers whose speed was asked for.
    """

    stage: str
    paths: Paths
    rates: Rates
    results: Results
    data: Mapping[str, Any]
    trained: set[str] = dataclasses.field(default_factory=set)

    def command(self, cell: str | None = None) -> str:
        """The command that runs the stage, or one of its cells."""
        return f"dvc repro {self.stage}@{cell}" if cell else f"dvc repro {self.stage}"

    def model_key(self, model: str, options: Mapping[str, Any]) -> str:
        """The name of a model in the ledger: `model[option=value,...]`, where default options are left out."""
        return self.results.model_key({"model": model, "options": options}, model)

    def find_manifest(self, cell: str) -> Manifest | None:
        """The manifest of a cell of prepare_data; None before it is written."""
        file = manifest_path(self.paths, cell)
        return read_manifest(file) if file.is_file() else None

    def find_data(self, cell: str, name: str) -> TrainingData:
        """The data set that a cell trains on: counts from its manifest or, before that is written, the expected ones;
        or a UserError.
        """
        if name not in self.data:
            raise UserError(
                f"{self.stage}.{cell}.data: {name}: prepare_data has no such cell{suggest_data(self.paths, name, self.data)}"
            )
        manifest, expected = self.find_manifest(name), self.data[name].expected
        if manifest is None:
            return TrainingData(kind=self.data[name].kind, classes=expected.classes, images=expected.train)
        return TrainingData(
            kind=self.data[name].kind, classes=len(manifest.classes), images=manifest.splits["train"].images
        )

    def find_speed(self, params: Any, macs: int) -> TrainingSpeed:
        """The speed of a training: of a classifier as given, else as measured, else estimated from the `macs` of one
        image.
        """
        key = self.model_key(params.model, params.options)
        if self.stage not in CLASSIFIERS:
            return self._find_measured(key, (self.stage,)) or self.rates.estimate(macs)
        self.trained.update((params.model, key))
        given = self.rates.find_given(params.model, key)
        return given or self._find_measured(key, CLASSIFIERS) or self.rates.estimate(macs)

    def _find_measured(self, key: str, stages: Collection[str]) -> TrainingSpeed | None:
        return find_measured(self.results, key, stages, self.rates.gpu) if self.rates.gpu else None

    def on_cpu(self, row: PlanRow, cell: str | None, params: Any) -> PlanRow:
        """A row with the time on a CPU, from what ran there before and from nothing else."""
        model = getattr(params, "model", None)
        if (
            model is not None
            and self.rates.find_given(model, self.model_key(model, params.options))
            and self.stage in CLASSIFIERS
        ):
            return row
        found = find_seconds(self.results, self.stage, cell, params)
        if found is None:
            return dataclasses.replace(row, hours=None, basis="not measured; this command measures it", note="")
        return dataclasses.replace(row, hours=found[0] / 3600, basis=found[1], note="")

    def count(self, cell: str, counter: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that counts a model's cost; what it refuses is a UserError that names the cell."""
        with blame(f"{self.stage}.{cell}", TypeError, ValueError, AssertionError):
            return counter(*arguments)


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


def charge_unknown(planner: Planner, params: Any = None) -> list[PlanRow]:
    """List a stage whose cost is not modelled, and which the totals leave out."""
    return [PlanRow(command=planner.command(), hours=None, disk_gb=None, basis="no cost model for this stage")]


def plan_costs(stages: Mapping[str, Any], params_file: Path, paths: Paths, rates: Rates) -> CostPlan:
    """Charge every stage of the table that params.yaml, or a profile, has a section for; records and manifests count
    where they exist.

    Raises:
        UserError: wrong parameters, or a given rate of a model that no cell trains.
    """
    scores = {name: stage.scores for name, stage in stages.items() if stage.purpose == "graph"}
    results = Results(paths, load_papers().values(), scores)
    sections = {name: content for name, content in load_yaml(params_file).items() if name not in ("runtime", BY_HAND)}
    params = {name: _build_params(stages[name], name, content) for name, content in sections.items() if name in stages}
    trained: set[str] = set()
    rows: list[PlanRow] = []
    for name in sections:
        planner = Planner(
            stage=name, paths=paths, rates=rates, results=results, data=params.get("prepare_data", {}), trained=trained
        )
        if name not in stages:
            rows += charge_unknown(planner)
        elif stages[name].cost is not None:
            own = pkgutil.resolve_name(stages[name].cost)(planner, params[name])
            if rates.gpu is None:
                units = params[name].items() if stages[name].cells else [(None, params[name])]
                own = [planner.on_cpu(row, cell, of_cell) for row, (cell, of_cell) in zip(own, units, strict=True)]
            rows += own
    if unknown := sorted(rates.given.keys() - trained):
        raise UserError(
            f"plan: --img-per-s {unknown[0]}: no cell trains this model{did_you_mean(unknown[0], sorted(trained))}"
        )
    return CostPlan(rows, demands(load_primary().ledger))


def _build_params(stage: Any, name: str, content: Any) -> Any:
    """The params of a stage, or {cell: params}; None for a stage that is free, whose section is not read."""
    if stage.cost is None:
        return None
    if not stage.cells:
        return build(stage.params, content, name)
    cells = content or {}
    if not isinstance(cells, Mapping):
        raise UserError(f"{name}: expected a mapping of cells")
    return {cell: build(stage.params, cell_content, f"{name}.{cell}") for cell, cell_content in cells.items()}


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
