"""What profiles/night.yaml has shown: a slot for each score and for each pair that was named before the run."""

import functools
from pathlib import Path
from typing import Any

from ...core.config import load_yaml
from ...report.claims import Report
from ...report.document import Block, Piece, number, table
from ...report.measured import format_scores
from ...report.ordering import TOP1, Pair, compare_trainings
from ...report.records import Source
from ...report.results import Missing

COMMAND = "repro profile use night && dvc repro pretrain linearize ablate"


@functools.cache
def load_questions() -> dict[str, Any]:
    """The content of night.yaml."""
    return load_yaml(Path(__file__).with_name("night.yaml"))


def list_night_scores(report: Report) -> list[Block]:
    """Top-1 of every model of the night on each data set; `–` for what is not trained."""
    questions = load_questions()
    rows: list[list[Piece]] = []
    for name in questions["models"]:
        found = [_find_training(report, name, data) for data in questions["data"]]
        rows.append([name, *(format_scores(each.metrics, {TOP1: ""}) if each else "–" for each in found)])
    return [table(["Top-1 (%) on test", *questions["data"].values()], rows)]


def list_night_pairs(report: Report) -> list[Block]:
    """The pairs of each table on each data set, with their verdicts; `–` where a model of the table is not trained."""
    questions = load_questions()
    rows: list[list[Piece]] = []
    for place, pairs in questions["pairs"].items():
        for data, shown in questions["data"].items():
            judged = _judge(report, data, pairs)
            for better, worse in pairs:
                pair = judged.get((better, worse))
                said: list[Piece] = ["–", "–", "–"]
                if pair is not None:
                    said = [pair.show(2), number(pair.p, ".3f"), pair.word]
                rows.append([place, shown, f"{better} > {worse}", *said])
    return [table(["", "data", "the paper's order", "ours (points) [95 %]", "p (Holm)", "verdict"], rows)]


def _judge(report: Report, data: str, pairs: list[list[str]]) -> dict[tuple[str, str], Pair]:
    """Pair -> its verdict on a data set; none before all models are trained, `Missing` where trained unlike."""
    names = dict.fromkeys(name for pair in pairs for name in pair)
    found = {name: _find_training(report, name, data) for name in names}
    if None in found.values():
        return {}
    alike = ("epochs", "image_size", "split", "held_out_images", "classes")
    first, *others = ([source.metrics[key] for key in alike] for source in found.values())
    if any(other != first for other in others):
        raise Missing(f"the models of a table differ on {data} in one of {', '.join(alike)}", COMMAND)
    compared = compare_trainings(found, [tuple(pair) for pair in pairs])
    return {(pair.better, pair.worse): pair for pair in compared}


def _find_training(report: Report, name: str, data: str) -> Source | None:
    """The record of a model on a data set of the night."""
    source = report.results.find(f"results/{load_questions()['models'][name]['cell']}_{data}/metrics.json")
    return source if source is not None and source.metrics["kind"] == data else None
