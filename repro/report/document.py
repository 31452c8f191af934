"""A page as data: sections of paragraphs, lists and tables, whose cells know what they hold. `markdown` and `html` render it.

A piece of text is a `str` (shown as it is, never read as markup) or one of the classes below; a line is a sequence of pieces.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from .statuses import STATUSES, Status


@dataclasses.dataclass(frozen=True)
class Code:
    """A command, a file or a name as it is typed."""

    text: str


@dataclasses.dataclass(frozen=True)
class Strong:
    text: str


@dataclasses.dataclass(frozen=True)
class Emphasis:
    text: str


@dataclasses.dataclass(frozen=True)
class Number:
    """A number with its unit and its interval, formatted. Columns that are mostly numbers are set to the right."""

    text: str


@dataclasses.dataclass(frozen=True)
class Link:
    """A link to the section of this title on the same page."""

    text: str
    section: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture: its file, relative to results/, and what it shows, in words."""

    file: str
    alt: str


@dataclasses.dataclass(frozen=True)
class Mark:
    """The mark of a status; `word` where it says more than the status's own word."""

    status: Status
    symbol: str = ""
    word: str = ""

    @property
    def shown(self) -> str:
        return self.symbol or self.status.mark

    @property
    def title(self) -> str:
        return self.word or self.status.word


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The paper's number, ours (a mark where we have none) and what that comes to."""

    paper: str
    ours: "Piece"
    result: "Line" = ()


Piece = str | Code | Strong | Emphasis | Number | Link | Picture | Mark | Comparison
Line = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Paragraph:
    line: Line


@dataclasses.dataclass(frozen=True)
class Bullets:
    lines: tuple[Line, ...]


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    title: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; where the first column has no title but others have one, its cells are the heads of the rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]

    @property
    def has_row_heads(self) -> bool:
        return not self.header[0] and any(self.header)

    @property
    def right_aligned(self) -> list[bool]:
        """For each column, whether most of its filled cells are numbers."""
        aligned = []
        for column in zip(*self.rows) if self.rows else [()] * len(self.header):
            filled = [line for line in column if line not in ((), ("",), ("–",)) and not _is_dash(line)]
            aligned.append(2 * sum(len(line) == 1 and isinstance(line[0], Number) for line in filled) > len(filled))
        return aligned


Block = Paragraph | Bullets | Heading | Table


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]

    @property
    def anchor(self) -> str:
        return make_anchor(self.title)


@dataclasses.dataclass(frozen=True)
class Document:
    """A page: its title, what stands before the first section, and the sections."""

    title: str
    lead: tuple[Block, ...]
    sections: tuple[Section, ...]


def paragraph(*pieces: Piece) -> Paragraph:
    """A paragraph of these pieces."""
    return Paragraph(pieces)


def table(header: Sequence[str], rows: Iterable[Sequence[Piece | Line]]) -> Table:
    """A table; a cell is one piece, or several of them in a tuple."""
    return Table(tuple(header), tuple(tuple(cell if isinstance(cell, tuple) else (cell,) for cell in row) for row in rows))


def join(lines: Iterable[Line], between: str) -> Line:
    """The lines as one, with `between` in between."""
    joined: list[Piece] = []
    for line in lines:
        joined += [between, *line] if joined else line
    return tuple(joined)


def plain(line: Line) -> str:
    """The text of a line without what it looks like."""
    return "".join(_plain(piece) for piece in line)


def make_anchor(title: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _plain(piece: Piece) -> str:
    match piece:
        case str():
            return piece
        case Picture(alt=alt):
            return alt
        case Mark():
            return piece.shown
        case Comparison(paper=paper, ours=ours, result=result):
            return f"{paper} → {_plain(ours)}{' ' if result else ''}{plain(result)}"
    return piece.text


def _is_dash(line: Line) -> bool:
    return len(line) == 1 and isinstance(line[0], Mark) and line[0].status is STATUSES["not measured"]
