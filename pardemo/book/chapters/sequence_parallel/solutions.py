"""One way to solve each exercise of this chapter."""

import torch
import torch.distributed as dist


def my_sum(gradients):
    packed = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(packed)  # one message; several small ones would each cost a latency
    parts = packed.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


def my_kept(batch, sequence, hidden, heads, ranks, in_sequence, flash):
    unit = batch * sequence * hidden
    core = 0 if flash else 5 * heads * sequence / hidden
    # Norms 4, masks 2, inputs of two layers cut by columns 4: whole, unless tokens are cut.
    outside = 10 / ranks if in_sequence else 10
    return unit * (outside + (24 + core) / ranks)
