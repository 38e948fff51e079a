"""The steps of a script: found by its optimizer, whatever the script looks like."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pardemo import compat
from pardemo.measure.places import Aside, Places

#: After so many updates by others an optimizer takes no turns with them any more: its phase is over.
TURNS = 16


class Enough(BaseException):
    """All steps that were asked for are over. No Exception: a script's own ``except`` is not for it."""


@dataclass(frozen=True)
class Cut:
    """The moment at which a step of the optimizer is over; ``cpu_s``: seconds of a core that this thread had.

    ``backwards``: backward passes since the cut before. ``aside``: when models were evaluated since then.
    ``sent_bytes``, ``received_bytes``: the kernel's counters, of all connections but the store's. ``forwards``: how
    often a model has run since then, 0 where that was not seen. ``updates``: steps of optimizers since then, each after
    a backward pass of its own. ``closures``: backward passes within an optimizer's step, as its closure runs them.
    """

    at_s: float
    cpu_s: float
    backwards: int
    aside: tuple[Aside, ...]
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


class Steps:
    """Cuts a script into steps: one is over with the first optimizer's step after a backward pass.

    Libraries step in parts (ZeRO-3 by groups of parameters, a model with two optimizers): those that follow without
    another backward pass belong to the same step, and so do those of other optimizers that take turns with it (a
    generator's and its critic's). From cut to cut each cycle holds each part once.

    Args:
        places: is told while an optimizer steps.
        enough: the number of cuts after which the script ends, by :class:`Enough`.
        counters: the kernel's bytes sent and received so far.
        on_cut: is told the number of a cut, at its moment. on_backward: is called as a backward pass begins.
    """

    def __init__(
        self,
        places: Places,
        enough: int,
        counters: Callable[[], tuple[int, int]],
        on_cut: Callable[[int], None],
        on_backward: Callable[[], None],
    ):
        self.cuts: list[Cut] = []
        self._places, self._enough, self._counters = places, enough, counters
        self._on_cut, self._on_backward = on_cut, on_backward
        #: is told an exception that leaves a backward pass
        self.on_raise: Callable[[BaseException], None] = lambda error: None
        self._backwards = self._since_update = self._updates = self._closures = 0
        self._first: weakref.ref[Any] | None = None  # the optimizer whose steps end the cycles
        self._others = 0  # updates by others since its last
        self._hooks: list[Any] = []
        self._thread = threading.get_ident()

    @property
    def number(self) -> int:
        """How many steps are over."""
        return len(self.cuts)

    def __enter__(self) -> "Steps":
        self._hooks = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]

        self._passes = compat.replaced(*compat.engine_replaced(self._on_pass))
        self._passes.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._passes.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()

    def _on_pass(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # a checkpoint's is within another, and autograd.grad's is no step's
        outermost = compat.graph_task() == -1 and bool(kwargs.get("accumulate_grad"))
        if outermost:
            self._places.learns()
            self._backwards += 1
            self._since_update += 1
            self._closures += self._places.stepping
            self._on_backward()
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if outermost:
                self.on_raise(error)
            raise

    def _begins(self, *_: Any) -> None:
        self._places.stepping = True

    def _ends(self, optimizer: Any, *_: Any) -> None:
        self._places.stepping = False
        if self._since_update == 0 or threading.get_ident() != self._thread:
            return
        self._since_update, self._updates = 0, self._updates + 1
        if not self._ends_cycle(optimizer):
            return
        self._on_cut(len(self.cuts) + 1)  # what it costs is part of the step that is over
        sent, received = self._counters()
        aside = self._places.take_aside()
        self._places.forget()
        self.cuts.append(Cut(
            time.monotonic(), time.thread_time(), self._backwards, aside, sent, received,
            self._places.take_forwards(), self._updates, self._closures,
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
