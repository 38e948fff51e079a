"""The rows of growth, on sizes that take no time: which there are, in which unit, and what they are made of."""

import json

import pytest
from conftest import says

from pardemo.bench import growth, notebook_parts, ring
from pardemo.claims import read


def shown(rows):
    """name -> unit and target."""
    return {row.name: (row.unit, row.target) for row in rows}


def test_ranks_are_timed_with_three_all_reduces(world_of, monkeypatch):
    monkeypatch.setattr(growth, "RING_BYTES", 1 << 12)
    monkeypatch.setattr(growth, "RING_ROUNDS", 2)
    monkeypatch.setattr("pardemo.project.available_cores", lambda: 2)
    crowded = growth.of_ranks(world_of(4), 4)
    assert shown(crowded) == {"growth.ring.n4": ("s", None), "growth.server.n4": ("s", None)}
    assert all(row.note == "gloo all_reduce of 4 KiB; 4 ranks share 2 cores" for row in crowded)
    assert [row.note for row in growth.of_ranks(world_of(2), 2)] == ["gloo all_reduce of 4 KiB"] * 2
    assert growth.RANKS == (2, 4, 8, 16)


def test_a_search_is_held_against_linear_growth(monkeypatch):
    took = {(20, 8): 1.0, (80, 8): 2.0, (80, 32): 16.0}
    monkeypatch.setattr(growth, "GPUS", 8)
    monkeypatch.setattr(growth, "_search_s", lambda job: (took[job.shape.layers, job.machine.gpus], 7))
    layers, gpus = growth._planner()
    assert shown([layers, gpus]) == {"growth.plan.layers": ("s", 1.0), "growth.plan.gpus": ("s", 1.0)}
    assert (layers.ours, layers.peer, layers.met) == (2.0, 4.0, True)
    assert (gpus.ours, gpus.peer, gpus.met) == (16.0, 8.0, False)


def test_a_search_says_how_many_layouts_it_looked_at(monkeypatch):
    monkeypatch.setattr(growth, "GPUS", 8)
    monkeypatch.setattr(growth, "PLAN_ROUNDS", 1)
    layers, gpus = growth._planner()
    assert says(layers.note, "80", "8", "GPUs", "4", "20")
    assert says(gpus.note, "80", "32", "GPUs", "4", "8", "GPUs")


def test_claims_are_booked_and_reported_by_chapters(monkeypatch, tmp_path):
    for name, value in {"EACH": 3, "CHAPTERS": 2, "MORE": 2, "ONE_CHAPTER": 4, "REPORT_ROUNDS": 1}.items():
        monkeypatch.setattr(growth, name, value)
    assert shown(growth._ledger()) == {
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
    rows = growth._data()
    assert shown(rows) == {"growth.data.120": ("s", 0.9), "growth.data.120.peak": ("MiB", 0.95)}
    growth.write_rows(tmp_path / "news", 100)
    lines = (tmp_path / "news" / "train.jsonl").read_text().splitlines()
    texts = {json.loads(line)["text"] for line in lines}
    assert len(lines) == len(texts) == 100, "no two alike: a duplicate is not chosen"


@pytest.mark.nightly
def test_a_chapters_seconds_are_told_apart():
    seconds = notebook_parts.once("vocabulary", forked=True)
    assert tuple(seconds) == notebook_parts.PARTS
    assert all(each > 0 for each in seconds.values())
    assert seconds["ranks"] < seconds["work"], "its Worlds start in tens of milliseconds"


def test_the_rows_of_the_chapters_are_their_parts(monkeypatch):
    parts = {"kernel": [1.0], "imports": [2.0], "ranks": [3.0], "work": [4.0]}
    cold = {part: [2 * each[0]] for part, each in parts.items()}
    monkeypatch.setattr(notebook_parts, "parts", lambda: (parts, cold))
    rows = growth._chapters()
    names = ["growth.chapters.kernel", "growth.chapters.imports", "growth.chapters.ranks", "growth.chapters.work"]
    assert shown(rows) == dict.fromkeys(names, ("s", None))
    assert [row.ratio for row in rows] == [2.0] * 4


@pytest.mark.parametrize(("nbytes", "rounds"), [(1 << 20, 0), (ring.BOUNDED, 1)])
def test_the_ring_is_timed_beside_the_bound_where_bytes_are_what_bounds_it(world_of, nbytes, rounds):
    for seconds in world_of(2).run(ring.alternate, nbytes, 1):
        assert {name: len(each) for name, each in seconds.items()} == {"ring": 1, "torch": 1, "work": rounds}
