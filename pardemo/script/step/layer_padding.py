"""Pads each layer of a script's model to a given time with a sleep."""

import time
import weakref
from collections import defaultdict
from typing import Any, NamedTuple

import torch

from pardemo.meters.tensors import tensors_in
from pardemo.script.runtime.call_sites import without_wrappers
from pardemo.script.runtime.hooks import Hooks
from pardemo.script.step.operations import equal_layers

#: Time of a backward pass relative to its forward: two products for each one. (The planner's own is not loaded here.)
BACKWARD_PER_FORWARD = 2


class PaddedTimes(NamedTuple):
    """The padding of a rank's layers: to ``forward_s``, when it slept, and what each layer's forwards computed."""

    forward_s: float
    waits: list[tuple[float, float]]
    computed_s: dict[str, list[float]]


class LayerPadding(Hooks):
    """While the block runs each layer of the script's model takes ``forward_s``, and its backward pass twice that.

    What it computes here is part of that time. A layer is one of the equal modules that the model consists of
    (:func:`equal_layers`); a forward that a backward pass runs again takes its time again.
    """

    def __init__(self, forward_s: float):
        super().__init__()
        self._waits: list[tuple[float, float]] = []
        self._computed_s: dict[str, list[float]] = defaultdict(list)
        self._forward_s = forward_s
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._layers: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._since: dict[int, float] = {}

    @property
    def seen(self) -> PaddedTimes:
        """The padding so far."""
        return PaddedTimes(self._forward_s, self._waits, dict(self._computed_s))

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if module not in self._known:  # called from outside of all that is known: a model, or a loss
            names = {part: without_wrappers(name) for name, part in module.named_modules()}
            self._known.update(names)
            wanted = set(equal_layers([module], lambda part: names[part]))
            self._layers.update({part: name for part, name in names.items() if name in wanted})
        if module in self._layers:
            self._since[id(module)] = time.thread_time()

    def _module_ends(self, module: torch.nn.Module, inputs: Any, out: Any) -> None:
        name = self._layers.get(module)
        if name is None or not (module.training or torch.is_grad_enabled()):  # an evaluation is no part of a step
            return
        own_s = time.thread_time() - self._since.pop(id(module))
        self._computed_s[name].append(own_s)
        self._wait(self._forward_s - own_s)
        for tensor in [tensor for tensor in tensors_in(out) if tensor.requires_grad][:1]:
            tensor.register_hook(lambda gradient: self._wait(BACKWARD_PER_FORWARD * (self._forward_s - own_s)))

    def _wait(self, seconds: float) -> None:
        begin = time.monotonic()
        if seconds > 0:
            time.sleep(seconds)
            self._waits.append((begin, time.monotonic()))
