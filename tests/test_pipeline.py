"""The executor on real ranks: parity with one process, bytes, memory, tied weights, batch norm, bad input."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import World
from pardemo.data_parallel import BucketedDataParallel
from pardemo.formulas import pipeline as formulas
from pardemo.groups import Groups, ParallelDims
from pardemo.meters import MemoryMeter, Timeline, WireMeter
from pardemo.pipeline_parallel import (
    Backward,
    BackwardInput,
    BackwardWeight,
    DeferredBatchNorm,
    Forward,
    Pipeline,
    Schedule,
    chart,
    cut_by_layers,
    exchange,
    gpipe,
    interleaved,
    measured_chart,
    most_held,
    one_f_one_b,
    prove,
    zb_h1,
    zb_v,
)
from pardemo.pipeline_parallel.exchange import COLUMNS
from pardemo.small_models import gpt
from pardemo.world.errors import RankFailed

WIDTH, BATCH, M = 32, 24, 6
#: Relative: fp32 sums over micro-batches and over one batch differ by some 1e-7 of a gradient's norm. A factor of 1.003
#: somewhere would be 3e-3.
CLOSE = 1e-5


WHOLE, SPLIT = [(gpipe, 1), (one_f_one_b, 1), (interleaved, 2), (interleaved, 3)], [(zb_h1, 1), (zb_v, 2)]


def mixed(rank, ranks, micro_batches):
    """Whole backwards on the last rank, parts on the others."""
    for one in zb_h1(rank, ranks, micro_batches):
        if rank < ranks - 1:
            yield one
        elif not isinstance(one, BackwardWeight):
            yield Backward(one.stage, one.micro_batch) if isinstance(one, BackwardInput) else one


def assert_equal(found, expected):
    """Gradients against those of one process: each tensor's difference is small beside the tensor itself."""
    for gradient, parameter in zip(found, expected, strict=True):
        assert gpt.relative_error(gradient, parameter) < CLOSE


def layers(number=12):
    return [gpt.seeded(lambda: gpt.MLP(WIDTH), seed) for seed in range(number)]


def batch(samples=BATCH, width=WIDTH):
    return gpt.numbers(samples, width), gpt.numbers(samples, width, seed=1)


def pipeline(order, chunks=1, micro_batches=M, number=12, **options):
    schedule = Schedule(order, dist.get_world_size(), micro_batches, chunks)
    stages = cut_by_layers(layers(number), schedule.stages)
    mine = [stages[s] for s in schedule.stages_of(dist.get_rank())]
    return Pipeline(mine, schedule, F.mse_loss, **options)


def gradients_on_ranks(order, chunks, m=M, checkpointing=False):
    found = pipeline(order, chunks, m, checkpointing=checkpointing)
    losses = [found.step(*batch()) for _ in range(2)]  # the second adds up
    losses.append(found.evaluate(*batch()))
    of_stage = {s: [p.grad for p in chunk.parameters()] for s, chunk in found._stages.items()}
    return [None if loss is None else loss.item() for loss in losses], of_stage


def assert_one_process(results, last, layers, passes=1):
    """Losses, which rank ``last`` alone has, and the gradients of so many passes, of results of (losses, gradients)."""
    model, (inputs, targets) = nn.Sequential(*layers), batch()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    for rank, (losses, *_) in enumerate(results):
        assert losses == (
            pytest.approx([loss.item()] * len(losses), rel=CLOSE) if rank == last else [None] * len(losses)
        )
    of_stage = {stage: gradients for _, stages, *_ in results for stage, gradients in stages.items()}
    found = [gradient for stage in sorted(of_stage) for gradient in of_stage[stage]]
    assert_equal(found, [passes * p.grad for p in model.parameters()])


@pytest.mark.parametrize(
    ("order", "chunks", "checkpointing"),
    [*((*of, again) for of in WHOLE for again in (False, True)), *((*of, False) for of in (*SPLIT, (mixed, 1)))],
)
@pytest.mark.parametrize(("ranks", "m"), [(1, 6), (2, 2), (2, 6), (4, 4)])
def test_losses_and_gradients_are_those_of_one_process(world_of, ranks, m, order, chunks, checkpointing):
    results = world_of(ranks).run(gradients_on_ranks, order, chunks, m, checkpointing)
    assert_one_process(results, 0 if order is zb_v else ranks - 1, layers(), passes=2)  # up the V again


@pytest.mark.ranks(2)
def test_what_cannot_be_split_is_refused(rank):
    stage, alone = nn.Linear(WIDTH, WIDTH), dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match="checkpointing"):
        Pipeline([stage], Schedule(zb_h1, 2, M), F.mse_loss, checkpointing=True)
    with pytest.raises(ValueError, match="engine"):
        Pipeline([BucketedDataParallel(stage, alone)], Schedule(zb_h1, 2, M), F.mse_loss)


def test_the_group_is_the_one_passed_in(world_of):
    """Two pipelines of two ranks side by side, each on its own half of the batch."""

    def losses():
        with Groups(ParallelDims(dp=2, pp=2)) as groups:
            schedule = Schedule(one_f_one_b, 2, 3)
            stage = cut_by_layers(layers(6), 2)[dist.get_rank(groups.pp)]
            copies = BucketedDataParallel(stage, groups.dp)
            part = slice(dist.get_rank(groups.dp) * 12, dist.get_rank(groups.dp) * 12 + 12)
            found = Pipeline([copies], schedule, F.mse_loss, groups.pp)
            with WireMeter() as wire:
                loss = found.step(*(tensor[part] for tensor in batch()))
            return loss, [p.grad.clone() for p in stage.parameters()], wire.sent_bytes

    results = world_of(4).run(losses)  # ranks 0, 1: stage 0; ranks 2, 3: stage 1
    model = nn.Sequential(*layers(6))
    loss = F.mse_loss(model(batch()[0]), batch()[1])
    loss.backward()
    assert (results[2][0] + results[3][0]).item() / 2 == pytest.approx(loss.item(), rel=CLOSE)
    for copies in ((results[0], results[2]), (results[1], results[3])):
        found = [g for _, grads, _ in copies for g in grads]
        assert_equal(found, [p.grad for p in model.parameters()])
    # the copies' gradients travel once per step, not once per micro-batch
    gradients = 4 * sum(p.numel() for layer in layers(3) for p in layer.parameters())
    assert results[0][2] < 1.5 * gradients


def bytes_of(schedule, width, samples):
    torch.manual_seed(0)
    mine = [nn.Linear(width, width, bias=False) for _ in range(schedule.chunks)]
    found = Pipeline(mine, schedule, F.mse_loss)
    tensors = batch(samples, width)
    found.step(*tensors)
    with WireMeter() as wire:
        found.step(*tensors)
    return wire.sent_bytes, wire.received_bytes


@pytest.mark.parametrize(
    ("ranks", "order", "chunks"), [(2, gpipe, 1), (4, one_f_one_b, 1), (2, interleaved, 2), (1, zb_v, 2), (4, zb_v, 2)]
)
@pytest.mark.parametrize("samples", [4096, 8192])  # of 1 MiB by links of our own, of 2 MiB by the backend
def test_bytes_at_the_boundaries(world_of, ranks, order, chunks, samples):
    width = 256
    found = world_of(ranks).run(bytes_of, Schedule(order, ranks, 4, chunks), width, samples)
    for rank, measured in enumerate(found):
        expected = formulas.boundary_bytes(rank, ranks, 4, width * samples, chunks, v_shape=order is zb_v)
        assert measured == pytest.approx(expected, rel=0.002, abs=200)


def peak_of(order, micro_batches, checkpointing=False):
    samples = 128 * micro_batches  # a micro-batch stays the same
    found = pipeline(order, 1, micro_batches, 6, checkpointing=checkpointing)
    tensors = batch(samples)
    found.step(*tensors)
    with MemoryMeter(found._stages.values()) as memory:
        found.step(*tensors)
    return memory.peak["activations"]


def test_activations_grow_with_m_in_gpipe_and_with_p_in_1f1b(world_of):
    world = world_of(2)
    # of a stage of three MLPs autograd keeps 3 × (4 + 4) widths inside and 2 between; its input is the batch, and its
    # output is let go of once it is sent
    kept = 4 * 128 * WIDTH * (3 * 8 + 2)
    few, many = (world.run(peak_of, gpipe, m)[0] for m in (4, 8))
    assert (many - few) / 4 == pytest.approx(kept, rel=0.02)
    one, few, many = (world.run(peak_of, one_f_one_b, m)[0] for m in (1, 4, 16))
    assert few == pytest.approx(many, rel=0.02)
    assert few - one == pytest.approx(kept, rel=0.05)  # two in flight on rank 0
    # the second stage keeps what it received: of a checkpointed one that is all
    few, many = (world.run(peak_of, gpipe, m, True)[1] for m in (4, 8))
    assert (many - few) / 4 == pytest.approx(4 * 128 * WIDTH, rel=0.1)


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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_deferred_batch_norm_has_the_whole_batchs_running_statistics(world_of, checkpointing):
    def running():
        norm = DeferredBatchNorm(WIDTH, M)
        schedule = Schedule(one_f_one_b, 2, M)
        stage = norm if dist.get_rank() == 0 else nn.Linear(WIDTH, WIDTH)
        found = Pipeline([nn.Sequential(stage)], schedule, F.mse_loss, checkpointing=checkpointing)
        for _ in range(2):
            found.step(*batch())
        return norm.running_mean, norm.running_var, norm.num_batches_tracked.item()

    plain = nn.BatchNorm1d(WIDTH)
    for _ in range(2):
        plain(batch()[0])
    mean, variance, batches = world_of(2).run(running)[0]
    torch.testing.assert_close(mean, plain.running_mean)
    torch.testing.assert_close(variance, plain.running_var)
    assert batches == 2


def test_deferred_batch_norm_normalises_by_the_micro_batch_and_evaluates_by_the_running_statistics():
    deferred, plain, x = DeferredBatchNorm(8, 2), nn.BatchNorm1d(8), gpt.numbers(16, 8)
    torch.testing.assert_close(deferred(x), plain(x))
    deferred(x)
    deferred.eval()
    expected = (x - deferred.running_mean) / (deferred.running_var + deferred.eps).sqrt()
    torch.testing.assert_close(deferred(x), expected)
    with pytest.raises(ValueError, match=r"micro_batches.*1.*0"):
        DeferredBatchNorm(8, 0)


def test_deferred_batch_norm_keeps_the_digits_of_a_small_variance():
    """Σx² − (Σx)²/n of numbers around 3,000 with a variance of 1: in fp32 nothing of it would be left."""
    deferred, plain, x = DeferredBatchNorm(8, 2), nn.BatchNorm1d(8).double(), 3000 + gpt.numbers(16, 8)
    for part in x.chunk(2):
        deferred(part)
    plain(x.double())
    torch.testing.assert_close(deferred.running_var.double(), plain.running_var, rtol=1e-6, atol=0)
    torch.testing.assert_close(deferred.running_mean.double(), plain.running_mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("order", "chunks"), [(one_f_one_b, 1), (zb_v, 2)])
def test_the_timeline_follows_the_schedule(world_of, order, chunks):
    def spans():
        timeline = Timeline()
        pipeline(order, chunks, timeline=timeline).step(*batch())
        return timeline.spans

    found = measured_chart([span for spans in world_of(2).run(spans) for span in spans])
    schedule = Schedule(order, 2, M, chunks)
    assert found.in_flight == chart(schedule).in_flight
    letters = {"forward": "F", "backward": "I" if schedule.is_split else "B", "weight gradients": "W"}
    for rank in range(2):
        computed = [f"{letters[span.kind]} {span.name}" for span in found.spans if span.rank == rank]
        assert computed == [str(one) for one in schedule.computes(rank)]


@pytest.mark.ranks(2)
def test_wrong_input_is_named():
    for message, call in (
        ("a batch of 24 does not divide into 5 micro-batches of equal size",
         lambda: pipeline(gpipe, micro_batches=5).step(*batch())),
        ("the rank that reads the (inputs|targets) needs a tensor or a tuple of them, not NoneType",
         lambda: pipeline(gpipe).step()),
        ("the schedule is for 4 ranks with 1 stages each, not for 2 ranks with 1",
         lambda: Pipeline([nn.Identity()], Schedule(gpipe, 4, 2), F.mse_loss)),
        ("the schedule is for 2 ranks with 2 stages each, not for 2 ranks with 1",
         lambda: Pipeline([nn.Identity()], Schedule(interleaved, 2, 2, 2), F.mse_loss)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_one_ranks_wrong_batch_ends_the_others_wait(world_of):
    def second_step():
        found = pipeline(one_f_one_b)
        found.step(*batch())
        x, y = batch()
        found.step(x, y[: BATCH - 1])

    with pytest.raises(
        RankFailed, match=r"^rank 1: ValueError: a batch of 23 .*; rank 0: ConnectionError: (activ|grad)"
    ):
        world_of(2).run(second_step)


def over_the_backend():
    exchange.LINK_BYTES = 100  # the form of an activation still goes by a link
    try:
        return gradients_on_ranks(interleaved, 2)
    finally:
        exchange.LINK_BYTES = 1 << 20


def test_large_messages_go_over_the_backend(world_of):
    found = world_of(2).run(over_the_backend)
    reference = world_of(2).run(gradients_on_ranks, interleaved, 2)
    assert found[1][0] == reference[1][0]
    for (_, mine), (_, theirs) in zip(found, reference, strict=True):
        for stage, gradients in mine.items():
            assert all(torch.equal(a, b) for a, b in zip(gradients, theirs[stage], strict=True))


def rounds_of_its_own(rank, ranks, micro_batches):
    """Rank 0 sends all its activations before it reads a gradient; rank 1 takes half of them, and answers."""
    if rank == 0:
        yield from gpipe(rank, ranks, micro_batches)
        return
    for some in torch.arange(micro_batches).chunk(2):
        yield from (Forward(rank, k) for k in some.tolist())
        yield from (Backward(rank, k) for k in some.tolist())


def test_no_order_waits_for_a_message_to_leave(world_of):
    width, samples, m = 256, 1024, 24  # 1 MiB: more is on its way than the kernel keeps

    def loss():
        schedule = Schedule(rounds_of_its_own, 2, m)
        prove(schedule)
        return Pipeline([gpt.seeded(lambda: nn.Linear(width, width))], schedule, F.mse_loss).step(
            *batch(samples * m, width)
        )

    found = world_of(2).run(loss, timeout_s=180)[1]
    layer = gpt.seeded(lambda: nn.Linear(width, width))
    x, y = batch(samples * m, width)
    assert found.item() == pytest.approx(F.mse_loss(layer(layer(x)), y).item(), rel=CLOSE)


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("this stage is broken")


def broken_then_whole():
    rank, told = dist.get_rank(), None
    stage = nn.Linear(WIDTH, WIDTH)
    found = Pipeline([Fails() if rank else stage], Schedule(one_f_one_b, 2, M), F.mse_loss)
    try:
        found.step(*batch())
    except (RuntimeError, ConnectionError) as error:
        told = str(error)
    dist.barrier()  # both know of it: the next step has links of its own
    with pytest.raises(RuntimeError, match="Pipeline"):
        found.step(*batch())
    return told, pipeline(one_f_one_b).step(*batch())


def test_a_stage_that_fails_ends_the_others_wait_and_leaves_nothing_behind(world_of):
    (waited, _), (failed, loss) = world_of(2).run(broken_then_whole)
    assert failed == "this stage is broken"
    assert re.match(r"(activations|gradients): (rank 1 of the group: |cannot send to rank 1)", waited)
    assert loss.item() == pytest.approx(F.mse_loss(nn.Sequential(*layers())(batch()[0]), batch()[1]).item(), rel=CLOSE)


def peers_steps(kind, order, chunks, steps=2):
    from pardemo.peers.deepspeed.pipeline import DeepSpeedPipeline
    from pardemo.peers.pytorch.pipelining import TorchPipeline

    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule, timeline = Schedule(order, ranks, M, chunks), Timeline()
    stages = cut_by_layers(layers(), schedule.stages)
    mine = [stages[stage] for stage in schedule.stages_of(rank)]
    found = {
        "ours": lambda: Pipeline(mine, schedule, F.mse_loss, timeline=timeline),
        "torch": lambda: TorchPipeline(mine, order.__name__, M, F.mse_loss, timeline=timeline),
        "DeepSpeed": lambda: DeepSpeedPipeline(stages, M, BATCH, F.mse_loss, lr=0.1),
    }[kind]()
    losses, parameters = [], [p for chunk in mine for p in chunk.parameters()]
    for _ in range(steps):
        for p in parameters:
            p.grad = None
        with WireMeter() as wire:
            loss = found.step(*batch())
        if kind != "DeepSpeed":  # its step updates as well
            with torch.no_grad():
                for p in parameters:
                    p -= 0.1 * p.grad
        losses.append(None if loss is None else loss.item())
    order = [f"{s.kind[0].upper()} {s.name}" for s in timeline.spans if s.kind != "wait"]
    return losses, wire.sent_bytes, order[: len(order) // steps] or deepspeeds_order(ranks, rank)


def deepspeeds_order(stages, stage):
    """What its own schedule computes; its commands come micro-batch after micro-batch."""
    from pardemo.peers.deepspeed.engine import deepspeed

    schedule = deepspeed.runtime.pipe.schedule
    passes = {schedule.ForwardPass: "F", schedule.BackwardPass: "B"}
    commands = itertools.chain(*schedule.TrainSchedule(M, stages, stage).steps())
    kinds = [passes[type(command)] for command in commands if type(command) in passes]
    return [f"{kind} {stage}.{kinds[:place].count(kind)}" for place, kind in enumerate(kinds)]


@pytest.fixture(scope="module")
def peers_world():
    with World(2, preload=["pardemo.peers.deepspeed.pipeline"], timeout_s=180) as world:
        yield world


@pytest.mark.parametrize(
    ("kind", "order", "chunks"),
    [
        ("torch", gpipe, 1),
        ("torch", one_f_one_b, 1),
        ("torch", interleaved, 2),
        ("torch", zb_h1, 1),
        ("torch", zb_v, 2),
        ("DeepSpeed", one_f_one_b, 1),
    ],
)
def test_the_peers_do_the_same(peers_world, kind, order, chunks):
    theirs = peers_world.run(peers_steps, kind, order, chunks)
    ours = peers_world.run(peers_steps, "ours", order, chunks)
    last, is_v = 0 if order is zb_v else 1, order is zb_v
    assert theirs[last][0] == pytest.approx(ours[last][0], rel=CLOSE)
    activation, messages = 4 * WIDTH * BATCH // M, M * (2 * chunks - 1)  # as many each way
    for rank in range(2):
        expected, _ = formulas.boundary_bytes(rank, 2, M, activation, chunks, v_shape=is_v)
        told = 1 if is_v else chunks - rank  # stages whose outputs go to another rank
        expected += 4 * (1 + COLUMNS) * told  # what each of them tells ahead
        assert ours[rank][1] == pytest.approx(expected, abs=200)  # the barrier's
        # gloo has 48 bytes for each message, for its announcement, and for the answer that one is awaited
        extra = 48 * 3 * messages + (200 if kind == "DeepSpeed" else 0)  # which hands the loss round
        assert ours[rank][1] <= theirs[rank][1] <= ours[rank][1] + extra
        assert theirs[rank][2] == ours[rank][2]  # the same computations in the same order


def test_deepspeeds_takes_no_part_of_a_batch(peers_world):
    def indivisible():
        from pardemo.peers.deepspeed.pipeline import DeepSpeedPipeline

        DeepSpeedPipeline([nn.Identity()] * 2, 4, 10, F.mse_loss)

    with pytest.raises(RankFailed, match=r"10.*divide.*4"):
        peers_world.run(indivisible)
