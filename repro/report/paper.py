"""The report's interface to a paper: each package of `repro.papers` declares one `Paper`."""

import dataclasses
import importlib.resources
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.config import build, load_yaml
from .ledger import Ledger, load_ledger

ATTENTIONS = "unfused", "fused"  # of a baseline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the paper that has something to measure here."""

    place: str  # e.g. `Fig. 7a`
    shows: str  # the paper's content there
    files: str  # pattern of our pictures, relative to results/
    command: str = ""  # draws them
    shared_with: str | None = None  # the figure whose pictures show this one too


# draws a picture: (path, table or figure -> the trained variants, the printed number of a row and column) -> path
DrawVariants = Callable[[Path, Mapping[str, Any], Callable[[str | None, str], str]], Path]
# name of a picture under results/figures -> the records that it shows, and a function that draws it at a path
Drawings = Mapping[str, tuple[Sequence[Any], Callable[[Path], object]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Cells that are compared with each other: variants of one model, trained by one recipe.

    Args:
        cells: the places of a variant's cell, `ablate/{variant}_digits_7s`; the first that has a record counts.
        others: variant -> its place, where it is none of `cells`.
        searches: the place of the search that chose a variant's rate; None where all were trained at one rate.
    """

    cells: tuple[str, ...]
    others: dict[str, str] = dataclasses.field(default_factory=dict)
    searches: str | None = None

    def list_places(self, variants: Iterable[str]) -> dict[str, str]:
        """Place of a cell -> its variant."""
        own = {cell.format(variant=name): name for name in variants for cell in self.cells if name not in self.others}
        return own | {place: name for name, place in self.others.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantTable:
    """A table or figure that compares variants: variant -> its row in the ledger, or None, in the paper's order.

    `orders`: a better variant -> the worse ones by the paper's text; None takes its printed Top-1.
    `not_worse`: a variant -> each one than which it is no worse by the paper's text -> by how many points it may be,
    where the printed Top-1 does not count.
    """

    place: str
    rows: dict[str, str | None]
    orders: dict[str, tuple[str, ...]] | None = None
    not_worse: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def margins(self) -> dict[tuple[str, str], float]:
        return {(name, than): points for name, of in self.not_worse.items() for than, points in of.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question that the report answers first: the share of some entries that are matched."""

    label: str  # a name for them, e.g. `parameters`
    says: str = ""  # the same as the subject of a sentence of the verdict; empty where the verdict leaves them out
    why: str = ""  # a clause that says why they do not match, or were not tested
    but: str = ""  # a function of the paper's `parts`: a clause on the choices that were made by these numbers
    entries: tuple[str, ...]  # patterns of ids
    shown: tuple[str, ...] = ()  # ids of the entries whose numbers are shown before the count; they have one unit
    shown_label: str = ""  # a name for these numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The paper's model against the baseline of its claims on speed, with fused and unfused attention."""

    ours: tuple[str, ...]  # (registered name, label)
    theirs: tuple[str, ...]
    sizes: tuple[int, ...]  # the image sizes in pixels that the paper speaks of
    picture: str  # the file under results/figures that the report draws
    frozen: bool = False  # whether inference freezes the model, see `repro.bench.speed`

    @property
    def series(self) -> dict[str, tuple[str, str | None]]:
        """Family of `repro.core.figures.STYLES` -> (registered name, attention) of each line in the picture."""
        (ours, _), (theirs, _) = self.ours, self.theirs
        family, baseline = (name.split("_")[0] for name in (ours, theirs))
        return {family: (ours, None), f"{baseline}_fused": (theirs, "fused"), baseline: (theirs, "unfused")}

    @property
    def title(self) -> str:
        return f"{self.ours[1]} against {self.theirs[1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A further page that is written from the ledger and the records."""

    file: str  # relative to the checkout
    text: Path  # a template that `repro.report.template` fills
    records: str = ""  # pattern of the places of records that it shows, and the paper's main page does not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablations:
    """The words of the tables that compare variants."""

    places: str  # where they are, e.g. `Tables 3 and 4`
    about: str  # the model and the data that the paper's numbers are of
    label: str = ""  # the plain model's name; empty for the paper's model
    notes: dict[str, str] = dataclasses.field(default_factory=dict)  # place -> a sentence below its heading
    # place -> which of the ledger's columns are shown; all where it is not there
    columns: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """The content of a package's paper.yaml."""

    id: str  # the name of the package
    name: str  # the paper's short name
    model: str  # its model's name
    primary: bool = False  # whether results/tables.md is its page; the pages of the others are results/papers/<id>.md
    claim: str = ""  # its claim in two sentences
    read_from: str = ""  # the source of its text, where that is not the paper itself
    baseline: str = "baseline"  # the model with softmax attention that its claims on speed are about
    # families of models (the first word of a registered name) that this project builds for it -> the options that are
    # their defaults and so do not name a variant
    families: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    headlines: tuple[str, ...] = ()  # the beginnings of the ids of the claims that are shown first
    questions: tuple[Question, ...] = ()  # the questions that its page answers first
    comparison: Comparison | None = None
    ablations: Ablations | None = None
    figures: tuple[Figure, ...] = ()  # in the paper's order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper(About):
    """One paper: the declarations of its package, and its functions."""

    ledger_file: Path  # its ledger.yaml
    # gives the functions of its ledger's expressions by name; it may import heavy packages
    formulas: Callable[[], Mapping[str, Callable]] = dict
    # of a `repro.report.claims.Report`: further pictures
    drawings: Callable[[Any], Drawings] = lambda _: {}
    suites: tuple[Suite, ...] = ()  # the cells of its ablations
    compared: tuple[VariantTable, ...] = ()  # the tables and figures that they are rows of
    uncompared: tuple[str, ...] = ()  # further variants, which its page compares in its own way
    # a table or figure that compares variants -> the beginning of its picture's name, `{name}_{data}.png`, and what
    # draws it; those that have the same name and function are panels of one picture
    pictures: Mapping[str, tuple[str, DrawVariants]] = dataclasses.field(default_factory=dict)
    text: Path | None = None  # the rest of its page: a template that `repro.report.template` fills
    # callable in its texts: functions of a `repro.report.claims.Report` and of the call's arguments
    parts: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    documents: tuple[Document, ...] = ()  # further pages
    # a page that people write, relative to the checkout -> marker -> what code writes between its lines `<!-- marker
    # -->` and `<!-- /marker -->`: a function of a `repro.report.claims.Report`, which always has something to say
    passages: Mapping[str, Mapping[str, Callable[[Any], str]]] = dataclasses.field(default_factory=dict)

    @property
    def page(self) -> str:
        """Its page, a file relative to the checkout."""
        return "results/tables.md" if self.primary else f"results/papers/{self.id}.md"

    @property
    def claims_file(self) -> str:
        """Every entry of its ledger with its verdict, a file relative to the checkout."""
        return "results/claims.csv" if self.primary else f"results/papers/{self.id}.claims.csv"

    @property
    def runs_page(self) -> str:
        """The page of its runs on other data than the paper's, a file relative to the checkout."""
        return f"results/papers/{self.id}_runs.md"

    @cached_property
    def ledger(self) -> Ledger:
        return load_ledger(self.ledger_file)

    @property
    def variants(self) -> tuple[str, ...]:
        """Its variants, each once, in the order of its tables."""
        return tuple(dict.fromkeys([*(name for table in self.compared for name in table.rows), *self.uncompared]))

    @property
    def train_command(self) -> str:
        """The command that trains its variants."""
        section = self.suites[-1].cells[-1].partition("/")[0]
        return f"repro profile use digits && dvc repro {section}"


def load_paper(package: str, parts: Sequence[ModuleType] = (), **more: Any) -> Paper:
    """Load the paper of a package with paper.yaml, ledger.yaml and, where its page says more, page.md.

    The ledger's expressions may call the functions of its module `formulas`, which loads PyTorch, and its texts those of
    `parts`. `more`: further fields of `Paper`. An unknown key of paper.yaml is a `UserError`.
    """
    folder = Path(str(importlib.resources.files(package)))
    text, has_formulas = folder / "page.md", (folder / "formulas.py").is_file()
    about = build(About, load_yaml(folder / "paper.yaml"), f"{folder.name}/paper.yaml")
    if (file := folder / "variants.yaml").is_file():
        declared, where = load_yaml(file), f"{folder.name}/{file.name}"
        suites = tuple(build(Suite, suite, f"{where}: suites") for suite in declared["suites"])
        tables = (build(VariantTable, {"place": place, **table}, where) for place, table in declared["tables"].items())
        more = {"suites": suites, "compared": tuple(tables), "uncompared": tuple(declared.get("uncompared", ()))} | more
    return Paper(
        **vars(about),
        ledger_file=folder / "ledger.yaml",
        text=text if text.is_file() else None,
        formulas=(lambda: list_functions(importlib.import_module(f"{package}.formulas"))) if has_formulas else dict,
        parts=list_functions(*parts),
        **more,
    )


def list_functions(*modules: ModuleType) -> dict[str, Callable]:
    """The public functions that modules define, by name."""
    return {
        name: each
        for module in modules
        for name, each in vars(module).items()
        if callable(each) and each.__module__ == module.__name__ and not name.startswith("_")
    }
