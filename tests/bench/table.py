"""Rows of the speed table: measured by turns, so that a drift of the machine meets both, and compared by medians."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import median, quantiles
from typing import Any, ClassVar

from bench import BENCHES
from pardemo.tables import text_table


@dataclass(frozen=True)
class BenchRow:
    """One line of the table.

    Args:
        ours, peer: medians in ``unit``, of which less is better. ratio: the peer's over ours, above 1 where ours is
            better. spread: the middle half of the ratios of neighbouring runs.
        target: the least ratio asked for, None where a row only informs. within: where it is given, the ratio is to be
            no further than that from ``target``, above or below.
        met: whether it is so. note: what the peer is.
    """

    name: str
    ours: float
    peer: float
    unit: str
    ratio: float
    spread: tuple[float, float]
    target: float | None
    met: bool | None
    note: str = ""
    within: float | None = None

    INTERVAL: ClassVar[str] = "middle half"

    def interval(self) -> tuple[float, float]:
        return self.spread

    def verdict(self) -> str:
        return "" if self.met is None else "yes" if self.met else "NO"

    def asked(self) -> str:
        if self.target is None:
            return ""
        return f">= {self.target:g}" if self.within is None else f"{self.target:g} ± {self.within:g}"


def is_met(ratio: float, target: float | None, within: float | None = None) -> bool | None:
    """Whether a ratio is at least the target, or no further from it than ``within``; None where nothing is asked."""
    if target is None:
        return None
    return ratio >= target if within is None else abs(ratio - target) <= within


def compare(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    target: float | None,
    note: str = "",
    within: float | None = None,
) -> BenchRow:
    """A row of two lists of alternating measurements."""
    ratio = median(peer) / median(ours)
    pairs = [p / o for o, p in zip(ours, peer, strict=True)]
    low, _, high = quantiles(pairs, n=4) if len(pairs) > 1 else (pairs[0],) * 3
    met = is_met(ratio, target, within)
    return BenchRow(name, median(ours), median(peer), unit, ratio, (low, high), target, met, note, within)


def by_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    warm: int,
    before: Callable[[], object] = lambda: None,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """On every rank, which begin together: seconds of each way in each round, after ``warm`` that do not count.

    ``before`` and ``after``, with the way's name, are called around each and not timed. Every second round goes
    through the ways from the last to the first.
    """
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + warm):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            before()
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            ways[name]()
            took_s = time.perf_counter() - begin
            after(name)
            if turn >= warm:
                seconds[name].append(took_s)
    return seconds


def slowest(results: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of every rank's seconds in each round, by name: those of the round's slowest rank, for whom the others wait."""
    return {
        name: [max(times) for times in zip(*(of_rank[name] for of_rank in results), strict=True)] for name in results[0]
    }


def on_ranks(
    function: Callable[..., dict[str, list[float]]],
    shapes: Mapping[str, Sequence[Any]],
    rows: Iterable[tuple],
    ranks: int = 2,
    **of_world: Any,
) -> Iterator[BenchRow]:
    """The rows of a function that all ranks run once for each shape.

    Args:
        function: returns seconds, or bytes, of each way in each round, by the way's name.
        shapes: label -> arguments of the function.
        rows: (name, way of ours, way of the peer, target, note), and the unit where it is not s. ``{}`` in name and
            note is the label.
        of_world: ``cluster`` and ``preload`` of the World.
    """
    from pardemo import World

    with World(ranks, **of_world) as world:
        for label, shape in shapes.items():
            measured = slowest(world.run(function, *shape))
            for name, ours, peer, target, note, *unit in rows:
                of_both = measured[ours], measured[peer]
                yield compare(name.format(label), *of_both, unit[0] if unit else "s", target, note.format(label))


def process(program: str, *arguments: str) -> list[float]:
    """What a program prints as JSON in its last line, in a Python process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


#: For such a program: the peak of its memory. getrusage's would be that of the process which started it, if larger.
PEAK_MIB = """
def peak_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
"""


def run(names: Sequence[str], on_start: Callable[[str], None] = lambda name: None) -> list[BenchRow]:
    """Runs the named benches (all when none is named).

    Raises:
        ValueError: a name that does not exist.
    """
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        raise ValueError(f"no bench named {', '.join(unknown)}; there are: {', '.join(BENCHES)}")
    rows: list[BenchRow] = []
    for name in names or BENCHES:
        on_start(name)
        with contextlib.redirect_stdout(sys.stderr):  # what ranks print is not the table
            rows += function_of(name)()
    return rows


def function_of(name: str) -> Callable[[], Iterable[BenchRow]]:
    module, _, function = BENCHES[name].partition(":")
    return getattr(import_module(f"bench.{module}"), function)


def as_text(rows: Sequence[BenchRow]) -> str:
    """The table for the terminal."""
    head = ("name", "ours", "peer", "unit", "ratio", rows[0].INTERVAL if rows else "", "target", "met", "peer is")
    return text_table([head, *map(_cells, rows)])


def _cells(row: BenchRow) -> tuple[str, ...]:
    low, high = row.interval()
    figures = (f"{row.ours:.4g}", f"{row.peer:.4g}", row.unit, f"{row.ratio:.2f}", f"{low:.2f} to {high:.2f}")
    return row.name, *figures, row.asked(), row.verdict(), row.note
