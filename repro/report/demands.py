"""Which measurements the tables and figures of the paper ask for, read from the ledger."""

import re

from .arithmetic import references
from .ledger import Ledger

# ("accuracy", data set, model), ("params_m" | "macs_g" | "macs_g_paper_convention", model@side, ""),
# ("fps" | "memory_mib", model, "")
Measurement = tuple[str, str, str]
_CALL = re.compile(r'(accuracy|params_m|macs_g_paper_convention|macs_g|fps|memory_mib)\("([^"]+)"(?:, "([^"]+)")?')
_PLACE = re.compile(r"Table \d(?: \(\w+\))?|Fig\. \d+[a-z]?")


def demands(ledger: Ledger) -> dict[str, list[set[Measurement]]]:
    """Table or figure -> for each number or statement there, the measurements that our counterpart is computed from.

    A set is empty where there is no counterpart, or where it needs no measurement.
    """
    found: dict[str, list[set[Measurement]]] = {}
    for entry in ledger.entries.values():
        for place in dict.fromkeys(_PLACE.findall(entry.place)):
            found.setdefault(place, []).append(_needs(ledger, entry.id, set()))
    return found


def _needs(ledger: Ledger, name: str, seen: set[str]) -> set[Measurement]:
    """Also through the entries that an expression names."""
    expression = ledger.entries[name].ours or ""
    seen.add(name)
    further = [_needs(ledger, other, seen) for other in references(expression) if other not in seen]
    return set(_CALL.findall(expression)).union(*further)
