"""Links and a thread for each engine: nothing of one's is taken for another's, and nothing stays behind."""

import gc
import threading
import time
import weakref

import psutil
import pytest
import torch
import torch.distributed as dist

from pardemo import World
from pardemo.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pardemo.collectives.channel import Channel


@pytest.mark.ranks(2, 3)
def test_two_channels_in_opposite_order_each_get_their_own_sum(rank, world_size):
    """Equal sizes on purpose: on shared links the sums would be mixed without a word."""
    channels = [Channel(dist.group.WORLD, "engine") for _ in range(2)]
    tensors = [torch.full((1000,), float(1 + 10 * number)) for number in range(2)]
    order = [0, 1] if rank == 0 else [1, 0]
    sums = [channels[i].submit(channels[i].all_reduce, tensors[i], "bucket 0") for i in order]
    for each in sums:
        each.result()
    assert [tensor.unique().item() for tensor in tensors] == [world_size, 11.0 * world_size]


@pytest.mark.ranks(1, 2, 3)
def test_the_exchanges_are_the_rings(rank, world_size):
    channel = Channel(dist.group.WORLD, "engine")
    tensor = torch.arange(7.0) * (rank + 1)
    assert torch.equal(channel.reduce_scatter(tensor, "unit 0"), shard := ring_reduce_scatter(tensor))
    whole = ring_all_reduce(tensor.clone())
    assert torch.equal(channel.all_gather(shard, torch.empty(7), "unit 0"), whole)
    assert torch.equal(channel.all_reduce(tensor.clone(), "unit 0"), whole)
    assert channel.all_reduce(torch.tensor([rank]), "rank", op="max").item() == world_size - 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("links", [True, False])
def test_ranks_at_different_exchanges_are_told_in_one_line(rank, links):
    shard, channel = torch.ones(2), Channel(dist.new_group([0, 1]), "engine", links=links)
    told = r"rank 0: all_gather of unit 3 of engine 0; rank 1: all_gather of unit 4 of engine 0"
    with pytest.raises(ValueError, match=rf"^the ranks are at different exchanges \({told}\)"):
        channel.all_gather(shard, torch.empty(4), f"unit {3 + rank}")
    assert channel.all_reduce(torch.ones(1), "bucket 0").item() == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at", [0, 40, 107, 300])
def test_exchanges_that_differ_in_one_letter_are_told_apart(rank, at):
    """A layer deep in a model has a long name, and which pass it is comes behind it."""
    with pytest.raises(ValueError, match=r"different.*exchanges"):
        ring_all_reduce(torch.ones(4), label="x" * at + str(rank) + "x" * (300 - at))


OPERATIONS = {
    "all_reduce (sum)": lambda t: ring_all_reduce(t),
    "all_reduce (max)": lambda t: ring_all_reduce(t, op="max"),
    "reduce_scatter": lambda t: ring_reduce_scatter(t),
    "all_gather": lambda t: ring_all_gather(t),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("other", ["all_reduce (max)", "reduce_scatter", "all_gather"])
def test_ranks_at_different_collectives_of_the_same_tensor(rank, other):
    told = rf"rank 0: all_reduce \(sum\); rank 1: {other.replace('(', '.').replace(')', '.')}"
    with pytest.raises(ValueError, match=told):
        OPERATIONS[other if rank else "all_reduce (sum)"](torch.ones(4))


@pytest.mark.ranks(2)
def test_collected_channels_do_not_shift_the_numbers(rank):
    """Ranks collect at different times; the number says which of the engines a message is about."""
    group = dist.new_group([0, 1])
    kept = [Channel(group, "engine")]
    for _ in range(2):
        dropped = Channel(group, "engine")
        if rank:
            kept.append(dropped)
        del dropped
        gc.collect()
    assert Channel(group, "engine").name == "engine 3"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_channel_leaves_neither_sockets_nor_threads(end):
    def held():
        return len(psutil.Process().net_connections("tcp")), threading.active_count()

    ring_all_reduce(torch.ones(1))
    gc.collect()
    before, channels = held(), [Channel(dist.group.WORLD, "engine") for _ in range(3)]
    for channel in channels:
        channel.submit(channel.all_reduce, torch.ones(10), "bucket 0").result()
    assert held() == (before[0] + 6, before[1] + 6)
    dist.barrier()
    dead = [weakref.ref(channel) for channel in channels]
    if end == "close":
        for each in channels:
            each.close()
        with pytest.raises(ConnectionError, match=r"engine.*\d+"):
            channel.all_reduce(torch.ones(1), "bucket 0")
    del channels[:], channel
    each = None
    until = time.monotonic() + 60
    while held()[1] > before[1] and time.monotonic() < until:  # the threads end in their own time
        time.sleep(0.01)
    assert not any(ref() is not None for ref in dead)
    assert held()[1] == before[1]
    assert held()[0] <= before[0]


def test_a_channel_whose_neighbour_has_failed_says_so():
    def check():
        channel = Channel(dist.group.WORLD, "engine")
        if dist.get_rank() == 0:
            channel.close()
        else:
            with pytest.raises(ConnectionError, match=r"engine.*0.*0"):
                channel.all_reduce(torch.ones(1), "bucket 0")
        dist.barrier()

    with World(2) as world:
        world.run(check, timeout_s=120)
