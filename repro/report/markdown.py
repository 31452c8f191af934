"""Markdown that several pages need."""

from collections.abc import Iterable, Sequence
from typing import Any


def grid(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; what would break one is escaped."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
