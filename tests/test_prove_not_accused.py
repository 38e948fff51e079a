"""Ways to train that are right, and that ``prove`` accused once, could not follow, or might take for wrong ones."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import says

from pardemo import prove
from pardemo.script.compare import checks
from pardemo.script.compare.runs import ProveError
from pardemo.script.record.records import Step

SCRIPTS = Path(__file__).resolve().parent / "not_accused"
#: Of each script, the layouts that train alike.
RIGHT = {
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


def proof(name, layouts):
    keys = [word.partition("=")[0] for word in layouts[0].split()[1:]]
    line = [str(SCRIPTS / f"{name}.py"), *(word for key in keys for word in (f"--{key}", f"{{{key}}}"))]
    return prove.script(line, layouts, double=name not in ("pipeline_module", "clipped", "scaled"))


@pytest.mark.parametrize("name", RIGHT)
def test_what_trains_alike_is_not_accused(name):
    made = proof(name, RIGHT[name])
    assert made.equal, str(made)


def test_one_step_is_enough_where_ranks_gather_late():
    assert prove.script([str(SCRIPTS / "gradients_in_shards.py")], ["ranks=1", "ranks=2"], double=True, steps=1).equal


def test_each_script_is_proven():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*RIGHT, "experts"}


def test_a_reference_whose_ranks_hold_other_experts_is_refused():
    with pytest.raises(ProveError, match=r"expert\.\w+.*1"):
        proof("experts", ["ranks=2 way=one", "ranks=2 way=other"])


def test_gradients_that_only_clipping_makes_right_are_not_called_right():
    made = proof("clipped", ["ranks=1 accumulate=1 groups=1 divide=1", "ranks=1 accumulate=2 groups=2 divide=0"])
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
    made = proof("scaled", ["ranks=1 scale=65536 apart=no", layout])
    assert [(one.what, one.cause, one.step) for one in made.findings] == [("loss scale", "loss-scale", step)], str(made)
    assert re.search(says, made.findings[0].why), made.findings[0].why


def test_a_rank_that_skips_a_step_is_told_within_seconds():
    """It waits in the step that others have left behind: the line says so, long before the limit of ten minutes."""
    began = time.monotonic()
    made = proof("scaled", ["ranks=1 scale=65536 apart=no", "ranks=2 scale=65536 apart=inf"])
    assert time.monotonic() - began < 60
    (said,) = made.failed.values()
    assert says(said, "step", "3", "1")
    assert says(said, "1", "waited", "0")


def test_steps_that_some_ranks_skip():
    def run(*skipped):
        records = [SimpleNamespace(steps=[Step(scales=[8.0], skipped=one)]) for one in skipped]
        return SimpleNamespace(records=records, layout=SimpleNamespace(name="ranks=2"))

    assert says(checks.scale_findings(run(0), run(0, 1), 0)[0].why, "1", "others", "0")
    assert checks.scale_findings(run(1), run(1, 1), 0) == []


def test_steps_that_are_skipped_are_skipped_in_the_example():
    """3e38 is above what fp32 holds, once it is multiplied by a gradient: the proof above has something to skip."""
    line = [str(SCRIPTS / "scaled.py"), "--scale", "{scale}"]
    kept = prove.script(line, ["ranks=1 scale=65536", "ranks=1 scale=3e38"])
    assert "0 in the reference" in kept.findings[0].why
