"""The time model beside steps on emulated clusters, and what it says of other links, hosts and latencies."""

from dataclasses import replace

import pytest
from conftest import few

from pardemo.cluster import Cluster, tiers
from pardemo.pipeline_parallel import one_f_one_b
from pardemo.pipeline_parallel.instructions import Forward
from pardemo.planner import emulated_steps, validate
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.per_rank import owned_layer
from pardemo.planner.layouts.step import predict_step, waited_messages

CASES = {case.label: case for case in emulated_steps.CASES}
ACTIVATION = 2 * emulated_steps.SEQUENCE * emulated_steps.SHAPE.hidden  # bytes
WEIGHTS = 2 * owned_layer(emulated_steps.SHAPE, Layout()).total  # of a layer


def on(case, between, **more):
    return replace(case, cluster=replace(case.cluster, between=between, **more))


def computed(case):
    return emulated_steps.SHAPE.layers * 3 * case.forward_s


@pytest.mark.skipif(tiers.best_tier().name == "none", reason="nothing limits links here")
@pytest.mark.parametrize("name", few(["TP 2, 10 ms away", "DP 2, 8 buckets", "PP 2 × DP 2 inside"]))
def test_a_measured_step_is_near(name):
    case = CASES[name]
    ((_, predicted, known),) = emulated_steps.compare_steps([case])
    assert 0.7 < predicted / known < 1.5, "other work on this machine may have held it up"


def test_the_cases_are_twelve_layouts_with_every_kind_of_parallelism():
    assert len(CASES) == 12
    layouts = [case.layout for case in emulated_steps.CASES]
    assert {layout.sharding for layout in layouts} == {"none", "zero1", "zero3"}
    for axis in ("tp", "dp", "pp"):
        assert {getattr(layout, axis) for layout in layouts} == {1, 2, 4}
    assert all(case.layout.gpus == case.cluster.size for case in emulated_steps.CASES)
    assert sum(case.predicted_s for case in emulated_steps.CASES) * (emulated_steps.STEPS + 1) < 40


def test_only_waits_and_links_take_time():
    for case in emulated_steps.CASES:
        parts = predict_step(case.job, case.layout).parts
        real = {name for name, seconds in parts.items() if seconds > 1e-6}
        assert real <= {
            "layers as measured", "tensor-parallel traffic", "pipeline messages", "pipeline bubble",
            "data-parallel traffic",
        }  # fmt: skip


def test_half_the_bandwidth_takes_the_formulas_bytes_longer():
    sent = {
        "TP 2": 16 * ACTIVATION,  # 4 all-reduces in each of 4 layers, 2(n − 1)/n of the bytes each
        "TP 4": 16 * ACTIVATION * 3 / 2,
        "DP 4": 4 * WEIGHTS * 3 / 2,
        "PP 2, 4 micro-batches": 5 * ACTIVATION,
        "PP 4, 8 micro-batches": 19 * ACTIVATION,
        "ZeRO-1, DP 4": 4 * WEIGHTS * 3 / 2,
        "TP 2 inside × DP 2": 4 * WEIGHTS,  # a half on each rank, and two of them share the adapter
        "PP 2 × DP 2 inside": 5 * 2 * ACTIVATION,
    }
    for name, nbytes in sent.items():
        fast, slow = on(CASES[name], "200 Mbit/s"), on(CASES[name], "100 Mbit/s")
        assert slow.predicted_s - fast.predicted_s == pytest.approx(nbytes / 12.5e6 / 2, rel=0.01), name


def test_what_computation_hides_takes_no_time():
    for name in ("DP 2, 8 buckets", "ZeRO-3, DP 4"):
        case = on(CASES[name], "1 Gbit/s")
        assert case.predicted_s < 1.15 * computed(case), name
    zero3 = CASES["ZeRO-3, DP 4"]
    ends = 3 * WEIGHTS * 3 / 4 / zero3.cluster.between_rate  # two gathers and a scatter have nothing beside them
    assert zero3.predicted_s == pytest.approx(computed(zero3) + ends, rel=0.01)


def test_a_latency_counts_for_each_exchange():
    far = CASES["TP 2, 10 ms away"]
    near = on(far, far.cluster.between, latency=None)
    assert far.predicted_s - near.predicted_s == pytest.approx(16 * 3 * 0.010)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 4), (2, 9), (3, 1), (3, 6), (4, 2), (4, 8), (8, 32)])
def test_messages_of_a_pipeline_are_those_that_its_order_waits_for(ranks, micro_batches):
    forward, backward, message = 1.0, 2.0, 0.1
    seconds = followed(ranks, micro_batches, forward, backward, message)
    waited = (seconds - (micro_batches + ranks - 1) * (forward + backward)) / message
    assert waited_messages(Layout(pp=ranks, accumulation=micro_batches)) == round(waited)


def followed(ranks, micro_batches, forward, backward, message):
    """A step's seconds if every message travels when it is needed: the order of the schedule, rank by rank."""
    left = [list(one_f_one_b(rank, ranks, micro_batches)) for rank in range(ranks)]
    done, clock = {}, [0.0] * ranks
    while any(left):
        for rank, own in enumerate(left):
            while own:
                goes = isinstance(own[0], Forward)
                before = rank - 1 if goes else rank + 1
                if 0 <= before < ranks:
                    source = goes, own[0].micro_batch, before
                    if source not in done:
                        break
                    clock[rank] = max(clock[rank], done[source]) + message
                clock[rank] += forward if goes else backward
                done[goes, own.pop(0).micro_batch, rank] = clock[rank]
    return max(clock)


def test_the_table_has_a_row_for_each(monkeypatch):
    monkeypatch.setattr(emulated_steps, "measure_step", lambda case: 1.05 * case.predicted_s)
    rows = validate.emulated()
    if tiers.best_tier().name == "none":
        assert rows == []
        return
    assert [row.within for row in rows] == [0.1] * 12
    assert all(row.met for row in rows)
    assert rows[0].what == "TP 2, 2 nodes of 1, 100 Mbit/s between"


def test_nothing_is_said_where_links_have_no_limit(monkeypatch):
    monkeypatch.setattr(tiers, "best_tier", lambda: tiers.Tier("none", "", "not here"))
    assert validate.emulated() == []


def test_a_case_needs_links_with_a_rate():
    with pytest.raises(ValueError, match="bandwidth"):
        emulated_steps.Case("no rate", Cluster(hosts=2), Layout(tp=2))
