"""results/claims.csv and claims.json: every entry with its status, for programs."""

import csv
import io
from collections.abc import Mapping
from typing import Any

from .claims import STATUSES, Verdict, status_counts
from .ledger import Ledger

_CSV_COLUMNS = (
    "id",
    "kind",
    "place",
    "says",
    "unit",
    "paper",
    "ours",
    "status",
    "how",
    "delta",
    "evidence",
    "reason",
    "command",
    "elsewhere",
    "sources",
)


def claims_json(ledger: Ledger, verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """All entries, machine-readable, with the counts of each status."""
    counts = status_counts(verdicts)
    summary = {**{status: counts[status] for status in STATUSES}, "entries": len(verdicts)}
    return {"paper": ledger.paper.version, "summary": summary, "entries": [_record(verdict) for verdict in verdicts.values()]}


def claims_csv(verdicts: Mapping[str, Verdict]) -> str:
    """One line per entry."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, _CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for verdict in verdicts.values():
        record = _record(verdict)
        writer.writerow({name: "; ".join(value) if isinstance(value, list) else value for name, value in record.items()})
    return stream.getvalue()


def _record(verdict: Verdict) -> dict[str, Any]:
    entry = verdict.entry
    return {
        "id": entry.id,
        "kind": entry.kind,
        "place": entry.place,
        "says": entry.says,
        "unit": entry.unit,
        "paper": entry.printed,
        "ours": verdict.ours,
        "status": verdict.status,
        "how": verdict.how,
        "delta": verdict.delta,
        "evidence": verdict.evidence,
        "reason": verdict.reason,
        "command": verdict.command,
        "elsewhere": list(map(str, verdict.elsewhere)),
        "sources": list(verdict.sources),
    }
