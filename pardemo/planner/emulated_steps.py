"""Compares the time model's traffic, pipeline and overlap with steps on emulated clusters of this machine.

The layers of a small model wait, so that their computation is known and takes no core, and the links carry what they
are told to (:mod:`pardemo.cluster`). Nothing here is fitted: links and waits are what was asked for.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo import groups
from pardemo.cluster import Cluster, tiers
from pardemo.collectives import ring_all_reduce
from pardemo.data_parallel import BucketedDataParallel
from pardemo.meters.padding import PaddedModule
from pardemo.pipeline_parallel import Pipeline, Schedule, cut_by_layers, one_f_one_b
from pardemo.planner.hardware import ENDLESS, Gpu
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.per_rank import owned_layer
from pardemo.planner.layouts.programs import Program
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.step import predict_step
from pardemo.tensor_parallel import copy_to, reduce_from
from pardemo.zero import Zero1, Zero3

#: 4 layers of 1.3 MB each in bf16; activations of 512 KiB. At 100 Mbit/s that is 105 and 42 ms: long beside the tenths
#: of a millisecond in which one process wakes another, and beside what it takes to add such tensors.
SHAPE = Shape(layers=4, hidden=256, heads=4, kv_heads=4, ffn_hidden=768, vocabulary=1, gated=False, name="paced")
SEQUENCE = 1024
STEPS = 2
SOURCE = "emulated hosts on this machine"


@dataclass(frozen=True)
class Case:
    """A layout on a cluster, and how long its layers wait.

    Args:
        label: in the table. forward_s: of a layer on a rank; its backward pass takes twice that.
        buckets: in which gradients are summed beside the backward pass; a single one is full when that is over.
    """

    label: str
    cluster: Cluster
    layout: Layout
    forward_s: float = 0.020
    buckets: int = 1

    def __post_init__(self):
        if self.cluster.between_rate is None:
            raise ValueError(f"{self.label}: the cluster's hosts need a bandwidth between them, such as '200 Mbit/s'")

    @property
    def job(self) -> Job:
        """The job whose time is predicted: nothing but waits and links takes time."""
        cluster, between = self.cluster, self.cluster.between_rate
        assert between is not None  # else this case was refused
        inside = cluster.inside_rate or between
        gpu = Gpu("a rank that waits", ENDLESS, ENDLESS, ENDLESS, inside, "this machine")
        machine = Machine(gpu, cluster.size, cluster.ranks_per_host, between, 0.0, self.start_s, link_share=1.0)
        hidden = 1 - 1 / self.buckets  # of the backward pass: until the first bucket is full nothing is sent
        if self.layout.sharding == "zero3":
            hidden = 1.0
        program = Program("pardemo", layer_s=3 * self.forward_s, send_s=0.0, dp_overlap=hidden, gradient_bytes=2)
        return Job(SHAPE, machine, program, SEQUENCE)

    @property
    def start_s(self) -> float:
        """Start-up seconds of an all-reduce over two ranks: a comparison of the ranks, then the ring's two steps."""
        return 3 * self.cluster.latency_s

    @property
    def predicted_s(self) -> float:
        return predict_step(self.job, self.layout).seconds


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


def measure_step(case: Case) -> float:
    """Measures a step's seconds until its last rank is done: of several the one that other work disturbed least.

    Raises:
        OSError: links cannot be limited here.
    """
    from pardemo import World

    forward_s = case.forward_s
    with World(case.cluster.size, cluster=case.cluster, preload=[__name__]) as world:
        rank_seconds = world.run(
            measure_seconds, SHAPE, case.layout, SEQUENCE, forward_s, 2 * forward_s, case.buckets, STEPS, timeout_s=120
        )
    return min(max(of_ranks) for of_ranks in zip(*rank_seconds, strict=True))


def compare_steps(cases: Iterable[Case] = CASES) -> Iterator[tuple[Case, float, float]]:
    """Yields each case with its predicted and measured seconds; nothing where links cannot be limited."""
    if tiers.best_tier().name == "none":
        return
    for case in cases:
        yield case, case.predicted_s, measure_step(case)


BF16 = 2  # bytes


class Weights(nn.Module):
    """Has ``count`` weights with gradients, in place of a product that would need a core."""

    def __init__(self, count: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean()


class PaddedLayer(nn.Module):
    """Attention and MLP, each half of the layer: f before it, g behind it, as in 1909.08053 3.

    Args:
        weights: of the layer, on this rank. forward_s, backward_s: what it takes.
        group: the ranks that share it.
    """

    def __init__(self, weights: int, forward_s: float, backward_s: float, group: dist.ProcessGroup):
        super().__init__()
        halves = (PaddedModule(Weights(weights // 2), forward_s / 2, backward_s / 2) for _ in range(2))
        self.halves = nn.ModuleList(halves)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in self.halves:
            x = reduce_from(half(copy_to(x, group=self._group)), self._group)
        return x


def measure_seconds(
    shape: Shape, layout: Layout, sequence: int, forward_s: float, backward_s: float, buckets: int, steps: int
) -> list[float]:
    """Measures on every rank each of ``steps`` steps, after one that opens the connections.

    Args:
        buckets: in which a stage's gradients are summed, where states are not sharded.
    """
    with groups.Groups(groups.ParallelDims(tp=layout.tp, dp=layout.dp, pp=layout.pp)) as own_groups:
        count = int(owned_layer(shape, layout).total)
        layers = [PaddedLayer(count, forward_s, backward_s, own_groups.tp) for _ in range(shape.layers)]
        stage = cut_by_layers(layers, layout.pp)[dist.get_rank(own_groups.pp)]
        engine = _engine(layout, stage, own_groups.dp, len(stage) * count * BF16 // buckets)
        step, durations = _step(layout, shape, sequence, engine, own_groups), []
        for _ in range(steps + 1):
            dist.barrier()
            begin = time.perf_counter()
            step()
            durations.append(time.perf_counter() - begin)
        dist.barrier()
        if isinstance(engine, Zero1 | Zero3):
            engine.close()
    return durations[1:]


def _engine(layout: Layout, stage: nn.Module, group: dist.ProcessGroup, bucket_bytes: int) -> nn.Module:
    """Returns the stage in the engine that sums its gradients over the replicas."""
    if layout.dp == 1 or layout.pp > 1:
        return stage
    sharded: Any = {"zero1": Zero1, "zero3": Zero3}.get(layout.sharding)
    if sharded is not None:
        return sharded(stage, partial(torch.optim.SGD, lr=0.0), group)
    return BucketedDataParallel(stage, group, bucket_bytes=bucket_bytes)


def _step(
    layout: Layout, shape: Shape, sequence: int, engine: nn.Module, own_groups: groups.Groups
) -> Callable[[], None]:
    x = torch.ones(layout.micro_batch * layout.accumulation, sequence, shape.hidden, dtype=torch.bfloat16)
    if layout.pp > 1:
        pipeline = Pipeline(
            [engine], Schedule(one_f_one_b, layout.pp, layout.accumulation), nn.MSELoss(), own_groups.pp
        )

        def pipelined() -> None:
            pipeline.step(x, x)
            # after all micro-batches, as Megatron does without overlap: a sum within the last backward would hold
            # up the gradient for the stage before
            gradients = [parameter.grad for parameter in engine.parameters() if parameter.grad is not None]
            ring_all_reduce(torch.cat(gradients), own_groups.dp)
            engine.zero_grad()

        return pipelined

    def step() -> None:
        for part in x.chunk(layout.accumulation):
            engine(part.clone().requires_grad_()).mean().backward()
        if isinstance(engine, Zero1 | Zero3):
            engine.step()
        engine.zero_grad()

    return step
