"""Which experts each token goes to: a linear layer, its largest k scores, and what keeps the experts' shares even.

A router that is trained for the loss alone sends more and more to the experts that happened to be good first. Three
remedies are in use, and this room has all of them:

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
    """Where T tokens go.

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
        """How many assignments each expert got [E]."""
        return torch.bincount(self.experts.reshape(-1), minlength=self.logits.shape[-1])


class Router(nn.Module):
    """Sends each token to ``chosen`` of ``count`` experts.

    Args:
        hidden: a token's width. scores: ``softmax`` over all experts, or a ``sigmoid`` of each (DeepSeek-V3).
        normalised: the chosen weights sum to 1 (Mixtral, DeepSeek-V3); else they are the scores (Switch).
        hosts, most_hosts: experts lie on so many hosts, the same number on each, and a token goes to at most
            ``most_hosts`` of them: those whose best two experts have the largest scores together (DeepSeek-V3, 2.1.2).

    Raises:
        ValueError: numbers that do not fit each other; names them.
    """

    bias: torch.Tensor

    def __init__(
        self, hidden: int, count: int, chosen: int, *, scores: str = "softmax", normalised: bool = True, hosts: int = 1,
        most_hosts: int = 1,
    ):  # fmt: skip
        super().__init__()
        if not 1 <= chosen <= count:
            raise ValueError(f"a token goes to 1 to {count} of {count} experts, not to {chosen}")
        if scores not in SCORES:
            raise ValueError(f"scores must be one of {', '.join(SCORES)}, not {scores!r}")
        if hosts < 1 or count % hosts:
            raise ValueError(f"{count} experts do not divide over {hosts} hosts")
        if not 1 <= most_hosts <= hosts or most_hosts * (count // hosts) < chosen:
            raise ValueError(
                f"{chosen} experts of a token do not lie on {most_hosts} of {hosts} hosts with {count // hosts} each"
            )
        self.count, self.chosen, self.kind, self.normalised = count, chosen, scores, normalised
        self.hosts, self.most_hosts = hosts, most_hosts
        self.gate = nn.Linear(hidden, count, bias=False)
        self.register_buffer("bias", torch.zeros(count))

    def forward(self, tokens: torch.Tensor) -> Routing:
        """[T, hidden] to where they go. Logits and scores are in fp32 at least.

        Raises:
            ValueError: a logit is no finite number; says how many tokens have one.
        """
        kind = torch.promote_types(tokens.dtype, torch.float32)
        logits = nn.functional.linear(tokens.to(kind), self.gate.weight.to(kind))  # [T, E]
        if not logits.isfinite().all():
            wrong = int((~logits.isfinite().all(-1)).sum())
            raise ValueError(f"the router has no finite logits for {wrong} of {len(logits)} tokens: its input or its "
                             "weights are NaN or infinite")  # fmt: skip
        scores = logits.softmax(-1) if self.kind == "softmax" else logits.sigmoid()
        experts = self._choose((scores + self.bias).detach())
        weights = scores.gather(-1, experts)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(kind).tiny)
        return Routing(experts, weights, logits, scores)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The experts with the largest scores [T, k], on the best hosts alone."""
        if self.most_hosts < self.hosts:
            by_host = scores.unflatten(-1, (self.hosts, -1))  # [T, hosts, E/hosts]
            best = by_host.topk(min(2, by_host.shape[-1]), -1).values.sum(-1).topk(self.most_hosts, -1).indices
            allowed = torch.zeros_like(by_host[..., 0], dtype=torch.bool).scatter(-1, best, True)
            scores = by_host.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.chosen, -1).indices

    @torch.no_grad()
    def even_out(self, load: torch.Tensor, step: float = 1e-3) -> None:
        """Moves each expert's bias by ``step``: up where it got less than the mean of ``load`` [E], down where more.

        ``load`` is what all ranks together sent: see :func:`load_of_all`. From then on biases are in fp32, whatever the
        layer is in: in bf16 a step of 0.001 is nothing to a bias of 0.5.
        """
        self.bias = self.bias.float() + step * (load.float().mean() - load.float()).sign()


def load_of_all(load: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of the ranks' loads [E]: one small all-reduce."""
    return ring_all_reduce(load.clone(), group_of(group), what="the experts' loads")


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
