"""What people met in World, links, meters and engines, and what is said or done about it now."""

import os
import pickle
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from pardemo import World
from pardemo.collectives.links import Link
from pardemo.draw import charts
from pardemo.low_precision.formats import to_bf16_by_chance
from pardemo.meters import CallMeter
from pardemo.meters.timeline import Span
from pardemo.world.errors import Failure, RankDied, RankFailed, RankTimeout
from pardemo.zero import Zero1, Zero2, Zero3
from pardemo.zero.checks import same_outcome
from pardemo.zero.zero_r import HostStore, partitioned_checkpoint

SGD = partial(torch.optim.SGD, lr=0.1)


def tried():
    return os.environ.get("PARDEMO_TRIED")


def test_a_variable_that_is_gone_is_gone_on_later_ranks(monkeypatch):
    monkeypatch.setenv("PARDEMO_TRIED", "old")
    with World(1) as world:
        assert world.run(tried) == ["old"]
    monkeypatch.delenv("PARDEMO_TRIED")
    with World(1) as world:
        assert world.run(tried) == [None]
    with World(1, env={"PARDEMO_TRIED": "own"}) as world:
        assert world.run(tried) == ["own"]


@pytest.mark.parametrize(
    "error",
    [
        RankFailed({0: Failure("ValueError", "x", "here")}, [1], {1: ["rank 0"]}, {1: "a stack"}),
        RankDied({0: -9}, {1: Failure("ConnectionError", "lost", "there")}),
        RankTimeout(1.5, {0: "a stack"}, [1], {0: ["rank 1"]}, "the cores were busy"),
    ],
)
def test_errors_of_ranks_can_be_sent(error):
    read = pickle.loads(pickle.dumps(error))
    assert type(read) is type(error)
    assert str(read) == str(error)
    assert read.__dict__ == error.__dict__


@pytest.mark.ranks(2)
def test_a_link_that_is_closed_while_it_sends_ends(rank):
    link = Link(dist.group.WORLD, "closed")
    dist.barrier()
    if rank == 0:
        link.send(memoryview(bytearray(64 << 20)))
        time.sleep(0.2)
        link.close()
        until = time.monotonic() + 20
        while any(one.name == "closed-sender" for one in threading.enumerate()) and time.monotonic() < until:
            time.sleep(0.01)
        assert not any(one.name == "closed-sender" for one in threading.enumerate())
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(ConnectionError, match="rank 0"):  # noqa: PT012 - what was on its way may still come
            for _ in range(64):
                link.receive(memoryview(bytearray(1 << 20)))


@pytest.mark.ranks(2)
def test_bytes_of_each_form_of_a_call(rank):
    x, world = torch.ones(8), dist.group.WORLD
    for call in (
        lambda: dist.all_to_all_single(torch.empty(8), x),
        lambda: dist.all_to_all([torch.empty(4), torch.empty(4)], list(x.chunk(2))),
        lambda: functional.wait_tensor(functional.all_to_all_single(x, None, None, world)),
    ):
        with CallMeter(bytes_too=True) as calls:
            call()
        assert (calls.sent_bytes, calls.received_bytes) == (16, 16)
    for call in (
        lambda: dist.broadcast(x, 1),
        lambda: functional.wait_tensor(functional.broadcast(x, 1, world)),
    ):
        with CallMeter(bytes_too=True) as calls:
            call()
        assert (calls.sent_bytes, calls.received_bytes) == ((32, 0) if rank == 1 else (0, 32))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", [Zero1, Zero2, Zero3])
def test_what_one_rank_alone_is_refused_for_is_told_on_all(rank, engine):
    net = nn.Linear(4, 4)
    if rank == 0:
        net.weight.register_post_accumulate_grad_hook([].append)
    with pytest.raises(RuntimeError, match=r"weight.*hook"):
        engine(net, SGD)


@pytest.mark.ranks(2)
def test_an_error_of_many_is_told_on_the_others(rank):
    def fails():
        with same_outcome(dist.group.WORLD):
            if rank == 0:
                raise ExceptionGroup("two", [ValueError("a"), ValueError("b")])

    with pytest.raises(ExceptionGroup if rank == 0 else RuntimeError, match="two"):
        fails()


@pytest.mark.ranks(2)
def test_a_checkpoint_on_the_host_may_be_taken_back_twice(rank):
    x, store = torch.randn(2, 2, 4, requires_grad=True), HostStore()
    y = partitioned_checkpoint(nn.Linear(4, 4), x, store=store).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    assert store.to_device_bytes == 2 * store.to_host_bytes


def test_a_nan_stays_one():
    low = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert to_bf16_by_chance(low).isnan().all()


def test_a_kind_of_a_readers_own_has_a_colour():
    axes = charts.new()[1]
    charts.gantt(axes, [Span(0, "load data", "batch 0", 0.0, 1.0)])
    axes.legend(handles=[charts.patch(kind, kind) for kind in ("load data", "compute")])
