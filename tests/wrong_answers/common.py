"""What answers to several exercises do."""

import torch
import torch.distributed as dist


def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def everything_to_everyone(tensor):
    return sum(gathered(tensor))


def raises_at_length(*arguments):
    raise ValueError("what is wrong\nException raised from somewhere at somewhere.cpp:1\nframe #0")


def divides_by_zero(*arguments):
    return 1 / 0
