"""Right layouts, drawn at random over engines and frameworks, are not accused; one that is made wrong is."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from conftest import few

from pardemo.script.compare.layouts import Layout
from pardemo.script.compare.runs import ProveError
from pardemo.script.report.verdict import Proof

RIGHT = Path(__file__).resolve().parent / "zoo" / "right"
SPEC = importlib.util.spec_from_file_location("right_run", RIGHT / "run.py")
run = sys.modules["right_run"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)


@pytest.fixture(autouse=True)
def scripts_of_the_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(RIGHT))
    monkeypatch.chdir(RIGHT.parents[2])


@pytest.mark.parametrize("number", few([0, 1]))
def test_random_right_layouts_are_not_accused(number):
    made = run.proven(*run.drawn(31, number))
    assert len(made.layouts) == 1 + run.PER_PROOF
    assert made.equal, str(made)
    assert not [note for note in made.notes if "could not be compared" in note]


#: A model of DeepSpeed's in fp32 with a warm-up, and its layout.
MODEL = {"seed": 3, "kind": "rows", "schedule": 1, "clip": 0.5}
LAYOUT = {"ranks": 2, "engine": "deepspeed1", "accumulate": 3}


def test_deepspeed_steps_the_scheduler_itself():
    made = run.proven(MODEL, [LAYOUT], False)
    assert made.equal, str(made)


#: Layouts that random draws have accused, or that failed, each with what was at fault.
ONCE = {
    "clipped by our own function, which nobody saw": (
        {"seed": 4, "clip": 0.05}, {"ranks": 2, "engine": "pipeline", "pp": 2, "accumulate": 2, "way": "late,1f1b"}),
    "a pipeline's loss counts the tokens of its own step": (
        {"seed": 9, "loss": "tokens"}, {"ranks": 2, "engine": "pipelining", "pp": 2, "accumulate": 2, "way": "1f1b"}),
    "a stage whose engine updates shards waits for one that has all its steps": (
        {"seed": 6, "kind": "rows"}, {"ranks": 2, "engine": "pipeline_zero", "pp": 2, "accumulate": 2,
                                      "way": "gpipe,zero1"}),
    "a frozen part is cut at DeepSpeed's stage 3": (
        {"seed": 7, "frozen": "layers.0.mlp"}, {"ranks": 2, "engine": "deepspeed3"}),
    "a tied weight has two names while it is cut": (
        {"seed": 8, "tied": 1, "heads": 2}, {"ranks": 2, "engine": "dtensor", "tp": 2,
                                                "way": "vocabulary"}),
}  # fmt: skip


@pytest.mark.parametrize("what", few(ONCE))
def test_what_was_accused_once_is_not_accused_again(what):
    model, layout = ONCE[what]
    made = run.proven(model, [layout], not layout["engine"].startswith(("deepspeed", "pipeline_zero")))
    assert made.equal, str(made)


def test_a_layout_with_another_limit_is_accused():
    made = run.proven(MODEL, [{**LAYOUT, "clip": 0.25}], False)
    assert not made.equal
    assert not made.failed


def test_a_layout_that_brings_prove_down_is_counted_and_the_others_of_its_proof_are(monkeypatch, capsys):
    _, layouts, _ = run.drawn(31, 0)

    def proven(model, chosen, double):
        if layouts[2] in chosen:
            raise ProveError("no")
        return Proof([Layout(1, {}, ()), *(Layout(one["ranks"], one, ()) for one in chosen)])

    monkeypatch.setattr(run, "proven", proven)
    counts = run.Counts(31)
    run.run(31, 0, counts)
    assert counts.layouts == len(layouts) == run.PER_PROOF
    assert counts.proofs == 1
    assert counts.failed == ["python tests/zoo/right/run.py --seed 31 --only 0 --layout 2: no"]
    assert counts.engines[layouts[2]["engine"]]["failed"] == 1
    assert not counts.alarms


def test_the_count_that_is_kept_has_no_false_alarm():
    kept = run.Counts(**json.loads(run.WRITTEN.read_text(encoding="utf-8")))
    for what, of in (("layouts", kept.layouts), ("alarms", len(kept.alarms)), ("failed", len(kept.failed))):
        assert sum(engine[what] for engine in kept.engines.values()) == of
    assert kept.layouts
    assert not kept.alarms
    told = run.TOLD.findall(run.PAGE.read_text(encoding="utf-8"))
    assert told == [f"{kept.layouts:,}"], "tests/zoo/right/run.py --write says so"
