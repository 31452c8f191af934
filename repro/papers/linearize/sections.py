"""The sections of the linearization's page besides the tables: the students' accuracy, and maps of their attention.

page.md calls the public functions by name.
"""

import itertools
from collections.abc import Sequence

from ...core.statistics import describe_sample
from ...report.claims import Report
from ...report.markdown import bullets, join, table
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

_LINEAR = ("linear", "projqk")  # option `inner` of a student with linear attention
_UNTRAINED = "untrained_top1_percent"  # before the training; only records of linearisations have it
_COMMAND = "repro explain --map attention --data digits --weights STUDENT --teacher SOFTMAX_MODEL"
_SCRATCH = "repro profile use digits && dvc repro ablate@t5_nano_digits_scratch_5e_5s"


def list_students(report: Report) -> str:
    """Tabulate the accuracies of each softmax model's students, best first, then of these models from random weights.

    Of records with the same options, frozen weights, steps and data, the one with the most seeds stands for all.

    Raises:
        Missing: no model is linearised.
    """
    sources = report.results.sources
    found = report.results.require(
        lambda each: each.most_seeds and _UNTRAINED in each.metrics and each.metrics.get("init"),
        "no model is linearised yet",
        "repro linearize --cell t5_nano_digits",
    )

    def find_setting(each: Source) -> tuple:
        """Return the teacher and the images, which the students of one table share."""
        return each.init_hash, each.scored_on

    def name(each: Source) -> tuple:
        """Return what tells apart the students of a table."""
        return find_setting(each), _name_student(each), each.metrics.get("freeze", False), each.metrics["steps"]

    header = ["student", "trained", "steps", "seeds", "before training", "top-1", "of the teacher's", "measured on"]
    blocks: list[str] = []
    for (init, scored_on), alike in group_by(keep_best(found, name), find_setting).items():
        students = sorted(alike, key=lambda each: -each.metrics[TOP1])
        teacher = next((each for each in sources if each.most_seeds and each.metrics["weights_hash"] == init), None)
        m = students[0].metrics
        known = f"Students of the softmax model `{m['init']['weights']}`"
        if teacher is not None:
            length = f"{teacher.metrics['steps']:,} steps ({describe_seeds([teacher])})"
            known += f": top-1 {_show_score(teacher)} after {length}"
        known += f". All on {m['data']}, {m['held_out_images']} images of {m['split']}."
        rows = []
        for each in students:
            trained = "new weights alone" if each.metrics.get("freeze") else "all weights"
            untrained = describe_sample([run[_UNTRAINED] for run in each.metrics["by_seed"]]).mean
            is_alike = teacher is not None and teacher.scored_on == scored_on
            share = f"{100 * each.metrics[TOP1] / teacher.metrics[TOP1]:.1f} %" if is_alike else "–"
            row = [_name_student(each), trained, f"{each.metrics['steps']:,}", len(each.metrics["by_seed"])]
            rows.append([*row, f"{untrained:.1f} %", _show_score(each), share, describe_origin([each])])
        blocks += [warn_of_seeds(students), known, table(header, rows)]
        lines = []
        for each in _find_scratch(students, sources):
            length = f"top-1 {_show_score(each)} after {each.metrics['steps']:,} steps"
            about = f"({describe_seeds([each])}; {describe_origin([each])})"
            lines.append(f"`{each.metrics['model']}` from random weights ({_name_student(each)}): {length} {about}.")
        blocks.append(bullets(lines))
    return join(blocks)


def _find_scratch(students: Sequence[Source], sources: Sequence[Source]) -> list[Source]:
    """Find the trainings of the students' models from random weights on the same data; the shortest comes first."""
    shared = {(each.metrics["model"], each.metrics["data"]) for each in students}
    trained = (each for each in sources if each.most_seeds and not each.metrics.get("init"))
    found = (each for each in trained if (each.metrics.get("model"), each.metrics.get("data")) in shared)
    return sorted(found, key=lambda each: each.metrics["steps"])


def _name_student(source: Source) -> str:
    """Describe a student's options in words.

    Records have only the options that their cells name; the others must be T5's defaults here. By this name students
    are told apart, and compared with their models from random weights.
    """
    chosen = {"inner": "swiglu", "key_norm": "instance", "dwc": "qk", "neighbours": 0, **source.metrics["options"]}
    near = f", neighbours {chosen['neighbours']}" if chosen["neighbours"] else ""
    return f"{chosen['inner']}, norm {chosen['key_norm']}, dwc {chosen['dwc']}{near}"


def list_layers(report: Report) -> str:
    """Tabulate each layer of each student: the shift of its keys, reach and peak of its attention, and its overlap with
    the teacher's attention.
    """

    states = ("teacher", "before", "after")
    rows = []
    for source, layer in _find_layers(report):

        def show(key: str, form: str, states: Sequence[str] = states) -> str:
            """Show a layer's value in each state."""
            return "; ".join(form.format(source.metrics["by_layer"][state][key][layer]) for state in states)

        reach = f"{show('reach_patches', '{:.2f}')} (even {show('reach_patches', '{:.2f}', ['even'])})"
        overlap = show("overlap_percent", "{:.0f} %", states[1:])
        overlap += f" (even {show('overlap_percent', '{:.0f} %', ['even'])})"
        row = [_name_student(source), layer + 1, show("shift_ratio", "{:.2f}"), reach, show("peak_percent", "{:.1f} %")]
        rows.append([*row, overlap, describe_origin([source])])
    header = ["student", "layer", "shift ratio of the keys", "reach (patches)", "peak", "overlap with the teacher"]
    return table([*header, "measured on"], rows)


def find_attention(report: Report, key: str) -> int | str:
    """Return a field of the first record, or a count of layers over all students with an inner learner.

    `layers` counts all of them; `farther` and `lower` count those whose reach is larger, or whose peak is lower, than
    the teacher's. Linear attention is left out: the paper's statement is not of it.
    """
    layers = _find_layers(report)
    if key not in ("layers", "farther", "lower"):
        return layers[0][0].metrics[key]
    layers = [each for each in layers if each[0].metrics["options"].get("inner") not in _LINEAR]
    if key == "layers":
        return len(layers)
    field, sign = {"farther": ("reach_patches", 1), "lower": ("peak_percent", -1)}[key]
    states = [(source.metrics["by_layer"], layer) for source, layer in layers]
    return sum(sign * by["after"][field][layer] > sign * by["teacher"][field][layer] for by, layer in states)


def _find_layers(report: Report) -> list[tuple[Source, int]]:
    """Return (record, layer) for every layer of every student whose attention was measured, each student once."""
    found = report.results.require(
        lambda source: source.metrics.get("by_layer") and source.metrics.get("teacher_hash"),
        "no attention is measured yet",
        _COMMAND,
    )
    # several devices or data sets may have measured one student: the first record counts
    students = {each.metrics["weights_hash"]: each for each in reversed(found)}
    found = sorted(students.values(), key=lambda each: (each.metrics["model"], _name_student(each)))
    return [(each, layer) for each in found for layer in range(len(each.metrics["by_layer"]["after"]["peak_percent"]))]


def weigh_inheritance(report: Report) -> str:
    """Compare students with the same models trained from random weights, a line for each pair over several seeds.

    Only students with the same options whose weights were all trained are compared.

    Raises:
        Missing: there is no such pair.
    """
    sources = report.results.sources
    students = [each for each in sources if each.most_seeds > 1 and _UNTRAINED in each.metrics]
    lines = []
    for source, student in itertools.product(_find_scratch(students, sources), students):
        choices, theirs = [(each.metrics["model"], _name_student(each)) for each in (source, student)]
        if choices != theirs or student.metrics.get("freeze"):
            continue
        steps, longer = student.metrics["steps"], source.metrics["steps"]
        length = f"{steps:,} steps as well" if steps == longer else f"{longer:,} steps rather than {steps:,}"
        difference = f"{student.metrics[TOP1] - source.metrics[TOP1]:+.1f} points, and no test: the machines are two."
        if pairs := compare_trainings({"student": student, "scratch": source}, [("student", "scratch")]):
            (pair,) = pairs
            difference = f"{pair.show(1)} points, {pair.limit or f'p {pair.p:.2g}'}."
        found = f"trained from random weights for {length}: the student's Top-1 minus its own: {difference}"
        lines.append(f"`{source.metrics['model']}`, {found}")
    if not lines:
        raise Missing("no student's model was trained from random weights over several seeds", _SCRATCH)
    return bullets(lines)


def _show_score(source: Source) -> str:
    """Show the mean Top-1 over the seeds with its interval."""
    return show_mean(source, TOP1, ".1f", " %", is_share=True)
