"""What expert-parallel ranks send each other: rows to where their experts are, and back. No autograd, no routing.

How many rows go where is not known before the router has chosen, so that ranks first tell each other how many are
coming (E whole numbers), and then send them: an all-to-all with uneven parts.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

FAILED = -1  # in place of a number of rows: the rank that sends it will not go on


def tell(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """How many rows each rank sends to each of this rank's experts [N, E/N], from this rank's to all of them [E].

    Raises:
        RuntimeError: a rank has given up (:func:`give_up`); names it.
    """
    ranks = dist.get_world_size(group)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=group)
    coming = coming.view(ranks, -1)
    failed = [rank for rank in range(ranks) if (coming[rank] == FAILED).any()]
    if failed:
        raise RuntimeError(f"rank {failed[0]} of the group could not route its tokens; it says why")
    return coming


def give_up(experts: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """In place of :func:`tell`, on a rank that has no numbers: the others would wait for them, and raise instead."""
    mine = torch.full((experts,), FAILED, device=device)
    dist.all_to_all_single(torch.empty_like(mine), mine, group=group)


def all_to_all(
    rows: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """``rows`` [Σ sends, ..], the first ``sends[0]`` of them to rank 0 and so on; what came [Σ receives, ..]."""
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(receives), list(sends), group=group)
    return received
