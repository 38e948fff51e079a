"""The loss of a sequence that is cut: each rank has some labels, and not all have as many."""

import torch
import torch.distributed as dist

from pardemo.collectives import ring_all_reduce
from pardemo.collectives.decorators import not_compiled
from pardemo.groups import group_of


@not_compiled
def mean_over_tokens(
    losses: torch.Tensor, counted: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The mean of all ranks' losses that are counted, the same on every rank; their gradients are those of one process.

    A mean of the ranks' means would weigh a token by how many others its rank counts. Where gradients are *averaged*
    over these ranks afterwards (DDP's default), multiply the loss by N; where they are summed, do not.

    Args:
        losses: of each token of this rank, any shape. counted: of the same shape, False for padding and what has no
            label (the loss there may be anything, also NaN).

    Raises:
        ValueError: shapes differ, or no rank counts a token.
    """
    if losses.shape != counted.shape:
        raise ValueError(
            f"losses {tuple(losses.shape)} and what is counted {tuple(counted.shape)} are not of one shape"
        )
    group, kind = group_of(group), torch.promote_types(losses.dtype, torch.float32)
    total = losses.to(kind).masked_fill(~counted.bool(), 0).sum()  # this rank's
    both = torch.stack([total.detach().double(), counted.sum().double()])  # counts above 2²⁴ are no fp32 numbers
    ring_all_reduce(both, group, label="a sequence's losses and how many")
    if not both[1]:
        raise ValueError("no rank counts a token: there is no loss to take the mean of")
    mine = total / both[1].to(kind)
    return (both[0] / both[1] + (mine - mine.detach())).to(losses.dtype)  # the value of all, this rank's gradient
