"""Expressions: exact values, what a parsed one says about itself, and what it may ask of a training; printed digits."""

from fractions import Fraction

import pytest

from repro.report.arithmetic import agreement, decimals
from repro.report.expressions import Call, Expression
from repro.report.trainings import fits_training, parse_training

MESA = {"weight": 1.0}
INIT = {"weights": "results/pretrain/teacher/weights.safetensors"}


def evaluate(text, value=None, functions=None):
    return Expression.parse(text).evaluate(value or {}.__getitem__, functions or {})


def test_values_are_exact():
    values = {"a.b": Fraction("48.6"), "a.c_1.d": Fraction("46.8"), "text.5_3.x": Fraction(3)}
    assert evaluate("a.b - a.c_1.d", values.__getitem__) == Fraction("1.8")
    assert evaluate("1 / 3") == Fraction(1, 3) and evaluate("-1 / 4.0") == -0.25
    assert evaluate("saved(a.c_1.d, a.b) > 3 and a.b < 50", values.__getitem__) is True
    assert evaluate("ceil(196 / 16) + 20 % 16 - 2 ** 3") == 13 + 4 - 8
    assert evaluate('max(entry("text.5_3.x"), 2)', values.__getitem__) == 3
    assert evaluate('name("x.y@224[a=b]")', functions={"name": str.upper}) == "X.Y@224[A=B]"
    assert evaluate("2 *\n   3") == 6


@pytest.mark.parametrize(
    "wrong", ['__import__("os").name()', "[1, 2]", "a.b if 1 else 2", "1 < 2 < 3", "a", "1 == 1", "f(x=1)"]
)
def test_what_is_no_expression_is_refused_when_it_is_parsed(wrong):
    with pytest.raises(ValueError, match="not understood"):
        Expression.parse(wrong)


def test_what_cannot_be_parsed_or_called_is_named():
    with pytest.raises(ValueError, match=r"not an expression of the ledger: 1 \+"):
        Expression.parse("1 +")
    with pytest.raises(ValueError, match="not understood .*no function unknown"):
        evaluate("unknown(1)")


def test_a_false_part_hides_no_part_that_was_not_measured():
    def value(name):
        raise LookupError(name)

    with pytest.raises(LookupError):
        evaluate("2 < 1 and a.b > 0", value)


def test_references_calls_parts_and_the_left_side():
    found = Expression.parse('near(table1.x.y, macs_g("model.name@224"), 0.1) and 2 * entry("text.5_3.z") < table1.x.y')
    assert found.references == ("table1.x.y", "text.5_3.z")
    assert set(found.calls) == {Call("near", (None, None, 0.1)), Call("macs_g", ("model.name@224",))}
    near, less = found.conjuncts
    assert less.left.references == ("text.5_3.z",) and near.left.calls == near.calls
    assert Expression.parse("1 + 2 < 4").left.evaluate({}.__getitem__, {}) == 3
    (alone,) = Expression.parse("1 + 2").conjuncts
    assert alone.evaluate({}.__getitem__, {}) == 3


@pytest.mark.parametrize(
    ("ours", "printed", "how"),
    [
        (1.458, "1.4", "truncation"),
        (1.458, "1.44", None),
        (1.4449, "1.44", "rounding"),
        (26.5, "27", "rounding"),
        (80.06, "80.0", "truncation"),
        (79.96, "80.0", "rounding"),
        (0.43999999999999995, "0.44", "rounding"),  # 0.44 as binary arithmetic leaves it
        (1.4999999999999998, "1.4", None),  # this is 1.5 and must not truncate
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


@pytest.mark.parametrize(
    ("asked", "about", "fits"),
    [
        ((), {"epochs": 12, "mesa": MESA, "image_size": 224}, True),
        ((224,), {"image_size": 224}, True),
        ((224,), {}, True),  # a cell of a params file says it elsewhere
        (("36 epochs",), {"epochs": 36}, True),
        (("36 epochs",), {"epochs": 12}, False),
        (("MESA",), {"mesa": MESA}, True),
        (("MESA",), {"mesa": None}, False),
        (("no MESA",), {}, True),
        (("no MESA",), {"mesa": MESA}, False),
        ((224, "no MESA"), {"image_size": 384}, False),
        (("linearized",), {"init": INIT, "freeze": False}, True),
        (("linearized",), {"init": INIT, "freeze": True}, False),
        (("linearized",), {"init": None}, False),  # from random weights
        (("linearized, frozen",), {"init": INIT, "freeze": True}, True),
        (("linearized, frozen",), {"init": INIT}, False),
    ],
)
def test_a_training_fits(asked, about, fits):
    assert fits_training(about, parse_training(asked)) == fits


@pytest.mark.parametrize("asked", ["mesa", "36", "36 epoch", "without MESA", "frozen"])
def test_another_word_is_refused(asked):
    with pytest.raises(ValueError, match=f"'{asked}': no training; write a side in pixels"):
        parse_training([asked])
