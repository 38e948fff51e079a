"""The ring all-reduce against torch's gloo all_reduce, and against plain sockets that only pump the bytes."""

import threading
import time

import torch
import torch.distributed as dist

from pardemo.bench import Row, compare, slowest
from pardemo.collectives import ring_all_reduce
from pardemo.links import Link
from pardemo.meters import MemoryMeter

SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "64MiB": 64 << 20}
BLOCK = 1 << 20  # what the plain sockets hand to the kernel at once


def _pump(link: Link, nbytes: int, outgoing: memoryview, incoming: memoryview) -> None:
    """Plain sockets: ``nbytes`` to the successor, as many from the predecessor, at the same time; no adding.

    They come from ``outgoing`` and go to ``incoming``, over and over: one block stays in the cache, a memory as
    large as the tensor does not.
    """

    def send() -> None:
        left = nbytes
        while left:
            now, at = min(BLOCK, left, len(outgoing)), (nbytes - left) % len(outgoing)
            left -= link._out.send(outgoing[at : at + now])

    sender = threading.Thread(target=send)
    sender.start()
    left = nbytes
    while left:
        at = (nbytes - left) % len(incoming)
        left -= link._in.recv_into(incoming[at : at + min(BLOCK, left)])
    sender.join()


def alternate(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: seconds of each method, by turns."""
    size = dist.get_world_size()
    link = Link(dist.group.WORLD)  # connections of its own, made as the ring makes its
    blocks = memoryview(bytearray(BLOCK)), memoryview(bytearray(BLOCK))
    whole = memoryview(bytearray(nbytes))
    moved = int(2 * (size - 1) / size * nbytes)
    tensor = torch.empty(nbytes // 4)
    methods = {
        "ring": lambda: ring_all_reduce(tensor),
        "torch": lambda: dist.all_reduce(tensor),
        "sockets": lambda: _pump(link, moved, *blocks),
        "sockets over the tensor": lambda: _pump(link, moved, whole, whole),
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
            if not name.startswith("sockets") and not torch.all(tensor == size):
                raise RuntimeError(f"{name}: wrong sum")
    return seconds


def extra_bytes(nbytes: int) -> int:
    """Peak of the tensor memory that one ring all-reduce takes beyond its tensor."""
    tensor = torch.ones(nbytes // 4)
    ring_all_reduce(tensor)
    with MemoryMeter() as memory:
        ring_all_reduce(tensor)
    return memory.peak_bytes


def rows() -> list[Row]:
    from pardemo import World

    table: list[Row] = []
    for ranks in (2, 4):
        with World(ranks) as world:
            for label, nbytes in SIZES.items():
                results = world.run(alternate, nbytes, 31 if nbytes <= 1 << 20 else 11)
                seconds = slowest(results)
                name = f"ring.n{ranks}.{label}"
                target = 1.0 if nbytes >= 16 << 20 else 0.7
                table.append(compare(name, seconds["ring"], seconds["torch"], "s", target, "gloo all_reduce"))
                floor = 0.7 if (ranks, label) == (4, "64MiB") else None
                table.append(compare(f"{name}.limit", seconds["ring"], seconds["sockets"], "s", floor, "plain sockets"))
                # the block stays in the cache; over a tensor they read and write memory, as every all-reduce has to
                over, told = seconds["sockets over the tensor"], "plain sockets, over a tensor's memory"
                table.append(compare(f"{name}.limit.memory_too", seconds["ring"], over, "s", None, told))
                extra = max(world.run(extra_bytes, nbytes))
                table.append(compare(f"{name}.memory", [extra], [2 * nbytes / ranks], "B", 1.0, "2/N of the tensor"))
    return table
