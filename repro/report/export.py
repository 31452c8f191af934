"""claims.csv and claims.json: every entry with its status, for programs."""

from typing import Any

from .claims import Report, Verdict
from .statuses import STATUSES, count_statuses


def export_json(report: Report) -> dict[str, Any]:
    """All entries, and how many have each status."""
    counts = count_statuses(report.all)
    summary = {**{word: counts[word] for word in STATUSES}, "entries": len(report.all)}
    return {"paper": report.paper.ledger.paper.version, "summary": summary, "entries": list(map(_record, report.all))}


def export_rows(report: Report) -> list[dict[str, Any]]:
    """All entries as rows of a table, whose lists are one text each."""
    records = map(_record, report.all)
    return [{name: "; ".join(value) if isinstance(value, list) else value for name, value in record.items()} for record in records]


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
