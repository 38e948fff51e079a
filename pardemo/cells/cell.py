"""A cell for ranks, and what it leaves: the part that both sides know. Loads no torch."""

import ast
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CellResult:
    """What a cell left on one rank.

    Attributes:
        shown: the text of its last expression; None where there is none, or it is None, or a semicolon hides it.
        got: the variables that were asked for, by name. unsent: those that could not be had, with the reason.
        measured: what each meter around the cell measured, by the meter's name (:mod:`pardemo.cells.meters`).
    """

    shown: str | None = None
    got: dict[str, Any] = field(default_factory=dict)
    unsent: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)


def parse(source: str, name: str = "<ranks>") -> tuple[ast.Module, ast.Expression | None]:
    """The statements of a cell, and its last expression where its value is to be shown.

    Raises:
        SyntaxError: of Python, with the line of the cell.
    """
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr) and not _hidden(source, last):
        tree.body.pop()
        return tree, ast.Expression(last.value)
    return tree, None


def _hidden(source: str, last: ast.Expr) -> bool:
    """Whether a semicolon stands behind the last expression, as notebooks hide a value."""
    rest = "\n".join(source.splitlines()[(last.end_lineno or last.lineno) - 1 :])
    return rest.encode()[last.end_col_offset :].decode().lstrip().startswith(";")
