"""The speed table of several runs: medians, ranges, when a target counts as met, and what is refused."""

import json
from dataclasses import asdict

import pytest
from bench import runs, table
from conftest import says

from pardemo import cli, project

MACHINE = {"cores": 2, "device": "cpu"}


def row(name="quick", ratio=1.0, target=1.0, within=None, unit="s", note="the peer"):
    """A row as ``pardemo bench --json`` prints it, with 2 / ratio seconds against 2."""
    met = table.is_met(ratio, target, within)
    made = table.BenchRow(name, 2 / ratio, 2.0, unit, ratio, (0.9 * ratio, 1.1 * ratio), target, met, note, within)
    return asdict(made)


def added(folder, *ratios, **what):
    """The table's one row after as many runs, a day apart."""
    for day, ratio in enumerate(ratios, start=1):
        made = runs.add(folder, [row(ratio=ratio, **what)], f"2026-11-{day:02}", f"rev{day}", MACHINE)
    return made[0]


def test_a_row_is_the_median_of_its_runs_with_their_range(tmp_path):
    made = added(tmp_path, 1.0, 4.0, 2.0)
    assert (made.ratio, made.range, made.runs) == (2.0, (1.0, 4.0), 3)
    assert (made.ours, made.peer) == (1.0, 2.0)
    assert made.spread == pytest.approx((1.8, 2.2))
    assert json.loads((tmp_path / "bench.json").read_text()) == [json.loads(json.dumps(asdict(made)))]


@pytest.mark.parametrize(
    ("hits", "of", "met"),
    [(5, 5, True), (4, 5, True), (3, 5, False), (5, 6, True), (5, 7, False), (8, 10, True), (7, 10, False)],
)  # fmt: skip
def test_a_target_is_met_in_at_least_four_of_five_runs(hits, of, met, tmp_path):
    made = added(tmp_path, *(2 + k / 100 for k in range(hits)), *(0.5 + k / 100 for k in range(of - hits)))
    assert (made.met, made.met_in, made.runs) == (met, hits, of)
    assert f"in {hits} of {of}" in (text := table.as_text([made]))
    assert ("NO" in text) is not met


@pytest.mark.parametrize(("hits", "of"), [(1, 1), (0, 1), (3, 4), (4, 4)])
def test_a_target_is_open_until_there_are_runs_of_five_days(hits, of, tmp_path):
    made = added(tmp_path, *(2 + k / 100 for k in range(hits)), *(0.5 + k / 100 for k in range(of - hits)))
    assert (made.met, made.met_in, made.runs, made.days) == (None, hits, of, of)
    text = table.as_text([made])
    assert f"open: in {hits} of {of}, {of} of 5 days" in text
    assert "NO" not in text


def test_a_row_that_older_runs_meet_says_that_the_newest_one_does_not(tmp_path):
    made = added(tmp_path, 2.0, 2.1, 2.2, 2.3, 0.9)
    assert (made.met, made.newest) == (True, 0.9)
    assert says(table.as_text([made]), "4", "5", "newest", "0.90")
    made = runs.add(tmp_path, [row(ratio=2.4)], "2026-11-06", "rev6", MACHINE)[0]
    assert made.newest == 2.4
    assert "newest" not in table.as_text([made])


def test_runs_of_one_day_count_as_runs_of_one_day(tmp_path):
    for number in range(7):
        made = runs.add(tmp_path, [row(ratio=2 + number)], "2026-11-01", f"rev{number}", MACHINE)[0]
    assert (made.met, made.met_in, made.runs, made.days) == (None, 7, 7, 1)
    for day in range(2, 6):
        made = runs.add(tmp_path, [row(ratio=2 + day / 10)], f"2026-11-{day:02}", f"day{day}", MACHINE)[0]
        assert made.met is (True if day == 5 else None)


def test_a_median_above_the_target_does_not_meet_it(tmp_path):
    """It is the number of runs that counts: a row that misses two of five is not met, however good the others are."""
    made = added(tmp_path, 0.9, 0.8, 3.0, 3.1, 3.2)
    assert made.ratio > made.target
    assert made.met is False


def test_what_is_to_be_the_same_is_judged_so_in_each_run(tmp_path):
    made = added(tmp_path, 0.9, 1.0, 1.1, 1.04, 0.96, within=0.05)
    assert (made.met, made.met_in) == (False, 3)


def test_a_row_that_only_informs_is_neither_met_nor_missed(tmp_path):
    made = added(tmp_path, 0.1, 0.2, target=None)
    assert (made.met, made.met_in, made.runs) == (None, None, 2)
    assert "in " not in table.as_text([made]).splitlines()[-1].partition("the peer")[0]


def test_rows_that_some_runs_have_are_made_of_those_and_keep_their_places(tmp_path):
    runs.add(tmp_path, [row("a"), row("b", 2.0), row("d")], "2026-11-01", "rev1", MACHINE)
    runs.add(tmp_path, [row("c", 3.0), row("d", 3.0)], "2026-11-02", "rev2", MACHINE)
    made = runs.add(tmp_path, [row("a", 3.0), row("new", 5.0)], "2026-11-03", "rev3", MACHINE)
    assert sorted((each.name, each.runs) for each in made) == [("a", 2), ("b", 1), ("c", 1), ("d", 2), ("new", 1)]
    names = [each.name for each in made]
    assert names.index("a") < names.index("b") < names.index("d")
    assert names.index("c") < names.index("d")


def test_the_newest_run_says_what_is_asked_and_all_are_judged_by_it(tmp_path):
    added(tmp_path, 1.2, 1.3)
    made = runs.add(tmp_path, [row(ratio=1.4, target=1.25, note="a new peer")], "2026-11-09", "rev3", MACHINE)[0]
    assert (made.target, made.met_in, made.note) == (1.25, 2, "a new peer")
    older = runs.add(tmp_path, [row(ratio=1.5, target=1.0, note="an old peer")], "2026-10-01", "rev0", MACHINE)[0]
    assert (older.target, older.met_in, older.note) == (1.25, 3, "a new peer")


def test_a_run_keeps_its_date_its_machine_and_its_revision_on_lines_of_their_own(tmp_path):
    added(tmp_path, 1.0)
    before = (tmp_path / runs.RUNS).read_text().splitlines()
    runs.add(tmp_path, [row(ratio=2.0)], "2026-11-02", "rev2", MACHINE)
    text = (tmp_path / runs.RUNS).read_text()
    assert [run["date"] for run in json.loads(text)["runs"]] == ["2026-11-01", "2026-11-02"]
    assert json.loads(text)["runs"][1]["machine"] == MACHINE
    assert json.loads(text)["runs"][1]["revision"] == "rev2"
    gone = [line for line in before if line not in text.splitlines()]
    assert gone == [], "another run adds lines and changes none"


@pytest.mark.parametrize(
    ("rows", "date", "told"),
    [
        ([row(ratio=2.0)], "27.11.2026", "a date looks like 2026-11-27"),
        ([row(ratio=2.0), row(ratio=3.0)], "2026-11-02", "two of a name"),
        ([], "2026-11-02", "no row"),
        ({"name": "quick"}, "2026-11-02", "a run is a list of rows"),
        ([{"name": "quick"}], "2026-11-02", "a run is a list of rows"),
        ([row(ratio=2.0, unit="B")], "2026-11-02", "was in s and is in B now: give it another name"),
        ([row(ratio=1.0)], "2026-11-02", "is among those of"),
    ],
)
def test_what_is_no_run_is_refused_and_changes_nothing(rows, date, told, tmp_path):
    added(tmp_path, 1.0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=told):
        runs.add(tmp_path, rows, date, "rev2", MACHINE)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_command_adds_a_run_and_prints_the_table(tmp_path, capsys):
    machine, run, to = tmp_path / "machine.json", tmp_path / "run.json", tmp_path / "to"
    machine.write_text(json.dumps(MACHINE))
    to.mkdir()
    more = ["--to", str(to), "--machine", str(machine), "--revision", "rev"]
    for day, (ratio, status) in enumerate([(2.0, 0), (0.5, 0), (2.1, 0), (2.2, 0), (0.6, 1)], start=1):
        run.write_text(json.dumps([row(ratio=ratio)]))
        assert cli.main(["bench", "--add", str(run), "--date", f"2026-11-{day:02}", *more]) == status
        assert ("NO, in 3 of 5" if status else f"{day} of 5 days") in capsys.readouterr().out
    run.write_text(json.dumps([row(ratio=3.0)]))
    assert cli.main(["bench", "--add", str(run), "--date", "2026-11-06", "--json", *more]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((to / "bench.json").read_text())
    assert {"name", "ours", "peer", "unit", "ratio", "spread", "target", "met", "note", "within"} < set(printed[0])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ring", "--add", "run.json"], "ring would be measured"),
        (["ring", "--date", "2026-11-01"], "--date without --add"),
        (["--add", "run.json", "--to", "nowhere"], "nowhere is no folder"),
        (["--add", "run.json", "--to", "."], "run.json"),
    ],
)
def test_the_command_refuses_what_does_not_go_together(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 2
    assert told in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def test_the_committed_table_is_that_of_the_committed_runs():
    folder = project.root() / "outputs" / "reference"
    kept = json.loads((folder / runs.RUNS).read_text())
    made = [json.loads(json.dumps(asdict(each))) for each in runs.table(kept)]
    assert json.loads((folder / runs.TABLE).read_text()) == made
