"""Computation that takes a fixed time and no core: what a GPU's work looks like to the CPU that waits for it.

With two cores and two ranks, real computation and communication share the same cores, so nothing can hide
behind anything. A paced layer waits instead of computing; its claims carry the evidence ``paced``.
"""

import time
from collections.abc import Callable

import torch
from torch import nn

from pardemo.meters.timeline import Timeline


class Paced(nn.Module):
    """``module``, with a wait of ``forward_s`` before its forward and ``backward_s`` before its backward.

    The results are the module's own. Waits are noted on ``timeline`` as computation. Raises ValueError for a
    negative time.
    """

    def __init__(
        self, module: nn.Module, forward_s: float = 0.0, backward_s: float = 0.0, timeline: Timeline | None = None
    ):
        super().__init__()
        if forward_s < 0 or backward_s < 0:
            raise ValueError(f"a pace is a time of 0 s or more, not {min(forward_s, backward_s)}")
        self.module, self.forward_s, self.backward_s = module, forward_s, backward_s
        self._timeline = timeline or Timeline()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._wait(self.forward_s, "forward")
        return _WaitInBackward.apply(self.module(x), lambda: self._wait(self.backward_s, "backward"))

    def _wait(self, seconds: float, name: str) -> None:
        with self._timeline.span("compute", name):
            time.sleep(seconds)


class _WaitInBackward(torch.autograd.Function):
    """Identity; the gradient arrives after a wait."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
        ctx.wait = wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.wait()
        return gradient, None
