"""ZeRO-R's parts against plain checkpointing, plain sums, and by hand."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pardemo import CallMeter, MemoryMeter, WireMeter
from pardemo.book.chapters.zero_r.arena import Arena, OutOfMemory
from pardemo.formulas import tensor_parallel as formulas
from pardemo.small_models import gpt
from pardemo.zero.zero_r import HostStore, partitioned_checkpoint, reduce_in_buffer

HIDDEN = 64


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("on_host", [False, True])
def test_partitioned_checkpoints_change_nothing(world_size, on_host):
    full = gpt.seeded(lambda: gpt.Block(HIDDEN, 4))
    layer = gpt.parallel_block(full)
    x = gpt.numbers(2, 16, HIDDEN, seed=1).requires_grad_()
    mine = x.detach().clone().requires_grad_()
    full(full(x)).sum().backward()
    store = HostStore() if on_host else None
    y = partitioned_checkpoint(layer, mine, store=store)
    y = partitioned_checkpoint(layer, y, store=store)
    part = 2 * 16 * HIDDEN * 4 // world_size
    assert not store or store.held_bytes == 2 * part
    y.sum().backward()
    truth = dict(gpt.parallel_block(gpt.gradients_as_weights(full)).named_parameters())
    error = max((mine.grad - x.grad).abs().max().item(), gpt.largest_error(gpt.gradients(layer), truth))
    assert error < 2e-5
    assert not store or (store.to_host_bytes, store.to_device_bytes, store.held_bytes) == (2 * part, 2 * part, 0)


def kept_and_sent(partitioned):
    h, s = 256, 1024
    blocks = [gpt.parallel_block(gpt.seeded(lambda: gpt.Block(h, 4))) for _ in range(3)]
    run = partitioned_checkpoint if partitioned else lambda layer, x: checkpoint(layer, x, use_reentrant=True)
    kept = []
    for depth in (1, 3):
        x = gpt.numbers(1, s, h).requires_grad_()
        with MemoryMeter(blocks) as memory:
            for layer in blocks[:depth]:
                x = run(layer, x)
            kept.append(memory.live["activations"])
            x.sum().backward()
    x = gpt.numbers(1, s, h).requires_grad_()
    with WireMeter() as wire, CallMeter() as calls:
        run(blocks[0], x).sum().backward()
    phi = formulas.phi(1, s, h, dist.get_world_size())
    return (kept[1] - kept[0]) / 2 / (4 * s * h), wire.sent_bytes / phi, calls.counts


@pytest.mark.ranks(2, 4)
def test_memory_over_n_for_one_phi_more(world_size):
    *measured, calls = kept_and_sent(True)
    assert measured == pytest.approx([1 / world_size, 13], rel=0.01)
    assert calls == {"all_reduce": 6, "all_gather": 1}
    assert kept_and_sent(False)[:2] == pytest.approx((1, 12), rel=0.01)


@pytest.mark.ranks(2)
def test_the_same_dropout_mask_is_drawn_again():
    torch.manual_seed(5)  # the same masks on every rank
    x = gpt.numbers(2, 8, 16).requires_grad_()
    y = partitioned_checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


@pytest.mark.ranks(2)
def test_bad_input_is_told():
    for message, call in (
        ("a checkpoint of 9 does not divide by the 2 ranks",
         lambda: partitioned_checkpoint(lambda t: t, torch.ones(1, 3, 3, requires_grad=True))),
        ("need one dtype", lambda: reduce_in_buffer([torch.ones(1), torch.ones(1).double()], None)),
        ("a buffer of 3 bytes does not hold one element", lambda: reduce_in_buffer([torch.ones(4)], 3)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [[5, 3, 8], [100], [1] * 9, []])
def test_the_buffer_stays_as_large_as_it_was_asked_to_be(world_size, sizes):
    for buffer_bytes in (4, 12, 64, None):
        tensors = [torch.arange(n) + 10.0 * i for i, n in enumerate(sizes)]
        used = reduce_in_buffer(tensors, buffer_bytes)
        assert all(torch.equal(t, world_size * (torch.arange(len(t)) + 10.0 * i)) for i, t in enumerate(tensors))
        assert used == 4 * min(sum(sizes), sum(sizes) if buffer_bytes is None else buffer_bytes // 4)


@given(st.lists(st.integers(1, 30), max_size=30), st.data())
def test_the_arena_keeps_its_books(sizes, data):
    arena, held = Arena(200), {}
    for size in sizes:
        try:
            held[arena.take(size)] = size
        except OutOfMemory as error:
            assert error.largest < size  # noqa: PT017
            assert error.free == arena.free  # noqa: PT017
        if held and data.draw(st.booleans()):
            address = data.draw(st.sampled_from(sorted(held)))
            arena.give_back(address)
            del held[address]
        assert arena.taken == held
        assert arena.free == 200 - sum(held.values())
        assert 0 <= arena.largest <= arena.free
        ends = 0
        for begin, length in sorted(held.items()):
            assert begin >= ends, "blocks do not overlap"
            ends = begin + length
        assert ends <= 200


def test_arena_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match=r"least.*1.*0"):
        Arena(0)
    with pytest.raises(ValueError, match=r"least.*1.*-1"):
        Arena(5).take(-1)
    with pytest.raises(KeyError):
        Arena(5).give_back(3)


@pytest.mark.ranks(2)
def test_an_input_need_not_require_a_gradient():
    """The layer's are right."""
    layer, plain, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.ones(4, 8)
    plain.load_state_dict(layer.state_dict())
    partitioned_checkpoint(layer, x).square().sum().backward()
    plain(x).square().sum().backward()
    with torch.no_grad():
        partitioned_checkpoint(layer, x[:, :8])
    assert torch.equal(layer.weight.grad, plain.weight.grad)


@pytest.mark.ranks(2)
def test_the_host_lets_go_of_what_nobody_can_take_back():
    layer, store = nn.Linear(8, 8), HostStore()
    x = torch.ones(4, 8, requires_grad=True)
    with torch.no_grad():
        partitioned_checkpoint(layer, x, store=store)
    assert store.held_bytes == 0
    partitioned_checkpoint(layer, x, store=store)  # its graph is dropped at once
    assert store.held_bytes == 0


@pytest.mark.ranks(2)
def test_recomputation_runs_in_the_precision_of_the_forward_pass():
    layer, seen = nn.Linear(8, 8), []

    def noted(x):
        y = layer(x)
        seen.append(y.dtype)
        return y

    x = torch.ones(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = partitioned_checkpoint(noted, x)
    y.float().sum().backward()
    assert seen == [torch.bfloat16] * 2
