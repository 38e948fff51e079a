"""What is whole on each tensor-parallel rank is counted once for each rank in the norm, which is too large.

The squares of all gradients are summed over the tensor-parallel group, which is right for what is cut. Norms,
biases and the head are whole on each rank, and their squares are summed as often as there are ranks: clipping sets
in earlier than it should, more so the more ranks there are (NVIDIA-NeMo RL 3788).
"""

import torch
import torch.distributed as dist
from common import train_cut
from torch import nn


def clip(model: nn.Module, max_norm: float, group: dist.ProcessGroup, mended: bool) -> None:
    square = torch.zeros(())
    for p in model.parameters():
        once = hasattr(p, "is_cut") or not mended or dist.get_rank(group) == 0
        square += p.grad.square().sum() * once
    dist.all_reduce(square, group=group)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())


if __name__ == "__main__":
    train_cut(clip)
