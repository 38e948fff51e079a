"""The meters that a cell may ask for, one class each: a new one is added here, and nowhere else.

``%%ranks`` has an option of each name, ranks put the meter around the cell, and its result comes home by that name.
What needs torch is imported on the ranks alone.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from pardemo.world.errors import ranks_text

ALIKE = 1.02  # headers and barriers differ from rank to rank


class WireBytes(NamedTuple):
    """What a rank put on the wire during a cell, and how that is known (``wire``: the kernel counted)."""

    sent_bytes: int
    received_bytes: int
    evidence: str


class LinkBytes(NamedTuple):
    """What went over each link during a cell, the same on all ranks: :class:`pardemo.meters.links.LinkMeter`'s."""

    matrix: list[list[int]]
    hosts: list[tuple[int, int]]
    adapters: list[tuple[int, int]] | None


class CellMeter:
    """One way to measure a cell.

    Attributes:
        begins_together: all ranks wait for one another before the cell begins.
        of_all_ranks: the result is a single value, the same on all ranks.
    """

    begins_together: ClassVar[bool] = False
    of_all_ranks: ClassVar[bool] = False

    @staticmethod
    def start(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], Any]:
        """On a rank: puts the meter around the cell, and returns what reads its result after the cell.

        Args:
            around: is left when the cell is done. variables: the cell's own, as they are before it runs.
        """
        raise NotImplementedError

    @staticmethod
    def show(results: Sequence[Any]) -> None:
        """In the notebook: prints or draws the ranks' results."""
        raise NotImplementedError


class _Wire(CellMeter):
    @staticmethod
    def start(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], WireBytes]:
        from pardemo.meters import WireMeter

        meter = around.enter_context(WireMeter())
        return lambda: WireBytes(meter.sent_bytes, meter.received_bytes, meter.evidence)

    @staticmethod
    def show(results: Sequence[WireBytes]) -> None:
        """One line where all ranks sent and received nearly the same, as on a ring; else one each."""
        how = "counted by the kernel" if results[0].evidence == "wire" else "counted at the calls"
        columns = [result.sent_bytes for result in results], [result.received_bytes for result in results]
        if len(results) > 1 and all(max(bytes_) <= ALIKE * min(bytes_) for bytes_ in columns):
            sent, received = (f"{min(b):,}" + (f" to {max(b):,}" if max(b) > min(b) else "") for b in columns)
            print(f"each rank sent {sent} B and received {received} B ({how})")
            return
        for rank, result in enumerate(results):
            print(f"rank {rank} sent {result.sent_bytes:,} B and received {result.received_bytes:,} B ({how})")


class _Memory(CellMeter):
    """The peak in bytes, by kind, of what the cell made and of the models that it knew."""

    @staticmethod
    def start(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], dict[str, int]]:
        from torch.nn import Module
        from torch.optim import Optimizer

        from pardemo.meters import MemoryMeter

        modules = [value for value in variables.values() if isinstance(value, Module)]
        optimizers = [value for value in variables.values() if isinstance(value, Optimizer)]
        meter = around.enter_context(MemoryMeter(modules, optimizers))
        return lambda: dict(meter.peak)

    @staticmethod
    def show(results: Sequence[dict[str, int]]) -> None:
        def text(memory: dict[str, int]) -> str:
            parts = ", ".join(f"{kind} {count:,}" for kind, count in memory.items() if count)
            return f"at the peak {sum(memory.values()):,} B in tensors ({parts or 'none'})"

        print_alike(results, text)


class _Timeline(CellMeter):
    """Spans, which the cell records with ``timeline.span(…)``; drawn as bars over time."""

    @staticmethod
    def start(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], list]:
        from pardemo.meters import Timeline

        timeline = variables["timeline"] = Timeline()
        return lambda: timeline.spans

    @staticmethod
    def show(results: Sequence[list]) -> None:
        spans = [span for of_rank in results for span in of_rank]
        if not spans:
            return
        from IPython.display import display

        from pardemo.draw import charts, style

        fig, ax = style.new(size=(8, 0.6 + 0.5 * len(results)))
        charts.gantt(ax, spans)
        ax.set(xlabel="milliseconds")
        display(style.draw(fig, "When each rank computed and when it communicated."))


class _Links(CellMeter):
    of_all_ranks = True

    @staticmethod
    def start(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], LinkBytes]:
        import torch.distributed as dist

        from pardemo.cluster import Cluster
        from pardemo.meters.links import LinkMeter

        beside = int(os.environ["LOCAL_WORLD_SIZE"])  # ranks that live together
        meter = around.enter_context(LinkMeter(Cluster(dist.get_world_size() // beside, ranks_per_host=beside)))
        return lambda: LinkBytes(meter.matrix, meter.hosts, meter.adapters)

    @staticmethod
    def show(results: Sequence[LinkBytes]) -> None:
        nodes = results[0].hosts
        for node, (sent, received) in enumerate(nodes if len(nodes) > 1 else ()):  # one alone sends nothing to others
            print(f"node {node} sent {sent:,} B to other nodes and received {received:,} B from them")


class _Seconds(CellMeter):
    """From when all ranks began until this one was done."""

    begins_together = True

    @staticmethod
    def start(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], float]:
        times = [time.perf_counter()]
        around.callback(lambda: times.append(time.perf_counter()))
        return lambda: times[1] - times[0]

    @staticmethod
    def show(results: Sequence[float]) -> None:
        print(f"{max(results):.3f} s until the last rank was done")


#: By the name of the option and of the variable; the last one is the innermost, closest around the cell.
METERS: Mapping[str, type[CellMeter]] = {
    "wire": _Wire,
    "memory": _Memory,
    "timeline": _Timeline,
    "links": _Links,
    "seconds": _Seconds,
}


def print_alike(values: Sequence[Any], text_of: Callable[[Any], str]) -> None:
    """A line for each value by rank; equal ones once, None not at all."""
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
