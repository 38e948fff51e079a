"""Emulated links against what they were asked for: all-reduces over the physical limit, hosts used and not, set-up."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.bench import BenchRow, compare, slowest
from pardemo.cluster import Cluster
from pardemo.collectives import hierarchical_all_reduce, parameter_server_all_reduce, ring_all_reduce
from pardemo.formulas import communication
from pardemo.groups import Groups, ParallelDims

BETWEEN, RATE = "400 Mbit/s", 50e6
NBYTES = 8 << 20
ROUNDS = 5
RANKS = {"pacing": {2: 0.05, 4: 0.05, 8: 0.1}, "namespaces": {2: 0.1, 4: 0.1, 8: 0.1}}  # how far from the limit
SERVER_WITHIN = 0.1
START_S = {"pacing": 0.2, "namespaces": 2.0}  # eight ranks on two hosts


def all_reduces(rounds: int) -> dict[str, list[float]]:
    """On every rank: seconds of each method, by turns, until all ranks have the sum."""
    tensor = torch.empty(NBYTES // 4)
    return _by_turns(
        {
            "ring": lambda: ring_all_reduce(tensor),
            "torch": lambda: dist.all_reduce(tensor),
            "server": lambda: parameter_server_all_reduce(tensor),
        },
        tensor,
        rounds,
    )


def by_hosts(hosts: int, rounds: int) -> dict[str, list[float]]:
    """One ring over all ranks, and the all-reduce by hosts."""
    tensor = torch.empty(NBYTES // 4)
    with Groups(ParallelDims(tp=dist.get_world_size() // hosts, dp=hosts)) as groups:
        methods = {
            "flat": lambda: ring_all_reduce(tensor),
            "by hosts": lambda: hierarchical_all_reduce(tensor, groups.tp, groups.dp),
        }
        return _by_turns(methods, tensor, rounds)


def _by_turns(methods: dict[str, Callable], tensor: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    size = dist.get_world_size()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds + 1):
        for name, method in methods.items():
            tensor.fill_(1.0)
            dist.barrier()
            begin = time.perf_counter()
            method()
            if turn >= 1:
                seconds[name].append(time.perf_counter() - begin)
            if not torch.all(tensor == size):
                raise RuntimeError(f"{name}: wrong sum")
    return seconds


def rows() -> list[BenchRow]:
    return [row for tier in RANKS if _works(tier) for row in _of_tier(tier)]


def _works(tier: str) -> bool:
    from pardemo import World

    try:
        World(1, cluster=Cluster(hosts=1, tier=tier)).close()
        return True
    except ValueError:
        return False


def _of_tier(tier: str) -> list[BenchRow]:
    from pardemo import World

    table = []
    for ranks, within in RANKS[tier].items():
        with World(ranks, cluster=Cluster(hosts=ranks, between=BETWEEN, tier=tier)) as world:
            seconds = slowest(world.run(all_reduces, ROUNDS))
        ring = communication.ring_all_reduce(NBYTES, ranks).sent / RATE
        server = 2 * communication.parameter_server(NBYTES, ranks).sent / RATE
        name = f"cluster.{tier}.n{ranks}"
        limit = f"2(N−1)/N·S/B at {BETWEEN}"
        table.append(compare(f"{name}.ring", seconds["ring"], [ring] * ROUNDS, "s", 1.0, limit, within))
        table.append(
            compare(
                f"{name}.torch", seconds["torch"], [ring] * ROUNDS, "s", None, f"{limit}; in the place of ours: gloo"
            )
        )
        note = f"2(N−1)·S/B at {BETWEEN}"
        table.append(compare(f"{name}.server", seconds["server"], [server] * ROUNDS, "s", 1.0, note, SERVER_WITHIN))
    two = Cluster(hosts=2, ranks_per_host=2, between=BETWEEN, inside="4 Gbit/s", tier=tier)
    with World(4, cluster=two) as world:
        seconds = slowest(world.run(by_hosts, 2, ROUNDS))
    note = "one ring over both hosts; by bytes 1.5 between, and the time inside"
    table.append(compare(f"cluster.{tier}.by_hosts", seconds["by hosts"], seconds["flat"], "s", None, note))
    starts = [_start_s(tier) for _ in range(4)][1:]
    table.append(compare(f"cluster.{tier}.start", starts, [START_S[tier]] * 3, "s", 1.0, "the time that it may take"))
    return table


def _start_s(tier: str) -> float:
    from pardemo import World

    begin = time.perf_counter()
    with World(8, cluster=Cluster(hosts=2, ranks_per_host=4, between=BETWEEN, tier=tier)) as world:
        world.run(dist.get_rank)
        return time.perf_counter() - begin
