"""What training code does with an engine: right as in one process, or refused."""

import contextlib
import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from pardemo import RankFailed, WireMeter
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


def make(stage, model=stack, **options):
    options |= {"bucket_bytes": 400} if stage < 3 else {}
    return STAGES[stage](gpt.seeded(model), SGD, **options)


def compare(engine, plain):
    with engine.full_parameters() as net:
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **TOLERANCE)


def trained_as_in_one_process(stage, model, wrap):
    plain, engine = gpt.seeded(model), make(stage, model)
    optimizer, wrapped = SGD(plain.parameters()), wrap(engine)
    for step in range(STEPS):
        plain(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wrapped(data(step, my_part())).square().mean().backward()
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


@dataclass
class Output:
    """As Transformers' outputs, but unknown to torch's pytrees."""

    hidden: torch.Tensor
    given: torch.Tensor


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Output(self.encode(x), x)

    def encode(self, x):
        return torch.tanh(self.inner(x))


class Layers(nn.Module):
    """Frozen layers between trained ones; dataclasses that hand on the input; a method other than forward."""

    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList(Layer() for _ in range(4)), nn.LayerNorm(WIDTH)
        for layer in self.layers[1:3]:
            layer.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers[:3]:
            output = layer(x)
            x = output.hidden + output.given
        return self.last(x + self.layers[3].encode(x))


def with_method(engine):
    register_fsdp_forward_method(engine.module.layers[3], "encode")
    return engine


def same(engine):
    return engine


class CompiledBody(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.compile(stack(), backend="eager"), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.body(x))


MODELS = {
    "shared": partial(Shared, reentrant=False),
    "shared, re-entrant": partial(Shared, reentrant=True),
    "buffers": Buffers,
    "sparse": Sparse,
    "in place": InPlace,
    "layers": Layers,
    "compiled": CompiledBody,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_models_train_as_in_one_process(world_of, stage, model):
    refused = {"sparse": r"[Ss]parse", "shared, re-entrant": "use_reentrant=False"} if stage == 3 else {}
    with pytest.raises(RankFailed, match=refused[model]) if model in refused else contextlib.nullcontext():
        world_of(2).run(trained_as_in_one_process, stage, MODELS[model], with_method if model == "layers" else same)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("stage", STAGES)
def test_buffers_of_any_dtype_are_rank_0s(rank, stage):
    net = gpt.seeded(Buffers, rank)
    STAGES[stage](net, SGD)
    for mine, first in zip(net.buffers(), gpt.seeded(Buffers, 0).buffers(), strict=True):
        assert torch.equal(*(buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in (mine, first)))


@pytest.mark.ranks(2)
def test_re_entrant_checkpointing_reduces_once():
    """Each checkpointed layer's backward is a backward pass of its own: it must not send everybody's gradients."""
    sent = []
    for reentrant in (False, True):
        engine = make(2, lambda reentrant=reentrant: nn.Sequential(Once(reentrant), stack()))
        engine(data(0)).sum().backward()
        with WireMeter() as wire:
            engine(data(1)).sum().backward()
        sent.append(wire.sent_bytes)
    assert sent[0] == sent[1]


class Once(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.layer, self.reentrant = nn.Linear(WIDTH, WIDTH), stack(), reentrant

    def forward(self, x):
        return checkpoint(self.layer, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_penalty_equals_one_process_or_is_refused(stage):
    """As in WGAN-GP: a backward pass through a backward pass, in which stage 3's parameters are gone."""

    def loss_of(net, x):
        (slope,) = torch.autograd.grad(net(x), x, torch.ones_like(x), create_graph=True)
        return (slope.square().sum(1) - 1).square().mean()

    engine, plain = make(stage), gpt.seeded(stack)
    with pytest.raises(RuntimeError) if stage == 3 else contextlib.nullcontext():
        loss_of(engine, data(0, my_part()).requires_grad_()).backward()
    if stage < 3:
        engine.step()
        loss_of(plain, data(0).requires_grad_()).backward()
        SGD(plain.parameters()).step()
        compare(engine, plain)


CLIP = 0.05


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_torchs_functions_on_gradients_are_right_or_refused(stage):
    """Before the step, stages 1 and 2 have no rank with the mean; stage 3's DTensors are it."""
    engine, plain = make(stage), gpt.seeded(stack)
    engine(data(0, my_part())).square().mean().backward()
    assert [p.grad.shape for p in engine.parameters()] == [p.shape for p in plain.parameters()]
    uses = {
        "clip": lambda net: nn.utils.clip_grad_norm_(net.parameters(), CLIP),
        "by foreach": lambda net: nn.utils.clip_grad_norm_(net.parameters(), CLIP, foreach=True),
        "by value": lambda net: nn.utils.clip_grad_value_(net.parameters(), CLIP),
        "by hand": lambda net: [p.grad.data.mul_(0.5) for p in net.parameters()],
        "add": lambda net: [p.grad.add_(1.0) for p in net.parameters()],
        "in place": lambda net: net.zero_grad(set_to_none=False),
    }
    for use in uses.values() if stage < 3 else ():
        with pytest.raises(RuntimeError, match=r"\.grad.*max_norm.*engine\.zero_grad\(\)"):
            use(engine.module)
    if stage < 3:
        with pytest.raises(RuntimeError, match="max_norm"):
            nn.utils.clip_grad_norm_(engine.optimizer.param_groups[0]["params"], CLIP)
    else:
        plain(data(0)).square().mean().backward()
        for use in (uses["by value"], uses["by hand"], uses["clip"]):
            expected, found = use(plain), use(engine.module)
        assert found.full_tensor() == pytest.approx(expected.item(), rel=1e-5)
        SGD(plain.parameters()).step()
        engine.step()
        compare(engine, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_loss_scaler_is_refused(stage):
    engine, scaler = make(stage), torch.amp.GradScaler("cpu")
    scaler.scale(engine(data(0)).square().mean()).backward()
    for optimizer in (engine, engine.optimizer):
        with pytest.raises((AttributeError, AssertionError, RuntimeError)):
            scaler.step(optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_discarded_by_the_engine(stage):
    """By the optimizer's zero_grad(), too; by the module's, which knows nothing of shards, at stages 1 and 3."""
    for discard in ("engine", "optimizer", "module"):
        engine, plain = make(stage), gpt.seeded(stack)
        (1000 * engine(data(9))).sum().backward()
        {"engine": engine, "optimizer": engine.optimizer, "module": engine.module}[discard].zero_grad()
        if (discard, stage) == ("module", 2):
            for use in (engine.step, lambda engine=engine: engine(data(0))):
                with pytest.raises(RuntimeError, match=r"engine\.zero_grad\(\)"):
                    use()
            continue
        engine(data(0, my_part())).square().mean().backward()
        engine.step()
        plain(data(0)).square().mean().backward()
        SGD(plain.parameters()).step()
        compare(engine, plain)
        engine.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_what_passes_the_engine_by_is_refused(stage):
    engine = make(stage)
    with pytest.raises(RuntimeError, match=r"call engine\.step\(\)"):
        engine.optimizer.step()
    for use in (engine.optimizer.state_dict, lambda: engine.optimizer.load_state_dict({})) if stage < 3 else ():
        with pytest.raises(RuntimeError, match=r"pardemo\.zero\.save"):
            use()
    changes = {
        r"0\.weight was .*frozen": lambda net: net[0].weight.requires_grad_(False),
        r"2\.bias was replaced": lambda net: setattr(net[2], "bias", nn.Parameter(torch.ones(WIDTH))),
        r"0\.weight was .*cast": lambda net: net.double(),
        "parameters were moved": lambda net: setattr(net[0].weight, "data", torch.ones(9, WIDTH)),
        r"0\.weight has a hook": lambda net: net[0].weight.register_post_accumulate_grad_hook(lambda p: None),
    }
    for message, change in changes.items():
        for use in (lambda engine: engine.step(), lambda engine: engine(data(0))):
            if stage == 3 and "moved" in message:  # a DTensor has no place in memory of its own
                continue
            engine = make(stage)
            change(engine.module)
            with pytest.raises(RuntimeError, match=message):
                use(engine)
    net = stack()
    net[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match=r"0\.weight has a hook"):
        STAGES[stage](net, SGD)
    if stage == 3:
        net = stack()
        net[0].weight.register_hook(lambda gradient: 2 * gradient)
        with pytest.raises(ValueError, match=r"0\.weight has a hook"):
            Zero3(net, SGD)
        engine = make(3)
        with engine.full_parameters(), pytest.raises(RuntimeError, match=r"within full_parameters\(\)"):
            engine(data(0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_between_a_forward_and_its_backward_is_refused(stage):
    """By torch: the parameters that the backward pass needs have another version."""
    engine = make(stage)
    engine(data(0)).square().mean().backward()
    loss = engine(data(1)).square().mean()
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    engine.zero_grad()
    engine(data(2)).square().mean().backward()
    engine.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_is_a_plain_module(stage):
    """A moving average of the weights, beside that of one process. FSDP2's modules have no copies."""
    plain, engine = gpt.seeded(stack), make(stage)
    if stage == 3:
        with pytest.raises(AssertionError, match="deepcopy"):
            copy.deepcopy(engine)
        return
    optimizer, averages = SGD(plain.parameters()), [AveragedModel(plain), AveragedModel(engine)]
    for step in range(STEPS):
        plain(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine(data(step, my_part())).square().mean().backward()
        engine.step()
        for average, of in zip(averages, (plain, engine), strict=True):
            average.update_parameters(of)
    with torch.no_grad():
        torch.testing.assert_close(averages[1](data(9)), averages[0](data(9)), **TOLERANCE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_loaded_or_written_is_what_training_goes_on_from(stage, dtype):
    """Of parameters in bf16 that were not written the masters keep their digits."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    engine = STAGES[stage](gpt.seeded(stack).to(dtype), SGD)
    engine(data(0).to(dtype)).square().mean().backward()
    engine.step()
    with engine.full_parameters() as net:
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with torch.no_grad(), engine.full_parameters():  # may be nested
            net[0].weight.clamp_(-0.1, 0.1)  # as WGANs do
    loaded = {name: torch.full_like(value, 0.5) for name, value in before.items() if name.startswith("2")}
    if stage == 3:
        set_model_state_dict(net, {**loaded}, options=StateDictOptions(full_state_dict=True, strict=False))
    else:
        net.load_state_dict(loaded, strict=False)
    engine.optimizer.param_groups[0] |= {"lr": 0.0}
    engine(data(0).to(dtype)).square().mean().backward()
    engine.step()
    with engine.full_parameters():
        assert torch.equal(net[0].weight, before["0.weight"].clamp(-0.1, 0.1))
        assert torch.equal(net[0].bias, before["0.bias"])
        assert bool((net[2].weight == 0.5).all() and (net[2].bias == 0.5).all())
    if dtype == torch.bfloat16:
        masters = [shard.master.detach() for shard in engine.shards().values()]
        assert not all(torch.equal(master, master.bfloat16().float()) for master in masters), "fp32 digits"
