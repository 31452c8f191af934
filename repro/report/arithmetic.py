"""Numbers as printed: comparison after rounding or truncating, the ledger's expressions, and the paper's formulas."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import Any

Number = int | float | Fraction

_ID = re.compile(r"\b[a-z]\w*(?:\.\w+)+")
_STRING = re.compile(r'("[^"]*")')
_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a, b),
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def agreement(ours: Number, printed: str, *, exact: bool = False) -> str | None:
    """How a number equals a printed one: `rounding`, `truncation`, or None.

    Args:
        ours: the number, at full precision.
        printed: the paper's digits, e.g. `1.4` or `102`; what they leave out decides how far `ours` is cut.
        exact: settings are equal or not; nothing is cut.
    """
    target = Decimal(printed)
    value = Decimal(f"{float(ours):.12g}")  # 0.44 may be stored as 0.43999999999999995, which truncates to 0.43
    if exact:
        return "equality" if value == target else None
    step = Decimal(1).scaleb(int(target.as_tuple().exponent))
    for name, mode in (("rounding", ROUND_HALF_UP), ("truncation", ROUND_DOWN)):
        if value.quantize(step, rounding=mode) == target:
            return name
    return None


def references(expression: str) -> list[str]:
    """The ledger ids that an expression names, such as `table1.vittt_t.top1_percent`."""
    return [name for part in _STRING.split(expression)[::2] for name in _ID.findall(part)]


def evaluate(expression: str, value: Callable[[str], Number], functions: Mapping[str, Callable]) -> Any:
    """The value of a ledger expression: a number, or a bool for comparisons. Integers and printed numbers stay exact.

    Args:
        expression: numbers, ids, strings as arguments, `+ - * / % **`, comparisons, `and`, calls of `functions`.
        value: looks up an id.
        functions: what may be called, beside `FORMULAS`.

    Raises:
        ValueError: something else stands in the expression; a mistake in the ledger.
    """
    quoted = "".join(
        part if i % 2 else _ID.sub(lambda match: f'value("{match[0]}")', part) for i, part in enumerate(_STRING.split(expression))
    )
    return _evaluate(ast.parse(" ".join(quoted.split()), mode="eval").body, {**FORMULAS, **functions, "value": value})


def conjuncts(expression: str) -> list[str]:
    """The parts that `and` joins; the expression itself where there is none."""
    source = " ".join(expression.split())
    body = ast.parse(source, mode="eval").body
    return [ast.get_source_segment(source, part) for part in body.values] if isinstance(body, ast.BoolOp) else [source]


def left_of_comparison(expression: str) -> str:
    """The left side of `a < b`, or the whole expression where it is no comparison: the number that evidence shows."""
    return re.split(r"[<>]=?", expression)[0].strip()


def _evaluate(node: ast.expr, functions: Mapping[str, Callable]) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str() as constant):
            return constant
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, functions)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, functions), _evaluate(right, functions))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, functions), _evaluate(right, functions))
        case ast.BoolOp(op=ast.And(), values=values):
            # every part is evaluated, so that a part without data is not hidden by one that is false
            return all([_evaluate(part, functions) for part in values])  # noqa: C419 (each part is evaluated)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in functions:
            return functions[name](*(_evaluate(arg, functions) for arg in args))
    raise ValueError(f"not understood in an expression of the ledger: {ast.unparse(node)}")


def saved(ours: Number, baseline: Number) -> Number:
    """Percent by which `ours` is below `baseline`."""
    return 100 * (1 - _OPERATORS[ast.Div](ours, baseline))


def near(a: Number, b: Number, percent: Number) -> bool:
    """Whether a lies within so many percent of b."""
    return abs(a - b) <= abs(b) * percent / 100


def vit_g(width: int, tokens: int) -> Fraction:
    """GMACs of a 12-layer ViT: Eq. 13, 4TD² + 2T²D per layer, with MLP (8TD²), patch convolution and head."""
    layer = 12 * tokens * width**2 + 2 * tokens**2 * width
    return Fraction(12 * layer + _ends(width, tokens - 1), 10**9)


def vim_blocks_g(width: int, tokens: int, scan: int) -> Fraction:
    """GMACs of Vim's 24 blocks alone: Eq. 13, 6TD² + scan·T(2D)N with N = 16."""
    return Fraction(24 * (6 * tokens * width**2 + scan * tokens * 2 * width * 16), 10**9)


def vittt_g(width: int, tokens: int) -> Fraction:
    """GMACs of a 12-layer Vittt: Eq. 13, 6TD² + 6TDd + 4bTD with d = 64, b = 16, SwiGLU (3TD·⌊8D/3⌋), patch convolution, head."""
    layer = tokens * (6 * width**2 + 6 * width * 64 + 4 * 16 * width + 3 * width * (8 * width // 3))
    return Fraction(12 * layer + _ends(width, tokens), 10**9)


def vittt_trivial_g(width: int, tokens: int) -> Fraction:
    """GMACs that Eq. 13 leaves out: Conv1d 2·8D, DWConv 9D and the learning rates D·D/64, per token and layer."""
    return Fraction(12 * tokens * (25 * width + width * width // 64), 10**9)


def _ends(width: int, patches: int) -> int:
    return patches * 3 * 16 * 16 * width + 1000 * width


FORMULAS: dict[str, Callable] = {
    "ceil": math.ceil,
    "min": min,
    "max": max,
    "saved": saved,
    "near": near,
    "vit_g": vit_g,
    "vim_blocks_g": vim_blocks_g,
    "vittt_g": vittt_g,
    "vittt_trivial_g": vittt_trivial_g,
}
