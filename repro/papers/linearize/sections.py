"""The sections of the linearization's page besides the tables: the students' accuracy, and maps of their attention."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.statistics import describe_sample
from ...report.claims import Report
from ...report.markdown import bullets, join, number, tabulate
from ...report.ordering import TOP1, compare_trainings
from ...report.records import (
    Missing,
    Source,
    describe_origin,
    describe_seeds,
    group_by,
    keep_best,
    show_mean,
    warn_of_seeds,
)

UNTRAINED = "untrained_top1_percent"
_COMMAND = "repro explain --map attention --data digits --weights STUDENT --teacher SOFTMAX_MODEL"
SCRATCH = "repro profile use digits && dvc repro ablate@t5_nano_digits_scratch_5e_5s"
STATES = ("teacher", "before", "after")


def list_students(report: Report) -> str:
    """Tabulate the accuracies of each softmax model's students, best first, then of these models from random weights.

    Raises:
        Missing: no model is linearised.
    """
    sources = report.results.sources
    found = report.results.require(
        lambda each: each.most_seeds and UNTRAINED in each.metrics and each.metrics.get("init"),
        "no model is linearised yet",
        "repro linearize --cell t5_nano_digits",
    )

    def name(each: Source) -> tuple:
        m = each.metrics
        return _find_teacher(each), name_student(m), m.get("freeze", False), m["steps"], m["data"]

    best = keep_best(found, name)
    blocks: list[str] = []
    for init, alike in group_by(best, _find_teacher).items():
        students = sorted(alike, key=lambda each: -each.metrics[TOP1])
        teacher = next((source for source in sources if source.metrics.get("weights_hash") == init), None)
        m = students[0].metrics
        known = f"Students of the softmax model `{m['init']['weights']}`"
        if teacher is not None:
            length = f"{teacher.metrics['steps']:,} steps ({describe_seeds([teacher])})"
            known += f": top-1 {_show_score(teacher)} after {length}"
        known += f". All on {m['data']}, {m['held_out_images']} images of {m['split']}."
        blocks += [warn_of_seeds(students), known, tabulate(_list_columns(teacher, report), students)]
        blocks.append(bullets(_describe_scratch(each, report) for each in _find_scratch(students, sources)))
    return join(blocks)


def _find_scratch(students: Sequence[Source], sources: Sequence[Source]) -> list[Source]:
    """Find the trainings of the students' models from random weights on the same data; the shortest comes first."""
    shared = {(each.metrics["model"], each.metrics["data"]) for each in students}
    trained = (each for each in sources if each.most_seeds and not each.metrics.get("init"))
    found = (each for each in trained if (each.metrics.get("model"), each.metrics.get("data")) in shared)
    return sorted(found, key=lambda each: each.metrics["steps"])


def name_student(metrics: Mapping[str, Any]) -> str:
    """Describe a student's options in words; `metrics` are those of its record."""
    defaults = {"inner": "swiglu", "key_norm": "instance", "dwc": "qk", "neighbours": 0}
    chosen = {key: metrics["options"].get(key, value) for key, value in defaults.items()}
    near = f", neighbours {chosen['neighbours']}" if chosen["neighbours"] else ""
    return f"{chosen['inner']}, norm {chosen['key_norm']}, dwc {chosen['dwc']}{near}"


def list_layers(report: Report) -> str:
    """Tabulate each layer of each student: the shift of its keys, reach and peak of its attention, and its overlap with
    the teacher's attention.
    """

    def show(key: str, form: str, even: str | None = None, states: tuple[str, ...] = STATES) -> Callable[..., str]:
        """Return a column with a layer's value in each state, and with `even` its value for uniform attention."""

        def cell(row: tuple[Source, int]) -> str:
            source, layer = row
            by_state = source.metrics["by_layer"].items()
            values = {state: form.format(of[key][layer]) for state, of in by_state if key in of}
            shown = "; ".join(values[state] for state in states)
            return shown + (f" (even {values['even']})" if even else "")

        return cell

    columns = {
        "student": lambda row: name_student(row[0].metrics),
        "layer": lambda row: row[1] + 1,
        "shift ratio of the keys": show("shift_ratio", "{:.2f}"),
        "reach (patches)": show("reach_patches", "{:.2f}", "even"),
        "peak": show("peak_percent", "{:.1f} %"),
        "overlap with the teacher": show("overlap_percent", "{:.0f} %", "even", STATES[1:]),
        "measured on": lambda row: describe_origin([row[0]]),
    }
    return tabulate(columns, _find_layers(report))


def find_attention(report: Report, key: str) -> int | str:
    """Return a field of the first record, or a count of layers over all students.

    `layers` counts all of them; `farther` and `lower` count those whose reach is larger, or whose peak is lower, than
    the teacher's.
    """
    layers = _find_layers(report)
    if key == "layers":
        return len(layers)
    if key not in ("farther", "lower"):
        return layers[0][0].metrics[key]
    field, sign = {"farther": ("reach_patches", 1), "lower": ("peak_percent", -1)}[key]
    states = [(source.metrics["by_layer"], layer) for source, layer in layers]
    return sum(sign * by["after"][field][layer] > sign * by["teacher"][field][layer] for by, layer in states)


def _find_layers(report: Report) -> list[tuple[Source, int]]:
    """Return (record, layer) for every layer of every student whose attention was measured."""
    found = report.results.require(
        lambda source: source.metrics.get("by_layer") and source.metrics.get("teacher_hash"),
        "no attention is measured yet",
        _COMMAND,
    )
    found.sort(key=lambda each: (each.metrics["model"], name_student(each.metrics), each.metrics["weights_hash"]))
    return [(each, layer) for each in found for layer in range(len(each.metrics["by_layer"]["after"]["peak_percent"]))]


def _find_teacher(source: Source) -> str:
    return source.metrics["init"]["weights_hash"]


def _list_columns(teacher: Source | None, report: Report) -> dict[str, Callable[[Source], object]]:
    def share(source: Source) -> str:
        return f"{100 * source.metrics[TOP1] / teacher.metrics[TOP1]:.1f} %" if teacher else "–"

    def untrained(source: Source) -> str:
        return f"{describe_sample([run[UNTRAINED] for run in source.metrics['by_seed']]).mean:.1f} %"

    return {
        "student": lambda source: name_student(source.metrics),
        "trained": lambda source: "new weights alone" if source.metrics.get("freeze") else "all weights",
        "steps": lambda source: number(source.metrics["steps"], ","),
        "seeds": lambda source: len(source.metrics["by_seed"]),
        "before training": untrained,
        "top-1": _show_score,
        "of the teacher's": share,
        "measured on": lambda source: describe_origin([source]),
    }


def weigh_inheritance(report: Report) -> str:
    """Compare students with the same models trained from random weights, a line for each pair over several seeds.

    Only students with the same options whose weights were all trained are compared.

    Raises:
        Missing: there is no such pair.
    """
    sources = report.results.sources
    students = [each for each in sources if each.most_seeds > 1 and UNTRAINED in each.metrics]
    lines = []
    for source, student in itertools.product(_find_scratch(students, sources), students):
        choices, theirs = [(each.metrics["model"], name_student(each.metrics)) for each in (source, student)]
        if choices != theirs or student.metrics.get("freeze"):
            continue
        steps, longer = student.metrics["steps"], source.metrics["steps"]
        length = f"{steps:,} steps as well" if steps == longer else f"{longer:,} steps rather than {steps:,}"
        difference = f"{student.metrics[TOP1] - source.metrics[TOP1]:+.1f} points, and no test: the machines are two."
        if pairs := compare_trainings({"student": student, "scratch": source}, [("student", "scratch")]):
            (pair,) = pairs
            difference = f"{pair.show(1)} points, {pair.limit or f'p {pair.p:.2g}'}."
        found = f", trained from random weights for {length}: the student's Top-1 minus its own: {difference}"
        lines.append(f"`{source.metrics['model']}`{found}")
    if not lines:
        raise Missing("no student's model was trained from random weights over several seeds", SCRATCH)
    return bullets(lines)


def _describe_scratch(source: Source, report: Report) -> str:
    length = f"top-1 {_show_score(source)} after {source.metrics['steps']:,} steps"
    text = f" from random weights ({name_student(source.metrics)}): {length}"
    about = f" ({describe_seeds([source])}; {describe_origin([source])})."
    return f"`{source.metrics['model']}`{text}{about}"


def _show_score(source: Source) -> str:
    return show_mean(source, TOP1, ".1f", " %", is_share=True)
