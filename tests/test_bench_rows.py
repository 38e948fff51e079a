"""The rows of the speed table, on sizes that take no time: which there are, in which unit, what they are made of."""

import json

import pytest
import torch
import torch.distributed as dist
from bench import bound, collectives, growth, processes, table
from conftest import says

from pardemo import WireMeter, cli, project
from pardemo.claims import read


def shown(rows):
    """name -> unit and target."""
    return {row.name: (row.unit, row.target) for row in rows}


def test_a_row_is_the_ratio_of_medians():
    row = table.compare("x", [1.0, 2.0, 10.0], [4.0, 4.0, 4.0], "s", 2.0)
    assert (row.ours, row.peer, row.ratio, row.met) == (2.0, 4.0, 2.0, True)
    assert row.spread[0] < 2 < row.spread[1]
    assert table.compare("x", [2.0], [1.0], "s", 1.0).met is False
    assert table.compare("x", [2.0], [1.0], "s", None).met is None


@pytest.mark.parametrize(("peer", "met"), [(0.957, False), (0.992, True), (1.0, True), (1.008, True), (1.043, False)])
def test_what_is_to_be_the_same_is_neither_lower_nor_higher(peer, met):
    row = table.compare("loss", [1.0, 1.0], [peer, peer], "nats", 1.0, within=0.01)
    assert row.met is met
    assert "1 ± 0.01" in table.as_text([row])


def test_ways_are_measured_by_turns_and_what_is_around_them_is_not():
    calls = []
    ways = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = table.by_turns(ways, 2, warm=1, before=lambda: calls.append("<"), after=lambda name: calls.append(name))
    assert "".join(calls) == "<aa<bb<bb<aa<aa<bb", "every second round begins with the last"
    assert {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2}


def test_a_round_takes_as_long_as_its_slowest_rank():
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


def test_every_bench_is_there():
    for name in table.BENCHES:
        assert callable(table.function_of(name)), name


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


@pytest.mark.parametrize("size", [2, 4])
def test_the_bound_of_an_all_reduce_moves_its_bytes_and_no_more(world_of, size):
    """With fewer bytes it would be a bound that nobody can reach, with more one that can be beaten."""
    nbytes = 4 << 20
    half = (size - 1) / size * nbytes
    for sent, received, written, seconds in world_of(size).run(the_bounds_work, nbytes):
        assert sent == pytest.approx(2 * half, rel=0.005)  # the meter's barrier is below
        assert received == pytest.approx(2 * half, rel=0.005)
        assert 4 * written == half
        assert seconds > 0


def test_the_bound_shares_all_ranks_work_among_the_cores():
    assert bound.seconds([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], cores=3) == [3.0, 4.0]


def test_ranks_are_timed_with_three_all_reduces(monkeypatch):
    for name, value in {"RANKS": (2, 4), "RING_BYTES": 1 << 12, "RING_ROUNDS": 2}.items():
        monkeypatch.setattr(growth, name, value)
    monkeypatch.setattr(project, "available_cores", lambda: 2)
    rows = list(growth.of_ranks())
    assert shown(rows) == {f"growth.{way}.n{n}": ("s", None) for n in (2, 4) for way in ("ring", "server")}
    assert [row.note for row in rows[::2]] == [
        "gloo all_reduce of 4 KiB",
        "gloo all_reduce of 4 KiB; 4 ranks share 2 cores",
    ]


def test_a_search_is_held_against_linear_growth(monkeypatch):
    took = {(20, 8): 1.0, (80, 8): 2.0, (80, 32): 16.0}
    monkeypatch.setattr(growth, "GPUS", 8)
    monkeypatch.setattr(growth, "search_s", lambda job: (took[job.shape.layers, job.machine.gpus], 7))
    layers, gpus = growth.of_planner()
    assert shown([layers, gpus]) == {"growth.plan.layers": ("s", 1.0), "growth.plan.gpus": ("s", 1.0)}
    assert (layers.ours, layers.peer, layers.met) == (2.0, 4.0, True)
    assert (gpus.ours, gpus.peer, gpus.met) == (16.0, 8.0, False)


def test_a_search_says_how_many_layouts_it_looked_at(monkeypatch):
    monkeypatch.setattr(growth, "GPUS", 8)
    monkeypatch.setattr(growth, "PLAN_ROUNDS", 1)
    layers, gpus = growth.of_planner()
    assert says(layers.note, "80", "8", "GPUs", "4", "20")
    assert says(gpus.note, "80", "32", "GPUs", "4", "8", "GPUs")


def test_claims_are_booked_and_reported_by_chapters(monkeypatch, tmp_path):
    for name, value in {"EACH": 3, "CHAPTERS": 2, "MORE": 2, "ONE_CHAPTER": 4, "REPORT_ROUNDS": 1}.items():
        monkeypatch.setattr(growth, name, value)
    assert shown(growth.of_claims()) == {
        "growth.ledger": ("s", 0.9),
        "growth.ledger.one_chapter": ("s", None),
        "growth.report": ("s", 0.9),
    }
    assert growth.book(tmp_path, 2, 3) > 0
    booked = read(tmp_path)
    assert len({row["id"] for row in booked}) == len(booked) == 6
    assert {row["verdict"] for row in booked} == {"holds"}
    assert growth.report_s(tmp_path) > 0
    assert "6 claims" in (tmp_path / "report.html").read_text()


def test_data_is_built_of_so_many_rows_in_a_process_of_its_own(monkeypatch, tmp_path):
    for name, value in {"FEW": 60, "MANY": 120, "KEPT": 40}.items():
        monkeypatch.setattr(growth, name, value)
    assert shown(growth.of_data()) == {"growth.data.120": ("s", 0.9), "growth.data.120.peak": ("MiB", 0.95)}
    growth.write_rows(tmp_path / "news", 100)
    lines = (tmp_path / "news" / "train.jsonl").read_text().splitlines()
    texts = {json.loads(line)["text"] for line in lines}
    assert len(lines) == len(texts) == 100, "no two alike: a duplicate is not chosen"
