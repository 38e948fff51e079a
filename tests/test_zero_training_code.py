"""What training code does with an engine beside forward, backward and step: right as in one process, or refused."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from pardemo import RankFailed
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WIDTH, SAMPLES, STEPS = 7, 12, 3
#: fp32 sums in another order; steps are 0.001 and more
TOLERANCE = {"atol": 1e-6, "rtol": 1e-5}


def stack():
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))


def data(step, part=slice(None)):
    return gpt.numbers(SAMPLES, WIDTH, seed=step)[part]


def my_part():
    share = SAMPLES // dist.get_world_size()
    return slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)


def make(stage, model, optimizer=SGD, **options):
    options |= {"bucket_bytes": 400} if stage == 2 else {}
    return STAGES[stage](model, optimizer, **options)


def compare(engine, plain):
    with engine.whole() as net:
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **TOLERANCE)


def trained_as_in_one_process(stage, model):
    plain, engine = gpt.seeded(model), make(stage, gpt.seeded(model))
    optimizer = SGD(plain.parameters())
    for step in range(STEPS):
        plain(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine(data(step, my_part())).square().mean().backward()
        engine.step()
    compare(engine, plain)


class Shared(nn.Module):
    """Each layer is used twice, each use under a checkpoint, which runs a backward pass of its own if re-entrant."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.first = reentrant, nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(stack() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Buffers(nn.Module):
    """Of dtypes that gloo does not send, with gaps, without a dimension."""

    def __init__(self):
        super().__init__()
        self.inner = stack()
        self.register_buffer("table", torch.randint(0, 9, (3, 4)).short())
        self.register_buffer("scale", torch.rand(5).to(torch.float8_e4m3fn))
        self.register_buffer("phase", torch.rand(4, dtype=torch.complex64)[::2])
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x):
        return self.inner(x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(5, WIDTH, sparse=True), stack()

    def forward(self, x):
        return self.inner(self.embedding(x.abs().long() % 5))


class InPlace(nn.Module):
    """What layers returned is overwritten."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x += 1
            x = nn.functional.relu(x, inplace=True)
        return x


MODELS = {
    "shared": partial(Shared, reentrant=False),
    "shared, re-entrant": partial(Shared, reentrant=True),
    "buffers": Buffers,
    "sparse": Sparse,
    "in place": InPlace,
    "relu": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(inplace=True), nn.Linear(9, 5), nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_models_train_as_in_one_process(world_of, stage, model):
    world_of(2).run(trained_as_in_one_process, stage, MODELS[model])


def buffers_of_all(stage):
    net = Buffers()
    make(stage, net)
    return [buffer.contiguous().reshape(-1).view(torch.uint8).tolist() for buffer in net.buffers()]


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_of_any_dtype_are_rank_0s(world_of, stage):
    first, *others = world_of(3).run(buffers_of_all, stage)
    assert others == [first, first]


def step_between(stage):
    engine = make(stage, gpt.seeded(stack))
    engine(data(0)).square().mean().backward()
    loss = engine(data(1)).square().mean()
    engine.step()
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        loss.backward()
    engine.zero_grad()
    engine(data(2)).square().mean().backward()
    engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_between_a_forward_and_its_backward_is_refused(world_of, stage):
    world_of(2).run(step_between, stage)


def states_of_rank_0(stage):
    engine = make(stage, gpt.seeded(stack))
    engine(data(0, my_part())).square().mean().backward()
    engine.step()
    own = copy.deepcopy(engine.optimizer.state_dict())
    holder = [own]
    dist.broadcast_object_list(holder, 0)
    if dist.get_rank():
        with pytest.raises(ValueError, match=r"'rank'.*0.*'rank'.*1"):
            engine.optimizer.load_state_dict(holder[0])
    plain = gpt.seeded(stack)
    alone = SGD(engine.optimizer.param_groups[0]["params"])
    with pytest.raises(ValueError, match="None"):
        engine.optimizer.load_state_dict(alone.state_dict())
    # its own: training goes on as if nothing had been
    engine.optimizer.state.clear()
    engine.optimizer.load_state_dict(own)
    optimizer = SGD(plain.parameters())
    for step in range(2):
        plain(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine(data(1, my_part())).square().mean().backward()
    engine.step()
    compare(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
def test_another_ranks_optimizer_states_are_refused(world_of, stage):
    world_of(2).run(states_of_rank_0, stage)


def averaged(stage):
    """A moving average of the weights, beside that of one process."""
    plain, engine = gpt.seeded(stack), make(stage, gpt.seeded(stack))
    optimizer, averages = SGD(plain.parameters()), []
    with engine.whole():
        averages = [AveragedModel(plain), AveragedModel(engine)]
    for step in range(STEPS):
        plain(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine(data(step, my_part())).square().mean().backward()
        engine.step()
        averages[0].update_parameters(plain)
        with engine.whole():
            averages[1].update_parameters(engine)
    with torch.no_grad():
        torch.testing.assert_close(averages[1](data(9)), averages[0](data(9)), **TOLERANCE)
    with engine.whole():
        copied = copy.deepcopy(engine.module)
    copied.load_state_dict(plain.state_dict())
    copied(data(0)).sum().backward()
    compare(engine, plain)
    if stage == 3:
        with pytest.raises(RuntimeError, match=r"0\.weight.*engine\.whole\(\)"):
            copy.deepcopy(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_is_a_plain_module(world_of, stage):
    world_of(2).run(averaged, stage)


def hooked(stage, when):
    net = gpt.seeded(stack)
    parameter = net[0].weight

    def doubles(p):
        p.grad.mul_(2)

    if when == "before":
        parameter.register_post_accumulate_grad_hook(doubles)
    refused = pytest.raises(RuntimeError, match=r"0\.weight")
    if when == "before":
        with refused:
            make(stage, net)
        return
    engine = make(stage, net)
    handle = parameter.register_post_accumulate_grad_hook(doubles)
    with refused:
        engine(data(0))
    handle.remove()
    engine(data(0)).square().mean().backward()
    engine.step()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_on_a_ranks_own_gradient_is_refused(world_of, stage, when):
    world_of(2).run(hooked, stage, when)


def frozen_on_one_rank(stage):
    engine = make(stage, gpt.seeded(stack))
    if dist.get_rank() == 1:
        engine.module[2].bias.requires_grad_(False)
    engine(data(0)).square().mean().backward()
    engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_one_rank_freezes_is_refused(world_of, stage):
    with pytest.raises(RankFailed, match=r"2\.bias"):
        world_of(2).run(frozen_on_one_rank, stage)


class CompiledBody(nn.Module):
    """Its layers, which stage 3 gathers one at a time, are compiled together."""

    def __init__(self):
        super().__init__()
        self.body = torch.compile(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)), backend="eager")
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("stage", STAGES)
def test_compiled_layers_train_as_in_one_process(world_of, stage):
    world_of(2).run(trained_as_in_one_process, stage, CompiledBody)


class Blocks(nn.Module):
    """What stage 3 gathers one at a time, and parameters that no layer of it has."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(stack() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def compiled_engine_trains(stage, backend):
    plain, engine = gpt.seeded(Blocks), make(stage, gpt.seeded(Blocks))
    optimizer, compiled = SGD(plain.parameters()), torch.compile(engine, backend=backend)
    for step in range(STEPS):
        plain(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        compiled(data(step, my_part())).square().mean().backward()
        engine.step()
    compare(engine, plain)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_compiled_engine_trains_as_one_process(world_of, stage, backend):
    """Its layers are traced, and what it does around them is not: gathering, checks, hooks."""
    world_of(2).run(compiled_engine_trains, stage, backend)


@pytest.mark.parametrize("stage", STAGES)
def test_one_graph_of_an_engine_is_refused_with_the_reason(world_of, stage):
    def one_graph():
        torch.compile(make(stage, gpt.seeded(Blocks)), backend="eager", fullgraph=True)(data(0))

    with pytest.raises(RankFailed, match="fullgraph=True"):
        world_of(2).run(one_graph)
