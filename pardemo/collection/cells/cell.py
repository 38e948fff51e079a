"""A cell for ranks, and what it leaves: the part that both sides know. Loads no torch."""

import ast
from dataclasses import dataclass, field
from typing import Any, NamedTuple

METERS = ("wire", "memory", "timeline", "links", "seconds")


class Wire(NamedTuple):
    """What a rank put on the wire during a cell, and how that is known (``wire``: the kernel counted)."""

    sent_bytes: int
    received_bytes: int
    evidence: str


class Links(NamedTuple):
    """What went over each link during a cell, the same on all ranks: :class:`pardemo.meters.links.LinkMeter`'s."""

    matrix: list[list[int]]
    hosts: list[tuple[int, int]]
    adapters: list[tuple[int, int]] | None


@dataclass
class Cell:
    """What a cell left on one rank.

    Attributes:
        shown: the text of its last expression; None where there is none, or it is None, or a semicolon hides it.
        got: the variables that were asked for, by name. unsent: those that could not be had, with the reason.
        wire, memory, timeline, links, seconds: what the meters around the cell found; None for those not asked for.
            ``memory`` is the peak in bytes, by kind, of what the cell made and of the models that it knew; ``timeline``
            holds spans, ``seconds`` the time from when all ranks began until this one was done.
    """

    shown: str | None = None
    got: dict[str, Any] = field(default_factory=dict)
    unsent: dict[str, str] = field(default_factory=dict)
    wire: Wire | None = None
    memory: dict[str, int] | None = None
    timeline: list | None = None
    links: Links | None = None
    seconds: float | None = None


def parse(source: str, name: str = "<ranks>") -> tuple[ast.Module, ast.Expression | None]:
    """The statements of a cell, and its last expression where its value is to be shown.

    Raises:
        SyntaxError: of Python, with the line of the cell.
    """
    tree = ast.parse(source, name)
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not _hidden(source, tree.body[-1]):
        return tree, ast.Expression(tree.body.pop().value)
    return tree, None


def run(*arguments: Any) -> Cell:
    """:func:`pardemo.collection.cells.on_rank.execute`, which is loaded on the rank alone."""
    from pardemo.collection.cells.on_rank import execute

    return execute(*arguments)


def _hidden(source: str, last: ast.Expr) -> bool:
    """Whether a semicolon stands behind the last expression, as notebooks hide a value."""
    rest = "\n".join(source.splitlines()[last.end_lineno - 1 :])
    return rest.encode()[last.end_col_offset :].decode().lstrip().startswith(";")
