"""Runs the steps of the ring over TCP links.

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pardemo.collectives.agreement import compare_in_group, compare_round_the_ring, description
from pardemo.collectives.links import Link, bytes_of, link_of

SEGMENT_BYTES = 1 << 20
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
}
BLOCK_BYTES = 4 << 20  # of each chunk: the best of 1 to 16 MiB on a machine with an idle and with a busy memory bus


@contextmanager
def agreed(
    group: dist.ProcessGroup, tensor: torch.Tensor, exchange: str, *, misfit: int | None = None,
    link: Link | None = None,
) -> Iterator[Link | None]:  # fmt: skip
    """Compares what the ranks are about to do, and holds the links within the block; None where the backend sends.

    Args:
        exchange: the collective in words, compared with the other ranks'.
        misfit: see :func:`pardemo.collectives.agreement.description`.
        link: an engine's own links; the group's when None.

    Raises:
        ValueError: the ranks' tensors or exchanges differ. ConnectionError: the links are closed.
    """
    mine = description(tensor, exchange, misfit)
    if tensor.device.type != "cpu" or group.size() == 1:
        compare_in_group(mine, group, tensor.device)
        yield None
        return
    if link is not None and link.closed:
        raise ConnectionError(f"{link.use}: its links are closed (an error in mid-exchange, or close()): make it anew")
    link = link or link_of(group)
    with link.lock:
        link.exchange, compared = exchange, False
        try:
            compare_round_the_ring(mine, link)
            compared = True
            yield link
        except BaseException as error:
            if compared or not isinstance(error, ValueError):  # of ranks that differ the ring itself is fine
                link.close()  # whatever is still on its way must not be taken for the next collective's
            raise


def agree(tensor: torch.Tensor, exchange: str, group: dist.ProcessGroup) -> None:
    """Compares what the ranks are about to do where a ring's collectives compare it, so that a rank at one of those and
    a rank at an exchange by other ways are told of each other. Collective.

    Raises:
        ValueError: the ranks' tensors or exchanges differ.
    """
    with agreed(group, tensor, exchange):
        pass


def all_reduce(link: Link, chunks: list[torch.Tensor], op: str) -> None:
    """Both laps, in place, block by block."""
    inbox = torch.empty_like(_segments(chunks[0])[0])  # [segment], at most 1 MiB
    for block in _blocks(chunks):
        _begin(link, block[link.rank - 1])
        for step in range(link.size - 1):
            for mine in _segments(block[_arriving(link, step)]):
                part = inbox[: mine.numel()]
                link.receive(bytes_of(part))
                OPERATIONS[op](mine, part)
                link.send(bytes_of(mine))  # the last step's is already the second lap's first
        _hand_round(link, block)
    link.flush()


def all_gather(link: Link, chunks: list[torch.Tensor]) -> None:
    """Runs the second lap alone: ``chunks[rank]`` of every rank goes round."""
    for block in _blocks(chunks):
        _begin(link, block[link.rank])
        _hand_round(link, block)
    link.flush()


def reduce_scatter(link: Link, chunks: list[torch.Tensor]) -> torch.Tensor:
    """Runs the first lap alone, without touching ``chunks``: partial sums live in two buffers by turns."""
    result = torch.empty_like(chunks[link.rank])  # [chunk]
    done = 0
    buffers: list[torch.Tensor] = []
    in_flight = [0, 0]  # number of the last send from each buffer
    for block in _blocks(chunks):
        buffers = buffers or [torch.empty_like(block[0]) for _ in range(min(2, link.size - 2))]  # [block]
        _begin(link, block[link.rank - 1])
        for step in range(link.size - 1):
            mine, last = block[_arriving(link, step)], step == link.size - 2
            target = result[done : done + mine.numel()] if last else buffers[step % 2][: mine.numel()]
            if not last:
                link.wait_sent(in_flight[step % 2])
            for part, summand in zip(_segments(target), _segments(mine), strict=True):
                link.receive(bytes_of(part))
                part.add_(summand)
                if not last:
                    in_flight[step % 2] = link.send(bytes_of(part))
        done += mine.numel()
    link.flush()
    return result


def broadcast(link: Link, flat: torch.Tensor) -> None:
    """Sends rank 0's tensor from rank to rank, segment by segment."""
    for part in _segments(flat):
        if link.rank > 0:
            link.receive(bytes_of(part))
        if link.rank < link.size - 1:
            link.send(bytes_of(part))
    link.flush()


def _arriving(link: Link, step: int) -> int:
    """The number of the chunk that arrives at a step."""
    return (link.rank - 2 - step) % link.size


def _begin(link: Link, chunk: torch.Tensor) -> None:
    for data in _segments(chunk):
        link.send(bytes_of(data))


def _hand_round(link: Link, block: list[torch.Tensor]) -> None:
    last = 2 * link.size - 3
    for step in range(link.size - 1, last + 1):
        for mine in _segments(block[_arriving(link, step)]):
            link.receive(bytes_of(mine))
            if step < last:
                link.send(bytes_of(mine))


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
