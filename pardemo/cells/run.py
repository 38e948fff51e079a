"""A cell on the ranks of a World: what ``%%ranks`` is without a notebook."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pardemo.cells import cell as cells
from pardemo.cells.cell import CellResult
from pardemo.cells.meters import METERS

if TYPE_CHECKING:
    from pardemo.world import World


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
    cells.parse(source, name)
    results = world.run(_execute, source, name, tuple(get), dict(put or {}), tuple(meters), timeout_s=timeout_s)
    for rank, cell in enumerate(results):
        for variable, reason in cell.unsent.items():
            raise ValueError(f"get {variable}: on rank {rank} {reason}")
    return results


def _execute(*arguments: Any) -> CellResult:
    """:func:`pardemo.cells.on_rank.execute`, which is loaded on the rank alone."""
    from pardemo.cells.on_rank import execute

    return execute(*arguments)
