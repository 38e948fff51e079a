"""Programs by release: whose constants stand for which, how an interval widens, and what no constant was fitted to."""

import csv
import json
from dataclasses import replace

import pytest
from calibration import error_tables, fit
from conftest import says

from pardemo import project
from pardemo.cli import main
from pardemo.planner import hardware
from pardemo.planner.layouts import explanations, intervals, programs
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.programs import find_program
from pardemo.planner.layouts.published import against, loaders, runs
from pardemo.planner.layouts.search import PlannedLayout, search
from pardemo.planner.layouts.shape import Experts, Shape
from pardemo.planner.layouts.step import predict_step

FOLDER = project.root() / "data" / "published_runs"
SMALL = Shape(8, 1024, 16, 4, 2816, 32000)
ROUTED = replace(SMALL, experts=Experts(64, 4, 512))


def job(what=SMALL, gpus=8, gpu="H100", program="megatron-core", **more):
    return Job(what, Machine(hardware.gpu(gpu), gpus, 8, 4e11), find_program(program), 4096, **more)


@pytest.mark.parametrize(
    ("name", "fitted", "ahead"),
    [("megatron-core", "26.06", 0), ("megatron-core@26.06", "26.06", 0), ("megatron-core@26.05", "26.06", 0),
     ("megatron-core@26.04.01", "26.04", 0), ("megatron-core@25.09", "26.02", 0),
     ("megatron-core@26.02.01", "26.02", 0), ("megatron-core@26.08", "26.06", 2),
     ("megatron-core@27.01", "26.06", 7), ("nanotron", "", 0)],
)  # fmt: skip
def test_a_release_has_the_constants_of_the_first_fitted_one_that_is_not_older(name, fitted, ahead):
    program = find_program(name)
    assert (program.fitted_release, program.months_ahead) == (fitted, ahead)
    newest = next(one for one in programs.fitted_releases(program.name) if one.fitted_release == fitted)
    assert program.but(release=newest.release) == newest


@pytest.mark.parametrize(
    ("name", "told"),
    [("megatron-core@next", "no release 'next'; right would be a year and a month, as 26.04"),
     ("megatron-core@26.13", "no release '26.13'"), ("nanotron@26.04", "nanotron's published runs do not tell"),
     ("megatron-cor@26.04", "did you mean 'megatron-core'?")],
)  # fmt: skip
def test_what_is_no_release_is_one_line(name, told, capsys):
    with pytest.raises(ValueError, match=told.replace("?", r"\?")):
        find_program(name)
    assert main(["plan", "--search", "--model", "llama3-8b", "--gpus", "8", "--gpu", "H100", "--program", name]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_later_constants_say_the_same_of_dense_models_in_16_bits():
    layout = Layout(tp=2, dp=4, sharding="zero1", sequence_parallel=True)
    seconds = {predict_step(job(program=f"megatron-core@{one.fitted_release}"), layout).seconds
               for one in programs.fitted_releases("megatron-core")}  # fmt: skip
    assert len(seconds) == 1
    routed = [
        predict_step(job(ROUTED, gpu="B200", program=f"megatron-core@{one.fitted_release}"), Layout(dp=8, ep=8)).seconds
        for one in programs.fitted_releases("megatron-core")
    ]
    assert routed == sorted(routed, reverse=True), "experts have become faster"


def test_published_runs_are_judged_by_the_constants_of_their_release():
    left_out = []
    found = loaders.load(FOLDER / "newer/megatron_bridge_26.csv", left_out=left_out)
    assert len(found) + len(left_out) == 85
    assert all("Nemotron_3_Super" in line for line in left_out)
    assert all(run.source == f"Megatron-Bridge, {run.job.program.release}" for run in found)
    assert {run.job.program.fitted_release for run in found} == {"26.04", "26.06"}
    assert sum(run.job.frozen for run in found) == 5, "LoRA's table"
    older = loaders.load(FOLDER / "megatron_bridge.csv")
    assert {run.job.program.fitted_release for run in older} == {"26.02"}
    kept_back = against.halves("newer/megatron_bridge_26.csv")[1]
    assert len(kept_back) >= 34
    for release in ("26.04", "26.06"):
        errors = [one.error for one in kept_back if one.run.job.program.fitted_release == release]
        assert against.errors(errors)["mean"] < 0.12, release


def test_an_interval_widens_with_the_months_since_the_last_fitted_release(capsys):
    layout, seconds = Layout(dp=8, sharding="zero1"), 10.0
    rate = intervals.faster_a_month("megatron-core")
    assert 0 < rate < 0.2
    known = intervals.of_seconds(job(), layout, seconds)
    newer = intervals.of_seconds(job(program="megatron-core@26.10"), layout, seconds)
    assert newer.low == pytest.approx(known.low * (1 - rate) ** 4)
    assert newer.high == known.high
    assert says(newer.why, "26.10", "4", "months", "26.06")
    assert not known.newer
    measured = replace(job(program="megatron-core@26.10"), measured=True)
    assert not intervals.of_seconds(measured, layout, seconds).newer, "the runs are that release's own"
    asked = ["plan", "--explain", "dp=8", "--model", "llama3-8b", "--gpus", "8", "--gpu", "B200"]
    assert main([*asked, "--program", "megatron-core@26.10"]) == 0
    assert says(capsys.readouterr().out, "megatron-core", "26.10", "26.06", "4", "months")
    assert main(["plan", "--search", "--model", "llama3-8b", "--gpus", "8", "--gpu", "B200"]) == 0
    assert says(capsys.readouterr().out, "release 26.06", "--program megatron-core@YY.MM")


def test_runs_measured_in_another_release_correct_the_one_that_is_planned_with(tmp_path):
    layout = Layout(dp=8, ep=8, sharding="zero1")
    newest, older = (job(ROUTED, gpu="B200", program=name) for name in ("megatron-core", "megatron-core@26.02"))
    took = 1.5 * predict_step(newest, layout).seconds
    corrected, _ = against.correct_seconds(newest, [runs.PublishedRun(older, layout, took, None)])
    assert predict_step(corrected, layout).seconds == pytest.approx(took)


def test_earlier_constants_hold_for_later_releases_within_their_intervals():
    inside = {}
    for earlier, one in against.later_runs():
        found = intervals.of_seconds(one.run.job, one.run.layout, one.step.seconds)
        key = earlier.fitted_release, one.run.job.program.release
        inside.setdefault(key, []).append(found.low <= one.run.seconds <= found.high)
    assert {key: sum(of) / len(of) >= 0.8 for key, of in inside.items()} == {
        ("26.02", "26.04"): True, ("26.02", "26.06"): True, ("26.04", "26.06"): True,
    }  # fmt: skip


def test_a_slow_cards_runs_are_a_test_set_alone():
    file = "newer/simumax_b200_dense_runs.csv"
    assert file not in {fitted for fitted, _ in (fit.FITTED | fit.FITTED_MEMORY).values()}
    outcomes, kept = against.halves(file)
    assert (len(outcomes), kept) == (31, []), "no interval has seen them"
    assert against.errors([one.error for one in outcomes])["bias"] < -0.2
    text = error_tables.slow_card()
    assert text in (project.root() / "docs" / "records" / "planner-error.md").read_text(encoding="utf-8")


def test_a_plan_says_what_depends_on_the_cards_rate(capsys):
    asked = ["plan", "--explain", "tp=2,sharding=zero1,micro_batch=4", "--model", "llama3-8b", "--gpus", "8",
             "--gpu", "B200"]  # fmt: skip
    assert main(asked) == 0
    assert says(capsys.readouterr().out, "20%", "TFLOP/s", "B200", "pardemo plan --measure profile.json")
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    slower = told["slower_card"]
    more = 0.25 * (told["parts"]["matrix multiplications"] + told["parts"]["attention"])
    assert slower["seconds"] == pytest.approx(told["seconds"] + more, rel=0.02)
    measured = replace(job().machine, gpu=replace(job().machine.gpu, measured=True))
    assert explanations.card_line(PlannedLayout(replace(job(), machine=measured), Layout(dp=8))) == []


def profile(folder, **more):
    path = folder / "mine.json"
    path.write_text(json.dumps({"name": "B200", "memory_gib": 178, "peak_tflops": 2250, "reachable_tflops": 1080,
                                "memory_gb_per_s": 6500} | more))  # fmt: skip
    return path


def test_runs_are_not_compared_with_a_profile_without_the_links_that_they_need(tmp_path, capsys):
    against_runs = ["plan", "--against", str(FOLDER / "newer/simumax_b200_dense_runs.csv"), "--gpu"]
    assert main([*against_runs, str(profile(tmp_path))]) == 2
    error = capsys.readouterr().err
    assert "mine.json has no inside (gb_per_s, latency_us), which 8 GPUs need" in error
    assert error.count("\n") == 1
    with_links = profile(tmp_path, inside={"gb_per_s": 700, "latency_us": 20})
    assert main([*against_runs, str(with_links), "--json"]) == 0
    time = json.loads(capsys.readouterr().out)["summary"]["time"]
    assert time["mean"] < 0.2, "with the card's rate told"


def test_a_table_with_rows_on_smaller_a100s_is_read(tmp_path):
    with (FOLDER / "llm_foundry_fsdp.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["GPU"] == "a100_80gb"][:1]
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerow(rows[0] | {"GPU": "a100_40gb"})
    (run,) = loaders.load(path)
    assert run.job.machine.gpu.name == "A100-40GB"


def test_beyond_the_hosts_of_any_measured_run_a_search_prefers_what_was_measured_to_scale():
    hosts, stage = intervals.measured_hosts("nanotron")
    assert (hosts, stage) == (32, 32)
    assert intervals.measured_hosts("meta-2024") is None
    what = replace(SMALL, layers=32, hidden=4096, heads=32, kv_heads=32, ffn_hidden=14336)
    many = job(what, 512, program="nanotron")
    answer = search(many, 512)
    (line,) = explanations.describe_reach(answer)
    assert says(line, "64", "hosts", "nanotron", "32")
    far = [intervals.beyond_measured(one.job, one.layout) for one in answer.best]
    assert not far[0]
    for one in answer.best:
        assert intervals.beyond_measured(one.job, one.layout) == (one.layout.gpus // one.layout.pp > 8 * stage)
    few = job(what, 256, program="nanotron")
    assert explanations.describe_reach(search(few, 256, 1)) == []
