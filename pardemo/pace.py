"""Computation that takes a fixed time and no core: what a GPU's work looks like to the CPU that waits for it.

With two cores and two ranks, real computation and communication share the same cores, so nothing can hide
behind anything. A paced layer waits instead of computing; its claims carry the evidence ``paced``.
"""

import time

import torch
from torch import nn


class Paced(nn.Module):
    """``module``, with a wait of ``forward_s`` before its forward and ``backward_s`` before its backward.

    The results are the module's own. Raises ValueError for a negative time.
    """

    def __init__(self, module: nn.Module, forward_s: float = 0.0, backward_s: float = 0.0):
        super().__init__()
        if forward_s < 0 or backward_s < 0:
            raise ValueError(f"a pace is a time of 0 s or more, not {min(forward_s, backward_s)}")
        self.module, self.forward_s, self.backward_s = module, forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        return _WaitInBackward.apply(self.module(x), self.backward_s)


class _WaitInBackward(torch.autograd.Function):
    """Identity; the gradient arrives after a wait."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        time.sleep(ctx.seconds)
        return gradient, None
