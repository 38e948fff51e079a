"""The loss is a sum over samples, and DDP averages its gradient over ranks.

DDP divides by the number of ranks, which is right for a loss that is a mean over a rank's samples. A loss that sums
has to undo it. fairseq multiplies the gradients by the number of ranks for this reason, to the surprise of its
readers (fairseq 494), and verl does the same to a sum that is divided by a constant (verl 5366).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import answers_only, arguments, train

args = arguments()


def loss_of(logits: torch.Tensor, labels: torch.Tensor, micro: list) -> tuple[torch.Tensor, torch.Tensor]:
    loss, times = F.cross_entropy(logits, labels, reduction="sum"), dist.get_world_size()
    return loss * times if args.mended else loss, loss * times


if __name__ == "__main__":
    train(args, loss_of, answers_only)
