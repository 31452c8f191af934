"""A table for people: rich's on a terminal, aligned plain text in a pipe or a log, where nothing is cut or wrapped."""

import sys
from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows`, one string per column of `header`. The first column, a name or a command to copy, is never broken."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*header)
        for column in table.columns:
            column.overflow = "fold"  # and never an ellipsis
        table.columns[0].no_wrap = True
        for row in rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))  # else [design=dual] would be taken for markup
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
