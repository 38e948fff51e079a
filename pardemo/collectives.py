"""Ring and parameter-server collectives over real processes.

A ring all-reduce is two laps (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms"): in
the reduce-scatter lap every rank passes partial sums on and ends with one finished chunk, in the
all-gather lap the finished chunks go round once more. Each rank sends, and receives, 2(N−1)/N of the
tensor, all of it to one successor.

The tensor is cut into N chunks. Numbering the 2(N−1) steps s = 0, 1, …, rank r **sends** chunk
``r − 1 − s`` and **receives** chunk ``r − 2 − s`` (mod N). So what arrives at step s leaves at step s + 1,
and it leaves in segments of 1 MiB, each forwarded as soon as it is reduced. A large tensor goes round block by
block, 2 MiB of every chunk at a time, so that what is added and forwarded is still in the processor's cache.

CPU tensors travel over the group's own links (:mod:`pardemo.links`), CUDA tensors over nccl's
point-to-point operations. All functions are collective: every rank of ``group`` has to call them.
"""

import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist

from pardemo.agreement import compare_in_group, compare_round_the_ring
from pardemo.links import RingLink, ring_link

SEGMENT_BYTES = 1 << 20
BLOCK_BYTES = 2 << 20  # of each chunk; larger ones gain nothing, smaller ones leave nothing to overlap


def ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sums ``tensor`` over the ranks of ``group``, in place, and returns it.

    Any dtype that adds, any shape; memory beyond the tensor: one segment (at most 1/N of it). A strided
    view with gaps is copied first. Every rank ends with the same bits. bf16 is summed in bf16, as nccl does.

    Raises:
        ValueError: the ranks' tensors differ; names the ranks, their sizes and dtypes.
        ConnectionError: a neighbour is gone.
    """
    group, rank, size = _membership(group)
    with torch.no_grad():
        flat, write_back = _flatten(tensor)
        with _Ring(group, tensor) as ring:
            chunks = _cut(flat, size)
            if size > 1 and flat.numel():
                if ring.has_links:
                    ring.all_reduce(chunks)
                else:
                    _exhaust(ring.steps_p2p(chunks, range(2 * size - 2)))
        write_back()
    return tensor


def ring_reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sums ``tensor`` over the ranks and returns chunk ``rank`` of the flattened sum, as a new tensor.

    A chunk is ``ceil(numel / N)`` elements; the last ones are shorter, even empty, when N does not divide.
    ``tensor`` is left as it was; memory beyond it and the result: two blocks of 2 MiB, at most 2/N of it.

    Sends (N−1)/N of the tensor per rank and receives as much. Raises as :func:`ring_all_reduce`.
    """
    group, rank, size = _membership(group)
    with torch.no_grad():
        flat, _ = _flatten(tensor)
        with _Ring(group, tensor) as ring:
            chunks = _cut(flat, size)
            if size == 1 or not flat.numel():
                return chunks[rank].clone()
            return ring.reduce(chunks) if ring.has_links else ring.reduce_p2p(chunks)


def ring_all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Gathers the ranks' shards, in the order of the ranks, into one flat tensor of N·numel elements.

    With ``out`` (contiguous) the result goes there, and shards may be the uneven chunks that
    :func:`ring_reduce_scatter` makes of a tensor of ``out``'s size. Sends (N−1)/N of the result per rank.

    Raises:
        ValueError: shards of different sizes or dtypes, or not the chunk of ``out`` that this rank owns.
    """
    group, rank, size = _membership(group)
    with torch.no_grad():
        shard, _ = _flatten(tensor)
        if out is None:
            with _Ring(group, tensor) as ring:
                out = shard.new_empty(size * shard.numel())
                return _gather_into(ring, out, shard, rank, size)
        with _Ring(group, out) as ring:
            if not out.is_contiguous() or out.dtype != tensor.dtype:
                raise ValueError("out must be contiguous and of the shard's dtype")
            wanted = _cut(out.view(-1), size)[rank].numel()
            if wanted != shard.numel():
                raise ValueError(f"rank {rank} owns {wanted} of out's {out.numel()} elements, not {shard.numel()}")
            return _gather_into(ring, out, shard, rank, size)


def parameter_server_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, server: int = 0
) -> torch.Tensor:
    """Sums ``tensor`` over the ranks, in place, through one of them: the parameter server of the 2010s.

    Every worker sends its whole tensor to rank ``server`` of the group and gets the sum back, so the server
    receives and sends (N−1)·S bytes, a worker S each way. Memory beyond the tensor: a segment per worker on
    the server. Raises as :func:`ring_all_reduce`.
    """
    group, rank, size = _membership(group)
    with torch.no_grad():
        flat, write_back = _flatten(tensor)
        compare_in_group(tensor, group)
        segment = max(1, min(SEGMENT_BYTES // max(1, tensor.element_size()), -(-flat.numel() // size)))
        pieces = [flat[i : i + segment] for i in range(0, flat.numel(), segment)]
        workers = [dist.get_global_rank(group, r) for r in range(size) if r != server]
        if size > 1 and rank == server:
            inbox = [torch.empty_like(pieces[0]) for _ in workers] if pieces else []
            for piece in pieces:
                boxes = [box[: piece.numel()] for box in inbox]
                for work in [dist.irecv(box, peer, group) for box, peer in zip(boxes, workers, strict=True)]:
                    work.wait()
                for box in boxes:
                    piece.add_(box)
            for work in [dist.isend(piece, peer, group) for piece in pieces for peer in workers]:
                work.wait()
        elif size > 1:
            home = dist.get_global_rank(group, server)
            for piece in pieces:
                dist.send(piece, home, group)
            for piece in pieces:
                dist.recv(piece, home, group)
        write_back()
    return tensor


def ring_steps(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> Iterator[int]:
    """The ring all-reduce one step at a time: yields the number of each of the 2(N−1) steps when it is done.

    Between two steps ``tensor`` (contiguous, on every rank) can be looked at. To understand, not for speed.
    """
    group, _, size = _membership(group)
    ring = _Ring(group, tensor)
    with torch.no_grad():
        yield from ring.steps_p2p(_cut(tensor.detach().view(-1), size), range(2 * size - 2))


def chunk_numel(numel: int, size: int) -> int:
    """Elements of a ring chunk when ``numel`` elements are cut for ``size`` ranks: ceil(numel / size)."""
    return -(-numel // size)


# ---------------------------------------------------------------- the ring itself


class _Ring:
    """One collective's turn on a group's ring: takes the links, compares the tensors, runs the laps."""

    def __init__(self, group: dist.ProcessGroup, tensor: torch.Tensor):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._tensor = tensor
        self._link: RingLink | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "_Ring":
        if self._tensor.device.type != "cpu" or self.size == 1:
            compare_in_group(self._tensor, self.group)
            return self
        self._link = ring_link(self.group)
        self._lock = self._link.lock
        self._lock.acquire()
        try:
            compare_round_the_ring(self._tensor, self._link)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._link is not None:
            self._lock.release()

    @property
    def has_links(self) -> bool:
        return self._link is not None

    def _send_index(self, step: int) -> int:
        return (self.rank - 1 - step) % self.size

    def _receive_index(self, step: int) -> int:
        return (self.rank - 2 - step) % self.size

    def all_reduce(self, chunks: list[torch.Tensor]) -> None:
        """Both laps, in place, block by block."""
        inbox = torch.empty_like(_segments(chunks[0])[0])
        for block in _blocks(chunks):
            self._begin(block[self._send_index(0)])
            for step in range(self.size - 1):
                for mine in _segments(block[self._receive_index(step)]):
                    part = inbox[: mine.numel()]
                    self._link.receive(_bytes(part))
                    mine.add_(part)
                    self._link.send(_bytes(mine))  # the last step's is already the second lap's first
            self._hand_round(block)
        self._link.flush()

    def gather(self, chunks: list[torch.Tensor]) -> None:
        """The second lap alone: ``chunks[rank]`` of every rank goes round."""
        for block in _blocks(chunks):
            self._begin(block[self.rank])
            self._hand_round(block)
        self._link.flush()

    def reduce(self, chunks: list[torch.Tensor]) -> torch.Tensor:
        """The first lap alone, without touching ``chunks``: partial sums live in two buffers by turns."""
        result = torch.empty_like(chunks[self.rank])
        done = 0
        buffers: list[torch.Tensor] = []
        in_flight = [0, 0]  # number of the last send from each buffer
        for block in _blocks(chunks):
            buffers = buffers or [torch.empty_like(block[0]) for _ in range(min(2, self.size - 2))]
            self._begin(block[self._send_index(0)])
            for step in range(self.size - 1):
                mine, last = block[self._receive_index(step)], step == self.size - 2
                target = result[done : done + mine.numel()] if last else buffers[step % 2][: mine.numel()]
                if not last:
                    self._link.wait_sent(in_flight[step % 2])
                for part, own in zip(_segments(target), _segments(mine), strict=True):
                    self._link.receive(_bytes(part))
                    part.add_(own)
                    if not last:
                        in_flight[step % 2] = self._link.send(_bytes(part))
            done += mine.numel()
        self._link.flush()
        return result

    def _begin(self, chunk: torch.Tensor) -> None:
        for data in _segments(chunk):
            self._link.send(_bytes(data))

    def _hand_round(self, block: list[torch.Tensor]) -> None:
        last = 2 * self.size - 3
        for step in range(self.size - 1, last + 1):
            for mine in _segments(block[self._receive_index(step)]):
                self._link.receive(_bytes(mine))
                if step < last:
                    self._link.send(_bytes(mine))

    def steps_p2p(self, chunks: list[torch.Tensor], steps: range) -> Iterator[int]:
        """The same steps by the backend's own point-to-point operations, chunk by chunk (nccl; and to look at)."""
        inbox = torch.empty_like(chunks[0])
        for step in steps:
            mine = chunks[self._receive_index(step)]
            adds = step < self.size - 1
            target = inbox[: mine.numel()] if adds else mine
            self._exchange(chunks[self._send_index(step)], target)
            if adds:
                mine.add_(target)
            yield step

    def reduce_p2p(self, chunks: list[torch.Tensor]) -> torch.Tensor:
        """The first lap by point-to-point operations, without touching ``chunks``; two buffers by turns."""
        buffers = [torch.empty_like(chunks[0]) for _ in range(2)]
        outgoing = chunks[self._send_index(0)]
        for step in range(self.size - 1):
            mine = chunks[self._receive_index(step)]
            incoming = buffers[step % 2][: mine.numel()]
            self._exchange(outgoing, incoming)
            outgoing = incoming.add_(mine)
        return outgoing

    def _exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        successor = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        predecessor = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        operations = []
        if outgoing.numel():
            operations.append(dist.P2POp(dist.isend, outgoing, successor, self.group))
        if incoming.numel():
            operations.append(dist.P2POp(dist.irecv, incoming, predecessor, self.group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


def _gather_into(ring: _Ring, out: torch.Tensor, shard: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    chunks = _cut(out.view(-1), size)
    chunks[rank].copy_(shard)
    if size > 1 and out.numel():
        if ring.has_links:
            ring.gather(chunks)
        else:
            _exhaust(ring.steps_p2p(chunks, range(size - 1, 2 * size - 2)))
    return out


def _exhaust(steps: Iterator[int]) -> None:
    for _ in steps:
        pass


# ---------------------------------------------------------------- tensors as bytes


def _membership(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, int, int]:
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: call this inside World.run or after init_process_group")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not a member of the group that it was given")
    return group, rank, dist.get_world_size(group)


def _flatten(tensor: torch.Tensor):
    """A flat view of the tensor's memory, and a function that writes back what could not be viewed."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1), lambda: None
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if dense:  # a transposed matrix, channels-last images: gapless, so its memory can be used as it lies
        return tensor.as_strided((tensor.numel(),), (1,)), lambda: None
    flat = tensor.contiguous().view(-1)
    return flat, lambda: tensor.copy_(flat.view(tensor.shape))


def _cut(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    chunk = chunk_numel(flat.numel(), size)
    return [flat[min(i * chunk, flat.numel()) : min((i + 1) * chunk, flat.numel())] for i in range(size)]


def _blocks(chunks: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same piece of every chunk, one block after the other: what all ranks work on at a time fits the cache."""
    step = max(1, BLOCK_BYTES // chunks[0].element_size())
    for at in range(0, chunks[0].numel(), step):
        yield [chunk[at : at + step] for chunk in chunks]


def _segments(chunk: torch.Tensor) -> list[torch.Tensor]:
    step = max(1, SEGMENT_BYTES // chunk.element_size())
    return [chunk[i : i + step] for i in range(0, chunk.numel(), step)]


def _bytes(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.view(torch.uint8).numpy())
