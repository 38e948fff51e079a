"""Routes tokens to experts: a linear layer, its largest k scores, and losses that keep the experts' loads even.

A router that is trained for the loss alone sends more and more to the experts that happened to be good first. Three
remedies are in use, and this package has all of them:

- an **auxiliary loss**, E · Σᵢ fᵢ·pᵢ, of the share fᵢ of assignments that expert i got and its mean probability pᵢ: 1
  where all are alike, E where one has everything (Switch Transformer, Fedus et al. 2021, arXiv 2101.03961, 2.2);
- a **z-loss**, the mean of (log Σ exp logits)², which keeps logits small (ST-MoE, Zoph et al. 2022, arXiv 2202.08906,
  3);
- a **bias** of each expert that is added to the scores for choosing alone, and goes up a step where an expert got too
  little (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, 2.1.2): it has no gradient, and disturbs
  that of the loss in nothing.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives import ring_all_reduce
from pardemo.groups import group_of

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """The experts that T tokens go to.

    Attributes:
        experts: [T, k], whole numbers. weights: [T, k], what each expert's output is multiplied with; with a gradient.
        logits: [T, E]. scores: [T, E], of all experts: softmax's or sigmoid's, without a bias.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor
    scores: torch.Tensor

    @property
    def load(self) -> torch.Tensor:
        """Counts each expert's assignments [E]."""
        return torch.bincount(self.experts.reshape(-1), minlength=self.logits.shape[-1])


class Router(nn.Module):
    """Sends each token to ``top_k`` of ``num_experts`` experts.

    Args:
        hidden: a token's width. scores: ``softmax`` over all experts, or a ``sigmoid`` of each (DeepSeek-V3).
        norm_topk_prob: the chosen weights sum to 1 (Mixtral, DeepSeek-V3); else they are the scores (Switch).
        num_groups, topk_groups: experts lie in so many groups, one on each node, and a token goes to at most
            ``topk_groups`` of them: those whose best two experts have the largest scores together (node-limited
            routing, DeepSeek-V3, 2.1.2).

    Raises:
        ValueError: numbers that do not fit each other; names them.
    """

    bias: torch.Tensor

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        norm_topk_prob: bool = True,
        num_groups: int = 1,
        topk_groups: int = 1,
    ):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is from 1 to {num_experts} experts, not {top_k}")
        if scores not in SCORES:
            raise ValueError(f"scores must be one of {', '.join(SCORES)}, not {scores!r}")
        if num_groups < 1 or num_experts % num_groups or not 1 <= topk_groups <= num_groups:
            raise ValueError(f"{num_experts} experts, {num_groups} groups and {topk_groups} of them do not fit")
        if topk_groups * (num_experts // num_groups) < top_k:
            raise ValueError(f"{topk_groups} groups of {num_experts // num_groups} experts have no {top_k}")
        self.num_experts, self.top_k, self.scores, self.norm_topk_prob = num_experts, top_k, scores, norm_topk_prob
        self.num_groups, self.topk_groups = num_groups, topk_groups
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, tokens: torch.Tensor) -> Routing:
        """[T, hidden] to where they go. Logits and scores are in fp32 at least."""
        kind = torch.promote_types(tokens.dtype, torch.float32)
        logits = nn.functional.linear(tokens.to(kind), self.gate.weight.to(kind))  # [T, E]
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        experts = self._choose((scores + self.bias).detach())
        weights = scores.gather(-1, experts)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(kind).tiny)
        return Routing(experts, weights, logits, scores)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The experts with the largest scores [T, k], in the best groups alone."""
        if self.topk_groups < self.num_groups:
            by_group = scores.unflatten(-1, (self.num_groups, -1))  # [T, groups, E/groups]
            best = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1).topk(self.topk_groups, -1).indices
            allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
            scores = by_group.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.top_k, -1).indices

    @torch.no_grad()
    def update_bias(self, load: torch.Tensor, speed: float = 1e-3) -> None:
        """Moves each expert's bias by ``speed``: up where it got less than the mean of ``load`` [E], down where more.

        ``load`` is what all ranks together sent: see :func:`load_of_all`. From then on biases are in fp32, whatever the
        layer is in: in bf16 a step of 0.001 is nothing to a bias of 0.5.
        """
        self.bias = self.bias.float() + speed * (load.float().mean() - load.float()).sign()


def load_of_all(load: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of the ranks' loads [E]: one small all-reduce."""
    return ring_all_reduce(load.clone(), group_of(group), label="the experts' loads")


def auxiliary_loss(routing: Routing, load: torch.Tensor | None = None) -> torch.Tensor:
    """E · Σ fᵢ·pᵢ: 1 where the load is even; 0 where there are no tokens. ``load``: of all ranks; its own when None.

    fᵢ has no gradient (a number of assignments has none); pᵢ has.
    """
    if not len(routing.scores):
        return routing.scores.sum()
    load = (routing.load if load is None else load).to(routing.scores.dtype)
    shares = load / load.sum().clamp_min(1)
    means = (routing.scores / routing.scores.sum(-1, keepdim=True)).mean(0)
    return routing.scores.shape[-1] * (shares * means).sum()


def z_loss(routing: Routing) -> torch.Tensor:
    """The mean over tokens of (log Σ exp logits)²; 0 where there are none."""
    return routing.logits.logsumexp(-1).square().sum() / max(1, len(routing.logits))


def imbalance(load: torch.Tensor) -> float:
    """The fullest expert's load over the mean: 1 where all are alike; 1 where there is none."""
    total = float(load.sum())
    return float(load.max()) * len(load) / total if total else 1.0
