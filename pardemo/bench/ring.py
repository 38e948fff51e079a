"""The ring all-reduce against torch's gloo all_reduce, and against plain sockets that do its work without its order."""

import threading
import time

import torch
import torch.distributed as dist

from pardemo.bench import BenchRow, compare, slowest
from pardemo.collectives import ring_all_reduce
from pardemo.collectives.links import Link, bytes_of
from pardemo.meters import MemoryMeter

SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "64MiB": 64 << 20}
BLOCK_NUMEL = 1 << 18  # 1 MiB in fp32, the ring's own segment: what the plain sockets hand to the kernel at once
LIMIT = "plain sockets and adds, without waiting"


def without_waiting(link: Link, tensor: torch.Tensor) -> None:
    """An all-reduce's work without its order: the limit of what a ring can reach over sockets.

    A rank of a ring of N hands 2(N−1)/N of its tensor to the kernel and takes as much from it. Half of what arrives is
    added to the tensor, which reads both and writes one; the other half is written to it. All of that is done here, by
    plain sockets and from and to the memory of a tensor of the same size: a block that is sent over and over would stay
    in the processor's cache, which no all-reduce of a large tensor can. Blocks leave in the order in which others
    arrive, so that one that is in the cache serves both, as in a ring. Only nobody waits: a rank sends whatever its
    memory holds, not what has arrived before, and the result is no sum.
    """
    size = dist.get_world_size()
    half = (size - 1) * (tensor.numel() // size)
    inbox = torch.empty(min(BLOCK_NUMEL, half))

    def send() -> None:
        for block in (*tensor[:half].split(BLOCK_NUMEL), *tensor[-half:].split(BLOCK_NUMEL)):
            link._out.sendall(bytes_of(block))

    sender = threading.Thread(target=send)
    sender.start()
    for block in tensor[:half].split(BLOCK_NUMEL):
        arrived = inbox[: block.numel()]
        _fill(link, arrived)
        block.add_(arrived)
    for block in tensor[-half:].split(BLOCK_NUMEL):
        _fill(link, block)
    sender.join()


def _fill(link: Link, block: torch.Tensor) -> None:
    left = bytes_of(block)
    while left:
        left = left[link._in.recv_into(left) :]


def alternate(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: seconds of each method, by turns."""
    size = dist.get_world_size()
    link = Link(dist.group.WORLD)  # connections of its own, made as the ring makes its
    tensor = torch.empty(nbytes // 4)
    methods = {
        "ring": lambda: ring_all_reduce(tensor),
        "torch": lambda: dist.all_reduce(tensor),
        "sockets": lambda: without_waiting(link, tensor),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds + 2):
        for name, method in methods.items():
            tensor.fill_(1.0)
            dist.barrier()
            begin = time.perf_counter()
            method()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begin)
            if name != "sockets" and not torch.all(tensor == size):
                raise RuntimeError(f"{name}: wrong sum")
    return seconds


def extra_bytes(nbytes: int) -> int:
    """Peak of the tensor memory that one ring all-reduce takes beyond its tensor."""
    tensor = torch.ones(nbytes // 4)
    ring_all_reduce(tensor)
    with MemoryMeter() as memory:
        ring_all_reduce(tensor)
    return memory.peak_bytes


def rows() -> list[BenchRow]:
    from pardemo import World

    table: list[BenchRow] = []
    for ranks in (2, 4):
        with World(ranks) as world:
            for label, nbytes in SIZES.items():
                results = world.run(alternate, nbytes, 31 if nbytes <= 1 << 20 else 11)
                seconds = slowest(results)
                name = f"ring.n{ranks}.{label}"
                target = 1.0 if nbytes >= 16 << 20 else 0.7
                table.append(compare(name, seconds["ring"], seconds["torch"], "s", target, "gloo all_reduce"))
                floor = 0.7 if (ranks, label) == (4, "64MiB") else None
                table.append(compare(f"{name}.limit", seconds["ring"], seconds["sockets"], "s", floor, LIMIT))
                extra = max(world.run(extra_bytes, nbytes))
                table.append(compare(f"{name}.memory", [extra], [2 * nbytes / ranks], "B", 1.0, "2/N of the tensor"))
    return table
