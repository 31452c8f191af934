"""A page as data: sections of paragraphs, lists and tables, whose cells know what they hold. `markdown` and `html` render it.

A piece of text is a `str` (shown as it is, never read as markup) or one of the classes below; a line is a tuple of pieces.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from .statuses import Status


@dataclasses.dataclass(frozen=True)
class Text:
    """Text with a meaning: a command or file as it is typed, a number with its unit, or what is stressed."""

    text: str
    style: Literal["code", "number", "strong", "emphasis"]


@dataclasses.dataclass(frozen=True)
class Link:
    """A link to the section of this title on the same page."""

    text: str
    section: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture: its file, relative to results/, and what it shows, in words."""

    file: str
    text: str


@dataclasses.dataclass(frozen=True)
class Mark:
    """The mark of a status, with a word of its own where it says more than the status."""

    status: Status
    text: str
    word: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The paper's number, ours (a mark where we have none) and what that comes to."""

    paper: str
    ours: "Piece"
    result: "Line" = ()

    @property
    def text(self) -> str:
        return " ".join(filter(None, (self.paper, "→", plain((self.ours,)), plain(self.result))))


Piece = str | Text | Link | Picture | Mark | Comparison
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
        columns = list(zip(*self.rows)) or [()] * len(self.header)
        filled = [[line for line in column if plain(line) not in ("", "–")] for column in columns]
        return [2 * sum(len(line) == 1 and getattr(line[0], "style", "") == "number" for line in lines) > len(lines) for lines in filled]


Block = Paragraph | Bullets | Heading | Table


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Document:
    """A page: its title, what stands before the first section, and the sections."""

    title: str
    lead: tuple[Block, ...]
    sections: tuple[Section, ...]


def code(text: str) -> Text:
    return Text(text, "code")


def number(text: object) -> Text:
    return Text(str(text), "number")


def strong(text: object) -> Text:
    return Text(str(text), "strong")


def mark(status: Status, symbol: str | None = None, word: str | None = None) -> Mark:
    return Mark(status, symbol or status.mark, word or status.word)


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
    return "".join(piece if isinstance(piece, str) else piece.text for piece in line)


def make_anchor(title: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
