"""Every choice that the paper leaves: docs/readings.md says what was taken and why, results/papers/readings.md what the
others do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...report.claims import Report
from ...report.document import Block, Bullets, Heading, Line, Piece, Section, code, join, number, prose, strong, table
from ...report.measured import format_scores
from ...report.ordering import Pair, compare_pairs, sampling_noise
from ...report.records import Source, describe_age
from .readings import Choice, list_trained, load_choices

TOP1 = "top1_percent"
Trained = Mapping[str, Source]  # text of a reading -> the record of its training


def describe_choices(report: Report) -> list[Block]:
    """Each choice under a heading: what the paper says, what was taken and why, and the alternatives."""
    return [block for choice in load_choices() for block in (Heading(choice.asks), *_explain(choice))]


def build_results(report: Report) -> list[Section]:
    """results/papers/readings.md: how well our reading fits, which pairs fit as well, what was trained, and a row for
    each value.
    """
    fits = next((source.metrics for source in report.results.sources if source.stage == "readings"), None)
    trained = find_trained(report)
    pairs = _compare_trained(trained)
    opening = prose(
        "Vision-TTT leaves choices open; `docs/readings.md` explains each of them, and why our reading was taken. Here is what the "
        "alternatives do to the counts that the paper prints, which `repro readings` counts, and to the accuracy on embedded data, which "
        "`repro readings --train` measures."
    )
    page = [Section("What the readings of Vision-TTT change", [opening])]
    if fits:
        page.append(Section("What the printed counts say", _describe_fits(fits)))
    if pairs:
        page.append(Section("Does the accuracy depend on the reading?", _describe_trained(trained, pairs)))
    if fits or trained:
        header = [
            "reading",
            "",
            "parameters of Vittt-T (M)",
            "printed counts that fit",
            "multiply-adds (G)",
            "that fit",
        ]
        header += ["Top-1 (%)", "against ours (points)"] if trained else []
        rows = [_value_row(choice, value, fits, trained, pairs) for choice in load_choices() for value in choice.values]
        page.append(Section("Every reading", [table(header, rows)]))
    return page


def find_trained(report: Report) -> Trained:
    """The records of `repro readings --train`, those of one device, data set and recipe: the ones with most readings."""
    texts = list_trained()
    groups: dict[tuple, dict[str, Source]] = {}
    for source in report.results.sources:
        parts = source.path.split("/")  # results/measured/<device>/readings/<data>/<name>/metrics.json
        if parts[1] == "measured" and parts[3:4] == ["readings"] and parts[-1] == "metrics.json" and parts[-2] in texts:
            groups.setdefault((parts[2], parts[4], source.metrics["recipe_hash"]), {})[texts[parts[-2]]] = source
    complete = [group for group in groups.values() if "" in group]
    return max(complete, key=len, default={})


def _compare_trained(trained: Trained) -> dict[str, Pair]:
    """Text of a reading -> how much better it is than ours, over the seeds that all have; empty without two seeds."""
    top1 = {text: {run["seed"]: run[TOP1] for run in source.metrics["by_seed"]} for text, source in trained.items()}
    seeds = sorted(set.intersection(*map(set, top1.values()))) if top1 else []
    others = [text for text in top1 if text]
    if len(seeds) < 2 or not others:
        return {}
    images, classes = (trained[""].metrics[key] for key in ("held_out_images", "classes"))
    found = compare_pairs(top1, [(text, "") for text in others], seeds, images, classes)
    return dict(zip(others, found, strict=True))


def _describe_fits(fits: Mapping[str, Any]) -> list[Block]:
    ours, readings, pairs = fits["readings"][""], fits["readings"], fits["pairs"]
    entries, macs = fits["params_entries"], fits["macs_entries"]
    alternatives = {text: row for text, row in readings.items() if text}
    as_many = sum(row["params_fit"] >= ours["params_fit"] for row in alternatives.values())
    rounded = [
        text
        for text, row in {**alternatives, **pairs}.items()
        if row["params_fit"] == entries and not row["params_truncated"]
    ]
    lines = [
        f"Our reading fits {ours['params_fit']} of {entries} printed counts of parameters (Table 3, Vittt-S and Vittt-B, the 3×3 "
        f"convolution, what sharing Q and K saves), {ours['params_truncated']} of them by truncation, and {ours['macs_fit']} of {macs} "
        "multiply-adds.",
        f"Of {len(alternatives)} alternatives, {as_many} fit as many counts of parameters as ours, and {len(alternatives) - as_many} fewer: "
        "only those are excluded by what the paper prints.",
    ]
    best = max(row["macs_fit"] for row in {**readings, **pairs}.values())
    lines.append(
        f"No alternative, and no pair of those that change a count, fits more than {best} of {macs} multiply-adds."
    )
    found: list[Line] = [(line,) for line in lines]
    if rounded:
        found.append(("All counts of parameters fit by rounding alone in: ", *_join_codes(rounded), "."))
    return [Bullets(found)]


def _join_codes(texts: Sequence[str]) -> Line:
    return tuple(piece for text in texts for piece in ("; ", code(text)))[1:]


def _describe_trained(trained: Trained, pairs: Mapping[str, Pair]) -> list[Block]:
    ours = trained[""]
    m = ours.metrics
    separated = [text for text, pair in pairs.items() if pair.word != "not separated"]
    about = (
        f"{m['model']} on {m['data']}, {m['epochs']} epochs, {len(m['by_seed'])} seeds, {m['held_out_images']} held-out images, "
        f"{ours.device}{describe_age(trained.values())}. Each alternative is trained as ours is, and compared with it seed by seed (paired t, Holm's correction over the "
        f"{len(pairs)} alternatives). It says nothing about ImageNet."
    )
    verdict: Line = (strong("No alternative differs significantly from our reading."),)
    if separated:
        shown = [(code(text), f" ({pairs[text].difference:+.1f} points)") for text in separated]
        joined = tuple(piece for line in shown for piece in ("; ", *line))[1:]
        verdict = (
            strong(f"{len(separated)} of {len(pairs)} alternatives differ significantly from ours:"),
            " ",
            *joined,
            ".",
        )
    means = [source.metrics[TOP1] for source in trained.values()]
    noise = sampling_noise(sum(means) / len(means), m["held_out_images"])
    spread = f"The means lie within {max(means) - min(means):.1f} points; chance alone makes {noise:.1f} on {m['held_out_images']} images"
    return [
        (about,),
        verdict,
        (f"{spread}{', so this task cannot tell them apart.' if max(means) - min(means) < noise else '.'}",),
    ]


def _explain(choice: Choice) -> list[Block]:
    says: Block = Bullets([(strong(place), f": {text}.") for place, text in choice.says])
    others = [
        (code(text), f", {choice.values[value]}")
        for text, value in zip(choice.alternatives, list(choice.values)[1:], strict=True)
    ]
    return [
        says if choice.says else ("The paper says nothing.",),
        (strong("We take"), f" {choice.values[choice.default]}. {choice.because}"),
        (strong("Instead"), ": ", *join(others, "; "), "."),
        (strong("Refuted by"), f" {choice.refuted_by}."),
    ]


def _value_row(
    choice: Choice, value: str, fits: Mapping[str, Any] | None, trained: Trained, pairs: Mapping[str, Pair]
) -> list[Piece | Line]:
    text = "" if value == choice.default else f"{choice.switch}={value}"
    row: list[Piece | Line] = [(code(f"{choice.switch}={value}"), "" if text else " (ours)"), choice.values[value]]
    if fits:
        found = fits["readings"][text]
        row += [number(f"{found['params_m']:.4f}"), number(f"{found['params_fit']} of {fits['params_entries']}")]
        row += [number(f"{found['macs_g']:.4f}"), number(f"{found['macs_fit']} of {fits['macs_entries']}")]
    else:
        row += ["–"] * 4
    if trained:
        source, pair = trained.get(text), pairs.get(text)
        row.append(number(format_scores(source.metrics, {TOP1: ""}, 1)) if source else "–")
        row.append(
            number(f"{pair.difference:+.1f} [{pair.low:+.1f}, {pair.high:+.1f}], p {pair.p:.2f}") if pair else "–"
        )
    return row
