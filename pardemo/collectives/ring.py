"""Runs the steps of the ring over TCP links, or over the backend's point-to-point operations.

S: elements of the tensor; N: ranks; chunk = ceil(S / N), the last ones shorter. Why segments are passed on as soon as
they are reduced (chunk c of rank 0 on three ranks, segments 1, 2, 3; + adds, . waits)::

    whole chunks              in segments
    0 -> 1   123              0 -> 1   1 2 3
    1 adds      +++           1 adds     + + +
    1 -> 2         123        1 -> 2     1 2 3        rank 1 sends segment 1 while segment 2 arrives

The tensor is cut into N chunks. Numbering the 2(N−1) steps s = 0, 1, …, rank r **sends** chunk
``r − 1 − s`` and **receives** chunk ``r − 2 − s`` (mod N). So what arrives at step s leaves at step s + 1,
and it leaves in segments of 1 MiB, each forwarded as soon as it is reduced. A large tensor goes round block by
block, 4 MiB of every chunk at a time, so that what is added and forwarded is still in the processor's cache.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from pardemo.collectives.agreement import compare_in_group, compare_round_the_ring, description
from pardemo.collectives.links import Link, bytes_of, link_of

SEGMENT_BYTES = 1 << 20
OPERATIONS = {"sum": torch.Tensor.add_, "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine)}
BLOCK_BYTES = 4 << 20  # of each chunk: the best of 1 to 16 MiB on a machine with an idle and with a busy memory bus


class Ring:
    """Runs one collective on a ring: locks the links, compares what the ranks are about to do, sends and receives.

    Args:
        exchange: the collective in words, compared with the other ranks'.
        wrong: see :func:`pardemo.collectives.agreement.description`.
        link: an engine's own links; the group's when None.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensor: torch.Tensor,
        exchange: str = "",
        *,
        op: str = "sum",
        wrong: int = 0,
        link: Link | None = None,
    ):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._tensor, self._exchanged, self._wrong, self._combine = tensor, exchange, wrong, OPERATIONS[op]
        self._given_link, self._link = link, None

    def __enter__(self) -> "Ring":
        mine = description(self._tensor, self._exchanged, self._wrong)
        if self._tensor.device.type != "cpu" or self.size == 1:
            compare_in_group(mine, self.group, self._tensor.device)
            return self
        if self._given_link is not None and self._given_link.closed:
            raise ConnectionError(
                f"{self._given_link.use}: its links are closed (an error in mid-exchange, or close()): make it anew"
            )
        self._link = self._given_link or link_of(self.group)
        self._link.lock.acquire()
        self._link.exchange = self._exchanged
        try:
            compare_round_the_ring(mine, self._link)
        except BaseException as error:
            self._leave(clean=isinstance(error, ValueError))  # ranks that differ: the ring itself is fine
            raise
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._link is not None:
            self._leave(clean=kind is None)

    def _leave(self, clean: bool) -> None:
        if not clean:  # whatever is still on its way must not be taken for the next collective's
            self._link.close()
        self._link.lock.release()

    @property
    def has_links(self) -> bool:
        return self._link is not None

    def _send_index(self, step: int) -> int:
        return (self.rank - 1 - step) % self.size

    def _receive_index(self, step: int) -> int:
        return (self.rank - 2 - step) % self.size

    def all_reduce(self, chunks: list[torch.Tensor]) -> None:
        """Both laps, in place, block by block."""
        inbox = torch.empty_like(_segments(chunks[0])[0])  # [segment], at most 1 MiB
        for block in _blocks(chunks):
            self._begin(block[self._send_index(0)])
            for step in range(self.size - 1):
                for mine in _segments(block[self._receive_index(step)]):
                    part = inbox[: mine.numel()]
                    self._link.receive(bytes_of(part))
                    self._combine(mine, part)
                    self._link.send(bytes_of(mine))  # the last step's is already the second lap's first
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
        result = torch.empty_like(chunks[self.rank])  # [chunk]
        done = 0
        buffers: list[torch.Tensor] = []
        in_flight = [0, 0]  # number of the last send from each buffer
        for block in _blocks(chunks):
            buffers = buffers or [torch.empty_like(block[0]) for _ in range(min(2, self.size - 2))]  # [block]
            self._begin(block[self._send_index(0)])
            for step in range(self.size - 1):
                mine, last = block[self._receive_index(step)], step == self.size - 2
                target = result[done : done + mine.numel()] if last else buffers[step % 2][: mine.numel()]
                if not last:
                    self._link.wait_sent(in_flight[step % 2])
                for part, summand in zip(_segments(target), _segments(mine), strict=True):
                    self._link.receive(bytes_of(part))
                    part.add_(summand)
                    if not last:
                        in_flight[step % 2] = self._link.send(bytes_of(part))
            done += mine.numel()
        self._link.flush()
        return result

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """From rank to rank, segment by segment, beginning at ``source``."""
        place = (self.rank - source) % self.size
        for part in _segments(flat):
            if place > 0:
                self._link.receive(bytes_of(part))
            if place < self.size - 1:
                self._link.send(bytes_of(part))
        self._link.flush()

    def _begin(self, chunk: torch.Tensor) -> None:
        for data in _segments(chunk):
            self._link.send(bytes_of(data))

    def _hand_round(self, block: list[torch.Tensor]) -> None:
        last = 2 * self.size - 3
        for step in range(self.size - 1, last + 1):
            for mine in _segments(block[self._receive_index(step)]):
                self._link.receive(bytes_of(mine))
                if step < last:
                    self._link.send(bytes_of(mine))

    def steps_p2p(self, chunks: list[torch.Tensor], steps: range) -> Iterator[int]:
        """The same steps by the backend's own point-to-point operations, chunk by chunk (nccl; and to look at)."""
        inbox = torch.empty_like(chunks[0])
        for step in steps:
            mine = chunks[self._receive_index(step)]
            adds = step < self.size - 1
            target = inbox[: mine.numel()] if adds else mine
            self._exchange(chunks[self._send_index(step)], target)
            if adds:
                self._combine(mine, target)
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


def agree(tensor: torch.Tensor, exchange: str, group: dist.ProcessGroup) -> None:
    """Compares what the ranks are about to do where a ring's collectives compare it, so that a rank at one of those and
    a rank at an exchange by other ways are told of each other. Collective.

    Raises:
        ValueError: the ranks' tensors or exchanges differ.
    """
    with Ring(group, tensor, exchange):
        pass


def exhaust(steps: Iterator[int]) -> None:
    for _ in steps:
        pass


def chunk_numel(numel: int, size: int) -> int:
    """Elements of a ring chunk when ``numel`` elements are cut for ``size`` ranks: ceil(numel / size)."""
    return -(-numel // size)


def cut(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    """[S] as N views: [chunk] each, the last ones shorter or empty."""
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
