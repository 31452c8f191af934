"""The statuses of an entry, their marks, and how verdicts are counted."""

import dataclasses
from collections import Counter
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Status:
    """A status.

    Args:
        word: as claims.csv has it.
        mark: what stands for it in a table.
        means: a sentence for the legend.
        counted: how many entries have it, as part of a sentence.
    """

    word: str
    mark: str
    means: str
    counted: str


MATCHED = Status(
    "matched", "✓", "ours, rounded to the paper's printed digits, is the paper's number; ✓ᵗ where it takes truncation instead", "{} match"
)
DIFFERS = Status("differs", "≠", "ours is another number; the difference ours − paper is in parentheses", "{} differ")
NOT_MEASURED = Status(
    "not measured",
    "–",
    "we have no number under the paper's conditions; the reasons and the commands are listed below",
    "{} are not measured",
)
INCONSISTENT = Status(
    "paper inconsistent",
    "⚠",
    "the paper contradicts itself, or a count of the model that it names; the evidence is listed below",
    "in {} the paper contradicts itself",
)
STATUSES = {status.word: status for status in (MATCHED, DIFFERS, NOT_MEASURED, INCONSISTENT)}
KINDS = {
    "count": "parameters, FLOPs",
    "accuracy": "accuracy (Top-1, AP, mIoU)",
    "speed": "speed, memory",
    "statement": "statements, formulas",
    "setting": "settings, definitions",
    "data": "sizes of data sets",
}


def count_statuses(verdicts: Iterable) -> Counter[str]:
    """How many verdicts have each status."""
    return Counter(verdict.status for verdict in verdicts)


def format_counts(verdicts: Iterable) -> str:
    """E.g. `47 matched, 8 differs`, without the statuses that none has."""
    counts = count_statuses(verdicts)
    return ", ".join(f"{counts[word]} {word}" for word in STATUSES if counts[word])


def describe_counts(verdicts: Iterable) -> str:
    """The same as a sentence: `47 match and 8 differ`."""
    counts = count_statuses(verdicts)
    *parts, last = [status.counted.format(counts[word]) for word, status in STATUSES.items() if counts[word]]
    return f"{', '.join(parts)} and {last}" if parts else last
