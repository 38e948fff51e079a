"""Schedules proven without a process, their charts against the papers' formulas, and what the proof refuses."""

import itertools

import pytest
from conftest import says
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
    gpipe,
    instructions,
    interleaved,
    measured_chart,
    most_held,
    one_f_one_b,
    prove,
    zb_h1,
    zb_v,
)
from pardemo.pipeline_parallel.instructions import ReceiveActivation, ReceiveGradient, SendActivation, SendGradient
from pardemo.pipeline_parallel.stages import balance

SIZES = st.tuples(st.sampled_from([gpipe, one_f_one_b]), st.integers(1, 8), st.integers(1, 12)).map(
    lambda sizes: Schedule(*sizes)
)
ROUNDS = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4)).map(
    lambda sizes: Schedule(interleaved, sizes[0], sizes[0] * sizes[1], sizes[2])
)
SPLIT = st.tuples(st.sampled_from([(zb_h1, 1), (zb_v, 2)]), st.integers(1, 7), st.integers(1, 16)).map(
    lambda of: Schedule(of[0][0], of[1], of[2], of[0][1])
)
WHOLE, EVERY = st.one_of(SIZES, ROUNDS), st.one_of(SIZES, ROUNDS, SPLIT)


@given(EVERY)
@settings(deadline=None)
def test_every_schedule_is_proven(schedule):
    prove(schedule)


def receive_of(send):
    """What the other rank is told where this one is told to send; None of a computation and of a receive."""
    if isinstance(send, SendActivation):
        return ReceiveActivation(send.stage + 1, send.micro_batch)
    return ReceiveGradient(send.stage - 1, send.micro_batch) if isinstance(send, SendGradient) else None


@given(EVERY)
@settings(deadline=None)
def test_each_result_is_sent_to_where_it_is_needed_and_nobody_waits_where_messages_block(schedule):
    """A rank passes a message only together with the other one; results come behind what makes them, and before what
    needs them."""
    orders = [list(order) for order in instructions(schedule)]
    sent = {receive for order in orders for step in order if (receive := receive_of(step))}
    for rank, order in enumerate(orders):
        place = {step: at for at, step in enumerate(order)}
        assert len(place) == len(order), "each once"
        for step in schedule.computes(rank):
            if schedule.travels(step):
                receive = ReceiveActivation if isinstance(step, Forward) else ReceiveGradient
                needed = receive(step.stage, step.micro_batch)
                assert place[needed] < place[step]
                assert needed in sent
        assert {step for step in order if "receive" in str(step)} <= sent
    moved = True
    while moved:
        moved = False
        for order in orders:
            while order and not any(word in str(order[0]) for word in ("send", "receive")):
                order.pop(0)
                moved = True
            receive = receive_of(order[0]) if order else None
            if receive and orders[schedule.rank_of(receive.stage)][:1] == [receive]:
                order.pop(0)
                orders[schedule.rank_of(receive.stage)].pop(0)
                moved = True
    assert not any(orders)


@given(EVERY)
@settings(deadline=None)
def test_micro_batches_in_flight_are_what_the_formula_says(schedule):
    name, sizes = schedule.order.__name__, (schedule.ranks, schedule.micro_batches, schedule.chunks)
    expected = [formulas.in_flight(name, rank, *sizes) for rank in range(schedule.ranks)]
    assert chart(schedule).in_flight == expected == most_held(schedule)


@given(WHOLE, st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None)
def test_the_bubble_is_that_of_the_papers(schedule, forward, backward):
    sizes = schedule.ranks, schedule.micro_batches, schedule.chunks
    found = chart(schedule, forward, backward)
    assert found.bubble_of_total == pytest.approx(formulas.bubble_of_total(*sizes), abs=1e-9)
    assert found.bubble_of_ideal == pytest.approx(formulas.bubble_of_ideal(*sizes), abs=1e-9)
    expected = formulas.makespan(*sizes[:2], forward, backward, schedule.chunks)
    assert found.makespan == pytest.approx(expected)


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


def of_h1(change):
    def order(rank, ranks, micro_batches):
        return iter(change(list(zb_h1(rank, ranks, micro_batches))))

    return order


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (backward_too_early, ("rank 0", "B 0.0 before F 0.0")),
        (wrong_way_round, ("deadlock: rank 0 in B 0.0 for B 1.0, rank 1 in F 1.2 for F 0.2",)),
        (forgets, ("rank 0", "never told B 0.2")),
        (repeats, ("rank 0", "F 0.0 twice")),
        (others, ("rank 1", "F 0.0", "[1]")),
        (too_many, ("rank 0", "F 0.3", "0 to 2")),
        (of_h1(lambda steps: steps[:-1]), ("rank 0", "never told W 0.2")),
        (of_h1(lambda steps: [*steps, steps[-1]]), ("rank 0", "W 0.2 twice")),
        (of_h1(lambda steps: [steps[-1], *steps[:-1]]), ("rank 0", "W 0.2 before I 0.2")),
        (of_h1(lambda steps: [*steps, Backward(0, 1)]), ("rank 0", "B 0.1 and I 0.1")),
        (of_h1(lambda steps: [steps[2], *steps[:2], *steps[3:]]), ("rank 0", "I 0.0 before F 0.0")),
    ],
)
def test_a_wrong_order_is_named(order, words):
    with pytest.raises(ScheduleError) as error:
        prove(Schedule(order, 2, 3))
    assert says(str(error.value), *words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_numbers_of_a_schedule_are_whole_and_positive(value):
    with pytest.raises(ValueError, match=f"micro_batches must be a whole number of at least 1, not {value}"):
        Schedule(gpipe, 2, value)
    with pytest.raises(ValueError, match="chunks must be"):
        Schedule(interleaved, 2, 2, value)


def test_interleaving_needs_whole_rounds():
    with pytest.raises(ScheduleError, match=r"rounds.*4.*6"):
        chart(Schedule(interleaved, 4, 6, 2))


@given(st.integers(1, 7), st.integers(0, 9), *[st.integers(1, 6)] * 3)
@settings(deadline=None)
def test_h1s_bubble_is_that_of_the_paper(p, more, forward, of_input, of_weights):
    m = p + more
    found = chart(Schedule(zb_h1, p, m), forward, of_input + of_weights, weights=of_weights)
    idle = formulas.idle("zb_h1", p, m, forward, of_input + of_weights, of_weights)
    assert found.makespan == pytest.approx(m * (forward + of_input + of_weights) + idle)
    if of_weights <= min(forward, of_input):
        assert idle == (p - 1) * (forward + of_input - of_weights)
    if forward == of_input == of_weights:
        assert 3 * idle == formulas.idle("one_f_one_b", p, m, forward, 2 * forward)


def longest_rank(found):
    """From a rank's first begin to its last end, the longest: what the zero-bubble papers call a schedule's cost.

    Ranks that begin later and end later fill each other's gaps from one batch to the next, where nothing, such as a
    norm over all gradients, makes them wait for each other in between.
    """
    own = [[s for s in found.spans if s.rank == rank] for rank in {s.rank for s in found.spans}]
    return max(max(s.end_s for s in spans) - min(s.begin_s for s in spans) for spans in own)


@given(st.integers(1, 7), st.integers(0, 9), st.integers(1, 6))
@settings(deadline=None)
def test_in_a_v_no_rank_is_idle_between_its_first_and_last_computation(p, more, unit):
    m = 2 * p - 1 + more
    found = chart(Schedule(zb_v, p, m, 2), unit, 2 * unit)
    assert longest_rank(found) == pytest.approx(3 * unit * m)
    assert found.makespan == pytest.approx(3 * unit * m + formulas.idle("zb_v", p, m, unit, 2 * unit))


def test_both_beside_1f1b_at_four_ranks():
    """The papers' comparison with F = B = W: a third of the bubble, and a sixth."""
    charts = [chart(Schedule(order, 4, 8, v)) for order, v in [(one_f_one_b, 1), (zb_h1, 1), (zb_v, 2)]]
    assert [found.makespan - 24 for found in charts] == [9, 3, 1.5]
    assert [longest_rank(found) - 24 for found in charts] == [9, 3, 0]
    assert [found.in_flight for found in charts] == [[4, 3, 2, 1], [4] * 4, [8] * 4]
    # where half of an activation is let go of by the first part, H1's later ranks hold less
    assert most_held(Schedule(zb_h1, 4, 8), 0.5) == [4, 3.5, 3, 2.5]


def test_a_v_goes_down_the_ranks_and_up_again():
    schedule = Schedule(zb_v, 3, 2, 2)
    assert [schedule.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_other_numbers_of_chunks_and_times_are_refused():
    with pytest.raises(ScheduleError, match=r"ZB-V.*2.*chunks.*3"):
        chart(Schedule(zb_v, 2, 4, 3))
    with pytest.raises(ValueError, match=r"backward.*0.*2.*3"):
        chart(Schedule(zb_h1, 2, 4), 1, 2, weights=3)


def linears(*widths):
    return [nn.Linear(width, 1, bias=False) for width in widths]


def test_stages_by_layers_are_even():
    stages = cut_by_layers(linears(*range(1, 8)), 3)
    assert [[layer.in_features for layer in stage] for stage in stages] == [[1, 2, 3], [4, 5], [6, 7]]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"3 layers.*4"):
        cut_by_layers(linears(1, 1, 1), 4)
    with pytest.raises(ValueError, match=r"1 layers.*0"):
        cut_by_layers(linears(1), 0)


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
    assert [formulas.idle(name, 4, 8, 1, 2) for name in ("gpipe", "one_f_one_b", "zb_h1", "zb_v")] == [9, 9, 3, 1.5]
    assert formulas.idle("zb_h1", 4, 8, 2, 5, 1) == 3 * (2 + 4 - 1)
    ends = [formulas.boundary_bytes(rank, 4, 8, 10, 2, v_shape=True)[0] for rank in range(4)]
    assert ends == [160, 320, 320, 160]
    for wrong, message in (
        (lambda: formulas.idle("zb_h1", 4, 3, 1, 2), "zb_h1 is full from 4 micro-batches on, not with 3"),
        (lambda: formulas.idle("zb_v", 4, 6, 1, 2), "zb_v is full from 7 micro-batches on, not with 6"),
        (lambda: formulas.idle("zb_v", 4, 8, 1, 3), "zb_v is made for F = B = W"),
        (lambda: formulas.idle("zb_h2", 4, 8, 1, 2), "schedule must be gpipe, one_f_one_b, zb_h1 or zb_v, not 'zb_h2'"),
        (lambda: formulas.boundary_bytes(0, 4, 8, 10, 3, v_shape=True), "a V has 2 chunks on each rank, not 3"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


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
