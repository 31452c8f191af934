"""Where the tokens of linearised models look, beside their softmax models, as `repro explain --map attention --data`
recorded it.
"""

from ...report.claims import Report
from ...report.document import Block, Piece, number, table
from ...report.gallery import describe_origin
from ...report.records import Source
from ...report.results import Missing
from .recovery import name_student

COMMAND = "repro explain --map attention --data digits --weights STUDENT --teacher SOFTMAX_MODEL"
HEADER = (
    "student",
    "layer",
    "shift ratio of the keys",
    "reach (patches)",
    "peak",
    "overlap with the teacher",
    "measured on",
)
STATES = ("teacher", "before", "after")


def list_layers(report: Report) -> list[Block]:
    """By layer of each student: the shift of its keys, its reach, its peak, and how much of it is the teacher's."""
    return [table(HEADER, [row for source in _find_records(report) for row in _rows(source, report)])]


def find_attention(report: Report, key: str) -> int | str:
    """A number of the records: of the first, or how many `layers` there are, and in how many of them a student looks
    `farther` than its teacher or its peak is `lower`.
    """
    records = _find_records(report)
    if key in records[0].metrics:
        return records[0].metrics[key]
    field, sign = {"layers": (None, 0), "farther": ("reach_patches", 1), "lower": ("peak_percent", -1)}[key]
    layers = [
        (source.metrics["by_layer"], layer)
        for source in records
        for layer in range(len(source.metrics["by_layer"]["after"]["peak_percent"]))
    ]
    if field is None:
        return len(layers)
    return sum(sign * by["after"][field][layer] > sign * by["teacher"][field][layer] for by, layer in layers)


def _find_records(report: Report) -> list[Source]:
    found = [
        source
        for source in report.results.sources
        if source.metrics.get("by_layer") and source.metrics.get("teacher_hash")
    ]
    if not found:
        raise Missing("no attention is measured yet", COMMAND)
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
