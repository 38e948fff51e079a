"""What context-parallel ranks send each other. Nothing here knows autograd, or attention.

``pass_on`` sends to the next rank of the group and receives from the one before, while this rank computes.
``all_to_all`` gives each rank its part of a tensor, and joins what the others gave::

    sequence to heads    rank 0  tokens 0, heads A B         tokens 0 1, heads A
                         rank 1  tokens 1, heads A B   ->    tokens 0 1, heads B
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def pass_on(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Callable[[], list[torch.Tensor]]:
    """Starts sending ``tensors`` to the next rank; what is returned waits for those of the one before.

    They are of the same shapes and dtypes on all ranks, and must not change before it has returned.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    leaving = [tensor.contiguous() for tensor in tensors]
    coming = [torch.empty_like(tensor) for tensor in leaving]
    there, here = (rank + 1) % ranks, (rank - 1) % ranks
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, group=group, group_peer=there) for tensor in leaving]
        + [dist.P2POp(dist.irecv, tensor, group=group, group_peer=here) for tensor in coming]
    )

    def wait() -> list[torch.Tensor]:
        for work in works:
            work.wait()
        leaving.clear()
        return coming

    return wait


def all_to_all(tensor: torch.Tensor, cut: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Cuts ``tensor`` along dimension ``cut``, sends each rank its part, and joins those received along ``join``.

    Of a tensor of S elements a rank sends (N−1)/N · S.
    """
    ranks = dist.get_world_size(group)
    parts = torch.stack(tensor.chunk(ranks, cut))  # [N, ..]: a part for each rank, one after the other
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), join)
