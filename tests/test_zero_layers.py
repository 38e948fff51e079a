"""How layers may be used under stage 3 (and what is refused in words), state dicts, and ranks that go other ways.

What FSDP2 can, stage 3 can: re-entrant checkpointing, dataclasses, a layer that calls another, a registered method.
"""

import contextlib
import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pardemo import WireMeter
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, save

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
SGD = partial(torch.optim.SGD, lr=0.1)
STEPS = 3


@dataclass
class Output:
    """As Transformers' outputs, but unknown to torch's pytrees."""

    hidden: torch.Tensor
    name: str = "a layer"


class Holder:
    """An object that hides a tensor."""

    def __init__(self, hidden):
        self.hidden = hidden


class Layer(nn.Module):
    def __init__(self, returns=lambda x, y: y):
        super().__init__()
        self.inner, self.returns, self.inside = nn.Linear(8, 8), returns, []

    def forward(self, x):
        return self.returns(x, self.encode(x))

    def encode(self, x):
        y = torch.tanh(self.inner(x))
        for other in self.inside:  # not registered: it is a layer of its own
            y = torch.sin(self.inner(other(y)))
        return y


class Net(nn.Module):
    """Three layers, used in one of several ways; a head that belongs to the whole."""

    def __init__(self, way="plain"):
        super().__init__()
        self.way = way.removesuffix(", frozen")
        returns = {
            "dataclass": lambda x, y: Output(y),
            "object": lambda x, y: Holder(y),
            "input too": lambda x, y: (x, y),
        }
        self.layers = nn.ModuleList(Layer(returns.get(self.way, lambda x, y: y)) for _ in range(3))
        self.head = nn.Linear(8, 8)
        if self.way == "calls another":
            self.layers[0].inside.append(self.layers[1])
        if way.endswith("frozen"):
            for layer in self.layers:
                layer.inner.weight.requires_grad_(False)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = self._use(number, layer, x)
        if self.way == "weight elsewhere":
            x = F.linear(x, self.layers[0].inner.weight)
        return self.head(x).square().mean()

    def _use(self, number, layer, x):
        match self.way:
            case "re-entrant":
                return checkpoint(layer, x, use_reentrant=True)
            case "calls another" if number == 1:
                return x
            case "dataclass" | "object":
                return layer(x).hidden
            case "input too":
                handed_on, y = layer(x)
                return handed_on + y if number == 2 else y if number else handed_on
            case "method":
                return layer.encode(x)
        return layer(x)


def net_of(way):
    return gpt.seeded(lambda: Net(way))


def data(step, rank):
    return gpt.numbers(4, 8, seed=10 * step + rank).requires_grad_()  # re-entrant checkpointing needs that


def one_process(way, size):
    net = net_of(way)
    optimizer = SGD([p for p in net.parameters() if p.requires_grad])
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            (net(data(step, rank)) / size).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train(stage, way, options):
    net = net_of(way)
    engine = STAGES[stage](net, SGD, **options)
    if way.startswith("method") and stage == 3 and engine.units[0].name.startswith("unit 0 (layers"):
        for layer in net.layers:
            engine.register_forward_method(layer, "encode")
    for step in range(STEPS):
        engine(data(step, dist.get_rank())).backward()
        engine.step()
    if stage == 3:
        assert not any(unit.resident for unit in engine.units), "nothing is left in full"
    with engine.whole():
        found = torch.cat([p.detach().flatten() for p in net.parameters()])
    engine.close()
    assert "encode" not in vars(net.layers[0])
    return found


WAYS = ["re-entrant", "dataclass", "calls another", "input too", "method"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, {}), (2, {}), (2, {"bucket_bytes": 1}), (3, {}), (3, {"prefetch": False}), (3, {"layers": []})],
)
def test_layers_may_be_used_as_under_fsdp2(world_size, stage, options):
    for way in [*WAYS, *(f"{way}, frozen" for way in WAYS)]:
        found, expected = train(stage, way, options), one_process(way, world_size)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0, msg=lambda text, way=way: f"{way}: {text}")


@pytest.mark.ranks(2)
def test_re_entrant_checkpointing_reduces_once():
    """Each checkpointed layer's backward is a backward pass of its own: it must not send everybody's gradients."""
    sent = []
    for way in ("plain", "re-entrant"):
        engine = Zero2(net_of(way), SGD)
        engine(data(0, 0)).backward()
        with WireMeter() as wire:
            engine(data(1, 0)).backward()
        sent.append(wire.sent_bytes)
    assert sent[0] == sent[1]


@pytest.mark.ranks(1)
def test_what_stage_3_cannot_do_is_said():
    in_shards = r"^layers\.0\.inner\.weight is in shards here: use it in its own layer's forward, in a method named to"
    for way, kind, message in [
        ("weight elsewhere", RuntimeError, in_shards),
        ("method", RuntimeError, in_shards),
        ("object", TypeError, r"layers\.0 returns a Holder, in which stage 3 finds no tensors"),
    ]:
        with pytest.raises(kind, match=message):
            Zero3(net_of(way), SGD)(data(0, 0))
    net = net_of("plain")
    engine = Zero3(net, SGD)
    with pytest.raises(ValueError, match=r"neither.*engine's"):
        engine.register_forward_method(net.layers[0].inner, "forward")
    weight = net.layers[0].inner.weight
    with torch.no_grad():
        for use in (weight.zero_, lambda: weight.data.zero_(), lambda: weight + 1, lambda: nn.init.zeros_(weight)):
            with pytest.raises(RuntimeError, match=r"layers\.0\.inner\.weight is in shards"):
                use()
    for use in (net.state_dict, lambda: copy.deepcopy(net), net.bfloat16):
        with pytest.raises(RuntimeError, match="is in shards here"):
            use()
    assert weight.requires_grad
    assert weight.dtype == torch.float32
    assert weight.grad is None
    engine(data(0, 0)).backward()  # all of that has done no harm
    with pytest.raises(RuntimeError, match=r"create_graph=True.*3"):
        torch.autograd.grad(engine(x := data(0, 0)), x, create_graph=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("prefetch", [True, False])
def test_ranks_that_use_other_layers_are_told(rank, prefetch):
    """Layers of one size: each would compute with the other's weights."""
    net = net_of("plain")
    engine = Zero3(net, SGD, prefetch=prefetch)
    engine(data(0, rank)).backward()
    engine.step()
    net.layers = nn.ModuleList([net.layers[i] for i in ((0, 1, 2), (0, 2, 1))[rank]])
    told = r"the ranks are at different exchanges \(rank 0: all_gather of unit \d \(layers\.\d\), pass \d after step 1"
    with pytest.raises(ValueError, match=told):
        engine(data(1, rank)).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_without_a_backward_on_one_rank_is_told(rank, stage):
    """Its next gradients would be added to the others' last ones."""
    engine = STAGES[stage](net_of("plain"), SGD)

    def two_steps():
        for step in range(2):
            loss = engine(data(step, rank))
            if step or not rank:
                loss.backward()
            engine.step()

    with pytest.raises(ValueError, match=r"different.*exchanges"):
        two_steps()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "within"), [(1, False), (1, True), (2, False), (2, True), (3, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_state_dict_is_what_the_next_step_starts_from(stage, within, dtype):
    net = gpt.seeded(Net, seed=1).to(dtype)
    given = {name: torch.full_like(p, 0.5) for name, p in net_of("plain").to(dtype).state_dict().items()}
    submodule = {name: torch.full_like(p, 0.25) for name, p in net.layers[1].state_dict().items()}
    engine = STAGES[stage](net, partial(torch.optim.SGD, lr=0.0))
    with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\)"):
        net.load_state_dict(given, assign=True)
    if stage == 3:
        for load in (lambda: net.load_state_dict(given), lambda: net.layers[1].load_state_dict(submodule)):
            with pytest.raises(RuntimeError, match=r"load_state_dict\(\) within engine\.whole\(\)"):
                load()
    if within:
        with engine.whole():
            net.load_state_dict(given)
            net.layers[1].load_state_dict(submodule)
    else:
        net.load_state_dict(given)
        net.layers[1].load_state_dict(submodule)
    engine(torch.ones(2, 8, dtype=dtype)).backward()
    engine.step()
    with engine.whole():
        for name, p in net.named_parameters():
            assert (p == (0.25 if name.startswith("layers.1") else 0.5)).all(), name


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("saved", [False, True])
def test_what_is_written_between_two_steps_stays(stage, saved, tmp_path):
    """Weights clipped by hand after a step, as WGANs do."""
    net = gpt.seeded(Net).bfloat16()
    engine = STAGES[stage](net, partial(torch.optim.SGD, lr=1e-3))
    engine(gpt.numbers(2, 8, dtype=torch.bfloat16)).backward()
    engine.step()
    before = [unit.master.detach().clone() for unit in engine.trained]
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-0.1, 0.1)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    if saved:
        save(engine, tmp_path / "at")
    else:
        engine(gpt.numbers(2, 8, dtype=torch.bfloat16)).backward()
        engine.step()
    for unit, was in zip(engine.trained, before, strict=True):
        written = unit.master.bfloat16() != was.bfloat16()
        limit = torch.tensor(0.1).bfloat16().float()
        assert (unit.master.abs() <= limit * (1 + 2**-8)).all()
        assert (unit.master[written].abs() == limit).all()
        assert torch.equal(unit.master[~written], was[~written]), "the rest keeps its fp32 digits"
        assert not torch.equal(was[~written], was[~written].bfloat16().float())


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_what_passes_the_engine_by_is_refused(stage):
    net = net_of("plain")
    engine = STAGES[stage](net, SGD)
    engine(data(0, 0)).backward()
    if stage < 3:
        with contextlib.nullcontext() if stage == 1 else pytest.raises(RuntimeError, match=r"shards.*double"):
            net.double()
        with pytest.raises(RuntimeError, match=r"parameters.*engine"):
            engine.step()
    frozen = net_of("plain, frozen")
    engine = STAGES[stage](frozen, SGD)
    frozen.layers[0].inner.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"layers\.0\.inner\.weight was (replaced or )?unfrozen after the engine"):
        engine.step()
    replaced = net_of("plain")
    engine = STAGES[stage](replaced, SGD)
    replaced.head.weight = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(RuntimeError, match=r"head\.weight was replaced"):
        engine.step()
    net = net_of("plain")
    net(data(0, 0)).backward()
    engine = STAGES[stage](net, SGD)
    assert engine.step() is None, "gradients of before the engine are gone"
    if stage == 2:  # under stage 3 there is no place to put one
        net.head.bias.grad = torch.ones(8)
        with pytest.raises(RuntimeError, match=r"head\.bias\.grad"):
            engine.step()
    engine.close()
    engine.close()  # harmless
    for use in (engine.step, lambda: engine(data(0, 0)), lambda: save(engine, "nowhere")):
        with pytest.raises(RuntimeError, match="this engine is closed"):
            use()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_other_models_are_told(rank, stage):
    with pytest.raises(ValueError, match=r"0.*'weight'.*4.*4"):
        STAGES[stage](nn.Linear(4, 4 + rank), SGD)


def unlike_buffers(stage):
    net = nn.Linear(4, 4)
    if dist.get_rank():
        net.register_buffer("more", torch.zeros(3))
    STAGES[stage](net, SGD)


def unlike_clipping(stage):
    STAGES[stage](nn.Linear(4, 4), SGD, max_norm=[1.0, 0.01][dist.get_rank()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (unlike_buffers, r"the ranks' models differ: rank 0 has nothing more, rank 1 has \('more', \(3,\)"),
        (unlike_clipping, r"engines differ: rank 0 has ZeRO-\d, max_norm 1.0.*, rank 1 has ZeRO-\d, max_norm 0.01"),
    ],
)
def test_ranks_with_other_buffers_clipping_or_engines_are_told(stage, make, told):
    with pytest.raises(ValueError, match=told):
        make(stage)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_penalty_equals_one_process(rank, world_size, stage):
    """A gradient penalty, as in WGAN-GP: a backward pass through a backward pass."""

    def loss_of(net, x):
        (slope,) = torch.autograd.grad(net(x), x, create_graph=True)
        return (slope.norm() - 1).square()

    net, plain = net_of("plain"), net_of("plain")
    engine = STAGES[stage](net, SGD)
    loss_of(engine, data(0, rank)).backward()
    engine.step()
    optimizer = SGD(plain.parameters())
    for r in range(world_size):
        (loss_of(plain, data(0, r)) / world_size).backward()
    optimizer.step()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
