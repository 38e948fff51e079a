"""Runs that stand still: the first call at which ranks part, the line of each, and who waits for whom are told."""

import csv
import json
import time
import tomllib
from importlib.util import find_spec

import pytest
from conftest import few, says

from pardemo import cli, measure, project
from pardemo.script.hangs import call_table, deadlock_watch, journal, standstill
from pardemo.script.hangs.journal import Journal

ZOO = project.PACKAGE.parent / "tests" / "zoo" / "hangs"
CASES = tomllib.loads((ZOO / "cases.toml").read_text())
#: The limit of a run, long after which none of these is told: a rank stands still for three seconds on a quiet machine.
LIMIT_S = 600.0


def line_of(name, piece):
    """``name.py:12``, of the only line that has this piece."""
    lines = [n for n, line in enumerate((ZOO / f"{name}.py").read_text().splitlines(), 1) if piece in line]
    assert len(lines) == 1, piece
    return f"{name}.py:{lines[0]}"


def failure(name, folder, *arguments, ranks=2, **options):
    with pytest.raises(measure.ScriptError) as caught:
        measure.script(f"{name}.py", arguments, ranks=ranks, folder=folder, steps=1, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_each_case_is_a_script_and_each_script_a_case():
    assert set(CASES) == {path.stem for path in ZOO.glob("*.py")}
    assert len(CASES) >= 10
    for name, case in CASES.items():
        text = (ZOO / f"{name}.py").read_text()
        assert case["thread"] in text, f"{name} names its thread"
        assert 15 <= len(text.splitlines()) <= 50


@pytest.mark.parametrize("name", few(CASES, 0, 3, 6, 9))
def test_what_is_told(name):
    case, began = CASES[name], time.monotonic()
    error = failure(name, ZOO, ranks=case["ranks"])
    assert time.monotonic() - began < LIMIT_S
    said, still = str(error), error.standstill
    assert says(said, "ranks", "part")
    assert ("died: killed by SIGABRT" in said) == (case["end"] == "died")
    assert bool(still.stuck) >= (case["end"] == "stuck")

    here = {str(rank): call.line if call else "" for rank, call in still.first.calls.items()}
    if "at_one_of" in case:  # both wait since the same moment: either call may be the first
        lines = {rank: line_of(name, piece) for rank, piece in case["at_one_of"].items()}
        assert any(here == {rank: at if rank == only else "" for rank, at in lines.items()} for only in lines)
        where = lines
    else:
        where = {rank: line_of(name, piece) if piece else "" for rank, piece in case["at"].items()}
        assert here == where
        assert {r: call.kind for r, call in still.first.calls.items() if call} == numbers(case["kinds"])
    for line in filter(None, where.values()):
        assert f"at {line}" in said
        assert line in still.details

    assert {one.rank: list(one.waits_for) for one in still.waits} == numbers(case["waits"])
    for rank, others in case["waits"].items():
        assert waited(said, int(rank), others), said
    assert all(0 <= one.since_s < LIMIT_S for one in still.waits)
    for rank, module in case.get("modules", {}).items():
        assert still.first.calls[int(rank)].module == module
        assert f"({module})" in said
    for rank, step in case.get("steps", {}).items():
        assert still.first.calls[int(rank)].step == step
        assert f", in step {step + 1}" in said
    assert {str(rank): one.text[: len(case["raised"][str(rank)])] for rank, one in still.raised.items()} == case.get(
        "raised", {}
    )
    for rank, text in case.get("raised", {}).items():
        assert f"; rank {rank} went on after {text}" in said


@pytest.mark.parametrize("name", few(CASES, 0, 6))
def test_mended_it_runs(name):
    measured = measure.script(f"{name}.py", ["--mended"], ranks=CASES[name]["ranks"], folder=ZOO, steps=1)
    assert (measured.ended, measured.steps) == ("enough", 1)


def numbers(by_text):
    """TOML's keys are texts."""
    return {int(rank): value for rank, value in by_text.items()}


def waited(said, rank, others):
    """Whether the line says that a rank, alone or with some more, has waited for the others."""
    for part in said.replace(", rank", "; rank").split("; "):
        who, _, whom = part.partition(" waited for ")
        if whom and str(rank) in who and all(str(other) in whom.rpartition(" for ")[0] for other in others):
            return True
    return False


def write(folder, source):
    (folder / "made.py").write_text("import os, sys, time, torch, torch.distributed as dist\n" + source)
    return "made"


def test_a_rank_that_computes_or_sleeps_is_not_given_up(tmp_path):
    """Rank 1 waits for longer than ranks may stand still, while rank 0 multiplies, sleeps, and has begun a sum."""
    source = """
dist.init_process_group("gloo")
group = dist.new_group([0, 1])
if dist.get_rank() == 0:
    until = time.monotonic() + 6
    while time.monotonic() < until:
        torch.ones(200, 200) @ torch.ones(200, 200)
    begun = dist.all_reduce(torch.ones(4), async_op=True)
    time.sleep(6)
    dist.barrier(group=group)
    begun.wait()
else:
    dist.barrier(group=group)
    dist.all_reduce(torch.ones(4))
print("all have come")
"""
    said = str(failure(write(tmp_path, source), tmp_path))
    assert says(said, "made.py")


def test_a_rank_that_has_ended_is_told_of(tmp_path):
    source = """
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.broadcast_object_list([None], 1)  # here
"""
    error = failure(write(tmp_path, source), tmp_path)
    assert says(str(error), "0", "1", "0", "1", "8", "made.py:5", "1")
    assert says(str(error), "0", "waited", "1")


def test_a_rank_that_raised_and_one_whose_own_limit_was_over(tmp_path):
    source = """
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("no data")
dist.barrier()
"""
    error = failure(write(tmp_path, source), tmp_path)
    assert says(str(error), "made.py", "1", "ValueError", "made.py:5", "0", "1")
    assert error.standstill.does[1] == "it raised ValueError: no data, at made.py:5"
    source = """
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(20)
dist.all_reduce(torch.ones(4))
"""
    error = failure(write(tmp_path, source), tmp_path)
    assert "rank 0 raised RuntimeError" in str(error)
    (wait,) = error.standstill.waits
    assert (wait.rank, wait.waits_for, wait.call.line, wait.call.state) == (0, (1,), "made.py:8", "failed")
    assert 1.5 < wait.since_s < 10


def test_the_log_of_a_run_that_failed_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ZOO)
    out = tmp_path / "out"
    assert cli.main(["measure", "--ranks", "2", "--json", "--out", str(out), "--", "other_order.py"]) == 2
    printed = capsys.readouterr()
    line, *table = printed.err[printed.err.index("pardemo measure: ") :].splitlines()
    assert says(line, "other_order.py", "1")
    assert [row.split()[0] for row in table] == ["ranks", "0", "1"]
    told = json.loads(printed.out)
    assert told == json.loads((out / "standstill.json").read_text())
    assert f"pardemo measure: {told['error']}" == line
    assert {one["rank"]: one["waits_for"] for one in told["standstill"]["waits"]} == {0: [1], 1: [0]}
    with (out / "calls.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    waiting = [row for row in rows if row["state"] == "waits"]
    assert {row["rank"] for row in waiting} == {"0", "1"}
    assert {(row["kind"], row["shape"], row["dtype"], row["bytes"]) for row in waiting} == {
        ("all-reduce", "100", "float32", "400")
    }
    assert {row["line"] for row in waiting} == {
        line_of("other_order", f"group={one}") for one in ("shards", "replicas")
    }
    assert all(float(row["end_s"]) >= float(row["begin_s"]) for row in rows if row["state"] == "over")
    for rank in "01":
        assert [int(row["call"]) for row in rows if row["rank"] == rank] == list(range(len(rows) // 2))


def test_the_log_of_a_run_that_went_well_is_kept_as_well(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ZOO)
    line = ["measure", "--ranks", "2", "--steps", "1", "--out", str(tmp_path), "--", "pipeline_targets.py", "--mended"]
    assert cli.main(line) == 0
    with (tmp_path / "calls.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["state"] for row in rows} == {"over"}, "messages, too, are over when somebody has waited for them"
    assert {row["kind"] for row in rows} == {"new_group", "send", "receive"}


# ---------------------------------------------------------------------------------------------- logs written by hand


def logs(tmp_path, *calls, ended=()):
    """Logs of ranks, each call as (rank, kind, ranks, number, over, place …)."""
    journals = {rank: Journal(str(tmp_path / f"rank{rank}")) for rank in {call[0] for call in calls} | set(ended)}
    counts = dict.fromkeys(journals, 0)
    for at_s, (rank, kind, ranks, number, over, *place) in enumerate(calls):
        line, module, step, group = [*place, *("a.py:1", "", 0, "0")[len(place) :]]
        what = (kind, ranks, number, group, 8, (2,), "float32", line, module, "backward", step, float(at_s))
        journals[rank].begins(counts[rank], *what)
        if over:
            journals[rank].over(counts[rank], at_s + 0.5)
        counts[rank] += 1
    for rank in ended:
        journals[rank].ends("end")
    return journal.read_logs(tmp_path)


def test_who_is_stuck(tmp_path):
    def stuck(name, *calls, ended=()):
        (tmp_path / name).mkdir()
        return call_table.deadlocked_ranks(logs(tmp_path / name, *calls, ended=ended))

    pair, three = (0, 1), (0, 1, 2)
    assert stuck("computes", (0, "barrier", pair, 0, False), (1, "barrier", (1, 2), 0, True)) == []
    assert stuck("ended", (0, "barrier", pair, 0, False), ended=[1]) == [0]
    assert stuck("under way", (0, "barrier", pair, 0, False), (1, "barrier", pair, 0, False)) == []
    circle = [(0, "barrier", pair, 0, False), (1, "barrier", (1, 2), 0, False), (2, "barrier", (0, 2), 0, False)]
    assert stuck("circle", *circle) == [0, 1, 2]
    assert stuck("chain", *circle[:2]) == [], "rank 2 may yet come"
    assert stuck("chain to the end", *circle[:2], ended=[2]) == [0, 1]
    assert stuck("one of two", (0, "barrier", pair, 0, False), (0, "barrier", (0, 2), 0, False), ended=[1]) == [], (
        "rank 0 may wait in the other one"
    )
    other = [(0, "barrier", pair, 0, False), (1, "broadcast", pair, 0, False)]
    assert stuck("another call", *other) == [0, 1]
    message = (0, 1)
    taken = [(0, "send", message, 0, False), (1, "receive", message, 0, True), (0, "barrier", three, 0, False)]
    assert stuck("nobody waited for a send", *taken, ended=[2]) == [0]
    sent = [(0, "send", message, 0, False), (1, "receive", message, 0, False), (0, "barrier", three, 0, False)]
    assert stuck("a message under way", *sent, ended=[2]) == []
    assert stuck("of any rank", (1, "receive", (-1, 1), 0, False), (0, "barrier", three, 0, False), ended=[2]) == [0, 1]
    assert stuck("of any that computes", (1, "receive", (-1, 1), 0, False), (0, "barrier", three, 0, True)) == []


def test_places_tell_where_calls_that_fit_part(tmp_path):
    """FSDP2's units of equal size: rank 1 leaves out a layer, and its gathers fit those of the next ones."""
    pair, calls = (0, 1), []
    for number, layer in enumerate("012"):
        calls.append((0, "all-gather", pair, number, True, "a.py:1", f"layers.{layer}"))
    for number, layer in enumerate("02"):
        calls.append((1, "all-gather", pair, number, True, "a.py:1", f"layers.{layer}"))
    calls[2] = (0, "all-gather", pair, 2, False, "a.py:1", "layers.2")
    told = standstill.standstill_of(logs(tmp_path, *calls, ended=[1]), 10.0)
    assert told.first.number == 1
    assert {rank: call.module for rank, call in told.first.calls.items()} == {0: "layers.1", 1: "layers.2"}
    assert [(one.rank, one.waits_for, one.since_s) for one in told.waits] == [(0, (1,), 8.0)]


def test_a_root_that_scatters_has_more_than_the_others(tmp_path):
    """A DTensor is cut, and both ranks raise after it: they do not part there."""
    for rank, nbytes in ((0, 7200), (1, 3600)):
        own = Journal(str(tmp_path / f"rank{rank}"))
        own.begins(0, "scatter", (0, 1), 0, "0", nbytes, (nbytes // 8,), "float64", "a.py:1", "", "", 0, 0.0)
        own.over(0, 0.5)
        own.ends("end")
    assert standstill.standstill_of(journal.read_logs(tmp_path), 10.0).first is None


def test_branches_that_call_from_lines_of_their_own_do_not_part(tmp_path):
    pair = (0, 1)
    calls = [(0, "broadcast", pair, n, n < 3, "a.py:1") for n in range(4)]
    calls += [(1, "broadcast", pair, n, True, "a.py:2") for n in range(3)]
    assert standstill.standstill_of(logs(tmp_path, *calls, ended=[1]), 10.0).first.number == 3


def test_many_ranks_share_a_line(tmp_path):
    everybody = tuple(range(8))
    calls = [(rank, "barrier", everybody, 0, False, "a.py:7") for rank in everybody if rank != 5]
    told = standstill.standstill_of(logs(tmp_path, *calls, ended=[5]), 10.0)
    assert says(told.line, "0–4", "6", "7", "barrier", "1", "0–7", "8", "a.py:7", "5")
    assert len(told.details.splitlines()) == 3


@pytest.mark.parametrize(
    ("stack", "waits"),
    [
        ('File "/x/torch/distributed/distributed_c10d.py", line 1 in barrier\n  File "/home/a.py", line 2', True),
        ('File "/x/torch/autograd/graph.py", line 1 in _engine_run_backward', True),
        (
            'File "/x/pardemo/script/runtime/stand_ins.py", line 1 in f\n  File "/x/torch/autograd/graph.py", line 1',
            True,
        ),
        ('File "/home/a.py", line 2 in <module>\n  File "/x/torch/distributed/run.py", line 2', False),
        (
            'File "/pardemo/script/step/layer_padding.py", line 2 in wait\n  File "/x/torch/autograd/graph.py", line 1',
            False,
        ),
        ('File "/x/torch/utils/data/dataloader.py", line 2 in __next__', False),
        ("", False),
    ],
)
def test_where_a_rank_waits(stack, waits):
    assert deadlock_watch.is_waiting(f"Thread 1 (most recent call first):\n  {stack}" if stack else "") == waits


@pytest.mark.parametrize("name", [deadlock_watch.WAITS, *deadlock_watch.AROUND_TORCH])
def test_modules_that_a_stack_is_searched_for_exist(name):
    assert find_spec(name)
