"""The opening of a paper's page: its questions with verdicts, the speed against the baseline, and a picture.

README.md shows the speed, in its block `verdict`, and the picture, but not these verdicts. The module also writes results/pipeline.json, the time that all stages took.
"""

import datetime
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..bench.pooling import COMMAND, EMULATED, HOST, Row, bound_ratio, describe_time
from ..core.errors import UserError
from ..core.record import read_json, write_json
from ..core.runtime import RUN_BEGAN
from .claims import Report
from .gallery import COMPILED, Speeds, find_all_speeds, find_speeds, picture_blocks
from .markdown import bullets, join, picture, strong, table
from .paper import ATTENTIONS, Comparison, Question
from .records import OUTSIDE, describe_origin, describe_seeds, group_by, name_commits
from .results import Results, SpeedGroup
from .variants import judge_variants, list_changed_verdicts
from .verdicts import (
    Status,
    Verdict,
    count_alone,
    count_statuses,
    format_counts,
    format_ours,
    format_ratio,
    significant,
)

PIPELINE_FILE = "pipeline.json"
_REPRODUCE = " reproduce"  # the verdict on a question all of whose numbers match
_CLOSE = 0.05  # if no number is off by a larger share, the verdict states the largest
# statuses other than a match, as predicates of a sentence on their number
_OUTCOMES = {
    Status.EXPLAINED: "do not, for a reason that is shown",
    Status.UNEXPLAINED: "do not, for no known reason",
    Status.INCONSISTENT: "are stated in two ways that contradict each other",
    Status.FITTED: "agree by a fitted convention",
    Status.DECLARED: "are copied or trivial",
    Status.NOT_MEASURABLE: "cannot be measured as described",
    Status.NOT_MEASURED: "were not tested",
    Status.OUT_OF_SCOPE: "are out of scope",
}
_Row = tuple[str, str, str, str]  # question, verdict, our numbers, their origin


def lead_blocks(report: Report) -> str:
    """Write the opening of a paper's page: its claim, our verdicts, the speed against the baseline, and pictures.

    The verdicts that another machine changes stand before all others. The picture is that of the baseline comparison;
    without one, the paper's own drawings take its place. page.md calls this function by name.
    """
    paper, about = report.paper, report.paper.ledger.paper
    claim = f"*{about.title}*, {about.version}. {paper.claim}".rstrip()
    drawings = paper.drawings(report).items()
    shown = _comparison_picture(report) or join(
        picture_blocks(f"figures/{name}", name, sources) for name, (sources, _) in drawings
    )
    return join([claim, list_changed_verdicts(report), verdict_blocks(report), speed_blocks(report), shown])


def readme_blocks(reports: Sequence[Report]) -> dict[str, str]:
    """Write the blocks of README.md, by marker; the first of the reports must be the primary paper's."""
    first, *_ = reports
    every = [verdict for report in reports for verdict in report.all]
    alone = f"{count_alone(every):,} have no counterpart here"
    said = f"Of the {len(every):,} numbers and statements that the papers print, {alone}."
    pipeline = first.results.paths.results / PIPELINE_FILE
    took = _describe_pipeline(read_json(pipeline), first.results) if pipeline.is_file() else ""
    command = f"make reproduce   # every stage, on scans of digits with 8×8 pixels{took}"
    blocks = {
        "verdict": speed_blocks(first),
        "papers": join([_papers_table(reports), said]),
        "run": f"```\n{command}\nmake test        # the tests\n```",
    }
    if shown := _comparison_picture(first):
        blocks["picture"] = shown
    return blocks


def _describe_pipeline(noted: Mapping[str, Any], results: Results) -> str:
    """Describe how long all stages took, on which processor, and how many ran at once.

    `noted` is the content of results/pipeline.json; the processor is that of the stages' trainings.
    """
    machines = dict.fromkeys(source.machine for source in results.sources if source.stage and source.most_seeds)
    devices = " and ".join(machine.partition(": ")[2] for machine in machines)
    jobs = f", {noted['jobs']} at once" if noted["jobs"] > 1 else ""
    return f": {noted['seconds'] / 60:.0f} minutes ({devices}{jobs})"


def verdict_blocks(report: Report) -> str:
    """Write a row per question, with its verdict, our numbers and their origin; then the count of statuses."""
    rows = [*(_answer(question, report) for question in report.paper.questions), *_orderings(report)]
    counts = f"All {len(report.all)} numbers and statements of the paper: {format_counts(report.all)}."
    return join([table(["question", "verdict", "ours", "measured on"], rows), counts])


def speed_blocks(report: Report) -> str:
    """Compare the model's speed and memory with the baseline's; empty if the paper has no baseline."""
    comparison = report.paper.comparison
    if comparison is None:
        return ""
    measured = find_all_speeds(comparison, report.results)
    if not measured:
        return f"{comparison.title}: not measured, `repro efficiency`."
    return join([_compare_speeds(comparison, measured), _compare_fastest(comparison, report.results)])


def judge_question(own: Sequence[Verdict]) -> tuple[str, str]:
    """Judge the entries of a question; return the end of a sentence about them, and their numbers in words.

    The end begins with a space or a colon, since callers append it to a subject; alone, they strip it.

    If all numbers are off by at most `_CLOSE`, the sentence states the largest deviation. Otherwise, `mostly` means
    that three quarters or more match; if fewer do, the sentence counts them and those that fail. Both list the other
    outcomes.
    """
    if all(verdict.ours is None for verdict in own):
        return " were not tested", f"{len(own)} numbers"
    counts = count_statuses(own)
    good, fitted = counts[Status.MATCHED] + counts[Status.TRUNCATED], counts[Status.FITTED]
    matching = f"{good} of {len(own)} match"
    by_fit = f", {fitted} agree by a fitted convention" if fitted else ""
    if good == len(own):
        return _REPRODUCE, matching + by_fit
    if 2 * fitted > len(own):
        return " agree only by a fitted convention", matching + by_fit
    if (deviations := measure_deviations(own)) and max(deviations) <= _CLOSE:
        median = f"{len(deviations)} different ones, off by {100 * statistics.median(deviations):.1f} % in the median"
        said = f"all {len(own)}; {median}; {matching} to the digit{by_fit}"
        return f" agree within {100 * max(deviations):.1f} %", said
    outcomes = [f"{counts[status]} {words}" for status, words in _OUTCOMES.items() if counts[status]]
    if 4 * good >= 3 * len(own):
        return " mostly reproduce", "; ".join([matching, *outcomes])
    # what was not tested neither holds nor fails, so the first number alone would read as if the rest failed
    failing = counts[Status.EXPLAINED] + counts[Status.UNEXPLAINED] + counts[Status.INCONSISTENT]
    return f": {good} of {len(own)} hold, {failing or 'none'} fail or contradict another passage", "; ".join(outcomes)


def measure_deviations(own: Sequence[Verdict]) -> list[float]:
    """Return the relative deviation of ours from each different printed number; empty if one is no number, or zero."""
    found = {}  # a number that stands in two tables counts once
    for verdict in own:
        if verdict.delta is None or not verdict.ours or not (printed := float(verdict.entry.printed or 0)):
            return []
        found[printed, verdict.entry.unit, verdict.ours] = abs(verdict.delta / printed)
    return list(found.values())


def _compare_speeds(comparison: Comparison, measured: Sequence[Speeds]) -> str:
    """Write a row per device, batch and image size: time and memory of the model and the baseline, with ratios."""
    (our_model, ours), (their_model, theirs) = comparison.ours, comparison.theirs
    rows = []
    for speeds in measured:
        group = speeds.group
        name = f"{str(group).partition(': ')[2]}, commit {name_commits(speeds.rows.values())}{group.caveat}"
        for size in sorted(comparison.sizes, reverse=True):
            row = [name, f"{size}²", _format_row(speeds.rows.get((our_model, None, size)))]
            for attention in ATTENTIONS:
                shown = _format_row(speeds.rows.get((their_model, attention, size)))
                found = speeds.describe_ratio(attention, size), speeds.describe_memory(attention, size)
                against = ", ".join(filter(None, found))
                row.append(": ".join(filter(None, (shown, against))))
            rows.append(row)
    head = [f"{theirs}, {attention} attention: {ours}'s speed and memory against it" for attention in ATTENTIONS]
    said = "A range of a ratio divides the ends of both rows' ranges over processes. "
    said += f"{'; '.join(dict.fromkeys(speeds.describe_sides() for speeds in measured))}."
    if any(HOST in cell for row in rows for cell in row):
        said += f" “{HOST}” does not grow with the image: the processor that launches the kernels sets it, and it says"
        said += f" nothing of the GPU. `{COMMAND}` measures the GPU's time."
    if not any(speeds.group.is_gpu for speeds in measured):
        said += " No GPU has measured both."
    return join([table(["measured on", "image", ours, *head], rows), said])


def _compare_fastest(comparison: Comparison, results: Results) -> str:
    """Compare the fastest rows of model and baseline, over all dtypes, attentions and compilations.

    Only devices, batches and image sizes with several dtypes or compilations have a row; the result is empty if there
    are none. Rows with the host's time are left out, because it says nothing about the device.
    """
    (our_model, ours), (their_model, theirs) = comparison.ours, comparison.theirs
    squares = [[size, size] for size in comparison.sizes]
    measured = [
        (group, results.model_key(row, source.path), row)
        for group, found in results.speed_rows.items()
        for row, source in found
        if group.mode.startswith("infer") and row["image_size"] in squares and row["latency_ms"] and row["host"] != HOST
    ]

    def find_place(found: tuple[SpeedGroup, str, Row]) -> tuple[bool, int, int, str]:
        """Return the kind of device, the batch size and the image size, by which places are sorted, and the device."""
        group, _, row = found
        return group.is_gpu, group.batch_size, row["image_size"][0], group.device

    rows = []
    places = group_by(measured, find_place).items()
    for (_, batch_size, size, device), own in sorted(places, key=lambda item: item[0][:3], reverse=True):
        both = [[row for _, name, row in own if name == model] for model in (our_model, their_model)]
        ways = {(row["dtype"], row.get("compile") or False) for own in both for row in own}
        fastest = [_find_fastest(own) for own in both if own]
        if len(fastest) == 2 and len(ways) > 1 and (ratio := bound_ratio(*fastest)):
            shown = [f"{_format_row(row)} ({_name_way(row)})" for row in fastest]
            name = f"{device.partition(': ')[2]}, batch {batch_size}, commit {name_commits(fastest)}"
            rows.append([name, f"{size}²", *shown, format_ratio(*ratio)])
    if not rows:
        return ""
    says = f"The fastest way of either side, among the ways in which it was measured there ({ours} against {theirs}):"
    shown = table(["measured on", "image", ours, theirs, f"{ours}'s speed against it"], rows)
    return join([says, shown, bullets(_list_emulated(results))])


def _list_emulated(results: Results) -> list[str]:
    """List the dtypes that were not measured on a device, because it would emulate their products."""
    lines = [
        f"{row['dtype']} on {group.device.partition(': ')[2]}: not measured, since {row['reason']}."
        for group, measured in results.speed_rows.items()
        for row, _ in measured
        if row["status"] == EMULATED
    ]
    return list(dict.fromkeys(lines))


def _find_fastest(rows: Sequence[Row]) -> Row:
    """Find the row of the fastest way, which is a combination of dtype, attention and compilation.

    A way's row is the one over most processes, because the fastest of several would be a choice by chance.
    """
    ways = group_by(rows, lambda row: (row["dtype"], row["attention"], row.get("compile"))).values()
    pooled = [max(alike, key=lambda row: row["processes"]) for alike in ways]
    return min(pooled, key=lambda row: row["latency_ms"])


def _name_way(row: Row) -> str:
    """Name the dtype, the attention and the compilation of a row."""
    attention = row["attention"] and f"{row['attention']} attention"
    return ", ".join(filter(None, [row["dtype"], attention, COMPILED.get(row.get("compile"))]))


def _papers_table(reports: Sequence[Report]) -> str:
    """Write a row per paper: the verdict in a few words, and a link to its page."""
    rows = []
    for report in reports:
        asked = [each for each in report.paper.questions if each.says]
        said = group_by(asked, lambda question: judge_question(report.select(question))[0])
        words = "; ".join(f"{' and '.join(each.says for each in own)}{verb}" for verb, own in said.items())
        file, source = report.paper.page, report.paper.read_from
        name = f"{report.paper.name}, read from {source}" if source else report.paper.name
        rows.append([name, words, f"[{file.rpartition('/')[2]}]({file})"])
    return table(["paper", "verdict", "page"], rows)


def note_pipeline(results: Results) -> None:
    """Write results/pipeline.json: the seconds of all stages and of each, how many ran at once, and their commits.

    `repro plan` takes a stage's seconds from it on a fresh clone, which has none beside the records. After
    `repro run --force` the seconds of all are the time since it began, otherwise the sum of the stages'. The file stays
    as it is if the seconds of a record are missing, as on a fresh clone, or if only the report runs again.
    """
    # without the record of the machine, which has no parameters and no results, and without other profiles' cells
    own = [each for each in results.sources if results.is_by_default(each) and "params_hash" in each.identity]
    try:
        runs = {source.unit: read_json(results.paths.root / source.run_file) for source in own}
        stages = {unit: run["seconds"] for unit, run in runs.items()}
        first = min(
            datetime.datetime.fromisoformat(run["finished"]).timestamp() - run["seconds"] for run in runs.values()
        )
        seconds = sum(stages.values())
    except (UserError, LookupError, TypeError, ValueError):  # a file is missing or damaged, or there is no record
        return
    file = results.paths.results / PIPELINE_FILE
    commits = sorted({source.commit for source in own})
    # `repro run` sets the variable: when it began, in seconds since 1970, and how many stages run at once
    began, jobs = (float(each) for each in os.environ.get(RUN_BEGAN, "inf 1").split())
    if first > began - 1:  # a second of slack, because records have whole seconds
        seconds = time.time() - began
    else:  # at least one stage ran earlier
        jobs = 1
        if file.is_file() and read_json(file).get("commits") == commits:
            return
    write_json(file, {"seconds": round(seconds), "jobs": int(jobs), "commits": commits, "stages": stages})


def _answer(question: Question, report: Report) -> _Row:
    """Write the row of a question: its verdict, our numbers next to the paper's, and their origin.

    The origin is that of the records, the reason why nothing was measured, or the equations.
    """
    own = report.select(question)
    verb, text = judge_question(own)
    why = f": {question.why}" if question.why and verb != _REPRODUCE else ""
    but = f", after {report.paper.parts[question.but](report)}" if question.but else ""
    paths = {path for verdict in own for path in verdict.sources}
    sources = [source for source in report.results.sources if source.path in paths]
    if sources:
        origin = describe_origin(sources)
    elif all(verdict.ours is None for verdict in own):
        origin = next((each.reason for each in own if each.reason), "–")
    else:
        origin = "computed from the equations"
    shown = [report.verdicts[name] for name in question.shown]
    if shown and all(verdict.ours is not None for verdict in shown):
        ours = " / ".join(map(format_ours, shown))
        theirs = " / ".join(verdict.entry.printed or "" for verdict in shown)
        text = f"{question.shown_label} {ours} {shown[0].entry.unit} (paper: {theirs}); {text}"
    verdict = strong(verb.lstrip(" :").removeprefix("were "))
    return question.label, f"{verdict}{but}{why}", text, origin


def _orderings(report: Report) -> list[_Row]:
    """Count the paper's ordered pairs that are seen, by data set and choice of rates.

    Each table or figure counts by its group with the most seeds.
    """
    rows = []
    judged = judge_variants(report)
    for (data, rates), alike in group_by(judged, lambda each: (each[0].common["data"], each[0].rates)).items():
        best = {place: of[0] for place, of in group_by(alike, lambda each: each[1].place).items()}
        words = "; ".join(f"{place}: {found.counted}" for place, (_, _, found) in best.items())
        sources = [source for group, where, _ in best.values() for source in group.at(where).values()]
        scope = f"{describe_origin(sources)}; {describe_seeds(sources)}"
        rows.append((f"pairs that the paper orders, seen on {data}, {rates}", "–", words, scope))
    return rows


def _comparison_picture(report: Report) -> str:
    """Show the picture of the baseline comparison with a caption; empty if its rows were not measured."""
    comparison = report.paper.comparison
    if (speeds := find_speeds(comparison, report.results)) is None:
        return ""
    group, source = speeds.group, speeds.source
    commits = name_commits(speeds.rows.values())
    text = f"{comparison.title}: time and peak memory over the image size. {group}, {group.mode}, commit {commits}"
    origin = f"`{source.path}`" if source.stage else f"`{source.path}`, {OUTSIDE}"
    caption = f"{text}{group.caveat} ({origin}). {speeds.describe_crossings()}".rstrip()
    return join([picture(f"figures/{comparison.picture}", comparison.title), caption])


def _format_row(row: Row | None) -> str:
    """Return a speed row's time and memory, or its status if it failed; None is a row that was not measured."""
    if row is None:
        return "not measured"
    if row["status"] != "ok":
        return row["status"]
    memory = f", {significant(row['peak_memory_mib'])} MiB" if row["peak_memory_mib"] is not None else ""
    return f"{significant(row['latency_ms'])} ms{describe_time(row)}{memory}"
