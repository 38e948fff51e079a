"""A mixture of experts whose experts lie on several ranks, each of which has tokens of its own."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives import ring_all_reduce
from pardemo.expert_parallel.dispatch import RoutingPlan, combine, dispatch, plan
from pardemo.expert_parallel.router import Router, Routing
from pardemo.groups import divide
from pardemo.tensor_parallel.full_layers import compare_layers, values_of
from pardemo.tensor_parallel.gradients import mark_part
from pardemo.tensor_parallel.module import GroupModule


class ExpertParallel(GroupModule):
    """A router and E experts, of which each of the N ranks of ``group`` keeps E/N; experts r·E/N and those behind it.

    Tokens of all ranks go to where their experts are, and come back as the weighted sums of what these make of them:
    what the full layer would give each rank's tokens. Input and output [.., hidden].

    Args:
        router: the full one, the same on every rank; it is copied, as the experts are.
        experts: all of them, modules from [rows, hidden] to [rows, hidden]; each rank keeps its own.
        shared: an expert that every token goes to, on its own rank (DeepSeekMoE, arXiv 2401.06066, 3.2).
        capacity: rows that an expert takes from a rank, as a multiple of the even share T·k/E; those with the smallest
            weights find no room, and lack that expert's part. None: all find room.

    Attributes:
        routing, plan: of the last forward pass: for losses on the router, loads, and what was dropped.

    Raises:
        ValueError: experts do not divide by the ranks, or are not as many as the router has; the ranks' layers differ.
    """

    def __init__(
        self,
        router: Router,
        experts: Sequence[nn.Module],
        group: dist.ProcessGroup | None = None,
        *,
        shared: nn.Module | None = None,
        capacity: float | None = None,
    ):
        super().__init__(group)
        if len(experts) != router.num_experts:
            raise ValueError(f"the router has {router.num_experts} experts, and there are {len(experts)}")
        rank, local = dist.get_rank(self.group), divide(len(experts), self.group, "a number of experts")
        if capacity is not None and not capacity > 0:
            raise ValueError(f"capacity is a multiple of the even share, above 0, not {capacity!r}")
        values = [values_of(expert, f"expert {index}") for index, expert in enumerate(experts)]
        values += [values_of(router, "router"), {} if shared is None else values_of(shared, "shared")]
        compare_layers("ExpertParallel", {name: t for tensors in values for name, t in tensors.items()}, self.group)
        self.router, self.shared = copy.deepcopy(router), copy.deepcopy(shared)
        self.experts = nn.ModuleList(copy.deepcopy(expert) for expert in experts[rank * local : (rank + 1) * local])
        self.capacity = capacity
        self.routing: Routing | None = None
        self.plan: RoutingPlan | None = None
        self.mark_parts()

    def mark_parts(self) -> None:
        for parameter in self.experts.parameters():
            mark_part(parameter, self.group, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Collective: all ranks call it, also those that have no token."""
        tokens, k, count = x.reshape(-1, x.shape[-1]), self.router.top_k, self.router.num_experts  # [T, h]
        routing = self.router(tokens)
        most_rows = None if self.capacity is None else math.ceil(self.capacity * len(tokens) * k / count)
        way = plan(routing.experts, routing.weights, count, self.group, most_rows)
        parts = dispatch(tokens, k, way, self.group)
        # also experts that got nothing: their ranks answer in the backward pass
        made = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        out = combine(made, routing.weights, way, self.group)
        if self.shared is not None:
            out = out + self.shared(tokens)
        self.routing, self.plan = routing, way
        return out.view_as(x)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no routing: it belongs to a graph, which cannot be copied."""
        return self.__dict__ | {"routing": None, "plan": None}

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Averages ``.grad`` over the ranks, each of whose losses is a mean over its own tokens; once in a step.

        Call it behind the step's last backward: an expert has the sum over all ranks' tokens already, which is divided
        by the ranks, every time. The router's and the shared expert's gradients are averaged.
        """
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                if not name.startswith("experts."):
                    ring_all_reduce(parameter.grad, self.group, label=name)
                parameter.grad /= self.group.size()
