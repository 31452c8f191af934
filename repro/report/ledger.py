"""The ledger: paper.yaml as entries with stable ids. It holds what the paper says, and no status."""

import dataclasses
import re
from pathlib import Path
from typing import ClassVar, Literal

import yaml

from ..core.config import build
from .arithmetic import references

PAPER = Path(__file__).with_name("paper.yaml")
Kind = Literal["count", "accuracy", "speed", "statement", "setting", "data"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """What a number must satisfy by the paper's own other numbers; the fields are explained at the head of paper.yaml."""

    id: str
    equals: str | None = None
    equals_count: str | None = None
    within_percent: str | None = None
    requires: str | None = None
    because: str = "the paper's other numbers give {computed}"

    @property
    def expression(self) -> str:
        return self.equals or self.equals_count or self.requires or ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One number or one statement of the paper.

    Args:
        id: stable, e.g. `table1.vittt_t.macs_g`.
        place: where it stands, e.g. `Table 1, row Vittt-T, column Acc.`.
        says: the statement, or for a table's number its title.
        kind: what sort of evidence decides it.
        unit: of the number; empty for statements and pure numbers.
        printed: the number as printed; None for statements.
        relations: see `Relation`.
        holds: the statement as an expression.
        contradiction: evidence that only reading shows.
        because: the evidence behind `holds`.
        ours: expression of our counterpart; None where there is none, and then `reason` and `command` say why.
    """

    id: str
    place: str
    says: str
    kind: Kind
    unit: str = ""
    printed: str | None = None
    relations: tuple[Relation, ...] = ()
    holds: str | None = None
    contradiction: str | None = None
    because: str | None = None
    ours: str | None = None
    reason: str | None = None
    command: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table; `ours` may use {model} and {size} of the row."""

    label: str
    unit: str
    kind: Kind
    ours: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the paper: `rows` are ids with labels, and `{table}.{row}.{column}` is an entry's id."""

    id: str
    place: str
    title: str
    note: str
    columns: dict[str, Column]
    rows: dict[str, str]
    records: dict[str, dict[str, str]]  # id of a row -> its values by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the text with the entries of its numbers, `{id}_{key}`, or the one entry `{id}` of a statement."""

    id: str
    place: str
    says: str
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
    """Which paper, and under which conditions it measured speed and memory."""

    title: str
    version: str
    speed_device: str
    speed_batch: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """The whole of paper.yaml; `entries` are in the paper's order, tables first."""

    paper: Paper
    own_families: tuple[str, ...]
    default_options: dict[str, str]
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    entries: dict[str, Entry]

    def table(self, table_id: str) -> Table:
        """The table of this id."""
        return next(table for table in self.tables if table.id == table_id)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TableText:
    id: str
    place: str
    title: str
    note: str = ""
    columns: dict[str, Column]
    keys: tuple[str, ...]
    rows: list


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Value:
    printed: str
    equals: str | None = None
    requires: str | None = None
    because: str | None = None
    ours: str | None = None
    reason: str | None = None
    command: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ClaimText:
    id: str
    place: str
    says: str
    kind: Kind
    unit: str = ""
    values: dict[str, _Value] = dataclasses.field(default_factory=dict)
    holds: str | None = None
    contradiction: str | None = None
    because: str | None = None
    ours: str | None = None
    reason: str | None = None
    command: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LedgerText:
    paper: Paper
    own_families: tuple[str, ...]
    default_options: dict[str, str]
    tables: tuple[_TableText, ...]
    relations: tuple[Relation, ...]
    text: tuple[_ClaimText, ...]


class _TextLoader(yaml.SafeLoader):
    """Every scalar is text, so that printed digits survive; only `<<` keeps its meaning."""

    yaml_implicit_resolvers: ClassVar = {"<": [("tag:yaml.org,2002:merge", re.compile(r"^<<$"))]}


def load_ledger(path: Path = PAPER) -> Ledger:
    """Read and check the ledger.

    Raises:
        UserError: an unknown key, or one that is missing.
        ValueError: an id stands twice, an expression or a relation names an unknown id, or a row has the wrong length.
    """
    with open(path, encoding="utf-8") as stream:
        text = build(_LedgerText, yaml.load(stream, Loader=_TextLoader), path.name)
    by_entry: dict[str, list[Relation]] = {}
    for relation in text.relations:
        by_entry.setdefault(relation.id, []).append(relation)
    tables, claims, entries = [], [], []
    for table in text.tables:
        rows = [_row(table, row) for row in table.rows]
        shown = {name: getattr(table, name) for name in ("id", "place", "title", "note", "columns")}
        tables.append(Table(**shown, rows={row["id"]: _label(row) for row in rows}, records={row["id"]: row for row in rows}))
        entries += [_table_entry(table, row, name, by_entry) for row in rows for name in table.columns]
    for claim in text.text:
        own = tuple(_text_entries(claim))
        claims.append(Claim(id=claim.id, place=claim.place, says=claim.says, entries=own))
        entries += own
    ledger = Ledger(
        paper=text.paper,
        own_families=text.own_families,
        default_options=text.default_options,
        tables=tuple(tables),
        claims=tuple(claims),
        entries={entry.id: entry for entry in entries},
    )
    _check(ledger, [entry.id for entry in entries], by_entry)
    return ledger


def _row(table: _TableText, row: list[str]) -> dict[str, str]:
    names = [*table.keys, *table.columns]
    if len(row) != len(names):
        raise ValueError(f"{table.id}: row {row[0]} has {len(row)} items, expected {len(names)}")
    return dict(zip(names, row, strict=True))


def _label(row: dict[str, str]) -> str:
    return f"{row['label']} ({row['size']}²)" if row.get("size", "224") != "224" else row["label"]


def _table_entry(table: _TableText, row: dict[str, str], column: str, relations: dict[str, list[Relation]]) -> Entry:
    about = table.columns[column]
    entry_id = f"{table.id}.{row['id']}.{column}"
    built = bool(row["model"])
    return Entry(
        id=entry_id,
        place=f"{table.place}, row {row['label']}, column {about.label}",
        says=table.title,
        kind=about.kind,
        unit=about.unit,
        printed=row[column],
        relations=tuple(relations.get(entry_id, ())),
        ours=about.ours.format(**row) if built else None,
        reason=None if built else f"{row['label'].rpartition('-')[0]} is not built in this project",
        command=None if built else "none until the model is built",
    )


def _text_entries(claim: _ClaimText) -> list[Entry]:
    if not claim.values:
        fields = {f.name: getattr(claim, f.name) for f in dataclasses.fields(claim) if f.name != "values"}
        # a statement without numbers of its own is asked of our numbers in the same words
        return [Entry(**{**fields, "ours": claim.ours or (None if claim.reason else claim.holds)})]
    entries = []
    for name, value in claim.values.items():
        entry_id = f"{claim.id}_{name}"
        because = {"because": value.because} if value.because else {}
        relations = [
            Relation(id=entry_id, **{key: expression}, **because) for key in ("equals", "requires") if (expression := getattr(value, key))
        ]
        entries.append(
            Entry(
                id=entry_id,
                place=claim.place,
                says=claim.says,
                kind=claim.kind,
                unit=claim.unit,
                printed=value.printed,
                relations=tuple(relations),
                ours=value.ours or (None if value.reason else value.equals),
                reason=value.reason,
                command=value.command,
            )
        )
    return entries


def _check(ledger: Ledger, ids: list[str], relations: dict[str, list[Relation]]) -> None:
    repeated = sorted({i for i in ids if ids.count(i) > 1})
    if repeated:
        raise ValueError(f"ledger: {repeated[0]} stands twice")
    named = [(name, name) for name in relations]
    for entry in ledger.entries.values():
        expressions = [entry.holds, entry.ours, *(r.expression for r in entry.relations)]
        named += [(name, entry.id) for expression in expressions if expression for name in references(expression)]
        if not entry.ours and not (entry.reason and entry.command):
            raise ValueError(f"ledger: {entry.id}: neither `ours` nor a reason and a command")
    for name, where in named:
        if name not in ledger.entries:
            raise ValueError(f"ledger: {where}: no entry {name}")
