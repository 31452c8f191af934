"""Trained models with another inner loop, as `repro explain --probe` recorded them."""

from collections.abc import Mapping
from typing import Any

from ...core.statistics import share_interval
from ...report.claims import Report
from ...report.document import Block, Piece, code, number, table
from ...report.gallery import describe_origin
from ...report.records import Source
from ...report.results import Missing

HEADER = ("model", "data, images", "probe", "top-1", "with it", "inner loss after the steps", "with it", "measured on")


def list_probes(report: Report) -> list[Block]:
    """A row for each model and probe: accuracy and inner loss without and with it."""
    return [table(HEADER, [_row(source, report) for source in _find(report)])]


def count_probed(report: Report, what: str) -> int:
    """Of the rows with more inner steps, those whose inner loss is `lower`, whose score is `worse`, or `both`; or all
    `rows`.
    """
    rows = [source.metrics for source in _find(report) if source.metrics["probe"].startswith("steps=")]
    lower = [m["probed"]["inner_loss_after"] < m["unchanged"]["inner_loss_after"] for m in rows]
    worse = [_is_worse(m) for m in rows]
    both = [each and other for each, other in zip(lower, worse, strict=True)]
    return {"rows": len(rows), "lower": sum(lower), "worse": sum(worse), "both": sum(both)}[what]


def _find(report: Report) -> list[Source]:
    found = [source for source in report.results.sources if "probe" in source.metrics and "probed" in source.metrics]
    if not found:
        raise Missing("nothing is probed yet", "repro explain --probe steps=4 --weights WEIGHTS")
    return sorted(found, key=lambda source: (source.metrics["model"], source.metrics["data"], source.metrics["probe"]))


def _row(source: Source, report: Report) -> list[Piece]:
    m = source.metrics
    before, after = m["unchanged"], m["probed"]
    scores = (number(f"{each['top1_percent']:.2f} %") for each in (before, after))
    losses = (number(f"{each['inner_loss_after']:.3g}") for each in (before, after))
    options = ",".join(f"{key}={value}" for key, value in m["options"].items())
    name = m["model"] + (f"[{options}]" if options else "")
    images = f"{m['data']}, {before['held_out_images']} of {m['split']}"
    return [code(name), images, m["probe"], *scores, *losses, describe_origin([source], report.named)]


def _is_worse(metrics: Mapping[str, Any]) -> bool:
    """Whether the top-1 with a probe is below that without it, and their intervals over the images do not meet."""
    before, after = (
        share_interval(each["top1_percent"], each["held_out_images"])
        for each in (metrics["unchanged"], metrics["probed"])
    )
    return after[1] < before[0]
