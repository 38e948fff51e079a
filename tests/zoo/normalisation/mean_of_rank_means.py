"""Ranks weigh alike, however many labels each of them has: right under accumulation, wrong under data parallelism.

Each rank divides by the labels of all its own micro-batches, and DDP averages over the ranks. torchtune 1917 derives
why data parallelism needs the same care as accumulation; transformers 34242 asked for it after accumulation was
mended, and torchtitan 2206 mended it in January 2026.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import answers_only, arguments, labelled, over_ranks, train

args = arguments()


def loss_of(logits: torch.Tensor, labels: torch.Tensor, micro: list) -> tuple[torch.Tensor, torch.Tensor]:
    divisor = labelled(micro)
    if args.mended:  # DDP divides by the ranks once more
        divisor = over_ranks(divisor) / dist.get_world_size()
    loss = F.cross_entropy(logits, labels, reduction="sum") / divisor
    return loss, loss


if __name__ == "__main__":
    train(args, loss_of, answers_only)
