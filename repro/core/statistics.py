"""Statistics over seeds (mean, sample standard deviation, 95 % interval), and the interval of a share of images."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Interval = tuple[float, float]  # (low, high): the ends of a range or of a 95 % interval


class Sample(NamedTuple):
    """A mean with its uncertainty; `std` and `ci95` (low, high; Student's t) are None for a single value."""

    mean: float
    std: float | None
    ci95: Interval | None


def describe_sample(values: Sequence[float], *, is_share: bool = False) -> Sample:
    """Compute mean, sample standard deviation (n - 1) and 95 % interval of one or more values.

    With `is_share`, the values are shares in percent, and the interval is clipped by `clip_share`.
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
    """Return the best score of a curve's last quarter minus the best before; None if either part is empty.

    A page says by it whether a training had ended its progress.

    Args:
        curve: epoch -> score.
    """
    start = 0.75 * max(curve, default=0)
    late = [score for epoch, score in curve.items() if epoch > start]
    early = [score for epoch, score in curve.items() if epoch <= start]
    return max(late) - max(early) if late and early else None


def clip_share(interval: Sequence[float]) -> Interval:
    """Clip the interval of a share in percent to [0, 100]."""
    low, high = interval
    return max(low, 0.0), min(high, 100.0)


def share_interval(percent: float, trials: int) -> Interval:
    """Return Wilson's 95 % interval, in percent, of a share observed in `trials` independent trials."""
    z, p = statistics.NormalDist().inv_cdf((1 + 0.95) / 2), percent / 100
    middle, half = p + z**2 / (2 * trials), z * math.sqrt(p * (1 - p) / trials + (z / (2 * trials)) ** 2)
    return clip_share([100 * end / (1 + z**2 / trials) for end in (middle - half, middle + half)])
