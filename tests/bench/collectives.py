"""The own collectives against gloo's, against what bounds them, over limited links, and in few bits."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from bench import bound
from bench.table import BenchRow, by_turns, compare, on_ranks, slowest
from pardemo import World, project
from pardemo.cluster import Cluster
from pardemo.collectives import hierarchical_all_reduce, parameter_server_all_reduce, ring_all_reduce
from pardemo.formulas import communication
from pardemo.groups import Groups, ParallelDims
from pardemo.meters import MemoryMeter

Times = dict[str, list[float]]
SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "64MiB": 64 << 20}
BOUNDED = 16 << 20  # from here on bytes bound an all-reduce, below the messages' latency
BOUND = (
    "the bound of any all-reduce over sockets: 2(N−1)·S bytes into the kernel and out of it, (N−1)·S added, in one "
    "thread that never waits; seconds of a core by the cores"
)
BETWEEN, RATE, LIMITED, ROUNDS = "400 Mbit/s", 50e6, 8 << 20, 5  # LIMITED bytes over links of RATE bytes a second
#: tier of the cluster -> seconds that the start of eight ranks on two hosts may take, ranks -> how far from the limit
TIERS = {"pacing": (0.2, {2: 0.05, 4: 0.05, 8: 0.1}), "namespaces": (2.0, {2: 0.1, 4: 0.1, 8: 0.1})}


def all_reduces(nbytes: int, rounds: int, names: tuple[str, ...], warm: int = 2) -> Times:
    """On every rank: seconds of ``ring``, ``torch`` or ``server`` until all ranks have the sum.

    ``work``, which is measured from ``BOUNDED`` bytes on, is what the bound takes of a core.
    """
    tensor, works, size = torch.empty(nbytes // 4), [], dist.get_world_size()
    with bound.to_itself() as (out, into):
        methods = {
            "ring": lambda: ring_all_reduce(tensor),
            "torch": lambda: dist.all_reduce(tensor),
            "server": lambda: parameter_server_all_reduce(tensor),
            "work": lambda: works.append(bound.work(out, into, tensor, size)) if nbytes >= BOUNDED else None,
        }
        seconds = _sums({name: methods[name] for name in names}, tensor, rounds, warm)
    return seconds | ({"work": works[warm:]} if "work" in names else {})


def by_hosts(hosts: int) -> Times:
    """On every rank: seconds of one ring over all ranks, and of the all-reduce by hosts."""
    tensor = torch.empty(LIMITED // 4)
    with Groups(ParallelDims(tp=dist.get_world_size() // hosts, dp=hosts)) as groups:
        methods = {
            "flat": lambda: ring_all_reduce(tensor),
            "by hosts": lambda: hierarchical_all_reduce(tensor, groups.tp, groups.dp),
        }
        return _sums(methods, tensor, ROUNDS, warm=1)


def _sums(methods: dict[str, Callable[[], object]], tensor: torch.Tensor, rounds: int, warm: int) -> Times:
    def check(name: str) -> None:
        if name != "work" and not torch.all(tensor == dist.get_world_size()):
            raise RuntimeError(f"{name}: wrong sum")

    return by_turns(methods, rounds, warm, before=lambda: tensor.fill_(1.0), after=check)


def extra_bytes(nbytes: int) -> int:
    """Peak of the tensor memory that one ring all-reduce takes beyond its tensor."""
    tensor = torch.ones(nbytes // 4)
    ring_all_reduce(tensor)
    with MemoryMeter() as memory:
        ring_all_reduce(tensor)
    return memory.peak_bytes


def ring() -> Iterator[BenchRow]:
    """The ring all-reduce against torch's gloo all_reduce, and both beside what bounds any all-reduce over sockets."""
    cores = project.available_cores()
    for ranks in (2, 4):
        with World(ranks) as world:
            for label, nbytes in SIZES.items():
                results = world.run(all_reduces, nbytes, 31 if nbytes <= 1 << 20 else 11, ("ring", "torch", "work"))
                least = bound.seconds([of_rank.pop("work") for of_rank in results], cores)
                seconds, name = slowest(results), f"ring.n{ranks}.{label}"
                target = 1.0 if nbytes >= BOUNDED else 0.7
                yield compare(name, seconds["ring"], seconds["torch"], "s", target, "gloo all_reduce")
                if least:
                    share = 0.6 if ranks > cores and label == "64MiB" else None
                    yield compare(f"{name}.bound", seconds["ring"], least, "s", share, BOUND)
                    yield compare(f"{name}.bound.gloo", seconds["torch"], least, "s", None, f"gloo; {BOUND}")
                extra = max(world.run(extra_bytes, nbytes))
                yield compare(f"{name}.memory", [extra], [2 * nbytes / ranks], "B", 1.0, "2/N of the tensor")


def clusters() -> Iterator[BenchRow]:
    """Emulated links against what was asked for: all-reduces over the limit, hosts used and not, set-up."""
    for tier, (start_s, within) in TIERS.items():
        try:
            World(1, cluster=Cluster(hosts=1, tier=tier)).close()
        except ValueError:  # not on this machine
            continue
        for ranks, ring_within in within.items():
            with World(ranks, cluster=Cluster(hosts=ranks, between=BETWEEN, tier=tier)) as world:
                seconds = slowest(world.run(all_reduces, LIMITED, ROUNDS, ("ring", "torch", "server"), 1))
            limit_s = communication.ring_all_reduce(LIMITED, ranks).sent / RATE
            server_s = 2 * communication.parameter_server(LIMITED, ranks).sent / RATE
            limit, of_server = (f"{formula} at {BETWEEN}" for formula in ("2(N−1)/N·S/B", "2(N−1)·S/B"))
            for way, least_s, target, note, off in (
                ("ring", limit_s, 1.0, limit, ring_within),
                ("torch", limit_s, None, f"{limit}; in the place of ours: gloo", None),
                ("server", server_s, 1.0, of_server, 0.1),
            ):
                name = f"cluster.{tier}.n{ranks}.{way}"
                yield compare(name, seconds[way], [least_s] * ROUNDS, "s", target, note, off)
        two = Cluster(hosts=2, ranks_per_host=2, between=BETWEEN, inside="4 Gbit/s", tier=tier)
        note = "one ring over both hosts; by bytes 1.5 between, and the time inside"
        row = (f"cluster.{tier}.by_hosts", "by hosts", "flat", None, note)
        yield from on_ranks(by_hosts, {"": (2,)}, [row], ranks=4, cluster=two)
        starts = [_start_s(tier) for _ in range(4)][1:]
        yield compare(f"cluster.{tier}.start", starts, [start_s] * 3, "s", 1.0, "the time that it may take")


def _start_s(tier: str) -> float:
    begin = time.perf_counter()
    with World(8, cluster=Cluster(hosts=2, ranks_per_host=4, between=BETWEEN, tier=tier)) as world:
        world.run(dist.get_rank)
        return time.perf_counter() - begin


def low_precision() -> Iterator[BenchRow]:
    """Collectives in few bits against gloo's in fp32, two hosts with 1 Gbit/s between them: seconds of 16 MiB."""
    rate = "1 Gbit/s"
    rows = [
        (f"low-precision.{way}.{bits}", f"{way} {bits}", way, 1.0, f"gloo's {peer} in fp32, {rate}")
        for way, peer in (("gather", "all-gather"), ("scatter", "reduce-scatter"))
        for bits in ("int8", "mxfp8")
    ]
    return on_ranks(quantised, {"": ()}, rows, cluster=Cluster(hosts=2, between=rate))


def quantised() -> Times:
    """On every rank: seconds of each."""
    from pardemo.low_precision import quantised_all_gather, quantised_reduce_scatter

    numbers, ranks = 4 << 20, dist.get_world_size()
    tensor = torch.randn(numbers)
    shard, out, part = tensor[: numbers // ranks], torch.empty(numbers), torch.empty(numbers // ranks)
    ways = {
        "gather": lambda: dist.all_gather_single(out, shard),
        "gather int8": lambda: quantised_all_gather(shard, format="int8"),
        "gather mxfp8": lambda: quantised_all_gather(shard, format="mxfp8"),
        "scatter": lambda: dist.reduce_scatter_single(part, tensor),
        "scatter int8": lambda: quantised_reduce_scatter(tensor, format="int8"),
        "scatter mxfp8": lambda: quantised_reduce_scatter(tensor, format="mxfp8"),
    }
    return by_turns(ways, 5, warm=1)
