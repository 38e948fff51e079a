"""One way to solve each exercise of this chapter."""

import torch
import torch.distributed as dist


def my_rows(weight, heads, rank, ranks):
    query, key, value = weight.chunk(3)
    # Heads lie one after the other in each, so an equal piece of each is whole heads.
    return torch.cat([part.chunk(ranks)[rank] for part in (query, key, value)])


def my_shared_sum(gradient, kv_heads):
    ranks = dist.get_world_size()
    replicas = ranks // kv_heads
    # Neighbours hold the same head; every rank makes every group, or the others wait.
    groups = [dist.new_group(list(range(at, at + replicas))) for at in range(0, ranks, replicas)]
    dist.all_reduce(gradient, group=groups[dist.get_rank() // replicas])
    return gradient
