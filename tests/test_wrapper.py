"""Wrappers in company and under strain: several in one loop, checkpoints, uneven inputs, modules that change."""

import contextlib
import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pardemo import RankFailed, World
from pardemo.collectives import parameter_server_all_reduce
from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel

WRAPPERS = {
    "naive": NaiveDataParallel,
    "bucketed": BucketedDataParallel,
    "tiny buckets": lambda module: BucketedDataParallel(module, bucket_bytes=1),
    "no overlap": lambda module: BucketedDataParallel(module, bucket_bytes=1, overlap=False),
}
#: double precision: what remains is the order of a few additions
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def by_a_server(module):
    return NaiveDataParallel(module, all_reduce=parameter_server_all_reduce)


def seeded(build, seed=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double()


def mlp(width=6):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def batch(step, rank):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def values(*modules):
    return [p.detach().clone() for module in modules for p in module.parameters()]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, **EXACT)


# ---------------------------------------------------------------- several wrappers


def train_gan(generator, discriminator, batches, steps):
    """``batches(step)``: those whose mean loss counts, one on a rank, all in a single process."""
    ours, theirs = (torch.optim.SGD(net.parameters(), 0.05) for net in (generator, discriminator))
    for step in range(steps):
        mine = batches(step)
        theirs.zero_grad()
        loss = sum(discriminator(x).mean() - discriminator(generator(x).detach()).mean() for x in mine)
        (loss / len(mine)).backward()
        theirs.step()
        ours.zero_grad()
        (sum(discriminator(generator(x)).square().mean() for x in mine) / len(mine)).backward()
        ours.step()


class Late:
    """A timeline that makes this rank's exchanges begin late, so that ranks send in different orders for certain."""

    @contextlib.contextmanager
    def span(self, kind, name):
        time.sleep(0.05)
        yield


@pytest.mark.parametrize("wrap", [NaiveDataParallel, BucketedDataParallel])
def test_a_gan_two_wrapped_modules_in_one_loop(world_of, wrap):
    """The generator's loss has gradients for both. One rank sends the discriminator's late, another the generator's:
    tensors of equal sizes, which would be added to each other without a word."""
    steps, size = 3, 3

    def check():
        rank = dist.get_rank()
        generator, discriminator = seeded(mlp, rank), seeded(mlp, 10 + rank)  # rank 0's are to count
        late = [wrap(net, timeline=Late() if rank == i else None) for i, net in enumerate((discriminator, generator))]
        train_gan(late[1], late[0], lambda step: [batch(step, rank)], steps)
        return values(generator, discriminator)

    generator, discriminator = seeded(mlp, 0), seeded(mlp, 10)
    train_gan(generator, discriminator, lambda step: [batch(step, rank) for rank in range(size)], steps)
    for found in world_of(size).run(check):
        assert_equal(found, values(generator, discriminator))


class Branching(nn.Module):
    """A branch that only some ranks use: their buckets are complete at other times, and some never."""

    def __init__(self):
        super().__init__()
        self.before, self.branch, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, branch):
        x = self.before(x)
        return self.after(x + self.branch(x) if branch else x)


def loss_of_two(one, other, x, odd):
    """The same sum; on odd ranks the second module is used first, so that the first gradients come in another order."""
    if odd:
        second = other(x, odd).exp().mean()
        return one(x, odd).square().mean() + second
    return one(x, odd).square().mean() + other(x, odd).exp().mean()


@pytest.mark.parametrize("variant", WRAPPERS)
@pytest.mark.parametrize("size", [2, 3])
def test_two_wrappers_in_one_backward_with_a_branch_of_odd_ranks(world_of, variant, size):
    def check():
        rank, wrap = dist.get_rank(), WRAPPERS[variant]
        nets = seeded(Branching, 1), seeded(Branching, 2)
        wrapped = [wrap(net) for net in nets]
        for _ in range(3):
            for net in nets:
                net.zero_grad()
            loss_of_two(*wrapped, batch(0, rank), rank % 2 == 1).backward()
        return [p.grad for net in nets for p in net.parameters()]

    nets = seeded(Branching, 1), seeded(Branching, 2)
    (sum(loss_of_two(*nets, batch(0, rank), rank % 2 == 1) for rank in range(size)) / size).backward()
    for found in world_of(size).run(check):
        assert_equal(found, [p.grad for net in nets for p in net.parameters()])


def test_two_wrappers_with_a_function_of_the_callers_that_disagree_are_told(world_of):
    """They share the group's ways: right in the program's order, an error where the orders differ, never a mixture."""

    def check():
        rank = dist.get_rank()
        nets = [seeded(mlp), seeded(mlp, 4)]
        wrapped = [BucketedDataParallel(net, all_reduce=parameter_server_all_reduce) for net in nets]
        x = batch(0, rank)
        sum(model(x).sum() for model in wrapped).backward()
        grads = [p.grad.clone() for net in nets for p in net.parameters()]
        outputs = [wrapped[i](x).sum() for i in ((0, 1) if rank else (1, 0))]
        with pytest.raises(ValueError, match=r"rank.*0"):
            sum(outputs).backward()
        return grads

    nets = [seeded(mlp), seeded(mlp, 4)]
    (sum(net(batch(0, rank)).sum() for rank in range(2) for net in nets) / 2).backward()
    for found in world_of(2).run(check):
        assert_equal(found, [p.grad for net in nets for p in net.parameters()])


def test_a_wrapper_inside_another_is_refused(world_of):
    def check():
        inner = nn.Linear(4, 4)
        wrapped = NaiveDataParallel(inner)
        with pytest.raises(ValueError, match=r"inside.*whole"):
            BucketedDataParallel(nn.Sequential(wrapped, nn.Linear(4, 4)))
        with pytest.raises(ValueError, match=r"0\.weight"):
            BucketedDataParallel(nn.Sequential(inner, nn.Linear(4, 4)))
        del wrapped
        BucketedDataParallel(nn.Sequential(inner, nn.Linear(4, 4)))

    world_of(2).run(check)


def test_what_one_rank_alone_must_refuse_all_refuse(world_of):
    def check():
        inner = nn.Linear(4, 4)
        keep = [NaiveDataParallel(part) for part in (inner, nn.Linear(4, 4))]
        module = nn.Sequential(inner if dist.get_rank() == 1 else nn.Linear(4, 4))
        with pytest.raises(ValueError, match=r"1.*0\.weight"):
            NaiveDataParallel(module)
        with pytest.raises(ValueError, match=r"0.*parameter"):
            NaiveDataParallel(nn.Linear(2, 2).requires_grad_(dist.get_rank() == 1))
        return len(keep)

    world_of(2).run(check)


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)], ids=["parameters", "buffers"])
def test_layers_of_one_shape_in_another_order_are_refused(world_of, layer):
    """They meet in the order of the modules: one rank's first would be averaged with, or sent to, another's second."""

    def check():
        names = ("second", "first") if dist.get_rank() else ("first", "second")
        net = nn.ModuleDict({name: copy.deepcopy(layer) for name in names} | {"head": nn.Linear(4, 4)})
        with pytest.raises(ValueError, match=r"0.*first.*1.*second"):
            NaiveDataParallel(net)

    world_of(2).run(check)


def test_a_module_wrapped_twice_belongs_to_the_newer_wrapper(world_of):
    def check():
        rank, net = dist.get_rank(), seeded(mlp)
        older, newer = BucketedDataParallel(net), BucketedDataParallel(net)
        with pytest.raises(RuntimeError, match=r"wrapped.*wrapper"):
            older(batch(0, rank))
        newer(batch(0, rank)).square().mean().backward()
        return [p.grad for p in net.parameters()]

    net = seeded(mlp)
    (sum(net(batch(0, rank)).square().mean() for rank in range(2)) / 2).backward()
    for found in world_of(2).run(check):
        assert_equal(found, [p.grad for p in net.parameters()])


# ---------------------------------------------------------------- checkpoints


class Checkpointed(nn.Module):
    """Segments that are computed again in the backward pass; with ``shared`` the first one is used twice."""

    def __init__(self, use_reentrant, shared=False):
        super().__init__()
        self.begin, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.segments = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.use_reentrant, self.shared = use_reentrant, shared

    def forward(self, x):
        x = self.begin(x)
        for segment in (self.segments[0], *self.segments) if self.shared else self.segments:
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def gradients_of(model, net, rank, accumulate=1):
    for micro in range(accumulate):
        with model.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
            model(batch(micro, rank)).square().mean().backward()
    return [p.grad for p in net.parameters()]


def mean_gradients(build, size, accumulate=1):
    net = seeded(build)
    for micro in range(accumulate):
        (sum(net(batch(micro, rank)).square().mean() for rank in range(size)) / size).backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("variant", WRAPPERS)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_checkpoints_within_the_module(world_of, variant, use_reentrant, accumulate):
    def check():
        net = seeded(lambda: Checkpointed(use_reentrant))
        model = WRAPPERS[variant](net)
        model(batch(7, dist.get_rank())).sum().backward()  # and not only the first pass
        model.zero_grad()
        return gradients_of(model, net, dist.get_rank(), accumulate)

    expected = mean_gradients(lambda: Checkpointed(False), 2, accumulate)
    for found in world_of(2).run(check):
        assert_equal(found, expected)


def test_re_entrant_checkpoints_send_each_gradient_once(world_of):
    """The tasks within the task are one backward pass."""

    def check():
        sent = []
        model = BucketedDataParallel(
            seeded(lambda: Checkpointed(True)), all_reduce=lambda t, g: (sent.append(1), dist.all_reduce(t, group=g))
        )
        model(batch(0, dist.get_rank())).sum().backward()
        return len(sent), len(model.buckets)

    assert world_of(2).run(check) == [(1, 1)] * 2


@pytest.mark.parametrize("variant", ["naive", "no overlap", "bucketed"])
def test_a_layer_in_two_re_entrant_checkpoints(world_of, variant):
    def check():
        net = seeded(lambda: Checkpointed(True, shared=True))
        return gradients_of(WRAPPERS[variant](net), net, dist.get_rank())

    expected = mean_gradients(lambda: Checkpointed(False, shared=True), 2)
    for found in world_of(2).run(check):
        assert_equal(found, expected)


class LateSecondUse(nn.Module):
    """The last layer's gradient comes first, and once more from a checkpoint at the beginning."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.last, self.first(x), use_reentrant=True)
        return checkpoint(self.last, self.first(x), use_reentrant=True)


def test_a_second_gradient_after_its_bucket_was_sent_is_refused(world_of):
    def check():
        model = BucketedDataParallel(seeded(LateSecondUse), bucket_bytes=1)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            model(batch(0, dist.get_rank())).sum().backward()

    world_of(2).run(check)


@pytest.mark.parametrize("variant", WRAPPERS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_the_wrapper(world_of, variant, use_reentrant):
    """Twice, so that its second backward pass finds what the first has left."""

    def loss_of(model, first, x):
        for _ in range(2):
            x = checkpoint(model, first(x), use_reentrant=use_reentrant)
        return x.square().mean()

    def check():
        net, first = seeded(mlp), seeded(lambda: nn.Linear(4, 4))
        loss_of(WRAPPERS[variant](net), first, batch(0, dist.get_rank())).backward()
        return [p.grad for p in net.parameters()]

    net, first = seeded(mlp), seeded(lambda: nn.Linear(4, 4))
    (sum(loss_of(net, first, batch(0, rank)) for rank in range(2)) / 2).backward()
    for found in world_of(2).run(check):
        assert_equal(found, [p.grad for p in net.parameters()])


# ---------------------------------------------------------------- modules that change, or lie otherwise


@pytest.mark.parametrize("wrap", [NaiveDataParallel, BucketedDataParallel])
def test_a_module_that_changed_after_wrapping_is_refused(world_of, wrap):
    def unfreeze(net):
        net[0].requires_grad_(True)

    def cast(net):
        net.to(torch.bfloat16)

    def add(net):
        net.append(nn.Linear(4, 4))

    def check():
        for change, told in (
            (unfreeze, r"^0\.weight requires a gradient, and did not when the module was wrapped"),
            (
                cast,
                r"^2\.weight was torch.float32 on cpu when .* is torch.bfloat16 on cpu now: cast .* before wrapping",
            ),
            (add, r"^5\.weight requires a gradient, and did not"),
        ):
            net = mlp()
            net[0].requires_grad_(False)
            model = wrap(net)
            model(torch.ones(1, 4))
            change(net)
            with pytest.raises(ValueError, match=told):
                model(torch.ones(1, 4))
            with torch.no_grad(), contextlib.suppress(RuntimeError):  # dtypes that do not fit are not ours to tell
                model(torch.ones(1, 4))

    world_of(2).run(check)


@pytest.mark.parametrize("wrap", [NaiveDataParallel, BucketedDataParallel])
def test_parameters_with_gaps_or_strides_of_their_own_are_refused_on_all_ranks(world_of, wrap):
    def check():
        rank = dist.get_rank()
        gaps = nn.Linear(4, 4)
        gaps.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
        with pytest.raises(ValueError, match=r"4.*4.*8.*2.*overlaps"):
            wrap(gaps)
        with pytest.raises(ValueError, match=r"1.*weight"):
            wrap(gaps if rank else nn.Linear(4, 4))
        overlaps = nn.Linear(4, 4, bias=False)
        overlaps.weight = nn.Parameter(torch.randn(4, 1).expand(4, 4))
        with pytest.raises(ValueError, match="has gaps or overlaps"):
            wrap(overlaps)
        conv = nn.Conv2d(2, 2, 3)
        if rank:
            conv.to(memory_format=torch.channels_last)
        with pytest.raises(ValueError, match=r"0.*'weight'.*1.*'weight'.*strides.*18.*1.*6.*2"):
            wrap(conv)

    world_of(2).run(check)


def test_parameters_that_lie_alike_but_not_contiguously_begin_as_rank_0(world_of):
    def check():
        conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        conv.register_buffer("turned", torch.randn(3, 4).T)
        conv.register_buffer("widened", torch.randn(3, 1).expand(3, 5))
        NaiveDataParallel(conv)
        return conv.state_dict()

    first, second = world_of(2).run(check)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# ---------------------------------------------------------------- buffers


@pytest.mark.parametrize("wrap", [NaiveDataParallel, BucketedDataParallel])
def test_before_each_forward_in_training_mode_buffers_are_rank_0s(world_of, wrap):
    """Batch norm's statistics, which each rank moves by its own data: from rank 0's of the step before."""
    steps = 3

    def check():
        rank = dist.get_rank()
        net = nn.BatchNorm1d(4).double()
        model = wrap(net)
        for step in range(steps):
            model(batch(step, rank))
        trained = net.running_mean.clone()
        model.eval()
        model(batch(steps, rank))
        return trained, net.running_mean

    reference = nn.BatchNorm1d(4).double()
    for step in range(steps - 1):
        reference(batch(step, 0))
    for rank, (found, after) in enumerate(world_of(3).run(check)):
        expected = 0.9 * reference.running_mean + 0.1 * batch(steps - 1, rank).mean(0)
        torch.testing.assert_close(found, expected, **EXACT)
        assert torch.equal(after, found), "evaluation leaves each rank's as they are"


# ---------------------------------------------------------------- uneven inputs

BATCHES = [2, 5, 3, 5]  # of each rank


def uneven_reference(size, divide_by_initial, accumulate):
    """The mean over the initial (or the remaining) ranks: one without data counts as zero, as in torch's DDP, and so
    does what it had accumulated under ``no_sync`` when its data ended."""
    net = seeded(mlp)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for end in range(accumulate, max(BATCHES[:size]) + 1, accumulate):
        active = [rank for rank in range(size) if BATCHES[rank] >= end]
        for step in range(end - accumulate, end):
            loss = sum(net(batch(step, rank)).square().mean() for rank in active)
            (loss / (size if divide_by_initial else len(active))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize("variant", WRAPPERS)
@pytest.mark.parametrize(("divide_by_initial", "accumulate"), [(True, 1), (False, 1), (True, 2)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_uneven_inputs_under_join(world_of, variant, divide_by_initial, accumulate, size):
    def check():
        rank = dist.get_rank()
        net = seeded(mlp, 3 + rank)
        model = WRAPPERS[variant](net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with model.join(divide_by_initial_world_size=divide_by_initial):
            for step in range(BATCHES[rank]):
                last = step % accumulate == accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    model(batch(step, rank)).square().mean().backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        found = values(net)
        model.zero_grad()
        model(batch(0, rank)).sum().backward()  # after the block it works as before
        return found, [p.grad for p in net.parameters()]

    net = uneven_reference(size, divide_by_initial, accumulate)
    results = world_of(size).run(check)
    (sum(net(batch(0, rank)).sum() for rank in range(size)) / size).backward()
    for found, after in results:
        assert_equal(found, values(net))
        assert_equal(after, [p.grad for p in net.parameters()])
        assert all(torch.equal(*pair) for pair in zip(after, results[0][1], strict=True))


class WithStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x):
        return self.layers(x)


def test_uneven_inputs_with_buffers_end_as_torchs_own_ddp(world_of):
    """Which rank's buffers count once rank 0 has no data left, and whose model all have in the end: as there."""

    def run(wrap):
        rank = dist.get_rank()
        net = seeded(WithStatistics)
        model = wrap(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.join():
            for step in range(BATCHES[rank]):
                model(batch(step, rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(net.state_dict().values())

    ours, theirs = (world_of(3).run(run, wrap) for wrap in (BucketedDataParallel, DistributedDataParallel))
    for found, expected in zip(ours, theirs, strict=True):
        assert_equal(found, expected)


def test_two_wrappers_under_torchs_generic_join(world_of):
    """Buffers before both forwards, one loss: a rank that has joined must not wait for the first one's backward."""

    def loss_of(nets, x):
        return nets[1](nets[0](x)).square().mean()

    def check():
        rank = dist.get_rank()
        nets = [seeded(lambda: nn.Sequential(mlp(), nn.BatchNorm1d(4))), seeded(mlp, 5)]
        nets[1].register_buffer("seen", torch.zeros(()))
        models = [BucketedDataParallel(nets[0], bucket_bytes=1), NaiveDataParallel(nets[1])]
        with Join(models):
            for step in range(BATCHES[rank]):
                for model in models:
                    model.zero_grad()
                loss_of(models, batch(step, rank)).backward()
        return values(*nets), [p.grad for net in nets for p in net.parameters()] if rank == 1 else None

    results = world_of(2).run(check)
    nets = [seeded(lambda: nn.Sequential(mlp(), nn.BatchNorm1d(4))), seeded(mlp, 5)]
    (loss_of(nets, batch(BATCHES[1] - 1, 1)) / 2).backward()  # the last step's: rank 0 has nothing to add
    assert_equal(results[0][0], results[1][0])
    assert_equal(results[1][1], [p.grad for net in nets for p in net.parameters()])


def test_uneven_inputs_can_be_an_error_on_all_ranks(world_of):
    def check():
        rank, model = dist.get_rank(), BucketedDataParallel(seeded(mlp))
        with model.join(throw_on_early_termination=True):
            for step in range(BATCHES[rank]):
                model(batch(step, rank)).sum().backward()

    with World(2) as world, pytest.raises(RankFailed, match=r"0.*exhausted.*1"):
        world.run(check)


@pytest.mark.parametrize("wrap", [*WRAPPERS.values(), by_a_server], ids=[*WRAPPERS, "naive, by a server"])
def test_a_rank_that_leaves_a_backward_out_is_told_at_the_next(world_of, wrap):
    """Else it would be a step ahead, its gradients added to those of another batch."""

    def check():
        rank, model = dist.get_rank(), wrap(seeded(mlp))
        model(batch(0, rank)).sum().backward()
        model(batch(0, rank))  # on all ranks alike, as a GAN does it: nothing is wrong with that
        model(batch(0, rank)).sum().backward()
        loss = model(batch(1, rank)).sum()
        if rank == 1:
            loss = model(batch(2, rank)).sum()
        told = r"rank 0: .*\(1 forwards without one\).*; rank 1: .*\(2 forwards without one\)"
        with pytest.raises(ValueError, match=told):
            loss.backward()

    world_of(2).run(check)
