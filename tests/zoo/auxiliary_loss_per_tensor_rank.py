"""The router's gradient is summed over tensor-parallel ranks, and the auxiliary loss is in it once for each of them.

Experts are cut over the ranks, so that what comes back to the router through them is a part on each rank and has to
be summed. The balancing loss is computed by every rank as a whole from the same probabilities, and the sum counts it
as often as there are ranks. Megatron-LM 1406 (gradients scaled by the number of parts under tensor parallelism), 5047
(other scales of the same loss for other sizes), lm-engine 118.
"""

import torch
from common import WIDTH, LanguageModel, arguments, average_gradients, mean_loss, neighbours, sum_gradients, train
from cut_layers import Experts, balance, choose, copy_to_cut, cut, sum_of_cut
from torch import nn


class Mixture(nn.Module):
    """Experts of which each token takes the likeliest; a rank has a part of each expert's hidden features."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4, bias=False), Experts(4)
        self.experts.up, self.experts.down = cut(self.experts.up, 2, tensor), cut(self.experts.down, 1, tensor)

    def forward(self, x):  # [b, s, w]
        hidden = copy_to_cut(x, tensor)
        probabilities = self.router(hidden).softmax(-1)
        self.balance = balance(probabilities)
        if args.mended:
            self.balance = sum_of_cut(self.balance / args.tp, tensor)
        return x + sum_of_cut(self.experts(hidden, choose(probabilities)), tensor)


def loss_of(logits, labels, micro):
    loss = mean_loss(logits, labels, micro)[0] + 0.1 * moe.balance / len(micro)
    return loss, loss


def reduce():
    sum_gradients(moe.router.parameters(), tensor)  # each rank's experts gave it a part
    average_gradients(model.parameters(), data)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(0)
moe = Mixture()
model = LanguageModel(moe)
train(args, model, loss_of, group=data, reduce=reduce)
