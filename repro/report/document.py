"""A page as data: sections of paragraphs, lists and tables. `markdown` and `html` render it.

A piece of text is a `str` (never read as markup) or one of the classes below; a line is a tuple of pieces.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Text:
    """Text with a meaning: a command or file as it is typed, a number with its unit, or what is stressed."""

    text: str
    style: Literal["code", "number", "strong", "emphasis"]


@dataclasses.dataclass(frozen=True)
class Link:
    """A link to a file, relative to the checkout's root, or else to the section of this title on the same page."""

    text: str
    file: str = ""
    section: str = ""

    def find_target(self, to_results: str = "", prefix: str = "") -> str:
        """What it leads to from a page whose anchors begin with `prefix`; `to_results` leads from there to results/."""
        if not self.file:
            return f"#{prefix}{make_anchor(self.section)}"
        inside = self.file.removeprefix("results/")
        return to_results + (inside if inside != self.file else f"../{self.file}")


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture: its file, relative to results/, and what it shows, in words."""

    file: str
    text: str


@dataclasses.dataclass(frozen=True)
class Mark:
    """The mark of a status, which is named by a word."""

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
        return " ".join(filter(None, (self.paper, "→", plain(self.ours), plain(*self.result))))


Piece = str | Text | Link | Picture | Mark | Comparison
Line = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Bullets:
    lines: Sequence[Line]


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
        filled = ([line for line in column if plain(*line) not in ("", "–")] for column in columns)
        numeric = ([len(line) == 1 and getattr(line[0], "style", "") == "number" for line in of] for of in filled)
        return [2 * sum(of) > len(of) for of in numeric]


Block = Line | Bullets | Heading | Table  # a line alone is a paragraph


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def code(text: str) -> Text:
    return Text(text, "code")


_MARKUP = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|\*(\w[^*]*)\*|\[([^]]+)\]\(([^)]+)\)")


def prose(text: str) -> Line:
    """A line of our own words with the markup of Markdown: code, strong, emphasis and `[text](file of a checkout)`."""

    first, *parts = _MARKUP.split(text)
    line: list[Piece] = [first]
    for place in range(0, len(parts), 6):
        typed, stressed, emphatic, linked, file, after = parts[place : place + 6]
        found = code(typed) if typed else strong(stressed) if stressed else Text(emphatic, "emphasis")
        line += [Link(linked, file) if linked else found, after]
    return tuple(piece for piece in line if piece != "")


def number(value: object, form: str = "", unit: str = "") -> Piece:
    """A number as text, or formatted, and its unit; `–` where there is none."""
    return "–" if value in (None, "–", "") else Text(format(value, form) + unit, "number")


def strong(text: object) -> Text:
    return Text(str(text), "strong")


def table(header: Iterable[str], rows: Iterable[Iterable[Piece | Line]]) -> Table:
    """A table; a cell is one piece, or several of them in a tuple."""
    lines = ((cell if isinstance(cell, tuple) else (cell,) for cell in row) for row in rows)
    return Table(tuple(header), tuple(map(tuple, lines)))


def tabulate(columns: Mapping[str, Callable[[Any], Piece | Line]], rows: Iterable[Any]) -> Table:
    """A table of a row for each of `rows`: title of a column -> what its cell shows of a row."""
    return table(columns, ([show(row) for show in columns.values()] for row in rows))


def cross(
    title: str,
    cells: Mapping[tuple[str, Any], Any],
    show: Callable[[Any], Piece | Line],
    name: Callable[[Any], str] = "{}²".format,
) -> Table:
    """A table of (row, column) -> what `show` makes a cell of, or None where there is nothing; the columns in order."""
    columns = sorted({column for _, column in cells})
    heads = dict.fromkeys(row for row, _ in cells)
    rows = ([row, *(show(cells.get((row, column))) for column in columns)] for row in heads)
    return table([title, *map(name, columns)], rows)


def show_interval(value: float, interval: Sequence[float] | None, form: str, unit: str = "") -> str:
    """A value and, in brackets, the ends of its interval, where it has one."""
    return f"{value:{form}}{unit}" + (f" [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else "")


def join(lines: Iterable[Line], between: str) -> Line:
    """The lines as one, with `between` in between."""
    return tuple(piece for line in lines for piece in (between, *line))[1:]


def plain(*line: Piece) -> str:
    """The plain text of a line."""
    return "".join(piece if isinstance(piece, str) else piece.text for piece in line)


def make_anchor(title: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
