"""Several engines at once on one group: each exchanges with its own other half, whatever the order on a rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pardemo import RankTimeout, World
from pardemo.data_parallel import BucketedDataParallel
from pardemo.pipeline_parallel import Pipeline, Schedule, interleaved
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3

SGD = partial(torch.optim.SGD, lr=0.1)
STEPS = 3
KINDS = {"ddp": None, "zero 1": Zero1, "zero 2": Zero2, "zero 3": Zero3}


def stack(seed):
    """Layers of one size on purpose: mixed up, they would fit."""
    return gpt.seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), seed)


class Wrapped:
    """A model under one kind of data parallelism, or none: forward, step, and its weights."""

    def __init__(self, kind, seed):
        self.net = stack(seed)
        self.engine = self.net
        if kind == "ddp":
            self.engine = BucketedDataParallel(self.net, bucket_bytes=1)
        elif kind is not None:
            self.engine = KINDS[kind](self.net, SGD)
        self.sharded = kind not in (None, "ddp")
        self.optimizer = None if self.sharded else SGD(self.net.parameters())

    def step(self):
        if self.sharded:
            self.engine.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def zero_grad(self):
        (self.engine if self.sharded else self.optimizer).zero_grad()

    def weights(self):
        if not self.sharded:
            return torch.cat([p.detach().flatten() for p in self.net.parameters()])
        with self.engine.full_parameters():
            return torch.cat([p.detach().flatten() for p in self.net.parameters()])


def data(step, rank):
    return gpt.numbers(4, 8, seed=10 * step + rank)


def one_in_the_other(models, step, ranks):
    """Two engines in one backward."""
    first, second = models
    for rank in ranks:
        (second.engine(first.engine(data(step, rank))).square().mean() / len(ranks)).backward()
    for model in models:
        model.step()


def apart(models, step, ranks):
    """Two engines in one loop; one is stepped while the other's gradients are still to come."""
    first, second = models
    for rank in ranks:
        (first.engine(data(step, rank)).square().mean() / len(ranks)).backward()
    for rank in ranks:
        (second.engine(data(step, rank)).sin().mean() / len(ranks)).backward()
    first.step()
    second.step()


def one_loss(models, step, ranks):
    """Two engines side by side in one backward, which takes them in the other order on every other rank.

    But for one of stage 3: its forward passes wait for the other ranks' parameters, as those of another one do, and
    DDP's second one, in which the ranks agree on the buckets. So one order is needed.
    """
    gathers = any(isinstance(model.engine, Zero3) for model in models)
    for rank in ranks:
        turned = rank % 2 and not gathers
        outputs = [model.engine(data(step, rank)) for model in (models[::-1] if turned else models)]
        ((outputs[0] * outputs[1]).mean() / len(ranks)).backward()
    for model in models:
        model.step()


def gan(models, step, ranks):
    """A generator and a critic: the generator's backward leaves gradients in the critic, which are discarded."""
    generator, critic = models
    for rank in ranks:
        fake = generator.engine(data(step, rank))
        ((critic.engine(data(step, rank + 5)).mean() - critic.engine(fake.detach()).mean()) / len(ranks)).backward()
    critic.step()
    for rank in ranks:
        (critic.engine(generator.engine(data(step, rank))).square().mean() / len(ranks)).backward()
    generator.step()
    critic.zero_grad()


PAIRS = [
    ("ddp", "zero 2"),
    ("zero 3", "ddp"),
    ("zero 1", "zero 2"),
    ("zero 2", "zero 3"),
    ("zero 3", "zero 3"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kinds", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("loop", [one_in_the_other, apart, one_loss, gan])
def test_two_engines_on_one_group_equal_one_process(rank, world_size, loop, kinds):
    models = [Wrapped(kind, seed) for seed, kind in enumerate(kinds)]
    plain = [Wrapped(None, seed) for seed in range(len(kinds))]
    for step in range(STEPS):
        loop(models, step, [rank])
        loop(plain, step, range(world_size))
    for mine, theirs in zip(models, plain, strict=True):
        torch.testing.assert_close(mine.weights(), theirs.weights(), atol=1e-6, rtol=0)


def forward(turned):
    models = [Wrapped("zero 3", seed) for seed in (0, 1)]
    for model in models[::-1] if dist.get_rank() in turned else models:
        model.engine(data(0, 0))


def test_two_engines_of_stage_3_used_in_another_order_are_told_apart():
    waits = r"rank %d waits for rank %d: all_gather of 0, .* of ZeRO-3 \d+"
    with World(2) as world:
        world.run(forward, [])  # what is slow the first time is over before the limit
        with pytest.raises(RankTimeout, match=f"{waits % (0, 1)}; {waits % (1, 0)}"):
            world.run(forward, [1], timeout_s=4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_of_engines_equals_one_process(rank, world_size, kind):
    """Two stages on each rank of a pipeline of one: engines of both exchange while the other computes."""
    models, plain = [Wrapped(kind, seed) for seed in (0, 1)], [Wrapped(None, seed) for seed in (0, 1)]
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    schedule = Schedule(interleaved, ranks=1, micro_batches=2, chunks=2)
    pipeline = Pipeline([model.engine for model in models], schedule, nn.functional.mse_loss, alone)
    for step in range(STEPS):
        pipeline.step(data(step, rank), data(step, rank + 5))
        for r in range(world_size):
            y = plain[1].net(plain[0].net(data(step, r)))
            (nn.functional.mse_loss(y, data(step, r + 5)) / world_size).backward()
        for model in (*models, *plain):
            model.step()
    for mine, theirs in zip(models, plain, strict=True):
        torch.testing.assert_close(mine.weights(), theirs.weights(), atol=1e-6, rtol=0)
