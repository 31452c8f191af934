"""Expressions: exact values, and what a parsed expression says about itself."""

from fractions import Fraction

import pytest

from repro.report.expressions import Call, Expression


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
