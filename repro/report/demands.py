"""The measurements that a paper's tables and figures ask for, read from its ledger."""

from .expressions import Call
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
        calls = (call for each in ledger.trace(entry) if each.ours for call in each.ours.calls)
        needs = {_name(call) for call in calls if call.name in _MEASURED}
        for place in entry.places:
            if place.startswith(("Table", "Fig.")):
                found.setdefault(place, []).append(needs)
    return found


def _name(call: Call) -> Measurement:
    first, second = (*call.args, None)[:2]
    return call.name, str(first), second if isinstance(second, str) else ""
