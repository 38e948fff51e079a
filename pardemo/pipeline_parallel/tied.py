"""Weights that several stages share: every rank that has such a stage holds a copy, and the copies stay alike.

An embedding [V, h] whose transpose is the output layer, of a pipeline of four stages::

    stage 0              stage 3
    embedding [V, h]     head [V, h]       the same values at the start: stage 0's are broadcast
      .grad  --------+------- .grad        after the last micro-batch: all-reduced among the holders
                     |
           the same sum on both            so that both take the same step
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives import ring_all_reduce, ring_broadcast
from pardemo.meters.timeline import Timeline

Tied = tuple[nn.Parameter, dist.ProcessGroup]


class TiedWeights:
    """This rank's copies, each with the group of all that hold one; they start from that group's first rank's.

    Raises:
        ValueError: the copies differ in shape or dtype, or only some of them are trained.
    """

    def __init__(self, pairs: Sequence[Tied], timeline: Timeline | None):
        self._pairs, self._timeline = tuple(pairs), timeline
        self._earlier: list[torch.Tensor | None] = []
        for parameter, holders in self._pairs:
            mine = f"{parameter.dtype} {tuple(parameter.shape)}, {'trained' if parameter.requires_grad else 'frozen'}"
            copies: list = [None] * holders.size()
            dist.all_gather_object(copies, mine, group=holders)
            if len(set(copies)) > 1:
                by_rank = "; ".join(f"rank {rank} of its group: {copy}" for rank, copy in enumerate(copies))
                raise ValueError(f"the copies of a tied weight differ ({by_rank})")
            ring_broadcast(parameter, holders)

    def begin_step(self) -> None:
        """Puts earlier steps' gradients aside: they are sums over the copies already."""
        self._earlier = [None if p.grad is None else p.grad.clone() for p, _ in self._pairs]
        for parameter, _ in self._pairs:
            parameter.grad = None

    def end_step(self) -> None:
        """Sums this step's gradients over the copies, and adds what was put aside."""
        for number, ((parameter, holders), earlier) in enumerate(zip(self._pairs, self._earlier, strict=True)):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with self._timeline.span("communication", f"tied {number}") if self._timeline else nullcontext():
                ring_all_reduce(parameter.grad, holders)
            if earlier is not None:
                parameter.grad += earlier
        self._earlier = []
