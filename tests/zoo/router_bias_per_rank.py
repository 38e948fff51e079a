"""A router's bias is updated from the tokens of its own rank: from the second step on the replicas route differently.

Balancing without an auxiliary loss (arXiv 2408.15664) moves a buffer, not a parameter, towards the experts that got
too few tokens in the batch. The batch is that of all ranks: torchtitan 1114 and Megatron-LM sum the counts over them
first. A buffer is in no gradient all-reduce and no clipping norm, so nobody sees it drift; running statistics of
batch norm that differ between ranks are the same trap (pytorch 13711).
"""

import torch
import torch.distributed as dist
from common import STEPS, WIDTH, LanguageModel, arguments, average_gradients, backward, micro_batches, show
from cut_layers import Experts
from torch import nn

EXPERTS = 4


class Router(nn.Module):
    """Gives each token the two experts of the highest score + bias, weighted by their scores alone."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, EXPERTS)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens", torch.zeros(EXPERTS), persistent=False)  # of this rank in this step

    def forward(self, x):
        scores = self.score(x).sigmoid()
        chosen = torch.zeros_like(scores).scatter(-1, (scores.detach() + self.bias).topk(2).indices, 1.0)
        self.tokens += chosen.sum((0, 1))
        return scores * chosen  # [b, s, e]

    @torch.no_grad()
    def balance(self):
        """Moves the bias of each expert after an optimizer step, by how far its tokens are from the mean."""
        if args.mended:
            dist.all_reduce(self.tokens)
        self.bias += 0.1 * (1 - self.tokens / self.tokens.mean())
        self.tokens.zero_()


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = Router(), Experts(EXPERTS)

    def forward(self, x):
        return x + self.experts(x, self.router(x))


args = arguments()
torch.manual_seed(0)
model = LanguageModel(Mixture())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(STEPS):
    optimizer.zero_grad()
    total = backward(model, micro_batches(args, step))
    average_gradients(model.parameters())
    optimizer.step()
    model.blocks[0].router.balance()
    show(step, total)
