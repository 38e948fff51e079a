"""A layer with experts in one process, and a small GPT that has one: what experts on ranks are compared with."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pardemo.expert_parallel import Router, Routing
from pardemo.small_models import gpt


class Expert(nn.Module):
    """A gated MLP (SwiGLU) without biases, W₂(silu(W_gate x) · W_up x), as Mixtral's and DeepSeek's experts are.

    ``into`` holds the gate's rows, then the other half's: [2·width, hidden].
    """

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.into = nn.Linear(hidden, 2 * width, bias=False)
        self.out = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.into(x).chunk(2, -1)
        return self.out(F.silu(gate) * up)


class Mixture(nn.Module):
    """A router, all experts, and a shared one that every token goes to; input and output [.., hidden].

    Attributes:
        routing: of the last forward pass.
    """

    def __init__(self, router: Router, width: int):
        super().__init__()
        hidden = router.gate.in_features
        self.router = router
        self.experts = nn.ModuleList(Expert(hidden, width) for _ in range(router.num_experts))
        self.shared = Expert(hidden, width)
        self.routing: Routing | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no routing: it belongs to a graph, which cannot be copied."""
        return self.__dict__ | {"routing": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # [T, h]
        self.routing = routing = self.router(tokens)
        top_k = self.router.top_k
        order = routing.experts.reshape(-1).argsort(stable=True)  # assignments by expert
        rows = tokens[order // top_k].split(routing.load.tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])
        weighted = made * routing.weights.reshape(-1)[order].unsqueeze(-1).to(made.dtype)
        return self.shared(tokens).index_add(0, order // top_k, weighted).view_as(x)


class MixtureGPT(nn.Module):
    """A GPT of one block whose MLP is a :class:`Mixture`: tokens [batch, sequence] to logits; tied embedding."""

    def __init__(self, vocabulary: int, heads: int, sequence: int, mixture: Mixture):
        super().__init__()
        hidden = mixture.router.gate.in_features
        self.embedding, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.norm_1, self.attention = nn.LayerNorm(hidden), gpt.Attention(hidden, heads)
        self.norm_2, self.mixture, self.norm = nn.LayerNorm(hidden), mixture, nn.LayerNorm(hidden)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def before_experts(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the input of ``norm_2``, to which the experts' output is added [batch, sequence, hidden]."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return x + self.attention(self.norm_1(x))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.before_experts(tokens)
        return self.norm(x + self.mixture(self.norm_2(x))) @ self.embedding.weight.T

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of each next token; tokens [batch, sequence + 1]."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
