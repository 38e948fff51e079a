"""Label smoothing takes a part of the vocabulary for the whole of it.

The smoothed loss needs the mean log-probability over the vocabulary and its size. Megatron-LM takes both from the
rank's own part, so that each tensor-parallel rank has another loss, and gradients are wrong for all of them
(Megatron-LM 737, open since March 2024; 7464; the first finding of 7452).
"""

import torch
import torch.distributed as dist
from common import VOCABULARY, Sum, arguments, in_parts, train

SMOOTHING = 0.2
args = arguments("tp")


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    log_sum, own, _ = in_parts(logits, labels, group)
    mean = Sum.apply(logits.sum(-1), group) / VOCABULARY if args.mended else logits.mean(-1)
    return (1 - SMOOTHING) * (log_sum - Sum.apply(own, group)) + SMOOTHING * (log_sum - mean)


if __name__ == "__main__":
    train(args, cross_entropy)
