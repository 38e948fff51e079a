"""Every stage against one process on the whole batch; ranks begin with different weights on purpose."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import few
from torch import nn
from torch.utils.checkpoint import checkpoint

from pardemo import MemoryMeter, RankFailed, compat
from pardemo.formulas import communication, memory
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, default_layers

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SAMPLES = 8


class Net(nn.Module):
    """Tied, frozen and unused parameters, a buffer, sizes that do not divide by 2 or 4, a checkpointed layer."""

    def __init__(self, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(17, 9)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(9, 13), nn.GELU(), nn.Linear(13, 9), nn.LayerNorm(9)) for _ in range(3)
        )
        self.layers[1][0].weight.requires_grad_(False)
        self.layers[2][0].weight = self.layers[0][0].weight
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(9, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1]) * self.scale
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make(recompute=False):
    return gpt.seeded(lambda: Net(recompute))


def batch(step):
    return gpt.text(SAMPLES, 9, 17, seed=step)


def one_process(steps=20, micro_batches=1, max_norm=None):
    """What all stages should equal: zero where there is no gradient."""
    net, losses = make(), []
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = ADAMW(trained)
    for step in range(steps):
        total = 0.0
        for part in batch(step).chunk(micro_batches):
            loss = net(part) / micro_batches
            loss.backward()
            total += loss.item()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if max_norm is not None:
            nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach() for name, p in net.named_parameters()}


def in_full(net):
    """How many parameters of a module under stage 3 are there in full."""
    return sum(p.untyped_storage().nbytes() > 0 for p in compat.fsdp_gathered(net))


def train(stage, steps=20, micro_batches=1, max_norm=None, recompute=False, **options):
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make(recompute)
    with torch.no_grad():
        if rank:
            net.embed.weight.add_(1)  # the engine starts all ranks from rank 0
    engine = STAGES[stage](net, ADAMW, max_norm=max_norm, **options)
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for part in batch(step)[rank * SAMPLES // size : (rank + 1) * SAMPLES // size].chunk(micro_batches):
            loss = engine(part) / micro_batches
            loss.backward()
            total += loss.detach()
        engine.step()
        dist.all_reduce(total)
        losses.append(total.item() / size)
    assert stage < 3 or not in_full(net), "nothing is left in full"
    with engine.full_parameters():
        return losses, {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("micro_batches", "max_norm"), few([(2, 0.3), (1, None), (2, None), (1, 0.3)], 0, 1))
def test_training_equals_one_process(same_on_all_ranks, stage, micro_batches, max_norm):
    losses, weights = one_process(micro_batches=micro_batches, max_norm=max_norm)
    found, parameters = train(stage, micro_batches=micro_batches, max_norm=max_norm)
    assert found == pytest.approx(losses, abs=2e-5)
    torch.testing.assert_close(parameters, weights, atol=2e-4, rtol=0)
    same_on_all_ranks(parameters)


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {"recompute": True, "bucket_bytes": 300}),
        (2, {"bucket_bytes": 1}),
        (2, {"bucket_bytes": 300}),
        (3, {"layers": []}),
        (3, {"recompute": True}),
    ],
)
@pytest.mark.ranks(4)
def test_variants_equal_one_process(stage, options):
    losses, _ = one_process()
    assert train(stage, **options)[0] == pytest.approx(losses, abs=2e-5)


WIDTH, LAYERS = 256, 6


def stack():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).bfloat16()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (2, {"bucket_bytes": 1 << 17}), (3, {})])
def test_bytes_on_the_wire(world_size, wire, stage, micro_batches, options):
    engine = STAGES[stage](stack(), ADAMW, **options)
    x = gpt.numbers(8, WIDTH, dtype=torch.bfloat16)

    def step():
        for _ in range(micro_batches):
            engine(x).square().mean().backward()
        engine.step()

    step()
    with wire:
        step()
    theory = communication.zero_step(LAYERS * WIDTH**2, world_size, stage, micro_batches)
    # 786 kB, headers included
    assert (wire.sent_bytes, wire.received_bytes) == pytest.approx((theory, theory), rel=0.015)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_states_follow_the_formula(world_size, stage):
    engine = STAGES[stage](stack(), ADAMW)
    x = gpt.numbers(8, WIDTH, dtype=torch.bfloat16)
    for _ in range(2):
        engine(x).square().mean().backward()
        after_backward = engine.state_bytes()
        engine.step()
    theory = memory.model_states(LAYERS * WIDTH**2, world_size, stage)
    if stage == 3:  # the fp32 copy is the parameter, and its gradient is in fp32: 4 + 4 + 8 for 2 + 2 + 12
        theory = {"parameters": 2 * theory["parameters"], "gradients": 2 * theory["gradients"],
                  "optimizer states": theory["optimizer states"] * 2 / 3}  # fmt: skip
    assert after_backward == pytest.approx(theory, rel=0.01)


def beside_the_states(stage, options):
    """Of the second step, by a meter that was there from the beginning: bytes that stay, and the most in a backward."""
    with MemoryMeter() as meter:
        engine = STAGES[stage](stack(), ADAMW, **options)
        x = gpt.numbers(8, WIDTH, dtype=torch.bfloat16)
        for _ in range(2):
            loss = engine(x).square().mean()
            meter.reset_peak()
            loss.backward()
            most = meter.peak_bytes - sum(engine.state_bytes().values())
            del loss
            engine.step()
        gc.collect()
        return meter.live_bytes - sum(engine.state_bytes().values()), most


@pytest.mark.parametrize(
    ("stage", "options", "layers"),
    # on their way: gradients of two layers, those just packed, and what reducing them takes; whole layers at stage 3
    [(1, {}, 2), (2, {"bucket_bytes": 2 * WIDTH**2}, 5), (3, {}, 8)],
)
def test_nothing_is_kept_beside_the_model_states(world_of, stage, options, layers):
    """A full gradient kept aside would be six layers; here of 128 KiB in bf16."""
    small, layer = 8 * WIDTH * 2 * 4 * LAYERS, 2 * WIDTH**2  # activations
    for left, most in world_of(2).run(beside_the_states, stage, options):
        assert left <= small
        assert most <= layers * layer + small


@pytest.mark.ranks(2)
def test_one_layer_at_a_time():
    """Layers in full while one computes, in forward and backward; the next one is on its way, and not unpacked yet."""
    net = stack()
    engine = Zero3(net, ADAMW)
    x, most = gpt.numbers(8, WIDTH, dtype=torch.bfloat16), []
    for layer in net:
        layer.register_forward_pre_hook(lambda *_: most.append(in_full(net)))
        layer.register_full_backward_hook(lambda *_: most.append(in_full(net)))
    for _ in range(2):
        engine(x).square().mean().backward()
        engine.step()
    assert (max(most), in_full(net)) == (1, 0)


REFUSED = {
    "no parameter that requires a gradient": lambda rank: Zero1(nn.ReLU(), ADAMW),
    "that requires a gradient: nothing to train": lambda rank: Zero3(stack().requires_grad_(False), ADAMW),
    r"torch\.float16.*bfloat16.*float32": lambda rank: Zero1(nn.Linear(4, 4).half(), ADAMW),
    "max_norm must be above 0, not 0": lambda rank: Zero2(stack(), ADAMW, max_norm=0),
    "bucket_bytes must be above 0, not 0": lambda rank: Zero2(stack(), ADAMW, bucket_bytes=0),
    "engines differ; rank 0 of the group has ZeRO-2.* of 400 B, rank 1 .* of 401 B":
        lambda rank: Zero2(stack(), ADAMW, bucket_bytes=400 + rank),
    r"layers\[0\] is no part of the module": lambda rank: Zero3(stack(), ADAMW, layers=[nn.Linear(2, 2)]),
    r"layers\[0\] is the whole module": lambda rank: Zero3(net := stack(), ADAMW, layers=[net]),
    r"1\.weight is torch\.float32 in a layer of torch\.bfloat16":
        lambda rank: Zero3(nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)), ADAMW, layers=[]),
    r"models differ; rank 0 of the group has \('weight', \(4, 4\).*rank 1 \('weight', \(5, 4\)":
        lambda rank: Zero1(nn.Linear(4, 4 + rank), ADAMW),
    "(rank 1: )?the module has no parameter that requires":
        lambda rank: Zero2(nn.Linear(4, 4).requires_grad_(rank == 0), ADAMW),
    "models differ": lambda rank: Zero3((nn.Linear if rank else nn.BatchNorm1d)(4, 4), ADAMW),
    "engines differ; rank 0 of the group has ZeRO-3, max_norm 1.0, rank 1 ZeRO-3, max_norm 0.01":
        lambda rank: Zero3(nn.Linear(4, 4), ADAMW, max_norm=[1.0, 0.01][rank]),
    "use stage 1": lambda rank: Zero2(net := nn.Linear(4, 4), ADAMW, tied=[(net.weight, dist.group.WORLD)]),
    "stages 2 and 3 have sent": lambda rank: Zero3(net := nn.Linear(4, 4), ADAMW, tied=[(net.weight, None)]),
    r"has a ZeRO engine already: close\(\)": lambda rank: [Zero1(net, ADAMW) for net in [stack()] * 2],
    "sharded by FSDP2 already": lambda rank: [Zero3(net, ADAMW).close() for net in [stack()] * 2],
}  # fmt: skip


@pytest.mark.ranks(2)
def test_bad_input_is_told(rank):
    for message, make in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            make(rank)


def test_default_layers_are_the_outermost_lists():
    net = Net()
    assert default_layers(net) == list(net.layers)
    sequence = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert default_layers(sequence) == [sequence[0], sequence[2]]
    assert default_layers(nn.Linear(2, 2)) == []


class Branches(nn.Module):
    """Three layers of one size, of which a rank may leave the last one out; they may be used more than once."""

    def __init__(self, order=(0, 1, 2)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


def branches(order=(0, 1, 2)):
    return gpt.seeded(lambda: Branches(order))


def data(step, rank):
    return gpt.numbers(4, 8, seed=100 * step + rank)


def one_process_over(orders, steps=3):
    """Mean gradient of one forward per rank, each with its own order of layers."""
    net = branches()
    optimizer = ADAMW(net.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank, order in enumerate(orders):
            net.order = order
            (net(data(step, rank)) / len(orders)).backward()
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def weights_of(engine):
    with engine.full_parameters() as module:
        return torch.cat([p.detach().flatten() for p in module.parameters()])


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("on purpose")


def train_branches(stage, orders, disturb=None, steps=3, **options):
    rank = dist.get_rank()
    engine = STAGES[stage](branches(orders[rank]), ADAMW, **options)
    for step in range(steps):
        if disturb == "failed backward" and step == 1:
            with pytest.raises(ZeroDivisionError):
                engine(Fails.apply(data(9, rank).requires_grad_())).backward()
            if stage > 1:  # stage 1 keeps gradients in .grad, as plain training does
                with pytest.raises(RuntimeError, match="call zero_grad"):
                    engine(data(9, rank))
            engine.zero_grad()
        if disturb == "bad batch":
            engine(1000 * data(9, rank)).backward()
            engine.zero_grad()
        loss = engine(data(step, rank))
        if disturb == "zero_grad behind forward":
            engine.zero_grad()
        loss.backward()
        if disturb == "validation":
            with torch.no_grad():
                engine(data(9, rank))
        if disturb == "failed forward":
            with pytest.raises(RuntimeError, match="shapes"):
                engine(torch.ones(2, 3))
        engine.step()
    return weights_of(engine)


DISTURBANCES = ["failed backward", "bad batch", "validation", "failed forward", "zero_grad behind forward"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("disturb", DISTURBANCES)
@pytest.mark.parametrize("order", few([((0, 1, 0, 1, 2),), ((0, 1, 2),)]))
@pytest.mark.ranks(2)
def test_disturbed_training_goes_on_rightly(stage, disturb, order):
    expected = one_process_over([order, order])
    torch.testing.assert_close(train_branches(stage, [order, order], disturb), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (2, {"bucket_bytes": 1})])
@pytest.mark.ranks(2)
def test_a_layer_that_one_rank_leaves_out(stage, options):
    orders = [(0, 1), (0, 1, 2)]
    expected = one_process_over(orders)
    torch.testing.assert_close(train_branches(stage, orders, **options), expected, atol=1e-5, rtol=0)


def test_ranks_that_use_other_layers_under_stage_3_are_told(world_of):
    """Layers of one size: each would compute with the other's weights."""
    told = r"the ranks are at different exchanges \(rank 0: \w+ of layers\.\d, pass 1 after step 0"
    with pytest.raises(RankFailed, match=told):
        world_of(2).run(train_branches, 3, [(0, 1, 2), (0, 2, 1)])


def without_a_backward(stage):
    engine = STAGES[stage](branches(), ADAMW)
    for step in range(2):
        loss = engine(data(step, 0))
        if step or not dist.get_rank():
            loss.backward()
        engine.step()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_without_a_backward_on_one_rank_is_told(world_of, stage):
    """Its next gradients would be added to the others' last ones."""
    with pytest.raises(RankFailed, match="different exchanges"):
        world_of(2).run(without_a_backward, stage)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_forgotten_engine_is_gone(stage):
    gc.collect()
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    engine = STAGES[stage](net, ADAMW)
    engine(torch.ones(2, 64)).sum().backward()
    engine.step()
    refs = [weakref.ref(engine), weakref.ref(net), weakref.ref(engine.channel), weakref.ref(engine.optimizer)]
    del engine, net
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


@pytest.mark.ranks(2)
def test_a_module_can_be_wrapped_again_when_its_engine_was_closed():
    """Stages 1 and 2 give the module back; its gradients and parameters are its own again."""
    net, losses = branches(), []
    for stage in (1, 2, 1, 3):
        engine = STAGES[stage](net, partial(torch.optim.SGD, lr=0.1))
        for _ in range(2):
            loss = engine(data(0, 0))
            loss.backward()
            engine.step()
            losses.append(loss.item())
        engine.close()
        engine.close()  # harmless
        with pytest.raises(RuntimeError, match="this engine is closed"):
            engine(data(0, 0))
    assert losses == sorted(losses, reverse=True)
