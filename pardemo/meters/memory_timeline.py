"""Records live bytes after each allocation and each release, for pictures of a step."""

from collections.abc import Iterable
from typing import Any

import torch

from pardemo import compat
from pardemo.meters.memory import MemoryMeter


class MemoryTimeline(MemoryMeter):
    """A :class:`MemoryMeter` that keeps every change: what was alive after each tensor came, or went.

    >>> with MemoryTimeline(model, optimizer) as course:        # doctest: +SKIP
    ...     model(batch).sum().backward()
    ...     optimizer.step()
    >>> course.at("step")["gradients"]                         # doctest: +SKIP

    What an optimizer updates and no module has (an fp32 copy of the parameters) counts as its states. The arguments
    are those of :class:`MemoryMeter`.

    Attributes: ``states`` (after each change, bytes by kind), ``marks`` (where in ``states`` the "forward" begins, the
    "backward", and the "step", which is all that follows the backward pass).
    """

    def __init__(
        self,
        modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    ):
        super().__init__(modules, optimizers)
        self.states: list[dict[str, int]] = []
        self.marks: dict[str, int] = {}
        self._parameters: list[torch.nn.Parameter] | None = None

    def at(self, mark: str) -> dict[str, int]:
        """Bytes by kind at a mark: at "step", what is there between backward and step."""
        return self.states[self.marks[mark]]

    def __enter__(self) -> "MemoryTimeline":
        self._parameters = None
        super().__enter__()
        self.marks, self.states = {"forward": 0}, [dict(self.live)]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if "step" not in self.marks:  # nothing came after the backward pass
            self._mark("step")

    def _follow(self, func, args, kwargs):
        backward = compat.in_backward()
        if backward and "backward" not in self.marks:
            self._mark("backward")
        elif not backward and "backward" in self.marks and "step" not in self.marks:
            self._mark("step")
        elif backward:
            self._classify()
        return super()._follow(func, args, kwargs)

    def _mark(self, name: str) -> None:
        self._classify()
        self.marks[name] = len(self.states)
        self.states.append(dict(self.live))

    def _classify(self) -> None:
        """At the beginning what is there; later gradients that were put in place by hand, which no hook sees.

        Only of the parameters of the beginning: FSDP2 puts gathered ones in their place for a moment.
        """
        if self._parameters is None:
            super()._classify()
            self._parameters = [parameter for module in self._modules for parameter in module.parameters()]
            known = {id(parameter) for parameter in self._parameters}
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if id(parameter) not in known:
                            self._note(parameter, "optimizer states")
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._note(parameter.grad, "gradients")

    def _changed(self, storage: Any, record: Any, nbytes: int) -> None:
        self.states.append(dict(self.live))
