"""What the stages of a params file cost, and which numbers of the paper they would give. Nothing is started.

Hours of a training are its images over the throughput of one GPU, without evaluations and a teacher's forward pass; an
estimate is at least what the host was seen to need to launch as many steps.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..bench.adapted import pyramid_cost
from ..bench.flops import cost
from ..bench.params import ADAPTER
from ..bench.speed import row_id
from ..core.config import build, load_sections, params_hash
from ..core.errors import UserError, blame, did_you_mean
from ..core.paths import Paths
from ..core.record import read_json
from ..core.runtime import cpu_name
from ..core.speeds import HOST
from ..data.cells import manifest_path, suggest_data
from ..data.kinds import KINDS
from ..data.manifest import read_manifest
from ..papers import load_papers, load_primary
from ..report.answer import PIPELINE_FILE
from ..report.ledger import Ledger
from ..report.records import Source
from ..report.results import Results

# the stages that train classifiers, all of them alike
CLASSIFIERS = ("pretrain", "linearize", "ablate", "ablate_linearize", "pretrain_seeds")
FREE = ("runtime", "tune")  # sections of no work, or of work outside the pipeline
PASSES = 3  # a training step computes about three forward passes: one forward, and two for the gradients
FLOPS_PER_MAC = 2
BYTES_PER_VALUE = 4  # fp32
COPIES = 4  # of the weights while AdamW steps: themselves, their gradients and two moments
SHORTENED = ("pretrain", "detect", "segment")  # the stages whose cells --epochs shortens
STRIDE = 32  # to multiples of which images of dense tasks are padded
# ("accuracy", data set, model), (one of the counts, "model@size", "") or ("fps" | "memory_mib", model, "")
Measurement = tuple[str, str, str]
_COUNTS = {"params_m", "macs_g", "macs_g_paper_convention", "macs_g_of_authors", "macs_g_fvcore"}
_MEASURED = {*_COUNTS, "accuracy", "fps", "memory_mib"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What a stage or one of its cells costs.

    Args:
        hours: of one device; None where unknown.
        disk_gb: the most disk that it occupies, in units of 1e9 bytes; None where unknown.
        basis: of what the hours are; for a training on a GPU, seeds × epochs × images.
        mark: how the hours are known: `~` estimated, `≥` estimated without heads, `≤` a limit, else measured or given.
        note: where the hours or the memory are known from.
        memory_gib: the measured peak of a training of these sizes on a GPU; None where there is none.
        least_memory_gib: what a training holds for certain; None for other work.
        measure: the command that measures the hours and the memory of a training; empty for other work.
        gives: the measurements that it yields, see `demands`.
    """

    command: str
    hours: float | None
    disk_gb: float | None
    basis: str
    mark: str = ""
    note: str = ""
    memory_gib: float | None = None
    least_memory_gib: float | None = None
    measure: str = ""
    gives: frozenset[Measurement] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """The device that the work is planned for, and what it achieves; a UserError for a number out of range.

    Args:
        given: `model` or `model[option=value]` -> training images per second.
        gpu: a part of the name of a GPU; None plans for a CPU, by the seconds of earlier runs alone.
        tflops: the GPU's peak in TFLOP/s, for models of unknown speed.
        utilisation: the share of that peak, in (0, 1], that training reaches.
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
    """The costs of all stages, and what the paper asks for: `needs`, see `demands`."""

    rows: list[PlanRow]
    needs: Mapping[str, list[set[Measurement]]]

    def total(self, name: str) -> float:
        """The sum of `hours` or `disk_gb` over the rows where it is known."""
        return sum(getattr(row, name) or 0.0 for row in self.rows)

    @property
    def unknown(self) -> list[str]:
        return [row.command for row in self.rows if None in (row.hours, row.disk_gb)]

    def find_rows(self, place: str) -> list[PlanRow]:
        """The rows that give a measurement which a number of a table or figure needs."""
        needed = frozenset().union(*self.needs[place])
        return [row for row in self.rows if row.gives & needed]

    def count_covered(self) -> dict[str, tuple[int, int]]:
        """Table or figure -> (numbers whose measurements are all among those of the rows, all numbers)."""
        gives = frozenset().union(*(row.gives for row in self.rows))
        needs = self.needs.items()
        return {place: (sum(bool(need) and need <= gives for need in of), len(of)) for place, of in needs}


def plan_costs(stages: Mapping[str, Any], params_file: Path, paths: Paths, devices: Sequence[Rates]) -> list[CostPlan]:
    """A plan for each device: charge every stage that a params file has a section for.

    Raises:
        UserError: wrong parameters, or a given rate of a model that no cell trains.
    """
    scores = {name: stage.scores for name, stage in stages.items() if stage.purpose == "graph"}
    every = load_sections(params_file)
    sections = {name: content for name, content in every.items() if name not in FREE}
    params = {name: _build_params(stages[name], name, content) for name, content in sections.items() if name in stages}
    results, data = Results(paths, load_papers().values(), scores), params.get("prepare_data", {})
    runtime, plans = every.get("runtime") or {}, []
    planner = Planner(paths, devices[0], results, data, micro_batch=runtime.get("micro_batch"))
    needs = demands(load_primary().ledger)
    for rates in devices:
        planner.rates = rates
        rows = []
        for name in sections:
            units = params.get(name, {None: None})
            command = f"repro {name} --cell {{}}" if name in stages and stages[name].purpose != "graph" else None
            rows += [planner.charge(name, cell, own, command) for cell, own in units.items()]
        if unknown := sorted(rates.given.keys() - planner.trained):
            guess = did_you_mean(unknown[0], sorted(planner.trained))
            raise UserError(f"plan: --img-per-s {unknown[0]}: no cell trains this model{guess}")
        plans.append(CostPlan(rows, needs))
    return plans


class Planner:
    """Charges one stage or cell after the other; `data`: cell of prepare_data -> its params."""

    def __init__(
        self, paths: Paths, rates: Rates, results: Results, data: Mapping[str, Any], *, micro_batch: int | None = None
    ):
        self.paths, self.rates, self.results, self.data = paths, rates, results, data
        self.micro_batch = micro_batch
        self.counted: dict[tuple[str, str], Any] = {}  # stage and cell -> the count of its model, which takes long
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
            found = {"hours": 0.0, "disk_gb": 0.0, "basis": "CPU, under a minute", "gives": self._list_counts(params)}
        elif stage == "efficiency":  # the time after which every row would be stopped
            rows = len(params.models) * len(params.image_sizes)
            gives = frozenset((kind, model, "") for kind in ("fps", "memory_mib") for model, _ in params.models)
            found = {"hours": rows * params.budget_s / 3600, "disk_gb": 0.0, "gives": gives}
            found |= {"basis": f"{rows} rows of {params.budget_s:g} s", "mark": "≤"}
        else:
            found = {"hours": None, "disk_gb": None, "basis": "no cost model"}
        if self.rates.gpu is None and params is not None and not found.get("note", "").startswith("given"):
            found |= self._find_seconds(stage, cell, params)
        unit = f"{stage}@{cell}" if cell else stage
        return PlanRow(command=command.format(cell) if command else f"dvc repro {unit}", **found)

    def find_data(self, stage: str, cell: str, name: str) -> tuple[str, int, int]:
        """The kind, classes and training images of a cell's data, from its manifest or as expected; or a UserError."""
        if name not in self.data:
            where = f"{stage}.{cell}.data: {name}"
            raise UserError(f"{where}: prepare_data has no such cell{suggest_data(self.paths, name, self.data)}")
        file, about = manifest_path(self.paths, name), self.data[name]
        if not file.is_file():
            return about.kind, about.expected.classes, about.expected.train
        manifest = read_manifest(file)
        return about.kind, len(manifest.classes), manifest.splits["train"].images

    def find_trainings(self, key: str, params: Any, stages: Sequence[str]) -> list[Source]:
        """The records of the speed of trainings on any GPU, of a model on such images in such a precision."""
        found = []
        for record in self.results.sources:
            stage, metrics = record.path.split("/")[-2], record.metrics
            # only records of the speed of training have a transform
            if not record.device.startswith("cuda") or stage not in stages or "transform" not in metrics:
                continue
            size = find_input_size(SimpleNamespace(**metrics["transform"]))
            is_alike = size == find_input_size(params.transform) and self.results.model_key(metrics, record.path) == key
            if is_alike and params.precision in ("auto", record.identity.get("dtype")):
                found.append(record)
        return found

    def find_measured(self, records: Sequence[Source]) -> tuple[float, str] | None:
        """Images per second of one of the plan's GPUs and from where; the slowest of several records."""
        found = []
        for record in records:
            rate = record.metrics["throughput_img_per_s"]
            if rate is not None and self.rates.gpu.lower() in record.device.lower():
                rate /= record.metrics["processes"]
                found.append((rate, f"measured: {rate:,.0f} img/s on {record.device} ({record.path})"))
        return min(found, default=None)

    def find_memory(self, records: Sequence[Source], params: Any) -> tuple[float, str] | None:
        """The largest peak of GPU memory, in GiB, of trainings of as many images at once, and from where."""
        found, micro_batch = [], self._find_micro_batch(params)
        for record in records:
            metrics = record.metrics
            is_alike = all(bool(getattr(params, name, None)) == is_on for name, is_on in metrics["keeps"].items())
            if is_alike and metrics["micro_batch"] == micro_batch and metrics["peak_memory_mib"] is not None:
                gib = metrics["peak_memory_mib"] / 1024
                found.append((gib, f"measured: {gib:.2f} GiB on {record.device} ({record.path})"))
        return max(found, default=None)

    def _find_micro_batch(self, params: Any) -> int:
        """How many images are in the model at once."""
        return min(self.micro_batch or params.batch_size, params.batch_size)

    def _charge_training(self, stage: str, cell: str, params: Any) -> dict[str, Any]:
        """One training for each seed.

        The disk holds copies of the weights in fp32. A state is the weights, AdamW's two moments and a moving average.
        Each seed keeps two states, its snapshots twice and its weights; one state more is being written, and the first
        seed's snapshots and weights are in the results. Heads of dense tasks are not counted: their disk is unknown.

        The GPU holds the weights, gradients, moments and moving average in fp32; activations come on top.
        """
        kind, classes, images = self.find_data(stage, cell, params.data)
        dense = _is_dense(params.transform)
        if (stage, cell) not in self.counted:
            size = find_input_size(params.transform)
            options = {**getattr(params, "model_options", params.options), "num_classes": classes}
            counted = pyramid_cost(params.model, size, params.options) if dense else cost(params.model, options, size)
            self.counted[stage, cell] = counted
        counted = self.counted[stage, cell]
        key = self.results.model_key({"model": params.model, "options": params.options}, params.model)
        records = self.find_trainings(key, params, CLASSIFIERS if stage in CLASSIFIERS else (stage,))
        micro_batch = self._find_micro_batch(params)
        speed, mark, note = self._find_speed(stage, params.model, key, counted.macs, records, micro_batch)
        of_stage = [record for record in records if record.path.split("/")[-2] == stage]
        memory = self.find_memory(of_stage, params)
        seen = params.steps_per_epoch * params.batch_size if params.steps_per_epoch else images
        state, snapshots = 3 + bool(params.ema_decay), len(params.snapshot_epochs)
        copies = len(params.seeds) * (2 * state + 2 * snapshots + 1) + state + snapshots + 1
        is_frozen = any(getattr(params, name, False) for name in ("freeze", "freeze_backbone"))
        held = (1 if is_frozen else COPIES) + bool(params.ema_decay)
        # two sections of `repro ablate` may have a cell of one name
        measure = f"repro {f'ablate --cell {stage}.' if stage.startswith('ablate') else f'{stage} --cell '}{cell}"
        measure += " --epochs 1 --seeds 1" * (stage in SHORTENED)
        if stage == "pretrain_seeds":  # `repro seeds` records neither speed nor memory
            measure = ""
        return {
            "hours": len(params.seeds) * params.epochs * seen / speed / 3600,
            "disk_gb": None if dense else copies * counted.num_params * BYTES_PER_VALUE / 1e9,
            "basis": f"{len(params.seeds)} × {params.epochs} × {seen:,} images",
            "mark": "≥" if dense and mark else mark,
            "note": "\n".join(filter(None, (note, memory and memory[1]))),
            "memory_gib": memory and memory[0],
            "least_memory_gib": held * counted.num_params * BYTES_PER_VALUE / 2**30,
            "measure": measure,
            "gives": frozenset({("accuracy", kind, key)}),
        }

    def _find_speed(
        self, stage: str, model: str, key: str, macs: int, records: list[Source], micro_batch: int
    ) -> tuple[float, str, str]:
        """Training images per second, the mark of their hours, and their source: given, measured or estimated.

        An estimated step takes at least as long as a host needs to launch it.
        """
        rates = self.rates
        if stage in CLASSIFIERS:
            self.trained.update((model, key))
            if (given := rates.given.get(key, rates.given.get(model))) is not None:
                return given, "", f"given: {given:,.1f} img/s of {key}"
        if rates.gpu and (measured := self.find_measured(records)):
            return measured[0], "", measured[1]
        by_work = rates.tflops * 1e12 * rates.utilisation / (PASSES * FLOPS_PER_MAC * macs)
        pass_ms, path = self.find_host_time(model)
        by_host = micro_batch * 1e3 / (PASSES * pass_ms) if pass_ms else math.inf
        note = f"a step takes at least {PASSES} × {pass_ms:.3g} ms of the host ({path})" if by_host < by_work else ""
        return min(by_work, by_host), "~", note

    def find_host_time(self, model: str) -> tuple[float, str]:
        """The longest milliseconds that a host was seen to need for a forward pass of a model's family, else of any
        model, and the record; 0 where no time of a host was measured.
        """
        listed = [each for rows in self.results.speed_rows.values() for each in rows if each[0]["host"] == HOST]
        alike = [each for each in listed if each[0]["model"].split("_")[0] == model.split("_")[0]]
        return max(((row["latency_ms"], source.path) for row, source in alike or listed), default=(0.0, ""))

    def _charge_data(self, cell: str, params: Any) -> dict[str, Any]:
        """No GPU time, and the size of a data set from its manifest or as published."""
        size_gb, source, file = KINDS[params.kind].size_gb, "as published", manifest_path(self.paths, cell)
        if file.is_file():
            size_gb = sum(split.bytes for split in read_manifest(file).splits.values()) / 1e9
            source = "from its manifest"
        elif not size_gb:
            source = "unknown as yet"
        return {"hours": 0.0, "disk_gb": size_gb, "basis": f"CPU; size {source}"}

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
        """The hours on a CPU, from what ran there before with these params, and how they are known."""
        results = self.results
        pipeline = results.paths.results / PIPELINE_FILE
        noted = read_json(pipeline).get("stages", {}) if pipeline.is_file() else {}
        for source in results.sources:
            is_own = (source.stage, source.cell) == (stage, cell) or source.place == f"{stage}/{cell}"
            if not is_own or source.device.startswith("cuda"):
                continue
            run, like, times = results.paths.root / source.run_file, params, 1.0
            if source.most_seeds:
                seeds, epochs = source.metrics["seeds"], source.metrics["epochs"]
                times = params.epochs * len(params.seeds) / (epochs * len(seeds))
                like = dataclasses.replace(params, seeds=tuple(seeds)).with_epochs(epochs)
            seconds = read_json(run)["seconds"] if run.is_file() else noted.get(source.unit)
            if seconds is None or params_hash(like) != source.identity["params_hash"]:
                continue
            cpu = (source.identity.get("machine") or {}).get("cpu")
            is_here = cpu == cpu_name()
            basis = "measured on this CPU" if is_here else f"by the seconds of another: {cpu or source.device}"
            basis += "" if times == 1 else f", × {times:.3g} by epochs"
            return {"hours": seconds * times / 3600, "basis": basis, "mark": "" if is_here else "~", "note": ""}
        return {"hours": None, "basis": "not measured; this command measures it", "mark": "", "note": ""}


def demands(ledger: Ledger) -> dict[str, list[set[Measurement]]]:
    """Table or figure -> for each number or statement there, the measurements that our counterpart is computed from.

    A set is empty where there is no counterpart, or where it needs no measurement.
    """
    found: dict[str, list[set[Measurement]]] = {}
    for entry in ledger.entries.values():
        calls = (call for each in ledger.trace(entry) if each.ours for call in each.ours.calls)
        asked = [(call.name, *call.args, None)[:3] for call in calls if call.name in _MEASURED]
        needs = {(name, str(first), second if isinstance(second, str) else "") for name, first, second in asked}
        for place in entry.places:
            if place.startswith(("Table", "Fig.")):
                found.setdefault(place, []).append(needs)
    return found


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


def find_input_size(transform: Any) -> tuple[int, int]:
    """Height and width of an image that a model trains on; of the largest one, padded, for a detector or segmenter."""
    if hasattr(transform, "shape"):  # of a denoiser
        return tuple(transform.shape[1:])
    if not _is_dense(transform):
        return transform.image_size, transform.image_size
    is_detector = hasattr(transform, "max_size")
    sides = (transform.min_size[-1], transform.max_size) if is_detector else (transform.crop_size,) * 2
    return -(-sides[0] // STRIDE) * STRIDE, -(-sides[1] // STRIDE) * STRIDE


def _is_dense(transform: Any) -> bool:
    return hasattr(transform, "max_size") or hasattr(transform, "crop_size")
