"""The verbs of the command line, one module each.

A module declares `STAGE`, a row of the table, and `command` (or `app`, for a verb with verbs of its own). A new module
is found without registration: the command line, `status`, `plan`, the report and the tests read this table alone.

Stage modules must not import torch or other heavy packages at the top, so that `repro --help` answers at once and
`repro doctor` starts where torch is broken.
"""

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import repro
from repro.core.errors import UserError

CellOption = Annotated[str | None, typer.Option(help="One cell of the section in params.yaml; without it, all cells.")]
GpusOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes on this machine, one per GPU, started by torchrun; without GPUs only by runtime.device: cpu.",
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Train this many seeds instead: 0, 1, ...; the results go to results/replications."),
]
Sha256Option = Annotated[
    str | None,
    typer.Option(
        "--sha256", help="The SHA-256 of the file of weights, or its first 8 digits or more; another file is refused."
    ),
]
OwnOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Your own pictures in place of a cell: folder:PATH to classify, of class folders or a CSV of file,label; "
        "coco:PATH or boxes:PATH to detect; ade20k:PATH to segment.",
    ),
]
ModelOption = Annotated[
    str | None, typer.Option(help="With --data: a registered name; by default one that suits the number of pictures.")
]
FromOption = Annotated[
    Path | None, typer.Option("--from", help="With --data: weights to start from; without, random ones.")
]
FlipOption = Annotated[
    bool, typer.Option("--flip", help="With --data: also learn from mirrored pictures, which must mean the same.")
]

# the headings under which the verbs are listed, in the order of use
PURPOSES = {
    "check": "First: what is here, and what would run",
    "run": "Run the pipeline, and watch it",
    "graph": "One stage alone, in the pipeline's order",
    "use": "Use a trained model",
    "prove": "Measure kernels, and prove the code",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of the table of stages.

    Args:
        purpose: the heading under which the verb is listed; `graph` for the stages of dvc.yaml.
        params: the dataclass of the stage's section in params.yaml, or of each cell of this section; None without a
            section.
        cells: whether the section maps names to cells, each with a folder results/<name>/<cell>.
        task: the task of a stage that trains.
        records: whether its output names the work tree's commit; the running code must then be that of the work tree.
        alone: whether it measures times, so that nothing else may run on the machine meanwhile.
        hidden: whether only DVC calls it; lists of verbs omit it.
        shown: whether the report reads its records. Registered questions read the files of their seeds instead.
    """

    purpose: Literal["check", "run", "graph", "use", "prove"] = "graph"
    params: type | None = None
    cells: bool = False
    task: Any = None
    records: bool = True
    alone: bool = False
    hidden: bool = False
    shown: bool = True

    @property
    def scores(self) -> Mapping[str, str]:
        """Return key of a score in the metrics of its records -> label in the report."""
        return self.task.scores if self.task else {}


def require_no_own(stage: str, **given: Any) -> None:
    """Raise a UserError if an option of `given`, by its parameter, was given without `--data`, to which it belongs."""
    if single := [name for name, value in given.items() if value]:
        word = "from" if single[0] == "source" else single[0]
        raise UserError(f"{stage}: --{word} goes with --data; the cells of params.yaml say it themselves")


def typed_options(context: typer.Context) -> list[str]:
    """Return the parameters of a command whose options are on the command line, also where they equal the default."""
    return [name for name in context.params if (by := context.get_parameter_source(name)) and by.name == "COMMANDLINE"]


def stage_names() -> list[str]:
    """Return the names of all stages, which are those of their modules, in alphabetical order."""
    return [module.name for module in pkgutil.iter_modules(__path__)]


def load_module(name: str) -> Any:
    """Import the module of a stage."""
    return importlib.import_module(f"{__name__}.{name}")


def load_stages() -> dict[str, Stage]:
    """Return the whole table, name -> row; `SECTIONS` of a module are further stages of dvc.yaml that it runs."""
    table: dict[str, Stage] = {}
    for module in map(load_module, stage_names()):
        table |= {module.__name__.rpartition(".")[2]: module.STAGE, **getattr(module, "SECTIONS", {})}
    return table


def list_graph() -> list[str]:
    """Return the names of the stages of dvc.yaml in its order; empty without a dvc.yaml, as in a wheel.

    A stage's line there must be two spaces, the name and a colon. With anything else on it, even a comment, the stage
    is not found, and the report leaves out its records.
    """
    file = Path(repro.__file__).parents[1] / "dvc.yaml"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return re.findall(r"(?m)^  (\w+):$", text)


def list_verbs(table: Mapping[str, Stage]) -> dict[str, list[str]]:
    """Return purpose -> names of its stages: the pipeline's in the order of dvc.yaml, the others alphabetically."""
    order = [*list_graph(), *stage_names()]
    verbs = sorted(stage_names(), key=order.index)
    return {purpose: [name for name in verbs if table[name].purpose == purpose] for purpose in PURPOSES}


def verb_of(name: str) -> str:
    """Return the verb on the command line for a stage, e.g. `prepare-data` for `prepare_data`."""
    return name.replace("_", "-")
