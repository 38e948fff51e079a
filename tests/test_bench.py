"""The speed table: its rows on sizes that take no time, and what is made of several runs of it."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from bench import bound, collectives, growth, processes, runs, table
from conftest import says

from pardemo import WireMeter, cli, project

MACHINE = {"cores": 2, "device": "cpu"}


def test_a_row_is_the_ratio_of_medians():
    row = table.compare("x", [1.0, 2.0, 10.0], [4.0, 4.0, 4.0], "s", 2.0)
    assert (row.ours, row.peer, row.ratio, row.met) == (2.0, 4.0, 2.0, True)
    assert row.spread[0] < 2 < row.spread[1]
    assert table.compare("x", [2.0], [1.0], "s", 1.0).met is False
    assert table.compare("x", [2.0], [1.0], "s", None).met is None
    for peer, met in ((0.957, False), (0.992, True), (1.008, True), (1.043, False)):
        assert table.compare("loss", [1.0], [peer], "nats", 1.0, within=0.01).met is met


def test_ways_are_measured_by_turns_and_what_is_around_them_is_not():
    calls = []
    ways = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = table.by_turns(ways, 2, warm=1, before=lambda: calls.append("<"), after=lambda name: calls.append(name))
    assert "".join(calls) == "<aa<bb<bb<aa<aa<bb", "every second round begins with the last"
    assert {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2}
    assert table.slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 5.0]}


def test_the_command_measures_and_prints(capsys, monkeypatch):
    assert cli.main(["bench", "warp"]) == 2
    assert says(capsys.readouterr().err, "warp", "cluster", "pipeline")
    monkeypatch.setattr(processes.importing, "__defaults__", (1,))
    assert cli.main(["bench", "import", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"name", "ours", "peer", "unit", "ratio", "spread", "target", "met", "note", "within"} == set(rows[0])
    assert (rows[0]["name"], rows[0]["met"]) == ("import", True)
    missed = table.BenchRow("slow", 2.0, 1.0, "s", 0.5, (0.4, 0.6), 1.0, False)
    monkeypatch.setattr(table, "run", lambda names, on_start: [missed])
    assert cli.main(["bench"]) == 1
    assert "NO" in capsys.readouterr().out
    assert all(callable(table.function_of(name)) for name in table.BENCHES)


@pytest.mark.parametrize(("nbytes", "rounds"), [(1 << 20, 0), (collectives.BOUNDED, 1)])
def test_the_ring_is_timed_beside_the_bound_where_bytes_are_what_bounds_it(world_of, nbytes, rounds):
    for seconds in world_of(2).run(collectives.all_reduces, nbytes, 1, ("ring", "torch", "work")):
        assert {name: len(each) for name, each in seconds.items()} == {"ring": 1, "torch": 1, "work": rounds}


def the_bounds_work(nbytes):
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((nbytes // 4,), rank + 1.0)
    with bound.to_itself() as (out, into), WireMeter() as wire:
        seconds = bound.work(out, into, tensor, size)
    written = int((tensor == 0).sum())  # by what arrived, which is zeros
    return wire.sent_bytes, wire.received_bytes, written, seconds


def test_the_bound_of_an_all_reduce_moves_its_bytes_and_no_more(world_of):
    """With fewer bytes it would be a bound that nobody can reach, with more one that can be beaten."""
    nbytes = 4 << 20
    half = 3 / 4 * nbytes
    for sent, received, written, seconds in world_of(4).run(the_bounds_work, nbytes):
        assert sent == pytest.approx(2 * half, rel=0.005)  # the meter's barrier is below
        assert received == pytest.approx(2 * half, rel=0.005)
        assert 4 * written == half
        assert seconds > 0
    assert bound.seconds([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], cores=3) == [3.0, 4.0]


@pytest.mark.parametrize(
    ("bench", "sizes", "rows"),
    [
        (growth.of_ranks, {"RANKS": (2,), "RING_BYTES": 1 << 12, "RING_ROUNDS": 2},
         {"growth.ring.n2": ("s", None), "growth.server.n2": ("s", None)}),
        (growth.of_planner, {"GPUS": 8, "PLAN_ROUNDS": 1},
         {"growth.plan.layers": ("s", 1.0), "growth.plan.gpus": ("s", 1.0)}),
        (growth.of_claims, {"EACH": 3, "CHAPTERS": 2, "MORE": 2, "ONE_CHAPTER": 4, "REPORT_ROUNDS": 1},
         {"growth.ledger": ("s", 0.9), "growth.ledger.one_chapter": ("s", None), "growth.report": ("s", 0.9)}),
        (growth.of_data, {"FEW": 60, "MANY": 120, "KEPT": 40},
         {"growth.data.120": ("s", 0.9), "growth.data.120.peak": ("MiB", 0.95)}),
    ],
)  # fmt: skip
def test_growth_is_measured_on_small_sizes(bench, sizes, rows, monkeypatch):
    for name, value in sizes.items():
        monkeypatch.setattr(growth, name, value)
    assert {row.name: (row.unit, row.target) for row in bench()} == rows


# --- the table of several runs


def row(ratio=1.0, target=1.0, unit="s", note="the peer"):
    """A row as ``pardemo bench --json`` prints it, with 2 / ratio seconds against 2."""
    met = table.is_met(ratio, target, None)
    return asdict(table.BenchRow("quick", 2 / ratio, 2.0, unit, ratio, (0.9 * ratio, 1.1 * ratio), target, met, note))


def added(folder, *ratios, **what):
    """The table's one row after as many runs, a day apart."""
    for day, ratio in enumerate(ratios, start=1):
        made = runs.add(folder, [row(ratio, **what)], f"2026-11-{day:02}", f"rev{day}", MACHINE)
    return made[0]


def test_a_row_is_the_median_of_its_runs_with_their_range(tmp_path):
    made = added(tmp_path, 1.0, 4.0, 2.0)
    assert (made.ratio, made.range, made.runs) == (2.0, (1.0, 4.0), 3)
    assert (made.ours, made.peer) == (1.0, 2.0)
    assert made.spread == pytest.approx((1.8, 2.2))
    assert json.loads((tmp_path / "bench.json").read_text()) == [json.loads(json.dumps(asdict(made)))]


@pytest.mark.parametrize(("hits", "of", "met"), [(4, 5, True), (3, 5, False), (5, 7, False), (4, 4, None)])
def test_a_target_is_met_in_at_least_four_of_five_runs_of_five_days(hits, of, met, tmp_path):
    made = added(tmp_path, *(2 + k / 100 for k in range(hits)), *(0.5 + k / 100 for k in range(of - hits)))
    assert (made.met, made.met_in, made.days) == (met, hits, of)
    assert ("NO" in table.as_text([made])) is (met is False)
    assert ("open" in table.as_text([made])) is (met is None)


def test_the_newest_run_says_what_is_asked_and_whether_it_meets_that(tmp_path):
    made = added(tmp_path, 2.0, 2.1, 2.2, 2.3, 0.9)
    assert (made.met, made.newest) == (True, 0.9)
    assert says(table.as_text([made]), "4", "5", "newest", "0.90")
    made = runs.add(tmp_path, [row(2.25, 2.05, note="a new peer")], "2026-11-09", "rev6", MACHINE)[0]
    assert (made.target, made.met_in, made.note) == (2.05, 4, "a new peer")
    assert "newest" not in table.as_text([made])


@pytest.mark.parametrize(
    ("rows", "date", "told"),
    [
        ([row(2.0)], "27.11.2026", "a date looks like 2026-11-27"),
        ([row(2.0), row(3.0)], "2026-11-02", "two of a name"),
        ([], "2026-11-02", "no row"),
        ([{"name": "quick"}], "2026-11-02", "a run is a list of rows"),
        ([row(2.0, unit="B")], "2026-11-02", "was in s and is in B now: give it another name"),
        ([row(1.0)], "2026-11-02", "is among those of"),
    ],
)
def test_what_is_no_run_is_refused_and_changes_nothing(rows, date, told, tmp_path):
    added(tmp_path, 1.0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=told):
        runs.add(tmp_path, rows, date, "rev2", MACHINE)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_command_adds_a_run_and_prints_the_table(tmp_path, capsys):
    machine, run = tmp_path / "machine.json", tmp_path / "run.json"
    machine.write_text(json.dumps(MACHINE))
    more = ["--to", str(tmp_path), "--machine", str(machine), "--revision", "rev"]
    for day, (ratio, status) in enumerate([(2.0, 0), (0.5, 0), (2.1, 0), (2.2, 0), (0.6, 1)], start=1):
        run.write_text(json.dumps([row(ratio)]))
        assert cli.main(["bench", "--add", str(run), "--date", f"2026-11-{day:02}", *more]) == status
        assert ("NO, in 3 of 5" if status else f"{day} of 5 days") in capsys.readouterr().out
    assert cli.main(["bench", "ring", "--add", str(run), "--date", "2026-11-06"]) == 2
    assert "ring would be measured" in capsys.readouterr().err


def test_the_committed_table_is_that_of_the_committed_runs():
    folder = project.root() / "outputs" / "reference"
    kept = json.loads((folder / runs.RUNS).read_text())
    made = [json.loads(json.dumps(asdict(each))) for each in runs.table(kept)]
    assert json.loads((folder / runs.TABLE).read_text()) == made
