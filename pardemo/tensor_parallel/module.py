"""What all parallel modules share: a process group that survives copying."""

import copy

import torch.distributed as dist
from torch import nn

from pardemo.groups import group_of


class GroupModule(nn.Module):
    """A module that talks to ``group``. A deep copy (an average of weights, say) talks to the same one."""

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self.group = group_of(group)

    def __deepcopy__(self, memo: dict) -> "GroupModule":
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied
