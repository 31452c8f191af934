"""What the user sees of a command: one progress display, one table. Rich on a terminal, plain text elsewhere."""

import codecs
import dataclasses
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

QUIET_S = 2.0  # shorter work shows nothing
LINE_EVERY_S = 10.0
MOST_CHARACTERS = 300  # of an error
_PLAIN = str.maketrans(
    {"–": "-", "—": "-", "−": "-", "×": "x", "·": "*", "≤": "<=", "≥": ">=", "±": "+-", "█": "#", "≈": "~"}
)


def print_error(error: Exception | str) -> None:
    """Print an error on stderr as one line; in a long one, paths begin in the working directory and the middle is left
    out.
    """
    line = " ".join(f"repro: {error}".split())
    if len(line) > MOST_CHARACTERS:
        line = line.replace(f"{os.getcwd()}{os.sep}", "")
    if len(line) > MOST_CHARACTERS:
        line = f"{line[:198]} ... {line[-(MOST_CHARACTERS - 203) :]}"
    print(line, file=sys.stderr, flush=True)


def allow_every_terminal() -> None:
    """Let stdout and stderr take any text: a character that their encoding lacks becomes a plain one like it, or a
    question mark.
    """

    def replace(error: UnicodeError) -> tuple[str, int]:
        text = unicodedata.normalize("NFKD", error.object[error.start : error.end].translate(_PLAIN))
        kept = "".join(each for each in text if not unicodedata.combining(each))
        return kept.encode("ascii", "replace").decode("ascii"), error.end

    codecs.register_error("plain", replace)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="plain")


@dataclasses.dataclass
class Progress:
    """A bar on a terminal, a line now and then in a log; a context manager.

    Args:
        label, total, done: what is being done, how many units there are, and how many of them were finished before.
        unit: what is counted, e.g. `images`, for the lines of a log.
        log: takes the lines of a log.
        every_s: seconds between two lines of a log; 0 writes one at every update.
        shown: False shows nothing, as on all ranks but the first.
    """

    label: str
    total: int
    _: dataclasses.KW_ONLY
    done: int = 0
    unit: str = ""
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    every_s: float = LINE_EVERY_S
    shown: bool = True

    def __enter__(self) -> Self:
        self._first, self._bar = self.done, None
        self._started = self._now = time.monotonic()
        self._next_line = self._started + (QUIET_S if self.every_s else 0.0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def rate(self) -> float:
        """Units per second until the last update."""
        return (self.done - self._first) / max(self._now - self._started, 1e-9)

    def update(self, done: int, text: str = "") -> None:
        """Show that `done` units are finished, with `text` after the count."""
        self.done, self._now = done, time.monotonic()
        if not self.shown or self._now < self._next_line:
            return
        if sys.stderr.isatty():
            self._show_bar(text)
        elif self.every_s == 0:
            self.log(f"{self.label} {done}/{self.total}" + (f", {text}" if text else ""))
        elif done < self.total:
            self._next_line = self._now + self.every_s
            speed = f", {self.rate:,.0f} {self.unit}/s" if self.unit and self.rate >= 1 else ""
            left = f", {(self.total - done) / self.rate:.0f} s left" if self.rate else ""
            unit = f" {self.unit}" if self.unit else ""
            self.log(f"{self.label}: {done:,} of {self.total:,}{unit}{speed}{left}" + (f", {text}" if text else ""))

    def print(self, line: str) -> None:
        """Print a line that stays, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self.shown:
            self.log(line)

    def _show_bar(self, text: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self.label, total=self.total, completed=self._first)
            self._bar.start()
        description = f"{self.label}, {text}" if text else self.label
        self._bar.update(self._bar.task_ids[0], completed=self.done, description=description.replace("[", r"\["))


def track(items: Sequence[Any] | Iterable[Any], label: str, total: int | None = None, unit: str = "") -> Iterator[Any]:
    """The items, with their progress shown; `total` where they have no length."""
    with Progress(label, len(items) if total is None else total, unit=unit) as progress:
        for number, item in enumerate(items, 1):
            yield item
            progress.update(number)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows`, one string per column of `header`; in a pipe or a log as aligned plain text, in which nothing is
    cut or wrapped.

    The first column, a name or a command to copy, is never broken.
    """
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
