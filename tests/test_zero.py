"""Every stage against one process on the whole batch; ranks begin with different weights on purpose."""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from pardemo import MemoryMeter, RankError, RankFailed, WireMeter, World
from pardemo.formulas import communication
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, default_layers, load, save

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


def make(dtype, recompute=False):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net(recompute).to(dtype)


def batch(step):
    return gpt.text(SAMPLES, 9, 17, seed=step)


def one_process(dtype, steps=20, micro_batches=1, max_norm=None):
    """What all stages should equal: gradients in ``dtype``, AdamW on fp32 copies, zero where there is no gradient."""
    net = make(dtype)
    trained = [p for p in net.parameters() if p.requires_grad]
    masters = [p.detach().float().clone().requires_grad_() for p in trained]
    optimizer = ADAMW(masters)
    losses = []
    for step in range(steps):
        total = 0.0
        for part in batch(step).chunk(micro_batches):
            loss = net(part) / micro_batches
            loss.backward()
            total += loss.item()
        for master, parameter in zip(masters, trained, strict=True):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if max_norm is not None:
            nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, trained, strict=True):
                parameter.copy_(master)
        losses.append(total)
    return losses, {name: p.detach() for name, p in net.named_parameters()}


def train(stage, dtype, steps=20, micro_batches=1, max_norm=None, recompute=False, **options):
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make(dtype, recompute)
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
    if stage == 3:
        assert all(p.untyped_storage().nbytes() == 0 for p in net.parameters()), "nothing is left in full"
        with engine.whole():
            return losses, {name: p.detach().clone() for name, p in net.named_parameters()}
    return losses, {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("micro_batches", "max_norm"), [(1, None), (2, None), (1, 0.3), (2, 0.3)])
def test_fp32_equals_one_process(world_of, n, stage, micro_batches, max_norm):
    losses, weights = one_process(torch.float32, micro_batches=micro_batches, max_norm=max_norm)
    results = world_of(n).run(train, stage, torch.float32, micro_batches=micro_batches, max_norm=max_norm)
    for found, parameters in results:
        assert found == pytest.approx(losses, abs=2e-5)
        for name, value in weights.items():
            torch.testing.assert_close(parameters[name], value, atol=2e-4, rtol=0)
            assert torch.equal(parameters[name], results[0][1][name]), f"{name}: the ranks differ"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_bf16_equals_one_process_within_rounding(world_of, n, stage):
    losses, weights = one_process(torch.bfloat16)
    for found, parameters in world_of(n).run(train, stage, torch.bfloat16):
        assert found == pytest.approx(losses, abs=0.05), "bf16: 8 bits, losses around 3"
        for name, value in weights.items():
            assert parameters[name].dtype == torch.bfloat16
            torch.testing.assert_close(parameters[name], value, atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (2, {"bucket_bytes": 1}),
        (2, {"bucket_bytes": 300}),
        (3, {"prefetch": False}),
        (3, {"layers": []}),
        (3, {"recompute": True}),
        (3, {"recompute": True, "prefetch": False}),
        (1, {"recompute": True}),
    ],
)
def test_variants_equal_one_process(world_of, stage, options):
    losses, _ = one_process(torch.float32)
    for found, _ in world_of(4).run(train, stage, torch.float32, **options):
        assert found == pytest.approx(losses, abs=2e-5)


WIDTH, LAYERS = 256, 6


def stack(dtype=torch.bfloat16):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(dtype)


def sent(stage, micro_batches, options):
    engine = STAGES[stage](stack(), ADAMW, **options)
    x = gpt.numbers(8, WIDTH, dtype=torch.bfloat16)

    def step():
        for _ in range(micro_batches):
            engine(x).square().mean().backward()
        engine.step()

    step()
    with WireMeter() as wire:
        step()
    return wire.sent_bytes, wire.received_bytes


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (2, {"bucket_bytes": 1 << 17}), (3, {})])
def test_bytes_on_the_wire(world_of, n, stage, micro_batches, options):
    theory = communication.zero_step(LAYERS * WIDTH**2, n, stage, micro_batches)
    for found in world_of(n).run(sent, stage, micro_batches, options):
        assert found == pytest.approx((theory, theory), rel=0.015), "786 kB, headers included"


def held(stage):
    net = stack()
    engine = STAGES[stage](net, ADAMW)
    x = gpt.numbers(8, WIDTH, dtype=torch.bfloat16)
    for _ in range(2):
        engine(x).square().mean().backward()
        after_backward = engine.state_bytes()
        engine.step()
    gc.collect()
    return after_backward


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_states_follow_the_formula(world_of, n, stage):
    from pardemo.formulas import memory

    theory = memory.model_states(LAYERS * WIDTH**2, n, stage)
    for found in world_of(n).run(held, stage):
        assert found == pytest.approx(theory, rel=0.01)


def live_in_stage_3():
    net = stack()
    engine = Zero3(net, ADAMW)
    x = gpt.numbers(8, WIDTH, dtype=torch.bfloat16)
    engine(x).square().mean().backward()
    engine.step()
    most = 0

    def note(*_):
        nonlocal most
        most = max(most, sum(unit.resident for unit in engine.units))

    for layer in net:
        layer.register_forward_pre_hook(note)
    engine(x).square().mean().backward()
    return most, sum(unit.resident for unit in engine.units)


def test_two_layers_at_a_time(world_of):
    for most, after in world_of(2).run(live_in_stage_3):
        assert most <= 2, "this layer, and the next one on its way"
        assert after == 0


def gathered_bytes(layers):
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    engine = Zero3(net, ADAMW)
    engine(torch.zeros(1, WIDTH))  # learns the order of the layers
    with torch.no_grad(), MemoryMeter() as meter:
        engine(torch.zeros(1, WIDTH))
    return meter.peak_bytes, meter.live_bytes


def test_the_meter_sees_what_stage_3_gathers(world_of):
    for layers in (3, 6):
        for peak, live in world_of(2).run(gathered_bytes, layers):
            assert 1 < peak / (4 * WIDTH**2) < 2.02, "a layer, and the next on its way, however many there are"
            assert live <= 4 * WIDTH, "nothing but the output is left"


def refused(case):
    {
        "nothing": lambda: Zero1(nn.ReLU(), ADAMW),
        "frozen": lambda: Zero3(stack().requires_grad_(False), ADAMW),
        "norm": lambda: Zero2(stack(), ADAMW, max_norm=0),
        "bucket": lambda: Zero2(stack(), ADAMW, bucket_bytes=0),
        "stranger": lambda: Zero3(stack(), ADAMW, layers=[nn.Linear(2, 2)]),
        "itself": lambda: (lambda net: Zero3(net, ADAMW, layers=[net]))(stack()),
        "twice": lambda: (lambda net: Zero3(net, ADAMW, layers=[net[0], net[0]]))(stack()),
        "nested": lambda: (lambda net: Zero3(net, ADAMW, layers=[net.mlp.first, net.mlp]))(gpt.Block(8, 2)),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing", "no parameter that requires a gradient"),
        ("frozen", "no parameter that requires a gradient"),
        ("norm", "max_norm must be above 0, not 0"),
        ("bucket", "bucket_bytes must be above 0, not 0"),
        ("stranger", r"layers\[0\] is no part of the module"),
        ("itself", r"layers\[0\] is the whole module"),
        ("twice", "layers overlap: 0 is in 0"),
        ("nested", "layers overlap: mlp.first is in mlp, which is listed as well"),
    ],
)
def test_bad_input_is_told(world_of, case, message):
    with pytest.raises(RankFailed, match=message):
        world_of(2).run(refused, case)


def test_default_layers_are_the_outermost_lists():
    net = Net()
    assert default_layers(net) == list(net.layers)
    sequence = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert default_layers(sequence) == [sequence[0], sequence[2]]
    assert default_layers(nn.Linear(2, 2)) == []


def part_of_training(stage, folder, begin, end, save_at=None):
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = STAGES[stage](make(torch.float32), ADAMW)
    if begin:
        load(engine, folder)
    losses = []
    for step in range(begin, end):
        loss = engine(batch(step)[rank * SAMPLES // size : (rank + 1) * SAMPLES // size])
        loss.backward()
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
        if step + 1 == save_at:
            save(engine, folder)
    return losses


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 1), (1, 2)])
def test_training_goes_on_from_a_checkpoint_on_another_number_of_ranks(world_of, tmp_path, stage, before, after):
    whole = world_of(before).run(part_of_training, stage, tmp_path / "at", 0, 8, save_at=5)[0]
    rest = world_of(after).run(part_of_training, stage, tmp_path / "at", 5, 8)[0]
    assert rest == pytest.approx(whole[5:], abs=1e-5)
    assert [p.name for p in tmp_path.iterdir()] == ["at"], "nothing half-written is left"


def load_only(stage, folder):
    load(STAGES[stage](make(torch.float32), ADAMW), folder)


def die_while_saving(stage, folder):
    import os

    from pardemo.zero import checkpoint_folder

    engine = STAGES[stage](make(torch.float32), ADAMW)
    engine(batch(0)).backward()
    engine.step()
    save(engine, folder)
    if dist.get_rank() == 1:
        checkpoint_folder.save_file = lambda *args, **kwargs: os._exit(9)  # killed in the middle of the second one
    save(engine, folder)


def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint(world_of, tmp_path):
    with World(2, timeout_s=120) as world, pytest.raises(RankError):
        world.run(die_while_saving, 2, tmp_path / "at")
    world_of(2).run(load_only, 2, tmp_path / "at")


def test_a_checkpoint_that_was_tampered_with_is_not_read(world_of, tmp_path):
    world_of(2).run(part_of_training, 1, tmp_path / "at", 0, 1, save_at=1)
    with pytest.raises(RankFailed, match=r"1.*engine.*2"):
        world_of(2).run(load_only, 2, tmp_path / "at")
    manifest = tmp_path / "at" / "pardemo.json"
    manifest.write_text(manifest.read_text().replace('"lr": 0.', '"lr": 1.'))
    with pytest.raises(RankFailed, match=r"pardemo\.json"):
        world_of(2).run(load_only, 1, tmp_path / "at")
    with pytest.raises(RankFailed, match="no whole checkpoint"):
        world_of(2).run(load_only, 1, tmp_path / "elsewhere")


def test_a_checkpoint_with_other_numbers_than_were_written_is_not_read(world_of, tmp_path):
    world_of(2).run(part_of_training, 1, tmp_path / "at", 0, 1, save_at=1)
    for file in (tmp_path / "at").glob("*.safetensors"):
        whole = file.read_bytes()
        file.write_bytes(bytes([*whole[: len(whole) // 2], whole[len(whole) // 2] ^ 1, *whole[len(whole) // 2 + 1 :]]))
        with pytest.raises(RankFailed, match=rf"{file.name} is not the file that was written"):
            world_of(2).run(load_only, 1, tmp_path / "at")
        file.write_bytes(whole)
    world_of(2).run(load_only, 1, tmp_path / "at")


def test_the_previous_checkpoint_is_read_where_the_new_one_has_no_name_yet(world_of, tmp_path):
    world_of(2).run(part_of_training, 3, tmp_path / "at", 0, 1, save_at=1)
    (tmp_path / "at").rename(tmp_path / "at.previous")
    world_of(2).run(load_only, 3, tmp_path / "at")


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
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Branches(order)


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
    if engine.stage == 3:
        with engine.whole() as module:
            return torch.cat([p.detach().flatten() for p in module.parameters()])
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()])


def train_branches(stage, orders, disturb=None, steps=3, **options):
    rank = dist.get_rank()
    net = branches(orders[rank])
    engine = STAGES[stage](net, ADAMW, **options)
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
        engine(data(step, rank)).backward()
        if disturb == "validation":
            with torch.no_grad():
                engine(data(9, rank))
        if disturb == "failed forward":
            with pytest.raises(RuntimeError):
                engine(torch.ones(2, 3))
        engine.step()
    return weights_of(engine)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("disturb", [None, "failed backward", "bad batch", "validation", "failed forward"])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 0, 1, 2)])
def test_disturbed_training_goes_on_rightly(world_of, stage, disturb, order):
    expected = one_process_over([order, order])
    for found in world_of(2).run(train_branches, stage, [order, order], disturb):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def cleared_by_the_module():
    rank, net = dist.get_rank(), branches()
    engine = Zero1(net, ADAMW)
    engine(1000 * data(9, rank)).backward()
    net.zero_grad()
    net.order = (0, 1)  # the last layer gets no gradient after that
    engine(data(0, rank)).backward()
    engine.step()
    return weights_of(engine)


def test_gradients_that_the_modules_own_zero_grad_cleared_are_gone(world_of):
    expected = one_process_over([(0, 1), (0, 1)], steps=1)
    for found in world_of(2).run(cleared_by_the_module):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (2, {"bucket_bytes": 1})])
def test_a_layer_that_one_rank_leaves_out(world_of, stage, options):
    orders = [(0, 1), (0, 1, 2)]
    expected = one_process_over(orders)
    for found in world_of(2).run(train_branches, stage, orders, **options):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def two_engines(stage):
    """A generator and a critic on one group, one inside the other's forward."""
    rank, results = dist.get_rank(), []
    for engine_of in (None, STAGES[stage]):
        first, second = branches(), branches((2, 1))
        second.forward = lambda x, net=second: torch.tanh(net.layers[2](net.layers[1](x))).square().mean()
        first.forward = lambda x, net=first: torch.tanh(net.layers[0](x))
        if engine_of is None:
            optimizers = [ADAMW(first.parameters()), ADAMW(second.parameters())]
            for step in range(3):
                for r in range(2):
                    (second(first(data(step, r))) / 2).backward()
                for p in (*first.parameters(), *second.parameters()):
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(torch.cat([p.detach().flatten() for n in (first, second) for p in n.parameters()]))
        else:
            engines = [engine_of(first, ADAMW), engine_of(second, ADAMW)]
            for step in range(3):
                engines[1](engines[0](data(step, rank))).backward()
                for engine in engines:
                    engine.step()
            results.append(torch.cat([weights_of(engine) for engine in engines]))
    return (results[0] - results[1]).abs().max().item()


@pytest.mark.parametrize("stage", STAGES)
def test_two_engines_share_a_group(world_of, stage):
    assert max(world_of(2).run(two_engines, stage)) < 1e-5


def wrapped_again():
    found = []
    for first, second in [(2, 1), (3, 1), (2, 2), (1, 3), (3, 3)]:
        net = branches()
        engine = STAGES[first](net, ADAMW)
        with pytest.raises(ValueError, match="ZeRO"):
            STAGES[second](net, ADAMW)
        engine.close()
        engine = STAGES[second](net, ADAMW)
        losses = []
        for _ in range(3):
            loss = engine(data(0, 0))
            loss.backward()
            engine.step()
            losses.append(loss.item())
        engine.close()
        found.append(losses[0] > losses[1] > losses[2])
    return found


def test_a_module_can_be_wrapped_again_when_its_engine_was_closed(world_of):
    assert world_of(2).run(wrapped_again) == [[True] * 5] * 2


def left_behind(stage):
    import weakref

    gc.collect()
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    engine = STAGES[stage](net, ADAMW)
    engine(torch.ones(2, 64)).sum().backward()
    engine.step()
    refs = [weakref.ref(engine), weakref.ref(net), *map(weakref.ref, engine.units)]
    del engine, net
    gc.collect()
    return [ref() is None for ref in refs]


@pytest.mark.parametrize("stage", STAGES)
def test_a_forgotten_engine_is_gone(world_of, stage):
    assert all(all(found) for found in world_of(2).run(left_behind, stage))


def parameters_outside():
    net = branches()
    engine = Zero3(net, ADAMW)
    empty = [p.numel() for p in net.parameters()]
    try:
        engine.state_dict()
        refused = False
    except RuntimeError as error:
        refused = "in whole()" in str(error)
    with engine.whole() as module:
        names = list(engine.state_dict())
        with engine.whole(), torch.no_grad():  # may be nested
            for p in module.parameters():
                p.fill_(2.0)
    with engine.whole() as module:
        kept = all(bool((p == 2).all()) for p in module.parameters())
    engine(data(0, 0)).backward()
    engine.step()
    near = weights_of(engine)
    return set(empty), refused, len(names), kept, bool(((near - 2).abs() < 0.1).all())


def test_stage_3_parameters_outside_their_use(world_of):
    for empty, refused, names, kept, near in world_of(2).run(parameters_outside):
        assert empty == {0}, "reading them is an error, not freed memory"
        assert refused
        assert names == 6
        assert kept
        assert near, "what was written is what is trained on"


def half_precision():
    Zero1(nn.Linear(4, 4).half(), ADAMW)


def test_fp16_is_refused(world_of):
    with pytest.raises(RankFailed, match=r"torch\.float16.*bfloat16.*float32"):
        world_of(2).run(half_precision)


def most_packed(bucket_bytes):
    import weakref

    net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(12)])
    engine = Zero2(net, ADAMW, bucket_bytes=bucket_bytes)
    flats, most = [], 0
    pack = type(engine.units[0]).pack_gradients

    def noting(unit):
        nonlocal most
        flat = pack(unit)
        flats.append(weakref.ref(flat))
        most = max(most, sum(ref() is not None for ref in flats))
        return flat

    for unit in engine.units:
        unit.pack_gradients = lambda unit=unit: noting(unit)
    for _ in range(3):
        engine(torch.ones(4, 256)).sum().backward()
        engine.step()
    return most


def test_gradients_do_not_pile_up(world_of):
    assert max(world_of(4).run(most_packed, 1 << 18)) <= 3, "one at work, one waiting, one just packed"


def changed_by_hand(stage):
    engine = {1: Zero1, 2: Zero2, 3: Zero3}[stage](stack(), partial(torch.optim.SGD, lr=0.0))
    with engine.whole() as net, torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    x = gpt.numbers(2, WIDTH, dtype=torch.bfloat16)
    engine(x).square().mean().backward()
    engine.step()
    with engine.whole() as net:
        return all(bool((p == 0.5).all()) for p in net.parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_written_into_whole_parameters_stays(world_of, stage):
    assert all(world_of(2).run(changed_by_hand, stage))
