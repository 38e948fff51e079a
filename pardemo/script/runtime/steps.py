"""Divides a script's run into steps of its optimizer, and ends it after so many."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pardemo import compat
from pardemo.script.runtime.call_sites import CallSites, Evaluation
from pardemo.script.runtime.hooks import Hooks

#: After so many updates by others an optimizer takes no turns with them any more: its phase is over.
TURNS = 16


class Enough(BaseException):
    """Raised when all steps that were asked for are over. Not an Exception: a script's ``except`` must not catch it."""


@dataclass(frozen=True)
class StepEnd:
    """The moment at which an optimizer's step is over; ``cpu_s``: seconds of a core that this thread had.

    ``backwards``: backward passes since the cut before. ``evaluations``: when models were evaluated since then.
    ``sent_bytes``, ``received_bytes``: the kernel's counters, of all connections but the store's. ``forwards``: how
    often a model has run since then, 0 where that was not seen. ``updates``: steps of optimizers since then, each after
    a backward pass of its own. ``closures``: backward passes within an optimizer's step, as its closure runs them.
    """

    at_s: float
    cpu_s: float
    backwards: int
    evaluations: tuple[Evaluation, ...]
    sent_bytes: int
    received_bytes: int
    forwards: int = 0
    updates: int = 1
    closures: int = 0

    @property
    def micro_batches(self) -> int:
        """Backward passes of a whole model for one update.

        A loss that goes backward piece by piece belongs to one of them; an optimizer that evaluates its closure again
        and again (LBFGS) takes no more samples.
        """
        passes = min(self.backwards, self.forwards or self.backwards)
        return max(1, passes // (self.updates * max(1, self.closures)))


class Steps(Hooks):
    """Divides a script's run into steps: one ends with the first optimizer step after a backward pass.

    Libraries step in parts (ZeRO-3 by groups of parameters, a model with two optimizers): those that follow without
    another backward pass belong to the same step, and so do those of other optimizers that take turns with it (a
    generator's and its critic's). From cut to cut each cycle holds each part once.

    Args:
        sites: is told while an optimizer steps.
        enough: the number of cuts after which the script ends, by :class:`Enough`.
        counters: the kernel's bytes sent and received so far.
        on_cut: is told the number of a cut, at its moment. on_backward: is called as a backward pass begins.
    """

    def __init__(
        self,
        sites: CallSites,
        enough: int,
        counters: Callable[[], tuple[int, int]],
        on_cut: Callable[[int], None],
        on_backward: Callable[[], None],
    ):
        super().__init__()
        self.cuts: list[StepEnd] = []
        self._sites, self._enough, self._counters = sites, enough, counters
        self._on_cut, self._on_backward = on_cut, on_backward
        #: is told an exception that leaves a backward pass
        self.on_raise: Callable[[BaseException], None] = lambda error: None
        self._backwards = self._since_update = self._updates = self._closures = 0
        self._first: weakref.ref[Any] | None = None  # the optimizer whose steps end the cycles
        self._others = 0  # updates by others since its last
        self._thread = threading.get_ident()

    @property
    def number(self) -> int:
        """The number of steps that are over."""
        return len(self.cuts)

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # a checkpoint's is within another, and autograd.grad's is no step's
        is_outer = compat.graph_task() == -1 and bool(kwargs.get("accumulate_grad"))
        if is_outer:
            self._sites.note_backward()
            self._backwards += 1
            self._since_update += 1
            self._closures += self._sites.stepping
            self._on_backward()
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if is_outer:
                self.on_raise(error)
            raise

    def _step_begins(self, *_: Any) -> None:
        self._sites.stepping = True

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        self._sites.stepping = False
        if self._since_update == 0 or threading.get_ident() != self._thread:
            return
        self._since_update, self._updates = 0, self._updates + 1
        if not self._ends_cycle(optimizer):
            return
        self._on_cut(len(self.cuts) + 1)  # what it costs is part of the step that is over
        sent, received = self._counters()
        evaluations = self._sites.take_evaluations()
        self._sites.forget_graph()
        self.cuts.append(StepEnd(
            time.monotonic(), time.thread_time(), self._backwards, evaluations, sent, received,
            self._sites.take_forwards(), self._updates, self._closures,
        ))  # fmt: skip
        self._backwards = self._updates = self._closures = 0
        if len(self.cuts) == self._enough:
            raise Enough

    def _ends_cycle(self, optimizer: Any) -> bool:
        """Whether it is the first optimizer's update; where that one has stopped, the next one's takes its place."""
        first = self._first() if self._first is not None else None
        if first is optimizer or first is None or self._others >= TURNS:
            self._first, self._others = weakref.ref(optimizer), 0
            return True
        self._others += 1
        return False
