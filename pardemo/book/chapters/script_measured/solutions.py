"""One way to solve each exercise of this chapter."""

import torch
import torch.distributed as dist


def my_sent(calls, ranks):
    rings = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # laps round the ring
    return sum(rings[kind] * nbytes * (ranks - 1) / ranks for kind, nbytes in calls)


def my_accuracy(logits, targets):
    right = (logits.argmax(-1) == targets).sum()
    counts = torch.stack([right, torch.tensor(targets.numel(), device=right.device)])
    dist.all_reduce(counts)  # two numbers, however many logits there are
    return (counts[0] / counts[1]).item()
