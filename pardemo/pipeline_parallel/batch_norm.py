"""Batch norm where a batch comes in micro-batches."""

from typing import Any

import torch
from torch import nn

from pardemo import argument_checks, compat


class DeferredBatchNorm(nn.BatchNorm1d):
    """Normalises each micro-batch by itself, but moves its running statistics once per batch, by the whole batch's.

    Plain batch norm moves them once per micro-batch, by variances that miss how the micro-batches' means differ. What
    evaluation uses is thus that of the undivided batch; what training normalises by is still the micro-batch's, as in
    GPipe (arXiv 1811.06965, 2.2). A forward pass that activation checkpointing runs again does not count again.

    Args:
        features: as ``nn.BatchNorm1d``; input [samples, features].
        micro_batches: after so many forward passes the running statistics move.

    Raises:
        ValueError: ``micro_batches`` below 1.
    """

    def __init__(self, features: int, micro_batches: int):
        super().__init__(features)
        self.micro_batches = argument_checks.whole_number(micro_batches, "micro_batches")
        self._sums: list[Any] = [0, 0, 0]  # samples, Σx, Σx²: of the micro-batches so far
        self._seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        if not compat.in_backward():  # within one it is a recomputation
            self._note(x.detach())
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    @torch.no_grad()
    def _note(self, x: torch.Tensor) -> None:
        wide = x.double()  # Σx² − (Σx)²/n loses digits
        self._sums = [s + t for s, t in zip(self._sums, (len(x), wide.sum(0), wide.square().sum(0)), strict=True)]
        self._seen += 1
        if self._seen < self.micro_batches:
            return
        n, total, squares = self._sums
        mean, variance = total / n, (squares - total.square() / n) / (n - 1)
        for name, value in (("running_mean", mean), ("running_var", variance)):
            running = self.get_buffer(name)
            running.lerp_(value.to(running.dtype), self.momentum)  # type: ignore[arg-type]
        self.get_buffer("num_batches_tracked").add_(1)
        self._sums, self._seen = [0, 0, 0], 0
