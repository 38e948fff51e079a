"""Records when each rank computed and when it communicated."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """One stretch of work: seconds on the host's monotonic clock, which its processes share."""

    rank: int
    kind: str
    name: str
    begin_s: float
    end_s: float


class Timeline:
    """Collects :class:`Span` s on this rank; ranks' lists added together make a Gantt chart.

    >>> timeline = Timeline()
    >>> with timeline.span("compute", "forward 0"):
    ...     pass
    >>> timeline.spans[0].kind
    'compute'

    Threads may record at the same time. On CUDA a span waits for the device at both ends, so that it
    covers the work itself and not its launch; within a span nothing is delayed.
    """

    def __init__(self) -> None:
        self.rank = _current_rank()
        self.spans: list[Span] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, kind: str, name: str = "") -> Iterator[None]:
        _wait_for_device()
        begin = time.monotonic()
        try:
            yield
        finally:
            _wait_for_device()
            self.add(kind, name, begin, time.monotonic())

    def add(self, kind: str, name: str, begin_s: float, end_s: float) -> None:
        with self._lock:
            self.spans.append(Span(self.rank, kind, name, begin_s, end_s))


def covered_s(spans: list[Span]) -> float:
    """Length of the union of the spans."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, end))
        end = max(end, span.end_s)
    return total


def overlap_s(spans: list[Span], kind: str, other: str) -> float:
    """Seconds in which spans of both kinds were open: |A| + |B| − |A ∪ B|."""
    first = [s for s in spans if s.kind == kind]
    second = [s for s in spans if s.kind == other]
    return covered_s(first) + covered_s(second) - covered_s(first + second)


def begun_before_end(spans: list[Span], kind: str, other: str) -> int:
    """Counts spans of ``kind`` that began before the last of ``other`` ended on the same rank: an order, not a time."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.kind == other:
            ends[span.rank] = max(span.end_s, ends.get(span.rank, span.end_s))
    return sum(span.kind == kind and span.begin_s < ends.get(span.rank, float("-inf")) for span in spans)


def _current_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
