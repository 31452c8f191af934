"""Faults of a data set. A reader names each fault once, as a `Finding`, and hands it to a `Reporter`.

Training raises the first error; `repro data check` prints all findings and reads on.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from ..core.errors import UserError
from ..core.ui import escape_line, track

_MOST_SHOWN = 10  # findings of one fault that `PrintAll` prints


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line about a data set: a file or folder, a fault or a good result there, and advice."""

    severity: Literal["ok", "warning", "error"]  # an error breaks a run or its results; a run survives a warning
    place: Path
    problem: str
    advice: str = ""

    def __str__(self) -> str:
        """Return the finding as one line, `place: problem; advice`."""
        return escape_line(f"{self.place}: {self.problem}" + (f"; {self.advice}" if self.advice else ""))


class BadData(UserError):
    """An error in a data set; its only argument is the `Finding`."""

    @property
    def finding(self) -> Finding:
        """The finding that was raised."""
        return self.args[0]


class Reporter(abc.ABC):
    """Receiver of a reader's findings; with `progress` it shows the progress of slow steps."""

    def __init__(self, *, progress: bool = False):
        self.num_errors = self.num_warnings = 0  # numbers of findings so far
        self.progress = progress

    @abc.abstractmethod
    def add(self, findings: Sequence[Finding]) -> None:
        """Take findings of the same fault and severity."""

    def add_mixed(self, findings: Sequence[Finding]) -> None:
        """Take findings of several faults; those of one fault share their advice."""
        for advice in dict.fromkeys(finding.advice for finding in findings):
            self.add([finding for finding in findings if finding.advice == advice])

    def ok(self, place: Path, text: str) -> None:
        """Report a good result."""
        self.add([Finding("ok", place, text)])

    def warning(self, place: Path, problem: str, advice: str) -> None:
        """Report a fault that a run survives."""
        self.add([Finding("warning", place, problem, advice)])

    def tell(self, place: Path, problem: str, advice: str) -> None:
        """Report a warning that is also shown before a training."""
        self.warning(place, problem, advice)

    def error(self, place: Path, problem: str, advice: str) -> None:
        """Report a fault that breaks a run or its results."""
        self.errors([(place, problem)], advice)

    def errors(self, found: Sequence[tuple[Path, str]], advice: str) -> None:
        """Report several (place, problem) of one fault that breaks a run or its results."""
        self.add([Finding("error", place, problem, advice) for place, problem in found])

    def track(self, items: Sequence[Any], label: str) -> Iterable[Any]:
        """Return the items; iterating over them shows a progress bar if `progress` is set."""
        return track(items, label) if self.progress else items


class RaiseFirst(Reporter):
    """The reporter of training and of `prepare_data`: it raises the first error as `BadData` and hides warnings.

    With `progress`, it prints the warnings of `tell`.
    """

    def tell(self, place: Path, problem: str, advice: str) -> None:
        """Print a warning if `progress` is set, as in the commands that prepare data."""
        if self.progress:
            print(Finding("warning", place, problem, advice), flush=True)

    def add(self, findings: Sequence[Finding]) -> None:
        """Raise the first finding as `BadData` if it is an error, with the number of the others; else do nothing."""
        if findings and findings[0].severity == "error":
            first, more = findings[0], len(findings) - 1
            raise BadData(
                dataclasses.replace(first, problem=f"{first.problem} (and {more:,} more like this)") if more else first
            )


RAISE_FIRST = RaiseFirst()  # the default of readers; it has no state


class PrintAll(Reporter):
    """The reporter of `repro data check`: a line for each finding, but at most ten of one fault; the rest are counted.

    `emit` takes a line, whose first word is the severity. Places are shown relative to `root`.
    """

    def __init__(self, root: Path, emit: Callable[[str], None] = print):
        super().__init__(progress=True)
        self._root, self._emit = root, emit
        self._seen: set[Finding] = set()

    def add(self, findings: Sequence[Finding]) -> None:
        """Print the first of these findings of one fault, and count all that are new."""
        # a file that both splits share is read and judged twice, but shown once
        new = [finding for finding in findings if finding not in self._seen]
        self._seen.update(new)
        for finding in new[:_MOST_SHOWN]:
            inside = finding.place.is_relative_to(self._root) and finding.place != self._root
            place = finding.place.relative_to(self._root) if inside else finding.place
            self._emit(f"{finding.severity:9}{dataclasses.replace(finding, place=place)}")
        if (rest := len(new) - _MOST_SHOWN) > 0:
            self._emit(f"{new[0].severity:9}... and {rest:,} more like this")
        self.num_errors += sum(finding.severity == "error" for finding in new)
        self.num_warnings += sum(finding.severity == "warning" for finding in new)


def count(number: int, noun: str) -> str:
    """Return `1 image`, or `1,281,167 images`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def show_few(names: Sequence[str]) -> str:
    """Format the first three names for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def compare_counts(report: Reporter, place: Path, unit: str, found: int, expected: int | None, advice: str) -> None:
    """Report a count of `unit`; as an error where another number was expected."""
    if expected is None or found == expected:
        report.ok(place, f"{found:,} {unit}")
    else:
        report.error(place, f"{found:,} {unit}, {expected:,} expected", advice)
