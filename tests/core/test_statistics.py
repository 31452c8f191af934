"""Intervals of means and of shares."""

import pytest
from scipy.stats import binomtest

from repro.core.statistics import clip_share, describe_sample, share_interval


@pytest.mark.parametrize("values", [(0, 1, 8), (50, 100, 100), (0, 100)])
def test_the_interval_of_a_share_ends_at_0_and_100(values):
    low, high = describe_sample(values).ci95
    assert (low < 0 or high > 100) and describe_sample(values, is_share=True).ci95 == (
        max(low, 0),
        min(high, 100),
    ) == clip_share((low, high))


@pytest.mark.parametrize(("seen", "trials"), [(0, 10), (313, 359), (868, 1000), (1000, 1000)])
def test_the_interval_of_images_is_wilsons(seen, trials):
    stated = binomtest(seen, trials).proportion_ci(method="wilson")
    assert share_interval(100 * seen / trials, trials) == pytest.approx((100 * stated.low, 100 * stated.high))
