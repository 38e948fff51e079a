"""The base of parallel modules: a process group that survives copying, and modules that all ranks hold whole."""

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from pardemo import compat
from pardemo.groups import group_of
from pardemo.tensor_parallel.operators import copy_to


class GroupModule(nn.Module):
    """A module that talks to ``group``, and so does a deep copy of it (an average of weights, say)."""

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self.group = group_of(group)

    def mark_parts(self) -> None:
        """Marks its own parameters that are cut (``mark_part``): when they are made, and when others replace them."""

    def _apply(self, fn: Callable, recurse: bool = True) -> "GroupModule":
        super()._apply(fn, recurse)  # to(), to_empty(): parameters may be new ones behind it
        self.mark_parts()
        return self

    def __deepcopy__(self, memo: dict) -> "GroupModule":
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        copied.mark_parts()  # a parameter's copy has neither its mark nor its hooks
        return copied


def on_shards(module: nn.Module, group: dist.ProcessGroup | None, *args: torch.Tensor) -> torch.Tensor:
    """``module(*args)`` for one that all ranks hold whole, such as a norm, on each rank's own tokens, or heads.

    Its parameters' gradients are then parts of a sum over all of them: they are all-reduced here, in one message, as
    they appear. Forgetting this leaves replicas that drift apart without a word (arXiv 2205.05198, 4.2.2).

    Raises:
        ValueError: the module needs the tokens of all ranks, as batch norm does.
    """
    refuse_batch_norm(module)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        return module(*args)
    shared = copy_to(*trained.values(), group=group)
    shared = shared if isinstance(shared, tuple) else (shared,)
    return functional_call(module, dict(zip(trained, shared, strict=True)), args)


def refuse_batch_norm(module: nn.Module) -> None:
    """ValueError where a module that sees a rank's own tokens alone takes statistics over tokens."""
    for part in module.modules():
        if isinstance(part, compat.NormBase):
            raise ValueError(
                f"{type(part).__name__} would take its statistics from this rank's tokens alone: use a norm of each "
                "token, such as LayerNorm, or sequence_parallel=False"
            )


def sections_of(y: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
    """A fused layer's outputs apart, along the last dimension. Views that may be changed in place: not ``split``'s."""
    starts = [0, *accumulate(widths)]
    return [y.narrow(-1, start, width) for start, width in zip(starts, widths, strict=False)]
