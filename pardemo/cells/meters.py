"""The meters that a cell may ask for: a new one is added here, and nowhere else.

``%%ranks`` has an option of each name, ranks put the meter around the cell, and its result comes home by that name.
What needs torch is imported on the ranks alone.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pardemo.world.errors import ranks_text

ALIKE = 1.02  # headers and barriers differ from rank to rank


class WireBytes(NamedTuple):
    """Bytes that a rank sent and received during a cell; ``evidence`` is ``wire`` where the kernel counted them."""

    sent_bytes: int
    received_bytes: int
    evidence: str


class LinkBytes(NamedTuple):
    """Bytes over each link during a cell, the same on all ranks: :class:`pardemo.meters.links.LinkMeter`'s."""

    matrix: list[list[int]]
    hosts: list[tuple[int, int]]
    adapters: list[tuple[int, int]] | None


@dataclass(frozen=True)
class CellMeter:
    """One way to measure a cell.

    Attributes:
        start: on a rank: puts the meter around the cell, and returns what reads its result after the cell. It is given
            a stack that is left when the cell is done, and the cell's variables as they are before it runs.
        show: in the notebook: prints or draws the ranks' results.
        begins_together: all ranks wait for one another before the cell begins.
        of_all_ranks: the result is a single value, the same on all ranks.
    """

    start: Callable[[contextlib.ExitStack, dict[str, Any]], Callable[[], Any]]
    show: Callable[[Sequence[Any]], None]
    begins_together: bool = False
    of_all_ranks: bool = False


def _count_wire(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], WireBytes]:
    from pardemo.meters import WireMeter

    meter = around.enter_context(WireMeter())
    return lambda: WireBytes(meter.sent_bytes, meter.received_bytes, meter.evidence)


def _show_wire(results: Sequence[WireBytes]) -> None:
    """One line where all ranks sent and received nearly the same, as on a ring; else one each."""
    how = "counted by the kernel" if results[0].evidence == "wire" else "counted at the calls"
    columns = [result.sent_bytes for result in results], [result.received_bytes for result in results]
    if len(results) > 1 and all(max(bytes_) <= ALIKE * min(bytes_) for bytes_ in columns):
        sent, received = (f"{min(b):,}" + (f" to {max(b):,}" if max(b) > min(b) else "") for b in columns)
        print(f"each rank sent {sent} B and received {received} B ({how})")
        return
    for rank, result in enumerate(results):
        print(f"rank {rank} sent {result.sent_bytes:,} B and received {result.received_bytes:,} B ({how})")


def _follow_memory(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], dict[str, int]]:
    """The peak in bytes, by kind, of what the cell makes and of the models that it knows."""
    from torch.nn import Module
    from torch.optim import Optimizer

    from pardemo.meters import MemoryMeter

    modules = [value for value in variables.values() if isinstance(value, Module)]
    optimizers = [value for value in variables.values() if isinstance(value, Optimizer)]
    meter = around.enter_context(MemoryMeter(modules, optimizers))
    return lambda: dict(meter.peak)


def _show_memory(results: Sequence[dict[str, int]]) -> None:
    def text(memory: dict[str, int]) -> str:
        parts = ", ".join(f"{kind} {count:,}" for kind, count in memory.items() if count)
        return f"at the peak {sum(memory.values()):,} B in tensors ({parts or 'none'})"

    print_alike(results, text)


def _give_timeline(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], list]:
    """Spans, which the cell records with ``timeline.span(…)``."""
    from pardemo.meters import Timeline

    timeline = variables["timeline"] = Timeline()
    return lambda: timeline.spans


def _draw_timeline(results: Sequence[list]) -> None:
    spans = [span for of_rank in results for span in of_rank]
    if not spans:
        return
    from IPython.display import display

    from pardemo.draw import charts, style

    fig, ax = style.new(size=(8, 0.6 + 0.5 * len(results)))
    charts.gantt(ax, spans)
    ax.set(xlabel="milliseconds")
    display(style.draw(fig, "When each rank computed and when it communicated."))


def _count_links(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], LinkBytes]:
    import torch.distributed as dist

    from pardemo.cluster import Cluster
    from pardemo.meters.links import LinkMeter

    beside = int(os.environ["LOCAL_WORLD_SIZE"])  # ranks that live together
    meter = around.enter_context(LinkMeter(Cluster(dist.get_world_size() // beside, ranks_per_host=beside)))
    return lambda: LinkBytes(meter.matrix, meter.hosts, meter.adapters)


def _show_links(results: Sequence[LinkBytes]) -> None:
    nodes = results[0].hosts
    for node, (sent, received) in enumerate(nodes if len(nodes) > 1 else ()):  # one alone sends nothing to others
        print(f"node {node} sent {sent:,} B to other nodes and received {received:,} B from them")


def _take_seconds(around: contextlib.ExitStack, variables: dict[str, Any]) -> Callable[[], float]:
    """From when all ranks began until this one was done."""
    times = [time.perf_counter()]
    around.callback(lambda: times.append(time.perf_counter()))
    return lambda: times[1] - times[0]


def _show_seconds(results: Sequence[float]) -> None:
    print(f"{max(results):.3f} s until the last rank was done")


#: By the name of the option and of the variable; the last one is the innermost, closest around the cell.
METERS: Mapping[str, CellMeter] = {
    "wire": CellMeter(_count_wire, _show_wire),
    "memory": CellMeter(_follow_memory, _show_memory),
    "timeline": CellMeter(_give_timeline, _draw_timeline),
    "links": CellMeter(_count_links, _show_links, of_all_ranks=True),
    "seconds": CellMeter(_take_seconds, _show_seconds, begins_together=True),
}


def print_alike(values: Sequence[Any], text_of: Callable[[Any], str]) -> None:
    """A line for each value by rank; equal ones once, None not at all."""
    groups: list[tuple[Any, list[int]]] = []
    for rank, value in enumerate(values):
        for other, ranks in groups:
            if other == value:
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    for value, ranks in groups:
        if value is not None:
            who = "all ranks" if len(ranks) == len(values) > 1 else ranks_text(ranks)
            text = text_of(value)
            print(f"{who}:\n{text}" if "\n" in text else f"{who}: {text}")
