"""Expressions of a ledger, such as `table1.a.fps / fps("model", 224) > 2 and ...`: parsed once, evaluated often."""

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

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
# name -> function that an expression may call; `entry` looks up an id
_Functions = Mapping[str, Callable]


class Call(NamedTuple):
    """A call in an expression; `args` has None for an argument that is no constant."""

    name: str
    args: tuple[int | float | str | None, ...]


class Expression:
    """An expression of numbers, ids of the ledger, `+ - * / % **`, comparisons, `and`, and calls of functions.

    Strings are arguments of calls. An id is written as it is, or as `entry("text.5_3.speedup_1280_t")` where a part
    begins with a digit. Other syntax raises a `ValueError`.
    """

    def __init__(self, tree: ast.expr):
        self._tree, self._evaluation = tree, _compile(tree)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an expression, which may have line breaks; raise a `ValueError` that names a part of other syntax."""
        try:
            return cls(ast.parse(" ".join(text.split()), mode="eval").body)  # a line break would end it
        except SyntaxError:
            raise ValueError(f"not an expression of the ledger: {text}") from None

    @functools.cached_property
    def references(self) -> tuple[str, ...]:
        """The ids that the expression names, each once."""
        return tuple(dict.fromkeys(name for node in _walk(self._tree) if (name := _id_of(node))))

    @functools.cached_property
    def calls(self) -> tuple[Call, ...]:
        """The calls of functions, nested ones included; `entry("a.b")` is an id and no call."""
        found = []
        for node in _walk(self._tree):
            if isinstance(node, ast.Call) and not _id_of(node):
                args = (arg.value if isinstance(arg, ast.Constant) else None for arg in node.args)
                found.append(Call(node.func.id, tuple(args)))
        return tuple(found)

    @functools.cached_property
    def conjuncts(self) -> tuple["Expression", ...]:
        """The parts that `and` joins; the expression itself where there is none."""
        return tuple(map(Expression, self._tree.values)) if isinstance(self._tree, ast.BoolOp) else (self,)

    @property
    def left(self) -> "Expression":
        """The left side of the first comparison, or else the first conjunct: the number that evidence shows."""
        first = self.conjuncts[0]
        return Expression(first._tree.left) if isinstance(first._tree, ast.Compare) else first

    def evaluate(self, value: Callable[[str], Number], functions: Mapping[str, Callable]) -> Any:
        """Return the value, a number, or a bool for a comparison; integers and printed numbers stay exact.

        Args:
            value: looks up an id.
            functions: the functions that may be called in addition to `arithmetic.FUNCTIONS`, by name.

        Raises:
            ValueError: the expression calls another function.
        """
        functions = {**FUNCTIONS, **functions, "entry": value}
        if unknown := [call.name for call in self.calls if call.name not in functions]:
            raise ValueError(f"not understood in an expression of the ledger: no function {unknown[0]}")
        return self._evaluation(functions)


def _id_of(node: ast.AST) -> str | None:
    """Return the id `a.b.c` for a chain of attributes or for `entry("a.b.c")`; None for any other node."""
    match node:
        case ast.Call(func=ast.Name(id="entry"), args=[ast.Constant(value=name)]):
            return name
        case ast.Attribute():
            name = ast.unparse(node)
            return name if all(map(str.isidentifier, name.split("."))) else None  # None for an attribute of a call
    return None


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, without the parts of an id."""
    yield node
    if _id_of(node) is None:
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _compile(node: ast.expr) -> Callable[[_Functions], Any]:
    """Return a function that evaluates the node; raise a `ValueError` for syntax that no ledger has."""
    if name := _id_of(node):
        return lambda functions: functions["entry"](name)
    match node:
        case ast.Constant(value=int() | float() | str() as constant):
            return lambda functions: constant
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _compile(operand)
            return lambda functions: -inner(functions)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _OPERATORS
        ):
            a, b = _compile(left), _compile(right)
            return lambda functions: _OPERATORS[type(op)](a(functions), b(functions))
        case ast.BoolOp(op=ast.And(), values=parts):
            compiled = [_compile(part) for part in parts]
            return lambda functions: all([part(functions) for part in compiled])  # noqa: C419 (a false part must not hide one without data)
        case ast.Call(func=ast.Name(id=called), args=args, keywords=[]):
            compiled = [_compile(arg) for arg in args]
            return lambda functions: functions[called](*(arg(functions) for arg in compiled))
    raise ValueError(f"not understood in an expression of the ledger: {ast.unparse(node)}")
