"""The loss of each micro-batch is a mean of its own, and nobody divides by their number.

transformers 4.47.0 counted the labels of one micro-batch where it meant those of the step, so that with two
micro-batches loss and gradient were twice what they should be (transformers 35438). LlamaFactory 7443 has a table of
first losses of one training, from 6.4 to 138, that grow with the number of micro-batches; verl 3332 mended the same
in a trainer of its own.
"""

import torch
from common import Block, LanguageModel, arguments, cross_entropy, train
from torch.nn.parallel import DistributedDataParallel


def loss_of(logits, labels, micro):
    loss = cross_entropy(logits, labels)
    if args.mended:
        loss = loss / args.accumulate
    return loss, loss


args = arguments()
torch.manual_seed(0)
train(args, DistributedDataParallel(LanguageModel(Block())), loss_of)
