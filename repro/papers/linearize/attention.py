"""Where the tokens of linearised models look, beside their softmax models, as `repro explain --map attention --data`
recorded it.
"""

from collections.abc import Sequence

from ...report.claims import Report
from ...report.document import Block, Bullets, Piece, Section, number, prose, table
from ...report.gallery import describe_origin
from ...report.records import Source
from .recovery import name_student

COMMAND = "repro explain --map attention --data digits --weights STUDENT --teacher SOFTMAX_MODEL"
STATES = ("teacher", "before", "after")


def attention_section(report: Report) -> list[Section]:
    """The section of the paper's page; none without records."""
    return [Section("Where the tokens look", describe_attention(report))] if _find_records(report) else []


def describe_attention(report: Report) -> list[Block]:
    """By layer, of each student: the shift of its keys, how far its tokens look, their peaks, and how much of it is the
    teacher's.
    """
    records = _find_records(report)
    if not records:
        return [prose(f"No attention is measured yet: `{COMMAND}`.")]
    m = records[0].metrics
    about = f"Means over {m['images']} images of {m['data']}, all heads and {m['tokens']} tokens. In each cell: teacher; student before training; after."
    header = [
        "student",
        "layer",
        "shift ratio of the keys",
        "reach (patches)",
        "peak",
        "overlap with the teacher",
        "measured on",
    ]
    rows = [row for source in records for row in _rows(source, report)]
    text = (
        "The shift ratio is ‖mean of k‖ / mean of ‖k‖; it is 1 for equal keys, and 1/√N for N independent ones. The attention of a student "
        "is its implicit one, ‖∂o_i/∂v_j‖_F/√d as a share of its row. Reach is the mean distance of a token from what it looks at, peak the "
        "largest share, and overlap the shares that teacher and student have in common; `even` is what looking everywhere alike gives."
    )
    return [prose(about), table(header, rows), Bullets([_judge(records)]), prose(text)]


def _find_records(report: Report) -> list[Source]:
    found = [
        source
        for source in report.results.sources
        if source.metrics.get("by_layer") and source.metrics.get("teacher_hash")
    ]
    return sorted(
        found,
        key=lambda source: (source.metrics["model"], name_student(source.metrics), source.metrics["weights_hash"]),
    )


def _rows(source: Source, report: Report) -> list[list[Piece]]:
    by = source.metrics["by_layer"]
    name, origin = name_student(source.metrics), describe_origin([source], report.named)
    rows = []
    for layer in range(len(by["teacher"]["reach_patches"])):
        shift, reach, peak = (
            "; ".join(form.format(by[state][key][layer]) for state in STATES)
            for key, form in (("shift_ratio", "{:.2f}"), ("reach_patches", "{:.2f}"), ("peak_percent", "{:.1f} %"))
        )
        reach += f" (even {by['even']['reach_patches'][layer]:.2f})"
        overlap = "; ".join(f"{by[state]['overlap_percent'][layer]:.0f} %" for state in STATES[1:])
        overlap += f" (even {by['even']['overlap_percent'][layer]:.0f} %)"
        rows.append([name, number(layer + 1), *map(number, (shift, reach, peak, overlap)), origin])
    return rows


def _judge(records: Sequence[Source]) -> str:
    """What the paper says of its figure, and what is so here."""
    layers = [
        (source.metrics["by_layer"], layer)
        for source in records
        for layer in range(len(source.metrics["by_layer"]["after"]["peak_percent"]))
    ]
    farther = sum(by["after"]["reach_patches"][layer] > by["teacher"]["reach_patches"][layer] for by, layer in layers)
    lower = sum(by["after"]["peak_percent"][layer] < by["teacher"]["peak_percent"][layer] for by, layer in layers)
    return (
        "The paper says that such a learner looks farther than softmax attention, and without its peaks: after training, students here look "
        f"farther than their teachers in {farther} of {len(layers)} layers, and their peaks are lower in {lower} of {len(layers)}."
    )
