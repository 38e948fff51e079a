"""Runs collectives on tensors, by the ring, in two levels or through a parameter server: functions for every rank."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from pardemo.collectives import ring
from pardemo.collectives.links import Link, calls, materialized
from pardemo.collectives.ring import OPERATIONS, SEGMENT_BYTES, agree, agreed, cut
from pardemo.groups import group_of


def ring_all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    op: str = "sum",
    *,
    label: str = "",
    link: Link | None = None,
) -> torch.Tensor:
    """Sums ``tensor`` over the ranks of ``group``, in place, and returns it; ``op="max"`` takes the largest instead.

    Any dtype that adds, any shape; memory beyond the tensor: one segment (at most 1/N of it). A strided
    view with gaps is copied first. Every rank ends with the same bits. bf16 is summed in bf16, as nccl does.

    Raises:
        ValueError: the ranks' tensors differ, or the ranks are at different collectives; names the ranks, sizes and
            dtypes. ``op`` is not known.
        ConnectionError: a neighbour is gone.
    """
    group = group_of(group)
    if op not in OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(OPERATIONS)}, not {op!r}")
    with torch.no_grad():
        flat, write_back = _flatten(tensor)
        with agreed(group, tensor, _words(f"all_reduce ({op})", label), link=link) as links:
            _count("all_reduce", flat)
            if links is not None and flat.numel():
                ring.all_reduce(links, cut(flat, links.size), op)
            elif links is None and group.size() > 1 and flat.numel():
                dist.all_reduce(flat, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group)
        write_back()
    return tensor


def ring_reduce_scatter(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, label: str = "", link: Link | None = None
) -> torch.Tensor:
    """Sums ``tensor`` over the ranks and returns chunk ``rank`` of the flattened sum, as a new tensor.

    A chunk is ``ceil(numel / N)`` elements; the last ones are shorter, even empty, when N does not divide.
    ``tensor`` is left as it was; memory beyond it and the result: two blocks of 4 MiB, at most 2/N of it, and a copy
    where it does not lie contiguously.

    Sends (N−1)/N of the tensor per rank and receives as much. Raises as :func:`ring_all_reduce`.
    """
    group = group_of(group)
    with torch.no_grad():
        flat = materialized(tensor).view(-1)
        with agreed(group, tensor, _words("reduce_scatter", label), link=link) as links:
            _count("reduce_scatter", flat)
            chunks = cut(flat, group.size())  # [S] to N × [chunk]
            mine = chunks[dist.get_rank(group)]
            if group.size() == 1 or not flat.numel():
                return mine.clone()
            if links is not None:
                return ring.reduce_scatter(links, chunks)
            result = torch.empty_like(chunks[0])
            missing = group.size() * result.numel() - flat.numel()
            dist.reduce_scatter_single(result, pad(flat, (0, missing)) if missing else flat, group=group)
            return result[: mine.numel()]


def ring_all_gather(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    *,
    label: str = "",
    link: Link | None = None,
) -> torch.Tensor:
    """Gathers the ranks' shards, in the order of the ranks, into one flat tensor of N·numel elements.

    With ``out`` (contiguous) the result goes there, and shards may be the uneven chunks that
    :func:`ring_reduce_scatter` makes of a tensor of ``out``'s size. Sends (N−1)/N of the result per rank.

    Raises:
        ValueError: shards of different sizes or dtypes, or not the chunk of ``out`` that this rank owns.
    """
    group, exchange = group_of(group), _words("all_gather", label)
    rank, size = dist.get_rank(group), group.size()
    with torch.no_grad():
        shard = materialized(tensor).view(-1)
        if out is None:
            with agreed(group, tensor, exchange, link=link) as links:
                return _gather_into(shard.new_empty(size * shard.numel()), shard, links, group)
        fits = out.is_contiguous() and not out.is_conj() and not out.is_neg() and out.dtype == tensor.dtype
        wanted = cut(out.view(-1), size)[rank].numel() if fits else -1
        misfit = None if wanted == shard.numel() else shard.numel()  # told to all ranks, so that none waits in vain
        with agreed(group, out, exchange, misfit=misfit, link=link) as links:
            if not fits:
                raise ValueError("out must be contiguous, no lazy conjugate or negative, and of the shard's dtype")
            if misfit is not None:
                raise ValueError(f"rank {rank} owns {wanted} of out's {out.numel()} elements, not {shard.numel()}")
            return _gather_into(out, shard, links, group)


def ring_broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Copies the tensor of the first rank of ``group`` to all others, in place, and returns it.

    Segments go from rank to rank, so each sends the tensor once but the last, which sends nothing. The tensors lie
    alike in memory on all ranks, without gaps. Raises as :func:`ring_all_reduce`.
    """
    group = group_of(group)
    with torch.no_grad():
        flat, write_back = _flatten(tensor)
        with agreed(group, tensor, "broadcast from rank 0") as links:
            _count("broadcast", flat)
            if links is not None:
                ring.broadcast(links, flat)
            elif group.size() > 1 and flat.numel():
                dist.broadcast(flat, group=group, group_src=0)
        write_back()
    return tensor


def hierarchical_all_reduce(
    tensor: torch.Tensor, inside: dist.ProcessGroup, between: dist.ProcessGroup
) -> torch.Tensor:
    """Sums ``tensor`` over all ranks of several hosts, in place: inside each host, between the hosts, inside again.

    Reduce-scatter inside; then each rank's chunk is all-reduced with those of the same place on the other hosts; then
    all-gather inside. With G ranks on each of H hosts a host's adapter sends 2(H−1)/H·S, however many ranks it has; the
    one ring over all of them sends 2(GH−1)/(GH)·S over each link, also over the slow ones between hosts.

    Args:
        inside: the ranks of this rank's host. between: the ranks with this rank's place on each of the hosts. With
            ``Groups(ParallelDims(tp=G, dp=H))`` they are ``groups.tp`` and ``groups.dp``.

    Raises:
        ValueError, ConnectionError: as :func:`ring_all_reduce`, for each of the three steps.
    """
    with torch.no_grad():
        flat, write_back = _flatten(tensor)
        chunk = ring_reduce_scatter(flat, inside, label="this host's part of a hierarchical all_reduce")
        ring_all_reduce(chunk, between, label="a chunk between hosts")
        ring_all_gather(chunk, inside, flat, label="a hierarchical all_reduce's chunks")
        write_back()
    return tensor


def parameter_server_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sums ``tensor`` over the ranks, in place, through the group's rank 0: the parameter server of the 2010s.

    Every worker sends its whole tensor to the server and gets the sum back, so the server receives and sends (N−1)·S
    bytes, a worker S each way. Memory beyond the tensor: a segment per worker on the server. Raises as
    :func:`ring_all_reduce`.
    """
    group = group_of(group)
    rank, size = dist.get_rank(group), group.size()
    with torch.no_grad():
        flat, write_back = _flatten(tensor)
        agree(tensor, "all_reduce (sum) by rank 0", group)
        segment = max(1, min(SEGMENT_BYTES // max(1, tensor.element_size()), -(-flat.numel() // size)))
        pieces = [flat[i : i + segment] for i in range(0, flat.numel(), segment)]
        workers = [dist.get_global_rank(group, r) for r in range(1, size)]
        if size > 1 and rank == 0:
            inbox = [torch.empty_like(pieces[0]) for _ in workers] if pieces else []
            for piece in pieces:
                boxes = [box[: piece.numel()] for box in inbox]
                for work in [dist.irecv(box, peer, group) for box, peer in zip(boxes, workers, strict=True)]:
                    work.wait()  # type: ignore[union-attr]
                for box in boxes:
                    piece.add_(box)
            for work in [dist.isend(piece, peer, group) for piece in pieces for peer in workers]:
                work.wait()  # type: ignore[union-attr]
        elif size > 1:
            home = dist.get_global_rank(group, 0)
            for piece in pieces:
                dist.send(piece, home, group)
            for piece in pieces:
                dist.recv(piece, home, group)
        write_back()
    return tensor


def _gather_into(out: torch.Tensor, shard: torch.Tensor, links: Link | None, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's ``shard`` [chunk] into ``out`` [S], which is returned."""
    _count("all_gather", out)
    flat, size = out.view(-1), group.size()
    chunks = cut(flat, size)  # views of [chunk]: what is written to them is written to out
    chunks[dist.get_rank(group)].copy_(shard)
    if links is not None and flat.numel():
        ring.all_gather(links, chunks)
    elif links is None and size > 1 and flat.numel():
        chunk = chunks[0].numel()
        gathered = flat if flat.numel() == size * chunk else flat.new_empty(size * chunk)
        dist.all_gather_single(gathered, pad(shard, (0, chunk - shard.numel())), group=group)
        if gathered is not flat:
            flat.copy_(gathered[: flat.numel()])
    return out


def _count(name: str, tensor: torch.Tensor) -> None:
    """Counts a call; one of a CUDA tensor is torch's own, which meters count."""
    if tensor.device.type == "cpu":
        calls[name] += 1


def _words(operation: str, label: str) -> str:
    return f"{operation} of {label}" if label else operation


def _flatten(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """The tensor's memory as a flat tensor, in whatever order it lies, and a function that writes back what had to
    be copied. For sums only: their elements' order does not matter.

    The function raises a ValueError where elements share memory: each would have to hold its own sum."""
    lazy = tensor.is_conj() or tensor.is_neg()
    tensor = tensor.detach()
    if not lazy and torch.ops.aten.is_non_overlapping_and_dense(tensor):  # contiguous, transposed, channels-last
        return tensor.as_strided((tensor.numel(),), (1,)), lambda: None
    flat = materialized(tensor).view(-1)

    def write_back() -> None:
        if _overlaps(tensor):
            raise ValueError(
                f"elements of a tensor {tuple(tensor.shape)} with strides {tensor.stride()} share memory (expand, "
                "unfold), so that it cannot be changed in place: pass its clone()"
            )
        tensor.copy_(flat.view(tensor.shape))

    return flat, write_back


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether a dimension's step is no longer than what the finer ones reach: elements may share memory."""
    reach = 0
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False
