"""Faults at random: cases of each kind end as they should, what is left is noticed, and failures are reported."""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from conftest import few, says
from soak import command as soak_command
from soak import fork_server
from soak.case import Kind
from soak.report import COUNTED, Result

from pardemo import cli, project

SOAK = Path(soak_command.__file__).parent

#: Kinds and groups of which a case is run, in a process each, and the seed and cases; the gate has the first row. The
#: last rows are what runs once found: docs/soak.md says what was done about it.
RUN = [
    (["world", "ranks/raises", "ranks/sleeps"], 1, [0]),
    *(([group], 1, [0, 1]) for group in soak_command.GROUPS if group != "world"),
    (["world/refused port"], 1, [3, 4, 7]),
    (["finetune/damaged"], 1, [2]),
    (["ranks/no_sync"], 1, [100]),
    (["runner/ends"], 2, [2]),
    (["ranks/fewer batches"], 739_950, [7]),
]


@pytest.mark.parametrize(("only", "seed", "cases"), few(RUN))
def test_cases_end_as_they_should(only, seed, cases):
    """They are the same each time, but for when exactly a signal arrives."""
    command = ["--only", *only, "--case", *map(str, cases), "--seed", str(seed), "--json"]
    done = subprocess.run([sys.executable, "-m", "pardemo", "soak", *command], capture_output=True, text=True)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["failures"] == [], done.stderr
    assert told["injected"] + told["not_reached"] + told["skipped"] == len(told["kinds"]) * len(cases)
    assert set(only) <= {name for kind in told["kinds"] for name in (kind, kind.partition("/")[0])}
    if not told["injected"]:
        pytest.skip("; ".join(told["not_played"]))


@pytest.fixture(scope="module")
def samples():
    """Results of cases that leave something, or end as they should not, on purpose."""
    done = subprocess.run([sys.executable, SOAK / "samples.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["below"] == [], "what is left is ended"
    return [Result(**result) for result in told["results"]]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "due", "told"),
    [
        ("orphan", {"wrong": 1, "orphans": 1, "leaked_sockets": 1}, r"code 3.* sleep 600.* listener on port \d+ of"),
        ("files", {"leaked_folders": 2, "leaked_sockets": 1}, "unix socket s-.*temporary file left-.*shared memory"),
        ("sockets", {"leaked_sockets": 3}, r"listener on port (\d+); .*connection \d+ to \1; .*@soak-sample-"),
        ("hangs", {"hangs": 1}, "not over within its limit"),
        ("waits", {"lost_work": 1}, "lost: the work"),
        ("deaf", {"wrong": 1}, r"^the work went on for \d s after its signal"),
    ],
)
def test_what_is_left_and_what_is_wrong_is_counted(samples, kind, due, told):
    result = next(result for result in samples if result.kind == kind)
    expected = dict.fromkeys(COUNTED, 0) | due | {"injected": 1, "failed": 1}
    assert result.counts() == expected, result
    assert re.search(told, result.reasons), result.reasons
    assert kind != "hangs" or "in hangs" in result.told, "where it was"


@pytest.mark.nightly
def test_what_is_right_survives_and_what_has_seen_no_fault_is_counted_apart(samples):
    first, again = (result for result in samples if result.kind == "right")
    assert first.counts() == dict.fromkeys(COUNTED, 0) | {"injected": 1, "survived": 1}
    assert first.told == again.told, "the same each time"
    result = next(result for result in samples if result.kind == "skipped")
    assert (result.counts(), result.skipped) == (dict.fromkeys(COUNTED, 0) | {"skipped": 1}, "no rights")


WEIGHTS = {"world/a": 1, "world/b": 3, "finetune/e": 1}


def test_each_round_has_every_kind_as_often_as_its_weight_says():
    first, again, other = (list(islice(soak_command.endless(WEIGHTS, seed), 50)) for seed in (1, 1, 2))
    assert first == again != other
    for start in range(0, 50, 5):
        assert Counter(kind for kind, _ in first[start : start + 5]) == WEIGHTS
    assert [number for kind, number in first if kind == "world/a"] == list(range(10))


class Fake:
    """A fork server whose cases end as ``results`` says; all others as they should."""

    results: dict = {}  # noqa: RUF012

    def __init__(self, kinds, seed):
        self.ran = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, kind, number):
        self.ran.append((kind, number))
        return Result(kind, number, **self.results.get(kind, {"told": "fine", "seconds": 0.5}))


@pytest.fixture
def soak(monkeypatch, capsys):
    """Runs the command on fake cases: exit status, output, errors."""

    def load(groups):
        kinds = [Kind(name, print, weight=weight) for name, weight in WEIGHTS.items()]
        missing = {"runner": "the group runner needs nbformat"}
        return {kind.name: kind for kind in kinds}, missing if "runner" in groups else {}

    def called(*arguments, **results):
        monkeypatch.setattr(Fake, "results", {name.replace("_", "/"): result for name, result in results.items()})
        status = cli.main(["soak", *arguments])
        return status, *capsys.readouterr()

    monkeypatch.setattr(fork_server, "load", load)
    monkeypatch.setattr(fork_server, "ForkServer", Fake)
    return called


def test_so_many_faults_take_place_and_json_has_what_the_page_says(soak):
    status, out, _ = soak("--faults", "30", "--seed", "3", "--json", finetune_e={"skipped": "no room"})
    told = json.loads(out)
    assert status == 0
    assert set(told) == {*COUNTED, "seconds", "seed", "kinds", "failures", "not_played", "why_not_reached"}
    assert told["injected"] == told["survived"] == 30
    assert told["not_played"] == {"the group runner needs nbformat": ["runner"], "no room": ["finetune/e"]}
    page = (project.root() / "docs" / "soak.md").read_text(encoding="utf-8")
    assert [name for name in told if f"`{name}`" not in page] == []


def test_a_failure_says_how_it_is_run_again(soak):
    bad = {"way": "a way", "wrong": "two\nlines", "left": {"orphans": ["process 7"], "leaked_folders": ["x", "y"]}}
    status, out, errors = soak("--only", "world/a", "--case", "17", "--seed", "3", "--json", world_a=bad)
    told = json.loads(out)
    assert status == 1
    due = {"injected": 1, "failed": 1, "wrong": 1, "orphans": 1, "leaked_folders": 2}
    assert {name: told[name] for name in COUNTED} == dict.fromkeys(COUNTED, 0) | due
    (failure,) = told["failures"]
    assert failure["reasons"] == "two lines; left behind: process 7; left behind: x; left behind: y"
    assert failure["again"] == "pardemo soak --only world/a --case 17 --seed 3"
    assert says(errors, "FAILED", "world/a", "17", "a way", failure["reasons"], failure["again"])


def test_another_case_is_drawn_in_place_of_one_whose_fault_did_not_take_place(soak):
    missed = {"not_reached": "it was quicker"}
    status, out, _ = soak("--faults", "20", "--json", world_b=missed)
    told = json.loads(out)
    assert (status, told["injected"], told["not_reached"]) == (0, 20, soak_command.MISSES), "a kind is given up"
    assert told["why_not_reached"] == {"it was quicker": ["world/b"]}
    status, out, _ = soak("--only", "world/b", "--faults", "3", world_b=missed)
    assert status == 1
    lines = out.splitlines()
    assert f"0 injected, 0 survived, {soak_command.MISSES} not reached, 0 failed, " in lines[-2]
    assert says(lines[-1], "0", "3", "10")
    assert soak("--only", "world/b", "--case", "3", world_b=missed)[0] == 1
    assert soak("--faults", "0")[0] == 1, "no case at all is no success"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--minutes", "0"], "--minutes must be a number above 0, not 0"),
        (["--minutes", "1", "--faults", "3"], "--faults the number of faults: give one of them"),
        (["--case", "1"], "--case needs --only, which says of which kind"),
        (["--only", "world", "--case", "-1"], "--case must be 0 or more, not -1"),
        (["--only", "warp"], "--only: no kind 'warp'; there are world, ranks, cluster"),
        (["--only", "world/z"], "--only: no kind 'world/z'; there are world/a, world/b"),
    ],
)
def test_bad_input_is_one_line(soak, arguments, told):
    status, _, error = soak(*arguments)
    assert status == 2
    assert told in error
    assert len(error.splitlines()) == 1


def test_the_page_is_of_the_committed_run():
    committed = json.loads(soak_command.SUMMARY.read_text(encoding="utf-8"))
    text = soak_command.PAGE.read_text(encoding="utf-8")
    assert soak_command.page(text, committed) == text, "its table is the run's: pardemo soak --write makes both"
    assert set(COUNTED) <= set(committed)
    assert set(soak_command.GROUPS) <= {kind.partition("/")[0] for kind in committed["kinds"]}
    assert committed["injected"] >= 1000
    words = " ".join((text.partition(soak_command.BEGIN)[0] + text.partition(soak_command.END)[2]).split())
    found = [f"`{each['kind']}`, seed {committed['seed']}, case {each['case']}" for each in committed["failures"]]
    assert [each for each in found if each not in words] == [], "the page does not say what was done about it"
