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


def my_mlp(x, w_1, w_2):
    rank, t = dist.get_rank(), dist.get_world_size()
    w_1 = w_1.chunk(t, dim=1)[rank]  # columns: each inner feature is complete, and GeLU can follow
    w_2 = w_2.chunk(t, dim=0)[rank]  # the rows that meet these features
    return ring_all_reduce(F.gelu(x @ w_1) @ w_2)
