"""Layouts of ranks, and process groups on real ranks. (test_peers.py compares them with Megatron-core's own.)"""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pardemo import RankFailed
from pardemo.groups import AXES, Groups, ParallelDims, copy_of, cut_of, group_of, mark_cut

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]
KINDS = ["-".join(axes) for size in range(1, 6) for axes in itertools.combinations(AXES, size)]
layouts = st.builds(ParallelDims, **dict.fromkeys(AXES, st.integers(1, 3)), order=st.sampled_from(ORDERS))


def test_the_example_of_megatron_cores_documentation():
    layout = ParallelDims.of_world(16, tp=2, pp=4)
    assert layout.groups("tp") == [[r, r + 1] for r in range(0, 16, 2)]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert layout.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@given(layouts, st.sampled_from(KINDS))
def test_groups_divide_the_ranks(layout, axes):
    """Also with context and expert parallelism in one layout, which Megatron's generator refuses."""
    groups = layout.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
    for group in groups:
        fixed = [{a: layout.coordinates(r)[a] for a in AXES if a not in axes.split("-")} for r in group]
        assert all(place == fixed[0] for place in fixed)
    for rank in range(layout.size):
        assert layout.rank(**layout.coordinates(rank)) == rank


@given(layouts)
def test_the_first_axis_runs_fastest(layout):
    fastest = layout.order.split("-")[0]
    assert all(group == list(range(group[0], group[0] + len(group))) for group in layout.groups(fastest))


def test_axes_of_one_rank_need_no_place_in_the_order():
    short, full = ParallelDims(tp=2, dp=3, order="dp-tp"), ParallelDims(tp=2, dp=3, order="dp-cp-tp-pp-ep")
    assert all(short.groups(axes) == full.groups(axes) for axes in KINDS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelDims(tp=0), "tp must be a whole number of at least 1, not 0"),
        (lambda: ParallelDims(dp=2.0), "dp must be a whole number of at least 1, not 2.0"),
        (lambda: ParallelDims(pp=True), "pp must be a whole number of at least 1, not True"),
        (lambda: ParallelDims(tp=2).groups("tp-tp"), "each axis once, not 'tp-tp'"),
        (lambda: ParallelDims(pp=2, cp=2, order="tp-dp"), "order must name cp, pp once each"),
        (lambda: ParallelDims(order="tp-tp"), "order must name"),
        (lambda: ParallelDims(order="tp-xp"), "order must name"),
        (lambda: ParallelDims.of_world(6, tp=4), "6 ranks do not divide into replicas of tp 4 × cp 1 × ep 1 × pp 1"),
        (lambda: ParallelDims(tp=2).coordinates(2), "rank 2 is not one of the 2 ranks 0 to 1"),
        (lambda: ParallelDims(tp=2).rank(tp=2), "tp 2 is not one of 0 to 1"),
        (lambda: ParallelDims().groups("tp-xp"), "no axis xp; there are: tp, cp, ep, dp, pp"),
    ],
)
def test_bad_layouts_are_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def sums(layout, *joined):
    with Groups(layout, *joined) as groups:
        found = {}
        for axes in (*AXES, *joined):
            tensor = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(tensor, group=groups[axes])
            found[axes] = tensor.item()
    return found


@pytest.mark.parametrize(
    "sizes", [{"tp": 4}, {"tp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"cp": 2, "pp": 2}, {"ep": 2, "dp": 2}]
)
@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "pp-dp-ep-cp-tp"])
def test_each_rank_is_in_its_own_groups(world_of, sizes, order):
    layout = ParallelDims(**sizes, order=order)
    for rank, found in enumerate(world_of(4).run(sums, layout, "ep-dp", "tp-pp")):
        for axes, total in found.items():
            (mine,) = [group for group in layout.groups(axes) if rank in group]
            assert total == sum(mine)


def test_a_layout_of_another_size_is_refused(world_of):
    with pytest.raises(RankFailed, match=r"tp 2.*2.*ranks.*4"):
        world_of(4).run(sums, ParallelDims(tp=2))


@pytest.mark.ranks(2)
def test_a_mark_is_read_where_the_parameter_is(rank):
    cut, whole, alone = (nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    mark_cut(cut, dist.group.WORLD, 1)
    mark_cut(alone, dist.new_group([rank], use_local_synchronization=True), 1)
    assert (cut_of(cut).group, cut_of(cut).dim, cut_of(cut).counted) == (dist.group.WORLD, 1, ((0, 6),))
    assert cut_of(whole) is None
    assert cut_of(alone) is None, "in a group of one nothing is cut"
    sent = [None, None]
    dist.all_gather_object(sent, cut)
    assert [cut_of(parameter) for parameter in sent] == [None, None], "elsewhere it is cut over no group"


def test_outside_a_process_group():
    with pytest.raises(RuntimeError, match=r"no process group: call this inside World\.run"):
        group_of(None)


@pytest.mark.ranks(2)
def test_a_rank_outside_the_group_is_told(rank):
    alone = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match="global rank 1 is not a member"):
            group_of(alone)
    else:
        dist.destroy_process_group(alone)


@pytest.mark.ranks(2)
def test_a_group_has_one_copy_which_ends_with_its_block():
    with Groups(ParallelDims(dp=2)) as groups:
        second, tensor = copy_of(groups.dp), torch.ones(1)
        assert copy_of(groups.dp) is second is not groups.dp
        dist.all_reduce(tensor, group=second)
        assert tensor.item() == 2
    with pytest.raises((KeyError, ValueError)):
        dist.get_process_group_ranks(second)


def test_no_rank_is_in_the_block_before_all_groups_are_connected(world_of):
    """A rank that left it at once would hang up on one that is still connecting."""

    def begin_and_last_group():
        make, made = dist.new_group, []

        def slow(ranks):
            group = make(ranks)
            time.sleep(0.1 * dist.get_rank())
            made.append(time.monotonic())
            return group

        dist.new_group = slow
        try:
            with Groups(ParallelDims(tp=2)):
                return time.monotonic(), made[-1]
        finally:
            dist.new_group = make

    (begin, _), (_, last) = world_of(2).run(begin_and_last_group)
    assert begin >= last
