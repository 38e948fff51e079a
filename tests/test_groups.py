"""Layouts against Megatron-core's own, and process groups on real ranks."""

import itertools
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pardemo import RankFailed
from pardemo.groups import AXES, Groups, ParallelDims

ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]
layouts = st.builds(ParallelDims, *[st.integers(1, 5)] * 3, st.sampled_from(ORDERS))

MEGATRON = """
import itertools, warnings
warnings.simplefilter("ignore")
from megatron.core.parallel_state import RankGenerator
from pardemo.groups import ParallelDims
compared = 0
sizes = [(2, 2, 4), (2, 4, 2), (4, 2, 2), (8, 64, 1), (8, 8, 8), (3, 5, 2), (1, 1, 16), (16, 1, 1), (4, 1, 4)]
for tp, dp, pp in sizes:
    for order in itertools.permutations(("tp", "dp", "pp")):
        order = "-".join(order)
        theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order=order)
        for axes in ("tp", "dp", "pp", "tp-pp", "tp-dp", "dp-pp"):
            assert ParallelDims(tp, dp, pp, order).groups(axes) == theirs.get_ranks(axes), (tp, dp, pp, order, axes)
            compared += 1
print(compared)
"""


def test_groups_are_megatron_cores():
    done = subprocess.run([sys.executable, "-c", MEGATRON], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["324"], "9 sizes, 6 orders, 6 kinds of group"


def test_the_example_of_megatron_cores_documentation():
    layout = ParallelDims.of_world(16, tp=2, pp=4)
    assert layout.groups("tp") == [[r, r + 1] for r in range(0, 16, 2)]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert layout.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@given(layouts)
def test_groups_divide_the_ranks(layout):
    for axes in ("tp", "dp", "pp", "tp-dp", "tp-pp", "dp-pp", "tp-dp-pp"):
        groups = layout.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
        for group in groups:
            fixed = [{a: layout.coordinates(r)[a] for a in AXES if a not in axes.split("-")} for r in group]
            assert all(place == fixed[0] for place in fixed)
    for rank in range(layout.size):
        assert layout.rank(**layout.coordinates(rank)) == rank


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelDims(tp=0), "tp must be a whole number of at least 1, not 0"),
        (lambda: ParallelDims(dp=2.0), "dp must be a whole number of at least 1, not 2.0"),
        (lambda: ParallelDims(pp=True), "pp must be a whole number of at least 1, not True"),
        (lambda: ParallelDims(tp=2).groups("tp-tp"), "each axis once, not 'tp-tp'"),
        (lambda: ParallelDims(order="tp-dp"), "must name tp, dp and pp once each"),
        (lambda: ParallelDims.of_world(6, tp=4), "6 ranks do not divide into copies of tp 4 × pp 1 = 4"),
        (lambda: ParallelDims(tp=2).coordinates(2), "rank 2 is not one of the 2 ranks 0 to 1"),
        (lambda: ParallelDims(tp=2).rank(tp=2), "tp 2 is not one of 0 to 1"),
        (lambda: ParallelDims().groups("tp-cp"), "no axis cp; there are: tp, dp, pp"),
    ],
)
def test_bad_layouts_are_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def sums(layout):
    with Groups(layout) as groups:
        found = {}
        for axis in AXES:
            tensor = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(tensor, group=getattr(groups, axis))
            found[axis] = tensor.item()
    return found


@pytest.mark.parametrize(("tp", "dp", "pp"), [(4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("order", ["tp-dp-pp", "pp-dp-tp"])
def test_each_rank_is_in_its_own_groups(world_of, tp, dp, pp, order):
    layout = ParallelDims(tp, dp, pp, order)
    for rank, found in enumerate(world_of(4).run(sums, layout)):
        for axis, total in found.items():
            (mine,) = [group for group in layout.groups(axis) if rank in group]
            assert total == sum(mine)


def test_a_layout_of_another_size_is_refused(world_of):
    with pytest.raises(RankFailed, match=r"2.*1.*1.*2.*ranks.*4"):
        world_of(4).run(sums, ParallelDims(tp=2))


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
