"""Numbers over seeds: mean, sample standard deviation, and the 95 % interval of the mean."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """What a sample says of its mean; `std` and `ci95` (low, high; Student's t) are None for a single value."""

    mean: float
    std: float | None
    ci95: tuple[float, float] | None


def describe_sample(values: Sequence[float]) -> Sample:
    """Mean, sample standard deviation (n - 1) and 95 % interval of some values, at least one."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Sample(mean, None, None)
    from scipy.stats import t as student

    std = statistics.stdev(values)
    half = float(student.ppf((1 + 0.95) / 2, len(values) - 1)) * std / math.sqrt(len(values))
    return Sample(mean, std, (mean - half, mean + half))
