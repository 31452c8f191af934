"""Pages that people write: Markdown in which `{expression}` becomes what the records say.

A page has sections (`## title`), headings (`### title`), bullets and paragraphs, with the markup of `document.prose`.
An expression is one of a ledger, see `expressions`; an id is our number. `{expression:.1f}` formats a number. An
expression alone in its paragraph may give blocks, such as a table, or whole sections.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from .arithmetic import Number
from .claims import Report
from .document import Block, Bullets, Heading, Line, Section, plain, prose
from .expressions import Expression
from .results import Missing
from .verdicts import significant

_PLACEHOLDER = re.compile(r"\{([^{}]+?)(?::([,+]?(?:\.\d+)?[dfg%]))?\}")
Part = Callable[..., Any]  # (report, constants of the expression) -> a number, text, a line, blocks or sections


def read_page(file: Path, report: Report, parts: Mapping[str, Part]) -> list[Section]:
    """Fill a page; what precedes its first section is for those who write it.

    Where a number is missing, its paragraph is the reason and the command that would measure it. A section is left out
    where it has expressions alone in their paragraphs and none of them gives a block. `parts` are further functions of
    the report. An expression that is not understood is a `ValueError`.
    """
    filler = _Filler(report, parts)
    sections: list[Section] = []
    for part in re.split(r"^##? ", file.read_text(encoding="utf-8"), flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        paragraphs = re.split(r"\n\s*\n", body.strip())
        filled = {text: filler.fill(text) for text in paragraphs if _PLACEHOLDER.fullmatch(text)}
        shown = [block for found in filled.values() for block in found if not isinstance(block, Section)]
        if shown or not filled:
            blocks: list[Block] = []
            for text in paragraphs:
                for block in filled[text] if text in filled else filler.fill(text):
                    if not isinstance(block, Section) and block not in blocks[-1:]:
                        blocks.append(block)
            sections.append(Section(plain(*filler.fill_line(title)), blocks))
        sections += [each for found in filled.values() for each in found if isinstance(each, Section)]
    return sections


class _Filler:
    def __init__(self, report: Report, parts: Mapping[str, Part]):
        self.report = report
        self.functions = {**report.results.functions(), **report.paper.formulas()}
        self.functions["printed"] = lambda name: Fraction(report.paper.ledger.entries[name].printed)
        self.functions |= {name: partial(part, report) for name, part in parts.items()}

    def fill(self, paragraph: str) -> list[Any]:
        """The blocks of a paragraph, or its sections."""
        try:
            alone = _PLACEHOLDER.fullmatch(paragraph)
            if alone and isinstance(found := self._evaluate(alone[1]), list):
                return found
            if paragraph.startswith("### "):
                return [Heading(plain(*self.fill_line(paragraph.removeprefix("### "))))]
            if paragraph.startswith("- "):
                lines = re.split(r"^- ", paragraph, flags=re.M)[1:]
                return [Bullets([self.fill_line(line.strip()) for line in lines])]
            line = self.fill_line(paragraph)
        except Missing as missing:
            reason, command = missing.args
            how = "." if command.startswith("none") else f": `{command}`."
            line = (f"{reason[0].upper()}{reason[1:]}", *prose(how))
        return [line] if any(line) else []

    def fill_line(self, text: str) -> Line:
        """A line of text, whose own line breaks are spaces."""
        first, *parts = _PLACEHOLDER.split(re.sub(r"\s*\n\s*", " ", text))
        line = prose(first)
        for expression, form, after in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            line += (*self._show(self._evaluate(expression), form), *prose(after))
        return tuple(piece for piece in line if piece != "")

    def _evaluate(self, text: str) -> Any:
        return Expression.parse(text).evaluate(self._find_ours, self.functions)

    def _find_ours(self, name: str) -> Number:
        verdict = self.report.verdicts[name]
        if verdict.ours is None:
            raise Missing(verdict.reason or verdict.evidence, verdict.command or "none")
        return verdict.ours

    def _show(self, value: Any, form: str | None) -> Line:
        if form is not None:
            return (format(float(value) if form[-1] != "d" else int(value), form),)
        if isinstance(value, tuple):
            return value
        if isinstance(value, float | Fraction):
            return (f"{int(value):,}" if value == int(value) else significant(float(value)),)
        return (f"{value:,}",) if isinstance(value, int) else (value,)
