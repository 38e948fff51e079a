"""Each cause by itself, on tensors made here: the wrong gradient that it is for, and near ones that it leaves alone."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pardemo.script.compare import across_layouts, checks, findings, gradient_causes
from pardemo.script.compare.differences import ComparedOutput, Finding, StepComparison, UnexplainedGradients
from pardemo.script.compare.findings import clipping_sentence
from pardemo.script.compare.pairs import compare_pair
from pardemo.script.compare.parameter_map import Part, map_parameters
from pardemo.script.compare.results import LayoutResult
from pardemo.script.compare.run_layouts import RunLayout, distinct_digits
from pardemo.script.compare.step_pair import StepPair
from pardemo.script.record.rank_record import LossCall, Mask, MicroBatch, ParameterShard, Step

TOLERANCE = 1e-9


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(reference, ours, name="layers.0.weight", versions=None):
    """A parameter's gradient beside the reference's; ``versions``: by rank, of ranks that hold it whole."""
    apart = [(Part(name, (None,) * reference.dim()), versions)] if versions else []
    floor = float(reference.norm()) / reference.numel() ** 0.5
    covered = torch.ones(reference.shape, dtype=torch.bool)
    return compare_pair(name, reference, ours, covered, floor, TOLERANCE, apart)


def comparison(*pairs, ranks=4, step=0, **more):
    values = {"ranks": ranks, **{key: more.pop(key) for key in list(more) if key in ("tp", "pp", "cp", "accumulate")}}
    made = StepComparison(RunLayout(ranks, values), step, TOLERANCE, order={"layers.0": 0, "head": 1}, **more)
    made.gradients = {one.name: one for one in pairs}
    return made


def says(cause, *pairs, ours=(), truth=None, **more):
    steps = {"steps": list(ours) or [Step(losses=[1.0])], "reference_step": truth or Step(losses=[1.0])}
    return cause.explains(pairs, comparison(*pairs, **steps, **more))


G = drawn(6, 4)


def kept_apart(parts):
    """Each rank keeps its own part."""
    return dict(enumerate(parts))


# --- ranks that hold the same and have different gradients


def test_not_summed_by_sum_and_by_mean():
    parts = [drawn(6, 4, seed=seed) for seed in range(1, 5)]
    versions = kept_apart(parts)
    for reference, what in ((sum(parts), "the sum of their"), (sum(parts) / 4, "the mean of their")):
        assert what in says(gradient_causes.not_summed, of(reference, parts[0], versions=versions))
    assert says(gradient_causes.not_summed, of(drawn(6, 4, seed=9), parts[0], versions=versions)) is None
    assert says(gradient_causes.not_summed, of(sum(parts), parts[0])) is None, "all ranks have the same"


def test_summed_over_too_few_ranks():
    first, second = drawn(6, 4, seed=1), drawn(6, 4, seed=2)
    versions = {0: first, 1: first, 2: second, 3: second}
    assert "summed over too few ranks" in says(gradient_causes.not_summed, of(first + second, first, versions=versions))


def test_parameters_that_are_wrong_in_different_ways_are_not_explained_together():
    parts = [drawn(6, 4, seed=seed) for seed in (1, 2)]
    summed = of(sum(parts), parts[0], versions=kept_apart(parts))
    averaged = of(sum(parts) / 2, parts[0], "head.weight", kept_apart(parts))
    assert says(gradient_causes.not_summed, summed, averaged) is None


def test_part_of_tied():
    parts = [drawn(6, 4, seed=seed) for seed in (1, 2)]
    wrong = of(sum(parts), parts[0], "embed.weight", kept_apart(parts))
    tied = {"embed.weight": ("head.weight",)}
    names = {0: {"embed.weight": {"embed.weight"}}, 1: {"embed.weight": {"head.weight"}}}
    assert "head.weight, too" in says(gradient_causes.part_of_tied, wrong, tied=tied, names=names)
    assert says(gradient_causes.part_of_tied, wrong, names=names) is None, "tied to nothing"
    alike = {rank: {"embed.weight": {"embed.weight", "head.weight"}} for rank in (0, 1)}
    assert says(gradient_causes.part_of_tied, wrong, tied=tied, names=alike) is None, "both ranks have both uses"


def test_clipped_apart():
    parts = [drawn(6, 4, seed=seed) for seed in (1, 2)]
    wrong = of(drawn(6, 4, seed=3), parts[0], versions=kept_apart(parts))
    clipped = [Step(clips=[norm]) for norm in (2.0, 5.0)]
    together = {wrong.name}
    assert "norms from 2 to 5" in says(gradient_causes.clipped_apart, wrong, ours=clipped, together=together)
    assert says(gradient_causes.clipped_apart, wrong, together=together) is None, "nothing is clipped"
    assert says(gradient_causes.clipped_apart, wrong, ours=clipped) is None, "ranks do not come together afterwards"


# --- a parameter by itself


def test_no_gradient():
    assert "zero on every rank" in says(gradient_causes.no_gradient, of(G, torch.zeros_like(G)))
    assert says(gradient_causes.no_gradient, of(G, torch.zeros_like(G).index_put_((torch.tensor(0),), G[0]))) is None
    assert says(gradient_causes.no_gradient, of(torch.zeros_like(G), torch.zeros_like(G))) is None, (
        "it has none there either"
    )


def test_rows_missing():
    ours = G.clone()
    ours[2:4] = 0
    assert "2 rows of layers.0.weight, 2 to 3" in says(gradient_causes.rows_missing, of(G, ours))
    ours[0] *= 2
    assert says(gradient_causes.rows_missing, of(G, ours)) is None, "another row is wrong, too"
    assert says(gradient_causes.rows_missing, of(G[0], torch.zeros(4))) is None, "a bias has no rows"


def test_stale():
    before, name = drawn(6, 4, seed=5), "layers.0.weight"
    earlier = {"step": 1, "earlier": [{name: before}]}
    assert "those of step 1" in says(gradient_causes.stale, of(G, before), **earlier)
    assert "1 times those of step 2 and 1 times those of step 1" in says(
        gradient_causes.stale, of(G, G + before), **earlier
    )
    assert says(gradient_causes.stale, of(G, 2 * G), **earlier) is None
    assert says(gradient_causes.stale, of(G, G - 0.1 * before), **earlier) is None, (
        "nothing is left of it: it was taken away"
    )
    assert says(gradient_causes.stale, of(G, G + drawn(6, 4, seed=6)), **earlier) is None
    assert says(gradient_causes.stale, of(G, before)) is None, "there is no earlier step"


@pytest.mark.parametrize(
    ("type_", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")]
)
def test_precision(type_, name):
    assert f"rounded to {name}" in says(gradient_causes.precision, of(G, G.to(type_).double()))
    assert f"rounded to {name}" in says(gradient_causes.precision, of(G, (3 * G).to(type_).double() / 3), ranks=3)


def summed_over(parts, again):
    """Gradients of micro-batches accumulated as ``again`` says, and the sum of what was there before the last."""
    after = [parts[0]]
    for part in parts[1:]:
        after.append(again(after[-1], part))
    return after[-1], sum(after[:-1])


@pytest.mark.parametrize(
    ("layout", "again", "told"),
    [
        (
            {"ranks": 3},
            lambda before, part: 3 * before + part,
            "over ranks once more: × 3 = the number of ranks",
        ),
        ({"ranks": 4, "tp": 2}, lambda before, part: 2 * before + part, "× 2 = the tensor-parallel size"),
        ({"ranks": 1, "accumulate": 4}, lambda before, part: (before + 4 * part) / 4, "is divided once more: ÷ 4"),
    ],
)
def test_what_was_accumulated_is_summed_or_divided_again(layout, again, told):
    wrong, names = [], ("layers.0.weight", "head.weight")
    accumulated = {}
    for number, name in enumerate(names):
        parts = [drawn(6, 4, seed=30 + 10 * number + one) for one in range(4)]
        ours, accumulated[name] = summed_over(parts, again)
        wrong.append(of(sum(parts), ours, name))
    cause = gradient_causes.summed_again
    assert told in says(cause, *wrong, accumulated=accumulated, **layout)
    assert says(cause, *wrong, **layout) is None, "nothing was accumulated"
    assert says(cause, *wrong, accumulated=accumulated, ranks=7) is None, "no number of the layout"
    other = [one if one.name == names[0] else of(one.reference, one.reference + G, one.name) for one in wrong]
    assert says(cause, *other, accumulated=accumulated, **layout) is None, "not all of them"


def test_a_small_term_is_no_rounding():
    assert says(gradient_causes.precision, of(G, G * (1 + 1e-3 * drawn(6, 4, seed=7)))) is None
    assert says(gradient_causes.precision, of(G, (2 * G).bfloat16().double())) is None, "twice the gradient"


# --- all gradients together


def test_clipped_by_another_norm():
    clipped = G / G.norm()  # the reference's norm is the limit in each step
    own_norm = gradient_causes.own_norm
    assert "by another norm" in says(own_norm, of(clipped, 0.7 * clipped), norms=[1.0, 1.0])
    assert says(own_norm, of(G, 0.7 * G), norms=[float(G.norm()), 3.0]) is None, "nothing says that it is clipped"
    assert says(own_norm, of(clipped, 0.25 * clipped), norms=[1.0, 1.0]) is None, "a quarter on four ranks"
    three = [Step(clips=[3.0, 2.0, 1.5])]
    assert "3 times in a step" in says(own_norm, of(G, drawn(6, 4, seed=8)), ours=three)
    parts = [Step(clips=[3.0] * 3)]
    assert says(own_norm, of(G, drawn(6, 4, seed=8)), ours=parts) is None, "each part once, by the norm of all"


def test_clipped_to_a_limit_that_people_write():
    """One step is enough, where the reference's norm is a limit: nobody's gradient has it by chance."""
    limited, own_norm = 0.5 * G / G.norm(), gradient_causes.own_norm
    assert "norm is 0.35 where the reference's is 0.5:" in says(own_norm, of(limited, 0.7 * limited), norms=[0.5])
    close = says(own_norm, of(limited, 1.0000123 * limited), norms=[0.5])
    assert "1.00001 times" in close
    assert "0.50001 where the reference's is 0.5:" in close
    assert says(own_norm, of(G, 0.7 * G), norms=[float(G.norm())]) is None


def test_parts_that_are_reduced_as_copies():
    halves = G.chunk(2)
    mixed = torch.cat([sum(halves) / 2] * 2)
    told = says(gradient_causes.parts_mixed, of(G, mixed), cut={"layers.0.weight"}, ranks=2)
    assert "in 2 parts on different ranks" in told
    assert says(gradient_causes.parts_mixed, of(G, 2 * mixed), cut={"layers.0.weight"}, ranks=4)
    columns = torch.cat([sum(G.chunk(2, 1))] * 2, 1)
    assert says(gradient_causes.parts_mixed, of(G, columns), cut={"layers.0.weight"}, ranks=2)
    assert says(gradient_causes.parts_mixed, of(G, mixed), ranks=2) is None, "nobody has cut it"
    assert says(gradient_causes.parts_mixed, of(G, 3 * mixed), cut={"layers.0.weight"}, ranks=2) is None
    assert says(gradient_causes.parts_mixed, of(G, G.roll(3, 0)), cut={"layers.0.weight"}, ranks=2) is None


def test_numbers_that_differ_look_different():
    assert distinct_digits(0.5, 0.500012) == ["0.5", "0.50001"]
    assert distinct_digits(2.0, 1.0) == ["2", "1"]
    assert distinct_digits(0.1, 0.1) == ["0.1", "0.1"]


#: What is wrong by a factor alone: the layout, the factor, what holds for the parameter, the cause's name.
MULTIPLES = [
    ({}, 4.0, {}, "sum-for-mean"),
    ({}, 0.25, {}, "mean-for-sum"),
    ({"ranks": 8, "accumulate": 3}, 3.0, {}, "accumulation-not-divided"),
    ({"ranks": 8, "accumulate": 3}, 1 / 3, {}, "accumulation-divided-twice"),
    ({"ranks": 1, "accumulate": 3}, 3.0, {"others": True}, "accumulation-not-divided"),
    ({"ranks": 2, "pp": 2, "accumulate": 3}, 3.0, {}, "stage-scale"),
    ({"ranks": 8, "tp": 2}, 2.0, {"others": True}, "counted-per-rank"),
]


@pytest.mark.parametrize(("layout", "factor", "how", "name"), MULTIPLES)
def test_multiples(layout, factor, how, name):
    wrong = of(G, factor * G)
    right = [of(G, G, f"head.{number}") for number in range(9)] if how.get("others") else []
    cause, why = gradient_causes.multiple_cause([wrong], comparison(wrong, *right, **layout))
    assert cause == name
    assert why.startswith("×" if factor > 1 else "÷")


@given(factor=st.floats(0.05, 20), noise=st.floats(0.01, 1), ranks=st.integers(2, 8))
@settings(deadline=None, max_examples=60)
def test_a_factor_with_a_rest_is_no_multiple(factor, noise, ranks):
    wrong = of(G, factor * G + noise * drawn(6, 4, seed=11))
    assert gradient_causes.multiple_cause([wrong], comparison(wrong, ranks=ranks)) is None


_OFTEN = st.sampled_from([number**power for number in range(2, 9) for power in (-2, -1, 1, 2)])


@given(factor=st.floats(0.05, 20) | _OFTEN, ranks=st.integers(2, 8))
@settings(deadline=None, max_examples=100)
def test_a_factor_that_is_no_number_of_the_layout_has_no_name(factor, ranks):
    wrong = of(G, factor * G)
    named = gradient_causes.multiple_cause([wrong], comparison(wrong, ranks=ranks))
    numbers = (ranks, 1 / ranks)
    assert (named is not None) == any(math.isclose(factor, number, rel_tol=1e-5) for number in numbers)


@given(ranks=st.integers(2, 8), seed=st.integers(0, 1000), gathered=st.booleans())
@settings(deadline=None, max_examples=60)
def test_what_is_made_wrong_is_never_told_as_something_else(ranks, seed, gathered):
    """Ranks that keep their parts, or the sum where the mean was meant: that cause and no other of a parameter."""
    parts = [drawn(5, 3, seed=1000 * seed + rank) for rank in range(ranks)]
    mean = sum(parts) / ranks
    wrong = of(mean, sum(parts)) if gathered else of(mean, parts[0], versions=kept_apart(parts))
    told = {one.name for one in gradient_causes.BY_PARAMETER if says(one, wrong, ranks=ranks)}
    assert told == (set() if gathered else {"not-summed"})
    named = gradient_causes.multiple_cause([wrong], comparison(wrong, ranks=ranks))
    assert (named[0] if named else "") == ("sum-for-mean" if gathered else "")


# --- a clip that only one way has


def stepped(factor, rest=0.0, norm=7.8, step=0):
    """All updates are the reference's times a factor."""
    pairs = [of(one, factor * one + rest * drawn(6, 4, seed=9), name) for name, one in (("a.b", G), ("c.d", 2 * G))]
    made = comparison(*pairs, step=step, norms=[norm] * (step + 1))
    made.updates = {one.name: one for one in pairs}
    return made, pairs


@given(limit=st.sampled_from([0.1, 0.5, 1.0, 1.5, 5.0, 10.0]), over=st.floats(1.01, 1000), here=st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_clip_that_one_way_alone_has(limit, over, here):
    factor = 1 / over if here else over
    why = clipping_sentence(*stepped(factor, norm=limit * over))
    assert f"to {limit:g}," in why
    assert ("as if" in why) == here


@pytest.mark.parametrize("optimizer", ["Muon", "AdamW DistMuon", "SGD"])
def test_an_optimizer_of_whole_matrices_that_steps_with_parts(optimizer):
    step = of(G, drawn(6, 4, seed=3))
    made = comparison(optimizer=optimizer, cut={step.name})
    made.updates = {step.name: step}
    (found,) = findings.update_findings(made, lambda pairs: False)
    assert (found.cause, "Muon needs the whole matrix" in found.why) == ("optimizer-state", optimizer != "SGD")


@pytest.mark.parametrize("optimizer", ["FusedAdam", "MyOwn AdamW", "PagedLion8bit", "SGD"])
def test_a_multiple_that_the_step_takes_out_again_is_wrong(optimizer):
    made = comparison(of(G, 4 * G), optimizer=optimizer)
    made.updates = {"layers.0.weight": of(G, G)}
    assert findings.wrong_gradients(made) == (set() if optimizer == "SGD" else {"layers.0.weight"})


def test_what_is_no_clip():
    assert clipping_sentence(*stepped(1 / 7.8))
    assert not clipping_sentence(*stepped(0.1234567))  # to no number that anybody writes
    assert not clipping_sentence(*stepped(1 / 7.8, rest=0.01))
    assert not clipping_sentence(*stepped(-1 / 7.8))
    made, pairs = stepped(1 / 7.8)
    assert not clipping_sentence(made, pairs[:1])  # some parameters only: their learning rate, or a group
    made, pairs = stepped(1 / 7.8)
    assert not clipping_sentence(made, [of(G, G / 7.8, "a.b"), of(G, G / 3.9, "c.d")])


# --- losses


def counted(targets, loss):
    call = LossCall(targets, 0, 0)
    return Step(losses=[loss], loss_calls=[call])


def test_mean_of_means():
    apart = [counted(10, 1.0), counted(30, 2.0)]
    truth = Step(losses=[(10 * 1.0 + 30 * 2.0) / 40])
    wrong = of(G, drawn(6, 4, seed=12))
    assert "10 to 30 targets" in says(gradient_causes.mean_of_means, wrong, ours=apart, truth=truth, ranks=2)
    assert says(gradient_causes.mean_of_means, wrong, ours=apart, truth=Step(losses=[1.5]), ranks=2) is None, (
        "their plain mean"
    )
    even = [counted(20, 1.0), counted(20, 2.0)]
    assert says(gradient_causes.mean_of_means, wrong, ours=even, truth=Step(losses=[1.5]), ranks=2) is None
    stages = [Step(), counted(128, 1.5)]
    assert says(gradient_causes.mean_of_means, wrong, ours=stages, truth=Step(losses=[1.5]), ranks=2) is None, (
        "one has no loss"
    )


def losses(made, wanted=1.0):
    return {"steps": [Step(losses=[made])], "reference_step": Step(losses=[wanted])}


def test_the_loss_itself():
    last, inner = of(G, drawn(6, 4, seed=13), "head.weight"), of(G, G)
    wrong = gradient_causes.loss_itself
    off = wrong.explains([last], comparison(last, inner, **losses(1.7)))
    assert "is 1.7 where the reference's is 1" in off
    right = wrong.explains([last], comparison(last, inner, **losses(1.0)))
    assert "the loss's backward pass, or by what is done to all gradients" in right
    before = of(G, drawn(6, 4, seed=13))
    after = of(G, G, "head.weight")
    assert wrong.explains([before], comparison(before, after, **losses(1.0))) is None


# --- what two layouts say together


def left_open(name, part, share, reference=G, loss=(1.0, 1.0, 2.0)):
    wrong = of(reference, reference + share * part)
    found = Finding(name, 1, "gradients", "", "nobody here knows why", parameters=(wrong.name,), module="layers.0")
    return UnexplainedGradients(found, (wrong,), TOLERANCE, loss)


TWO = [RunLayout(2, {"ranks": 2, "tp": 2}), RunLayout(4, {"ranks": 4, "tp": 4})]
PART = drawn(6, 4, seed=14)


def explained_across(cases, layouts=TWO):
    """The causes of what layouts leave open, when they are compared with one another."""
    results = [
        LayoutResult(layout, findings=[case.finding], left_open=case)
        for layout, case in zip(layouts, cases, strict=True)
    ]
    across_layouts.explain_across(results)
    return [finding.cause for result in results for finding in result.findings]


def together(shares, **more):
    return explained_across(
        [left_open(layout.name, PART, share, **more) for layout, share in zip(TWO, shares, strict=True)]
    )


def test_a_part_of_the_gradient_counted_for_each_rank():
    assert together((1, 3)) == ["counted-per-rank"] * 2
    assert together((-1 / 2, -3 / 4)) == ["mean-for-sum"] * 2, "divided by the ranks"
    assert together((1, 2)) == ["", ""], "no number of ranks grows so"
    assert together((1, 3), loss=(1.0, 1.2, 2.4)) == ["", ""], "the losses are off, and not as the gradients are"


def test_differences_that_are_not_the_same_tensor_are_not_explained_together():
    first, second = left_open(TWO[0].name, PART, 1), left_open(TWO[1].name, drawn(6, 4, seed=15), 3)
    assert explained_across([first, second]) == ["", ""]


def test_a_layout_in_which_that_number_is_1_has_to_be_right():
    alone = RunLayout(2, {"ranks": 2, "accumulate": 2})
    layouts = [RunLayout(4, {"ranks": 4, "tp": 2, "dp": 2}), RunLayout(4, {"ranks": 4, "tp": 4, "dp": 1}), alone]
    cases = [left_open(layout.name, PART, share) for layout, share in zip(layouts, (1, 3, 1), strict=True)]
    assert explained_across(cases, layouts) == ["", "", ""]


# --- outputs


def parted(difference, reference, kind="Linear", rank=0, inputs=None):
    return ComparedOutput(rank, "layers.0", kind, 0, True, difference, reference, inputs)


def outputs_of(*wrong, **layout):
    return findings.output_finding(comparison(**layout), list(wrong)).cause


R = drawn(8, 3, seed=16)
ELSEWHERE = drawn(8, 3, seed=17)


def test_outputs():
    everywhere = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64).expand(8, 3)
    assert outputs_of(parted(ELSEWHERE, R, "BatchNorm1d")) == "buffers"
    assert outputs_of(parted(ELSEWHERE, R, "Embedding", inputs=False)) == "positions"
    assert outputs_of(parted(ELSEWHERE, R, "Embedding", inputs=True)) == ""
    assert outputs_of(parted(everywhere, R)) == "counted-per-rank"
    turned = ELSEWHERE.clone()
    turned[:, 2] = 0  # the last is of norms
    assert outputs_of(parted(turned, R)) == "positions"
    normalised = R.clone()
    normalised[:, 2] = 1  # all its vectors have one length, and what goes in may be wrong in any way
    assert outputs_of(parted(turned, normalised)) == ""
    assert outputs_of(parted(ELSEWHERE, R)) == ""


def test_weights_that_are_another_parameters():
    moved = {"head.q.weight": "head.k.weight", "layers.0.q.weight": "layers.0.k.weight"}
    found = findings.output_finding(comparison(moved=moved), [parted(ELSEWHERE, R)])
    assert (found.cause, found.module) == ("initial-parameters", "layers.0.q")
    assert found.parameters == ("layers.0.q.weight", "head.q.weight"), "by the order in which their modules run"


def piece_of(name, rows, value):
    return ParameterShard(name, tuple(value.shape), start=(rows, 0), whole=(8, 4))


def test_a_cut_piece_with_the_values_of_another_parameter_is_noted():
    q, k, later = drawn(8, 4, seed=20), drawn(8, 4, seed=21), drawn(8, 4, seed=22)
    reference = {"layers.0.q.weight": q, "layers.0.k.weight": k, "layers.1.q.weight": later}
    one, two = piece_of("layers.0.q.weight", 0, q[:4]), piece_of("layers.0.q.weight", 4, q[4:])
    right = map_parameters(reference, {0: [(one, q[:4])], 1: [(two, q[4:])]}, {}, TOLERANCE)
    assert right.moved == {}
    wrong = map_parameters(reference, {0: [(one, q[:4])], 1: [(two, k[:4])]}, {}, TOLERANCE)
    assert wrong.moved == {"layers.0.q.weight": "layers.0.k.weight"}
    second_stage = map_parameters(reference, {0: [(one, later[:4])], 1: [(two, later[4:])]}, {}, TOLERANCE)
    assert second_stage.moved == {}, "a later stage's first layer is another one of the reference's"


def test_a_mask_is_wrong_for_some_tokens_of_a_cut_sequence():
    some = ELSEWHERE.clone()
    some[:3] = 0
    cut = {"ranks": 2, "cp": 2}
    assert outputs_of(parted(some, R), parted(ELSEWHERE, R, rank=1), **cut) == "mask"
    assert outputs_of(parted(ELSEWHERE, R), **cut) == "mask", "rank 1 is right"
    assert outputs_of(parted(ELSEWHERE, R), parted(ELSEWHERE, R, rank=1), **cut) == "", "all tokens are wrong"
    assert outputs_of(parted(some, R), ranks=2) == "", "no sequence is cut"


# --- and all of them


def test_each_cause_is_tested_here():
    text = Path(__file__).read_text(encoding="utf-8")
    for cause in (*gradient_causes.BY_PARAMETER, *gradient_causes.TOGETHER):
        assert f"gradient_causes.{cause.explains.__name__}" in text


def test_a_copy_that_nothing_uses_is_left_out():
    """A last stage has the head's weight beside the table that is tied to it, and uses the table only."""
    table = drawn(6, 4)
    one, two = ParameterShard("embed.weight", (6, 4)), ParameterShard("head.weight", (6, 4))
    for kept, left in (
        ({"embed.weight": table, "head.weight": torch.zeros(6, 4)}, {"embed.weight"}),
        ({"embed.weight": table}, {"embed.weight"}),
        ({"embed.weight": table, "head.weight": table}, {"embed.weight", "head.weight"}),
        ({}, {"embed.weight", "head.weight"}),
    ):
        found = map_parameters({"embed.weight": table}, {0: [(one, table), (two, table)]}, {}, TOLERANCE)
        found.leave_out_unused(0, kept)
        assert set(found.parts[0]) == left


# --- dropout's masks as ranks have drawn them: which are told, which are right, and which say nothing


def mask(input, dropped, module="layers.0.drop", elements=64, repeated=False):
    return Mask(module, "train.py:7", input, dropped, elements, repeated)


#: What ranks have drawn, the samples that they had where not all the same, and each cause with its ranks.
MASKS = {
    "one input, one mask": ([[mask("x", "m")]] * 2, "aa", []),
    "two inputs, two masks": ([[mask("x", "m")], [mask("y", "n")]], "aa", []),
    "the forward pass, computed again": ([[mask("x", "m"), mask("x", "m", repeated=True)]], "a", []),
    "computed again with another mask": (
        [[mask("x", "m"), mask("x", "n", repeated=True)]], "a", [("recomputed-differently", "")]),
    "one mask for two inputs": ([[mask("x", "m")], [mask("y", "m")]], "ab", [("same-random-numbers", "ranks 0, 1")]),
    "two masks for one input": (
        [[mask("x", "m")], [mask("x", "n")]], "aa", [("different-random-numbers", "ranks 0, 1")]),
    # a pipeline's first call may see memory that nobody has written; an embedding of positions is the same for all
    "one input by chance": ([[mask("zeros", "m")], [mask("zeros", "n")]], "ab", []),
    "groups": ([[mask(*of)] for of in ("xm", "xn", "yo", "yp")], "aabb",
               [("different-random-numbers", "ranks 0, 1 and ranks 2, 3")]),
    "few elements": ([[mask("x", "m", elements=31)], [mask("x", "n", elements=31)]], "aa", []),
    "masks of two sizes": ([[mask("x", "m")], [mask("x", "n", elements=65)]], "aa", []),
    "masks of two modules": ([[mask("x", "m")], [mask("x", "n", module="layers.1.drop")]], "aa", []),
}  # fmt: skip


@pytest.mark.parametrize("what", MASKS)
def test_masks(what):
    ranks, samples, wanted = MASKS[what]
    steps = [Step(micro_batches=[MicroBatch([had], [])], masks=of) for of, had in zip(ranks, samples, strict=True)]
    run = SimpleNamespace(
        records=[SimpleNamespace(steps=[step]) for step in steps], layout=SimpleNamespace(name="ranks=2")
    )
    found = checks.mask_findings(StepPair(None, run, 0))
    assert [(one.cause, one.why.rpartition(" draw ")[0]) for one in found] == wanted
    assert {one.module for one in found} <= {"layers.0.drop"}
