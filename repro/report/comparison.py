"""The sections of a paper's page that compare it with ours: counts, tables, claims, contradictions, gaps.

page.md calls these functions by name and has the headings to which they link.
"""

import itertools
from collections.abc import Sequence
from pathlib import PurePosixPath

from .claims import Report
from .ledger import Claim, Entry
from .markdown import code, join, number, strong, table
from .records import group_by, is_remark
from .verdicts import (
    KIND_MEANINGS,
    STATUSES,
    Elsewhere,
    Status,
    Verdict,
    count_statuses,
    format_counts,
    format_ours,
    status_line,
)

# the meanings of the marks on a page; statuses that a reader need not tell apart share a mark
_LEGEND = {
    "✓": "ours is the paper's number, rounded to its printed digits or cut off at them",
    "≈": "ours agrees, and is no evidence: a convention that was fitted to such rows, or a setting that was copied from the paper",
    "≠": "ours is another number, and ours − paper is in parentheses; with ᵉ, a computation or a source shows why",
    "⚠": "the paper contradicts itself, and no rounding explains it",
    "–": "not measured, or nobody can have measured it as described; the page says why",
    "○": "out of scope: it needs a model of another field than vision",
}
_EVIDENCE = ["where", "it prints", "but"]  # the header of the tables whose rows `_evidence_row` returns
# function of a ledger's expressions -> how it counts a classifier, head included
_COUNTED = {
    "params_m": "every parameter",
    "macs_g": "multiply-adds",
    "macs_g_fvcore": "fvcore",
    "macs_g_of_authors": "its authors' convention",
    "macs_g_paper_convention": "the fitted convention",
}


def find_claims_files(report: Report) -> str:
    """Return the name of the file with all entries, which lies beside the page."""
    return code(PurePosixPath(report.paper.claims_file).name)


def list_marks(_: Report) -> str:
    """Explain the marks of the statuses; every function of a template gets the report, also one that needs none."""
    return table(["mark", "what it means"], _LEGEND.items())


def list_ways(report: Report) -> str:
    """Count the paper's entries by what can reproduce them: the default run, other runs, the papers' data and GPUs."""
    by_pipeline = {source.path for source in report.results.sources if report.results.is_by_default(source)}
    # the report itself reads the profiles
    by_pipeline |= {path for verdict in report.all for path in verdict.sources if path.startswith("profiles/")}
    measured = [verdict for verdict in report.all if verdict.ours is not None]
    by_default = sum(by_pipeline.issuperset(verdict.sources) for verdict in measured)
    others = [verdict for verdict in report.all if verdict.ours is None]
    by_command = sum(not is_remark(verdict.command) for verdict in others)
    plan = "`repro plan --profile paper` says the hours and the memory of GPUs"
    commands = f"the commands under “Not measured, and why”; {plan}"
    rows = [
        ["made again by the default run", by_default, "`make reproduce`"],
        ["made again by runs outside the pipeline", len(measured) - by_default, "`make measure-cpu`, in hours"],
        ["can be made again with the papers' data and GPUs", by_command, commands],
        ["known from the paper alone", len(others) - by_command, "–"],
    ]
    return table(["the paper's numbers and statements", "", "how"], [row for row in rows if row[1]])


def describe_speed_rule(report: Report) -> str:
    """State the conditions under which a speed is compared; empty if the paper names no device."""
    conditions = report.paper.ledger.paper
    if not conditions.speed_device:
        return ""
    batch = conditions.speed_batch
    at_batch = f"at batch {batch}" if batch else "at the paper's batch, which it does not name"
    return f"Speed and memory are compared only when taken on one {conditions.speed_device} {at_batch}."


def list_kinds(report: Report) -> str:
    """Count the paper's entries by kind and status."""
    kinds = group_by(report.all, lambda verdict: verdict.entry.kind)
    rows = []
    for kind, label in KIND_MEANINGS.items():
        counts = count_statuses(kinds.get(kind, []))
        rows.append([label, *(counts[word] for word in STATUSES), counts.total()])
    counts = count_statuses(report.all)
    rows.append(map(strong, ["all", *(counts[word] for word in STATUSES), counts.total()]))
    return table(["entries of the ledger", *STATUSES, "all"], rows)


def count_relations(report: Report, what: str) -> int:
    """Count relations (`what` is `checked`, `hold` or `broken`) or entries (`unmeasured` or `consistent`).

    `consistent` counts the unmeasured entries whose relations were checked and hold.
    """
    own = _find_status(report, Status.NOT_MEASURED)
    checked, broken = sum(each.checks for each in report.all), sum(each.violations for each in report.all)
    found = {
        "checked": checked,
        "hold": checked - broken,
        "broken": broken,
        "unmeasured": len(own),
        "consistent": sum(each.checks > 0 and each.violations == 0 for each in own),
    }
    return found[what]


def list_headlines(report: Report) -> str:
    """List the claims that the paper's declaration puts first, with reasons; empty if it names none."""
    return _claim_table(report, are_headlines=True) if report.paper.headlines else ""


def list_tables(report: Report) -> str:
    """Write every table of the paper, with our number next to each of its numbers."""
    sections = []
    for about in report.paper.ledger.tables:
        header = ["", *(f"{column.label} ({column.unit})" for column in about.columns.values())]
        own = [[report.verdicts[f"{about.id}.{row}.{column}"] for column in about.columns] for row in about.records]
        rows = [[label, *map(_compare, of_row)] for label, of_row in zip(about.labels.values(), own, strict=True)]
        notes = [f"Each entry: paper → ours. {format_counts(itertools.chain(*own))}.", about.note]
        for column, of_column in zip(about.columns.values(), zip(*own)):
            if agreeing := [each.plainly for each in of_column if each.plainly is not None]:
                agree = f"{sum(agreeing)} of these {len(agreeing)} {column.label} agree."
                notes.append(f"By the column's own convention, without one that was chosen for a row, {agree}")
        sections += [f"## {about.place}: {about.title}", " ".join(filter(None, notes)), table(header, rows)]
    return join(sections)


def shared_counts(reports: Sequence[Report]) -> str:
    """Write the section on counts of one model that several papers print, with a row if number or verdict differ.

    It is empty if no two papers print the same count.
    """
    found: dict[tuple[str, str], dict[str, Verdict]] = {}  # (row of the counts, what is counted) -> paper -> verdict
    for report in reports:
        for verdict in report.all:
            expression = verdict.entry.plain or verdict.entry.ours
            calls = expression.calls if expression and verdict.entry.kind == "count" else ()
            if len(calls) == 1 and calls[0].name in _COUNTED:
                what = "parameters (M)" if calls[0].name == "params_m" else "FLOPs (G)"
                found.setdefault((str(calls[0].args[0]), what), {}).setdefault(report.paper.name, verdict)
    shared = [(key, own) for key, own in found.items() if len(own) > 1]
    if not shared:
        return ""
    unlike = [
        (key, own) for key, own in shared if len({(each.entry.printed, each.status) for each in own.values()}) > 1
    ]
    papers = [report.paper.name for report in reports if any(report.paper.name in own for _, own in unlike)]
    rows = []
    for (model, what), own in unlike:
        ways = {name: _COUNTED[verdict.entry.ours.calls[0].name] for name, verdict in own.items()}
        counted, *others = dict.fromkeys(ways.values())
        if others:
            counted = "; ".join(f"{name}: {way}" for name, way in ways.items())
        rows.append([code(model), what, *(_compare(own[name]) if name in own else "–" for name in papers), counted])
    text = (
        f"{len(shared)} counts are printed by two papers or more. Ours come from one record, and are of the whole "
        f"classifier at the image size after the @. {len(shared) - len(unlike)} have one number and one verdict; the "
        "others:"
    )
    header = ["model", "count", *papers, "how ours is counted"]
    return join(["## Counts that several papers print", text, table(header, rows)])


def list_claims(report: Report) -> str:
    """List the claims of the text that are no headlines."""
    return _claim_table(report, are_headlines=False)


def list_contradictions(report: Report) -> str:
    """List the contradictions with their evidence; entries with the same number and evidence share a row."""
    own = _find_status(report, Status.INCONSISTENT)
    groups = group_by(own, lambda each: (each.entry.printed or each.entry.id, each.entry.unit, each.evidence))
    # the last of a group is a number of the text with its sentence, if there is one, since tables come first
    return table(_EVIDENCE, [_evidence_row(_prints(alike[-1].entry), alike) for alike in groups.values()])


def list_differences(report: Report) -> str:
    """List our numbers that differ, with the reason; entries with one reason share a row."""
    # the paper's contradictions are left out, because they have their own section
    differing = [each for each in report.all if each.status in (Status.EXPLAINED, Status.UNEXPLAINED)]
    groups = group_by(differing, lambda each: each.explanation)
    rows = []
    for why, own in sorted(groups.items(), key=lambda item: item[0] is None):  # the unexplained ones come last
        shown = "; ".join(f"{each.entry.printed or each.entry.says} → {format_ours(each)}" for each in own)
        rows.append([", ".join(each.entry.id for each in own), shown, why or strong("unexplained")])
    return table(["entries", "paper → ours", "why"], rows)


def not_measurable(report: Report) -> str:
    """List the numbers that cannot have been measured as described; empty if there are none."""
    groups = group_by(_find_status(report, Status.NOT_MEASURABLE), lambda each: each.evidence).values()
    rows = [_evidence_row("; ".join(_prints(each.entry) for each in alike), alike) for alike in groups]
    return join(["## Not measurable as described", table(_EVIDENCE, rows)]) if rows else ""


def _find_status(report: Report, word: str) -> list[Verdict]:
    """Find the verdicts of one status, in the ledger's order."""
    return [verdict for verdict in report.all if verdict.status == word]


def _evidence_row(prints: str, alike: Sequence[Verdict]) -> list[str]:
    """Return the table row of verdicts with the same evidence; `prints` shows their numbers."""
    return ["; ".join(dict.fromkeys(each.entry.place for each in alike)), prints, alike[0].evidence or ""]


def list_unmeasured(report: Report) -> str:
    """List the reasons why there is no number of ours, the most frequent first."""
    own = _find_status(report, Status.NOT_MEASURED)
    # entries that no command would measure have their own rows
    groups = group_by(own, lambda each: (each.reason, is_remark(each.command)))
    rows = []
    for (reason, _), alike in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        first, *more = dict.fromkeys(each.command for each in alike)
        shown = first if is_remark(first) else code(first)
        if more:
            shown += f" (and {len(more)} more, in {PurePosixPath(report.paper.claims_file).name})"
        rows.append([number(len(alike)), reason, shown])
    return table(["entries", "reason", "what would measure it"], rows)


def _compare(verdict: Verdict) -> str:
    """Write the paper's number, ours and the status; without ours, the mark alone. `html` parses this form."""
    printed = f"{verdict.entry.printed or ''} ".lstrip()
    if verdict.ours is not None:
        return f"{printed}→ {format_ours(verdict)} {status_line(verdict)}"
    return f"{printed}{'' if verdict.evidence else '→ '}{verdict.status.mark}"


def _claim_table(report: Report, *, are_headlines: bool) -> str:
    """Write a row per claim: the headlines, with reasons, or the other claims.

    A claim that repeats a headline's words is a headline too. Claims with the same words and result share a row.
    """
    claims = report.paper.ledger.claims
    prefixes = report.paper.headlines
    headlines = {claim.says for claim in claims if any(entry.id.startswith(prefixes) for entry in claim.entries)}
    chosen = [claim for claim in claims if (claim.says in headlines) == are_headlines]

    def show(claim: Claim) -> tuple[str, str, str, str]:
        """Return a claim's row without its place."""
        own = [report.verdicts[entry.id] for entry in claim.entries]
        notes = ["[elsewhere](#on-other-devices-than-the-papers)"] if any(each.elsewhere for each in own) else []
        if are_headlines:
            notes += [each.reason for each in own if each.status == Status.NOT_MEASURED and each.reason]
            if any(each.status == Status.INCONSISTENT for each in own):
                notes.append("[⚠ why](#where-the-paper-contradicts-itself)")
            if any(each.compared in (Status.EXPLAINED, Status.UNEXPLAINED) for each in own):
                notes.append("[≠ why](#why-ours-differs)")
            notes += [each.evidence for each in own if each.status == Status.NOT_MEASURABLE and each.evidence]
        # equal texts are written once, different ones in order
        texts = [[write(each) for each in own] for write in (format_ours, status_line)]
        ours, statuses = (" / ".join(of[:1] if len(set(of)) == 1 else of) for of in texts)
        return claim.says, ours, statuses, "; ".join(dict.fromkeys(notes))

    places = {row: dict.fromkeys(claim.place for claim in alike) for row, alike in group_by(chosen, show).items()}
    rows = [[", ".join(of_row), *row] for row, of_row in places.items()]
    return table(["where", "the paper says", "ours", "status", "note"], rows)


def list_elsewhere(report: Report) -> str:
    """Write a row per claim and group of speed rows that were measured under other conditions than the paper's.

    Of claims with the same measurements, only the first is shown. A claim stands in the first of its rows alone.
    """
    told: dict[tuple[Elsewhere, ...], str] = {}
    for claim in report.paper.ledger.claims:
        for verdict in (report.verdicts[entry.id] for entry in claim.entries):
            if verdict.elsewhere:
                told.setdefault(verdict.elsewhere, f"{claim.place}: {_key(claim, verdict)}{claim.says}")
    rows = [
        [says if each is measured[0] else "", f"{each.group}{each.group.caveat}", each.found, each.found_fused]
        for measured, says in told.items()
        for each in measured
    ]
    baseline = report.paper.baseline
    header = ["the paper says", "measured on", f"against unfused {baseline}", f"against fused {baseline}"]
    return table(header, rows) if rows else ""


def _key(claim: Claim, verdict: Verdict) -> str:
    """Return a prefix that distinguishes the numbers of a claim, e.g. `T `; empty if it has only one."""
    return f"{verdict.entry.id.removeprefix(claim.id + '_').upper()} " if len(claim.entries) > 1 else ""


def _prints(entry: Entry) -> str:
    """Return what the paper prints: a statement, a number of the text with its statement, or a table's bare number."""
    if entry.printed is None:
        return entry.says
    printed = f"{entry.printed} {entry.unit}".strip()
    return printed if entry.id.startswith("table") else f"{strong(printed)}: {entry.says}"
