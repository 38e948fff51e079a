"""The rings and the parameter server against plain sums, and their bytes against the formulas."""

import socket
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pardemo import MemoryMeter, RankFailed, WireMeter, World, collectives
from pardemo.collectives import (
    chunk_numel,
    functional,
    hierarchical_all_reduce,
    links,
    parameter_server_all_reduce,
    ring,
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from pardemo.formulas import communication
from pardemo.groups import Groups, ParallelDims

SIZES = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.complex64]
REL = 0.005  # headers, descriptions and the meter's barrier, beside tensors of 1 MiB and more


def whole_numbers(shape, dtype, rank):
    """Small whole numbers, different on each rank: their sums are exact in every dtype, in every order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def all_collectives_agree(shape, dtype):
    """On every rank: each collective's result against the plain sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [whole_numbers(shape, dtype, r) for r in range(size)]
    total = sum(inputs)
    for all_reduce in (ring_all_reduce, parameter_server_all_reduce):
        x = inputs[rank].clone()
        assert all_reduce(x) is x
        assert torch.equal(x, total)
    x = inputs[rank].clone()
    shard = ring_reduce_scatter(x)
    chunk = chunk_numel(x.numel(), size)
    assert torch.equal(x, inputs[rank]), "the input is left as it was"
    assert torch.equal(shard, total.flatten()[rank * chunk : (rank + 1) * chunk])
    assert torch.equal(ring_all_gather(shard, out=torch.empty_like(x)), total)
    assert torch.equal(ring_all_gather(inputs[rank]), torch.cat([i.flatten() for i in inputs]))


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_collectives_equal_the_plain_sum(dtype):
    all_collectives_agree((3, 1001), dtype)


@pytest.mark.parametrize("size", SIZES)
def test_any_shape_down_to_nothing(world_of, size):
    @settings(max_examples=15)
    @given(shape=st.lists(st.integers(0, 9), max_size=5).map(tuple), dtype=st.sampled_from(DTYPES))
    def agree(shape, dtype):
        world_of(size).run(all_collectives_agree, shape, dtype)

    agree()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_many_blocks_and_a_rest(monkeypatch, world_size, blocks):
    """As tensors of many MiB: blocks of 16 numbers each, and the last of them on some ranks alone."""
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 16)
    monkeypatch.setattr(ring, "BLOCK_BYTES", 64)
    for numel in (world_size * 16 * blocks, world_size * 16 * blocks + 1, world_size * (16 * blocks + 7) - 1):
        all_collectives_agree((numel,), torch.float32)


@pytest.mark.ranks(6)
def test_a_slow_successor_gets_what_was_meant_for_it(monkeypatch, rank, world_size):
    """A partial sum that still waits to be sent must not be overwritten by the next one in its buffer."""

    def begin_late(link, chunk):
        if rank == 3:
            time.sleep(0.5)
        begin(link, chunk)

    begin = ring._begin
    monkeypatch.setattr(ring, "_begin", begin_late)
    shard = ring_reduce_scatter(torch.full((world_size * ring.BLOCK_BYTES // 4,), float(rank + 1)))
    assert shard.unique().tolist() == [21.0]


@pytest.mark.ranks(4)
def test_sums_of_floats_are_within_rounding_and_the_same_bits_everywhere(rank, same_on_all_ranks):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(rank)
        x = torch.randn(10_000, dtype=dtype)
        gathered = [torch.empty_like(x) for _ in range(4)]
        dist.all_gather(gathered, x)
        same_on_all_ranks(ring_all_reduce(x))
        # Three additions, each rounded: half an ulp of the largest partial sum (below 16) each time.
        assert (x.double() - sum(g.double() for g in gathered)).abs().max() <= 3 * 16 * torch.finfo(dtype).eps / 2


@pytest.mark.ranks(2)
def test_a_parameter_that_requires_a_gradient():
    p = torch.nn.Parameter(torch.ones(5))
    ring_all_reduce(p)
    assert (p.tolist(), p.requires_grad) == ([2.0] * 5, True)


@pytest.mark.ranks(4)
def test_sub_groups_have_rings_of_their_own(rank):
    low, high, odd = dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([3, 1])
    mine = low if rank < 2 else high
    results = []
    for group in (mine, None, odd):
        x = torch.full((1000,), float(rank))
        if group is not odd or rank in (1, 3):
            results.append(ring_all_reduce(x, group)[0].item())
            shard = ring_reduce_scatter(torch.full((1000,), float(rank)), group)
            assert shard.unique().item() == results[-1]
            assert parameter_server_all_reduce(torch.full((9,), float(rank)), group)[0].item() == results[-1]
    assert results == [[1, 6], [1, 6, 4], [5, 6], [5, 6, 4]][rank]


@pytest.mark.ranks(3, timeout=120)
@pytest.mark.parametrize(
    "collective",
    [ring_all_reduce, ring_reduce_scatter, ring_all_gather, parameter_server_all_reduce],
)
@pytest.mark.parametrize(
    ("odd_one", "told"),
    [
        (lambda: torch.ones(6), r"ranks 0, 2: float32 \(5,\); rank 1: float32 \(6,\)"),
        (lambda: torch.ones(5, dtype=torch.bfloat16), r"rank 1: bfloat16 \(5,\)"),
        (lambda: torch.ones(1, 5), r"rank 1: float32 \(1, 5\)"),
        (lambda: torch.ones(10)[::2], r"ranks 0, 2: float32 \(5,\); rank 1: float32 \(5,\) strides \(2,\)"),
    ],
    ids=["size", "dtype", "shape", "strides"],
)
def test_different_tensors_are_an_error_that_names_the_ranks_not_a_hang(rank, collective, odd_one, told):
    with pytest.raises(ValueError, match=told):
        collective(odd_one() if rank == 1 else torch.ones(5))
    assert ring_all_reduce(torch.ones(2)).tolist() == [3, 3], "the ring works on"


@pytest.mark.ranks(2)
def test_a_shard_that_is_not_this_ranks_chunk():
    with pytest.raises(ValueError, match=r"\d.*5.*elements.*4"):
        ring_all_gather(torch.ones(4), out=torch.empty(5))


def test_a_neighbour_that_dies_is_an_error_not_a_hang():
    def die_in_the_ring():
        ring_all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            import os

            os._exit(1)
        ring_all_reduce(torch.ones(8 << 20))

    with World(3) as world, pytest.raises(RankFailed.__base__, match=r"rank.*1.*1"):
        world.run(die_in_the_ring, timeout_s=120)


# ---------------------------------------------------------------- what the collectives cost


def measure(nbytes):
    tensor = torch.ones(nbytes // 4)
    costs = {}
    for name in ("ring_all_reduce", "ring_reduce_scatter", "parameter_server_all_reduce"):
        collective = getattr(collectives, name)
        collective(tensor)
        with WireMeter() as wire:
            collective(tensor)
        costs[name] = wire.sent_bytes, wire.received_bytes, wire.by_rank()
        assert wire.evidence == "wire"
    shard = ring_reduce_scatter(tensor)
    with WireMeter() as wire:
        ring_all_gather(shard, out=tensor)
    costs["ring_all_gather"] = wire.sent_bytes, wire.received_bytes, wire.by_rank()
    return costs


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 20])
def test_bytes_on_the_wire_are_the_formulas(rank, world_size, nbytes):
    half, whole = communication.ring_half(nbytes, world_size), communication.ring_all_reduce(nbytes, world_size)
    star = communication.parameter_worker if rank else communication.parameter_server
    expected = {
        "ring_all_reduce": whole,
        "ring_reduce_scatter": half,
        "ring_all_gather": half,
        "parameter_server_all_reduce": star(nbytes, world_size),
    }
    costs = measure(nbytes)
    for name, theory in expected.items():
        sent, received, peers = costs[name]
        assert sent == pytest.approx(theory.sent, rel=REL), name
        assert received == pytest.approx(theory.received, rel=REL), name
        if name.startswith("ring"):
            assert peers[(rank + 1) % world_size][0] == pytest.approx(theory.sent, rel=REL), "all to the successor"
            assert peers[(rank - 1) % world_size][1] == pytest.approx(theory.received, rel=REL), "from the predecessor"


@pytest.mark.ranks(1)
def test_a_group_of_one_moves_nothing():
    for sent, received, _ in measure(1 << 20).values():
        assert (sent, received) == (0, 0)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, 16 << 20])
@pytest.mark.parametrize(("collective", "nths"), [(ring_all_reduce, 1), (ring_reduce_scatter, 3)])  # a result is 1/N
def test_memory_beyond_the_tensor_is_at_most_two_nths(world_size, nbytes, collective, nths):
    tensor = torch.ones(nbytes // 4)
    collective(tensor)
    with MemoryMeter() as memory:
        collective(tensor)
    assert 0 < memory.peak_bytes <= nths / world_size * nbytes


# ---------------------------------------------------------------- without links of its own


@pytest.mark.ranks(2, 3, 4)
def test_the_backends_collectives_that_nccl_has(monkeypatch, world_size):
    monkeypatch.setattr(functional, "agreed", lambda *_, **__: nullcontext())  # without links
    for numel in (0, 1, world_size - 1, 12 * world_size, 10_007):
        all_collectives_agree((numel,), torch.float32)


@pytest.mark.ranks(2)
def test_an_error_in_mid_ring_does_not_reach_the_next_collective():
    with pytest.raises((NotImplementedError, ConnectionError)):
        ring_all_reduce(torch.ones(5 << 20, dtype=torch.float8_e4m3fn))
    dist.barrier()
    assert ring_all_reduce(torch.ones(3)).tolist() == [2.0] * 3


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("numel", [0, 5, 3 * ring.SEGMENT_BYTES // 4 + 1])
def test_a_broadcast_brings_the_first_ranks_tensor(rank, numel):
    tensor = torch.full((numel, 2), 7.0 + rank).t()
    assert ring_broadcast(tensor) is tensor
    assert (tensor == 7).all()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_ring_takes_the_largest(rank, world_size, dtype):
    tensor = torch.tensor([float(rank), -float(rank), 5.0]).to(dtype)
    assert ring_all_reduce(tensor, op="max").tolist() == [world_size - 1, 0, 5]


@pytest.mark.ranks(2)
def test_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="'min'"):
        ring_all_reduce(torch.ones(1), op="min")


@pytest.mark.ranks(4)
def test_a_ring_lets_go_of_what_it_sent():
    left = []
    for _ in range(100):
        with MemoryMeter() as meter:
            tensor = torch.ones(1 << 18)
            ring_all_reduce(tensor, dist.group.WORLD)
            del tensor
            left.append(meter.live_bytes)
    assert max(left) == 0


def hierarchical(hosts, per_host, shape, dtype, strided=False):
    """The sum over all ranks by hosts, and what this rank sent for it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [whole_numbers(shape, dtype, r) for r in range(size)]
    with Groups(ParallelDims(tp=per_host, dp=hosts)) as groups:
        x = inputs[rank].clone()
        x = x.t().contiguous().t() if strided else x
        hierarchical_all_reduce(x, groups.tp, groups.dp)
        assert torch.equal(x, sum(inputs))
        dist.barrier()
        with WireMeter() as wire:
            assert hierarchical_all_reduce(x, groups.tp, groups.dp) is x
    return wire.sent_bytes


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (1, 4), (4, 1), (2, 1), (1, 1)])
@pytest.mark.parametrize("shape", [(3, 1001), (1, 1), (0, 5), (2, 3)])
def test_a_hierarchical_all_reduce_equals_the_plain_sum(world_of, hosts, per_host, shape):
    world = world_of(hosts * per_host)
    world.run(hierarchical, hosts, per_host, shape, torch.float32)
    world.run(hierarchical, hosts, per_host, shape, torch.int64, strided=True)


@pytest.mark.ranks(4)
def test_between_hosts_a_hierarchical_all_reduce_sends_each_number_once_however_many_ranks_a_host_has():
    nbytes = 4 << 20
    inside, between = communication.hierarchical_all_reduce(nbytes, hosts=2, per_host=2)
    assert (inside, between) == (nbytes, nbytes / 2), "2(G−1)/G·S inside, 2(H−1)/H·S/G between"
    sent = hierarchical(2, 2, (nbytes // 4, 1), torch.float32)
    assert sent == pytest.approx(inside + between, rel=REL)


# ---------------------------------------------------------------- views

#: Of a contiguous [6, 6] complex tensor, what is no piece of memory from its first element to its last.
VIEWS = {
    "every second": lambda t: t.flatten()[::2],
    "a column": lambda t: t[:, 1],
    "a diagonal": lambda t: t.diagonal(),
    "transposed": lambda t: t.T,
    "a block": lambda t: t[1:4, 2:5],
    "real part": lambda t: t.real,
    "imaginary part": lambda t: t.imag.flatten()[::3],
    "of a real part": lambda t: t.real[:, 3],
    "conjugate": lambda t: t.conj(),
    "a column's conjugate": lambda t: t.conj()[:, 2],
    "negative": lambda t: t.conj().imag,
    "a negative column": lambda t: t.conj().imag[:, 5],
    "no dimension": lambda t: t[2, 3],
    "no dimension, negative": lambda t: t.conj().imag[2, 3],
    "nothing": lambda t: t[:0, ::2],
    "nothing of a column": lambda t: t[2:2, 1],
    "five elements": lambda t: t[1, 1::1],
}
#: The same element several times: such a tensor can be sent, but not changed in place.
EXPANDED = {
    "a gradient of sum()": lambda t: t[0, 0].expand(7),
    "a row for all": lambda t: t[2].expand(5, 6),
    "windows": lambda t: t[3].unfold(0, 3, 1),
}


def on_every_rank(view):
    """The ranks' views, their sum, and this rank's own."""
    ranks = range(dist.get_world_size())
    views = [view(whole_numbers((6, 6), torch.complex64, r)) for r in ranks]
    return views, sum(v.clone() for v in views), views[dist.get_rank()]


def same_values(found, expected):
    torch.testing.assert_close(found.resolve_neg(), expected.clone().resolve_conj().resolve_neg(), rtol=0, atol=0)


def scattered_and_gathered(views, total, mine):
    before, size, rank = mine.clone(), dist.get_world_size(), dist.get_rank()
    chunk = chunk_numel(mine.numel(), size)
    for _ in range(2):
        same_values(ring_reduce_scatter(mine), total.reshape(-1)[rank * chunk : (rank + 1) * chunk])
    same_values(ring_all_gather(mine), torch.cat([v.reshape(-1).resolve_conj().resolve_neg() for v in views]))
    same_values(mine, before)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", VIEWS)
def test_all_collectives_of_views_that_lie_apart(rank, world_size, name):
    """What lies between a view's elements, and behind them, is neither read nor written."""
    view = VIEWS[name]
    scattered_and_gathered(*on_every_rank(view))
    for all_reduce in (ring_all_reduce, parameter_server_all_reduce):
        views, total, _ = on_every_rank(view)
        base = whole_numbers((6, 6), torch.complex64, rank)
        assert view(base).shape == total.shape
        expected = base.clone()
        view(expected).copy_(total)
        all_reduce(view(base))
        same_values(base, expected)
    views, _, mine = on_every_rank(view)
    ring_broadcast(mine)
    same_values(mine, views[0] if rank == 0 else on_every_rank(view)[0][0])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", EXPANDED)
def test_elements_that_share_memory_are_sent_and_not_changed(world_size, name):
    views, total, mine = on_every_rank(EXPANDED[name])
    scattered_and_gathered(views, total, mine)
    for in_place in (ring_all_reduce, parameter_server_all_reduce, ring_broadcast):
        with pytest.raises(ValueError, match="expand"):
            in_place(mine)
    assert ring_all_reduce(torch.ones(3)).tolist() == [float(world_size)] * 3


@pytest.mark.parametrize("tensor", [torch.ones(8)[::2], torch.ones(3).expand(2, 3), torch.ones(3, 4).T])
def test_bytes_are_taken_of_contiguous_tensors_alone(tensor):
    with pytest.raises(ValueError, match=r"through.*materialized"):
        links.bytes_of(tensor)
    assert bytes(links.bytes_of(links.materialized(tensor))) == tensor.numpy().tobytes()


def test_bytes_of_lazy_tensors_are_not_taken():
    lazy = torch.tensor([1 + 2j]).conj()
    for tensor in (lazy, lazy.imag):
        with pytest.raises(ValueError, match=r"conjugated.*negated"):
            links.bytes_of(tensor)


@pytest.mark.ranks(2)
def test_a_result_goes_into_no_lazy_tensor_and_a_sparse_one_is_refused():
    with pytest.raises(ValueError, match=r"contiguous.*conjugate"):
        ring_all_gather(torch.ones(2, dtype=torch.complex64), out=torch.empty(4, dtype=torch.complex64).conj())
    with pytest.raises(TypeError, match=r"dense tensors, not torch\.sparse_coo"):
        ring_all_reduce(torch.eye(3).to_sparse())


# ---------------------------------------------------------------- what is compared


@pytest.mark.ranks(2, 3, timeout=20)
@pytest.mark.parametrize("other", [ring_all_reduce, ring_reduce_scatter])
def test_a_parameter_server_on_one_rank_and_a_ring_on_the_others_are_told(rank, world_size, other):
    x = torch.ones(6)
    server = rank == 1
    with pytest.raises(ValueError, match=r"different.*1.*0"):
        parameter_server_all_reduce(x) if server else other(x)
    assert parameter_server_all_reduce(x).tolist() == [float(world_size)] * 6


@pytest.mark.ranks(2)
def test_what_is_on_its_way_within_a_host_fits_the_cache():
    """Left to itself the kernel's buffer grows to 32 MiB, and what is copied out of it comes from memory."""
    ring_all_reduce(torch.ones(8 << 20))  # enough for it to grow
    link = links.link_of(dist.group.WORLD)
    for end, option in ((link._out, socket.SO_SNDBUF), (link._in, socket.SO_RCVBUF)):
        assert end.getsockopt(socket.SOL_SOCKET, option) == links.BUFFER_BYTES
