"""A plan: the costs of all stages of a params file, and what the cost functions share."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.config import build, load_yaml
from ..core.errors import UserError, did_you_mean
from ..core.paths import Paths
from ..data.cells import manifest_path
from ..data.manifest import Manifest, read_manifest
from ..report.demands import demands
from ..report.ledger import load_ledger
from ..report.sources import Results
from .costs import PlanRow, charge_unknown
from .rates import Rates, TrainingSpeed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a training reads: the kind of the data set, its classes and its training images."""

    kind: str
    classes: int
    images: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """What the cost function of a stage may ask.

    Args:
        stage: the stage whose cost is asked for.
        paths: the checkout.
        rates: what one GPU is assumed to achieve.
        results: the records of the checkout.
        data: cell of prepare_data -> its params.
        trained: collects the names of the models whose speed was asked for.
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
        """The name of a model in the ledger: `model[option=value]` without the default options."""
        return self.results.model_key({"model": model, "options": options}, model)

    def find_manifest(self, cell: str) -> Manifest | None:
        """The manifest of a cell of prepare_data; None before it is written."""
        file = manifest_path(self.paths, cell)
        return read_manifest(file) if file.is_file() else None

    def find_data(self, cell: str, name: str) -> TrainingData:
        """What the params of a cell of this stage name as `data`: counts from the manifest, or the expected ones before it is written.

        Raises:
            UserError: prepare_data has no cell of that name.
        """
        if name not in self.data:
            raise UserError(f"{self.stage}.{cell}.data: {name}: prepare_data has no such cell{did_you_mean(name, self.data)}")
        manifest, expected = self.find_manifest(name), self.data[name].expected
        if manifest is None:
            return TrainingData(kind=self.data[name].kind, classes=expected.classes, images=expected.train)
        return TrainingData(kind=self.data[name].kind, classes=len(manifest.classes), images=manifest.splits["train"].images)

    def find_speed(self, model: str, options: Mapping[str, Any], macs: int) -> TrainingSpeed:
        """How fast a classifier trains on one GPU; `macs` are multiply-adds of the forward pass of one image."""
        key = self.model_key(model, options)
        self.trained.update((model, key))
        return self.rates.find_speed(self.results, model, key, macs)

    def count(self, cell: str, counter: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that counts a model's cost; what it refuses is a UserError that names the cell."""
        try:
            return counter(*arguments)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"{self.stage}.{cell}: {error}") from None


@dataclasses.dataclass(frozen=True)
class CostPlan:
    """The costs of all stages, and what the paper asks for.

    Args:
        rows: in the order of the params file.
        needs: table or figure -> for each number there, the measurements from which ours is computed, see `repro.report.demands`.
    """

    rows: list[PlanRow]
    needs: Mapping[str, list[set]]

    def total(self, name: str) -> float:
        """The sum of `gpu_hours` or `disk_gb` over the rows where it is known."""
        return sum(getattr(row, name) or 0.0 for row in self.rows)

    @property
    def unknown(self) -> list[str]:
        """The commands of rows whose hours or disk are unknown."""
        return [row.command for row in self.rows if None in (row.gpu_hours, row.disk_gb)]

    def find_places(self, row: PlanRow) -> dict[str, int]:
        """Table or figure -> how many of its numbers need a measurement of this row; those without any are left out."""
        counts = {place: sum(bool(need & row.gives) for need in needs) for place, needs in self.needs.items()}
        return {place: count for place, count in counts.items() if count}

    def count_covered(self) -> dict[str, tuple[int, int]]:
        """Table or figure -> (numbers whose measurements are all among those of the rows, all numbers)."""
        gives = frozenset().union(*(row.gives for row in self.rows))
        return {place: (sum(bool(need) and need <= gives for need in needs), len(needs)) for place, needs in self.needs.items()}


def plan_costs(stages: Mapping[str, Any], params_file: Path, paths: Paths, rates: Rates) -> CostPlan:
    """Charge every stage of a params file.

    Args:
        stages: the table of stages, name -> row.
        params_file: params.yaml, or a profile.
        paths: the checkout, whose records and manifests are used where they exist.
        rates: what one GPU is assumed to achieve.

    Raises:
        UserError: wrong parameters, or a given rate of a model that no cell trains.
    """
    ledger = load_ledger()
    results = Results(paths, ledger.default_options, ledger.own_families)
    sections = {name: content for name, content in (load_yaml(params_file) or {}).items() if name != "runtime"}
    params = {name: _build_params(stages[name], name, content) for name, content in sections.items() if name in stages}
    trained: set[str] = set()
    rows: list[PlanRow] = []
    for name in sections:
        planner = Planner(stage=name, paths=paths, rates=rates, results=results, data=params.get("prepare_data", {}), trained=trained)
        cost = stages[name].cost if name in stages else charge_unknown
        rows += cost(planner, params.get(name)) if cost else []
    if unknown := sorted(rates.given.keys() - trained):
        raise UserError(f"plan: --img-per-s {unknown[0]}: no cell trains this model{did_you_mean(unknown[0], sorted(trained))}")
    return CostPlan(rows, demands(ledger))


def _build_params(stage: Any, name: str, content: Any) -> Any:
    """The params of a stage, or {cell: params}; None for a stage that is free, whose section is not read."""
    if stage.cost is None:
        return None
    if not stage.cells:
        return build(stage.params, content, name)
    if not isinstance(content or {}, Mapping):
        raise UserError(f"{name}: expected a mapping of cells")
    return {cell: build(stage.params, cell_content, f"{name}.{cell}") for cell, cell_content in (content or {}).items()}
