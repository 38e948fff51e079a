"""A router's bias is updated from the tokens of its own rank: from the second step on the replicas route differently.

Balancing without an auxiliary loss (arXiv 2408.15664) moves a buffer, not a parameter, towards the experts that got
too few tokens in the batch. The batch is that of all ranks: torchtitan 1114 and Megatron-LM sum the counts over them
first. A buffer is in no gradient all-reduce and no clipping norm, so nobody sees it drift; running statistics of
batch norm that differ between ranks are the same trap (pytorch 13711).
"""

import common
import torch
import torch.distributed as dist
from torch import nn

EXPERTS = 4


class Router(nn.Module):
    """Gives each token the two experts of the highest score + bias, weighted by their scores alone."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(16, EXPERTS)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens", torch.zeros(EXPERTS), persistent=False)  # of this rank in this step

    def forward(self, x):
        scores = self.score(x).sigmoid()
        chosen = torch.zeros_like(scores).scatter(1, (scores.detach() + self.bias).topk(2).indices, 1.0)
        self.tokens += chosen.sum(0)
        return scores * chosen  # [tokens, experts]

    @torch.no_grad()
    def balance(self, mended):
        """Moves the bias of each expert by a fixed amount after an optimizer step."""
        if mended:
            dist.all_reduce(self.tokens)
        self.bias += 0.1 * (self.tokens.mean() - self.tokens).sign()
        self.tokens.zero_()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.router = nn.Linear(16, 16), Router()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(EXPERTS))
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        x = self.embed(x)
        weights = self.router(x)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)  # [tokens, experts, 16]
        return self.head(x + (weights.unsqueeze(-1) * outputs).sum(1))


if __name__ == "__main__":
    args = common.arguments(32)
    torch.manual_seed(0)
    teacher, model = torch.randn(16, 8), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        total = common.backward(args, model, teacher, step)
        common.sum_gradients(model.parameters())
        optimizer.step()
        model.router.balance(args.mended)
        common.show(step, total)
