"""Schedules proven without a process, their charts against the papers' formulas, and what the proof refuses."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pardemo.formulas import pipeline as formulas
from pardemo.meters.timeline import Span
from pardemo.pipeline_parallel import (
    Backward,
    Forward,
    Schedule,
    ScheduleError,
    chart,
    cut_by_layers,
    cut_by_parameters,
    gpipe,
    instructions,
    interleaved,
    measured_chart,
    one_f_one_b,
    prove,
)
from pardemo.pipeline_parallel.instructions import (
    Receive,
    ReceiveActivation,
    Send,
    SendGradient,
    receiver_of,
    sender_of,
)
from pardemo.pipeline_parallel.stages import balance

SIZES = st.tuples(st.sampled_from([gpipe, one_f_one_b]), st.integers(1, 8), st.integers(1, 12)).map(
    lambda sizes: Schedule(*sizes)
)
ROUNDS = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4)).map(
    lambda sizes: Schedule(interleaved, sizes[0], sizes[0] * sizes[1], sizes[2])
)


@given(st.one_of(SIZES, ROUNDS))
@settings(deadline=None)
def test_every_schedule_is_proven(schedule):
    prove(schedule)


@given(st.one_of(SIZES, ROUNDS))
@settings(deadline=None)
def test_every_receive_has_its_send_and_pairs_of_ranks_agree_on_their_order(schedule):
    orders = instructions(schedule)
    for rank, peer in itertools.permutations(range(schedule.ranks), 2):
        sent = [one for one in orders[rank] if isinstance(one, Send)]
        sent = [one for one in sent if schedule.rank_of(receiver_of(one).stage) == peer]
        taken = [one for one in orders[peer] if isinstance(one, Receive)]
        taken = [one for one in taken if schedule.rank_of(sender_of(one).stage) == rank]
        assert [receiver_of(one) for one in sent] == taken


@given(st.one_of(SIZES, ROUNDS))
@settings(deadline=None)
def test_micro_batches_in_flight_are_what_the_formula_says(schedule):
    name, sizes = schedule.order.__name__, (schedule.ranks, schedule.micro_batches, schedule.chunks)
    expected = [formulas.in_flight(name, rank, *sizes) for rank in range(schedule.ranks)]
    assert chart(schedule).in_flight == expected


@given(st.one_of(SIZES, ROUNDS), st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None)
def test_the_bubble_is_that_of_the_papers(schedule, forward, backward):
    sizes = schedule.ranks, schedule.micro_batches, schedule.chunks
    found = chart(schedule, forward, backward)
    assert found.bubble_of_total == pytest.approx(formulas.bubble_of_total(*sizes), abs=1e-9)
    assert found.bubble_of_ideal == pytest.approx(formulas.bubble_of_ideal(*sizes), abs=1e-9)
    expected = formulas.makespan(*sizes[:2], forward, backward, schedule.chunks)
    assert found.makespan == pytest.approx(expected)


@given(st.one_of(SIZES, ROUNDS))
@settings(deadline=None)
def test_as_many_ranks_compute_at_one_time_as_there_are_micro_batches_for(schedule):
    assert chart(schedule).at_once == min(schedule.ranks, schedule.micro_batches)


def test_latency_stretches_the_chart():
    schedule = Schedule(gpipe, 4, 4)
    # three hops forward and three back on the critical path
    assert chart(schedule, latency=0.5).makespan == chart(schedule).makespan + 6 * 0.5


def test_latency_counts_between_ranks_and_not_within_one():
    # one micro-batch goes forth and back: F 0, hop, F 1, B 1 at once, hop, B 0
    assert chart(Schedule(one_f_one_b, 2, 1), latency=0.5).makespan == 1 + 0.5 + 1 + 2 + 0.5 + 2
    alone = Schedule(interleaved, 1, 3, 4)
    assert chart(alone, latency=0.5).makespan == chart(alone).makespan


def test_a_measured_chart_is_of_the_run_whenever_that_began():
    """Real spans have the times of a clock that has run for days."""
    ideal = chart(Schedule(one_f_one_b, 4, 8))
    spans = [span._replace(begin_s=span.begin_s + 4096, end_s=span.end_s + 4096) for span in ideal.spans]
    found = measured_chart([*spans, Span(0, "wait", "0.0", 0, 1)])
    assert (found.makespan, found.in_flight) == (ideal.makespan, ideal.in_flight)
    assert found.bubble_of_total == pytest.approx(formulas.bubble_of_total(4, 8), abs=1e-9)
    assert found.bubble_of_ideal == pytest.approx(formulas.bubble_of_ideal(4, 8), abs=1e-9)


def test_1f1b_of_two_ranks_step_by_step():
    first, second = ([str(one) for one in order] for order in instructions(Schedule(one_f_one_b, 2, 2)))
    assert first == ["F 0.0", "send a 0.0", "F 0.1", "send a 0.1", "receive g 0.0", "B 0.0", "receive g 0.1", "B 0.1"]
    assert second == ["receive a 1.0", "F 1.0", "receive a 1.1", "B 1.0", "send g 1.0", "F 1.1", "B 1.1", "send g 1.1"]


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (3, 3)])
def test_interleaving_divides_the_bubble_by_the_chunks(p, v):
    plain, chunked = chart(Schedule(one_f_one_b, p, 2 * p)), chart(Schedule(interleaved, p, 2 * p, v))
    assert chunked.bubble_of_ideal == pytest.approx(plain.bubble_of_ideal / v)


def backward_too_early(rank, ranks, micro_batches):
    for k in range(micro_batches):
        yield Backward(rank, k)
        yield Forward(rank, k)


def wrong_way_round(rank, ranks, micro_batches):
    """The last rank wants the micro-batches in the opposite order, one at a time."""
    ks = range(micro_batches) if rank < ranks - 1 else reversed(range(micro_batches))
    for k in ks:
        yield Forward(rank, k)
        yield Backward(rank, k)


def forgets(rank, ranks, micro_batches):
    yield from list(gpipe(rank, ranks, micro_batches))[:-1]


def repeats(rank, ranks, micro_batches):
    yield Forward(rank, 0)
    yield from gpipe(rank, ranks, micro_batches)


def others(rank, ranks, micro_batches):
    yield from gpipe(0, ranks, micro_batches)


def too_many(rank, ranks, micro_batches):
    yield from gpipe(rank, ranks, micro_batches + 1)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (backward_too_early, "rank 0 is told B 0.0 before its forward"),
        (wrong_way_round, "deadlock: rank 0 in B 0.0 for B 1.0, rank 1 in F 1.2 for F 0.2"),
        (forgets, "rank 0 is never told B 0.2"),
        (repeats, "rank 0 is told F 0.0 twice"),
        (others, "rank 1 is told F 0.0, but has no stage 0"),
        (too_many, "rank 0 is told F 0.3, but there are 3 micro-batches"),
    ],
)
def test_a_wrong_order_is_named(order, message):
    with pytest.raises(ScheduleError, match=message.replace(".", r"\.")):
        prove(Schedule(order, 2, 3))


def test_wrong_exchanges_are_named():
    schedule = Schedule(one_f_one_b, 2, 3)

    def refused(change):
        orders = instructions(schedule)
        change(orders)
        with pytest.raises(ScheduleError) as error:
            prove(schedule, orders)
        return str(error.value)

    assert (
        refused(lambda o: o[1].remove(ReceiveActivation(1, 1)))
        == "rank 1 is told F 1.1 without receive a 1.1 before it"
    )
    assert refused(lambda o: o[1].remove(SendGradient(1, 2))) == "rank 1 is told B 1.2 without send g 1.2 after it"
    assert refused(lambda o: o[1].append(SendGradient(1, 2))) == "rank 1 is told send g 1.2 twice"
    assert refused(lambda o: o[0].append(ReceiveActivation(0, 2))) == "rank 0 is told receive a 0.2, which nobody needs"

    # 1F1B with each exchange right at its computation, and messages that block both sides: the classic deadlock
    def beside_its_computation(orders):
        orders[1].remove(ReceiveActivation(1, 1))
        orders[1].insert(orders[1].index(Forward(1, 1)), ReceiveActivation(1, 1))

    assert refused(beside_its_computation) == "deadlock: rank 0 in send a 0.1, rank 1 in send g 1.0"


@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_numbers_of_a_schedule_are_whole_and_positive(value):
    with pytest.raises(ValueError, match=f"micro_batches must be a whole number of at least 1, not {value}"):
        Schedule(gpipe, 2, value)
    with pytest.raises(ValueError, match="chunks must be"):
        Schedule(interleaved, 2, 2, value)


def test_interleaving_needs_whole_rounds():
    with pytest.raises(ScheduleError, match=r"rounds.*4.*6"):
        chart(Schedule(interleaved, 4, 6, 2))


def linears(*widths):
    return [nn.Linear(width, 1, bias=False) for width in widths]


def test_stages_by_layers_are_even():
    stages = cut_by_layers(linears(*range(1, 8)), 3)
    assert [[layer.in_features for layer in stage] for stage in stages] == [[1, 2, 3], [4, 5], [6, 7]]


def test_stages_by_parameters_spare_the_heavy_embedding():
    stages = cut_by_parameters(linears(50, 10, 10, 10, 10, 10), 2)
    assert [len(stage) for stage in stages] == [1, 5]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 5))
def test_no_cut_is_more_even_than_the_balanced_one(sizes, parts):
    if parts > len(sizes):
        return
    cuts = itertools.combinations(range(1, len(sizes)), parts - 1)
    best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cut, len(sizes)))) for cut in cuts)
    lengths = balance(sizes, parts)
    ends = [0, *itertools.accumulate(lengths)]
    assert len(lengths) == parts
    assert min(lengths) >= 1
    assert ends[-1] == len(sizes)
    assert max(sum(sizes[a:b]) for a, b in itertools.pairwise(ends)) == best


@pytest.mark.parametrize("cut", [cut_by_layers, cut_by_parameters])
def test_more_stages_than_layers_are_refused(cut):
    with pytest.raises(ValueError, match=r"3.*layers.*4"):
        cut(linears(1, 1, 1), 4)
    with pytest.raises(ValueError, match=r"least.*1.*0"):
        cut(linears(1), 0)


def test_formulas():
    assert formulas.bubble_of_total(4, 8) == 3 / 11
    assert formulas.bubble_of_ideal(4, 8) == 3 / 8
    assert formulas.bubble_of_ideal(8, 8, 2) == 7 / 16
    assert formulas.micro_batches_for(4, 3 / 11) == 8
    assert formulas.micro_batches_for(4, 0.1) == 27
    assert formulas.bubble_of_total(4, 27) <= 0.1 < formulas.bubble_of_total(4, 26)
    # two ranks with two chunks have three boundaries; each carries activations one way and gradients the other
    assert [formulas.boundary_bytes(r, 2, 4, 100, 2) for r in (0, 1)] == [(1200, 1200)] * 2
    assert [formulas.boundary_bytes(r, 3, 4, 100)[0] for r in range(3)] == [400, 800, 400]
    with pytest.raises(ValueError, match=r"micro_batches.*1.*0"):
        formulas.bubble_of_total(4, 0)
    with pytest.raises(ValueError, match="never vanishes"):
        formulas.micro_batches_for(2, 0)
    with pytest.raises(ValueError, match="schedule must be gpipe"):
        formulas.in_flight("2F2B", 0, 2, 2)
    for formula in (lambda: formulas.in_flight("gpipe", 4, 4, 2), lambda: formulas.boundary_bytes(4, 4, 2, 100)):
        with pytest.raises(ValueError, match=r"4.*4.*ranks.*0.*3"):
            formula()
