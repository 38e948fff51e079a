"""Layouts and ranks' faults of ``pardemo soak``: a few cases, and that what is wrong with one is noticed."""

from itertools import count
from unittest import mock

import pytest

from pardemo import World
from pardemo.soak.layouts import training
from pardemo.soak.layouts.case import KINDS, draw
from pardemo.soak.layouts.comparison import Comparison
from pardemo.soak.layouts.run import REFUSALS, run_layout
from pardemo.soak.ranks.fault import Fault
from pardemo.soak.ranks.faults import FAULTS, draw_fault
from pardemo.soak.ranks.run import run_fault

FEW = ["bucketed", "zero3", "tp", "pp", "dp-tp", "zero-pp"]  # two of each sort; the soak itself runs them all


class Shared:
    """The Worlds that all tests share, as the soak asks for them."""

    def __init__(self, world_of):
        self._world_of = world_of

    def __getitem__(self, size):
        return self._world_of(size)


def first_of(kind):
    """The first case of a kind that no engine may refuse."""
    cases = (draw(kind, number, 1) for number in count())
    return next(case for case in cases if not any(applies(case) for applies in REFUSALS.values()))


@pytest.mark.parametrize("kind", FEW)
def test_a_layout_equals_one_process(world_of, kind):
    case = first_of(kind)
    outcome = run_layout(Shared(world_of), case)
    assert outcome.status == "passed", (outcome.told, str(case))


def spoiled(case, what):
    """As a rank runs a case, but for one thing that its engine leaves out."""
    pipeline = training.Pipeline
    spoilt = {
        "exchange": ("_wrap", lambda case, chunk, groups, tied: chunk),
        "tying": ("Pipeline", lambda *args, tied, **options: pipeline(*args, **options)),
        "weights": ("shard_weight", lambda samples, group: 1.0),
        "step": ("Zero1", type("Idle", (training.Zero1,), {"update": lambda *_: None})),
    }
    with mock.patch.object(training, *spoilt[what]):
        return training.train_and_compare(case)


@pytest.mark.parametrize(
    ("kind", "what", "has"),
    [
        ("bucketed", "exchange", lambda case: case.dtype == "bf16" and case.dp == 4),
        ("zero1", "step", lambda case: case.dtype == "bf16" and case.optimizer == "sgd"),
        ("naive", "weights", lambda case: len(set(case.samples)) > 1 and case.dp == 4),
        ("pp", "tying", lambda case: case.tied and case.pp == 2 and case.accumulation == 1 and "0" not in case.frozen),
    ],
)
def test_what_an_engine_leaves_out_is_noticed(world_of, kind, what, has):
    case = next(case for case in (draw(kind, number, 1) for number in count()) if has(case))
    assert training.verdict(world_of(case.ranks).run(spoiled, case, what)) is not None


def test_a_case_is_drawn_from_seed_kind_and_number_alone():
    drawn = [draw(kind, number, 1) for number in range(100) for kind in KINDS]
    assert drawn == [draw(kind, number, 1) for number in range(100) for kind in KINDS]
    assert draw("zero2", 5, 1) != draw("zero2", 5, 2)
    options = "tied", "never", "sometimes", "no_sync", "param_groups", "sequence_parallel", "recompute_stages"
    for name in (*options, "in_place", "buffers", "closure", "scaler", "clip_by_torch", "averaged"):
        assert {getattr(case, name) for case in drawn} == {False, True}, f"{name} is drawn"
    assert {case.engine for case in drawn} == {"", "naive", "bucketed", "zero1", "zero2", "zero3"}
    assert {case.schedule for case in drawn} == {"gpipe", "one_f_one_b", "interleaved"}


@pytest.fixture(scope="module")
def own():
    """A World that faults end; it is started again for each."""
    with World(2) as world:
        yield {2: world}


def of_two(kind, **has):
    drawn = (draw_fault(kind, number, 1) for number in count())
    return next(f for f in drawn if f.ranks == 2 and all(getattr(f, name) == value for name, value in has.items()))


@pytest.mark.parametrize(
    ("kind", "has", "status"),
    [
        ("raises", {"trainer": "bucketed"}, "refused"),
        ("tensor", {"how": "all-reduce, dtype"}, "refused"),
        ("hook", {"trainer": "bucketed"}, "refused"),
        ("server beside a ring", {"how": "reduce-scatter"}, "refused"),
        ("sleeps", {"trainer": "tp"}, "timed out"),
    ],
)
def test_a_fault_ends_in_an_error_that_names_it(own, kind, has, status):
    found = run_fault(own, of_two(kind, **has), limit_s=60 if status == "refused" else 2)
    assert found.status == status, found.told


@pytest.mark.parametrize(
    ("does", "told"),
    [(lambda case: 1, "no error, but a result: [1, 1]"), (lambda case: 1 / 0, "ZeroDivisionError")],
)
def test_a_fault_that_is_not_named_is_a_failure(own, monkeypatch, does, told):
    fault = Fault("raises", does, ("",), ("",), "the words that it should have", {}, False)
    monkeypatch.setitem(FAULTS, "raises", fault)
    found = run_fault(own, of_two("raises"), limit_s=60)
    assert found.status == "failed"
    assert told in found.told


def test_what_is_no_number_is_the_worst_whatever_comes_behind_it():
    comparison = Comparison(draw("zero1", 0, 1))
    comparison.losses([float("nan"), 1.0, 2.0], [1.0, 1.0, 1.0])
    assert comparison.worst == float("inf")
    assert comparison.what == "loss of step 0"
