"""Output of commands: progress, tables and errors; rich on a terminal, plain text elsewhere."""

import codecs
import contextlib
import dataclasses
import io
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from .errors import RunError

_QUIET_S = 2.0  # shorter work shows no progress
_LINE_EVERY_S = 10.0  # seconds between two lines of progress in a log
_MOST_CHARACTERS = 300  # the longest line of an error
# characters of our messages -> what a terminal that lacks them gets
_PLAIN = str.maketrans(
    {"–": "-", "—": "-", "−": "-", "×": "x", "·": "*", "≤": "<=", "≥": ">=", "±": "+-", "█": "#", "≈": "~"}
)
# control characters, marks that reverse the direction of text, and surrogates, which are no characters
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_line(text: object) -> str:
    """Escape control characters and bytes that are not UTF-8, so that a terminal prints the text on one line."""

    def escape(match: re.Match) -> str:
        code = ord(match[0])
        is_byte = 0xDC80 <= code <= 0xDCFF  # Python's surrogateescape for a byte of a file name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}" if is_byte else match[0].encode("unicode_escape").decode()

    return _UNSHOWN.sub(escape, str(text))


def print_error(error: Exception | str) -> None:
    """Print an error as one line on stderr, if that is open.

    In a long line, paths become relative to the working directory, and then the middle is cut out. `repro run` finds
    the line in a stage's output by its beginning, `repro: `.
    """
    line = escape_line(re.sub(r"\s+", " ", f"repro: {error}", flags=re.ASCII))
    if len(line) > _MOST_CHARACTERS:
        line = line.replace(f"{os.getcwd()}{os.sep}", "")
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[:198]} ... {line[-(_MOST_CHARACTERS - 203) :]}"
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class _Stdout(io.FileIO):
    """Standard output whose first failed write raises an error with the file name `stdout`; later output is dropped.

    Without this, flushing at exit would raise a second error.
    """

    def write(self, content: Any) -> int | None:
        try:
            return super().write(content)
        except OSError as error:
            error.filename = "stdout"
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise


def allow_every_terminal() -> None:
    """Make stdout and stderr accept any text, whatever their encoding.

    A character that the encoding lacks becomes a similar plain one, or a question mark. Output to a closed stderr is
    dropped. A write error of stdout is an OSError with the file name `stdout`.

    Raises:
        RunError: stdout is closed.
    """
    # occupy file descriptors 0 to 2: a file opened later would get a closed stream's number, and libraries' output
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if sys.stdout is None:
        raise RunError("stdout is closed; write it to a file, or to /dev/null")
    if sys.stdout is sys.__stdout__:  # not if a test has replaced it
        raw, kept = _Stdout(sys.stdout.fileno(), "wb", closefd=False), ("encoding", "line_buffering", "write_through")
        buffer = raw if sys.stdout.write_through else io.BufferedWriter(raw)
        sys.stdout = io.TextIOWrapper(buffer, **{name: getattr(sys.stdout, name) for name in kept})

    def replace(error: UnicodeError) -> tuple[str, int]:
        """Return what takes the place of the characters that cannot be encoded, and where encoding goes on."""
        text = unicodedata.normalize("NFKD", error.object[error.start : error.end].translate(_PLAIN))
        kept = "".join(each for each in text if not unicodedata.combining(each))
        return kept.encode("ascii", "replace").decode("ascii"), error.end

    codecs.register_error("plain", replace)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="plain")


@dataclasses.dataclass
class Progress:
    """A context manager that shows progress: a bar on a terminal, a line from time to time in a log.

    Args:
        label: a name for the work.
        total: the number of its units.
        done: the number of units that were finished before.
        unit: the name of a unit in a log, e.g. `images`.
        every_update: whether a log has a line on stdout for every update; by default it has one on stderr every ten
            seconds.
        shown: whether to show anything; False on all ranks but the first.
    """

    label: str
    total: int
    _: dataclasses.KW_ONLY
    done: int = 0
    unit: str = ""
    every_update: bool = False
    shown: bool = True

    def __enter__(self) -> Self:
        """Start the clock; without `every_update` the bar or the first line appears after two seconds."""
        self._first, self._bar = self.done, None
        self._started = self._now = time.monotonic()
        self._next_line = self._started + (0.0 if self.every_update else _QUIET_S)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def rate(self) -> float:
        """Return the units per second up to the last update."""
        return (self.done - self._first) / max(self._now - self._started, 1e-9)

    def update(self, done: int, text: str = "") -> None:
        """Show that `done` units are finished, with `text` after the count."""
        self.done, self._now = done, time.monotonic()
        if not self.shown or self._now < self._next_line:
            return
        if sys.stderr.isatty():
            self._show_bar(text)
        elif self.every_update:
            self._log(f"{self.label} {done}/{self.total}" + (f", {text}" if text else ""))
        elif done < self.total:
            self._next_line = self._now + _LINE_EVERY_S
            speed = f", {self.rate:,.0f} {self.unit}/s" if self.unit and self.rate >= 1 else ""
            left = f", {(self.total - done) / self.rate:.0f} s left" if self.rate else ""
            unit = f" {self.unit}" if self.unit else ""
            self._log(f"{self.label}: {done:,} of {self.total:,}{unit}{speed}{left}" + (f", {text}" if text else ""))

    def print(self, line: str) -> None:
        """Print a permanent line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self.shown:
            self._log(line)

    def _log(self, line: str) -> None:
        print(line, file=sys.stdout if self.every_update else sys.stderr, flush=True)

    def _show_bar(self, text: str) -> None:
        """Update the bar, which the first call makes."""
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self.label, total=self.total, completed=self._first)
            self._bar.start()
        description = f"{self.label}, {text}" if text else self.label
        self._bar.update(self._bar.task_ids[0], completed=self.done, description=description)


def track(items: Sequence[Any] | Iterable[Any], label: str, total: int | None = None, unit: str = "") -> Iterator[Any]:
    """Yield the items and show the progress; `total` is needed if they have no length."""
    with Progress(label, len(items) if total is None else total, unit=unit) as progress:
        for number, item in enumerate(items, 1):
            yield item
            progress.update(number)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows`, one string per column of `header`; in a pipe or a log as aligned text that is never cut or wrapped.

    The first column, a name or a command to copy, is never broken. On a terminal too narrow for it and one word of each
    other column, each row is printed as plain text.
    """
    rows = [[escape_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    if sys.stdout.isatty():
        from rich.cells import cell_len
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table, console = Table(), Console()
        for place, name in enumerate(header):
            whole = None if place else max(cell_len(row[0]) for row in (header, *rows))
            # "fold" wraps long cells; the default would cut them with an ellipsis
            table.add_column(Text(name), overflow="fold", no_wrap=place == 0, min_width=whole)
        for row in rows:
            table.add_row(*map(Text, row))  # as plain Text, since rich would read [design=dual] as markup
        if console.measure(table, options=console.options.update(max_width=sys.maxsize)).minimum <= console.width:
            console.print(table)
            return
        widths = [0] * len(header)
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
