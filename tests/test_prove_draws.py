"""Dropout's masks as ranks have drawn them: which are told, which are right, and which say nothing."""

from types import SimpleNamespace

import pytest

from pardemo.script.compare import checks
from pardemo.script.record.records import Mask, MicroBatch, Step


def mask(input, dropped, module="layers.0.drop", elements=64, repeated=False):
    return Mask(module, "train.py:7", input, dropped, elements, repeated)


def told(*ranks, samples=("a", "a", "a", "a")):
    """Causes of what these ranks have drawn, and ``samples`` which they had."""
    records = [
        SimpleNamespace(steps=[Step(micro_batches=[MicroBatch([had], [])], masks=list(masks))])
        for masks, had in zip(ranks, samples, strict=False)
    ]
    run = SimpleNamespace(records=records, layout=SimpleNamespace(name="ranks=2"))
    return [
        (finding.cause, finding.why.partition(" draw")[0], finding.module)
        for finding in checks.mask_findings(run, 0, None)
    ]


def test_right_masks_are_not_told():
    same = mask("x", "m")
    assert told([same], [same]) == [], "one input, one mask"
    assert told([mask("x", "m")], [mask("y", "n")]) == [], "two inputs, two masks"
    assert told([same, mask("x", "m", repeated=True)]) == [], "the forward pass, computed again"


def test_one_mask_for_different_inputs():
    assert told([mask("x", "m")], [mask("y", "m")], samples="ab") == [
        ("same-random-numbers", "ranks 0, 1", "layers.0.drop")
    ]


def test_different_masks_for_one_input():
    assert told([mask("x", "m")], [mask("x", "n")]) == [("different-random-numbers", "ranks 0, 1", "layers.0.drop")]


def test_replicas_may_have_one_input_by_chance():
    """A pipeline's first call may see memory that nobody has written; an embedding of positions is the same for all."""
    assert told([mask("zeros", "m")], [mask("zeros", "n")], samples="ab") == []


def test_ranks_are_told_in_their_groups():
    drawn = [[mask(place, dropped)] for place, dropped in (("x", "m"), ("x", "n"), ("y", "o"), ("y", "p"))]
    assert told(*drawn, samples="aabb") == [("different-random-numbers", "ranks 0, 1 and ranks 2, 3", "layers.0.drop")]


@pytest.mark.parametrize(
    "other", [mask("x", "n", elements=31), mask("x", "n", elements=65), mask("x", "n", module="layers.1.drop")]
)
def test_what_cannot_be_held_against_one_another_is_not_judged(other):
    assert told([mask("x", "m", elements=min(64, other.elements))], [other]) == []


def test_a_mask_that_recomputation_draws_anew():
    masks = [mask("x", "m"), mask("x", "n", repeated=True)]
    assert [cause for cause, *_ in told(masks)] == ["recomputed-differently"]
