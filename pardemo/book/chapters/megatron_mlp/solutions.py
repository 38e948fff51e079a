"""One way to solve each exercise of this chapter."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.collectives import ring_all_reduce


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)  # a view: the same numbers, and a tensor that autograd can follow

    @staticmethod
    def backward(ctx, gradient):
        return ring_all_reduce(gradient.clone())  # the gradient itself belongs to autograd


def my_f(x):
    return SumBackward.apply(x)


def my_mlp(x, a, b):
    rank, n = dist.get_rank(), dist.get_world_size()
    a = a.chunk(n, dim=1)[rank]  # columns: each inner number is finished, and GeLU can follow
    b = b.chunk(n, dim=0)[rank]  # the rows of b that meet these columns
    return ring_all_reduce(F.gelu(x @ a) @ b)
