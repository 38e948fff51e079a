"""Collectives in few bits against gloo's in fp32, two hosts with 1 Gbit/s between them: seconds of 16 MiB of fp32."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.bench import BenchRow, by_turns, compare, slowest
from pardemo.cluster import Cluster

RATE, NUMBERS, ROUNDS = "1 Gbit/s", 4 << 20, 5


def alternate() -> dict[str, list[float]]:
    """On every rank: seconds of each, by turns."""
    from pardemo.low_precision import quantised_all_gather, quantised_reduce_scatter

    ranks = dist.get_world_size()
    tensor = torch.randn(NUMBERS)
    shard, out, part = tensor[: NUMBERS // ranks], torch.empty(NUMBERS), torch.empty(NUMBERS // ranks)
    ways: dict[str, Callable[[], object]] = {
        "gather": lambda: dist.all_gather_single(out, shard),
        "gather int8": lambda: quantised_all_gather(shard, format="int8"),
        "gather mxfp8": lambda: quantised_all_gather(shard, format="mxfp8"),
        "scatter": lambda: dist.reduce_scatter_single(part, tensor),
        "scatter int8": lambda: quantised_reduce_scatter(tensor, format="int8"),
        "scatter mxfp8": lambda: quantised_reduce_scatter(tensor, format="mxfp8"),
    }
    return by_turns(ways, ROUNDS, warm=1)


def rows() -> list[BenchRow]:
    from pardemo import World

    with World(2, cluster=Cluster(hosts=2, between=RATE)) as world:
        seconds = slowest(world.run(alternate))
    table = []
    for what, peer in (("gather", "all-gather"), ("scatter", "reduce-scatter")):
        for name in ("int8", "mxfp8"):
            ours = seconds[f"{what} {name}"]
            note = f"gloo's {peer} in fp32, {RATE}"
            table.append(compare(f"low-precision.{what}.{name}", ours, seconds[what], "s", 1.0, note))
    return table
