"""Building blocks of the pages' Markdown. A link names its file by the path from the checkout's root."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from posixpath import dirname, relpath
from typing import Any
from urllib.parse import quote

_CODE_OR_TAG = re.compile(r"(`[^`\n]*`)|<(?=\S)")  # code, which stays as it is, or a `<` that would open a tag
_LINK = re.compile(r"\]\((?!#|https?:)([^)]+)\)")  # the target of a link to a file
# a numeric cell, which is right-aligned: numbers with their units, each with an interval or a remark in parentheses
_NUMBER = r"[<>+−-]? ?\d[\d,.]*(?:e[+-]?\d+)?[%×²]?(?: (?:%|×|ms|MiB|± [\d.]+|(?:of|or) \d+))?"
_REST = r"(?: \[[^]]*\])?(?: \([^)]*\))?"
_NUMERIC = re.compile(rf"\*{{0,2}}{_NUMBER}{_REST}(?:; {_NUMBER}{_REST})*\*{{0,2}}")


def code(text: object) -> str:
    """Return text as code."""
    return f"`{text}`"


def strong(text: object) -> str:
    """Return text in bold."""
    return f"**{text}**"


def number(value: object, form: str = "", unit: str = "") -> str:
    """Format a value with its unit; `–` for None or an empty value."""
    return "–" if value in (None, "–", "") else format(value, form) + unit


def show_p(p: float | None) -> str:
    """Format a p-value with three decimals; a smaller one is no zero but `< 0.001`, and None is `–`."""
    return "< 0.001" if p is not None and p < 0.001 else number(p, ".3f")


def picture(file: str, text: str) -> str:
    """Return a picture by its file, relative to results/, with a description."""
    return f"![{text}](results/{quote(file)})"


def bullets(lines: Iterable[str]) -> str:
    """Return a list with an item for each line; empty without lines."""
    return "\n".join(f"- {line}" for line in lines)


def join(blocks: Iterable[str]) -> str:
    """Join paragraphs, tables and lists with empty lines; leave out empty ones."""
    return "\n\n".join(filter(None, blocks))


def table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table; columns whose filled cells are mostly numbers are right-aligned."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    columns = list(zip(*cells, strict=True)) or [()] * len(header)
    filled = ([cell for cell in column if cell not in ("", "–")] for column in columns)
    right = [2 * sum(_NUMERIC.fullmatch(cell) is not None for cell in of) > len(of) for of in filled]
    rule = "|".join("---:" if each else "---" for each in right)
    return "\n".join([f"| {' | '.join(header)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in cells)])


def tabulate(columns: Mapping[str, Callable[[Any], object]], rows: Iterable[Any]) -> str:
    """Return a table with a line for each of `rows`; `columns` maps a title to the function from a row to its cell."""
    return table([*columns], ([show(row) for show in columns.values()] for row in rows))


def cross(
    title: str,
    cells: Mapping[tuple[str, Any], Any],
    show: Callable[[Any], object],
    name: Callable[[Any], str] = "{}²".format,
) -> str:
    """Return a table of cells by (row, column), with sorted columns.

    Args:
        title: the heading of the column of row names.
        cells: (row, column) -> the argument of `show`, which is None for an absent cell.
        show: formats a cell.
        name: formats a column's heading; by default an image size such as `224²`.
    """
    columns = sorted({column for _, column in cells})
    heads = dict.fromkeys(row for row, _ in cells)
    rows = ([row, *(show(cells.get((row, column))) for column in columns)] for row in heads)
    return table([title, *map(name, columns)], rows)


def show_interval(value: float, interval: Sequence[float] | None, form: str, unit: str = "") -> str:
    """Format a value and, in brackets, the ends of its interval if it has one."""
    return f"{value:{form}}{unit}" + (f" [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else "")


def make_anchor(title: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def place_on_page(text: str, page: str) -> str:
    """Adapt text to a page, a file relative to the checkout: links lead from there, and no `<` opens a tag."""
    text = _CODE_OR_TAG.sub(lambda found: found[1] or "&lt;", text)
    return _LINK.sub(lambda found: f"]({relpath(found[1], dirname(page) or '.')})", text)
