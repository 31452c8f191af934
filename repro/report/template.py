"""Pages that people write as Jinja2 templates, and what they may ask of the records."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .answer import judge_question
from .claims import Report
from .gallery import find_all_speeds
from .variants import judge_variants
from .verdicts import Status, count_statuses


def render_template(
    file: Path, reports: Sequence[Report], parts: Mapping[str, Callable[..., Any]], to_results: str = ""
) -> str:
    """Fill a template with what the records of all papers say.

    Args:
        file: Markdown in Jinja2. It may call the functions below and `parts`, each without its report. A name that is
            not known is an error.
        reports: the primary paper's first.
        parts: functions of the primary paper's report.
        to_results: leads from the folder of the page to results/, for links.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(file.parent),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    first, *_ = reports
    own = (judge, printed, compare_speed, compare_memory, name_device, count_pairs, count_status)
    functions = {
        name: partial(part, first) for name, part in ({each.__name__: each for each in own} | {**parts}).items()
    }
    return environment.get_template(file.name).render(**functions, reports=reports, results=to_results)


def judge(report: Report, says: str) -> str:
    """How a question of the verdict is answered, in words, with its numbers."""
    (question,) = (each for each in report.paper.questions if each.says == says)
    own = [report.verdicts[name] for name in question.find(report.paper.ledger)]
    verb, detail = judge_question(own)
    return f"{verb.strip()} ({detail})"


def printed(report: Report, name: str) -> str:
    """The paper's number of an entry of its ledger."""
    return report.paper.ledger.entries[name].printed or ""


def compare_speed(report: Report, kind: str, size: int, attention: str) -> str:
    """How many times as fast as the baseline the model is on a `GPU` or a `CPU` at an image size, with its interval."""
    return _compare(report, kind, "find_ratios", size, attention)


def compare_memory(report: Report, kind: str, size: int, attention: str) -> str:
    """How much more or less memory than the baseline the model takes on a `GPU` or a `CPU`."""
    return _compare(report, kind, "find_memory", size, attention)


def name_device(report: Report, kind: str) -> str:
    """The device, batch and precision of `compare_speed`; `not measured` where there is none."""
    speeds = _find_speeds(report, kind)
    return str(speeds.group).partition(": ")[2] if speeds else "not measured"


def _compare(report: Report, kind: str, what: str, size: int, attention: str) -> str:
    speeds = _find_speeds(report, kind)
    return getattr(speeds, what)(report.paper.contest)[attention].get(size, "–") if speeds else "not measured"


def _find_speeds(report: Report, kind: str) -> Any:
    """The rows of a kind of device with the largest batch, in which the host's share is least."""
    every = find_all_speeds(report.paper.contest, report.results)
    return next((speeds for speeds in every if speeds.is_gpu == (kind == "GPU")), None)


def count_pairs(report: Report, place: str, data: str) -> str:
    """How many pairs of a table or figure are seen on a data set, for each way to choose rates; with seeds and images."""
    found = {}
    for group, where, ordering in judge_variants(report):
        if where.place == place and group.common["data"] == data:
            found.setdefault(group.rates, ordering.counted)
    return "; ".join(f"{counted} at {rates}" for rates, counted in found.items()) or "not trained"


def count_status(report: Report, *words: str) -> int:
    """How many entries of the ledger have one of these statuses."""
    counts = count_statuses(report.all)
    return sum(counts[Status(word)] for word in words)
