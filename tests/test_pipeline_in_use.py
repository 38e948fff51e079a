"""What training scripts do with a pipeline beside its steps: right as in one process, or refused in one line."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F

from pardemo.pipeline_parallel import Pipeline, Schedule, exchange, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from pardemo.zero.gradient_norm import clip_grad_norm_

WIDTH, BATCH, M = 6, 12, 6
#: double precision: what remains is the order of a few additions
EXACT = {"rtol": 1e-11, "atol": 1e-11}
ORDERS = [(gpipe, 1), (one_f_one_b, 1), (interleaved, 2), (zb_h1, 1), (zb_v, 2)]
every_order = pytest.mark.parametrize(("order", "chunks"), ORDERS)


def seeded(build, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double()


def plain_stages(build, stages):
    return [seeded(lambda number=number: build(number, stages), number) for number in range(stages)]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, WIDTH, generator=generator, dtype=torch.float64)


def tanh(number, stages):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def relu_at_both_ends(number, stages):
    """Activations in place where the stages are cut: an odd stage changes what it is handed, and what it hands on."""
    inner = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    odd = nn.ReLU(inplace=True), *inner, nn.LeakyReLU(0.3, inplace=True)
    return nn.Sequential(*odd) if number % 2 else nn.Sequential(*inner)


class Doubles(nn.Module):
    """Changes its input in place so that a second run on it would give another result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.mul_(2))


def compare(world, build, order, chunks, train, wrap=lambda stage: stage, **options):
    """``train(run, stages)`` in the ranks and in one process; ``run(step)`` is forward and backward of a batch."""
    size = world.size

    def check():
        schedule = Schedule(order, size, M, chunks)
        mine = [plain_stages(build, schedule.stages)[s] for s in schedule.stages_of(dist.get_rank())]
        pipeline = Pipeline([wrap(stage) for stage in mine], schedule, F.mse_loss, **options)

        def run(step):
            x, y = batch(step)
            return pipeline.step(x, y)

        told = train(run, nn.ModuleList(mine))
        stages = dict(zip(schedule.stages_of(dist.get_rank()), mine, strict=True))
        return {s: [p.detach() for p in stage.parameters()] for s, stage in stages.items()}, told

    def alone(step):
        x, y = batch(step)
        for stage in stages:
            x = stage(x)
        loss = F.mse_loss(x, y)
        loss.backward()
        return loss

    stages = plain_stages(build, size * chunks)
    expected = train(alone, nn.ModuleList(stages))
    for found, told in world.run(check):
        assert told == pytest.approx(expected)
        for number, values in found.items():
            for mine, right in zip(values, stages[number].parameters(), strict=True):
                torch.testing.assert_close(mine, right.detach(), **EXACT)


def some_steps(run, stages):
    optimizer = torch.optim.SGD(stages.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        run(step)
        optimizer.step()
        optimizer.zero_grad()


def errors(function, *args):
    """What it raises on this rank, if anything; the ranks stay for the next test, whose links are new ones."""
    told = ""
    try:
        function(*args)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    dist.barrier()
    exchange.abandon(dist.group.WORLD)
    return told


# ---------------------------------------------------------------- in place


@every_order
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_activations_in_place_at_a_stages_beginning_and_end(world_of, ranks, order, chunks):
    compare(world_of(ranks), relu_at_both_ends, order, chunks, some_steps)


@every_order
def test_an_input_that_is_changed_in_place(world_of, order, chunks):
    compare(world_of(2), lambda number, stages: Doubles(), order, chunks, some_steps)


def test_under_checkpointing_a_stage_that_changes_its_input_is_refused(world_of):
    def check():
        pipeline = Pipeline([Doubles().double()], Schedule(gpipe, 2, M), F.mse_loss, checkpointing=True)
        pipeline.step(*batch(0))

    told = world_of(2).run(errors, check)
    assert any(one.startswith("RuntimeError: stage ") for one in told), told
    words = "changes its input in place: checkpointing would run it again on what is left"
    assert all(words in one or one.startswith("Connection") for one in told), told


class Lazy(nn.Module):
    """Hands on a negative that is not carried out, and so is the gradient that comes back."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.complex(self.linear(x.real), self.linear(x)).conj().imag


@every_order
def test_lazy_negatives_travel_as_their_values(world_of, order, chunks):
    compare(world_of(2), lambda number, stages: Lazy(), order, chunks, some_steps)


# ---------------------------------------------------------------- steps


@every_order
def test_clipping_over_the_stages(world_of, order, chunks):
    """torch's own function would clip each rank by the norm of its stages."""

    def train(run, stages):
        optimizer, norms = torch.optim.SGD(stages.parameters(), 1.0), []
        for step in range(3):
            run(step)
            if dist.is_initialized():
                norms.append(clip_grad_norm_(stages, 0.01, over=dist.group.WORLD))
            else:
                norms.append(nn.utils.clip_grad_norm_(stages.parameters(), 0.01).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    compare(world_of(2), tanh, order, chunks, train)


@every_order
def test_a_scaler_that_asks_all_stages_skips_a_step_on_all_ranks(world_of, order, chunks):
    """torch's ``ShardedGradScaler`` over the pipeline's group; where a ``GradScaler`` alone would skip on one."""

    def train(run, stages):
        optimizer = torch.optim.SGD(stages.parameters(), 0.1, momentum=0.9)
        if dist.is_initialized():
            scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
        else:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        factor, scales = scaler.scale(torch.ones(1)), []  # on every rank: it is made at the first call
        for step in range(4):
            run(step)
            for parameter in stages.parameters():
                parameter.grad *= scaler.get_scale()  # the loss is linear: as if it had been scaled
            if step == 1 and stages[0][0].bias.sum().isfinite():
                first = not dist.is_initialized() or dist.get_rank() == 0
                stages[0][0].bias.grad *= float("inf") if first else 1.0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert factor.item() == 8.0
        return scales

    compare(world_of(2), tanh, order, chunks, train)


# ---------------------------------------------------------------- other modules


@pytest.mark.parametrize(("order", "chunks"), [(one_f_one_b, 1), (interleaved, 2)])
def test_compiled_stages(world_of, order, chunks):
    compare(world_of(2), tanh, order, chunks, some_steps, wrap=lambda stage: torch.compile(stage, backend="aot_eager"))
