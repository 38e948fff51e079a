"""A cell's program on a rank: what it defines is there for the next cell."""

import contextlib
import linecache
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from pardemo.cells.meters import METERS
from pardemo.cells.run import CellResult, parse
from pardemo.world.rank import device

MODULE = "pardemo_cells"  # that functions and classes of cells say they are of


def execute(
    source: str, name: str = "<ranks>", get: Sequence[str] = (), put: Mapping[str, Any] | None = None,
    meters: Sequence[str] = (),
) -> CellResult:  # fmt: skip
    """Runs ``source`` among the rank's variables. See :func:`pardemo.cells.run_cell`."""
    variables = _variables()
    variables.update(put or {})
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
    tree, last = parse(source, name)
    cell = CellResult()
    with _measured(cell, meters, variables):
        exec(compile(tree, name, "exec"), variables)
        value = eval(compile(last, name, "eval"), variables) if last is not None else None
    if value is not None:
        cell.shown = repr(value)
    for wanted in get:
        reason = _unsendable(wanted, variables)
        if reason:
            cell.unsent[wanted] = reason
        else:
            value = variables[wanted]
            # of a view its part alone, and nothing of a graph
            cell.got[wanted] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    return cell


def _variables() -> dict[str, Any]:
    """The cells' variables on this rank; the names that every cell may count on are set anew."""
    if MODULE not in sys.modules:
        sys.modules[MODULE] = types.ModuleType(MODULE)
        cloudpickle.register_pickle_by_value(sys.modules[MODULE])  # the notebook has no such module
    variables = vars(sys.modules[MODULE])
    variables.update(torch=torch, dist=dist, rank=dist.get_rank(), world_size=dist.get_world_size(), device=device())
    return variables


@contextlib.contextmanager
def _measured(cell: CellResult, meters: Sequence[str], variables: dict[str, Any]) -> Iterator[None]:
    if any(METERS[name].begins_together for name in meters):
        dist.barrier()
    with contextlib.ExitStack() as around:
        read = {name: METERS[name].start(around, variables) for name in METERS if name in meters}
        yield
    cell.measured = {name: result() for name, result in read.items()}


def _unsendable(name: str, variables: Mapping[str, Any]) -> str:
    """Why a variable cannot be sent to the notebook; empty where it can."""
    if name not in variables:
        defined = sorted(n for n in variables if not n.startswith("_") and n not in ("torch", "dist", "timeline"))
        return f"no variable of that name; there are {', '.join(defined)}"
    if isinstance(variables[name], torch.Tensor):
        return ""
    try:
        cloudpickle.dumps(variables[name])
    except Exception as error:
        return f"a {type(variables[name]).__name__} cannot be sent to the notebook: {error}"
    return ""
