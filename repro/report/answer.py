"""The opening of a page, part of which README also shows: how many numbers match, what was measured and on which device, a few pictures."""

import datetime
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.noise import describe_noise
from ..core.record import read_json, write_json
from ..core.runtime import RUN_BEGAN
from .claims import Report
from .contest import find_speeds
from .document import Block, Line, Link, Picture, Piece, Table, Text, code, plain, prose, strong, table
from .gallery import describe_origin, find_pictures, picture_blocks
from .markdown import render_blocks
from .measured import format_scores
from .ordering import Ordering
from .paper import Contest, Question
from .records import Source, describe_seeds
from .results import Results
from .variants import Group, find_shown, judge_variants
from .verdicts import FITTED, KINDS, MATCHED, NOT_MEASURED, TRUNCATED, Verdict, describe_counts, format_counts, format_ours, significant

PIPELINE_FILE = "pipeline.json"
Fact = tuple[Piece | Line, Piece, Piece | Line]  # what, ours, and its device, profile and scope


def lead_blocks(report: Report) -> tuple[Block, ...]:
    """The opening of a paper's page: its claim, our answer in numbers, pictures, and what is not measured."""
    paper, about = report.paper, report.paper.ledger.paper
    pictures = [name for pattern in paper.pictures for name in find_pictures(report.results, pattern)[:1]]
    shown = [block for name in pictures for block in _lead_picture(name, report)]
    claim = Text(about.title, "emphasis"), f", {about.version}. {paper.claim}".rstrip()
    return claim, *answer_blocks(report), *shown, _open_entries(report)


def readme_blocks(report: Report) -> dict[str, str]:
    """The blocks of README.md by the name of their markers: `results`, a table, and `picture`, with its caption."""
    blocks = {"results": render_blocks(answer_blocks(report, readme=True))}
    if shown := _contest_picture(report):
        blocks["picture"] = render_blocks(shown, "results/")
    return blocks


def note_pipeline(report: Report) -> None:
    """Write results/pipeline.json: how long all stages and each took, how many ran at once, their commits, device and profile.

    After `repro run --force` that is the time since it began, else the sum of the stages' seconds. These lie beside the records, where
    Git does not keep them. Where one is missing or damaged, as on a fresh clone, the file stays as it is; likewise where it was written
    for records of the same commits and only the report runs again.
    """
    # the record of the machine has no code hash, and is none of results
    own = [source for source in report.results.sources if source.stage is not None and "code_hash" in source.identity]
    files = [report.results.paths.root / source.run_file for source in own]
    if not files or not all(file.is_file() for file in files):
        return
    file, commits = report.results.paths.results / PIPELINE_FILE, sorted({str(source.identity["parent_commit"]) for source in own})
    began, jobs = (float(each) for each in os.environ.get(RUN_BEGAN, "inf 1").split())
    try:
        runs = [read_json(file) for file in files]
        first = min(datetime.datetime.fromisoformat(run["finished"]).timestamp() - run["seconds"] for run in runs)
        stages = {source.unit: run["seconds"] for source, run in zip(own, runs, strict=True)}
        seconds = sum(stages.values())
    except (UserError, LookupError, TypeError, ValueError):
        return
    if first > began - 1:  # the records say whole seconds
        seconds = time.time() - began
    else:  # at least one stage is of an earlier run
        jobs = 1
        if file.is_file() and read_json(file).get("commits") == commits:
            return
    origin = describe_origin([source for source in own if source.is_trained], report.named)
    noted = {"seconds": round(seconds), "jobs": int(jobs), "origin": origin, "commits": commits, "stages": stages}
    write_json(file, noted)


def answer_blocks(report: Report, *, readme: bool = False) -> tuple[Table, Line]:
    """A table of facts in which every row names its device, its profile and its scope, and our verdicts in a sentence.

    What the paper says of its own model comes first. That of `readme` also has the time of the pipeline.
    """
    paper, results = report.paper, report.results
    counts = f"Of the paper's {len(report.all)} numbers and statements, {describe_counts(report.all)}."
    if readme:
        counts = f"All {len(report.all)} numbers and statements of the paper: {format_counts(report.all)}."
    facts: list[Fact] = []
    for question in paper.questions:
        facts.append(_answer(question, [report.verdicts[name] for name in question.find(paper.ledger)], report))
    if readme and (pipeline := results.paths.results / PIPELINE_FILE).is_file():
        noted = read_json(pipeline)
        at_once = f", {noted['jobs']} at once" if noted.get("jobs", 1) > 1 else ""
        facts.append((("the stages of ", code("make reproduce")), f"{noted['seconds'] / 60:.0f} min{at_once}", noted["origin"]))
    if paper.primary:
        facts += _embedded_scores(report, 1 if readme else None)
    facts += _orderings(report)
    if paper.contest:
        facts += _contest_facts(paper.contest, results)
    gpus = dict.fromkeys(source.device for source in results.sources if source.device.startswith("cuda"))
    if gpus:
        facts.append(("anything on a GPU", ", ".join(gpus), "devices of the records"))
    else:
        facts.append(("anything on a GPU", strong("not measured"), "no record is of a GPU"))
    scopes = [scope for *_, scope in facts]
    said = ["the same" if scope == above else scope for above, scope in zip([None, *scopes], scopes, strict=False)]
    rows = [(what, ours, scope) for (what, ours, _), scope in zip(facts, said, strict=True)]
    return table(["", "ours", "device, profile, scope"], rows), (counts,)


def _answer(question: Question, own: list[Verdict], report: Report) -> Fact:
    """How many of a question's verdicts match, after the numbers that it shows."""
    paths = {path for verdict in own for path in verdict.sources}
    sources = [source for source in report.results.sources if source.path in paths]
    computed = "computed from the equations" if any(verdict.ours is not None for verdict in own) else "–"
    reason = next((verdict.reason for verdict in own if verdict.reason and verdict.ours is None), "–") if computed == "–" else computed
    origin = describe_origin(sources, report.named) if sources else reason
    words = [verdict.status for verdict in own]
    matched, truncated = (words.count(status.word) for status in (MATCHED, TRUNCATED))
    text = f"{matched + truncated} of {len(own)} match" + (f", {truncated} of them by truncation" if truncated else "")
    if fitted := words.count(FITTED.word):
        text += f", {fitted} agree by a fitted convention"
    if all(verdict.ours is None for verdict in own):
        text += "; none is measured"
    shown = [report.verdicts[name] for name in question.shown]
    if shown and all(verdict.ours is not None for verdict in shown):
        ours = " / ".join(plain(format_ours(verdict)) for verdict in shown)
        theirs = " / ".join(verdict.entry.printed or "" for verdict in shown)
        text = f"{question.shown_label} {ours} {shown[0].entry.unit} (paper: {theirs}); {text}"
    return question.label, text, origin


def _embedded_scores(report: Report, most_scores: int | None) -> list[Fact]:
    """The pipeline's runs on embedded data, one row for each data set and task; they are compared with no number of the paper."""
    results, shown_elsewhere = report.results, find_shown(report)
    groups: dict[tuple[str, str], list[Source]] = {}
    labels_of: dict[tuple[str, str], Mapping[str, str]] = {}
    for source in results.score_sources:
        labels = results.scores.get(source.stage or "", {})
        if labels and not results.is_full(source) and source.path not in shown_elsewhere:
            group = source.metrics["data"], next(iter(labels))
            groups.setdefault(group, []).append(source)
            labels_of[group] = labels
    groups = {key: _prefer_seeds(sources, report) for key, sources in groups.items()}
    facts = []
    for (data, key), sources in groups.items():
        first = sources[0].metrics
        labels = dict(list(labels_of[data, key].items())[:most_scores])
        if len(sources) == 1:
            ours = f"{first['model'].partition('_patch')[0]}: {format_scores(first, labels, 1)}"
        else:
            ranked = sorted((source.metrics for source in sources), key=lambda m: -m[key])
            ours = ", ".join(f"{m['model'].partition('_patch')[0]} {format_scores(m, {key: ''}, 1)}" for m in ranked)
        if reference := first.get("without_learning"):
            ours += f"; without learning: {format_scores(reference, labels, 1)}"
        shortest, longest = min(lengths := [source.metrics["epochs"] for source in sources]), max(lengths)
        length = f"{longest} epochs" if shortest == longest else f"{shortest} to {longest} epochs"
        images = f"{first['held_out_images']:.0f} held-out images"
        scope = f"{describe_origin(sources, report.named)}; {images}, {length}, {describe_seeds(sources)}"
        scope += "" if most_scores else "; compared with no number of the paper"
        facts.append((f"{labels[key]} on embedded {data}", ours, scope))
    return facts


def _orderings(report: Report) -> list[Fact]:
    """How many of the pairs that the paper orders are seen, a row for each data set; of each table the group with the most seeds."""
    best: dict[tuple[str, str], tuple[Group, Ordering]] = {}
    for group, where, found in judge_variants(report):
        key = group.common["data"], where.place
        if key not in best or group.most_seeds > best[key][0].most_seeds:
            best[key] = group, found
    facts: list[Fact] = []
    for data in dict.fromkeys(data for data, _ in best):
        of_data = {place: each for (of, place), each in best.items() if of == data}
        words = "; ".join(f"{place}: {_count_pairs(found)}" for place, (_, found) in of_data.items())
        sources = [source for group, _ in of_data.values() for source in group.variants.values()]
        scope = f"{describe_origin(sources, report.named)}; {describe_seeds(sources)}"
        facts.append((f"pairs that the paper orders, seen on embedded {data}", words, scope))
    return facts


def _count_pairs(found: Ordering) -> str:
    """How many of the paper's pairs are seen, and how many contradicted; only the word where the budget is insufficient."""
    if found.word == "insufficient budget":
        return found.word
    seen, contradicted = (sum(pair.word == word for pair in found.pairs) for word in ("ordering seen", "ordering contradicted"))
    return f"{seen} of {len(found.pairs)}" + (f", {contradicted} contradicted" if contradicted else "")


def _prefer_seeds(sources: list[Source], report: Report) -> list[Source]:
    """The records of the pipeline; where the same training was repeated by hand with more seeds, that record instead."""
    results = report.results

    def key(source: Source) -> tuple:
        return results.model_key(source.metrics, source.path), source.metrics.get("recipe_hash")

    repeated: dict[tuple, Source] = {}
    for source in results.score_sources:
        if source.is_trained and source.stage is None:
            repeated[key(source)] = max(repeated.get(key(source), source), source, key=lambda each: len(each.metrics["by_seed"]))
    rivals = [(source, repeated.get(key(source), source)) for source in sources]
    return [max(pair, key=lambda each: len(each.metrics.get("by_seed", ()))) for pair in rivals]


def _contest_facts(contest: Contest, results: Results) -> list[Fact]:
    speeds = find_speeds(contest, results)
    if speeds is None:
        return [(contest.title, "not measured", prose("no record has rows of both: `repro efficiency`"))]
    how = "a stage of the pipeline" if speeds.source.stage else "run by hand"
    facts = []
    for size in contest.sizes:
        ours = speeds.rows.get((contest.ours[0], None, size))
        shown = [f"{contest.ours[1]}: {_format_row(ours)}"]
        for attention in ("fused", "unfused"):
            row = speeds.rows.get((contest.theirs[0], attention, size))
            ratio = ""
            if ours and row and ours["latency_ms"] and row["latency_ms"] and not (ours["noisy"] or row["noisy"]):
                ratio = f" ({contest.ours[1]} {significant(row['latency_ms'] / ours['latency_ms'])}× as fast)"
            shown.append(f"{contest.theirs[1]}, {attention}: {_format_row(row)}{ratio}")
        facts.append((f"{contest.title} at {size}²", "; ".join(shown), f"{speeds.scope}; {how}"))
    return facts


def _open_entries(report: Report) -> Line:
    kinds = Counter(verdict.entry.kind for verdict in report.all if verdict.status == NOT_MEASURED.word)
    named = "; ".join(f"{label}: {kinds[kind]}" for kind, label in KINDS.items() if kinds[kind])
    text = f": {kinds.total()} of the {len(report.all)} entries" + (f" ({named}). " if named else ". ")
    return strong("Not measured"), text, Link("Why, and what would measure them", "Not measured, and why"), "."


def _lead_picture(name: str, report: Report) -> tuple[Line, Line]:
    contest, results = report.paper.contest, report.results
    if contest and name == f"figures/{contest.picture}" and (blocks := _contest_picture(report)):
        return blocks
    figure = next((each for each in report.paper.figures if each.files and name in find_pictures(results, each.files)), None)
    shown, origin = picture_blocks(name, f"{figure.place}, ours" if figure else Path(name).stem, report)
    about = f"Ours of {figure.place}, where the paper shows {figure.shows}. " if figure else ""
    return shown, (about, *origin)


def _contest_picture(report: Report) -> tuple[Line, Line] | None:
    """The picture of the contest and its caption; None where its rows were not measured."""
    contest = report.paper.contest
    if contest is None or (speeds := find_speeds(contest, report.results)) is None:
        return None
    text = f"{contest.title} over the image size: time and peak memory of a step (logarithmic). {speeds.scope} ("
    caption = text, code(speeds.source.path), ")." if speeds.source.stage else ", run by hand)."
    return (Picture(f"figures/{contest.picture}", contest.title),), caption


def _format_row(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    if row["status"] != "ok":
        return row["status"]
    memory = f", {significant(row['peak_memory_mib'])} MiB" if row["peak_memory_mib"] is not None else ""
    noise = f", {describe_noise(row)}" if row["noisy"] else ""
    return f"{significant(row['latency_ms'])} ms{memory}{noise}"
