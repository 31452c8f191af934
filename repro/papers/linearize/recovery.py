"""How much of a softmax model's accuracy its students recover on embedded data: before training, after it, and in how
many steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.statistics import describe_sample
from ...report.claims import Report
from ...report.document import Block, Bullets, Line, Piece, code, number, table
from ...report.gallery import describe_origin
from ...report.records import Source, describe_seeds
from ...report.results import Missing

SCORE, UNTRAINED = "top1_percent", "untrained_top1_percent"
HEADER = ("student", "trained", "steps", "seeds", "before training", "top-1", "of the teacher's", "measured on")


def list_students(report: Report) -> list[Block]:
    """For each softmax model its accuracy, and those of its students, best first; then the same models trained from
    random weights.
    """
    groups = _find_students(report)
    if not groups:
        raise Missing("no model is linearised yet", "repro linearize --cell t5_nano_digits")
    blocks: list[Block] = []
    for init, students in groups.items():
        teacher = next(
            (source for source in report.results.sources if source.metrics.get("weights_hash") == init), None
        )
        m = students[0].metrics
        known: list[Piece] = ["Students of the softmax model ", code(m["init"]["weights"])]
        if teacher is not None:
            length = f"{teacher.metrics['steps']:,} steps ({describe_seeds([teacher])})"
            known.append(f": top-1 {_format(teacher.metrics)} after {length}")
        known.append(f". All on {m['data']}, {m['held_out_images']} images of {m['split']}.")
        rows = [_row(source, teacher, report) for source in students]
        blocks += [tuple(known), table(HEADER, rows)]
        if lines := [_describe_scratch(source, report) for source in _find_scratch(report, students)]:
            blocks.append(Bullets(lines))
    return blocks


def _find_students(report: Report) -> dict[str, list[Source]]:
    """Hash of a teacher's weights -> its students, best first; of two records of one student that with more seeds."""
    found: dict[str, dict[tuple, Source]] = {}
    for source in report.results.sources:
        m = source.metrics
        if source.is_trained and UNTRAINED in m and m.get("init"):
            own = found.setdefault(m["init"]["weights_hash"], {})
            key = (name_student(source.metrics), m.get("freeze", False), m["steps"], m["data"])
            if key not in own or len(m["by_seed"]) > len(own[key].metrics["by_seed"]):
                own[key] = source
    return {init: sorted(own.values(), key=lambda source: -source.metrics[SCORE]) for init, own in found.items()}


def _find_scratch(report: Report, students: Sequence[Source]) -> list[Source]:
    """Trainings of the students' model from random weights, on the same data."""
    shared = {(source.metrics["model"], source.metrics["data"]) for source in students}
    return [
        source
        for source in report.results.sources
        if source.is_trained
        and not source.metrics.get("init")
        and (source.metrics.get("model"), source.metrics.get("data")) in shared
    ]


def name_student(metrics: Mapping[str, Any]) -> str:
    """The choices of a student in words; `metrics` are those of a record."""
    defaults = {"inner": "swiglu", "key_norm": "instance", "dwc": "qk", "neighbours": 0}
    chosen = {key: metrics["options"].get(key, value) for key, value in defaults.items()}
    near = f", neighbours {chosen['neighbours']}" if chosen["neighbours"] else ""
    return f"{chosen['inner']}, norm {chosen['key_norm']}, dwc {chosen['dwc']}{near}"


def _row(source: Source, teacher: Source | None, report: Report) -> list[Piece | Line]:
    m = source.metrics
    untrained = describe_sample([run[UNTRAINED] for run in m["by_seed"]]).mean
    share = number(f"{100 * m[SCORE] / teacher.metrics[SCORE]:.1f} %") if teacher else "–"
    trained = "new weights alone" if m.get("freeze") else "all weights"
    counts = number(f"{m['steps']:,}"), number(len(m["by_seed"]))
    scores = number(f"{untrained:.1f} %"), number(_format(m))
    return [name_student(source.metrics), trained, *counts, *scores, share, describe_origin([source], report.named)]


def _describe_scratch(source: Source, report: Report) -> Line:
    text = f" from random weights ({name_student(source.metrics)}): top-1 {_format(source.metrics)} after {source.metrics['steps']:,} steps"
    return (
        code(source.metrics["model"]),
        text,
        f" ({describe_seeds([source])}; {describe_origin([source], report.named)}).",
    )


def _format(metrics: Mapping[str, Any]) -> str:
    """The mean and its interval."""
    sample = describe_sample([run[SCORE] for run in metrics["by_seed"]], is_share=True)
    low, high = sample.ci95 or (0.0, 0.0)
    return f"{sample.mean:.1f} %" + (f" [{low:.1f}, {high:.1f}]" if sample.ci95 else "")
