"""The wrappers against one process on the whole batch; ranks begin with different weights on purpose."""

import copy
import gc
import pickle
import threading
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import says
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardemo import RankFailed, Timeline, WireMeter
from pardemo.collectives import parameter_server_all_reduce, ring_all_reduce
from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel, shard_weight
from pardemo.formulas import communication
from pardemo.meters.padding import PaddedModule
from pardemo.meters.timeline import covered_s, overlap_s
from pardemo.small_models import gpt

UNUSED = {"find_unused_parameters": True}
VARIANTS = {
    "naive": partial(NaiveDataParallel, **UNUSED),
    "naive server": partial(NaiveDataParallel, all_reduce=parameter_server_all_reduce, **UNUSED),
    "bucketed": partial(BucketedDataParallel, **UNUSED),
    "tiny buckets": partial(BucketedDataParallel, bucket_bytes=1, **UNUSED),
    "no overlap": partial(BucketedDataParallel, overlap=False, bucket_bytes=4096, **UNUSED),
}


class Net(nn.Module):
    """Everything that data parallelism can stumble over: tied, frozen and unused parameters, buffers, layouts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.hidden = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12)
        self.never = nn.Linear(3, 3)
        self.odd_ranks_only = nn.Linear(12, 12)
        self.out = nn.Linear(12, 17, bias=False)
        self.out.weight = self.embed.weight  # tied
        self.frozen.requires_grad_(False)
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens, branch=False):
        x = self.frozen(torch.tanh(self.hidden(self.embed(tokens))))
        if branch:
            x = x + self.odd_ranks_only(x)
        x = x + self.conv(x.reshape(-1, 2, 2, 3)).reshape(x.shape)
        return self.out(x)


def build():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Net().double()


def batch(step, samples):
    return torch.randint(0, 17, (samples, 4), generator=torch.Generator().manual_seed(step))


def loss_of(net, tokens, branch=False):
    return nn.functional.cross_entropy(net(tokens, branch).flatten(0, 1), tokens.flatten())


def reference(steps, samples, ranks):
    """One process: the mean over ranks of each rank's loss, so that the ranks' branches can be told apart."""
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        parts = batch(step, samples).chunk(ranks)
        loss = sum(loss_of(net, part, branch=rank % 2 == 1) for rank, part in enumerate(parts)) / ranks
        loss.backward()
        optimizer.step()
    return net


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_equals_one_process_on_the_whole_batch(rank, world_size, same_on_all_ranks, variant):
    steps, samples, net = 4, 12, build()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(rank)  # the wrapper has to make all ranks begin as rank 0
    net.seen.fill_(rank)
    model = VARIANTS[variant](net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, batch(step, samples).chunk(world_size)[rank], branch=rank % 2 == 1).backward()
        optimizer.step()
    assert net.seen == 0, "buffers are rank 0's"
    expected = dict(reference(steps, samples, world_size).named_parameters())
    for name, parameter in net.named_parameters():
        # double precision: what remains is the order of at most 4 additions
        torch.testing.assert_close(parameter, expected[name], rtol=1e-11, atol=1e-11, msg=f"{name} differs")
    assert net.frozen.weight.grad is None
    assert net.never.weight.grad is None
    same_on_all_ranks(net)


class Cast(nn.Module):
    def forward(self, x):
        return x.to(torch.bfloat16)


@pytest.mark.ranks(2)
def test_mixed_dtypes_agree_with_torchs_own_ddp(rank):
    def gradients(wrap):
        net = gpt.seeded(lambda: nn.Sequential(nn.Linear(8, 64), Cast(), nn.Linear(64, 8).to(torch.bfloat16)))
        wrap(net)(gpt.numbers(16, 8, seed=rank)).float().square().mean().backward()
        return [p.grad for p in net.parameters()]

    for mine, other in zip(*map(gradients, (BucketedDataParallel, DistributedDataParallel)), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other), "both halve (exact) and add once: the same bits"


@pytest.mark.ranks(2)
def test_ranks_that_are_members_of_different_numbers_of_groups(rank):
    """torch would call the wrapper's second group by that number, and each rank would wait under another name."""
    alone, with_another = dist.new_group([0]), dist.new_group([0, 1])
    model = NaiveDataParallel(nn.Linear(4, 1, bias=False), with_another, all_reduce=parameter_server_all_reduce)
    model(torch.full((1, 4), float(rank))).sum().backward()
    if rank == 0:
        dist.destroy_process_group(alone)
    assert model.module.weight.grad.tolist() == [[0.5] * 4]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("all_reduce", [ring_all_reduce, parameter_server_all_reduce])
def test_a_subgroup_trains_on_its_own(rank, all_reduce):
    group, net = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], nn.Linear(4, 4)
    model = BucketedDataParallel(net, group, all_reduce=all_reduce)
    model(torch.full((1, 4), float(rank))).sum().backward()
    assert net.weight.grad[0, 0].item() == [0.5, 2.5][rank // 2]
    sums: list = [None] * 4
    dist.all_gather_object(sums, net.weight.detach().sum().item())
    assert sums[0] == sums[1] != sums[2] == sums[3]


@pytest.mark.ranks(2)
def test_what_cannot_be_right_is_refused():
    with pytest.raises(ValueError, match=r"bucket_bytes.*0.*0"):
        BucketedDataParallel(nn.Linear(2, 2), bucket_bytes=0)
    with pytest.raises(RuntimeError, match="gradient"):
        NaiveDataParallel(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(TypeError, match=r"pickled.*\.module"):
        pickle.dumps(BucketedDataParallel(nn.Linear(2, 2)))


@pytest.mark.ranks(2)
def test_buckets_have_their_size():
    sizes, net = [], nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)])

    def seen(tensor, group):
        sizes.append(tensor.numel())
        return ring_all_reduce(tensor, group)

    model = BucketedDataParallel(net, bucket_bytes=2 * 16 * 16 * 4, all_reduce=seen)
    for _ in range(2):  # DDP makes its buckets after the first
        sizes.clear()
        model(torch.ones(1, 16)).sum().backward()
    assert sizes == [2 * 16 * 16] * 3


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_sends_each_gradient_once(world_size, accumulate, wire):
    model = BucketedDataParallel(nn.Linear(1024, 1024, bias=False), bucket_bytes=1 << 20)
    model(torch.ones(2, 1024)).sum().backward()
    with wire:
        for _ in range(accumulate - 1):
            with model.no_sync():
                model(torch.ones(2, 1024)).sum().backward()
        model(torch.ones(2, 1024)).sum().backward()
    assert wire.sent_bytes == pytest.approx(communication.ring_all_reduce(4 << 20, world_size).sent, rel=0.005)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_is_really_there(overlap):
    timeline = Timeline()
    net = nn.Sequential(*[PaddedModule(nn.Linear(512, 512), 0, 0.01, timeline) for _ in range(5)])
    model = BucketedDataParallel(net, bucket_bytes=1 << 20, overlap=overlap, timeline=timeline)
    model(torch.ones(1, 512)).sum().backward()
    timeline.spans.clear()
    model(torch.ones(1, 512)).sum().backward()
    spans = timeline.spans
    assert sum(s.kind == "communication" for s in spans) == 5
    assert (overlap_s(spans, "compute", "communication") > 0) == overlap
    last_wait = max(s.end_s for s in spans if s.kind == "compute")
    assert (min(s.begin_s for s in spans if s.kind == "communication") < last_wait) == overlap
    assert covered_s(spans) > 0.05


@pytest.mark.ranks(4)
def test_shard_weights(rank):
    assert shard_weight(1) == 1.0
    assert shard_weight([0, 2, 2, 4][rank]) == [0.0, 1.0, 1.0, 2.0][rank]
    with pytest.raises(ValueError, match="cannot have -1 samples"):
        shard_weight(-1)
    with pytest.raises(ValueError, match=r"rank.*sample"):
        shard_weight(0)


@pytest.mark.ranks(2)
def test_a_forgotten_wrapper_is_collected_and_its_thread_ends():
    alive, before = [], set(threading.enumerate())

    def new_threads():  # the group's own links stay
        return [t.name for t in set(threading.enumerate()) - before if t.name != "ring-sender"]

    for _ in range(3):
        model = BucketedDataParallel(nn.Linear(64, 64, bias=False))
        alive.append(weakref.ref(model))
        model(torch.ones(1, 64)).sum().backward()
    del model
    gc.collect()
    until = time.monotonic() + 60
    while new_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert [ref() for ref in alive] == [None] * 3
    assert new_threads() == []


@pytest.mark.ranks(2)
def test_a_copy_is_the_module_alone(rank):
    model = BucketedDataParallel(nn.Linear(4, 4))
    copied, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    copied(torch.full((1, 4), float(rank))).sum().backward()
    assert type(copied) is type(average.module) is nn.Linear
    assert copied.weight.grad[0, 0].item() == rank


@pytest.mark.ranks(2)
@pytest.mark.parametrize("branch", [0, 2])
def test_two_wrappers_in_one_backward(rank, branch):
    """Ranks come to the two in one order, or each in its own."""
    wrapped = [BucketedDataParallel(nn.Linear(8, 8).double()) for _ in range(2)]
    plain = [copy.deepcopy(model) for model in wrapped]
    x = [torch.full((2, 8), 1.0 + r, dtype=torch.float64) for r in range(2)]
    sum((model(x[rank]) ** 2).sum() for model in wrapped[:: 1 if rank % 2 == branch else -1]).backward()
    for mine in x:
        (sum((part(mine) ** 2).sum() for part in plain) / 2).backward()
    for model, part in zip(wrapped, plain, strict=True):
        for mine, theirs in zip(model.parameters(), part.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.ranks(3)
def test_uneven_inputs_under_join(rank):
    def trained(wrap):
        model = wrap(gpt.seeded(lambda: nn.Linear(4, 4)).double())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.join():
            for step in range(3 + rank):
                model(torch.full((2, 4), float(step + rank), dtype=torch.float64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    for mine, other in zip(*map(trained, (BucketedDataParallel, DistributedDataParallel)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def test_a_rank_that_leaves_a_backward_out_is_told(world_of):
    def check():
        model = BucketedDataParallel(nn.Linear(4, 4))
        for step in range(4):
            loss = model(torch.ones(2, 4)).sum()
            if dist.get_rank() != 1 or step != 1:
                loss.backward()

    with pytest.raises(RankFailed) as caught:
        world_of(2).run(check, timeout_s=120)
    assert says(str(caught.value), "different exchanges", "bucket 0 of forward pass")


@pytest.mark.ranks(2)
def test_an_error_of_an_exchange_is_raised_by_the_backward_pass():
    def broken(tensor, group):
        raise OSError("the network is gone")

    model = BucketedDataParallel(nn.Linear(4, 4), all_reduce=broken)
    with pytest.raises(OSError, match="network"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.ranks(2)
def test_counting_without_a_kernel_sees_the_sender_thread():
    model = BucketedDataParallel(nn.Linear(512, 512, bias=False), all_reduce=lambda t, g: dist.all_reduce(t, group=g))
    model(torch.ones(1, 512)).sum().backward()
    with WireMeter(evidence="count") as wire:
        model(torch.ones(1, 512)).sum().backward()
    assert wire.sent_bytes == pytest.approx(512 * 512 * 4, rel=0.001)
