"""Right scripts and right layouts: none is accused, and what looks like a fault of theirs is told as what it is."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import few, says
from zoo.right import run

from pardemo import prove
from pardemo.script.compare import checks
from pardemo.script.compare.results import LayoutResult, Proof
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.compare.runs import ProveError
from pardemo.script.compare.step_pair import StepPair
from pardemo.script.record.rank_record import Step

RIGHT = Path(__file__).resolve().parent / "zoo" / "right"


@pytest.fixture(autouse=True)
def scripts_of_the_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(RIGHT))
    monkeypatch.chdir(RIGHT.parents[2])


@pytest.mark.parametrize("number", few([19, 0, 1]))  # the first is of six engines, on few ranks
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
    "a rank whose shard is of frozen parameters alone has no gradient, and ended a step later than the others": (
        {"seed": 1, "kind": "rows", "inner": 256, "frozen": "layers.0.mlp,layers.1.mlp"},
        {"ranks": 4, "engine": "fsdp1", "way": "original"}),
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
        wanted = [RunLayout(1, {}, ()), *(RunLayout(one["ranks"], one, ()) for one in chosen)]
        return Proof([LayoutResult(layout) for layout in wanted])

    monkeypatch.setattr(run, "proven", proven)
    counts = run.Counts(31)
    run.run(31, 0, counts)
    assert counts.layouts == len(layouts) == run.PER_PROOF
    assert counts.proofs == 1
    assert counts.failed == ["python tests/zoo/right/run.py --seed 31 --only 0 --layout 2: no"]
    assert counts.engines[layouts[2]["engine"]]["failed"] == 1
    assert not counts.alarms


@pytest.mark.parametrize(("counts", "status"), [({}, 0), ({"failed": ["no"]}, 1), ({"alarms": ["wrong"]}, 1)])
def test_the_exit_status_says_whether_a_layout_failed_or_was_accused(monkeypatch, counts, status):
    made = run.Counts(31, layouts=60, **counts)
    monkeypatch.setattr(run, "counted", lambda *_: made)
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr("sys.argv", ["run.py"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == status


def test_the_count_that_is_kept_has_no_false_alarm():
    kept = run.Counts(**json.loads(run.WRITTEN.read_text(encoding="utf-8")))
    for what, of in (("layouts", kept.layouts), ("alarms", len(kept.alarms)), ("failed", len(kept.failed))):
        assert sum(engine[what] for engine in kept.engines.values()) == of
    assert kept.layouts
    assert not kept.alarms
    told = run.TOLD.findall(run.PAGE.read_text(encoding="utf-8"))
    assert told == [f"{kept.layouts:,}"], "tests/zoo/right/run.py --write says so"


# --- right scripts in the forms that people write: none is accused, in fp64 or in its own precision, and none is deaf


SCRIPT = Path(__file__).resolve().parent / "right_forms" / "train.py"
FORMS = (
    "plain", "padded", "padded-left", "closure", "lbfgs", "sharpness", "average", "teacher", "reference-model",
    "two-optimizers", "frozen", "checkpointed", "checkpointed-reentrant", "beside", "layers", "bare", "packed",
)  # fmt: skip
BY_HAND = ("layers", "bare")  # nobody can wrap what is no module, or called in parts
#: DTensors beside plain parameters, in one optimizer or average, are refused by torch itself.
SHARDED = ("plain", "padded", "closure", "teacher", "frozen", "checkpointed")
LAYOUTS = ["ranks=1 accumulate=1", "ranks=2 accumulate=2"]
OWN = ("double", "fp32", "autocast")
RIGHT_FORMS = [
    *((form, "hand", precision) for form in FORMS for precision in OWN),
    *((form, "ddp", precision) for form in FORMS if form not in BY_HAND for precision in OWN),
    *((form, "fsdp2", precision) for form in SHARDED for precision in ("double", "fp32", "policy")),
    *((form, wrapper, "fp8") for form in SHARDED for wrapper in ("hand", "ddp", "fsdp2")),
]
IN_GATE = [
    ("padded", "ddp", "autocast"), ("closure", "ddp", "double"), ("average", "ddp", "autocast"),
    ("layers", "hand", "double"), ("bare", "hand", "fp32"), ("checkpointed", "fsdp2", "policy"),
    ("padded", "ddp", "fp8"), ("packed", "ddp", "double"),
]  # fmt: skip


def proof_of_form(form, wrapper, precision, fault=0, steps=2):
    own = "fp32" if precision == "double" else precision
    line = [str(SCRIPT), "--form", form, "--wrapper", wrapper, "--precision", own, "--fault", str(fault)]
    return prove.script([*line, "--accumulate", "{accumulate}"], LAYOUTS, double=precision == "double", steps=steps)


def test_there_are_a_hundred():
    assert len(set(RIGHT_FORMS)) == len(RIGHT_FORMS) > 100


@pytest.mark.parametrize(("form", "wrapper", "precision"), few(RIGHT_FORMS, *map(RIGHT_FORMS.index, IN_GATE)))
def test_a_right_script_is_not_accused(form, wrapper, precision):
    made = proof_of_form(form, wrapper, precision)
    assert made.equal, str(made)
    # FSDP2 gathers what a step has made in the next forward pass, so that the last step is not seen
    assert made.steps >= (1 if wrapper == "fsdp2" else 2)
    assert made.parameters >= 3


@pytest.mark.parametrize(
    ("form", "precision"),
    few(
        [(form, precision) for form in FORMS for precision in ("double", "autocast", "fp8")],
        2,
        FORMS.index("bare") * 3 + 1,
    ),
)
def test_a_gradient_that_is_not_averaged_is_found_in_each_form(form, precision):
    made = proof_of_form(form, "hand", precision, fault=1, steps=1)
    assert made.findings, str(made)
    if form not in ("lbfgs", "sharpness"):  # which have stepped within the step, each rank by itself
        assert made.findings[0].what == "gradients", str(made)


# --- ways to train that are right, and that ``prove`` accused once, could not follow, or might take for wrong ones


SCRIPTS = Path(__file__).resolve().parent / "not_accused"
#: Of each script, the layouts that train alike.
NOT_ACCUSED = {
    "partial_sum_is_last": ["ranks=1 tp=1", "ranks=2 tp=2"],
    "renumbered_stage": ["ranks=1 pp=1", "ranks=2 pp=2"],
    "pipeline_module": ["ranks=1 pp=1", "ranks=2 pp=2"],
    "backward_by_the_engine": ["ranks=1 engine=0", "ranks=1 engine=1"],
    "gradients_in_shards": ["ranks=1", "ranks=2"],
    "tiles": ["ranks=1 tiles=1", "ranks=1 tiles=3"],
    "called_more_often": ["ranks=1 pp=1", "ranks=2 pp=2"],
    "scaled": ["ranks=1 scale=3e38 apart=no", "ranks=2 scale=3e38 apart=no"],
    "clipped": [
        "ranks=1 accumulate=1 groups=1 divide=1",
        "ranks=1 accumulate=1 groups=2 divide=1",
        "ranks=1 accumulate=2 groups=2 divide=1",
    ],
}


def proof_of(name, layouts):
    keys = [word.partition("=")[0] for word in layouts[0].split()[1:]]
    line = [str(SCRIPTS / f"{name}.py"), *(word for key in keys for word in (f"--{key}", f"{{{key}}}"))]
    return prove.script(line, layouts, double=name not in ("pipeline_module", "clipped", "scaled"))


@pytest.mark.parametrize("name", NOT_ACCUSED)
def test_what_trains_alike_is_not_accused(name):
    made = proof_of(name, NOT_ACCUSED[name])
    assert made.equal, str(made)


def test_one_step_is_enough_where_ranks_gather_late():
    assert prove.script([str(SCRIPTS / "gradients_in_shards.py")], ["ranks=1", "ranks=2"], double=True, steps=1).equal


def test_each_script_is_proven():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*NOT_ACCUSED, "experts"}


def test_a_reference_whose_ranks_hold_other_experts_is_refused():
    with pytest.raises(ProveError, match=r"expert\.\w+.*1"):
        proof_of("experts", ["ranks=2 way=one", "ranks=2 way=other"])


def test_gradients_that_only_clipping_makes_right_are_not_called_right():
    made = proof_of("clipped", ["ranks=1 accumulate=1 groups=1 divide=1", "ranks=1 accumulate=2 groups=2 divide=0"])
    assert [(one.what, one.cause) for one in made.findings] == [("gradients", "accumulation-not-divided")], str(made)
    assert made.findings[0].factor == pytest.approx(2)


@pytest.mark.parametrize(
    ("layout", "step", "says"),
    [
        ("ranks=2 scale=3e38 apart=no", 1, r"before it \d steps are skipped, and 0 in the reference: .* scale of \d"),
        ("ranks=2 scale=65536 apart=scale", 1, "ranks scale their losses by 32768 to 65536"),
    ],
)
def test_losses_that_are_scaled_otherwise(layout, step, says):
    made = proof_of("scaled", ["ranks=1 scale=65536 apart=no", layout])
    assert [(one.what, one.cause, one.step) for one in made.findings] == [("loss scale", "loss-scale", step)], str(made)
    assert re.search(says, made.findings[0].why), made.findings[0].why


def test_a_rank_that_skips_a_step_is_told_within_seconds():
    """It waits in the step that others have left behind: the line says so, long before the limit of ten minutes."""
    began = time.monotonic()
    made = proof_of("scaled", ["ranks=1 scale=65536 apart=no", "ranks=2 scale=65536 apart=inf"])
    assert time.monotonic() - began < 60
    (said,) = made.failed.values()
    assert says(said, "step", "3", "1")
    assert says(said, "1", "waited", "0")


def test_steps_that_some_ranks_skip():
    def run(*skipped):
        records = [SimpleNamespace(steps=[Step(scales=[8.0], skipped=one)]) for one in skipped]
        return SimpleNamespace(records=records, layout=SimpleNamespace(name="ranks=2"))

    def findings(reference, layout):
        return checks.scale_findings(StepPair(SimpleNamespace(run=reference), layout, 0))

    assert says(findings(run(0), run(0, 1))[0].why, "1", "others", "0")
    assert findings(run(1), run(1, 1)) == []


def test_steps_that_are_skipped_are_skipped_in_the_example():
    """3e38 is above what fp32 holds, once it is multiplied by a gradient: the proof above has something to skip."""
    line = [str(SCRIPTS / "scaled.py"), "--scale", "{scale}"]
    kept = prove.script(line, ["ranks=1 scale=65536", "ranks=1 scale=3e38"])
    assert "0 in the reference" in kept.findings[0].why
