"""The ring all-reduce against torch's gloo all_reduce, and both beside what bounds any all-reduce over sockets."""

import time

import torch
import torch.distributed as dist

from pardemo import project
from pardemo.bench import BenchRow, bound, compare, slowest
from pardemo.collectives import ring_all_reduce
from pardemo.meters import MemoryMeter

SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "64MiB": 64 << 20}
BOUNDED = 16 << 20  # from here on bytes bound an all-reduce, below the messages' latency
BOUND = (
    "the bound of any all-reduce over sockets: 2(N−1)·S bytes into the kernel and out of it, (N−1)·S added, in one "
    "thread that never waits; seconds of a core by the cores"
)


def alternate(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: seconds of each method, by turns; ``work`` is the bound's, in seconds of a core."""
    size = dist.get_world_size()
    tensor = torch.empty(nbytes // 4)
    methods = {"ring": lambda: ring_all_reduce(tensor), "torch": lambda: dist.all_reduce(tensor)}
    seconds: dict[str, list[float]] = {name: [] for name in (*methods, "work")}
    with bound.to_itself() as (out, into):
        for turn in range(rounds + 2):
            for name, method in methods.items():
                tensor.fill_(1.0)
                dist.barrier()
                begin = time.perf_counter()
                method()
                if turn >= 2:
                    seconds[name].append(time.perf_counter() - begin)
                if not torch.all(tensor == size):
                    raise RuntimeError(f"{name}: wrong sum")
            if nbytes >= BOUNDED:
                tensor.fill_(1.0)
                dist.barrier()
                work_s = bound.work(out, into, tensor, size)
                if turn >= 2:
                    seconds["work"].append(work_s)
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
                if nbytes >= BOUNDED:
                    least = bound.seconds([of_rank["work"] for of_rank in results], project.available_cores())
                    share = 0.6 if ranks > project.available_cores() and nbytes == SIZES["64MiB"] else None
                    table.append(compare(f"{name}.bound", seconds["ring"], least, "s", share, BOUND))
                    table.append(compare(f"{name}.bound.gloo", seconds["torch"], least, "s", None, f"gloo; {BOUND}"))
                extra = max(world.run(extra_bytes, nbytes))
                table.append(compare(f"{name}.memory", [extra], [2 * nbytes / ranks], "B", 1.0, "2/N of the tensor"))
    return table
