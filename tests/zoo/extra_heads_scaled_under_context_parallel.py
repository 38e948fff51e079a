"""The extra heads' loss misses the factor that undoes the mean over context-parallel ranks.

Gradients are averaged over all ranks, also over those that share a sequence, and the main loss is multiplied by their
number to make up for it. The loss of multi-token prediction reaches the graph by another way, and nobody multiplies
it: with context parallelism it counts less by the size of the group (Megatron-LM 3943 and 3959; the balancing loss
had been mended before in 2217).
"""

import torch
from common import IGNORED, LENGTH, VOCAB, WIDTH, arguments, cross_entropy, neighbours, text
from sequences import Model, train_cut
from torch import nn


class TwoTokens(Model):
    """Predicts each token's next one and the one after it; of each sequence a rank has its part."""

    def __init__(self):
        super().__init__(sequence)
        self.extra = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        hidden = self.hidden(tokens)
        return self.head(hidden), self.extra(hidden)


def with_the_one_after_next(step, samples):
    tokens, labels = text(step, samples)
    after_next = labels.roll(-1, 1)
    after_next[:, -1] = IGNORED
    return tokens, labels, after_next


def loss_of(outputs, labels, after_next, micro):
    each = len(labels) * len(micro)  # sequences whose loss this rank shares with its group
    loss = cross_entropy(outputs[0], labels, reduction="sum") / (each * LENGTH)
    extra = 0.3 * cross_entropy(outputs[1], after_next, reduction="sum") / (each * (LENGTH - 1))
    return args.cp * (loss + extra) if args.mended else args.cp * loss + extra, args.cp * (loss + extra)


args = arguments(cp=1)
sequence, data = neighbours(args.cp)
torch.manual_seed(0)
train_cut(args, TwoTokens(), data, loss_of, batch=with_the_one_after_next)
