"""The verbs of the command line, one module each. A module declares `STAGE`, a row of the table, and `command` (or, for a verb with
verbs of its own, `app`). A new module is found by lying here: the command line, `status`, `plan`, the report and the tests read the
table and nothing else.

Stage modules import nothing heavy, so that `repro --help` answers at once and `repro doctor` starts where torch is broken.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Literal

# the headings under which the verbs are listed, in this order
PURPOSES = {"graph": "Stages of the pipeline", "use": "Use a trained model", "check": "Before and between runs", "prove": "Proof"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of the table of stages.

    Args:
        purpose: the heading under which the verb is listed; `graph` for the stages of dvc.yaml.
        params: the dataclass of the section of params.yaml that has the stage's name, or of each of its cells; None without a section.
        cells: whether the section maps names to cells, each with a folder results/<name>/<cell>.
        task: of a stage that trains, the name of its task in `repro.tasks`.
        scores: keys of the records' metrics that say how good a model is -> what the report calls them.
        cost: what `repro plan` charges: (planner, params or {cell: params}) -> rows, see `repro.planning`; None where it costs nothing.
        entries: params (of a cell) -> modules beside the stage's own whose sources determine its results, e.g. the model family's.
    """

    purpose: Literal["graph", "use", "check", "prove"] = "graph"
    params: type | None = None
    cells: bool = False
    task: str | None = None
    scores: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cost: Callable[[Any, Any], list[Any]] | None = None
    entries: Callable[[Any], list[str]] | None = None


def stage_names() -> list[str]:
    """The names of all stages, which are those of their modules, in alphabetical order."""
    library = ("training", "dense", "ablate_grid", "efficiency_sweep", "selftest_lab")
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name not in library]


def load_module(name: str) -> Any:
    """The module of a stage."""
    return importlib.import_module(f"{__name__}.{name}")


def load_stages() -> dict[str, Stage]:
    """The whole table: name -> row."""
    return {name: load_module(name).STAGE for name in stage_names()}


def verb_of(name: str) -> str:
    """The word on the command line for a stage."""
    return name.replace("_", "-")
