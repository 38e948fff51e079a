"""Pads a layer to a fixed duration with a sleep, which is what a GPU's work looks like to the CPU.

With two cores and two ranks, real computation and communication share the same cores, so nothing can hide
behind anything. A padded layer waits instead of computing; its claims carry the evidence ``paced``.
"""

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from pardemo.meters.timeline import Timeline


class PaddedModule(nn.Module):
    """``module``, with a wait of ``forward_s`` before its forward and ``backward_s`` before its backward.

    Another one of ``weights_s`` stands before the gradient of one of its weights: part of any backward, and of a
    pipeline's backwards in two parts the second one's. The results are the module's own. Waits are noted on
    ``timeline`` as computation.

    Raises:
        ValueError: a negative time, or a wait for the weights of a module that trains none.
    """

    def __init__(
        self,
        module: nn.Module,
        forward_s: float = 0.0,
        backward_s: float = 0.0,
        timeline: Timeline | None = None,
        *,
        weights_s: float = 0.0,
    ):
        super().__init__()
        if min(forward_s, backward_s, weights_s) < 0:
            raise ValueError(f"a layer is padded by 0 s or more, not {min(forward_s, backward_s, weights_s)}")
        self.module, self.forward_s, self.backward_s, self.weights_s = module, forward_s, backward_s, weights_s
        self._timeline = timeline or Timeline()
        self._waits_for = next((name for name, p in module.named_parameters() if p.requires_grad), "")
        if weights_s and not self._waits_for:
            raise ValueError("a module that trains no weights has no time for their gradients")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._wait(self.forward_s, "forward")
        y = self._with_slow_weights(x) if self.weights_s else self.module(x)
        return _WaitInBackward.apply(y, lambda: self._wait(self.backward_s, "backward"))

    def _with_slow_weights(self, x: torch.Tensor) -> torch.Tensor:
        slow = _WaitInBackward.apply(
            self.module.get_parameter(self._waits_for), lambda: self._wait(self.weights_s, "weight gradients")
        )
        return functional_call(self.module, {self._waits_for: slow}, (x,))

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
