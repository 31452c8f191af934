"""Statistical power before a comparison runs: the smallest difference that its seeds and pairs can show."""

import math

from .ordering import ALPHA

_POINTS = 2000  # quantiles that stand for the distribution of the spread


def detectable_difference(seeds: int, pairs: int, spread: float, *, power: float = 0.8) -> float:
    """Return the smallest difference of two means that a paired t test detects with probability `power`.

    The test is two-sided at 5 % after Holm's correction, at its first and strictest step: the level is 5 % / pairs.

    Args:
        seeds: two or more.
        pairs: the number of pairs in the correction.
        spread: the standard deviation of each model over its seeds; a seed's two values are assumed independent.

    Raises:
        ValueError: fewer than two seeds or no pair.
    """
    if seeds < 2 or pairs < 1:
        raise ValueError(f"{seeds} seeds, {pairs} pairs: expected 2 seeds and 1 pair or more")
    import numpy as np
    from scipy.optimize import brentq
    from scipy.stats import chi, norm
    from scipy.stats import t as student

    limit = student.isf(ALPHA / pairs / 2, seeds - 1)
    # quantiles of the observed spread in units of the true one, since SciPy's noncentral t has gaps here
    seen = chi.ppf((np.arange(_POINTS) + 0.5) / _POINTS, seeds - 1) / math.sqrt(seeds - 1)

    def miss(shift: float) -> float:
        """Return by how much the power falls short, if the true difference is `shift` standard errors."""
        return power - float(np.mean(norm.sf(limit * seen - shift) + norm.cdf(-limit * seen - shift)))

    shift = brentq(miss, 0, 10 * limit)
    return shift * spread * math.sqrt(2 / seeds)
