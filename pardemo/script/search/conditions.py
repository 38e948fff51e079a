"""Reads the conditions of a search, as ``wrap != 'none' or dp == 1``, and evaluates them without running any code."""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_PLAIN = (ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.BinOp, ast.Name, ast.Load,
          ast.Constant, ast.Tuple, *_OPERATORS)  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """A condition on the values of a layout, read from ``text``."""

    text: str
    tree: ast.expr

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it is true of these values.

        Raises:
            ValueError: it compares a number with a text, or divides by zero; one line.
        """
        try:
            return bool(_value(self.tree, values))
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"the condition {self.text!r} has no value: {error}") from None


def read_condition(text: str, names: set[str]) -> Condition:
    """Reads a condition: names of a layout, numbers, texts in quotes, comparisons, ``* + - // %``, and, or, not, in.

    Args:
        names: those that it may use.

    Raises:
        ValueError: it is no such expression, or uses another name; one line.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"the condition {text!r} cannot be read: write it as \"wrap != 'none' or dp == 1\"") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in names:
            raise ValueError(
                f"the condition {text!r} uses {node.id}, which no layout says; it may use {', '.join(sorted(names))}"
            )
        plain = not isinstance(node, ast.Constant) or isinstance(node.value, (int, float, str))
        if not isinstance(node, _PLAIN) or not plain:
            raise ValueError(f"the condition {text!r} may compare and calculate, and has {type(node).__name__}")
    return Condition(text, tree)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return values[node.id]
        case ast.Tuple():
            return tuple(_value(part, values) for part in node.elts)
        case ast.UnaryOp():
            value = _value(node.operand, values)
            return not value if isinstance(node.op, ast.Not) else -value
        case ast.BinOp():
            sides = [_value(node.left, values), _value(node.right, values)]
            if any(isinstance(side, str) for side in sides):
                raise TypeError("it calculates with a text")
            return _OPERATORS[type(node.op)](*sides)
        case ast.BoolOp():
            parts = (_value(part, values) for part in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.Compare():
            sides = [_value(part, values) for part in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            return all(_OPERATORS[type(op)](left, right) for op, left, right in pairs)
    raise AssertionError(node)
