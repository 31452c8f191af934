"""Numbers over seeds: mean, sample standard deviation, and the 95 % interval of the mean; and that of a share of
images.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """A mean with its uncertainty; `std` and `ci95` (low, high; Student's t) are None for a single value."""

    mean: float
    std: float | None
    ci95: tuple[float, float] | None


def describe_sample(values: Sequence[float], *, is_share: bool = False) -> Sample:
    """Mean, sample standard deviation (n - 1) and 95 % interval of some values, at least one; of shares in percent, see
    `clip_share`.
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Sample(mean, None, None)
    from scipy.stats import t as student

    std = statistics.stdev(values)
    half = float(student.ppf((1 + 0.95) / 2, len(values) - 1)) * std / math.sqrt(len(values))
    interval = mean - half, mean + half
    return Sample(mean, std, clip_share(interval) if is_share else interval)


def measure_rise(curve: Mapping[int, float]) -> float | None:
    """The best score of a curve's last quarter minus the best before; None where either part is empty.

    Args:
        curve: epoch -> score.
    """
    start = 0.75 * max(curve, default=0)
    late = [score for epoch, score in curve.items() if epoch > start]
    early = [score for epoch, score in curve.items() if epoch <= start]
    return max(late) - max(early) if late and early else None


def clip_share(interval: Sequence[float]) -> tuple[float, float]:
    """The interval of a share in percent, which ends at 0 and at 100."""
    low, high = interval
    return max(low, 0.0), min(high, 100.0)


def share_interval(percent: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval, in percent, of a share that was seen in `trials` independent trials."""
    z, p = statistics.NormalDist().inv_cdf((1 + 0.95) / 2), percent / 100
    middle, half = p + z**2 / (2 * trials), z * math.sqrt(p * (1 - p) / trials + (z / (2 * trials)) ** 2)
    return clip_share([100 * end / (1 + z**2 / trials) for end in (middle - half, middle + half)])
