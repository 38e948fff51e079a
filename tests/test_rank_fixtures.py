"""Fixtures of the plug-in of pytest, on ranks: meters, one process to compare with, what is the same on all ranks."""

import os
import random

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(2)
def test_meters(rank, wire, memory):
    x = torch.ones(1 << 18)
    with wire:
        dist.all_reduce(x)
    assert (1 << 20) <= wire.sent_bytes < 1.01 * (1 << 20)
    with memory:
        kept = x + 1
    assert memory.peak_bytes == kept.nbytes == 1 << 20


@pytest.mark.ranks(3)
def test_alone(rank, single_process, wire):
    def model(scale):
        assert not dist.is_initialized()
        assert "RANK" not in os.environ
        return [os.getpid(), scale * torch.rand(4)]

    before = torch.get_rng_state()
    with wire:
        pid, numbers = single_process(model, scale=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert dist.is_initialized()
    assert wire.sent_bytes < 5000
    assert torch.equal(numbers, 2 * torch.rand(4, generator=torch.Generator().manual_seed(1000)))
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    assert pid == pids[0]
    kind = RuntimeError if rank else ZeroDivisionError
    with pytest.raises(kind, match="division by zero"):
        single_process(lambda: 1 / 0)


@pytest.mark.ranks(3)
def test_same(rank, same_on_all_ranks):
    layer = torch.nn.Linear(2, 2)
    for parameter in layer.parameters():
        dist.broadcast(parameter.data, 0)
    nan = torch.tensor([float("nan"), -0.0])
    same_on_all_ranks([layer, {"a": (nan, 1.5, "text", None)}, torch.zeros(0, 3), {1, 2}, nan.numpy()])
    w = torch.ones(2, 4, dtype=torch.bfloat16)
    w[1, 2] += rank
    differ = "(1 of 8 elements differ, by {} at most)"
    tensors = f"at [1, 2] rank 0 has 1.0, rank 1 has 2.0 {differ.format(1)}; "
    tensors += f"at [1, 2] rank 0 has 1.0, rank 2 has 3.0 {differ.format(2)}"
    shapes = "ranks 0, 2 have a float32 tensor of shape [2, 1], rank 1 has a float32 tensor of shape [2, 2]"
    zero = torch.zeros(1) if rank else -torch.zeros(1)
    for value, place, told in (
        ({"w": w, "later": rank}, "['w']", tensors),
        ([0, rank // 2], "[1]", "ranks 0, 1 have 0, rank 2 has 1"),
        ([1] * (1 + rank // 2), "", "ranks 0, 1 have a list of length 1, rank 2 has a list of length 2"),
        (torch.zeros(2, 1 + rank % 2), "", shapes),
        (zero, "", "at [0] rank 0 has -0.0, ranks 1, 2 have 0.0 (1 of 1 elements differ, by 0 at most)"),
    ):
        with pytest.raises(AssertionError) as caught:
            same_on_all_ranks(value)
        assert str(caught.value) == f"value{place} is not the same on all ranks: {told}"
    with pytest.raises(TypeError, match=r"value\[0\] is a Random, which has no bits to compare"):
        same_on_all_ranks([random.Random()])


@pytest.mark.ranks(cluster="2x1", between="200 Mbit/s")
def test_on_a_cluster(rank, world_size):
    assert (world_size, os.environ["GROUP_RANK"]) == (2, str(rank))
