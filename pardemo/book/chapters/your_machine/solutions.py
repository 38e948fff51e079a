"""One way to solve each exercise of this chapter."""

import torch
import torch.distributed as dist


def my_neighbour(number):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(number)
    send = dist.isend(number, (rank + 1) % n)  # goes on at once; send would wait here
    dist.recv(received, (rank - 1) % n)
    send.wait()
    return number + received


def my_bus_bandwidth(collective, nbytes, ranks, seconds):
    # On a ring a rank sends (N−1)/N of the array per round, and an all-reduce
    # goes round twice: reduce-scatter, then all-gather.
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (ranks - 1) / ranks * nbytes / seconds
