"""Gradients that are reduced while the backward pass goes on: stages 2 and 3."""

import weakref
from concurrent.futures import Future

from torch.autograd import Variable

from pardemo.zero.engine import Engine
from pardemo.zero.gradient_norm import Tied
from pardemo.zero.outputs import tensors_in
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
        myself = weakref.ref(self)  # autograd holds the hooks where the collector does not see them
        for number, unit in enumerate(self.trained):
            for parameter in unit.parameters:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: (engine := myself()) and engine._gradient_is_ready(engine.trained[number])
                )
                self._hooks.append(hook)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._begins())  # before any backward pass within it begins
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        for future in self._sending:
            future.exception()
        self._sending, self._next = [], 0
        super().zero_grad()

    def _backward_order(self) -> list[Unit]:
        return self.trained

    def _begins(self) -> None:
        """Notes the first call in a backward pass, so that ``_end_of_backward`` runs when it has ended."""
        if not self._open:
            self._open = True
            self._passes += 1
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _gradient_is_ready(self, unit: Unit) -> None:
        self._begins()
        unit.ready += 1
        unit.full = unit.ready == len(unit.parameters)
        order = self._order_of_sending
        while self._next < len(order) and order[self._next].full:
            self._send_next()

    def _send_next(self) -> None:
        unit = self._order_of_sending[self._next]
        self._next += 1
        if len(self._sending) >= 2:
            self._sending[-2].result()
        self._sending.append(self._channel.submit(unit.reduce, unit.pack_gradients(), self._now))

    @property
    def _now(self) -> str:
        """Where this rank is, for the ranks to compare."""
        return f"pass {self._passes} after step {self._steps}"

    def _end_of_backward(self) -> None:
        while self._next < len(self._order_of_sending):  # what parameters without a gradient left incomplete
            self._send_next()
        sending, self._sending, self._next = self._sending, [], 0
        for future in sending:
            future.result()
        for unit in self.trained:
            unit.ready, unit.full = 0, False
        self._open = False
