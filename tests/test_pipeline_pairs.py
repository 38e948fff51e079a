"""A forward and a backward that run together: in charts, PyTorch's timetables, and what is published of DualPipeV."""

import math
from itertools import pairwise

import cloudpickle
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline import assert_one_process, batch, bytes_of, layers
from torch.nn import functional as F

from pardemo.book.chapters.pipelines_without_bubbles.measurements import whole_at_the_end
from pardemo.formulas import pipeline as formulas
from pardemo.meters import Timeline
from pardemo.peers.pytorch import orders
from pardemo.pipeline_parallel import (
    Backward,
    Forward,
    Pipeline,
    Schedule,
    ScheduleError,
    chart,
    cut_by_layers,
    gpipe,
    most_held,
    one_f_one_b,
    prove,
    zb_v,
)

M = 8
TABLES = ["interleaved zero bubble", "DualPipeV"]


def dual_pipe_v(ranks, micro_batches, puts_off=True):
    if puts_off:
        return orders.schedule("DualPipeV", ranks, micro_batches)
    return Schedule(whole_at_the_end, ranks, micro_batches, 2)


def idle_of(schedule, forward, of_input, weights, pair, more=()):
    """Of each rank; times are a chunk's, and pairs run one after the other where ``pair`` is None."""
    together = orders.pairs("DualPipeV", schedule.ranks, schedule.micro_batches).union(more) if pair else ()
    times = {"forward": 2 * forward, "backward": 2 * (of_input + weights), "weights": 2 * weights}
    return chart(schedule, **times, together=together, pair=pair and 2 * pair).idle


# --- charts ----------------------------------------------------------------------------------------------------------


def test_a_pair_begins_when_both_can_and_hands_on_at_its_end():
    schedule = Schedule(one_f_one_b, 2, 3)  # rank 0: F0 F1 B0 F2 B1 B2, rank 1: F0 B0 F1 B1 F2 B2
    found = chart(schedule, 1, 2, together=[Forward(0, 2)], pair=2.5)
    spans = {(span.kind, span.name): (span.begin_s, span.end_s) for span in found.spans}
    assert spans["backward", "0.0"] == (4, 6)
    assert spans["backward", "1.1"] == (5, 7), "B1, which the pair waits for"
    assert spans["forward", "0.2"] == spans["backward", "0.1"] == (7, 9.5)
    assert spans["forward", "1.2"] == (9.5, 10.5), "handed on at the end of the pair"
    assert found.idle == [found.makespan - (2 + 2 + 2.5 + 2), found.makespan - 9]
    both = chart(schedule, 1, 2, together=[Forward(0, 2)])
    assert both.makespan == found.makespan + 0.5, "as long as the two of them when it is not said"


def test_what_cannot_be_a_pair_is_said():
    with pytest.raises(ScheduleError, match=r"0.*backward.*0\.0"):
        chart(Schedule(gpipe, 2, 2), together=[Forward(0, 0)])
    with pytest.raises(ScheduleError, match=r"deadlock.*1.*1.0.*1.0"):
        chart(Schedule(one_f_one_b, 2, 1), together=[Forward(1, 0)])  # its own backward


# --- PyTorch's timetables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 7), (4, 8), (6, 12)])
def test_a_pair_is_a_forward_and_the_whole_backward_behind_it_of_the_ranks_other_stage(p, m):
    schedule, pairs = orders.schedule("DualPipeV", p, m), orders.pairs("DualPipeV", p, m)
    for rank in range(p):
        steps = schedule.computes(rank)
        behind = {step: following for step, following in pairwise(steps) if step in pairs}
        assert len(behind) == 2 * m - 3 * p + rank + 1 - (rank == p - 1)
        for forward, backward in behind.items():
            assert isinstance(backward, Backward)
            assert {forward.stage, backward.stage} == set(schedule.stages_of(rank))
    assert not orders.pairs("ZB-V", p, m)
    assert not orders.pairs("interleaved zero bubble", p, 4 * p)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (4, 8), (8, 16)])
def test_zb_v_is_ours_computation_by_computation(p, m):
    theirs, ours = orders.schedule("ZB-V", p, m), Schedule(zb_v, p, m, 2)
    assert [theirs.computes(rank) for rank in range(p)] == [ours.computes(rank) for rank in range(p)]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_dual_pipe_v_holds_a_chunk_more_than_the_papers_count_for_zb_v(p):
    for m in (2 * p, 4 * p):
        schedule = dual_pipe_v(p, m)
        assert most_held(schedule) == most_held(schedule, 14 / 9) == [2 * p + 1] * p
    assert (max(most_held(Schedule(zb_v, p, m, 2), 14 / 9)) > 2 * p + 1) == (p > 2), "with PyTorch's autograd"


def test_a_timetable_is_for_its_sizes_and_goes_to_other_processes_whole():
    schedule = orders.schedule("DualPipeV", 2, 4)
    with pytest.raises(ScheduleError, match=r"DualPipeV.*2.*4.*2.*2.*5.*2"):
        prove(Schedule(schedule.order, 2, 5, 2))
    sent = cloudpickle.dumps(schedule)
    assert b"pipelining" not in sent, "nothing of torch's is loaded there"
    assert [cloudpickle.loads(sent).computes(rank) for rank in (0, 1)] == [schedule.computes(rank) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["interleaved zero bubble", "ZB-V", "DualPipeV"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_torchs_tables_are_proven_and_timed_by_the_same_code(name, ranks, micro_batches):
    schedule = orders.schedule(name, ranks, micro_batches)
    assert prove(schedule).in_flight == [2 * ranks + (name == "DualPipeV")] * ranks
    course = chart(schedule)
    assert course.makespan == pytest.approx(3 * micro_batches + (ranks - 1) / 2)  # half a forward for each rank
    if name == "ZB-V":
        assert course.makespan == chart(Schedule(zb_v, ranks, micro_batches, 2)).makespan


def test_what_torch_has_no_table_for():
    with pytest.raises(ValueError, match=r"'zb'.*interleaved.*ZB-V"):
        orders.schedule("zb", 2, 4)
    with pytest.raises(ScheduleError, match=r"DualPipeV.*3"):
        chart(orders.schedule("DualPipeV", 2, 3))
    with pytest.raises(ScheduleError, match=r"torch's.*ZB-V.*2.*3"):
        chart(orders.schedule("ZB-V", 2, 4, 3))


def by_either(engine, name):
    schedule, timeline = orders.schedule(name, dist.get_world_size(), M), Timeline()
    stages = cut_by_layers(layers(8), schedule.stages)
    mine = [stages[stage] for stage in schedule.stages_of(dist.get_rank())]
    if engine == "ours":
        pipeline = Pipeline(mine, schedule, F.mse_loss, timeline=timeline)
    else:
        from pardemo.peers.pytorch.pipelining import TorchPipeline

        called = {"interleaved zero bubble": "zb_h1", "DualPipeV": "dual_pipe_v"}[name]
        pipeline = TorchPipeline(mine, called, M, F.mse_loss, timeline=timeline)
    loss = pipeline.step(*batch())
    grads = {
        s: [p.grad for p in c.parameters()] for s, c in zip(schedule.stages_of(dist.get_rank()), mine, strict=True)
    }
    names = [span.name for span in timeline.spans if span.kind in ("forward", "backward", "weight gradients")]
    return [None if loss is None else loss.item()], grads, names


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("engine", ["ours", "torch"])
def test_losses_and_gradients_of_a_timetable_are_those_of_one_process(world_of, ranks, name, engine):
    results = world_of(ranks).run(by_either, engine, name)
    assert_one_process(results, 0 if name == "DualPipeV" else ranks - 1, layers(8))
    schedule = orders.schedule(name, ranks, M)
    for rank, (_, _, names) in enumerate(results):
        assert names == [f"{step.stage}.{step.micro_batch}" for step in schedule.computes(rank)], "in the table's order"


@pytest.mark.parametrize("name", [*TABLES, "ZB-V"])
def test_nothing_travels_at_the_turn_of_a_v(world_of, name):
    width, samples, p = 256, 8192, 4
    found = world_of(p).run(bytes_of, orders.schedule(name, p, M), width, samples)
    is_v = name != "interleaved zero bubble"
    for rank, measured in enumerate(found):
        expected = formulas.boundary_bytes(rank, p, M, 4 * width * samples // M, 2, v_shape=is_v)
        assert measured == pytest.approx(expected, rel=0.002, abs=200)
    unit = 4 * width * samples  # m·A
    assert sum(sent for sent, _ in found) == pytest.approx(2 * (2 * p - 1 - is_v) * unit, rel=0.002)


# --- DualPipeV's bubble ----------------------------------------------------------------------------------------------

TIMES = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12), st.floats(0, 1))
SIZES = st.tuples(st.integers(2, 8), st.integers(0, 5))


@given(SIZES, TIMES, st.booleans())
@settings(deadline=None, max_examples=400)
def test_the_last_rank_is_idle_as_the_formula_says(sizes, times, puts_off):
    p, more = sizes
    forward, of_input, weights, shares = times
    weights = min(weights, of_input) if puts_off else weights
    backward, schedule = of_input + weights, dual_pipe_v(p, 2 * p + more, puts_off)
    pair = max(forward, backward) + shares * min(forward, backward)
    found = idle_of(schedule, forward, of_input, weights, pair)
    assert found[-1] == pytest.approx(formulas.dual_pipe_v_idle(p, forward, backward, weights, pair, puts_off))
    # rank i has p − 2 − i pairs fewer than the last two, each of which would have saved as much
    saved = forward + backward - pair
    assert found == pytest.approx([found[-1] - saved * max(0, p - 2 - rank) for rank in range(p)], abs=1e-9)
    in_turn = formulas.dual_pipe_v_idle(p, forward, backward, weights, None, puts_off)
    assert idle_of(schedule, forward, of_input, weights, None) == pytest.approx([in_turn] * p)


@given(SIZES, TIMES)
@settings(deadline=None, max_examples=100)
def test_when_each_of_the_two_published_formulas_holds(sizes, times):
    p, more = sizes
    forward, of_input, weights, shares = times
    stage_times = {"weights_s": (w := min(weights, of_input)), "backward_s": (backward := of_input + w)}
    stage_times["pair_s"] = pair = max(forward, backward) + shares * min(forward, backward)
    schedule = dual_pipe_v(p, 2 * p + more)
    deepseek = formulas.deepseek_bubble(2 * p, **stage_times)
    mindspeed = formulas.mindspeed_bubble(p, forward, **stage_times)
    deepseeks_table = idle_of(schedule, forward, of_input, w, pair)[-1]
    mindspeeds_table = idle_of(dual_pipe_v(p, 2 * p + more, puts_off=False), forward, of_input, w, pair)[-1]
    assert math.isclose(deepseek, deepseeks_table, abs_tol=1e-9) == (of_input == forward)
    assert math.isclose(mindspeed, mindspeeds_table, abs_tol=1e-9) == ((p - 1) * (of_input - forward) >= forward)
    assert mindspeeds_table - deepseeks_table == pytest.approx(2 * (p - 1) * w)
    if of_input >= forward:  # the last term: the last rank's first pair, which is taken one after the other
        steps = schedule.computes(p - 1)
        first = next(place for place, step in enumerate(steps) if isinstance(step, Backward))
        assert idle_of(schedule, forward, of_input, w, pair, steps[first - 1 : first])[-1] == pytest.approx(deepseek)


def test_what_the_drawings_of_both_pages_show():
    """DeepSeek's and MindSpeed's pictures for 4 ranks and 10 micro-batches: 6 and 12 white fields on each rank."""
    assert idle_of(dual_pipe_v(4, 10), 1, 1, 1, 3) == [6] * 4
    assert idle_of(dual_pipe_v(4, 10, puts_off=False), 1, 1, 1, 3) == [12] * 4
    assert formulas.deepseek_bubble(8, 2, 1, 3) == 6
    assert formulas.mindspeed_bubble(4, 1, 2, 1, 3) == 11, "and not 12"
    # the same README's row for ZB1P, (PP − 1)(F + B − 2W) with B the whole backward, is ours for ZB-H1
    assert formulas.idle("zb_h1", 4, 8, 3, 7, 2) == 3 * (3 + 7 - 2 * 2)


def test_times_without_a_formula_are_refused():
    with pytest.raises(ValueError, match=r"longer.*schedule"):
        formulas.dual_pipe_v_idle(4, 1, 3, 2)
    with pytest.raises(ValueError, match=r"2.*3.*together.*1"):
        formulas.dual_pipe_v_idle(4, 1, 2, 1, 1)
    with pytest.raises(ValueError, match=r"2.*3.*together.*4"):
        formulas.dual_pipe_v_idle(4, 1, 2, 1, 4)
    assert formulas.dual_pipe_v_idle(4, 1, 3, 2, puts_off=False) == 3 * (3 + 3 - 2)
