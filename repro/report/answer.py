"""What a page opens with, and what README shows of it: our verdicts in numbers, what was measured and on what, two or three pictures."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.figures import against_resolution
from .claims import Verdict
from .document import Block, Code, Emphasis, Line, Link, Paragraph, Picture, Piece, Strong, Table, paragraph, table
from .gallery import describe_origin, find_pictures, picture_blocks
from .markdown import render_block
from .measured import format_scores
from .paper import Contest, Paper, Question
from .records import Source
from .results import Results, SpeedGroup
from .statuses import KINDS, MATCHED, NOT_MEASURED, count_statuses, format_counts
from .variants import find_shown
from .wording import format_ours, significant

Fact = tuple[Line, Line, Line]  # what, ours, and its device, profile and scope


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rows of one record in which the model and the baseline of a contest meet.

    Args:
        group, source: their device and conditions, and the record.
        rows: (registered name, attention, image size) -> row.
    """

    group: SpeedGroup
    source: Source
    rows: Mapping[tuple[str, str | None, int], Mapping[str, Any]]

    @property
    def scope(self) -> str:
        """Device and conditions, in words."""
        return f"{self.group}, {self.group.mode}"


def lead_blocks(paper: Paper, verdicts: Mapping[str, Verdict], results: Results, named: str) -> tuple[Block, ...]:
    """The opening of a paper's page: its claim, our answer in numbers, pictures, and what is not measured."""
    about = paper.ledger.paper
    pictures = [name for pattern in paper.pictures for name in find_pictures(results, pattern)[:1]]
    shown = [block for name in pictures for block in _lead_picture(name, paper, results, named)]
    return (
        paragraph(Emphasis(about.title), f", {about.version}. {paper.claim}".rstrip()),
        facts_table(paper, verdicts, results, named),
        *shown,
        _open_questions(verdicts),
    )


def readme_blocks(paper: Paper, verdicts: Mapping[str, Verdict], results: Results, named: str) -> dict[str, str]:
    """The blocks of README.md by the name of their markers: `results`, a table, and `picture`, with its caption."""
    blocks = {"results": render_block(facts_table(paper, verdicts, results, named, is_brief=True))}
    if paper.contest and (speeds := find_speeds(paper.contest, results)):
        shown = Paragraph((Picture(f"figures/{paper.contest.picture}", _contest_title(paper.contest)),))
        blocks["picture"] = f"{render_block(shown, 'results/')}\n\n{render_block(_caption(paper.contest, speeds))}"
    return blocks


def draw_contest(paper: Paper, results: Results, folder: Path) -> None:
    """Draw the picture of a paper's contest into `folder`, where its rows were measured."""
    contest = paper.contest
    if contest is None or (speeds := find_speeds(contest, results)) is None:
        return
    series = {family: [row for key, row in speeds.rows.items() if key[:2] == model] for family, model in contest.series.items()}
    title = f"{_contest_title(contest)} ({speeds.scope})"
    path = folder / contest.picture.removesuffix(".png")
    against_resolution(path, {family: rows for family, rows in series.items() if rows}, title, ("latency_ms", "peak_memory_mib"))


def facts_table(paper: Paper, verdicts: Mapping[str, Verdict], results: Results, named: str, *, is_brief: bool = False) -> Table:
    """The answer in numbers; every row names its device, its profile and its scope. `is_brief` joins questions without any answer."""
    entries = (f"{len(verdicts)}: {format_counts(verdicts.values())}",)
    facts: list[Fact] = [(("numbers and statements of the paper",), entries, ("the ledger, judged by code",))]
    own = {question: [verdicts[name] for name in question.find(paper.ledger)] for question in paper.questions}
    is_open = {question: all(verdict.ours is None for verdict in of_question) for question, of_question in own.items()}
    facts += [_answer(q, own[q], verdicts, results, named) for q in own if not (is_brief and is_open[q])]
    if is_brief and (left := [question for question in own if is_open[question]]):
        label = " and ".join(question.label for question in left)
        facts.append(((label,), (f"none of {sum(len(own[q]) for q in left)} is measured",), ("no run under the paper's conditions",)))
    if paper.primary:
        facts += _embedded_scores(results, find_shown(paper, results), named)
    if paper.contest:
        facts += _contest_facts(paper.contest, results)
    facts.append(_gpu_fact(results))
    return table(["", "ours", "device, profile, scope"], facts)


def find_speeds(contest: Contest, results: Results) -> Speeds | None:
    """The record with most of the contest's rows; among equals a GPU's, then the one with most image sizes.

    None where no record has both models.
    """
    models = {(contest.ours[0], None), *((contest.theirs[0], attention) for attention in ("fused", "unfused"))}
    candidates: dict[tuple[SpeedGroup, str], Speeds] = {}
    for group, rows in results.speed_rows.items():
        for row, source in rows:
            key = (results.model_key(row, source.path), row["attention"])
            height, width = row["image_size"]
            if group.mode == "infer" and key in models and height == width:
                found = candidates.setdefault((group, source.path), Speeds(group, source, {}))
                found.rows[(*key, height)] = row

    def rank(speeds: Speeds) -> tuple:
        wanted = sum((*model, size) in speeds.rows for model in models for size in contest.sizes)
        return wanted, speeds.group.device.startswith("cuda"), len(speeds.rows), speeds.source.path

    both = [speeds for speeds in candidates.values() if {name for name, _, _ in speeds.rows} == {contest.ours[0], contest.theirs[0]}]
    return max(both, key=rank, default=None)


def _answer(question: Question, own: list[Verdict], verdicts: Mapping[str, Verdict], results: Results, named: str) -> Fact:
    shown = [verdicts[name] for name in question.shown]
    paths = {path for verdict in own for path in verdict.sources}
    sources = [source for source in results.sources if source.path in paths]
    origin = describe_origin(sources, named) if sources else next((verdict.reason for verdict in own if verdict.reason), "–")
    numbers = _numbers(question, shown)
    return (question.label,), (*numbers, *(("; ",) if numbers else ()), _count_matches(own)), (origin,)


def _numbers(question: Question, shown: list[Verdict]) -> Line:
    if not shown or any(verdict.ours is None for verdict in shown):
        return ()
    ours, theirs = (" / ".join(numbers) for numbers in zip(*((format_ours(v), v.entry.printed or "") for v in shown), strict=False))
    return (f"{question.shown_label} {ours} {shown[0].entry.unit} (paper: {theirs})",)


def _count_matches(own: list[Verdict]) -> str:
    if not any(verdict.ours is not None for verdict in own):
        return f"none of {len(own)} is measured"
    truncated = sum(verdict.status == MATCHED.word and verdict.how == "truncation" for verdict in own)
    matched = sum(verdict.status == MATCHED.word for verdict in own)
    return f"{matched} of {len(own)} match" + (f", {truncated} of them by truncation" if truncated else "")


def _embedded_scores(results: Results, shown_elsewhere: set[str], named: str) -> list[Fact]:
    """The pipeline's own runs on embedded data, one row for each data set and score; no number of the paper is beside them."""
    groups: dict[tuple[str, str], list[Source]] = {}
    for source in results.score_sources:
        labels = results.scores.get(source.stage or "", {})
        if labels and not results.is_full(source) and source.path not in shown_elsewhere:
            groups.setdefault((source.metrics["data"], next(iter(labels))), []).append(source)
    facts = []
    for (data, key), sources in groups.items():
        first = sources[0].metrics
        labels = results.scores[sources[0].stage or ""]
        if len(sources) == 1:
            ours = f"{_short(first['model'])}: {format_scores(first, labels, 1)}"
        else:
            ranked = sorted(sources, key=lambda source: -source.metrics[key])
            ours = ", ".join(f"{_short(s.metrics['model'])} {format_scores(s.metrics, {key: ''}, 1)}" for s in ranked)
        if reference := first.get("without_learning"):
            ours += f"; without learning: {format_scores(reference, labels, 1)}"
        lengths = " or ".join(dict.fromkeys(f"{source.metrics['epochs']} epochs" for source in sources))
        seeds = " or ".join(dict.fromkeys(_count_seeds(source) for source in sources))
        scope = f"{describe_origin(sources, named)}; {first['val_images']:.0f} held-out images, {lengths}, {seeds}; compared with no number of the paper"
        facts.append(((f"{labels[key]} on embedded {data}",), (ours,), (scope,)))
    return facts


def _contest_facts(contest: Contest, results: Results) -> list[Fact]:
    speeds = find_speeds(contest, results)
    title = _contest_title(contest)
    if speeds is None:
        return [((title,), ("not measured",), ("no record has rows of both: ", Code("repro efficiency")))]
    how = "a stage of the pipeline" if speeds.source.stage else "run by hand"
    facts = []
    for size in contest.sizes:
        ours = speeds.rows.get((contest.ours[0], None, size))
        against = {attention: speeds.rows.get((contest.theirs[0], attention, size)) for attention in ("fused", "unfused")}
        shown = [f"{contest.ours[1]} {_format_row(ours)}"]
        for attention, row in against.items():
            ratio = ""
            if ours and row and ours["latency_ms"] and row["latency_ms"]:
                ratio = f", so {contest.ours[1]} is {significant(row['latency_ms'] / ours['latency_ms'])}× as fast"
            shown.append(f"{contest.theirs[1]} with {attention} attention {_format_row(row)}{ratio}")
        facts.append(((f"{title} at {size}²",), ("; ".join(shown),), (f"{speeds.scope}; {how}",)))
    return facts


def _gpu_fact(results: Results) -> Fact:
    devices = list(dict.fromkeys(source.device for source in results.sources if source.device.startswith("cuda")))
    ours: Piece = ", ".join(devices) if devices else Strong("not measured")
    return ("anything on a GPU",), (ours,), ("devices of the records" if devices else "no record is of a GPU",)


def _open_questions(verdicts: Mapping[str, Verdict]) -> Paragraph:
    counts = {kind: count_statuses(v for v in verdicts.values() if v.entry.kind == kind)[NOT_MEASURED.word] for kind in KINDS}
    named = "; ".join(f"{KINDS[kind]}: {count}" for kind, count in counts.items() if count)
    text = f": {sum(counts.values())} of the {len(verdicts)} entries" + (f" ({named}). " if named else ". ")
    return paragraph(Strong("Not measured"), text, Link("Why, and what would measure them", "Not measured, and why"), ".")


def _lead_picture(name: str, paper: Paper, results: Results, named: str) -> tuple[Paragraph, Paragraph]:
    contest = paper.contest
    if contest and name == f"figures/{contest.picture}" and (speeds := find_speeds(contest, results)):
        return paragraph(Picture(name, _contest_title(contest))), _caption(contest, speeds)
    figure = next((figure for figure in paper.figures if figure.files and name in find_pictures(results, figure.files)), None)
    shown, origin = picture_blocks(name, f"{figure.place}, ours" if figure else Path(name).stem, paper, results, named)
    about = f"Ours of {figure.place}, where the paper shows {figure.shows}. " if figure else ""
    return shown, Paragraph((about, *origin.line))


def _caption(contest: Contest, speeds: Speeds) -> Paragraph:
    how = "" if speeds.source.stage else ", run by hand"
    return paragraph(
        f"{_contest_title(contest)} over the image size: time and peak memory of a step, on logarithmic axes. Measured on {speeds.scope} (",
        Code(speeds.source.path),
        f"{how}).",
    )


def _contest_title(contest: Contest) -> str:
    return f"{contest.ours[1]} against {contest.theirs[1]}"


def _format_row(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    if row["status"] != "ok":
        return row["status"]
    memory = f" and {significant(row['peak_memory_mib'])} MiB" if row["peak_memory_mib"] is not None else ""
    return f"{significant(row['latency_ms'])} ms{memory}"


def _short(model: str) -> str:
    return model.partition("_patch")[0]


def _count_seeds(source: Source) -> str:
    seeds = len(source.metrics.get("by_seed", ()))
    return "one seed" if seeds == 1 else f"{seeds} seeds"
