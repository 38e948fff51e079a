"""A rank whose labels are all ignored adds nothing, and yet the mean over ranks counts it.

With prompts longer than the sequence some ranks have no label left in a step. The mean over no labels is NaN, so the
divisor is kept at 1 or more, as OLMo-core 657 does: NaN is gone, and every other rank's gradient is too small.
transformers 39392 has the like: one label on one rank, a full row on the other, and both weigh one half.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import IGNORED, arguments, labelled, over_ranks, train

args = arguments()


def with_a_prompt(labels: torch.Tensor, step: int) -> torch.Tensor:
    labels.chunk(4)[step % 4].fill_(IGNORED)  # a quarter of the samples is all prompt
    return labels


def loss_of(logits: torch.Tensor, labels: torch.Tensor, micro: list) -> tuple[torch.Tensor, torch.Tensor]:
    divisor = labelled(micro).clamp(min=1)
    if args.mended:  # DDP divides by the ranks once more
        divisor = over_ranks(labelled(micro)) / dist.get_world_size()
    loss = F.cross_entropy(logits, labels, reduction="sum") / divisor
    return loss, loss


if __name__ == "__main__":
    train(args, loss_of, with_a_prompt)
