"""Markdown, as the functions of a page return it. A link names its file by the path from the checkout's root."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from posixpath import dirname, relpath
from typing import Any
from urllib.parse import quote

_CODE_OR_TAG = re.compile(r"(`[^`\n]*`)|<(?=\S)")
_LINK = re.compile(r"\]\((?!#|https?:)([^)]+)\)")
# a cell that is right-aligned: a number with its unit, or several, with an interval or a remark in parentheses behind it
_NUMBER = r"[<>+−-]? ?\d[\d,.]*(?:e[+-]?\d+)?[%×²]?(?: (?:%|×|ms|MiB|± [\d.]+|(?:of|or) \d+))?"
_REST = r"(?: \[[^]]*\])?(?: \([^)]*\))?"
_NUMERIC = re.compile(rf"\*{{0,2}}{_NUMBER}{_REST}(?:; {_NUMBER}{_REST})*\*{{0,2}}")


def code(text: object) -> str:
    return f"`{text}`"


def strong(text: object) -> str:
    return f"**{text}**"


def number(value: object, form: str = "", unit: str = "") -> str:
    """A number as text, or formatted, and its unit; `–` where there is none."""
    return "–" if value in (None, "–", "") else format(value, form) + unit


def picture(file: str, text: str) -> str:
    """A picture by its file, relative to results/, with a description."""
    return f"![{text}](results/{quote(file)})"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def join(blocks: Iterable[str]) -> str:
    """Paragraphs, tables and lists with empty lines between them; an empty one is left out."""
    return "\n\n".join(filter(None, blocks))


def table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table; columns whose filled cells are mostly numbers are aligned to the right."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    columns = list(zip(*cells, strict=True)) or [()] * len(header)
    filled = ([cell for cell in column if cell not in ("", "–")] for column in columns)
    right = [2 * sum(_NUMERIC.fullmatch(cell) is not None for cell in of) > len(of) for of in filled]
    rule = "|".join("---:" if each else "---" for each in right)
    return "\n".join([f"| {' | '.join(header)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in cells)])


def tabulate(columns: Mapping[str, Callable[[Any], object]], rows: Iterable[Any]) -> str:
    """A table of a row for each of `rows`: title of a column -> what its cell shows of a row."""
    return table([*columns], ([show(row) for show in columns.values()] for row in rows))


def cross(
    title: str,
    cells: Mapping[tuple[str, Any], Any],
    show: Callable[[Any], object],
    name: Callable[[Any], str] = "{}²".format,
) -> str:
    """A table of (row, column) -> what `show` makes a cell of, or None where there is nothing; the columns in order."""
    columns = sorted({column for _, column in cells})
    heads = dict.fromkeys(row for row, _ in cells)
    rows = ([row, *(show(cells.get((row, column))) for column in columns)] for row in heads)
    return table([title, *map(name, columns)], rows)


def show_interval(value: float, interval: Sequence[float] | None, form: str, unit: str = "") -> str:
    """A value and, in brackets, the ends of its interval, where it has one."""
    return f"{value:{form}}{unit}" + (f" [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else "")


def make_anchor(title: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def place_on_page(text: str, page: str) -> str:
    """The text as it stands on a page, a file relative to the checkout: links lead from there, and no `<` opens a tag."""
    text = _CODE_OR_TAG.sub(lambda found: found[1] or "&lt;", text)
    return _LINK.sub(lambda found: f"]({relpath(found[1], dirname(page) or '.')})", text)
