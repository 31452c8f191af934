"""The plan of a params file: the costs of all its stages, and the numbers of the paper that they would give."""

import dataclasses
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.config import build, load_yaml
from ..core.errors import UserError, did_you_mean
from ..core.paths import Paths
from ..report.demands import Measurement, demands
from ..report.ledger import load_ledger
from ..report.sources import Results
from .costs import charge_unknown
from .planner import Planner, PlanRow
from .rates import Rates


@dataclasses.dataclass(frozen=True)
class CostPlan:
    """The costs of all stages, and what the paper asks for.

    Args:
        rows: in the order of the params file.
        needs: table or figure -> for each number there, the measurements from which ours is computed, see `repro.report.demands`.
    """

    rows: list[PlanRow]
    needs: Mapping[str, list[set[Measurement]]]

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
    results, needs = _read_paper(paths)
    sections = {name: content for name, content in (load_yaml(params_file) or {}).items() if name != "runtime"}
    params = {name: _build_params(stages[name], name, content) for name, content in sections.items() if name in stages}
    trained: set[str] = set()
    rows: list[PlanRow] = []
    for name in sections:
        planner = Planner(stage=name, paths=paths, rates=rates, results=results, data=params.get("prepare_data", {}), trained=trained)
        if name not in stages:
            rows += charge_unknown(planner, None)
        elif stages[name].cost is not None:
            rows += pkgutil.resolve_name(stages[name].cost)(planner, params[name])
    if unknown := sorted(rates.given.keys() - trained):
        raise UserError(f"plan: --img-per-s {unknown[0]}: no cell trains this model{did_you_mean(unknown[0], sorted(trained))}")
    return CostPlan(rows, needs)


def _read_paper(paths: Paths) -> tuple[Results, dict[str, list[set[Measurement]]]]:
    """The records of a checkout, and the measurements that each table and figure of the paper needs."""
    ledger = load_ledger()
    return Results(paths, ledger.default_options, ledger.own_families), demands(ledger)


def _build_params(stage: Any, name: str, content: Any) -> Any:
    """The params of a stage, or {cell: params}; None for a stage that is free, whose section is not read."""
    if stage.cost is None:
        return None
    if not stage.cells:
        return build(stage.params, content, name)
    if not isinstance(content or {}, Mapping):
        raise UserError(f"{name}: expected a mapping of cells")
    return {cell: build(stage.params, cell_content, f"{name}.{cell}") for cell, cell_content in (content or {}).items()}
