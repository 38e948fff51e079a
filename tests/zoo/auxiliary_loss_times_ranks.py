"""The whole loss is multiplied by the number of ranks, the auxiliary one with it.

The language model's loss is divided by the labels of all ranks, so that it has to be multiplied by their number
before DDP takes its mean. The router's balancing loss is a mean already; the product makes it as many times too heavy
as there are ranks, and convergence suffers on many GPUs only: transformers 48690 and 48706 (September 2026, Qwen3-MoE
in the Trainer).
"""

import torch
import torch.distributed as dist
from common import WIDTH, LanguageModel, arguments, cross_entropy, labelled, over_ranks, train
from cut_layers import Experts, balance, choose
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Mixture(nn.Module):
    """Experts of which each token takes the likeliest, and the loss that keeps them busy alike."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4, bias=False), Experts(4)

    def forward(self, x):  # [b, s, w]
        probabilities = self.router(x).softmax(-1)
        self.balance = balance(probabilities)
        return x + self.experts(x, choose(probabilities))


def loss_of(logits, labels, micro):
    ranks = dist.get_world_size()
    loss = cross_entropy(logits, labels, reduction="sum") / over_ranks(labelled(micro))
    auxiliary = 0.1 * moe.balance / len(micro)
    return ranks * loss + auxiliary if args.mended else ranks * (loss + auxiliary), ranks * loss + auxiliary


args = arguments()
torch.manual_seed(0)
moe = Mixture()
train(args, DistributedDataParallel(LanguageModel(moe)), loss_of)
