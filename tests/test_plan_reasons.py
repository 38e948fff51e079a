"""Which row is recommended and why: every clause is checked against the other rows, on requests made up by hand."""

import itertools
import random

import pytest
from conftest import says

from pardemo.cli import main
from pardemo.planner import hardware
from pardemo.planner.dry_run.measured_peak import example_config
from pardemo.planner.dry_run.memory_curve import BUILT_SHARDED, Memory
from pardemo.planner.estimate import PredictedStep
from pardemo.planner.fine_tune import answer, plan_table
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.configurations import shape_of_config as shape_of
from pardemo.planner.layouts.job import fine_tune
from pardemo.planner.layouts.machines import Machine

A800S = Machine(hardware.gpu("A800-80GB"), 8)  # of 85.2 GB: 78.4 where 8 % stay free, 83.5 that ever fitted


def row(
    engine="zero-2",
    offload="none",
    batch=4,
    hours=1.0,
    gigabytes=50.0,
    sent=1e9,
    checkpointing=True,
    built=30.0,
    accumulation=None,
    overlaps=None,
):
    """A row whose step and memory are made up."""
    job, layout = fine_tune(
        shape_of(example_config("llama")),
        A800S,
        engine=engine,
        ranks=8,
        batch=batch,
        sequence=64,
        host_states=offload,
        accumulation=accumulation or 32 // batch,
        checkpointing=checkpointing,
        overlaps=overlaps,
    )
    one = plan_table.PlanRow(job, layout)
    building = built * 1e9 if engine in BUILT_SHARDED else None
    vars(one)["step"] = PredictedStep({"matrix multiplications": 3600 * hours}, 0.0, 1.0, 1, 1, (1,), sent)
    vars(one)["memory"] = Memory({"parameters": gigabytes * 1e9}, "backward", building)
    return one


def plan(*rows):
    return plan_table.Plan(
        plan_table.Request(RankJob(example_config("llama"), sequence=64), A800S, 256, 10), list(rows)
    )


def test_the_fastest_that_fits_comes_first_and_what_does_not_fit_last():
    found = plan(
        row(hours=3), row(hours=0.5, gigabytes=90), row(hours=2, batch=8), row(hours=1, gigabytes=84, batch=16)
    )
    assert [one.hours for one in found.rows] == [2, 3, 0.5, 1]
    assert found.best is found.rows[0]
    assert "the fastest that leaves 8% of a GPU free" in plan_table.explain_best(found)
    assert says(plan_table.explain_best(found), "4", "50.0", "longer")
    assert says(plan_table.explain_best(found), "16")


def test_of_rows_as_fast_the_one_that_shards_and_offloads_least():
    found = plan(row("zero-3", hours=1.0), row("zero-1", hours=1.005), row("zero-0", "optimizer", hours=0.999))
    assert found.best.engine == "zero-1"
    assert says(plan_table.explain_best(found), "1", "fastest")


def test_a_stage_is_explained_by_what_is_below_and_above():
    assert says(plan_table.explain_best(plan(row("zero-2"), row("zero-1", gigabytes=90))), "2", "nothing")
    slower = plan_table.explain_best(plan(row("zero-2"), row("zero-1", hours=1.5, batch=2)))
    assert says(slower, "2", "ZeRO", "1", "2", "16", "50.0")
    above = "a higher stage would save memory that is not needed and send no less"
    assert above in plan_table.explain_best(plan(row("zero-0"), row("zero-2", hours=1.2, sent=2e9)))
    assert above not in plan_table.explain_best(plan(row("zero-0"), row("zero-2", hours=1.2, sent=0.5e9)))
    assert above not in plan_table.explain_best(plan(row("zero-0")))


def test_every_recommendation_of_random_tables_is_true():
    random.seed(0)
    ways = list(itertools.product(("zero-0", "zero-2", "fsdp2"), ("none", "optimizer"), (1, 2)))
    for _ in range(200):
        rows = [
            row(engine, offload, batch, random.choice((1, 1.004, 1.2, 1.5)), random.choice((40, 60, 90)),
                random.choice((1e9, 2e9)))
            for engine, offload, batch in ways
        ]  # fmt: skip
        found = plan(*rows)
        best, fitting = found.best, [one for one in rows if one.fits and one.engine != "fsdp2"]
        if not fitting:
            continue
        assert best in fitting
        assert best.hours <= 1.01 * min(one.hours for one in fitting)
        assert found.rows[0] is best
        assert sorted(rest := [not one.fits for one in found.rows]) == rest
        why = plan_table.explain_best(found)
        way = best.engine, best.layout.host_states
        alike = {one.layout.micro_batch: one for one in rows if (one.engine, one.layout.host_states) == way}
        batch = 3 - best.layout.micro_batch
        other = alike[batch]
        if f"micro-batches of {batch} take" in why:
            assert other.hours > best.hours
        if f"micro-batches of {batch} do not fit" in why:
            assert not other.fits
        if "at most 1 % faster" in why:
            assert best.hours / 1.01 <= other.hours < best.hours
        if "nothing fits" in why:
            assert not any(one.engine < best.engine for one in fitting)
        roomy = [one for one in fitting if one.peak_bytes <= A800S.usable_bytes]
        if "the fastest that" in why and "within" not in why:
            assert best.hours == min(one.hours for one in roomy or fitting)
        assert ("of a GPU free" in why) == bool(roomy)


def test_a_row_that_leaves_room_goes_before_a_faster_one_that_fits():
    roomy = row(hours=3, gigabytes=60)
    full = row(hours=2, gigabytes=(A800S.usable_bytes + A800S.most_bytes) / 2e9, batch=8)
    found = plan(roomy, full)
    assert found.best == roomy
    assert says(plan_table.explain_best(found), "8", "less than", "free")
    assert plan(full).best == full
    assert says(plan_table.explain_best(plan(full)), "the fastest that fits", f"{A800S.most_bytes / 1e9:.1f}")


def test_the_table_shows_the_first_rows_and_says_how_many_more():
    found = plan(*[row(batch=batch, engine=f"zero-{stage}") for batch in (1, 2, 4, 8) for stage in range(4)])
    text = answer.as_text(found, 5)
    assert text.count("yes") == 5
    assert says(text, "11", "--all")
    assert text.splitlines()[1].startswith("→")
    assert answer.as_text(found).count("yes") == 16
    assert answer.as_json(found)["recommended"] == 0


def test_building_a_model_whole_is_told_beside_the_step_and_how_to_go_without():
    told = answer.as_text(plan(row("zero-2"), row("zero-3"), row("fsdp2", built=90))).splitlines()
    assert says(told, "ZeRO", "3", "GPU", "30.0", "GB")
    (fsdp2,) = (line for line in told if line.startswith("  FSDP2: built whole"))
    assert says(fsdp2, "90.0", "GB", "fully_shard", "to_empty")
    assert not any("ZeRO 2: built" in line for line in told), "which leaves parameters whole anyway"


@pytest.mark.parametrize(
    ("per_step", "steps"),
    [(None, 5 * 313), (64, 5 * 1250), (256, 5 * 313), (1024, 5 * 79), (4096, 5 * 20)],  # 80,000 samples, 5 epochs
)
def test_steps_are_counted_with_the_samples_of_a_step_that_are_asked_for(per_step, steps, monkeypatch):
    asked = []
    monkeypatch.setattr(plan_table, "plan", lambda request: asked.append(request) or plan(row()))
    arguments = ["plan", "--json"] + ([] if per_step is None else ["--per-step", str(per_step)])
    assert main(arguments) == 0
    request = asked[0]
    assert request.steps == steps
    assert request.samples_per_step == (per_step or 256)
    for batch in request.micro_batches:  # rows and steps count alike
        assert request.share % batch == 0
