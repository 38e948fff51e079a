"""Backwards in two parts: schedules, the split itself against autograd's, and on real ranks against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from conftest import few
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pardemo.data_parallel import BucketedDataParallel
from pardemo.formulas import pipeline as formulas
from pardemo.meters import MemoryMeter, Timeline, WireMeter
from pardemo.meters.pace import Paced
from pardemo.pipeline_parallel import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Pipeline,
    Schedule,
    ScheduleError,
    chart,
    cut_by_layers,
    measured_chart,
    most_held,
    one_f_one_b,
    prove,
    zb_h1,
    zb_v,
)
from pardemo.pipeline_parallel.split import SplitBackward
from pardemo.small_models import gpt

WIDTH, BATCH, M = 32, 24, 6
#: As in test_pipeline.py: fp32 sums in another order.
CLOSE = 1e-5
ORDERS = [(zb_h1, 1), (zb_v, 2)]


def mixed(rank, ranks, micro_batches):
    """Whole backwards on the last rank, parts on the others."""
    for one in zb_h1(rank, ranks, micro_batches):
        if rank < ranks - 1:
            yield one
        elif not isinstance(one, BackwardWeight):
            yield Backward(one.stage, one.micro_batch) if isinstance(one, BackwardInput) else one


# --- the split -------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """A weight used three times, once transposed; an output that skips the trunk, and one that is the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x):
        y = F.linear(self.b(self.norm(self.a(x)).tanh()), self.a.weight, self.b.bias) + x
        return F.linear(y, self.a.weight.t() * self.scale), self.scale.exp(), x


class Doubled(nn.Module):
    """A hook changes the gradient where the weight joins the trunk."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return self.b(y.relu())


class Again(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), reentrant

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


def of(module, x):
    found = module(x)
    return [y for y in (found if isinstance(found, tuple) else (found,)) if y.requires_grad]


MODULES = {
    "linear": lambda: nn.Linear(8, 8),
    "mlp": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
    "shared": Shared,
    "hook": Doubled,
    "checkpointed": Again,
    "nothing": nn.Identity,
    "frozen": lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    "lstm": lambda: gpt.seeded(lambda: OfLstm()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
}


class OfLstm(nn.LSTM):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("needs_input", [True, False])
def test_the_two_parts_are_autograds_backward_bit_for_bit(name, needs_input):
    module = gpt.seeded(MODULES[name])
    plain, hooked = copy.deepcopy(module), []
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hooked.append)
    for step in range(2):  # gradients add up
        x = gpt.numbers(4, 5, 8, seed=step).requires_grad_(needs_input or name in ("nothing", "checkpointed"))
        same = x.detach().clone().requires_grad_(x.requires_grad)
        torch.manual_seed(step)
        outputs = of(module, x)
        torch.manual_seed(step)
        expected = of(plain, same)
        gradients = [gpt.numbers(*y.shape, seed=7 + n) for n, y in enumerate(outputs)]
        torch.autograd.backward(expected, gradients)
        before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        split = SplitBackward([get_gradient_edge(y) for y in outputs], gradients, [x])
        if x.requires_grad:
            assert torch.equal(x.grad, same.grad)
        for p, was in zip(module.parameters(), before, strict=True):
            assert (p.grad is None and was is None) or torch.equal(p.grad, was), "a weight's gradient came early"
        split.weights()
        for found, goal in zip(module.parameters(), plain.parameters(), strict=True):
            assert (found.grad is None and goal.grad is None) or torch.equal(found.grad, goal.grad)
    assert len(hooked) == 2 * sum(p.requires_grad for p in module.parameters()), "once per weight and backward"


def test_the_parts_together_compute_no_more_than_the_whole():
    from torch.utils.flop_counter import FlopCounterMode

    module, flops = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), []
    x = gpt.numbers(4, 8).requires_grad_()
    y = module(x)
    with FlopCounterMode(display=False) as counter:
        split = SplitBackward([get_gradient_edge(y)], [torch.ones(4, 8)], [x])
    flops.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        split.weights()
    flops.append(counter.get_total_flops())
    assert flops == [3 * 2 * 4 * 8 * 8] * 2


def test_reentrant_checkpointing_is_refused_by_autograd():
    x = gpt.numbers(4, 8).requires_grad_()
    y = Again(reentrant=True)(x)
    with pytest.raises(RuntimeError, match=r"use_reentrant=True, .* is incompatible"):
        SplitBackward([get_gradient_edge(y)], [torch.ones(4, 8)], [x])


# --- real ranks ------------------------------------------------------------------------------------------------------


def batch(samples=BATCH, width=WIDTH):
    return gpt.numbers(samples, width), gpt.numbers(samples, width, seed=1)


def layers(number=8):
    return [gpt.seeded(lambda: gpt.MLP(WIDTH), seed) for seed in range(number)]


def mine_of(stages, schedule):
    return [stages[s] for s in schedule.stages_of(dist.get_rank())]


def on_ranks(order, chunks, m=M, steps=2):
    schedule = Schedule(order, dist.get_world_size(), m, chunks)
    found = Pipeline(mine_of(cut_by_layers(layers(), schedule.stages), schedule), schedule, F.mse_loss)
    losses = [found.step(*batch()) for _ in range(steps)]  # the second adds up
    evaluated = found.evaluate(*batch())
    of_stage = {s: [p.grad for p in chunk.parameters()] for s, chunk in found._stages.items()}
    return [None if loss is None else loss.item() for loss in (*losses, evaluated)], of_stage


def gradients_by_stage(results):
    of_stage = {stage: grads for _, stages in results for stage, grads in stages.items()}
    return [g for stage in sorted(of_stage) for g in of_stage[stage]]


@pytest.mark.parametrize("m", [2, 6])
@pytest.mark.parametrize(("order", "chunks"), [*ORDERS, (mixed, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_and_gradients_are_those_of_one_process(world_of, ranks, order, chunks, m):
    results = world_of(ranks).run(on_ranks, order, chunks, m)
    model, (inputs, targets) = nn.Sequential(*layers()), batch()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    last = 0 if chunks == 2 else ranks - 1  # up the V again
    assert results[last][0] == pytest.approx([loss.item()] * 3, rel=CLOSE)
    assert all(set(losses) == {None} for rank, (losses, _) in enumerate(results) if rank != last)
    for found, parameter in zip(gradients_by_stage(results), model.parameters(), strict=True):
        assert gpt.relative_error(found, 2 * parameter.grad) < CLOSE


@pytest.mark.parametrize("ranks", [2, 4])
def test_h1s_gradients_are_1f1bs_bit_for_bit(world_of, ranks):
    split, whole = (world_of(ranks).run(on_ranks, order, 1) for order in (zb_h1, one_f_one_b))
    assert split[-1][0] == whole[-1][0]
    pairs = zip(gradients_by_stage(split), gradients_by_stage(whole), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def tied_on_ranks(order):
    net = gpt.seeded(lambda: gpt.GPT(vocabulary=64))
    schedule = Schedule(order, 2, 2)
    stage = cut_by_layers(gpt.layers_of(net), 2)[dist.get_rank()]
    tied = [(net.embedding.weight, dist.group.WORLD)]
    tokens = gpt.text(8, 33, 64)
    Pipeline([stage], schedule, token_loss, tied=tied).step(tokens[:, :-1], tokens[:, 1:])
    return None, {dist.get_rank(): [p.grad for p in stage.parameters()]}


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_tied_weights_and_tokens(world_of):
    split, whole = (world_of(2).run(tied_on_ranks, order) for order in (zb_h1, one_f_one_b))
    pairs = zip(gradients_by_stage(split), gradients_by_stage(whole), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def under_autocast(order):
    stage = gpt.seeded(lambda: gpt.MLP(WIDTH), dist.get_rank())
    with torch.autocast("cpu", torch.bfloat16):
        Pipeline([stage], Schedule(order, 2, M), F.mse_loss).step(*batch())
    return None, {dist.get_rank(): [p.grad for p in stage.parameters()]}


def test_under_autocast(world_of):
    """Weights in bf16 are one copy for all micro-batches: a joint of several graphs."""
    split, whole = (world_of(2).run(under_autocast, order) for order in (zb_h1, one_f_one_b))
    for found, expected in zip(gradients_by_stage(split), gradients_by_stage(whole), strict=True):
        assert gpt.relative_error(found, expected) < 2**-8


@pytest.mark.ranks(2)
def test_what_cannot_be_split_is_refused(rank):
    stage, alone = nn.Linear(WIDTH, WIDTH), dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match="checkpointing"):
        Pipeline([stage], Schedule(zb_h1, 2, M), F.mse_loss, checkpointing=True)
    with pytest.raises(ValueError, match="engine"):
        Pipeline([BucketedDataParallel(stage, alone)], Schedule(zb_h1, 2, M), F.mse_loss)


def test_the_timeline_follows_the_schedule(world_of):
    def spans():
        schedule, timeline = Schedule(zb_v, 2, M, 2), Timeline()
        stages = cut_by_layers(layers(), 4)
        Pipeline(mine_of(stages, schedule), schedule, F.mse_loss, timeline=timeline).step(*batch())
        return timeline.spans

    found = measured_chart([span for spans in world_of(2).run(spans) for span in spans])
    schedule = Schedule(zb_v, 2, M, 2)
    assert found.in_flight == chart(schedule).in_flight
    letters = {"forward": "F", "backward": "I", "weight gradients": "W"}
    order = [f"{letters[span.kind]} {span.name}" for span in found.spans if span.rank == 1]
    assert order == [str(one) for one in schedule.computes(1)]


def bytes_of(order, chunks, width, samples):
    schedule = Schedule(order, dist.get_world_size(), 4, chunks)
    found = Pipeline([nn.Linear(width, width, bias=False) for _ in range(chunks)], schedule, F.mse_loss)
    tensors = batch(samples, width)
    found.step(*tensors)
    with WireMeter() as wire:
        found.step(*tensors)
    return wire.sent_bytes, wire.received_bytes


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("samples", [4096, 8192])  # by links of our own, and by the backend
def test_a_vs_bytes_at_the_boundaries(world_of, ranks, samples):
    width = 256
    for rank, (sent, received) in enumerate(world_of(ranks).run(bytes_of, zb_v, 2, width, samples)):
        expected = formulas.boundary_bytes(rank, ranks, 4, width * samples, 2, v_shape=True)
        assert (sent, received) == pytest.approx(expected, rel=0.002, abs=200)


def peaks(order, m):
    schedule = Schedule(order, 4, m)
    stage = nn.Sequential(*(gpt.seeded(lambda: gpt.MLP(WIDTH), s) for s in range(2)))
    found, tensors = Pipeline([stage], schedule, F.mse_loss), batch(128 * m)
    found.step(*tensors)
    with MemoryMeter(stage) as memory:
        found.step(*tensors)
    return memory.peak["activations"]


def test_h1s_memory_does_not_grow_with_m_and_what_waits_for_its_weights_keeps_its_gradients_too(world_of):
    few, many = (world_of(4).run(peaks, zb_h1, m) for m in (8, 16))
    assert few == pytest.approx(many, rel=0.02)
    plain = world_of(4).run(peaks, one_f_one_b, 8)
    assert few[0] < 1.05 * plain[0], "the first rank puts nothing off"
    # of a micro-batch autograd keeps 2 × 8 widths inside, 1 between and the input; what waits for the weights' part
    # keeps that, and the gradients that arrived at four layers: 2 × (4 + 1)
    width, kept, noted = 4 * 128 * WIDTH, 18, 10
    held = most_held(Schedule(zb_h1, 4, 8), (kept + noted) / kept)
    assert few == pytest.approx([kept * width * most for most in held], rel=0.1)
    assert plain == pytest.approx([kept * width * most for most in (4, 3, 2, 1)], rel=0.4, abs=8 * width)


# --- torch's ---------------------------------------------------------------------------------------------------------


def by_either(kind, order, chunks):
    from pardemo.peers.pytorch.pipelining import TorchPipeline

    schedule, timeline = Schedule(order, dist.get_world_size(), M, chunks), Timeline()
    mine = mine_of(cut_by_layers(layers(), schedule.stages), schedule)
    if kind == "ours":
        found = Pipeline(mine, schedule, F.mse_loss, timeline=timeline)
    else:
        found = TorchPipeline(mine, order.__name__, M, F.mse_loss, timeline=timeline)
    loss = found.step(*batch())
    stages = zip(schedule.stages_of(dist.get_rank()), mine, strict=True)
    of_stage = {s: [p.grad for p in chunk.parameters()] for s, chunk in stages}
    letters = {"forward": "F", "backward": "I", "weight gradients": "W"}
    steps = [f"{letters[span.kind]} {span.name}" for span in timeline.spans if span.kind in letters]
    return (loss if loss is None else loss.item(), steps), of_stage


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("order", "chunks"), ORDERS)
def test_torchs_zero_bubble_schedules_do_the_same_in_the_same_order(world_of, ranks, order, chunks):
    ours, theirs = (world_of(ranks).run(by_either, kind, order, chunks) for kind in ("ours", "torch"))
    for found, expected in zip(gradients_by_stage(theirs), gradients_by_stage(ours), strict=True):
        assert gpt.relative_error(found, expected) < CLOSE
    for ((our_loss, our_steps), _), ((their_loss, their_steps), _) in zip(ours, theirs, strict=True):
        assert their_loss == (our_loss if our_loss is None else pytest.approx(our_loss, rel=CLOSE))
        assert their_steps == our_steps


# --- bubbles ---------------------------------------------------------------------------------------------------------

PACE = 0.06  # long beside what a loaded machine adds to each of 48 computations


def paced(order, chunks, m):
    schedule, timeline = Schedule(order, dist.get_world_size(), m, chunks), Timeline()
    each = PACE / chunks
    weights = each if schedule.is_split else 0
    mine = [Paced(nn.Linear(8, 8), each, 2 * each - weights, weights_s=weights) for _ in range(chunks)]
    pipeline = Pipeline(mine, schedule, F.mse_loss, timeline=timeline)
    spans = []
    for _ in range(3):
        timeline.spans.clear()
        dist.barrier()
        pipeline.step(*batch(4 * m, 8))
        spans.append(list(timeline.spans))
    return spans


def test_a_paced_module_waits_for_its_weights_in_the_second_part():
    timeline, x = Timeline(), gpt.numbers(4, 8).requires_grad_()
    module = nn.Linear(8, 8)
    slow = Paced(module, 0.01, 0.02, timeline, weights_s=0.03)
    y = slow(x)
    assert torch.equal(y, module(x))
    split = SplitBackward([get_gradient_edge(y)], [torch.ones(4, 8)], [x])
    assert [span.name for span in timeline.spans] == ["forward", "backward"]
    split.weights()
    assert [span.name for span in timeline.spans] == ["forward", "backward", "weight gradients"]
    assert torch.equal(module.weight.grad, torch.ones(4, 8).t() @ x)
    with pytest.raises(ValueError, match=r"weights.*gradients"):
        Paced(nn.ReLU(), weights_s=0.1)
    with pytest.raises(ValueError, match=r"pace.*0.*-1"):
        Paced(nn.ReLU(), weights_s=-1)


@pytest.mark.parametrize(("order", "chunks"), few([(one_f_one_b, 1), *ORDERS]))
def test_paced_stages_are_idle_as_long_as_the_formula_says(world_of, order, chunks):
    p, m, shares = 4, 8, []
    idle = formulas.idle(order.__name__, p, m, PACE, 2 * PACE)
    expected = pytest.approx(idle / (3 * PACE * m + idle), abs=0.05)
    for _ in range(5):  # others on this machine disturb some of them
        steps = zip(*world_of(p).run(paced, order, chunks, m), strict=True)
        charts = [measured_chart([span for rank in step for span in rank]) for step in steps]
        shares += [found.bubble_of_total for found in charts]
        if min(shares) == expected:
            break
    assert min(shares) == expected
    assert [found.in_flight for found in charts] == [chart(Schedule(order, p, m, chunks)).in_flight] * len(charts)


@pytest.mark.parametrize("name", ["interleaved zero bubble", "ZB-V", "DualPipeV"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_torchs_tables_are_proven_and_timed_by_the_same_code(name, ranks, micro_batches):
    from pardemo.peers.pytorch import orders

    schedule = orders.schedule(name, ranks, micro_batches)
    assert prove(schedule).in_flight == [2 * ranks + (name == "DualPipeV")] * ranks
    course = chart(schedule)
    assert course.makespan == pytest.approx(3 * micro_batches + (ranks - 1) / 2)  # half a forward for each rank
    if name == "ZB-V":
        assert course.makespan == chart(Schedule(zb_v, ranks, micro_batches, 2)).makespan


def test_what_torch_has_no_table_for():
    from pardemo.peers.pytorch import orders

    with pytest.raises(ValueError, match=r"'zb'.*interleaved.*ZB-V"):
        orders.schedule("zb", 2, 4)
    with pytest.raises(ScheduleError, match=r"DualPipeV.*3"):
        chart(orders.schedule("DualPipeV", 2, 3))
    with pytest.raises(ScheduleError, match=r"torch's.*ZB-V.*2.*3"):
        chart(orders.schedule("ZB-V", 2, 4, 3))
