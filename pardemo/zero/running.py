"""What the parts of an engine ask of it: they are made before it, and hold it by this."""

from typing import Any, Protocol

import torch
from torch import nn

from pardemo.zero.unit import Unit


class Running(Protocol):
    """An engine at work: its module, the units that hold its parameters, those that are trained, and its stage.

    ``gradients`` knows which gradients are shown as ``.grad``, ``norm`` computes their norm over all ranks, and
    ``size`` is the number of ranks that share the states.
    """

    module: nn.Module
    units: list[Unit]
    trained: list[Unit]
    stage: int
    size: int
    gradients: Any
    norm: Any

    def exchange(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """The sum of the ranks' tensors, in place; ``what`` names it in errors."""

    def note_own_gradients(self) -> None:
        """``.grad`` is this rank's own from here on: something was added to it."""

    def average_gradients(self) -> None:
        """Makes ``.grad`` the mean of the ranks' gradients, if a rank has added to its own since. Collective."""
