"""Printed digits, expressions and the paper's formulas."""

from fractions import Fraction

import pytest

from repro.report.arithmetic import agreement, evaluate, references, vim_blocks_g, vit_g, vittt_g, vittt_trivial_g
from repro.report.claims import decimals


@pytest.mark.parametrize(
    ("ours", "printed", "how"),
    [
        (1.458, "1.4", "truncation"),
        (1.458, "1.44", None),
        (1.4449, "1.44", "rounding"),
        (26.365, "26", "rounding"),
        (26.7, "26", "truncation"),
        (26.5, "27", "rounding"),
        (102.329, "102", "rounding"),
        (5.877, "5.9", "rounding"),
        (5.877, "5.87", "truncation"),
        (5.877, "5.88", "rounding"),
        (5.877, "5.86", None),
        (6.983, "6.98", "rounding"),
        (80.04, "80.0", "rounding"),
        (80.06, "80.0", "truncation"),
        (80.1, "80.0", None),
        (79.96, "80.0", "rounding"),
        (0.43999999999999995, "0.44", "rounding"),  # 0.44 as binary arithmetic leaves it
        (1.4999999999999998, "1.4", None),  # it is 1.5 and must not truncate
        (Fraction(18, 10), "2.0", None),
        (Fraction(2), "2.0", "rounding"),
        (-0.26, "-0.2", "truncation"),
        (2029.4, "2029", "rounding"),
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


def test_evaluate_is_exact_and_knows_only_what_the_ledger_needs():
    values = {"a.b": Fraction("48.6"), "a.c_1.d": Fraction("46.8")}
    assert evaluate("a.b - a.c_1.d", values.__getitem__, {}) == Fraction("1.8")
    assert evaluate("saved(a.c_1.d, a.b) > 3 and a.b < 50", values.__getitem__, {}) is True
    assert evaluate("ceil(196 / 16) + 20 % 16 - 2 ** 3", values.__getitem__, {}) == 13 + 4 - 8
    assert evaluate('name("x.y@224[a=b]")', values.__getitem__, {"name": str.upper}) == "X.Y@224[A=B]"
    for wrong in ('__import__("os")', "[1, 2]", "a.b if 1 else 2", "unknown(1)", "1 < 2 < 3"):
        with pytest.raises(ValueError, match="not understood"):
            evaluate(wrong, values.__getitem__, {})


def test_evaluate_hides_no_unmeasured_part_behind_a_false_one():
    def value(name):
        raise LookupError(name)

    with pytest.raises(LookupError):
        evaluate("2 < 1 and a.b > 0", value, {})


def test_references_are_ids_and_no_strings():
    assert references('near(table1.x.y, macs_g("model.name@224"), 0.1) - 1.5') == ["table1.x.y"]


def test_formulas_by_hand():
    # Vittt-T at 224: 12·196·(6·36864 + 6·192·64 + 4·16·192 + 3·192·512) + 196·768·192 + 192000
    assert vittt_g(192, 196) == Fraction(12 * 196 * 602_112 + 28_901_376 + 192_000, 10**9)
    # its Conv1d of both directions, DWConv and learning rates: 2·8·192 + 9·192 + 192·3 per token and layer
    assert vittt_trivial_g(192, 196) == Fraction(12 * 196 * (3072 + 1728 + 576), 10**9)
    # DeiT-T has 197 tokens: 12·(12·197·36864 + 2·197²·192) + 196·768·192 + 192000
    assert vit_g(192, 197) == Fraction(12 * (87_146_496 + 14_902_656) + 28_901_376 + 192_000, 10**9)
    # Vim-T: 24·197·(6·36864 + 18·384·16), the number that the paper cuts to 1.5
    assert vim_blocks_g(192, 197, 18) == Fraction(24 * 197 * (221_184 + 110_592), 10**9)
