"""Trained models with another inner loop, as `repro explain --probe` recorded them."""

from collections.abc import Mapping
from typing import Any

from ...core.statistics import share_interval
from ...report.claims import Report
from ...report.document import Block, Bullets, Piece, Section, code, number, prose, table
from ...report.gallery import describe_origin
from ...report.records import Source

COMMAND = "repro explain --probe steps=4 --weights WEIGHTS"


def probes_section(report: Report) -> list[Section]:
    """The section of the paper's page; none without records."""
    return (
        [Section("Models that run with another inner loop than they were trained with", describe_probes(report))]
        if _find(report)
        else []
    )


def describe_probes(report: Report) -> list[Block]:
    """A row for each model and probe: accuracy and inner loss without and with it; then whether the paper's Fig. 1 is
    seen.
    """
    sources = _find(report)
    if not sources:
        return [prose(f"Nothing is probed yet: `{COMMAND}`.")]
    text = (
        "The weights are as they were trained, of one seed. The inner loss is −⟨F(k), v⟩ after the steps, a mean over tokens, heads and layers; "
        "of Vittt it is the squared error of a chunk."
    )
    header = [
        "model",
        "data, images",
        "probe",
        "top-1",
        "with it",
        "inner loss after the steps",
        "with it",
        "measured on",
    ]
    rows = [_row(source, report) for source in sources]
    return [prose(text), table(header, rows), Bullets([_judge(sources)])]


def _find(report: Report) -> list[Source]:
    found = [source for source in report.results.sources if "probe" in source.metrics and "probed" in source.metrics]
    return sorted(found, key=lambda source: (source.metrics["model"], source.metrics["data"], source.metrics["probe"]))


def _row(source: Source, report: Report) -> list[Piece]:
    m = source.metrics
    before, after = m["unchanged"], m["probed"]
    scores = (number(f"{each['top1_percent']:.2f} %") for each in (before, after))
    losses = (number(f"{each['inner_loss_after']:.3g}") for each in (before, after))
    images = f"{m['data']}, {before['held_out_images']} of {m['split']}"
    return [code(_name(m)), images, m["probe"], *scores, *losses, describe_origin([source], report.named)]


def _name(metrics: Mapping[str, Any]) -> str:
    options = ",".join(f"{key}={value}" for key, value in metrics["options"].items())
    return metrics["model"] + (f"[{options}]" if options else "")


def _judge(sources: list[Source]) -> str:
    more = [source.metrics for source in sources if source.metrics["probe"].startswith("steps=")]
    lower = [m for m in more if m["probed"]["inner_loss_after"] < m["unchanged"]["inner_loss_after"]]
    separated = [m for m in more if _is_worse(m)]
    both = [m for m in lower if m in separated]
    return (
        "The paper says that more inner steps at inference lower the inner loss and make the score worse (Section 4.1). Here they lower the "
        f"inner loss in {len(lower)} of {len(more)} rows. The score is lower by more than chance in {len(separated)}: there, the 95 % intervals "
        f"of both shares (Wilson), over the images of one seed, do not meet. Both hold in {len(both)}."
    )


def _is_worse(metrics: Mapping[str, Any]) -> bool:
    """Whether the top-1 with a probe lies below that without it, and their intervals over the images do not meet."""
    before, after = (
        share_interval(each["top1_percent"], each["held_out_images"])
        for each in (metrics["unchanged"], metrics["probed"])
    )
    return after[1] < before[0]
