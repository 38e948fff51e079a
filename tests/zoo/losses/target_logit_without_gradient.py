"""The label's log-probability is summed over the ranks by an all-reduce that autograd does not see.

Only the rank whose part of the vocabulary has the label computes something; the others put a zero in and get the
right value back, but no graph behind it: their logits, which are to become smaller, have no gradient for this label.
The loss is right on every rank. The policy loss of ms-swift's Megatron trainer had it under tensor parallelism until
August 2026 (ms-swift 9947). PyTorch 2.13 warns of it at the first backward pass, and goes on.
"""

import torch
import torch.distributed as dist
from common import Sum, arguments, in_parts, train

args = arguments("tp")


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    log_sum, own, here = in_parts(logits, labels, group)
    if args.mended:
        return log_sum - Sum.apply(own, group)
    log_probability = (own - log_sum).where(here, 0)
    dist.all_reduce(log_probability, group=group)
    return -log_probability


if __name__ == "__main__":
    train(args, cross_entropy)
