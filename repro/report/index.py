"""Where each table, figure and claim of the paper is checked: the command that does it and the record that it ends in."""

import re
from collections.abc import Iterable, Mapping, Sequence

from .claims import STATUSES, Verdict, status_counts
from .ledger import Ledger
from .wording import grid

_RECORD = re.compile(r"results/(?!measured/)(\w+)/(?:([^/]+)/)?(?:metrics|manifest)\.json")


def index_md(ledger: Ledger, verdicts: Mapping[str, Verdict]) -> str:
    """The section of tables.md: a row for each column of a table and for each claim of the text."""
    rows = []
    for table in ledger.tables:
        for key, column in table.columns.items():
            own = [verdicts[f"{table.id}.{row}.{key}"] for row in table.rows]
            rows.append(_row(f"{table.place}, {column.label}", f"{table.title}: {column.label} ({column.unit}), {len(own)} rows", own))
    rows += [_row(claim.place, claim.says, [verdicts[entry.id] for entry in claim.entries]) for claim in ledger.claims]
    head = ["where", "the paper says", "entries", "command", "record"]
    text = "`repro report` judges every entry; the command is what makes, or would make, the number that it judges by."
    return f"## Where each claim is checked\n\n{text}\n\n" + grid(head, rows)


def shown_commands(commands: Iterable[str]) -> str:
    """The first of them as Markdown, and how many more there are."""
    first, *more = dict.fromkeys(commands)
    # `none` and what follows it is a word to the reader, no command
    return (first if first.startswith("none") else f"`{first}`") + (f" (and {len(more)} more, in claims.csv)" if more else "")


def _row(where: str, says: str, own: Sequence[Verdict]) -> list[str]:
    counts = status_counts({v.entry.id: v for v in own})
    commands = [command for v in own for command in _commands(v)]
    records = dict.fromkeys(source for v in own for source in v.sources)
    said = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    return [where, says, said, shown_commands(commands), ", ".join(f"`{record}`" for record in records) or "–"]


def _commands(verdict: Verdict) -> list[str]:
    if verdict.ours is None:
        return [verdict.command]
    return [_made_by(source) for source in verdict.sources] or ["repro report"]


def _made_by(source: str) -> str:
    stage = _RECORD.fullmatch(source)
    if stage:
        return f"repro {stage[1].replace('_', '-')}" + (f" --cell {stage[2]}" if stage[2] else "")
    return "repro profile show paper" if source.startswith("profiles/") else f"none: {source} was measured by hand"
