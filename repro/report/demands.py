"""The measurements that a paper's tables and figures ask for, read from its ledger."""

from .ledger import Ledger

# ("accuracy", data set, model), (one of the counts, "model@size", "") or ("fps" | "memory_mib", model, "")
Measurement = tuple[str, str, str]
COUNTS = {"params_m", "macs_g", "macs_g_paper_convention", "macs_g_of_authors", "macs_g_fvcore"}
_MEASURED = {*COUNTS, "accuracy", "fps", "memory_mib"}


def demands(ledger: Ledger) -> dict[str, list[set[Measurement]]]:
    """Table or figure -> for each number or statement there, the measurements that our counterpart is computed from.

    A set is empty where there is no counterpart, or where it needs no measurement.
    """
    found: dict[str, list[set[Measurement]]] = {}
    for entry in ledger.entries.values():
        for place in entry.places:
            if place.startswith(("Table", "Fig.")):
                found.setdefault(place, []).append(_needs(ledger, entry.id, set()))
    return found


def _needs(ledger: Ledger, entry_id: str, seen: set[str]) -> set[Measurement]:
    """The measurements of an entry and of all entries that its expression names."""
    seen.add(entry_id)
    expression = ledger.entries[entry_id].ours
    if expression is None:
        return set()
    needed = set()
    for call in expression.calls:
        if call.name in _MEASURED:
            first, second = (*call.args, None)[:2]
            needed.add((call.name, str(first), second if isinstance(second, str) else ""))
    return needed.union(*(_needs(ledger, other, seen) for other in expression.references if other not in seen))
