"""What all parallel modules share: a process group that survives copying, and parameters that all ranks hold whole."""

import copy
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from pardemo.groups import group_of
from pardemo.tensor_parallel.gradients import show_parts
from pardemo.tensor_parallel.operators import copy_to
from pardemo.tensor_parallel.replicas import refuse_mixed_tokens

#: elements of a parameter in their order in memory: the first, and the one behind the last
Span = tuple[int, int]


class GroupModule(nn.Module):
    """A module that talks to ``group``. A deep copy (an average of weights, say) talks to the same one."""

    #: names of its own parameters that are cut over the group; of all others every rank has a replica
    cut: tuple[str, ...] = ()

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self.group = group_of(group)

    def held_in_part(self) -> Iterator[tuple[str, nn.Parameter, dist.ProcessGroup]]:
        """Its own parameters that are cut, each with the group: see :func:`pardemo.groups.held_in_part`."""
        if self.group.size() > 1:
            for name in self.cut:
                if (parameter := getattr(self, name)) is not None:
                    yield name, parameter, self.group

    def counted_here(self, parameter: nn.Parameter) -> list[Span]:
        """Of a parameter that is cut, the elements that no earlier rank of the group has: a norm counts each once."""
        return [(0, parameter.numel())]

    def trained(self) -> str:
        """Which of its own parameters are trained: ranks that disagree would train replicas apart."""
        return ", ".join(
            f"{n} {'trained' if p.requires_grad else 'frozen'}" for n, p in self.named_parameters(recurse=False)
        )

    def __deepcopy__(self, memo: dict) -> "GroupModule":
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        show_parts(copied)  # a parameter's copy has none of its hooks
        return copied


def on_shards(module: nn.Module, group: dist.ProcessGroup | None, *args: torch.Tensor) -> torch.Tensor:
    """``module(*args)`` for one that all ranks hold whole, such as a norm, on each rank's own tokens, or heads.

    Its parameters' gradients are then parts of a sum over all of them: they are all-reduced here, in one message, as
    they appear. Forgetting this leaves replicas that drift apart without a word (arXiv 2205.05198, 4.2.2).

    Raises:
        ValueError: the module needs the tokens of all ranks, as batch norm does.
    """
    refuse_mixed_tokens(type(module).__name__, module)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        return module(*args)
    shared = copy_to(*trained.values(), group=group)
    shared = shared if isinstance(shared, tuple) else (shared,)
    return functional_call(module, dict(zip(trained, shared, strict=True)), args)


def sections_of(y: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
    """A fused layer's outputs apart, along the last dimension. Views that may be changed in place: not ``split``'s."""
    starts = [0, *accumulate(widths)]
    return [y.narrow(-1, start, width) for start, width in zip(starts, widths, strict=False)]
