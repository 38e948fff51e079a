"""ZeRO-R's parts against plain checkpointing, plain sums, and by hand."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pardemo import CallMeter, MemoryMeter, RankFailed, WireMeter
from pardemo.book.chapters.zero_r.arena import Arena, OutOfMemory
from pardemo.formulas import tensor_parallel as formulas
from pardemo.small_models import gpt
from pardemo.zero.zero_r import HostStore, partitioned_checkpoint, reduce_in_buffer

HIDDEN = 64


def parity(on_host):
    full = gpt.seeded(lambda: gpt.Block(HIDDEN, 4))
    layer = gpt.parallel_block(full)
    x = gpt.numbers(2, 16, HIDDEN, seed=1).requires_grad_()
    mine = x.detach().clone().requires_grad_()
    full(full(x)).sum().backward()
    store = HostStore() if on_host else None
    y = partitioned_checkpoint(layer, mine, store=store)
    y = partitioned_checkpoint(layer, y, store=store)
    held = store.held_bytes if store else 0
    y.sum().backward()
    truth = dict(gpt.parallel_block(gpt.gradients_as_weights(full)).named_parameters())
    error = max((mine.grad - x.grad).abs().max().item(), gpt.largest_error(gpt.gradients(layer), truth))
    moved = (store.to_host_bytes, store.to_device_bytes, store.held_bytes) if store else (0, 0, 0)
    return error, held, moved


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("on_host", [False, True])
def test_partitioned_checkpoints_change_nothing(world_of, n, on_host):
    part = 2 * 16 * HIDDEN * 4 // n
    for error, held, moved in world_of(n).run(parity, on_host):
        assert error < 2e-5
        assert (held, moved) == ((2 * part, (2 * part, 2 * part, 0)) if on_host else (0, (0, 0, 0)))


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


@pytest.mark.parametrize("n", [2, 4])
def test_memory_over_n_for_one_phi_more(world_of, n):
    for kept, sent, calls in world_of(n).run(kept_and_sent, True):
        assert kept == pytest.approx(1 / n, rel=0.01)
        assert sent == pytest.approx(13, rel=0.01)
        assert calls == {"all_reduce": 6, "all_gather": 1}
    for kept, sent, _ in world_of(n).run(kept_and_sent, False):
        assert kept == pytest.approx(1, rel=0.01)
        assert sent == pytest.approx(12, rel=0.01)


def with_dropout():
    torch.manual_seed(5)  # the same masks on every rank
    x = gpt.numbers(2, 8, 16).requires_grad_()
    y = partitioned_checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), x)
    y.sum().backward()
    return torch.equal(x.grad != 0, y != 0)


def test_the_same_dropout_mask_is_drawn_again(world_of):
    assert all(world_of(2).run(with_dropout))


def refused(case):
    x = torch.ones(1, 3, 3, requires_grad=True)
    if case == "dtypes":
        return reduce_in_buffer([torch.ones(1), torch.ones(1).double()], None)
    if case == "tiny":
        return reduce_in_buffer([torch.ones(4)], 3)
    return partitioned_checkpoint(lambda t: t, x)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("odd", "a checkpoint of 9 does not divide by the 2 ranks"),
        ("dtypes", "need one dtype"),
        ("tiny", "a buffer of 3 bytes does not hold one element"),
    ],
)
def test_bad_input_is_told(world_of, case, message):
    with pytest.raises(RankFailed, match=message):
        world_of(2).run(refused, case)


def sums(sizes, buffer_bytes):
    tensors = [torch.full((n,), float(i + 1)) for i, n in enumerate(sizes)]
    used = reduce_in_buffer(tensors, buffer_bytes)
    ranks = dist.get_world_size()
    return used, all(bool((t == ranks * (i + 1)).all()) for i, t in enumerate(tensors))


@pytest.mark.parametrize("sizes", [[5, 3, 8], [100], [1] * 9, []])
def test_the_buffer_stays_as_large_as_it_was_asked_to_be(world_of, sizes):
    for buffer_bytes in (4, 12, 64, None):
        for used, right in world_of(2).run(sums, sizes, buffer_bytes):
            assert right
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


def without_a_gradient():
    """Of the input, which needs none; the layer's are right."""
    layer, plain, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.ones(4, 8)
    plain.load_state_dict(layer.state_dict())
    partitioned_checkpoint(layer, x).square().sum().backward()
    plain(x).square().sum().backward()
    with torch.no_grad():
        partitioned_checkpoint(layer, x[:, :8])
    return torch.equal(layer.weight.grad, plain.weight.grad)


def test_an_input_need_not_require_a_gradient(world_of):
    assert world_of(2).run(without_a_gradient) == [True] * 2


def never_taken_back():
    layer, store = nn.Linear(8, 8), HostStore()
    x = torch.ones(4, 8, requires_grad=True)
    with torch.no_grad():
        partitioned_checkpoint(layer, x, store=store)
    without_gradients = store.held_bytes
    partitioned_checkpoint(layer, x, store=store)  # its graph is dropped at once
    return without_gradients, store.held_bytes


def test_the_host_lets_go_of_what_nobody_can_take_back(world_of):
    assert world_of(2).run(never_taken_back) == [(0, 0)] * 2


def recomputed_precisions():
    layer, seen = nn.Linear(8, 8), []

    def noted(x):
        y = layer(x)
        seen.append(y.dtype)
        return y

    x = torch.ones(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = partitioned_checkpoint(noted, x)
    y.float().sum().backward()
    return seen


def test_recomputation_runs_in_the_precision_of_the_forward_pass(world_of):
    assert world_of(2).run(recomputed_precisions) == [[torch.bfloat16] * 2] * 2
