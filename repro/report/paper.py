"""What the report needs of a paper. Each room of `repro.papers` declares one `Paper`; nothing in this package knows one
by name.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .document import Block
from .ledger import Ledger, load_ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the paper that has something to measure here."""

    place: str  # e.g. `Fig. 7a`
    shows: str  # what the paper shows there
    files: str  # pattern of our pictures, relative to results/
    command: str = ""  # what draws them
    shared_with: str | None = None  # the figure whose pictures show this one too


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantTable:
    """A table or a figure of the paper that compares variants of its model."""

    place: str  # e.g. `Table 3` or `Fig. 7(a)`
    # variants in the paper's order -> their row in the ledger, e.g. `table3.gating`; None where the paper prints no
    # number
    rows: Mapping[str, str | None]
    columns: tuple[str, ...] | None = None  # of the ledger's columns, those that are shown; None for all
    # (better, worse) by the paper's text; None takes its printed Top-1
    orders: tuple[tuple[str, str], ...] | None = None
    note: str = ""  # a sentence below the heading
    figure: str | None = None  # begins the name of the picture, `{figure}_{data}.png`
    # draws that picture: (path, the trained variants, the printed number of a row and column) -> path
    draw: Callable[[Path, Any, Callable[[str | None, str], str]], Path] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variants:
    """What the paper ablates."""

    # variant -> the options of the model that it changes; {} for the plain model
    options: Mapping[str, Mapping[str, Any]]
    tables: tuple[VariantTable, ...]  # where they are compared
    places: str  # the same in words, e.g. `Tables 3 and 4`
    stage: str  # the stage that trains them; its verb with `flags` and `--all` trains all of them
    flags: str = ""  # what of its verb's options says that they are these
    about: str  # the model and the data that the paper's numbers are of, in words
    label: str = ""  # what the plain model is called; empty for the paper's model
    # variant -> settings of the recipe that it changes, as its record has them; a setting that is off need not stand in
    # a record
    recipes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # variant -> the beginning of the registered names of the models that it is of, where the paper ablates several
    # models
    models: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command that trains them."""
        return f"repro {self.stage} {self.flags}".strip()

    @cached_property
    def changed(self) -> frozenset[str]:
        """The options that tell variants apart."""
        return frozenset().union(*self.options.values())

    @cached_property
    def changed_recipe(self) -> frozenset[str]:
        """The settings of the recipe that tell variants apart."""
        return frozenset().union(*self.recipes.values())

    def changes(self, name: str) -> dict[str, Any]:
        """All that a variant changes."""
        return {**self.options[name], **self.recipes.get(name, {})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What a reader asks first: how many of some entries are matched."""

    label: str  # what they are, e.g. `parameters`
    says: str = ""  # the same as the subject of a sentence of the verdict; empty where the verdict leaves them out
    why: str = ""  # a clause that says why they do not match, or were not tested
    entries: tuple[str, ...]  # patterns of ids
    shown: tuple[str, ...] = ()  # ids of the entries whose numbers are shown beside the count; they have one unit
    shown_label: str = ""  # what these numbers are of

    def find(self, ledger: Ledger) -> list[str]:
        """The ids that the patterns name, in the ledger's order."""
        return [name for name in ledger.entries if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.entries)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
    """The paper's model against the baseline that its claims on speed are about. The baseline runs with fused and
    unfused attention.
    """

    ours: tuple[str, str]  # (registered name, label)
    theirs: tuple[str, str]
    sizes: tuple[int, ...]  # the image sizes in pixels that the paper speaks of
    picture: str  # the file under results/figures that the report draws
    # family of `repro.core.figures.STYLES` -> (registered name, attention) of each line in the picture
    series: Mapping[str, tuple[str, str | None]]

    @property
    def title(self) -> str:
        """`Ours against theirs`."""
        return f"{self.ours[1]} against {self.theirs[1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture that the report draws from records, beside those of variants and of the contest."""

    file: str  # its name under results/figures
    # of a `repro.report.claims.Report`: the records that it shows; without any it is not drawn
    find: Callable[[Any], Sequence[Any]]
    draw: Callable[[Any, Path], object]  # (report, path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A further page that is written from the ledger and the records."""

    file: str  # relative to the checkout
    text: Path  # Markdown that `repro.report.prose` fills; its first section is its opening
    records: str = ""  # pattern of the paths of records that it shows, and the paper's main page does not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
    """One paper, as its room declares it."""

    id: str  # the name of the room
    name: str  # what the paper is called for short
    model: str  # what its model is called
    ledger_file: Path  # its ledger.yaml
    primary: bool = False  # whether results/tables.md is its page; the pages of the others are results/papers/<id>.md
    claim: str = ""  # what it claims, in two sentences
    baseline: str = "baseline"  # the model with softmax attention that its claims on speed are about
    # families of models (the first word of a registered name) that this project builds for it -> the options that are
    # their defaults and so do not name a variant
    families: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    # functions that its ledger's expressions may call
    formulas: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    headlines: tuple[str, ...] = ()  # the beginnings of the ids of the claims that are shown first
    questions: tuple[Question, ...] = ()  # what its page answers first
    contest: Contest | None = None
    figures: tuple[Figure, ...] = ()  # in the paper's order
    drawings: tuple[Drawing, ...] = ()  # further pictures
    variants: Variants | None = None  # what it ablates
    text: Path | None = None  # what its page also says: Markdown that `repro.report.prose` fills
    # what the expressions of its texts may call, beside what those of its ledger may: functions of a
    # `repro.report.claims.Report` and of the expression's constants
    parts: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    documents: tuple[Document, ...] = ()  # further pages
    # a page that people write, relative to the checkout -> marker -> what code writes between its lines `<!-- marker
    # -->` and `<!-- /marker -->`: a function of a `repro.report.claims.Report`, which always has something to say
    passages: Mapping[str, Mapping[str, Callable[[Any], Sequence[Block]]]] = dataclasses.field(default_factory=dict)

    @property
    def page(self) -> str:
        """Its page, a file relative to the checkout."""
        return "results/tables.md" if self.primary else f"results/papers/{self.id}.md"

    @cached_property
    def ledger(self) -> Ledger:
        """Its ledger, read once."""
        return load_ledger(self.ledger_file)
