"""The label's log-probability is summed over the ranks by an all-reduce that autograd does not see.

Only the rank whose part of the vocabulary has the label computes something; the others put a zero in and get the
right value back, but no graph behind it: their logits, which are to become smaller, have no gradient for this label.
The loss is right on every rank. The policy loss of ms-swift's Megatron trainer had it under tensor parallelism until
August 2026 (ms-swift 9947). PyTorch 2.13 warns of it at the first backward pass, and goes on.
"""

import torch.distributed as dist
from cut_layers import in_parts, sum_of_cut, train_vocabulary


def cross_entropy(logits, labels, group, mended):
    log_sum, own, here = in_parts(logits, labels, group)
    if mended:
        return log_sum - sum_of_cut(own, group)
    log_probability = (own - log_sum).where(here, 0)
    dist.all_reduce(log_probability, group=group)
    return -log_probability


train_vocabulary(cross_entropy)
