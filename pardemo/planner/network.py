"""The time model's terms of traffic, pipeline and overlap beside steps on emulated clusters of this machine.

The layers of a small model wait, so their computation is known (:mod:`pardemo.planner.paced`), and the links carry what
they are told to (:mod:`pardemo.cluster`). Nothing here is fitted: links and waits are what was asked for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pardemo.cluster import Cluster, tiers
from pardemo.planner.hardware import Gpu
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.job.machines import Machine
from pardemo.planner.layouts.job.stacks import Stack
from pardemo.planner.layouts.model.shape import Shape
from pardemo.planner.layouts.price.step import step

#: 4 layers of 1.3 MB each in bf16; activations of 512 KiB. At 100 Mbit/s that is 105 and 42 ms: long beside the tenths
#: of a millisecond in which one process wakes another, and beside what it takes to add such tensors.
SHAPE = Shape(layers=4, hidden=256, heads=4, groups=4, middle=768, vocabulary=1, gated=False, name="paced")
SEQUENCE = 1024
STEPS = 2
SOURCE = "emulated hosts on this machine"
ENDLESS = 1e30  # bytes or operations a second: takes no time


@dataclass(frozen=True)
class Case:
    """A layout on a cluster.

    Args:
        what: its label in the table. forward_s: of a layer on a rank; its backward pass takes twice that.
        buckets: in which gradients are summed beside the backward pass; a single one is full when that is over.
    """

    what: str
    cluster: Cluster
    layout: Layout
    forward_s: float = 0.020
    buckets: int = 1

    def __post_init__(self):
        if self.cluster.between_rate is None:
            raise ValueError(f"{self.what}: the cluster's hosts need a bandwidth between them, such as '200 Mbit/s'")

    @property
    def job(self) -> Job:
        """The job whose time is predicted: nothing but waits and links takes time."""
        cluster = self.cluster
        inside = cluster.inside_rate or cluster.between_rate
        gpu = Gpu("a rank that waits", ENDLESS, ENDLESS, ENDLESS, inside, "this machine")
        machine = Machine(
            gpu, cluster.size, cluster.ranks_per_host, cluster.between_rate, 0.0, self.start_s, link_share=1.0
        )
        hidden = 1 - 1 / self.buckets  # of the backward pass: until the first bucket is full nothing is sent
        if self.layout.sharding == "zero3":
            hidden = 1.0
        stack = Stack("pardemo", layer_s=3 * self.forward_s, send_s=0.0, hidden=hidden, gradient=2)
        return Job(SHAPE, machine, stack, SEQUENCE)

    @property
    def start_s(self) -> float:
        """Start-up seconds of an all-reduce over two ranks: a comparison of the ranks, then the ring's two steps."""
        return 3 * self.cluster.latency_s

    @property
    def predicted_s(self) -> float:
        return step(self.job, self.layout).seconds


def _hosts(hosts: int, between: str, ranks: int = 1, **more: str) -> Cluster:
    return Cluster(hosts=hosts, ranks_per_host=ranks, between=between, **more)


#: The bandwidth of host adapters, hosts, and what runs over them.
CASES = (
    Case("TP 2", _hosts(2, "100 Mbit/s"), Layout(tp=2)),
    Case("TP 2, 10 ms away", _hosts(2, "200 Mbit/s", latency="10 ms"), Layout(tp=2)),
    Case("TP 4", _hosts(4, "100 Mbit/s"), Layout(tp=4)),
    Case("DP 4", _hosts(4, "100 Mbit/s"), Layout(dp=4)),
    Case("DP 2, 8 buckets", _hosts(2, "100 Mbit/s"), Layout(dp=2), buckets=8),
    Case("PP 2, 4 micro-batches", _hosts(2, "100 Mbit/s"), Layout(pp=2, accumulation=4)),
    Case("PP 4, 8 micro-batches", _hosts(4, "200 Mbit/s"), Layout(pp=4, accumulation=8)),
    Case("ZeRO-1, DP 4", _hosts(4, "100 Mbit/s"), Layout(dp=4, sharding="zero1")),
    Case("ZeRO-3, DP 2", _hosts(2, "100 Mbit/s"), Layout(dp=2, sharding="zero3")),
    Case("ZeRO-3, DP 4", _hosts(4, "200 Mbit/s"), Layout(dp=4, sharding="zero3"), forward_s=0.060),
    Case(
        "TP 2 inside × DP 2", _hosts(2, "100 Mbit/s", 2, inside="250 Mbit/s"), Layout(tp=2, dp=2),
    ),
    Case(
        "PP 2 × DP 2 inside", _hosts(2, "100 Mbit/s", 2, inside="250 Mbit/s"), Layout(pp=2, dp=2, accumulation=4),
    ),
)  # fmt: skip


def measure(case: Case, steps: int = STEPS) -> float:
    """Seconds of a step: the one that other work on this machine disturbed least, until its last rank is done.

    Raises:
        OSError: links cannot be limited here.
    """
    from pardemo import World
    from pardemo.planner import paced

    forward_s = case.forward_s
    with World(case.cluster.size, cluster=case.cluster, preload=[paced.__name__]) as world:
        rank_seconds = world.run(
            paced.seconds, SHAPE, case.layout, SEQUENCE, forward_s, 2 * forward_s, case.buckets, steps, timeout_s=120
        )
    return min(map(max, zip(*rank_seconds, strict=True)))


def compare(cases: Iterable[Case] = CASES) -> Iterator[tuple[Case, float, float]]:
    """Each case, its predicted and its measured seconds; none where links cannot be limited."""
    if tiers.found().name == "none":
        return
    for case in cases:
        yield case, case.predicted_s, measure(case)
