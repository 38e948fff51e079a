"""Gradients that are reduced while the backward pass goes on: stages 2 and 3.

The backward pass makes a unit's gradients one by one. When the last is there, they are packed and sent; the next unit
is computed meanwhile, and no third one is packed before the first has arrived::

    backward   | unit 3: p9 p8 p7 | unit 2: p6 p5 p4 | unit 1: p3 p2 p1 |
    channel                       | reduce-scatter 3 | reduce-scatter 2 | reduce-scatter 1 |
    kept        .grad of unit 3     [chunk] of 3       + [chunk] of 2     + [chunk] of 1
"""

import weakref
from concurrent.futures import Future

from torch import nn

from pardemo import compat
from pardemo.zero.engine import Engine
from pardemo.zero.gradient_norm import Tied
from pardemo.zero.gradients import GradientsInShards
from pardemo.zero.unit import Unit


class ReducesInBackward(Engine):
    """Stages 2 and 3: a unit's gradients are packed, freed, and reduced while the backward pass goes on.

    Units are sent strictly in one order, whichever is complete first, so that all ranks agree without a word; at most
    two are on their way at a time, so that gradients do not pile up before a slow link. A backward pass within a
    backward pass (re-entrant checkpointing) is a part of the outer one.
    """

    def __init__(self, *args, tied: "tuple[Tied, ...]" = (), **options):
        if tied:
            raise ValueError(
                "tied copies are summed after backward(), when stages 2 and 3 have sent their gradients: use stage 1"
            )
        super().__init__(*args, **options)
        self._sending: list[Future] = []
        self._order_of_sending = self._backward_order()
        self._next = 0
        self.gradients = GradientsInShards(self)
        myself = weakref.ref(self)  # autograd holds the hooks where the collector does not see them
        for number, unit in enumerate(self.trained):
            for parameter in unit.parameters:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda p, number=number: (
                        (engine := myself()) and engine._gradient_is_ready(engine.trained[number], p)
                    )
                )
                before = parameter.register_hook(lambda _: (engine := myself()) and engine._begins())
                self._hooks += [hook, before]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for future in self._sending:
            future.exception()
        self._sending, self._next = [], 0
        self.gradients.forget()
        super().zero_grad()

    def _backward_order(self) -> list[Unit]:
        return self.trained

    def _backward_comes(self, steps: int) -> None:
        super()._backward_comes(steps)
        self._begins()  # before any backward pass within it begins

    def _begins(self) -> None:
        """Notes the first call in a backward pass, so that ``_end_of_backward`` runs when it has ended."""
        if not self._open:
            self._open = True
            self._passes += 1
            self.gradients.hide()
            compat.after_backward(self._end_of_backward)

    def _gradient_is_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        """More of it may come: each use of a layer under a re-entrant checkpoint has a backward pass of its own."""
        self._begins()
        unit.ready.add(parameter)
        unit.full = len(unit.ready) == len(unit.parameters)
        if unit.sent:
            unit.late = True
            return
        order = self._order_of_sending
        while self._next < len(order) and order[self._next].full:
            self._send_next()

    def _send_next(self) -> None:
        unit = self._order_of_sending[self._next]
        self._next += 1
        self._send(unit)

    def _send(self, unit: Unit) -> None:
        unit.sent = True
        if len(self._sending) >= 2:
            self._sending[-2].result()
        self._sending.append(self._channel.submit(unit.reduce, unit.pack_gradients(), self._now))

    @property
    def _now(self) -> str:
        """Where this rank is, for the ranks to compare."""
        changes = f", gradients changed ({self.gradients.changes:x})" * bool(self.gradients.changes)
        return f"pass {self._passes} after step {self._steps}{changes}"

    def _end_of_backward(self) -> None:
        while self._next < len(self._order_of_sending):  # what parameters without a gradient left incomplete
            self._send_next()
        for unit in self._order_of_sending:
            if unit.late:
                self._send(unit)
        sending, self._sending, self._next = self._sending, [], 0
        for future in sending:
            future.result()
        for unit in self.trained:
            unit.expect_gradients()
        self._open = False
        self.gradients.show()

    def _finish_gradients(self) -> None:
        self.gradients.hide()
