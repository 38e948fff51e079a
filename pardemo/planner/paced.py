"""A small model whose layers wait instead of computing, trained by the package's own engines on ranks with links.

Its activations, weights and gradients are real, and so are their messages. Computation is known exactly and takes no
core: what a step takes longer is traffic, and what hides it.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import groups
from pardemo.collectives import ring_all_reduce
from pardemo.data_parallel import BucketedDataParallel
from pardemo.meters.pace import Paced
from pardemo.pipeline_parallel import Pipeline, Schedule, cut_by_layers, one_f_one_b
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.model.shape import Shape
from pardemo.planner.layouts.share.rank_parameters import layer_params
from pardemo.tensor_parallel import copy_to, reduce_from
from pardemo.zero import Zero1, Zero3

BF16 = 2  # bytes


class Weights(nn.Module):
    """``count`` weights with gradients, in the place of a product that would need a core."""

    def __init__(self, count: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean()


class Layer(nn.Module):
    """Attention and MLP, each half of the layer: f before it, g behind it, as in 1909.08053 3.

    Args:
        weights: of the layer, on this rank. forward_s, backward_s: what it takes.
        group: the ranks that share it.
    """

    def __init__(self, weights: int, forward_s: float, backward_s: float, group: dist.ProcessGroup):
        super().__init__()
        self.halves = nn.ModuleList(Paced(Weights(weights // 2), forward_s / 2, backward_s / 2) for _ in range(2))
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in self.halves:
            x = reduce_from(half(copy_to(x, group=self._group)), self._group)
        return x


def seconds(
    shape: Shape, layout: Layout, sequence: int, forward_s: float, backward_s: float, buckets: int, steps: int
) -> list[float]:
    """On every rank: what each of ``steps`` steps takes, after one that opens the connections.

    Args:
        buckets: in which a stage's gradients are summed, where states are not sharded.
    """
    with groups.Groups(groups.ParallelDims(tp=layout.tp, dp=layout.dp, pp=layout.pp)) as own_groups:
        count = int(layer_params(shape, layout))
        layers = [Layer(count, forward_s, backward_s, own_groups.tp) for _ in range(shape.layers)]
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
    """The stage in the engine that sums its gradients over the replicas."""
    if layout.dp == 1 or layout.pp > 1:
        return stage
    sharded = {"zero1": Zero1, "zero3": Zero3}.get(layout.sharding)
    if sharded is not None:
        return sharded(stage, partial(torch.optim.SGD, lr=0.0), group)
    return BucketedDataParallel(stage, group, bucket_bytes=bucket_bytes)


def _step(
    layout: Layout, shape: Shape, sequence: int, engine: nn.Module, own_groups: groups.Groups
) -> Callable[[], None]:
    x = torch.ones(layout.micro_batch * layout.accumulation, sequence, shape.hidden, dtype=torch.bfloat16)
    if layout.pp > 1:
        pipeline = Pipeline([engine], Schedule(one_f_one_b, layout.pp, layout.accumulation), F.mse_loss, own_groups.pp)

        def step() -> None:
            pipeline.step(x, x)
            # after all micro-batches, as Megatron does without overlap: a sum within the last backward would hold
            # up the gradient for the stage before
            ring_all_reduce(torch.cat([parameter.grad for parameter in engine.parameters()]), own_groups.dp)
            engine.zero_grad()

        return step

    def step() -> None:
        for part in x.chunk(layout.accumulation):
            engine(part.clone().requires_grad_()).mean().backward()
        if isinstance(engine, Zero1 | Zero3):
            engine.step()
        engine.zero_grad()

    return step
