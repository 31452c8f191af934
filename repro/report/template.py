"""Pages as Jinja2 templates in Markdown: people write the text, and functions fill in the numbers of the records."""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .answer import judge_question
from .claims import Report
from .gallery import Speeds, find_all_speeds
from .paper import list_functions
from .records import Missing, is_remark
from .variants import judge_variants
from .verdicts import Status, count_statuses

if TYPE_CHECKING:
    from jinja2 import Environment

# before and after the reason why a number is missing; `_call` writes it, and `render_template` then drops all other
# text of the paragraph
_MARK = "\0"
_NOT_MEASURED = "not measured"  # in a cell, where `Missing` would replace the whole table
_LINE_BREAK = re.compile(r"\s*\n(?!\||- |\d+\. )\s*")  # within a paragraph or an item of a list


def render_template(file: Path, report: Report, parts: Mapping[str, Callable[..., Any]]) -> str:
    """Fill a template with the numbers of the records.

    A paragraph with a missing number becomes the reason and the command that would measure it; equal ones in a row are
    written once.

    Args:
        file: Markdown in Jinja2; an unknown name is an error.
        report: the functions' first argument.
        parts: the functions that the template may call in addition to those of this module.
    """
    environment = make_environment(file.parent)
    environment.finalize = lambda value: f"{value:,}" if isinstance(value, int) else value  # 1303 as `1,303`
    functions = list_functions(sys.modules[__name__]) | {**parts}
    environment.globals = {name: partial(_call, part, report) for name, part in functions.items()}
    paragraphs = []
    for text in re.split(r"\n\s*\n", environment.get_template(file.name).render().strip()):
        if _MARK in text:
            text = text.split(_MARK)[1]
        if text not in paragraphs[-1:]:
            paragraphs.append(_LINE_BREAK.sub(" ", text))
    return "\n\n".join(paragraphs) + "\n"


def make_environment(folder: Path, *, autoescape: bool = False) -> "Environment":
    """Return a Jinja2 environment for a folder's templates, Markdown or HTML, in which an unknown name is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _call(part: Callable[..., Any], report: Report, *arguments: Any) -> Any:
    """Call a function of a template; return the sentence on a missing number, between marks, instead of raising.

    So `{% if %}` keeps the heading of a section whose function raised `Missing`, and drops that of an empty result.
    """
    try:
        return part(report, *arguments)
    except Missing as missing:
        reason, command = missing.args
        how = "." if is_remark(command) else f": `{command}`."
        return f"{_MARK}{reason[0].upper()}{reason[1:]}{how}{_MARK}"


def judge(report: Report, says: str) -> str:
    """Return the answer to a question of the verdict in words, with its numbers.

    `says` is that of a question in the paper's paper.yaml, word by word; each question has its own.

    Raises:
        ValueError: no such question.
    """
    question = next((each for each in report.paper.questions if each.says == says), None)
    if question is None:
        raise ValueError(f"no question of {report.paper.name} says {says!r}; see its paper.yaml")
    verb, detail = judge_question(report.select(question))
    return f"{verb.strip(': ')} ({detail})"


def printed(report: Report, name: str) -> str:
    """Return the paper's number of a ledger's entry by the entry's id; empty for a statement."""
    return report.paper.ledger.entries[name].printed or ""


def compare_speed(report: Report, kind: str, size: int, attention: str) -> str:
    """Return the speed-up over the baseline on a `GPU` or a `CPU` at an image size in pixels, with its range.

    `not measured` where the device has no record, `–` where there is no ratio.
    """
    speeds = _find_speeds(report, kind)
    return (speeds.describe_ratio(attention, size) or "–") if speeds else _NOT_MEASURED


def compare_memory(report: Report, kind: str, size: int, attention: str) -> str:
    """Return the difference in memory to the baseline on a `GPU` or a `CPU`; missing values as in `compare_speed`."""
    speeds = _find_speeds(report, kind)
    return (speeds.describe_memory(attention, size) or "–") if speeds else _NOT_MEASURED


def name_device(report: Report, kind: str) -> str:
    """Return the device, batch size and precision of `compare_speed`, and in parentheses what is not known of its times.

    `not measured` where there is no record.
    """
    if (speeds := _find_speeds(report, kind)) is None:
        return _NOT_MEASURED
    caveat = speeds.group.caveat.removeprefix("; ")
    return str(speeds.group).partition(": ")[2] + (f" ({caveat})" if caveat else "")


def _find_speeds(report: Report, kind: str) -> Speeds | None:
    """Return a kind of device's record with the largest batch, in which the host's share of the time is least."""
    every = find_all_speeds(report.paper.comparison, report.results)
    return next((speeds for speeds in every if speeds.group.is_gpu == (kind == "GPU")), None)


def describe_pairs(report: Report, place: str, data: str) -> str:
    """Return a table's or figure's count of seen pairs on a data set, for each choice of rates; else `not trained`.

    Of several groups, that with the most seeds counts.
    """
    found = {}
    for group, where, ordering in judge_variants(report):
        if where.place == place and group.common["data"] == data:
            found.setdefault(group.rates, ordering.counted)
    return "; ".join(f"{counted} at {rates}" for rates, counted in found.items()) or "not trained"


def count_status(report: Report, *words: str) -> int:
    """Return the number of the ledger's entries with one of these statuses; without words, of all entries."""
    counts = count_statuses(report.all)
    return sum(counts[Status(word)] for word in words) if words else counts.total()
