"""Runs a cell on the ranks of a World: what ``%%ranks`` does, without a notebook. Loads no torch."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pardemo.cells.meters import METERS

if TYPE_CHECKING:
    from pardemo.world import World


@dataclass
class CellResult:
    """Result of a cell on one rank.

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


def run_cell(
    world: "World",
    source: str,
    *,
    get: Sequence[str] = (),
    put: Mapping[str, Any] | None = None,
    meters: Sequence[str] = (),
    name: str = "<ranks>",
    timeout_s: float | None = None,
) -> list[CellResult]:
    """Runs Python text as the program of each rank of ``world``; returns what it left on each.

    What it defines stays on the ranks for the next text, until a run fails; ``torch``, ``dist``, ``rank``,
    ``world_size`` and ``device`` are there from the beginning.

    Args:
        get: variables to bring home afterwards. put: variables to set before.
        meters: names of :data:`pardemo.cells.meters.METERS`, those to put around it.
        name: what tracebacks call the text.

    Raises:
        SyntaxError: the text is no Python; no rank has run it then.
        ValueError: a meter that does not exist; a variable to bring home that is not there or cannot be sent (the text
            has run then, and the ranks keep what they have). Otherwise what :meth:`pardemo.World.run` raises.
    """
    if unknown := [meter for meter in meters if meter not in METERS]:
        raise ValueError(f"meters are {', '.join(METERS)}, not {unknown[0]}")
    parse(source, name)
    results = world.run(_execute, source, name, tuple(get), dict(put or {}), tuple(meters), timeout_s=timeout_s)
    for rank, cell in enumerate(results):
        for variable, reason in cell.unsent.items():
            raise ValueError(f"get {variable}: on rank {rank} {reason}")
    return results


def _execute(*arguments: Any) -> CellResult:
    """:func:`pardemo.cells.on_rank.execute`, which is loaded on the rank alone."""
    from pardemo.cells.on_rank import execute

    return execute(*arguments)
