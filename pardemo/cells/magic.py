"""``%%ranks``: the notebook's side of a cell that runs on ranks."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pardemo.argument_checks import time_limit
from pardemo.cells.meters import METERS, print_alike
from pardemo.cells.run import CellResult, parse, run_cell
from pardemo.cluster import Cluster
from pardemo.world.errors import RankError
from pardemo.world.pool import WorldPool

ANEW = "The ranks start anew with the next cell: their variables are gone."
USAGE = " ".join(
    ["%%ranks N [--cluster NAME] [--get NAME …] [--put NAME …]", *(f"[--{name} [NAME]]" for name in METERS),
     "[--preload MODULE …] [--timeout S]"]
)  # fmt: skip


class RanksMagic:
    """Runs cells on warm Worlds, one for each number of ranks and each cluster.

    Args:
        shell: an IPython shell: where variables are taken from and put.
    """

    def __init__(self, shell: Any):
        self._shell = shell
        self._worlds = WorldPool()
        self._count = 0

    def ranks(self, line: str, cell: str) -> None:
        """Runs the cell's text as the program of each of N ranks.

        Variables stay on the ranks from cell to cell; ``torch``, ``dist``, ``rank``, ``world_size`` and ``device`` are
        there. What a rank prints appears with its number before it, and the value of a last expression by rank.

        Options: ``--cluster`` names a variable of the notebook, a Cluster for N ranks; ``--get`` brings
        variables home, each as a list by rank; ``--put`` gives the ranks variables of the notebook. ``--wire``,
        ``--memory``, ``--timeline``, ``--links`` (bytes from rank to rank, and of each host) and ``--seconds`` measure
        the cell, show what they measured and leave it in a variable of that name, or of the name that follows the
        option (``--wire ring_bytes``): a list by rank, but ``links`` is a single value, the same on all (on the ranks
        ``timeline`` is there to record spans with). ``--preload`` names modules that the ranks have loaded before they
        start; ``--timeout`` is in seconds (300).
        """
        from IPython.core.error import UsageError

        try:
            options = _parse(line)
            self._count += 1
            name = f"<ranks cell {self._count}>"
            _check_source(cell, name)
            put = self._to_put(options.put)
            world = self._worlds.get(options.ranks, self._cluster(options.cluster), options.preload)
            meters = {meter: getattr(options, meter) for meter in METERS if getattr(options, meter)}
            cells = run_cell(
                world, cell, get=options.get, put=put, meters=[*meters], name=name, timeout_s=options.timeout
            )
        except ValueError as error:
            raise UsageError(f"%%ranks: {error}") from None
        except RankError as error:
            _render(error, str(error).rstrip(), "", ANEW)
            raise
        except KeyboardInterrupt as error:
            _render(error, f"KeyboardInterrupt. {ANEW}")
            raise
        self._bring_home(options.get, meters, cells)
        show(cells)

    def close(self) -> None:
        """Ends all ranks."""
        self._worlds.close()

    def _cluster(self, name: str | None) -> Cluster | None:
        if name is None:
            return None
        cluster = self._shell.user_ns.get(name)
        if not isinstance(cluster, Cluster):
            problem = (
                "has no variable of that name" if cluster is None else f"has a {type(cluster).__name__} of that name"
            )
            raise ValueError(f"--cluster {name}: the notebook {problem}; it names a Cluster")
        return cluster

    def _to_put(self, names: Sequence[str]) -> dict[str, Any]:
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            raise ValueError(f"--put {missing[0]}: the notebook has no variable of that name")
        return {name: self._shell.user_ns[name] for name in names}

    def _bring_home(self, names: Sequence[str], meters: Mapping[str, str], cells: Sequence[CellResult]) -> None:
        """Sets the notebook's variables: those of the ranks, and for each meter that of the name given to it."""
        variables = {name: [cell.got[name] for cell in cells] for name in names}
        for meter, name in meters.items():
            results = [cell.measured[meter] for cell in cells]
            variables[name] = results[0] if METERS[meter].of_all_ranks else results
        self._shell.push(variables)


def show(cells: Sequence[CellResult]) -> None:
    """Prints the last expression's value by rank, equal ones once, and what each meter shows."""
    print_alike([cell.shown for cell in cells], lambda text: text)
    for name in cells[0].measured:
        METERS[name].show([cell.measured[name] for cell in cells])


def _render(error: BaseException, *lines: str) -> None:
    """The reader sees these lines, what happened on the ranks, in the place of a traceback of this module's frames."""
    error._render_traceback_ = lambda: list(lines)  # type: ignore[attr-defined]


def _check_source(source: str, name: str) -> None:
    """Raises ValueError for text that is no Python, before any rank sees it."""
    try:
        parse(source, name)
    except SyntaxError as error:
        text = (error.text or "").strip()
        hint = " (a line that begins with % or ! is the notebook's: the ranks run Python)" if text[:1] in "%!" else ""
        raise ValueError(f"line {error.lineno} of the cell: {error.msg}: {text}{hint}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. Usage: {USAGE}")


def _parse(line: str) -> argparse.Namespace:
    parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("ranks", type=_size)
    parser.add_argument("--preload", nargs="+", default=[], metavar="MODULE")
    for name in ("get", "put"):
        parser.add_argument(f"--{name}", nargs="+", default=[], type=_name, metavar="NAME")
    parser.add_argument("--cluster", metavar="NAME")
    for name in METERS:
        parser.add_argument(f"--{name}", nargs="?", const=name, type=_name, metavar="NAME")
    parser.add_argument("--timeout")
    options = parser.parse_args(shlex.split(line))
    if options.timeout is not None:
        options.timeout = time_limit(options.timeout, "--timeout")
    variables = [*options.get, *(getattr(options, meter) for meter in METERS if getattr(options, meter))]
    for name in variables:
        if variables.count(name) > 1:
            raise ValueError(f"{name} would be left twice: give what a meter measured a name of its own, --wire NAME")
    return options


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number of ranks is a whole number from 1 on, not {text}")
    return int(text)


def _name(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a variable")
    return text
