"""Right scripts in the forms that people write: none is accused, in fp64 or in its own precision, and none is deaf.

The gate has a few of them; the night all hundred, and each form with a fault in it.
"""

from pathlib import Path

import pytest
from conftest import few

from pardemo import prove

SCRIPT = Path(__file__).resolve().parent / "right_forms" / "train.py"
FORMS = (
    "plain", "padded", "padded-left", "closure", "lbfgs", "sharpness", "average", "teacher", "reference-model",
    "two-optimizers", "frozen", "checkpointed", "checkpointed-reentrant", "beside", "layers", "bare",
)  # fmt: skip
BY_HAND = ("layers", "bare")  # nobody can wrap what is no module, or called in parts
#: DTensors beside plain parameters, in one optimizer or average, are refused by torch itself.
SHARDED = ("plain", "padded", "closure", "teacher", "frozen", "checkpointed")
LAYOUTS = ["ranks=1 accumulate=1", "ranks=2 accumulate=2"]
OWN = ("double", "fp32", "autocast")
RIGHT = [
    *((form, "hand", precision) for form in FORMS for precision in OWN),
    *((form, "ddp", precision) for form in FORMS if form not in BY_HAND for precision in OWN),
    *((form, "fsdp2", precision) for form in SHARDED for precision in ("double", "fp32", "policy")),
    *((form, wrapper, "fp8") for form in SHARDED for wrapper in ("hand", "ddp", "fsdp2")),
]
IN_GATE = [
    ("padded", "ddp", "autocast"), ("closure", "ddp", "double"), ("average", "ddp", "autocast"),
    ("layers", "hand", "double"), ("bare", "hand", "fp32"), ("checkpointed", "fsdp2", "policy"),
    ("padded", "ddp", "fp8"),
]  # fmt: skip


def proof(form, wrapper, precision, fault=0, steps=2):
    own = "fp32" if precision == "double" else precision
    line = [str(SCRIPT), "--form", form, "--wrapper", wrapper, "--precision", own, "--fault", str(fault)]
    return prove.script([*line, "--accumulate", "{accumulate}"], LAYOUTS, double=precision == "double", steps=steps)


def test_there_are_a_hundred():
    assert len(set(RIGHT)) == len(RIGHT) > 100


@pytest.mark.parametrize(("form", "wrapper", "precision"), few(RIGHT, *map(RIGHT.index, IN_GATE)))
def test_a_right_script_is_not_accused(form, wrapper, precision):
    made = proof(form, wrapper, precision)
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
    made = proof(form, "hand", precision, fault=1, steps=1)
    assert made.findings, str(made)
    if form not in ("lbfgs", "sharpness"):  # which have stepped within the step, each rank by itself
        assert made.findings[0].what == "gradients", str(made)
