"""The sections that set a paper beside ours: how to read the page, counts, tables, claims, contradictions, and what is missing."""

from collections.abc import Iterable, Sequence

from .claims import Report, is_of_cost
from .document import Block, Comparison, Line, Link, Piece, Section, code, join, number, plain, prose, strong, table
from .ledger import Claim, Entry, Table
from .verdicts import (
    CONSISTENT,
    EXPLAINED,
    INCONSISTENT,
    KINDS,
    NOT_MEASURABLE,
    NOT_MEASURED,
    OPEN,
    STATUSES,
    UNEXPLAINED,
    Verdict,
    count_statuses,
    format_counts,
    format_ours,
    status_line,
)

CONTRADICTIONS = "Where the paper contradicts itself"
DIFFERENCES = "Why ours differs"


def how_to_read(report: Report) -> Section:
    """What the marks mean and what is compared."""
    conditions = report.paper.ledger.paper
    files = "`claims.csv` and `claims.json`" if report.paper.primary else f"`{report.paper.id}.claims.json`"
    sources = (
        f"`repro report` writes this page from the records under `results/` and from the paper's ledger; code sets every status. params.yaml "
        f"holds {report.named}. All entries, with reasons, commands and records, are in {files}."
    )
    batch = f" at batch {conditions.speed_batch}" if conditions.speed_batch else " at the paper's batch, which it does not name"
    speed = f", speed and memory only when taken on one {conditions.speed_device}{batch}"
    units = (
        "Parameters are in millions; the paper's FLOPs are multiply-adds, and so are ours. Accuracy is compared only when it was "
        f"taken on the whole validation split of the paper's data set{speed if conditions.speed_device else ''}."
    )
    legend = table(["mark", "status", "means"], [[status, word, status.means] for word, status in STATUSES.items()])
    return Section("How to read this page", [prose(sources), legend, (units,)])


def summary(report: Report) -> Section:
    """How many entries of each kind have each status, and how many of the paper's relations hold."""
    rows = []
    for kind, label in KINDS.items():
        counts = count_statuses(verdict for verdict in report.all if verdict.entry.kind == kind)
        rows.append([label, *(number(counts[word]) for word in STATUSES), number(counts.total())])
    counts = count_statuses(report.all)
    rows.append([strong("all"), *(strong(counts[word]) for word in STATUSES), strong(counts.total())])
    checks = sum(verdict.checks for verdict in report.all)
    violations = sum(verdict.violations for verdict in report.all)
    text = (
        f"{checks} relations that the paper's numbers must satisfy among themselves were recomputed (differences quoted in the text, the "
        f"same model in two tables, formulas): {checks - violations} hold, {violations} do not."
    )
    own = [verdict for verdict in report.all if verdict.status == NOT_MEASURED.word]
    consistent = sum(verdict.mark is CONSISTENT for verdict in own)
    text += f" Of the {len(own)} entries that are not measured, {consistent} are in such relations, and consistent with the paper's tables."
    return Section("Summary", [table(["entries of the ledger", *STATUSES, "all"], rows), (text,)])


def headlines(report: Report) -> Section:
    """The claims that the paper leads with."""
    claims = report.paper.ledger.claims
    chosen = [claim for claim in claims if any(entry.id.startswith(report.paper.headlines) for entry in claim.entries)]
    return Section("Headline claims", [_claim_table(chosen, report, with_reasons=True)])


def table_section(about: Table, report: Report) -> Section:
    """A table of the paper, each number beside ours."""
    header = ["", *(f"{column.label} ({column.unit})" for column in about.columns.values())]
    own = {row: [report.verdicts[f"{about.id}.{row}.{column}"] for column in about.columns] for row in about.records}
    rows = [[about.labels[row], *map(_compare, of_row)] for row, of_row in own.items()]
    counts = format_counts(verdict for of_row in own.values() for verdict in of_row)
    notes = [about.note] if about.note else []
    for key, column in about.columns.items():
        agreeing = [agrees for row in about.records if (agrees := report.plain.get(f"{about.id}.{row}.{key}")) is not None]
        if agreeing:
            own_convention = f"By the column's own convention, without one that was chosen for a row, {sum(agreeing)} of these"
            notes.append(f"{own_convention} {len(agreeing)} {column.label} agree.")
    return Section(f"{about.place}: {about.title}", [(" ".join([f"Each entry: paper → ours. {counts}.", *notes]),), table(header, rows)])


def cost_claims(report: Report) -> Section:
    """Every claim of the text on cost: what was counted, and what was measured on the paper's device and on each of ours."""
    rows: list[list[Piece | Line]] = []
    for claim in report.paper.ledger.claims:
        for verdict in (verdict for verdict in report.of_claim(claim) if is_of_cost(verdict.entry)):
            printed = verdict.entry.printed or ""
            key = _key(claim, verdict)
            about = [claim.place, claim.says, number(printed) if printed and not key else key + printed]
            if verdict.ours is not None:
                rows.append([*about, ", ".join(verdict.sources), (format_ours(verdict), " ", *status_line(verdict)), "–"])
            for each in verdict.elsewhere:
                found = (each.value, each.found), (each.fused, each.found_fused)
                shown = [number(text) if isinstance(value, float) else text for value, text in found]
                rows.append([*about, str(each.group), *shown])
            if verdict.ours is None and not verdict.elsewhere:
                rows.append([*about, "–", verdict.reason or "–", "–"])
    name = report.paper.baseline
    header = ["where", "the paper says", "number", "measured on, or counted in", f"as in the paper: unfused {name}", f"fused {name}"]
    text = (
        f"The paper's {name} has unfused attention; people run the fused one today, so both are shown. A speed on another device than "
        "the paper's says what holds on that device. In brackets is a range: the 95 % interval where a row was measured in five processes or more, else that of its processes, or of the steps of a single one, which is narrower than what another process may give; a statement "
        f"is `{OPEN}` where they allow both that it holds and that it does not."
    )
    return Section("The paper's efficiency claims, measured here", [prose(text), table(header, rows)])


def all_claims(report: Report) -> Section:
    """Every claim of the text."""
    return Section("The text's claims", [_claim_table(report.paper.ledger.claims, report)])


def contradictions(report: Report) -> Section:
    """What contradicts itself, with the evidence; entries with the same number and the same evidence share a row."""
    groups: dict[tuple, list[Entry]] = {}
    for verdict in report.all:
        if verdict.status == INCONSISTENT.word:
            entry = verdict.entry
            groups.setdefault((entry.printed or entry.id, entry.unit, verdict.evidence), []).append(entry)
    rows = [
        ["; ".join(dict.fromkeys(entry.place for entry in entries)), _prints(entries[-1]), evidence]
        for (_, _, evidence), entries in groups.items()
    ]
    text = "Numbers are recomputed by code from the paper's own; formulas and sentences were compared by hand."
    return Section(CONTRADICTIONS, [(text,), table(["where", "it prints", "but"], rows)])


def differences(report: Report) -> Section:
    """Every number of ours that differs, with the reason; entries of one reason share a row."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in report.all:
        if verdict.compared in (EXPLAINED.word, UNEXPLAINED.word) and verdict.status != INCONSISTENT.word:
            groups.setdefault(verdict.explanation or "", []).append(verdict)
    rows: list[list[Piece | Line]] = []
    for why, own in sorted(groups.items(), key=lambda item: not item[0]):
        shown = [(f"{each.entry.printed or each.entry.says} → ", format_ours(each)) for each in own]
        rows.append([", ".join(each.entry.id for each in own), join(shown, "; "), why or strong("unexplained")])
    text = "An explanation has its evidence: a computation that the report repeats, or a source. What has neither is unexplained."
    return Section(DIFFERENCES, [(text,), table(["entries", "paper → ours", "why"], rows)])


def not_measurable(report: Report) -> list[Section]:
    """What nobody can have measured as the paper describes it; no section without such entries."""
    groups: dict[str | None, list[Verdict]] = {}
    for verdict in report.all:
        if verdict.status == NOT_MEASURABLE.word:
            groups.setdefault(verdict.evidence, []).append(verdict)
    if not groups:
        return []
    rows = [
        ["; ".join(dict.fromkeys(each.entry.place for each in own)), join([_prints(each.entry) for each in own], "; "), why or ""]
        for why, own in groups.items()
    ]
    return [Section("Not measurable as described", [table(["where", "it prints", "but"], rows)])]


def not_measured(report: Report) -> Section:
    """The reasons for which there is no number of ours, the most frequent first."""
    groups: dict[tuple[str, bool], list[str]] = {}  # what nothing would measure stands apart
    for verdict in report.all:
        if verdict.status == NOT_MEASURED.word:
            groups.setdefault((verdict.reason, _is_remark(verdict.command)), []).append(verdict.command)
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [[number(len(commands)), reason, _first_command(commands, report)] for (reason, _), commands in ranked]
    return Section("Not measured, and why", [table(["entries", "reason", "what would measure it"], rows)])


def where_checked(report: Report) -> Section:
    """For each column of a table and each claim of the text, the command that checks it and the record that it ends in."""
    rows = []
    for about in report.paper.ledger.tables:
        for key, column in about.columns.items():
            own = [report.verdicts[f"{about.id}.{row}.{key}"] for row in about.records]
            says = f"{about.title}: {column.label} ({column.unit}), {len(own)} rows"
            rows.append([f"{about.place}, {column.label}", says, *_checked(own, report)])
    for claim in report.paper.ledger.claims:
        rows.append([claim.place, claim.says, *_checked(report.of_claim(claim), report)])
    text = "`repro report` judges every entry; the command is what makes, or would make, the number that it judges by."
    header = ["where", "the paper says", "entries", "command", "record"]
    return Section("Where each claim is checked", [prose(text), table(header, rows)])


def _compare(verdict: Verdict) -> Piece | Line:
    printed = verdict.entry.printed or ""
    if verdict.ours is not None:
        return Comparison(printed, format_ours(verdict), status_line(verdict))
    return (f"{printed} ", verdict.mark) if verdict.evidence else Comparison(printed, verdict.mark)


def _claim_table(claims: Iterable[Claim], report: Report, *, with_reasons: bool = False) -> Block:
    rows: list[list[Piece | Line]] = []
    for claim in claims:
        own = report.of_claim(claim)
        elsewhere = [f"{_key(claim, verdict)}{', '.join(map(str, verdict.elsewhere))}" for verdict in own if verdict.elsewhere]
        notes: list[Line] = [(f"elsewhere: {', '.join(elsewhere)}",)] if elsewhere else []
        if with_reasons:
            notes += [(verdict.reason,) for verdict in own if verdict.status == NOT_MEASURED.word and verdict.reason]
            if any(verdict.status == INCONSISTENT.word for verdict in own):
                notes.append((Link("⚠ why", CONTRADICTIONS),))
            if any(verdict.compared in (EXPLAINED.word, UNEXPLAINED.word) for verdict in own):
                notes.append((Link("≠ why", DIFFERENCES),))
            notes += [(verdict.evidence,) for verdict in own if verdict.status == NOT_MEASURABLE.word and verdict.evidence]
        ours, statuses = _merge([(format_ours(verdict),) for verdict in own]), _merge([status_line(verdict) for verdict in own])
        rows.append([claim.place, claim.says, ours, statuses, join(dict.fromkeys(notes), "; ")])
    return table(["where", "the paper says", "ours", "status", "note"], rows)


def _merge(lines: Sequence[Line]) -> Line:
    """One line where all are the same, else all of them in order."""
    return lines[0] if len({plain(*line) for line in lines}) == 1 else join(lines, " / ")


def _key(claim: Claim, verdict: Verdict) -> str:
    """What tells the number of a claim from its other numbers, e.g. `T `."""
    return f"{verdict.entry.id.removeprefix(claim.id + '_').upper()} " if len(claim.entries) > 1 else ""


def _prints(entry: Entry) -> Line:
    if entry.printed is None:
        return (entry.says,)
    printed = f"{entry.printed} {entry.unit}".strip()
    return (number(printed),) if entry.id.startswith("table") else (strong(printed), f": {entry.says}")


def _checked(own: Sequence[Verdict], report: Report) -> list[Line]:
    """The counts of verdicts, and the commands and records behind them."""
    commands = []
    for verdict in own:
        if verdict.ours is None:
            commands.append(verdict.command)
        else:
            commands += [report.results.command_for(source) for source in verdict.sources] or ["repro report"]
    records = dict.fromkeys(source for verdict in own for source in verdict.sources)
    return [(format_counts(own),), _first_command(commands, report), join([(code(record),) for record in records], ", ") or ("–",)]


def _first_command(commands: Iterable[str], report: Report) -> Line:
    """The first of the commands, and how many more there are."""
    first, *more = dict.fromkeys(commands)
    shown: Piece = first if _is_remark(first) else code(first)
    file = "claims.csv" if report.paper.primary else f"{report.paper.id}.claims.json"
    return (shown, f" (and {len(more)} more, in {file})") if more else (shown,)


def _is_remark(command: str) -> bool:
    """Whether it is no command: `none`, and what may follow it."""
    return command.startswith("none")
