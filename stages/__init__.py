"""The verbs of the command line, one module each. A module declares `STAGE`, a row of the table, and `command` (or, for
a verb with
verbs of its own, `app`). A new module here is found by itself: the command line, `status`, `plan`, the report and the
tests read the table and nothing else.

Stage modules import nothing heavy, so that `repro --help` answers at once and `repro doctor` starts where torch is
broken.
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
        params: the dataclass of the section of params.yaml that has the stage's name, or of each of its cells; None
            without a section.
        cells: whether the section maps names to cells, each with a folder results/<name>/<cell>.
        task: the task of a stage that trains.
        records: whether its output names the checkout's commit; the code that runs must then be the checkout's.
        alone: whether its results are times, which other work on the machine would change.
        hidden: whether only DVC calls it; lists of verbs leave it out.
        shown: whether the report reads its records; the page of registered questions reads the files of their seeds.
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
        """Keys of scores in its records' metrics -> their labels in the report."""
        return self.task.scores if self.task else {}


def require_no_own(stage: str, **given: Any) -> None:
    """Raise UserError where an option of one's own pictures was given without them."""
    if single := [name for name, value in given.items() if value]:
        word = "from" if single[0] == "source" else single[0]
        raise UserError(f"{stage}: --{word} goes with --data; the cells of params.yaml say it themselves")


def stage_names() -> list[str]:
    """The names of all stages, which are those of their modules, in alphabetical order."""
    return [module.name for module in pkgutil.iter_modules(__path__)]


def load_module(name: str) -> Any:
    """The module of a stage."""
    return importlib.import_module(f"{__name__}.{name}")


def load_stages() -> dict[str, Stage]:
    """The whole table: name -> row. A module with `SECTIONS` runs the stages of dvc.yaml of these names too."""
    table: dict[str, Stage] = {}
    for module in map(load_module, stage_names()):
        table |= {module.__name__.rpartition(".")[2]: module.STAGE, **getattr(module, "SECTIONS", {})}
    return table


def list_graph() -> list[str]:
    """The names of the stages of dvc.yaml, in its order; none where there is no dvc.yaml, as in a wheel."""
    file = Path(repro.__file__).parents[1] / "dvc.yaml"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return re.findall(r"(?m)^  (\w+):$", text)


def list_verbs(table: Mapping[str, Stage]) -> dict[str, list[str]]:
    """Purpose -> the names of its stages: those of the pipeline as dvc.yaml has them, the others in alphabetical order."""
    order = {name: place for place, name in enumerate(list_graph())}
    verbs = {name: table[name] for name in stage_names()}
    names = {purpose: [name for name, stage in verbs.items() if stage.purpose == purpose] for purpose in PURPOSES}
    return names | {"graph": sorted(names["graph"], key=lambda name: order.get(name, len(order)))}


def verb_of(name: str) -> str:
    """The word on the command line for a stage."""
    return name.replace("_", "-")
