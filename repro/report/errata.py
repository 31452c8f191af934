"""The errata page: lists of each paper's errors, its inconsistencies and our questions, for the paper's authors.

A ledger declares an erratum's entries, its list, its place there and the proposed correction. The code decides by the
verdicts on these entries whether it is an erratum.
"""

import itertools
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
# statuses that support an error or an inconsistency
_WRONG = {Status.INCONSISTENT, Status.NOT_MEASURABLE, Status.EXPLAINED}
_Item = tuple[Erratum, Sequence[Verdict]]  # an erratum and the verdicts that support it


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
        numbers = itertools.count(1)  # through all lists of a paper
        for name, (title, last) in LISTS.items():
            if items := list(find_items(report, name)):
                header = ["", "where", "it prints", "but", last, *(["the authors' answer"] if errata.answers else [])]
                rows = [[str(next(numbers)), *_show_item(report, item)] for item in items]
                blocks += [f"### {title}", table(header, rows)]
        sections += [f"## {report.paper.name}", opening, *blocks] if blocks else []
    return join(sections)


def find_items(report: Report, name: str) -> Iterator[_Item]:
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


def _show_item(report: Report, item: _Item) -> list[str]:
    """Return an item's row without its number; the authors' answers come last, if they gave any to this paper."""
    erratum, alike = item
    answers = report.paper.ledger.errata.answers
    row = [_show_places(alike), _show_printed(alike), _show_evidence(report, item), erratum.correction]
    said = dict.fromkeys(answers[each] for each in erratum.ids if each in answers)
    return [*row, *(["; ".join(said)] if answers else [])]


def _show_places(alike: Sequence[Verdict]) -> str:
    """Return the entries' places in the paper; rows of one column of a table are listed together."""
    rows: dict[str, list[str]] = {}
    for place in dict.fromkeys(each.entry.place for each in alike):
        found = re.fullmatch(r"(.*), row (.*)(, column .*)", place)
        rows.setdefault(f"{found[1]}{found[3]}" if found else place, []).extend([found[2]] if found else [])
    return "; ".join(f"{place} ({', '.join(names)})" if names else place for place, names in rows.items())


def _show_printed(alike: Sequence[Verdict]) -> str:
    """Return the printed numbers, each once, and the sentences of the text that print them or state a claim.

    Of entries with one number, only the first one's sentence is shown.
    """
    entries = [each.entry for each in alike]
    # reversed, so that the first sentence of a number replaces later ones
    numbers = {
        f"{each.printed} {each.unit}".strip(): each.says for each in reversed(entries) if each.printed is not None
    }
    texts = [each for each in entries if not each.id.startswith("table")]
    says = dict.fromkeys(each.says for each in texts if each.printed is None or each.says in numbers.values())
    shown = [strong(", ".join(reversed(numbers)))] if numbers else []
    return ": ".join([*shown, *(["; ".join(says)] if says else [])])


def _show_evidence(report: Report, item: _Item) -> str:
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
