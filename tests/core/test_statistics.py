"""Intervals of means and of shares, and whether a curve still rises."""

import pytest
from scipy.stats import binomtest

from repro.core.statistics import clip_share, describe_sample, measure_rise, share_interval


@pytest.mark.parametrize("values", [(0, 1, 8), (50, 100, 100)])
def test_the_interval_of_a_share_ends_at_0_and_100(values):
    low, high = describe_sample(values).ci95
    assert low < 0 or high > 100
    limits = describe_sample(values, is_share=True).ci95
    assert limits == (max(low, 0), min(high, 100)) == clip_share((low, high))


@pytest.mark.parametrize(("seen", "trials"), [(0, 10), (313, 359), (1000, 1000)])
def test_the_interval_of_images_is_wilsons(seen, trials):
    stated = binomtest(seen, trials).proportion_ci(method="wilson")
    assert share_interval(100 * seen / trials, trials) == pytest.approx((100 * stated.low, 100 * stated.high))


@pytest.mark.parametrize(
    ("curve", "rise"),
    [
        ({1: 10.0, 2: 50.0, 3: 60.0, 4: 58.0}, -2.0),  # the last quarter is epoch 4
        ({2: 20.0, 4: 40.0, 6: 50.0, 7: 90.0, 8: 55.0}, 40.0),  # 7 and 8 of 8
        ({4: 30.0}, None),
        ({}, None),
    ],
)
def test_a_curve_rises_by_what_its_last_quarter_adds(curve, rise):
    assert measure_rise(curve) == rise
