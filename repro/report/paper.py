"""What the report needs of a paper. Each room of `repro.papers` declares one `Paper`; nothing in this package knows one by name."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from .ledger import Ledger, load_ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the paper.

    Args:
        place: e.g. `Fig. 7a`.
        shows: what the paper shows there.
        files: pattern of our pictures, relative to results/; None for a diagram of the method, which no measurement draws.
        command: what draws them.
        shared_with: the figure whose pictures show this one too.
    """

    place: str
    shows: str
    files: str | None = None
    command: str = ""
    shared_with: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantTable:
    """A table or a figure of the paper that compares variants of its model.

    Args:
        place: e.g. `Table 3` or `Fig. 7(a)`.
        rows: variants in the paper's order -> their row in the ledger, e.g. `table3.gating`; None where the paper prints no number.
        columns: of the ledger's columns, those that are shown; None for all.
        orders: (better, worse) for each two variants that the paper's text orders; None takes its printed Top-1.
        note: a sentence below the heading.
        figure: begins the name of the picture, `{figure}_{data}.png`.
        draw: draws that picture: (path, the trained variants, the printed number of a row and column) -> path.
    """

    place: str
    rows: Mapping[str, str | None]
    columns: tuple[str, ...] | None = None
    orders: tuple[tuple[str, str], ...] | None = None
    note: str = ""
    figure: str | None = None
    draw: Callable[[Path, Any, Callable[[str | None, str], str]], Path] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variants:
    """What the paper ablates.

    Args:
        options: variant -> the options of the model that it changes; {} for the plain model.
        tables: where they are compared.
        places: the same in words, e.g. `Tables 3 and 4`.
        stage: the stage that trains them; its verb with `--all` trains all of them.
        about: the model and the data that the paper's numbers are of, in words.
    """

    options: Mapping[str, Mapping[str, Any]]
    tables: tuple[VariantTable, ...]
    places: str
    stage: str
    about: str

    @property
    def command(self) -> str:
        """The command that trains them."""
        return f"repro {self.stage}"

    @cached_property
    def changed(self) -> frozenset[str]:
        """The options that tell variants apart."""
        return frozenset(name for changes in self.options.values() for name in changes)

    @cached_property
    def plain(self) -> str:
        """The variant that changes nothing."""
        return next(name for name, changes in self.options.items() if not changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What a reader asks first: how many of some entries are matched.

    Args:
        label: what they are, e.g. `parameters`.
        entries: patterns of ids.
        shown: ids of the entries whose numbers are shown beside the count; they have one unit.
        shown_label: what these numbers are of.
    """

    label: str
    entries: tuple[str, ...]
    shown: tuple[str, ...] = ()
    shown_label: str = ""

    def find(self, ledger: Ledger) -> list[str]:
        """The ids that the patterns name, in the ledger's order."""
        return [name for name in ledger.entries if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.entries)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
    """The paper's model against the baseline that its claims on speed are about.

    Args:
        ours, theirs: (registered name, label). The baseline runs with fused and with unfused attention.
        sizes: the image sizes in pixels that the paper speaks of.
        picture: the file under results/figures that the report draws.
        series: family of `repro.core.figures.STYLES` -> (registered name, attention) of each line in the picture.
    """

    ours: tuple[str, str]
    theirs: tuple[str, str]
    sizes: tuple[int, ...]
    picture: str
    series: Mapping[str, tuple[str, str | None]]

    @property
    def title(self) -> str:
        """`Ours against theirs`."""
        return f"{self.ours[1]} against {self.theirs[1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
    """One paper, as its room declares it.

    Args:
        id: the name of the room.
        name: what the paper is called for short.
        model: what its model is called.
        ledger_file: its ledger.yaml.
        primary: whether results/tables.md is its page; the pages of the others are results/papers/<id>.md.
        claim: what it claims, in two sentences.
        baseline: the model with softmax attention that its claims on speed are about.
        families: families of models (the first word of a registered name) that this project builds for it -> the options that are
            their defaults and so do not name a variant.
        formulas: functions that the expressions of its ledger may call.
        headlines: the beginnings of the ids of the claims that are shown first.
        questions: what its page answers first.
        contest: see `Contest`.
        pictures: patterns of the pictures on top of its page, relative to results/.
        figures: in the paper's order.
        variants: what it ablates.
    """

    id: str
    name: str
    model: str
    ledger_file: Path
    primary: bool = False
    claim: str = ""
    baseline: str = "baseline"
    families: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    formulas: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    headlines: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    contest: Contest | None = None
    pictures: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    variants: Variants | None = None

    @cached_property
    def ledger(self) -> Ledger:
        """Its ledger, read once."""
        return load_ledger(self.ledger_file)
