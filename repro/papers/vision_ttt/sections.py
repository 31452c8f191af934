"""What the page of Vision-TTT says beside the tables: the search behind its FLOPs, and its figures of interpretability in numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...report.claims import Report
from ...report.document import Block, Heading, Line, Piece, Section, code, number, prose, strong, table
from ...report.gallery import describe_origin
from ...report.measured import format_scores
from ...report.records import Source
from ...report.verdicts import FITTED

_DESIGNS = ("Vanilla TTT", "+ Dual", "+ Conv2d")  # as Fig. 8 names them
_AGREEING = ("rounding", "truncation")
Finding = tuple[str, str, bool | None]  # what the paper says, our numbers, whether they agree; None where neither can be said


def flops_section(report: Report) -> list[Section]:
    """Which terms a counter could have included for the paper's FLOPs of its own model; nothing without results/theory."""
    source = _find(report, "theory")
    if source is None:
        return []
    search = source.metrics["flop_search"]
    entries, tried = search["entries"], search["hypotheses"]
    as_written = [row["agreement"] for row in search["as_written"]]
    opening = prose(
        f"The paper prints {entries} FLOPs of its own model. `repro theory` tries {tried:,} counters, each a choice of the terms that it "
        "includes, on all of them at once. Whatever it finds is "
    )
    blocks: list[Block] = [(*opening, FITTED, f" {FITTED.word}: a counter that was chosen by these numbers is no evidence for them.")]
    rows: list[list[Piece | Line]] = [["Eq. 13 with MLP, patches and head", f"{_count(as_written)} of {entries}", "–"]]
    for rule, words in (("rounding", "the best by rounding"), ("either", "the best, rounded or cut off")):
        best = search["best"][rule]
        rows.append([words, f"{best['explained']} of {entries} ({best['hypotheses']:,} counters do)", _departures(best["departures"])])
    for name, found in search["by_table"].items():
        best = found["either"]
        rows.append([f"the best for {name} alone", f"{best['explained']} of {found['entries']}", _departures(best["departures"])])
    blocks.append(table(["counter", "FLOPs explained", "departs from Eq. 13 in (the fewest changes that suffice)"], rows))
    unexplained = [row for row in search["best"]["either"]["rows"] if row["agreement"] not in _AGREEING]
    shown = [[code(row["entry"]), number(row["printed"]), number(f"{row['computed']:.4g}")] for row in unexplained]
    blocks += [Heading("What the best counter leaves unexplained"), table(["entry", "the paper", "that counter"], shown)]
    impossible = [step["step"] for step in search["table3_steps"] if step["impossible_mixed"]]
    steps = ", ".join(f"to {step}" for step in impossible)
    blocks.append(
        (f"No counter can explain the steps of Table 3 {steps}: the weights that they add or remove meet 196 tokens each.",)
        if impossible
        else ("Every step of Table 3 could be a count.",)
    )
    return [Section("What the paper's FLOPs count", blocks)]


def interpretability_section(report: Report) -> list[Section]:
    """The paper's figures of interpretability as numbers of our trained models, for and against; nothing without results/visualize."""
    source = _find(report, "visualize")
    if source is None:
        return []
    m = source.metrics
    trained = [f"{name} {_accuracy(report, entry)}" for name, entry in m["receptive_fields"].items()]
    about = (
        f"{m['model']} on {m['data']} ({describe_origin([source], report.named)}), {m['held_out_images']} held-out images. The paper's models "
        "were trained on ImageNet, and its figures have no numbers; these are what its words come to for ours. The receptive fields are of "
        f"models with these accuracies: {'; '.join(trained)}."
    )
    rows: list[list[Piece | Line]] = []
    for place, findings in (("Fig. 3, 9, 10", _of_gradients(m)), ("Fig. 8", _of_fields(m)), ("Fig. 11", _of_losses(m))):
        for says, ours, agrees in findings:
            word = "open" if agrees is None else "for the paper" if agrees else "against the paper"
            rows.append([place, says, ours, strong(word) if agrees is False else word])
    against = sum(row[3] == strong("against the paper") for row in rows)
    summary = f"{against} of {len(rows)} findings speak against the paper."
    return [Section("Its figures of interpretability, in numbers", [(about,), (summary,), table(["", "the paper says", "ours", ""], rows)])]


def _of_gradients(m: Mapping[str, Any]) -> list[Finding]:
    before, after = m["gradient_magnitude"]["before"], m["gradient_magnitude"]["after"]
    shares = [each["top30_share_percent"] for each in (before, after)]
    ink = [each["ink"]["later_top30_percent"] for each in (before, after)]
    everywhere = after["ink"]["later_percent"]
    uniform = "the gradients are relatively uniform before training, and stand out after it"
    semantic = "after training, the tokens with the largest gradients show the object"
    more = "and more so than before"
    return [
        (
            uniform,
            f"the top 30 % of the tokens hold {shares[0]:.0f} % of the gradient before, {shares[1]:.0f} % after",
            shares[1] > shares[0],
        ),
        (semantic, f"{ink[1]:.0f} % of them lie on ink, which {everywhere:.0f} % of all later tokens do", ink[1] > everywhere),
        (more, f"{ink[0]:.0f} % lay on ink before", ink[1] > ink[0]),
    ]


def _of_fields(m: Mapping[str, Any]) -> list[Finding]:
    fields = m["receptive_fields"]
    if any(fields.get(name, {}).get("radius_90_px") is None for name in (*_DESIGNS, "DeiT", "Vim")):
        return []
    one, both, radial = (fields[name] for name in _DESIGNS)
    radii = {"DeiT": fields["DeiT"]["radius_90_px"], "Vim": fields["Vim"]["radius_90_px"], "Vittt": radial["radius_90_px"]}
    side, ahead = radial["image_size"], one["share_ahead"]
    covered = ", ".join(f"{name} {radius:.0f}" for name, radius in radii.items())
    return [
        ("vanilla TTT sees one direction", f"{100 * ahead:.0f} % of its field lies ahead of the patch", ahead == 0),
        ("“+ Dual” sees both", f"{100 * both['share_ahead']:.0f} % lies ahead", both["share_ahead"] > 0),
        (
            "“+ Conv2d” is globally radial",
            f"anisotropy {radial['anisotropy']:.2f}, of “+ Dual” {both['anisotropy']:.2f} (0 is radial)",
            radial["anisotropy"] < both["anisotropy"],
        ),
        (
            "DeiT, Vim and Vittt cover all pixels",
            f"90 % of the field within {covered} pixels of {side}",
            None if min(radii.values()) > side / 4 else False,
        ),
    ]


def _of_losses(m: Mapping[str, Any]) -> list[Finding]:
    epochs = sorted(m["reconstruction_loss"].items(), key=lambda item: int(item[0].removeprefix("epoch_")))
    means = [sum(found["mean_by_layer"]) / len(found["mean_by_layer"]) for _, found in epochs]
    names = [name.removeprefix("epoch_") for name, _ in epochs]
    path = ", ".join(f"{mean:.1f} at epoch {name}" for name, mean in zip(names, means, strict=True))
    smallest = epochs[-1][1]["smallest"]
    found: list[Finding] = [
        ("the reconstruction loss rises, then falls", path, means[0] < max(means) and means[-1] < max(means[1:-1] or means))
    ]
    found.append(("it stays above zero", f"the smallest of a token and layer is {smallest:.1f}", smallest > 0))
    return found


def _accuracy(report: Report, entry: Mapping[str, Any]) -> str:
    """The accuracy of the model whose weights a figure shows."""
    beside = f"{entry.get('weights', '').rpartition('/')[0]}/metrics.json"
    source = report.results.find(beside)
    return format_scores(source.metrics, {"top1_percent": ""}, 1) if source else "unknown"


def _find(report: Report, stage: str) -> Source | None:
    return next((source for source in report.results.sources if source.stage == stage), None)


def _count(agreements: Sequence[str]) -> int:
    return sum(each in _AGREEING for each in agreements)


def _departures(changed: Mapping[str, str]) -> str:
    return "; ".join(f"{term}: {choice}" for term, choice in changed.items()) or "nothing"
