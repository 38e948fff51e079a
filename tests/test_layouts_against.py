"""The planner of layouts beside published runs: how far off it may be, what it chooses, and files of anybody's runs."""

import csv
import itertools
import json
import math
import statistics
from dataclasses import replace

import pytest
from calibration import bounds, error_tables, fit
from conftest import says

from pardemo import cli, project
from pardemo.planner import hardware
from pardemo.planner.layouts import search
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.programs import MEGATRON, NANOTRON, PROGRAMS
from pardemo.planner.layouts.published import against, loaders, runs
from pardemo.planner.layouts.published.runs import PublishedRun
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.step import predict_step

FOLDER = project.root() / "data" / "published_runs"


@pytest.fixture(scope="module")
def known():
    """Every published run beside its prediction, by the file's name."""
    found = {path.stem: loaders.read(path) for path in FOLDER.glob("*.csv") if loaders.knows(path)}
    return {
        name: against.compare(rows) for name, rows in (found | {"tables": runs.read(FOLDER / "tables.csv")}).items()
    }


#: Of each file: what the planner promises of a step's time, on average, and above which share of the peak rate.
PROMISED = {
    "nanotron_h100": (0.15, 0.05),
    "megatron_deepspeed_a100_1_host": (0.12, 0.0),
    "llm_foundry_fsdp": (0.10, 0.0),
    "tables": (0.10, 0.0),
}


@pytest.mark.parametrize("name", PROMISED)
def test_a_steps_time_is_missed_by_no_more_than_promised(known, name):
    most, least_mfu = PROMISED[name]
    told = against.errors([one.error for one in against.usable(known[name], least_mfu)])
    assert told["mean"] <= most
    assert abs(told["bias"]) < 0.05, "it is neither always too slow nor always too fast"


def test_it_would_have_chosen_well(known):
    of_megatron = sorted(one.regret for one in against.choices(known["megatron_deepspeed_a100_1_host"]))
    assert len(of_megatron) == 119
    assert sum(of_megatron) / 119 < 0.05
    of_nanotron = sorted(one.regret for one in against.choices(known["nanotron_h100"]))
    assert sum(of_nanotron) / 15 < 0.05
    assert of_nanotron[-1] < 0.16


def test_who_fits(known):
    table = against.confusion(known["nanotron_h100"])
    assert table["ok", True] / (table["ok", True] + table["ok", False]) > 0.97
    assert table["failed", False] / (table["failed", True] + table["failed", False]) > 0.92


def test_pipelines_with_stages_that_get_nothing_never_ran(known):
    """The rule is nanotron's own (its ``build_model``), not one that is fitted; the table has to agree with it."""
    refused = [one for one in known["nanotron_h100"] if one.refused]
    assert (len(refused), {one.run.outcome for one in refused}) == (90, {"failed"})
    idle = [one for one in refused if "without anything" in one.refused]
    assert len(idle) == 34
    assert {one.run.layout.pp for one in idle} == {16}, "16 layers and a large head"
    assert any("at most 16" in one.refused for one in refused), "more stages than layers"
    others = [one for name in set(known) - {"nanotron_h100"} for one in known[name] if one.refused]
    assert [one.run.wrong for one in others] == ["says EP 64 among 32 ranks"], "a row that contradicts itself"


def test_memory(known):
    of_nanotron = [
        one.memory_error for one in known["nanotron_h100"] if one.memory_error is not None and not one.run.wrong
    ]
    assert against.errors(of_nanotron)["mean"] < 0.102
    of_torchtitan = [one.memory_error for one in known["tables"] if one.memory_error is not None]
    assert against.errors(of_torchtitan)["mean"] < 0.1


@pytest.mark.parametrize("page", error_tables.PAGES)
def test_the_table_that_is_told_is_the_one_that_is_computed(page, tmp_path):
    text = (project.root() / page).read_text(encoding="utf-8")
    copy = tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    error_tables.update(copy)
    assert copy.read_text(encoding="utf-8") == text, "python tests/calibration/error_tables.py"
    copy.write_text("no place")
    with pytest.raises(ValueError, match=r"page.md"):
        error_tables.update(copy)


def test_what_the_docs_say_of_the_misses(known):
    """Numbers in docs/records/planner-error.md that are no table."""
    rows = [one for one in known["nanotron_h100"] if one.memory_error is not None and not one.run.wrong]
    small = against.errors([one.memory_error for one in rows if one.run.layout.tp <= 4])
    assert small["mean"] == pytest.approx(0.068, abs=0.0006)
    waited = [one for one in against.usable(known["nanotron_h100"]) if waits(one)]
    assert (len(waited), sum(one.known_mfu < 0.05 for one in waited)) == (219, 187)
    others = [one.error for one in against.usable(known["nanotron_h100"], 0.05) if not waits(one)]
    assert against.errors(others)["mean"] == pytest.approx(0.081, abs=0.0006)
    full = [one for one in against.usable(known["nanotron_h100"]) if one.run.peak_bytes > 74 * 2**30]
    assert (len(full), max(one.error for one in full) < -0.5) == (12, True)
    by_tp = {tp: [] for tp in (4, 8)}
    for one in against.usable(known["megatron_deepspeed_a100_1_host"]):
        if one.run.layout.tp in by_tp:
            by_tp[one.run.layout.tp].append(one.error)
    biases = {tp: against.errors(values)["bias"] for tp, values in by_tp.items()}
    assert biases == pytest.approx({4: 0.03, 8: -0.10}, abs=0.005)


def test_what_no_planner_could_know(known):
    """The bounds in docs/records/planner-error.md and *Which layout?*."""
    every, many = (bounds.memory(known["nanotron_h100"], least_tp=tp) for tp in (1, 16))
    assert (every.rows, every.constants) == (865, 90)
    assert (every.error, many.error) == pytest.approx((0.064, 0.102), abs=0.0006)
    twins = bounds.twins(known["nanotron_h100"])
    assert (twins.pairs, twins.apart, twins.error) == (150, 49, pytest.approx(0.156, abs=0.0006))
    computed = bounds.twins(known["nanotron_h100"], least_mfu=0.05)
    assert (computed.pairs, computed.error) == (88, pytest.approx(0.046, abs=0.0006))
    sizes = bounds.sizes(known["megatron_deepspeed_a100_1_host"])
    assert sizes.errors == pytest.approx((0.072, 0.030), abs=0.0006)
    assert sizes.worst_regrets == pytest.approx((0.259, 0.088), abs=0.0006)
    assert sizes.factors == 32


def test_a_bound_on_runs_that_agree_with_the_model_is_nothing():
    machine = Machine(hardware.gpu("H100"), 8)
    job = Job(Shape(16, 2048, 16, 16, 5504, 32000), machine, NANOTRON)
    layouts = [Layout(tp=2, dp=4, micro_batch=n, sharding=zero) for n in (1, 2, 4) for zero in ("none", "zero1")]
    made = [
        PublishedRun(job, one, predict_step(job, one).seconds, predict_memory(job, one).peak_bytes) for one in layouts
    ]
    assert bounds.memory(against.compare(made)).error == pytest.approx(0, abs=1e-9)
    assert bounds.twins(against.compare(made)) == bounds.Twins(3, 0, pytest.approx(0, abs=1e-9))


def test_a_size_that_takes_longer_in_models_of_every_depth_is_learned_from_the_others():
    machine = Machine(hardware.gpu("H100"), 8)
    layouts = [Layout(dp=8), Layout(tp=2, dp=4), Layout(tp=4, dp=2), Layout(tp=8)]
    made = []
    for depth in (16, 32):
        job = Job(Shape(depth, 2048, 16, 16, 5504, 32000), machine, NANOTRON)
        for layout in layouts:
            longer = 1.5 if layout.tp == 2 else 1.0
            made.append(PublishedRun(job, layout.but(accumulation=8 // layout.dp), 0.0, None))
            made[-1] = replace(made[-1], seconds=longer * predict_step(job, made[-1].layout).seconds)
    found = bounds.sizes(against.compare(made), least_mfu=0)
    assert found.errors == pytest.approx(((1 - 1 / 1.5) / 4, 0))
    assert found.factors == 4
    assert found.worst_regrets[1] == 0
    own = [replace(one, seconds=2 * one.seconds) if one.job.shape.layers == 16 else one for one in made]
    assert bounds.sizes(against.compare(own), least_mfu=0).errors[1] > 0.3, "never from its own depth"


def test_tensor_parallelism_across_hosts_is_chosen_with_caution(known):
    took = {True: [], False: []}
    for one in against.usable(known["nanotron_h100"]):
        if one.fits:
            took[one.run.job.machine.inside(one.run.layout.tp)].append(one.run.seconds / one.step.seconds)
    assert statistics.median(took[True]) == pytest.approx(1.02, abs=0.006)
    assert statistics.median(took[False]) == pytest.approx(1.26, abs=0.006)
    job = Job(Shape(16, 4096, 32, 32, 5504, 32000), Machine(hardware.gpu("H100"), 32), NANOTRON)
    other = replace(job, program=MEGATRON)
    assert search.expected(other, Layout(tp=16, dp=2), 1.0) == search.ACROSS
    record = search.RECORDS["nanotron"]
    assert search.expected(job, Layout(tp=16, dp=2, sharding="zero1"), 1.0) == record["TP"]
    assert search.expected(job, Layout(tp=2, pp=8, dp=2), 1.0) == record["PP without ZeRO"]
    assert search.expected(job, Layout(tp=2, pp=8, dp=2, sharding="zero1"), 1.0) == record["PP"]
    assert search.expected(job, Layout(dp=32), 1.0) == record["without ZeRO"]
    assert search.expected(job, Layout(tp=8, dp=4, sharding="zero1"), 1.0) == 1.0


def waits(one):
    """Whether each of a run's micro-batches took half a second or more beyond what is predicted."""
    layout = one.run.layout
    return layout.pp > 1 and (one.run.seconds - one.step.seconds) / layout.accumulation > 0.45


def test_the_comparison_can_fail(known):
    slow = NANOTRON.but(matmul_efficiency=0.2, tile_loss=5)
    rows = [fit.with_constants(one.run, vars(slow)) for one in against.usable(known["nanotron_h100"], 0.05)]
    assert against.errors([one.error for one in against.compare(rows)])["mean"] > 0.5


def test_rows_that_contradict_themselves_are_named_and_left_out(known):
    wrong = [one for one in known["nanotron_h100"] if one.run.wrong]
    assert len(wrong) == 22
    assert all("samples a step, but has" in one.run.wrong for one in wrong)
    assert not set(map(id, wrong)) & set(map(id, against.usable(known["nanotron_h100"])))


def test_constants_are_what_the_fit_finds():
    """A program with known constants is made up; the fit finds them again from its runs."""
    shape, machine = Shape(16, 2048, 16, 16, 5504, 32000), Machine(hardware.gpu("H100"), 8)
    real = {"matmul_efficiency": 0.7, "tile_loss": 300.0}
    made = []
    for tp, micro in ((1, 1), (2, 1), (4, 2), (8, 4), (1, 2), (2, 8)):
        job = Job(shape, machine, PROGRAMS["megatron-core"].but(launch_s=1e-6, **real))
        layout = Layout(tp=tp, dp=8 // tp, micro_batch=micro)
        made.append(PublishedRun(job, layout, predict_step(job, layout).seconds, None))
    bounds = {"matmul_efficiency": (0.3, 1.0), "tile_loss": (5, 800)}
    found = fit.fit(made, fit.with_constants, {"matmul_efficiency": 1.0, "tile_loss": 50.0}, bounds)
    assert found == pytest.approx(real, rel=0.01)


OWN = {"model": "llama3-8b", "gpu": "H100", "gpus": "8", "sequence": "8192", "micro_batch": "1", "accumulation": "4",
       "tokens_per_s": "9000", "sharding": "zero3", "peak_gb": "60"}  # fmt: skip


def own(folder, *changes, drop=()):
    path = folder / "own.csv"
    rows = [{name: value for name, value in (OWN | change).items() if name not in drop} for change in changes or ({},)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_anybodys_runs(tmp_path):
    (run,) = runs.read(own(tmp_path))
    assert run.layout == Layout(dp=8, sharding="zero3", accumulation=4)
    assert run.seconds == pytest.approx(8 * 4 * 8192 / 9000 / 8)
    assert run.peak_bytes == 60e9


@pytest.mark.parametrize(
    ("change", "drop", "told"),
    [
        ({}, ("gpus",), "own.csv has no column gpus (in all)"),
        ({}, ("model",), "own.csv says no model"),
        ({}, ("tokens_per_s",), "own.csv says no speed"),
        ({"color": "red"}, (), "no such column: color"),
        ({"gpus": "0"}, (), "own.csv, line 2: gpus is '0'; right would be a whole number of at least 1"),
        ({"micro_batch": ""}, (), "line 2: micro_batch is empty; right would be a whole number of at least 1"),
        ({"tokens_per_s": "nan"}, (), "line 2: tokens_per_s is 'nan'; right would be a number of at least 0"),
        ({"tokens_per_s": "0"}, (), "line 2: outcome ok without seconds or tokens_per_s above 0"),
        ({"peak_gb": "0"}, (), "line 2: peak_gb is '0'; right would be a number above 0"),
        ({"fused": "maybe"}, (), "line 2: fused is 'maybe'; right would be 1, true, yes, on, 0, false, no, off"),
        ({"outcome": "died"}, (), "line 2: outcome is 'died'; right would be ok, oom, failed"),
        ({"tp": "3"}, (), "line 2: 32 attention heads do not divide by TP 3; 1, 2, 4, 8 would do"),
        ({"gpu": "H1000"}, (), "no GPU 'H1000'; did you mean 'H100"),
        ({"program": "nanotrom"}, (), "did you mean 'nanotron'?"),
        ({"ep": "2"}, (), "EP 2 needs a model with experts"),
        ({"model": "llama9-8b"}, (), "no model 'llama9-8b'; did you mean"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, change, drop, told, capsys):
    path = own(tmp_path, change, drop=drop)
    assert cli.main(["plan", "--against", str(path)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_how_a_run_ended_is_one_of_three_words(tmp_path):
    ended = ["OK", "OOM", "Failed", ""]
    found = runs.read(own(tmp_path, *({"outcome": word, "tokens_per_s": "9000"} for word in ended)))
    assert [run.outcome for run in found] == ["ok", "oom", "failed", "ok"]
    (run,) = runs.read(own(tmp_path, {"outcome": "OOM", "tokens_per_s": "0"}))
    assert run.seconds is None


def published_with(folder, name, change, drop=()):
    """The first row of a published table that ended well, with other cells or without some columns."""
    with (FOLDER / name).open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row.get("status", "ok") == "ok")
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column for column in row if column not in drop], extrasaction="ignore")
        writer.writeheader()
        writer.writerow(row | change)
    return path


@pytest.mark.parametrize(
    ("name", "change", "drop", "told"),
    [
        ("nanotron_h100.csv", {}, ("mbs",), "table.csv is nanotron's table but has no column mbs"),
        ("nanotron_h100.csv", {"model": "9B"}, (), "line 2: model is '9B'; right would be 1.34B, 3.57B, 8.86B, 80B"),
        ("nanotron_h100.csv", {"zero": "3"}, (), "line 2: zero is '3'; right would be 0, 1"),
        ("nanotron_h100.csv", {"tp": ""}, (), "line 2: tp is empty; right would be a whole number of at least 1"),
        ("nanotron_h100.csv", {"status": "lost"}, (), "line 2: status is 'lost'; right would be ok, crashed or oom"),
        ("megatron_deepspeed_a100_1_host.csv", {}, ("micro batch",), "Megatron-DeepSpeed's table but has no column mi"),
        ("megatron_deepspeed_a100_1_host.csv", {"micro batch": "0"}, (), "line 2: micro batch is '0'; right would be"),
        ("llm_foundry_fsdp.csv", {"GPU": "v100"}, (), "line 2: GPU is 'v100'; right would be h100_80gb, a100_80gb"),
        ("llm_foundry_fsdp.csv", {}, ("Sharding Strategy",), "LLM-Foundry's table but has no column Sharding Strategy"),
    ],
)
def test_a_published_table_that_was_changed_is_one_line(tmp_path, name, change, drop, told, capsys):
    assert cli.main(["plan", "--against", str(published_with(tmp_path, name, change, drop))]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_published_table_needs_only_the_columns_that_are_read(tmp_path):
    whole = loaders.load(published_with(tmp_path, "nanotron_h100.csv", {}))
    assert loaders.load(published_with(tmp_path, "nanotron_h100.csv", {}, ("mfu_percent",))) == whole


def test_equal_seconds_share_a_rank(known):
    """With ranks 1.5 and 1.5 the order of the rows does not matter; known order 1, 2, 3 gives √3/2."""
    first = known["tables"][0]
    tied = [replace(first, step=replace(first.step, parts={"": predicted}), run=replace(first.run, seconds=seconds))
            for predicted, seconds in ((1.0, 1.0), (1.0, 2.0), (3.0, 3.0))]  # fmt: skip
    assert [one.step.seconds for one in tied] == [1.0, 1.0, 3.0]
    for rows in itertools.permutations(tied):
        assert against.rank_correlation(rows) == pytest.approx(math.sqrt(3) / 2)
    assert against.rank_correlation(tied[:2]) is None


def test_against_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "runs.png"
    assert cli.main(["plan", "--against", str(FOLDER / "tables.csv"), "--picture", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "step time" in shown
    assert "predicted to fit" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["plan", "--against", str(own(tmp_path)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (row,) = told["runs"]
    assert row["error"] == pytest.approx(row["predicted_seconds"] / row["seconds"] - 1)
    assert told["summary"]["time"]["runs"] == 1


def test_search_and_explain_agree(capsys):
    job = ["--model", "llama3-8b", "--gpus", "16", "--hosts", "2", "--gpu", "H100", "--link", "infiniband-8x400g",
           "--sequence", "8192", "--per-step", "64"]  # fmt: skip
    assert cli.main(["plan", "--search", *job, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    said = {True: "yes", False: "no"}
    asked = ",".join(
        f"{name}={'+'.join(value) if isinstance(value, list) else said[value] if isinstance(value, bool) else value}"
        for name, value in best["layout"].items()
    )
    assert cli.main(["plan", "--explain", asked, *job, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"] == pytest.approx(best["seconds"])
    assert math.isclose(sum(told["parts"].values()), told["seconds"])
    assert set(told["parts"]) <= set(told["reasons"])
    assert cli.main(["plan", "--explain", "tp=2", *job]) == 0
    assert "TFLOP/s" in capsys.readouterr().out
    assert cli.main(["plan", "--search", *job]) == 0
    shown = capsys.readouterr().out
    assert "layouts divide it" in shown
    assert says(shown, "links", "between")


def test_a_search_where_nothing_fits_says_what_is_least(capsys):
    job = ["--model", "llama3-70b", "--gpus", "8", "--gpu", "4090", "--sequence", "8192"]
    assert cli.main(["plan", "--search", *job]) == 1
    assert says(capsys.readouterr().out, "nothing", "least")
