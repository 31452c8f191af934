"""Expressions of a ledger, parsed once: `table1.a.fps / fps("model", 224) > 2 and ...`."""

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from .arithmetic import FUNCTIONS, Number, divide

_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: divide,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call in an expression; an argument that is no constant is None here."""

    name: str
    args: tuple[int | float | str | None, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """Numbers, ids of the ledger, strings as arguments, `+ - * / % **`, comparisons, `and`, and calls of functions.

    An id is written as it is, `table1.vittt_t.top1_percent`, or as `entry("text.5_3.speedup_1280_t")` where a part begins with a digit.

    Args:
        tree: its syntax tree; `parse` makes one from text.

    Raises:
        ValueError: the tree has a part of another kind; a mistake in the ledger.
    """

    tree: ast.expr

    def __post_init__(self) -> None:
        _check(self.tree)

    @classmethod
    def parse(cls, text: str) -> Self:
        """An expression from its text, which may be broken into lines; a `ValueError` names what is not understood."""
        try:
            return cls(ast.parse(" ".join(text.split()), mode="eval").body)
        except SyntaxError:
            raise ValueError(f"not an expression of the ledger: {text}") from None

    @functools.cached_property
    def references(self) -> tuple[str, ...]:
        """The ids that it names, each once."""
        return tuple(dict.fromkeys(name for node in _outermost(self.tree) if (name := _id_of(node))))

    @functools.cached_property
    def calls(self) -> tuple[Call, ...]:
        """The functions that it calls, with their arguments."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and not _id_of(node))
        return tuple(Call(node.func.id, tuple(arg.value if isinstance(arg, ast.Constant) else None for arg in node.args)) for node in nodes)

    @functools.cached_property
    def conjuncts(self) -> tuple["Expression", ...]:
        """The parts that `and` joins; the expression itself where there is none."""
        return tuple(map(Expression, self.tree.values)) if isinstance(self.tree, ast.BoolOp) else (self,)

    @property
    def left(self) -> "Expression":
        """The left side of its (first) comparison, or the expression itself: the number that evidence shows."""
        first = self.conjuncts[0]
        return Expression(first.tree.left) if isinstance(first.tree, ast.Compare) else first

    def evaluate(self, value: Callable[[str], Number], functions: Mapping[str, Callable]) -> Any:
        """Its value: a number, or a bool for a comparison. Integers and printed numbers stay exact.

        Args:
            value: looks up an id.
            functions: what may be called beside `arithmetic.FUNCTIONS`.

        Raises:
            ValueError: it calls an unknown function.
        """
        return _evaluate(self.tree, value, {**FUNCTIONS, **functions})


def _id_of(node: ast.AST) -> str | None:
    """`a.b.c` for a chain of attributes and for `entry("a.b.c")`, None for any other node."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "entry":
        return node.args[0].value
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if names and isinstance(node, ast.Name) else None


def _outermost(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those below it, but not the parts of an id."""
    yield node
    if _id_of(node) is None:
        for child in ast.iter_child_nodes(node):
            yield from _outermost(child)


def _check(node: ast.expr) -> None:
    match node:
        case ast.Constant(value=int() | float() | str()):
            parts = []
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            parts = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            parts = [left, right]
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            parts = [left, right]
        case ast.BoolOp(op=ast.And(), values=parts) | ast.Call(func=ast.Name(), args=parts, keywords=[]):
            pass
        case _ if _id_of(node):
            parts = []
        case _:
            raise ValueError(f"not understood in an expression of the ledger: {ast.unparse(node)}")
    for part in parts:
        _check(part)


def _evaluate(node: ast.expr, value: Callable[[str], Number], functions: Mapping[str, Callable]) -> Any:
    def of(part: ast.expr) -> Any:
        return _evaluate(part, value, functions)

    if name := _id_of(node):
        return value(name)
    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.UnaryOp(operand=operand):
            return -of(operand)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            return _OPERATORS[type(op)](of(left), of(right))
        case ast.BoolOp(values=values):
            return all([of(part) for part in values])  # noqa: C419 (a false part must not hide one without data)
        case ast.Call(func=ast.Name(id=name), args=args):
            if name not in functions:
                raise ValueError(f"not understood in an expression of the ledger: {ast.unparse(node)}")
            return functions[name](*map(of, args))
    raise AssertionError("checked when it was parsed")
