"""``%%ranks``: the notebook's side of a cell that runs on ranks."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pardemo.cluster import Cluster
from pardemo.collection.cells.cell import METERS, Cell, Wire, parse
from pardemo.world import World
from pardemo.world.errors import RankError, ranks_text

ALIKE = 1.02  # headers and barriers differ from rank to rank
USAGE = (
    "%%ranks N [--cluster NAME] [--get NAME …] [--put NAME …] [--wire] [--memory] [--timeline] [--links] [--seconds] "
    "[--preload MODULE …] [--timeout S]"
)


class RanksMagic:
    """Holds one World for each number of ranks, and for each cluster, and runs cells on them.

    Args:
        shell: an IPython shell: where variables are taken from and put.
    """

    def __init__(self, shell: Any):
        self._shell = shell
        self._worlds: dict[tuple[int, Cluster | None], World] = {}
        self._count = 0

    def ranks(self, line: str, cell: str) -> None:
        """Runs the cell's text as the program of each of N ranks.

        Variables stay on the ranks from cell to cell; ``torch``, ``dist``, ``rank``, ``world_size`` and ``device`` are
        there. What a rank prints appears with its number before it, and the value of a last expression by rank.

        Options: ``--cluster`` names a variable of the notebook, a Cluster for N ranks; ``--get`` brings
        variables home, each as a list by rank; ``--put`` gives the ranks variables of the notebook. ``--wire``,
        ``--memory``, ``--timeline``, ``--links`` (bytes from rank to rank, and of each host) and ``--seconds`` measure
        the cell, show what they found and leave it in a variable of that name: a list by rank, but ``links`` is one,
        the same on all (on the ranks ``timeline`` is there to record spans with). ``--preload`` names modules that the
        ranks have loaded before they start; ``--timeout`` is in seconds (300).
        """
        from IPython.core.error import UsageError

        try:
            options = _parse(line)
            self._count += 1
            name = f"<ranks cell {self._count}>"
            _check_source(cell, name)
            put = self._to_put(options.put)
            world = self._world(options.ranks, options.preload, self._cluster(options.cluster))
            meters = [meter for meter in METERS if getattr(options, meter)]
            cells = world.run_source(
                cell, get=options.get, put=put, meters=meters, name=name, timeout_s=options.timeout
            )
        except ValueError as error:
            raise UsageError(f"%%ranks: {error}") from None
        except RankError as error:
            _tell(error, "The ranks start anew with the next cell: their variables are gone.")
            raise
        self._bring_home(options.get, meters, cells)
        show(cells)

    def close(self) -> None:
        """Ends all ranks."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()

    def _cluster(self, name: str | None) -> Cluster | None:
        if name is None:
            return None
        found = self._shell.user_ns.get(name)
        if not isinstance(found, Cluster):
            told = "has no variable of that name" if found is None else f"has a {type(found).__name__} of that name"
            raise ValueError(f"--cluster {name}: the notebook {told}; it names a Cluster")
        return found

    def _world(self, size: int, preload: Sequence[str], cluster: Cluster | None = None) -> World:
        world = self._worlds.get((size, cluster))
        if world is not None and not set(preload) <= set(world.preload):
            print(f"The {size} ranks start anew, with {', '.join(preload)} loaded: their variables are gone.")
            preload = sorted({*world.preload, *preload})
            world.close()
            world = None
        if world is None:
            world = self._worlds[size, cluster] = World(size, preload=preload, cluster=cluster)
        return world

    def _to_put(self, names: Sequence[str]) -> dict[str, Any]:
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            raise ValueError(f"--put {missing[0]}: the notebook has no variable of that name")
        return {name: self._shell.user_ns[name] for name in names}

    def _bring_home(self, names: Sequence[str], meters: Sequence[str], cells: Sequence[Cell]) -> None:
        found = {name: [cell.got[name] for cell in cells] for name in names}
        measured = {meter: [getattr(cell, meter) for cell in cells] for meter in meters}
        if "links" in measured:
            measured["links"] = cells[0].links
        self._shell.push(found | measured)


def show(cells: Sequence[Cell]) -> None:
    """Prints the last expression's value by rank, equal ones once, and a line for each meter; draws the timeline."""
    _print_alike([cell.shown for cell in cells], lambda text: text)
    _print_wire([cell.wire for cell in cells if cell.wire is not None])
    _print_alike([cell.memory for cell in cells], _memory_text)
    hosts = cells[0].links.hosts if cells[0].links else []
    if len(hosts) > 1:  # one alone sends nothing to others
        for host, (sent, received) in enumerate(hosts):
            print(f"host {host} sent {sent:,} B to other hosts and received {received:,} B from them")
    if cells[0].seconds is not None:
        print(f"{max(cell.seconds for cell in cells):.3f} s until the last rank was done")
    spans = [span for cell in cells for span in cell.timeline or []]
    if spans:
        from IPython.display import display

        from pardemo.collection import figures

        fig, ax = figures.new(size=(8, 0.6 + 0.5 * len(cells)))
        figures.gantt(ax, spans)
        ax.set(xlabel="milliseconds")
        display(figures.draw(fig, "When each rank computed and when it communicated."))


def _print_alike(values: Sequence[Any], text_of: Callable[[Any], str]) -> None:
    groups: list[tuple[Any, list[int]]] = []
    for rank, value in enumerate(values):
        same = next((ranks for other, ranks in groups if other == value), None)
        if same is None:
            groups.append((value, [rank]))
        else:
            same.append(rank)
    for value, ranks in groups:
        if value is not None:
            who = "all ranks" if len(ranks) == len(values) > 1 else ranks_text(ranks)
            text = text_of(value)
            print(f"{who}:\n{text}" if "\n" in text else f"{who}: {text}")


def _print_wire(wires: Sequence[Wire]) -> None:
    """One line where all ranks sent and received nearly the same, which is what a ring is about; else one each."""
    if not wires:
        return
    told = "counted by the kernel" if wires[0].evidence == "wire" else "counted at the calls"
    columns = [wire.sent_bytes for wire in wires], [wire.received_bytes for wire in wires]
    if len(wires) > 1 and all(max(bytes_) <= ALIKE * min(bytes_) for bytes_ in columns):
        sent, received = (f"{min(b):,}" + (f" to {max(b):,}" if max(b) > min(b) else "") for b in columns)
        print(f"each rank sent {sent} B and received {received} B ({told})")
        return
    for rank, wire in enumerate(wires):
        print(f"rank {rank} sent {wire.sent_bytes:,} B and received {wire.received_bytes:,} B ({told})")


def _memory_text(memory: dict[str, int]) -> str:
    parts = ", ".join(f"{kind} {count:,}" for kind, count in memory.items() if count)
    return f"at the peak {sum(memory.values()):,} B in tensors ({parts or 'none'})"


def _tell(error: RankError, line: str) -> None:
    """The reader sees what happened on the ranks, and not this module's frames."""
    error._render_traceback_ = lambda: [str(error).rstrip(), "", line]


def _check_source(source: str, name: str) -> None:
    """Raises ValueError for text that is no Python, before any rank sees it."""
    try:
        parse(source, name)
    except SyntaxError as error:
        text = (error.text or "").strip()
        own = " (a line that begins with % or ! is the notebook's: the ranks run Python)" if text[:1] in "%!" else ""
        raise ValueError(f"line {error.lineno} of the cell: {error.msg}: {text}{own}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. Usage: {USAGE}")


def _parse(line: str) -> argparse.Namespace:
    parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("ranks", type=_size)
    for name in ("get", "put", "preload"):
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--cluster", metavar="NAME")
    for name in METERS:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--timeout", type=_seconds)
    options = parser.parse_args(shlex.split(line))
    for name in (*options.get, *options.put):
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not the name of a variable")
    return options


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number of ranks is a whole number from 1 on, not {text}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"seconds are a number above 0, not {text}")
    return seconds
