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

ATTENTIONS = "unfused", "fused"  # a baseline's two implementations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the paper that has something to measure here."""

    place: str  # e.g. `Fig. 7a`, as `Entry.places` has it; otherwise no entry is counted for the figure
    shows: str  # the paper's content there
    files: str  # pattern of our pictures, relative to results/
    command: str = ""  # draws them
    shared_with: str | None = None  # the figure whose pictures also show this one


# draws a picture: (path, table or figure -> the trained variants, the printed number of a row and column) -> path; the
# last two are passed by the names `groups` and `printed`
DrawVariants = Callable[[Path, Mapping[str, Any], Callable[[str | None, str], str]], Path]
# name of a picture under results/figures -> the records that it shows, and a function that draws it at a path
Drawings = Mapping[str, tuple[Sequence[Any], Callable[[Path], object]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Cells that are compared with each other: variants of one model, trained by one recipe.

    Args:
        cells: the places of a variant's cell, such as `ablate/{variant}_digits_7s`; the first with a record counts.
        others: variant -> the place of its cell, where that is none of `cells`.
        searches: the place of the search that chose a variant's rate; None where all were trained at one rate.
    """

    cells: tuple[str, ...]
    others: dict[str, str] = dataclasses.field(default_factory=dict)
    searches: str | None = None

    def list_places(self, variants: Iterable[str]) -> dict[str, str]:
        """Return place of a cell -> its variant, in the order of the variants and of each one's cells."""
        return {
            place.format(variant=name): name
            for name in variants
            for place in ([self.others[name]] if name in self.others else self.cells)
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantTable:
    """A table or figure that compares variants.

    Args:
        rows: variant -> its row in the ledger, or None, in the paper's order.
        orders: a better variant -> the worse ones by the paper's text; None to order by the printed Top-1, which every
            row must then have.
        not_worse: a variant -> another, which it equals or beats by the paper's text -> the points by which it may be
            worse; the printed Top-1 does not order such a pair.
    """

    place: str
    rows: dict[str, str | None]
    orders: dict[str, tuple[str, ...]] | None = None
    not_worse: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def margins(self) -> dict[tuple[str, str], float]:
        """(variant, another that it is no worse than) -> the margin in points, from `not_worse`."""
        return {(name, than): points for name, of in self.not_worse.items() for than, points in of.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question that the report answers first: the share of some entries that are matched."""

    label: str  # a name for the entries, e.g. `parameters`
    says: str = ""  # the entries as the subject of the verdict's sentence; empty where the verdict leaves them out
    why: str = ""  # a clause that says why the entries do not match, or were not tested
    but: str = ""  # a function of the paper's `parts`, whose clause names choices that were made by these numbers
    entries: tuple[str, ...]  # patterns of ids
    shown: tuple[str, ...] = ()  # ids of entries of one unit, whose numbers are shown before the count
    shown_label: str = ""  # a name for the shown numbers


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
        """Both labels in words: `Vittt-T against DeiT-T`."""
        return f"{self.ours[1]} against {self.theirs[1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A further page that is written from the ledger and the records."""

    file: str  # relative to the checkout
    text: Path  # a template that `repro.report.template` fills
    records: str = ""  # pattern of the places of records that only this page shows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablations:
    """The words of the tables that compare variants."""

    places: str  # the tables' places in the paper, e.g. `Tables 3 and 4`
    about: str  # the model and data behind the paper's numbers
    label: str = ""  # the plain model's name; empty for the paper's model
    notes: dict[str, str] = dataclasses.field(default_factory=dict)  # place -> a sentence below its heading
    # place -> the ledger's columns that are shown; all columns for a place that is not a key
    columns: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """The content of a package's paper.yaml."""

    id: str  # the name of the package
    name: str  # the paper's short name
    model: str  # its model's name
    primary: bool = False  # whether its page is results/tables.md, and not results/papers/<id>.md as for all others
    claim: str = ""  # its claim in two sentences
    read_from: str = ""  # the source of its text, where that is not the paper itself
    baseline: str = "baseline"  # the softmax attention model in its claims on speed
    # family of models that this project builds for it (the first word of a registered name) -> the family's default
    # options, which a variant's name leaves out
    families: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    headlines: tuple[str, ...] = ()  # prefixes of the ids of the claims that are shown first
    questions: tuple[Question, ...] = ()  # the questions that its page answers first
    comparison: Comparison | None = None
    ablations: Ablations | None = None
    figures: tuple[Figure, ...] = ()  # in the paper's order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper(About):
    """A paper: the declarations and functions of its package."""

    ledger_file: Path  # its ledger.yaml
    # returns the functions that the ledger's expressions may call, by name; a call, since it may import heavy packages
    formulas: Callable[[], Mapping[str, Callable]] = dict
    # `repro.report.claims.Report` -> further pictures
    drawings: Callable[[Any], Drawings] = lambda _: {}
    suites: tuple[Suite, ...] = ()  # the cells of its ablations
    compared: tuple[VariantTable, ...] = ()  # the tables and figures whose rows are these cells
    uncompared: tuple[str, ...] = ()  # further variants, which its page compares in its own way
    # place of a table or figure that compares variants -> (start of its picture's name `{name}_{data}.png`, function
    # that draws it); places with the same name and function are panels of one picture
    pictures: Mapping[str, tuple[str, DrawVariants]] = dataclasses.field(default_factory=dict)
    text: Path | None = None  # the rest of its page: a template that `repro.report.template` fills
    # functions that its texts may call: their arguments are a `repro.report.claims.Report` and those of the call
    parts: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    documents: tuple[Document, ...] = ()  # further pages
    # a page that people write, relative to the checkout -> marker -> a function that returns the text between the lines
    # `<!-- marker -->` and `<!-- /marker -->`, from a `repro.report.claims.Report`; the text is never empty
    passages: Mapping[str, Mapping[str, Callable[[Any], str]]] = dataclasses.field(default_factory=dict)

    @property
    def page(self) -> str:
        """The file of its page, relative to the checkout."""
        return "results/tables.md" if self.primary else f"results/papers/{self.id}.md"

    @property
    def claims_file(self) -> str:
        """The file of its ledger's entries with their verdicts, relative to the checkout."""
        return "results/claims.csv" if self.primary else f"results/papers/{self.id}.claims.csv"

    @property
    def runs_page(self) -> str:
        """The file of the page on its runs on other data than the paper's, relative to the checkout."""
        return f"results/papers/{self.id}_runs.md"

    @cached_property
    def ledger(self) -> Ledger:
        """The paper's ledger, read and checked at the first use; see `load_ledger` for the errors."""
        return load_ledger(self.ledger_file)

    @property
    def variants(self) -> tuple[str, ...]:
        """Its variants, each once, in the order of its tables."""
        return tuple(dict.fromkeys([*(name for table in self.compared for name in table.rows), *self.uncompared]))

    @property
    def train_command(self) -> str:
        """The command that trains its variants; the last suite of variants.yaml must be one of the profile `digits`."""
        section = self.suites[-1].cells[-1].partition("/")[0]
        return f"repro profile use digits && dvc repro {section}"


def load_paper(package: str, parts: Sequence[ModuleType] = (), **more: Any) -> Paper:
    """Load the paper of a package with paper.yaml, ledger.yaml and, optionally, variants.yaml and page.md.

    Args:
        package: its dotted name. If it has a module `formulas`, which loads PyTorch, the ledger's expressions may call
            that module's functions.
        parts: modules whose functions the paper's texts may call.
        more: further fields of `Paper`.

    Raises:
        UserError: paper.yaml has an unknown key.
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
    """Return the public functions that modules define, by name; of two with one name, the later module's."""
    return {
        name: each
        for module in modules
        for name, each in vars(module).items()
        if callable(each) and each.__module__ == module.__name__ and not name.startswith("_")
    }
