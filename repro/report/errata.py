"""The errata page: lists of each paper's errors, its inconsistencies and our questions, for the paper's authors.

A ledger declares an erratum's entries, its list, its place there and the proposed correction. The code decides by the
verdicts on these entries whether it is an erratum.
"""

import re
from collections.abc import Iterator, Sequence

from .claims import Report
from .ledger import Erratum
from .markdown import join, strong, table
from .verdicts import Status, Verdict, format_ours

# name of a list in a ledger -> its heading, and the heading of its column of proposals
LISTS = {
    "errors": ("Errors", "proposed correction"),
    "inconsistencies": ("Inconsistencies", "proposed correction"),
    "questions": ("Questions", "what would settle it"),
}
_WRONG = {Status.INCONSISTENT, Status.NOT_MEASURABLE, Status.EXPLAINED}
_Entry = tuple[Erratum, Sequence[Verdict]]


def list_errata(reports: Sequence[Report]) -> str:
    """Return the sections of the errata.

    A paper whose list is withheld has the reason instead. A paper without items has no section.
    """
    sections = []
    for report in reports:
        about, errata = report.paper.ledger.paper, report.paper.ledger.errata
        if errata.withheld:
            sections += [f"## {report.paper.name}", f"{about.title}: no list, since {errata.withheld}."]
            continue
        sent = f"Sent to the authors on {errata.sent}." if errata.sent else "Not sent to the authors yet."
        opening = f"{about.title}, {about.version}. As of {errata.as_of}. {sent}"
        blocks = []
        place = 0
        for name, (title, last) in LISTS.items():
            if items := list(find_items(report, name)):
                header = ["", "where", "it prints", "but", last, *(["the authors' answer"] if errata.answers else [])]
                rows = [_show_item(report, rank, item) for rank, item in enumerate(items, place + 1)]
                blocks += [f"### {title}", table(header, rows)]
                place += len(items)
        sections += [f"## {report.paper.name}", opening, *blocks] if place else []
    return join(sections)


def find_items(report: Report, name: str) -> Iterator[_Entry]:
    """Yield each item of a list with the verdicts behind it, in the ledger's order.

    An error or an inconsistency is an item only while a verdict supports it: the paper contradicts itself, the number
    cannot have been measured, or ours differs and a computation or a source shows why. A question may be about any
    entry. Contradictions that the ledger places in no list come last among the inconsistencies.
    """
    errata = report.paper.ledger.errata
    for erratum in getattr(errata, name):
        verdicts = [report.verdicts[each] for each in erratum.ids]
        if alike := [each for each in verdicts if name == "questions" or each.status in _WRONG]:
            yield erratum, alike
    if name == "inconsistencies":
        for verdict in report.all:
            if verdict.status == Status.INCONSISTENT and verdict.entry.id not in errata.placed:
                yield Erratum(ids=(verdict.entry.id,), correction="–"), [verdict]


def _show_item(report: Report, rank: int, item: _Entry) -> list[str]:
    erratum, alike = item
    answers = report.paper.ledger.errata.answers
    row = [str(rank), _show_places(alike), _show_printed(alike), _show_evidence(report, item)]
    said = "; ".join(dict.fromkeys(answers[each] for each in erratum.ids if each in answers))
    return [*row, erratum.correction, *([said] if answers else [])]


def _show_places(alike: Sequence[Verdict]) -> str:
    """Return the entries' places in the paper; rows of one column of a table are listed together."""
    rows: dict[str, list[str]] = {}
    for place in dict.fromkeys(each.entry.place for each in alike):
        found = re.fullmatch(r"(.*), row (.*)(, column .*)", place)
        rows.setdefault(f"{found[1]}{found[3]}" if found else place, []).extend([found[2]] if found else [])
    return "; ".join(f"{place} ({', '.join(names)})" if names else place for place, names in rows.items())


def _show_printed(alike: Sequence[Verdict]) -> str:
    """Return the printed numbers, each once, and the sentences of the text that print them or state a claim."""
    entries = [each.entry for each in alike]
    numbers = {
        f"{each.printed} {each.unit}".strip(): each.says for each in reversed(entries) if each.printed is not None
    }
    texts = [each for each in entries if not each.id.startswith("table")]
    says = dict.fromkeys(each.says for each in texts if each.printed is None or each.says in numbers.values())
    shown = [strong(", ".join(reversed(numbers)))] if numbers else []
    return ": ".join([*shown, *(["; ".join(says)] if says else [])])


def _show_evidence(report: Report, item: _Entry) -> str:
    """Return the erratum's own reason, or else its verdicts' reasons, with the numbers that we count or compute."""
    erratum, alike = item
    reasons = dict.fromkeys(filter(None, (each.evidence or each.explanation for each in alike)))
    text = erratum.because or "; ".join(reasons)
    counted = [format_ours(each) for each in alike if each.status == Status.EXPLAINED and each.delta is not None]
    if counted:
        text += f"; we count {', '.join(counted)} {alike[0].entry.unit}".rstrip()
    # a printed equation that fails is shown with its residual
    failing = [each.entry.ours.calls for each in alike if each.entry.ours and each.ours is False]
    errors = [call for calls in failing for call in calls if call.name.endswith("_error")]
    if residuals := dict.fromkeys(f"{report.paper.formulas()[name](*given):.2f}" for name, given in errors):
        text += f"; both sides differ by {', '.join(residuals)} of the largest value"
    return text
