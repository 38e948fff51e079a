"""One way to solve each exercise of this chapter."""

import torch
import torch.distributed as dist


def my_splits(chosen, experts):
    ranks = dist.get_world_size()
    counts = chosen.flatten().bincount(minlength=experts)  # also of experts that nobody chose
    sends = counts.view(ranks, -1).sum(1)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends)
    return sends.tolist(), receives.tolist()


def my_bias(bias, load):
    below = load.float().mean() - load.float()  # who got less than the mean is to get more
    return bias + 0.001 * below.sign()


def my_bytes(tokens, hidden, chosen, ranks, layers):
    one_way = (ranks - 1) / ranks * tokens * chosen * hidden * 2
    return layers * 4 * one_way  # there and back, forward and backward
