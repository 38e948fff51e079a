"""The ring all-reduce with send and receive alone, as the chapter *Data parallelism* builds it (section 3).

Leads to :func:`pardemo.collectives.ring_all_reduce`, which takes the same steps over connections of its own, in
segments that are passed on while the next ones arrive, and first compares the shapes and types of the ranks' tensors.

Every rank sends to its successor only, N − 1 steps to collect and N − 1 to hand out. Three ranks, chunks a, b, c::

                     rank 0        rank 1        rank 2
    begin            a0 b0 c0      a1 b1 c1      a2 b2 c2
    collect 1        a0 b02 c0     a1 b1 c01     a12 b2 c2       rank 0 sends c0, rank 1 a1, rank 2 b2
    collect 2        a* b02 c0     a1 b* c01     a12 b2 c*       a* is a sum over all ranks
    hand out 1       a* b02 c*     a* b* c01     a12 b* c*
    hand out 2       a* b* c*      a* b* c*      a* b* c*

Each step moves 1/N of the tensor, so a rank sends 2(N − 1)/N of it, however many ranks there are.
"""

import torch
import torch.distributed as dist


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sums a contiguous ``tensor`` over the ranks, in place, and returns it. All ranks call it with the same shape."""
    chunks = _chunks(tensor, group)
    _collect(chunks, group)
    _hand_out(chunks, group)
    return tensor


def reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's chunk of the sum over the ranks: [numel/N], a new tensor. ``tensor`` is left as it was."""
    chunks = _chunks(tensor.clone(), group)
    _collect(chunks, group)
    return chunks[dist.get_rank(group)].clone()


def all_gather(shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The ranks' shards behind one another: [N·numel] from [numel] of each."""
    gathered = shard.new_empty(dist.get_world_size(group) * shard.numel())
    chunks = _chunks(gathered, group)
    chunks[dist.get_rank(group)].copy_(shard.view(-1))
    _hand_out(chunks, group)
    return gathered


def parameter_server_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The same sum through rank 0, in place (section 2, "Through a server"); its link carries N − 1 whole tensors::

    rank 1 --tensor--> rank 0 <--tensor-- rank 2        rank 1 <--sum-- rank 0 --sum--> rank 2
    """
    rank, workers = dist.get_rank(group), range(1, dist.get_world_size(group))
    if rank == 0:
        inbox = torch.empty_like(tensor)
        for worker in workers:
            dist.recv(inbox, group=group, group_src=worker)
            tensor += inbox
        for worker in workers:
            dist.send(tensor, group=group, group_dst=worker)
    else:
        dist.send(tensor, group=group, group_dst=0)
        dist.recv(tensor, group=group, group_src=0)
    return tensor


def _chunks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, ...]:
    """N views of the tensor: what is written to them is written to it. The last ones may be shorter by an element."""
    return tensor.detach().view(-1).tensor_split(dist.get_world_size(group))


def _collect(chunks: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None) -> None:
    """The first lap: rank r's chunk r becomes the sum over all ranks."""
    rank, size = dist.get_rank(group), len(chunks)
    for step in range(size - 1):
        partial_sum, mine = chunks[(rank - 1 - step) % size], chunks[(rank - 2 - step) % size]
        inbox = torch.empty_like(mine)
        _pass_on(partial_sum, inbox, group)
        mine += inbox


def _hand_out(chunks: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None) -> None:
    """The second lap: rank r's finished chunk r goes round to all others."""
    rank, size = dist.get_rank(group), len(chunks)
    for step in range(size - 1):
        _pass_on(chunks[(rank - step) % size], chunks[(rank - step - 1) % size], group)


def _pass_on(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """To the successor and from the predecessor, both at once: if all ranks sent first, all would wait forever."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    both = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
    ]
    for message in dist.batch_isend_irecv(both):
        message.wait()
