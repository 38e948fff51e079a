"""One way to solve each exercise of this chapter."""

import torch.distributed as dist

from pardemo.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def my_step(parameters, gradient, lr, max_norm):
    rank, n = dist.get_rank(), dist.get_world_size()
    mean = ring_reduce_scatter(gradient) / n  # of this rank's chunk, and of no other
    squares = mean.square().sum()
    ring_all_reduce(squares)  # one number: the squares of all chunks
    factor = min(1.0, max_norm / squares.sqrt().item())
    chunk = parameters.chunk(n)[rank] - lr * factor * mean
    return ring_all_gather(chunk)  # new parameters travel in the place of gradients


def my_psi(stage, micro_batches):
    if stage in (0, 1):
        return 2  # whole gradients wait for the end of the step: one all-reduce, or its two halves
    if stage == 2:
        return micro_batches + 1  # each micro-batch is reduced; parameters are gathered once
    return 3 * micro_batches  # each gathers for its forward, for its backward, and is reduced
