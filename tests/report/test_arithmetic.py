"""Printed digits: when a number of ours equals one."""

from fractions import Fraction

import pytest

from repro.report.arithmetic import agreement, decimals


@pytest.mark.parametrize(
    ("ours", "printed", "how"),
    [
        (1.458, "1.4", "truncation"),
        (1.458, "1.44", None),
        (1.4449, "1.44", "rounding"),
        (26.7, "26", "truncation"),
        (26.5, "27", "rounding"),
        (5.877, "5.87", "truncation"),
        (5.877, "5.88", "rounding"),
        (5.877, "5.86", None),
        (80.06, "80.0", "truncation"),
        (79.96, "80.0", "rounding"),
        (0.43999999999999995, "0.44", "rounding"),  # 0.44 as binary arithmetic leaves it
        (1.4999999999999998, "1.4", None),  # this is 1.5 and must not truncate
        (Fraction(18, 10), "2.0", None),
        (Fraction(2), "2.0", "rounding"),
        (-0.26, "-0.2", "truncation"),
    ],
)
def test_agreement_rounds_or_truncates_to_the_printed_digits(ours, printed, how):
    assert agreement(ours, printed) == how


@pytest.mark.parametrize(
    ("ours", "printed", "how"),
    [(0.001, "1e-3", "equality"), (0.0014, "1e-3", None), (12e-5, "12e-5", "equality"), (300, "300", "equality")],
)
def test_settings_are_equal_or_not(ours, printed, how):
    assert agreement(ours, printed, exact=True) == how


@pytest.mark.parametrize(("printed", "digits"), [("80.0", 1), ("12", 0), ("5.87", 2), ("1e-3", 3), ("12e-5", 5)])
def test_decimals(printed, digits):
    assert decimals(printed) == digits
