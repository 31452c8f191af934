"""A paper's ledger: its printed numbers and its statements, as entries with stable ids. `claims` judges them."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..core.config import build, load_yaml
from ..core.errors import UserError, did_you_mean
from .expressions import Expression

_BECAUSE = "the paper's other numbers give {computed}"
# `fitted` of a count by `Column.by_formula`; `claims` drops it where the column's own convention fits as well
CHOSEN_BY_ROW = (
    "the convention of the count was chosen for this row, and the column's own does not give the printed number"
)
_Kind = Literal["count", "accuracy", "speed", "statement", "setting", "data"]
# the parts of the paper that a `place` names
_PLACE = re.compile(
    r"Table \d+(?: \(\w+\))?|Fig\. \d+[a-z]?|Eq\. \d+|Algorithm \d|Theorem [\w.]+|Section \d(?:\.\d)?|Appendix \w|Abstract",
    re.I,
)


def _parse(text: str | None) -> Expression | None:
    """Parse an expression of the ledger; None stays None, for a field that is not given."""
    return Expression.parse(text) if text else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """The title and version of a ledger's paper, and the device and batch of its speed and memory measurements."""

    title: str
    version: str
    speed_device: str = ""
    speed_batch: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """A constraint on entry `id` by the paper's other numbers; the head of vision_ttt's ledger explains the fields."""

    id: str
    equals: str | None = None
    within_percent: str | None = None
    requires: str | None = None
    because: str = _BECAUSE

    @cached_property
    def expression(self) -> Expression:
        """The parsed `equals` or `requires`, of which a relation has one."""
        return Expression.parse(self.equals or self.requires or "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """An explanation of differences from the paper's numbers; its evidence is a computation `shows`, or a `source`."""

    ids: tuple[str, ...]
    text: str  # may contain {computed}
    shows: str | None = None  # an expression that must give the paper's printed number, or hold
    source: str | None = None  # a published text, and the place in it

    def __post_init__(self) -> None:
        if (self.shows is None) == (self.source is None):
            raise ValueError(f"{', '.join(self.ids)}: an explanation has either `shows` or `source`")

    @cached_property
    def expression(self) -> Expression | None:
        """The parsed `shows`; None for a source."""
        return _parse(self.shows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A number or a statement of the paper."""

    id: str  # stable, e.g. `table1.vittt_t.macs_g`
    place: str  # its place in the paper, e.g. `Table 1, row Vittt-T, column Acc.`
    says: str  # the statement; for a number of a table, the table's title
    kind: _Kind  # the kind of evidence that decides it
    unit: str = ""  # the number's unit; empty for statements and pure numbers
    printed: str | None = None  # the number as printed; None for statements
    relations: tuple[Relation, ...] = ()  # a statement requires itself
    contradiction: str | None = None  # conflicting text of the paper, which no computation shows
    measurable: Relation | None = None  # a condition for measuring the number as described
    explanations: tuple[Explanation, ...] = ()  # why ours may differ
    fitted: str | None = None  # the part of our convention that was fitted to such rows, and the number of tries
    # our counterpart; without one, `reason` says why and `command` would measure it
    ours: Expression | None = None
    # the count by the column's own convention, if `ours` has one that was chosen for the row
    plain: Expression | None = None
    out_of_scope: str | None = None  # why this project will never have a counterpart
    # our own statement of the same, without evidence; it is evaluated if `ours` has no number
    declared: Expression | None = None
    reason: str | None = None
    command: str | None = None

    @cached_property
    def places(self) -> tuple[str, ...]:
        """The tables, figures, equations and sections in `place`, each once; `place` itself if there are none.

        `gallery.list_figures` finds the entries of a figure by these, and report.html filters by them.
        """
        found = dict.fromkeys(name[0].upper() + name[1:] for name in _PLACE.findall(self.place))
        return tuple(found) or (self.place,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table. `ours` may use {model}, {size} and the other keys of a row.

    `by_formula`: pattern of row ids -> `ours` for these rows, where the paper counts as a family's own authors do.
    A column without `ours` has a `reason` and a `command`, or is `out_of_scope`; anything else is a ValueError.
    """

    label: str
    unit: str
    kind: _Kind
    ours: str | None = None
    by_formula: dict[str, str] = dataclasses.field(default_factory=dict)
    fitted: str | None = None
    reason: str | None = None
    command: str | None = None
    out_of_scope: str | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.ours, self.reason, self.out_of_scope)) != 1 or (
            self.reason is None
        ) != (self.command is None):
            one = "one of `ours`, a reason with a command, and `out_of_scope`"
            raise ValueError(f"column {self.label}: has not exactly {one}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the paper; each of `rows` has the values of `keys`, then the printed numbers of `columns`.

    `keys` are `id`, which comes first, `label`, `model` and those that the columns' expressions use.
    """

    id: str  # begins with `table`, by which the pages tell a table's entries from the text's
    place: str
    title: str
    note: str = ""
    columns: dict[str, Column]
    keys: tuple[str, ...]
    rows: list

    @cached_property
    def records(self) -> dict[str, dict[str, str]]:
        """The values of each row by name, by the row's id; a row with too few or too many is a ValueError."""
        names = [*self.keys, *self.columns]
        for row in self.rows:
            if len(row) != len(names):
                raise ValueError(f"{self.id}: row {row[0]} has {len(row)} items, expected {len(names)}")
        return {row[0]: dict(zip(names, row, strict=True)) for row in self.rows}

    @cached_property
    def labels(self) -> dict[str, str]:
        """The label of each row by its id, with the image size if that is not 224 pixels."""
        found = {}
        for name, row in self.records.items():
            size = row.get("size", "224")
            found[name] = row["label"] if size == "224" else f"{row['label']} ({size}²)"
        return found

    def entry(self, row: dict[str, str], name: str, relations: Sequence[Relation]) -> Entry:
        """Make the entry of the number in a row, one of `records`, and column `name`, with its part of `relations`."""
        entry_id, column = f"{self.id}.{row['id']}.{name}", self.columns[name]
        chosen = next((formula for pattern, formula in column.by_formula.items() if fnmatch(row["id"], pattern)), None)
        is_built = bool(row["model"])  # the key is empty for a model that this project does not build
        ours = (chosen or column.ours) if is_built else None
        is_by_row = column.kind == "count" and chosen is not None and is_built
        reason, command = column.reason, column.command
        if not is_built:
            # what stands behind the size is part of the family: `ConvNeXt-S (iso.)` is of another one than `ConvNeXt-S`
            sized, *variant = row["label"].split(" ", 1)
            family = " ".join([sized.rpartition("-")[0] or sized, *variant])
            reason, command = f"{family} is not built in this project", "none until the model is built"
        return Entry(
            id=entry_id,
            place=f"{self.place}, row {row['label']}, column {column.label}",
            says=self.title,
            kind=column.kind,
            unit=column.unit,
            printed=row[name],
            relations=tuple(relation for relation in relations if relation.id == entry_id),
            fitted=column.fitted or (CHOSEN_BY_ROW if is_by_row else None),
            ours=_parse(ours and ours.format(**row)),
            plain=_parse(column.ours.format(**row)) if is_by_row else None,
            out_of_scope=column.out_of_scope,
            reason=reason,
            command=command,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Answer:
    """Our counterpart of a number or statement of the text, or the reason and the command if there is none."""

    ours: str | None = None
    declared: str | None = None
    fitted: str | None = None
    reason: str | None = None
    command: str | None = None
    out_of_scope: str | None = None

    def fields(self, by_default: str | None) -> dict[str, Any]:
        """Return these as fields of an entry.

        `by_default` takes the place of `ours` unless `ours`, `declared`, `reason` or `out_of_scope` is given.
        """
        text = self.ours or (None if self.reason or self.declared or self.out_of_scope else by_default)
        same = {name: getattr(self, name) for name in ("fitted", "reason", "command", "out_of_scope")}
        return {"ours": _parse(text), "declared": _parse(self.declared), **same}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value(_Answer):
    """One of the numbers in a sentence of the text; the head of vision_ttt's ledger explains the fields."""

    printed: str
    equals: str | None = None
    requires: str | None = None
    measurable: str | None = None
    because: str = _BECAUSE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim(_Answer):
    """A sentence of the text: it has an entry `{id}_{key}` per number, or the single entry `{id}` of a statement.

    The head of vision_ttt's ledger explains the fields.
    """

    id: str
    place: str
    says: str
    kind: _Kind
    unit: str = ""
    about: str = ""  # the size of the model that the statement is about, and why, if it names none
    values: dict[str, Value] = dataclasses.field(default_factory=dict)
    holds: str | None = None
    contradiction: str | None = None
    because: str = "the statement is false of the paper's own numbers"

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The entry of each number, in the sentence's order, or that of the statement."""
        about = {"place": self.place, "says": self.says, "kind": self.kind, "unit": self.unit}
        if not self.values:
            rules = _relations(self.id, self.because, requires=self.holds)
            about |= {"contradiction": self.contradiction, **self.fields(self.holds)}
            return (Entry(id=self.id, **about, relations=rules),)
        entries = []
        for key, value in self.values.items():
            name = f"{self.id}_{key}"
            rules = _relations(name, value.because, equals=value.equals, requires=value.requires)
            conditions = _relations(name, value.because, requires=value.measurable)
            fields = {"measurable": conditions[0] if conditions else None, **value.fields(value.equals)}
            entries.append(Entry(id=name, **about, printed=value.printed, relations=rules, **fields))
        return tuple(entries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Erratum:
    """A note or question to a paper's authors about some entries, with a proposal.

    Args:
        ids: the entries, which share a row.
        correction: the proposed text; for a question, the answer that would settle it.
        because: the evidence against the entries; None takes that of their verdicts.
    """

    ids: tuple[str, ...]
    correction: str
    because: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errata:
    """The correspondence with a paper's authors, outside of this project, on its contradictions.

    Args:
        as_of: the day of the last comparison with the paper, e.g. `2026-11-25`.
        sent: the day on which the authors got the lists; None if they did not.
        answers: id of an entry -> the authors' answer.
        errors, inconsistencies, questions: the lists of notes and questions, in the order of their consequences.
        left_out: id of a contradiction that is in no list -> why.
        withheld: why there is no list at all; None if there is one.
    """

    as_of: str = "no day"
    sent: str | None = None
    answers: dict[str, str] = dataclasses.field(default_factory=dict)
    errors: tuple[Erratum, ...] = ()
    inconsistencies: tuple[Erratum, ...] = ()
    questions: tuple[Erratum, ...] = ()
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    withheld: str | None = None

    @cached_property
    def placed(self) -> list[str]:
        """The ids of the entries that are in a list or left out, with duplicates."""
        listed = (*self.errors, *self.inconsistencies, *self.questions)
        return [*(name for erratum in listed for name in erratum.ids), *self.left_out]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """The content of a ledger.yaml."""

    paper: Conditions
    errata: Errata = Errata()
    tables: tuple[Table, ...] = ()
    relations: tuple[Relation, ...] = ()
    claims: tuple[Claim, ...] = ()
    explanations: tuple[Explanation, ...] = ()

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The entries by id, in the paper's order, tables first; a duplicate id is a ValueError."""
        rows = [(table, row) for table in self.tables for row in table.records.values()]
        listed = [table.entry(row, name, self.relations) for table, row in rows for name in table.columns]
        listed += [entry for claim in self.claims for entry in claim.entries]
        found = {}
        for entry in listed:
            if entry.id in found:
                raise ValueError(f"ledger: {entry.id} is there twice")
            reasons = tuple(each for each in self.explanations if entry.id in each.ids)
            found[entry.id] = dataclasses.replace(entry, explanations=reasons)
        return found

    def trace(self, entry: Entry) -> Iterator[Entry]:
        """Yield an entry, then the entries from which our counterpart of it is computed."""
        yield entry
        for name in entry.ours.references if entry.ours else ():
            yield from self.trace(self.entries[name])

    def table(self, table_id: str) -> Table:
        """Return the table of an id; the `UserError` about an unknown id suggests a known one."""
        known = {table.id: table for table in self.tables}
        if table_id not in known:
            raise UserError(f"ledger: no table {table_id}{did_you_mean(table_id, known)}")
        return known[table_id]


def load_ledger(path: Path) -> Ledger:
    """Read and check a ledger.

    Raises:
        UserError: a key is unknown or missing.
        ValueError: an id is duplicate or unknown, an expression is wrong, a row has the wrong length, a statement is
            narrowed (see `find_narrowed`), or an entry has no counterpart and no reason with a command.
    """
    ledger: Ledger = build(Ledger, load_yaml(path, as_text=True), path.name)
    named = [(relation.id, relation.id) for relation in ledger.relations]
    named += [(name, name) for explanation in ledger.explanations for name in explanation.ids]
    named += [(name, "errata.answers") for name in ledger.errata.answers]
    named += [(name, "errata") for name in ledger.errata.placed]
    if len(set(ledger.errata.placed)) < len(ledger.errata.placed):
        raise ValueError("ledger: errata: an entry is there twice")
    for claim in ledger.claims:
        if narrowed := find_narrowed(claim):
            why = f"it is about more sizes than {narrowed}, which it is judged for"
            raise ValueError(f"ledger: {claim.id}: the statement is narrowed: {why}")
    for entry in ledger.entries.values():
        reasons = [*entry.relations, *entry.explanations, *([entry.measurable] if entry.measurable else [])]
        expressions = [entry.ours, entry.declared, *(each.expression for each in reasons)]
        named += [(name, entry.id) for expression in expressions if expression for name in expression.references]
        if not entry.ours and not entry.declared and not entry.out_of_scope and not (entry.reason and entry.command):
            raise ValueError(f"ledger: {entry.id}: has neither `ours` nor a reason and a command")
    for name, where in named:
        if name not in ledger.entries:
            raise ValueError(f"ledger: {where}: no entry {name}")
    return ledger


_SIZES = {"tiny": "T", "small": "S", "base": "B"}
_NAMED_SIZES = re.compile(r"-([TSB](?:/[TSB])*)\b")  # in a statement: `Vittt-T`, `Vittt-T/S/B`
# the size in a model's name or an id: `vim_tiny_patch16_224`, `table1.vim_t.macs_g`
_ASKED_SIZE = re.compile(r"([a-z]\w*?)_(?:(tiny|small|base)_|([tsb])\.)")


def find_narrowed(claim: Claim) -> str | None:
    """Return the sizes, e.g. `S, B`, that a statement is judged for if it is about more; None if it is not narrowed.

    A statement is about the sizes that it names, or about T, S and B if it names none. One with `about` is never
    narrowed.
    """
    if claim.kind != "statement" or claim.about:
        return None
    asked: dict[str, set[str]] = {}  # family of models -> its sizes in the expressions
    for model, word, letter in _ASKED_SIZE.findall(f"{claim.holds or ''} {claim.ours or ''}"):
        asked.setdefault(model, set()).add(_SIZES.get(word) or letter.upper())
    named = {size for sizes in _NAMED_SIZES.findall(claim.says) for size in sizes.split("/")}
    # a statement may name another size of each family; one without names is about all sizes of each
    judged = [set().union(*asked.values())] if named and asked else asked.values()
    narrowed = next((sizes for sizes in judged if (named or set(_SIZES.values())) - sizes), None)
    return ", ".join(size for size in _SIZES.values() if size in narrowed) if narrowed else None


def _relations(entry_id: str, because: str, **rules: str | None) -> tuple[Relation, ...]:
    """Make a relation of each given rule; the rules are fields of `Relation`."""
    return tuple(Relation(id=entry_id, because=because, **{name: rule}) for name, rule in rules.items() if rule)
