"""The loss of each micro-batch is a mean of its own, and nobody divides by their number.

transformers 4.47.0 counted the labels of one micro-batch where it meant those of the step, so that with two
micro-batches loss and gradient were twice what they should be (transformers 35438). LlamaFactory 7443 has a table of
first losses of one training, from 6.4 to 138, that grow with the number of micro-batches; verl 3332 mended the same
in a trainer of its own.
"""

import torch
import torch.nn.functional as F
from common import arguments, train

args = arguments()


def loss_of(logits: torch.Tensor, labels: torch.Tensor, micro: list) -> tuple[torch.Tensor, torch.Tensor]:
    loss = F.cross_entropy(logits, labels)
    if args.mended:
        loss = loss / args.accumulate
    return loss, loss


if __name__ == "__main__":
    train(args, loss_of)
