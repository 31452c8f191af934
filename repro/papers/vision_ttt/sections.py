"""What the page of Vision-TTT says beside the tables: its FLOPs, and its figures of interpretability in numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.csvfile import read_csv
from ...report.claims import Report
from ...report.document import Block, Line, Piece, strong, table
from ...report.gallery import describe_origin
from ...report.measured import format_scores
from ...report.records import Source

COUNTERS_FILE = Path(__file__).with_name("flop_counters.csv")  # of a search that is no longer in the code
_DESIGNS = ("Vanilla TTT", "+ Dual", "+ Conv2d")  # as Fig. 8 names them
# what the paper says, our numbers, whether they agree; None where neither can be said
Finding = tuple[str, str, bool | None]


def find_counter(_: Report, key: str, counter: str | None = None) -> int:
    """What a search found behind the paper's FLOPs of its own model: a number of a counter, or of the first one."""
    rows = read_csv(COUNTERS_FILE)
    return next(row[key] for row in rows if counter in (None, row["counter"]))


def describe_models(report: Report) -> Line:
    """The models that the figures are of: where they were trained, and how accurate they are."""
    source = _find(report)
    m = source.metrics
    trained = "; ".join(f"{name} {_accuracy(report, entry)}" for name, entry in m["receptive_fields"].items())
    about = f"{m['model']} on {m['data']} ({describe_origin([source], report.named)}), {m['held_out_images']} held-out images."
    return (f"{about} The receptive fields are of models with these accuracies: {trained}.",)


def list_findings(report: Report) -> list[Block]:
    """The paper's figures of interpretability as numbers of our trained models, for and against."""
    m = _find(report).metrics
    rows: list[list[Piece | Line]] = []
    for place, findings in (("Fig. 3, 9, 10", _of_gradients(m)), ("Fig. 8", _of_fields(m)), ("Fig. 11", _of_losses(m))):
        for says, ours, agrees in findings:
            word = "open" if agrees is None else "for the paper" if agrees else "against the paper"
            rows.append([place, says, ours, strong(word) if agrees is False else word])
    against = sum(row[3] == strong("against the paper") for row in rows)
    summary = f"{against} of {len(rows)} findings speak against the paper."
    return [(summary,), table(["", "the paper says", "ours", ""], rows)]


def _of_gradients(m: Mapping[str, Any]) -> list[Finding]:
    before, after = m["gradient_magnitude"]["before"], m["gradient_magnitude"]["after"]
    shares = [each["top30_share_percent"] for each in (before, after)]
    ink = [each["ink"]["later_top30_percent"] for each in (before, after)]
    everywhere = after["ink"]["later_percent"]
    uniform = "the gradients are relatively uniform before training, and stand out after it"
    held = f"the top 30 % of the tokens hold {shares[0]:.0f} % of the gradient before, {shares[1]:.0f} % after"
    semantic = "after training, the tokens with the largest gradients show the object"
    on_ink = f"{ink[1]:.0f} % of them lie on ink, which {everywhere:.0f} % of all later tokens do"
    return [
        (uniform, held, shares[1] > shares[0]),
        (semantic, on_ink, ink[1] > everywhere),
        ("and more so than before", f"{ink[0]:.0f} % lay on ink before", ink[1] > ink[0]),
    ]


def _of_fields(m: Mapping[str, Any]) -> list[Finding]:
    fields = m["receptive_fields"]
    if any(fields.get(name, {}).get("radius_90_px") is None for name in (*_DESIGNS, "DeiT", "Vim")):
        return []
    one, both, radial = (fields[name] for name in _DESIGNS)
    shown = {"DeiT": fields["DeiT"], "Vim": fields["Vim"], "Vittt": radial}
    radii = {name: field["radius_90_px"] for name, field in shown.items()}
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
    is_peaked = means[0] < max(means) and means[-1] < max(means[1:-1] or means)
    return [
        ("the reconstruction loss rises, then falls", path, is_peaked),
        ("it stays above zero", f"the smallest of a token and layer is {smallest:.1f}", smallest > 0),
    ]


def _accuracy(report: Report, entry: Mapping[str, Any]) -> str:
    """The accuracy of the model whose weights a figure shows."""
    beside = f"{entry.get('weights', '').rpartition('/')[0]}/metrics.json"
    source = report.results.find(beside)
    return format_scores(source.metrics, {"top1_percent": ""}, 1) if source else "unknown"


def _find(report: Report) -> Source:
    asked = "nothing is drawn yet", "repro visualize"
    return report.results.require(lambda source: source.stage == "visualize", *asked)[0]
