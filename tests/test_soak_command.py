"""``pardemo soak``: what it draws, what it counts, that it notices what is left, and a few scenes of each group."""

import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from itertools import islice

import psutil
import pytest
from conftest import few, says
from soak import run as long_run

from pardemo import cli
from pardemo.soak import player, schedule
from pardemo.soak.scenes import GROUPS
from pardemo.soak.tally import COUNTED, Ending, Tally

#: What every group costs is a process that loads its libraries; so each is asked for its cases once.
CASES = {
    "world": ["ends", "killed", "stopped", "hang", "interrupted", "parent ends", "refused port", "closed port",
              "clock jumps", "no descriptors left"],
    "ranks": ["raises", "killed"],
    "layouts": ["zero2", "dp-pp"],
    "cluster": ["link away", "slow link", "ends", "closed port", "interrupted"],
    "checkpoints": ["killed while saving", "parent killed", "damaged", "full disk"],
    "runner": ["ends", "kernel dies", "two runs", "full disk"],
    "finetune": ["damaged", "another job", "two runs"],
    "measure": ["script", "port in use", "full disk", "interrupted"],
}  # fmt: skip

#: What a seed once found, by its cases: the page says what was done about it. Each ended wrong before, and passes now.
MENDED = {
    1: {"layouts/zero1": (14, 56), "world/refused port": (3, 4, 7), "finetune/damaged": (2,)},
    2: {"runner/ends": (2,), "ranks/no_sync": (2,)},
}


@pytest.mark.parametrize("group", few(GROUPS))
def test_a_scene_of_each_kind_ends_as_it_should(group):
    """Case 0 of each kind, and what was mended: the same each time, but for when exactly a signal arrives."""
    endings = []
    for seed, kinds in MENDED.items():
        cases = [(f"{group}/{kind}", 0) for kind in CASES[group]] if seed == 1 else []
        cases += [(kind, number) for kind, each in kinds.items() for number in each if schedule.group_of(kind) == group]
        if cases:
            with player.Player([group], seed) as stage:
                assert stage.missing == {}
                played = [stage.play(*case) for case in cases]
            assert [each for each in played if each.kind in kinds and each.not_reached] == []
            endings += played
    wrong = [(ending.kind, ending.way, ending.reasons, ending.told) for ending in endings if ending.failed]
    assert wrong == []
    assert psutil.pid_exists(stage.pid) is False
    if reasons := {ending.skipped for ending in endings} - {""}:
        assert len(reasons) == 1
        pytest.skip(reasons.pop())


PLAYED = """
import dataclasses, json, os, signal, socket, subprocess, sys, tempfile, time
from pathlib import Path
from pardemo.soak.life import load
from pardemo.soak.scene import Kind, NotReached, Skipped, Wrong
from pardemo.soak.stage import Stage
from pardemo.soak import remains, sockets
from pardemo.cluster import keeper
from pardemo.world.nursery_process import adopt_orphans

def orphan(scene):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
def daemon(scene):
    if not os.fork():
        os.setsid()
        if not os.fork():
            time.sleep(600)
        os._exit(0)
    os.wait()
def file(scene):
    tempfile.mkdtemp(prefix="left-")
def shared(scene):
    Path(f"/dev/shm/pardemo-soak-test-{os.getpid()}").touch()
def listener(scene):
    open_.append(socket.create_server(("127.0.0.1", 0)))
def connection(scene):
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_.append(socket.create_connection(server.getsockname()))
        open_.append(server.accept()[0])
def abstract(scene):
    open_.append(socket.socket(socket.AF_UNIX))
    open_[-1].bind(f"\\0pardemo-soak-test-{os.getpid()}")
def file_of_a_socket(scene):
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(tempfile.mktemp(prefix="s-"))
def orphan_that_listens(scene):
    with socket.create_server(("127.0.0.1", 0)) as server:
        subprocess.Popen(["sleep", "600"], pass_fds=[server.fileno()], start_new_session=True)
def closes_what_it_opened(scene):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        return "fine"
def named_namespace(scene):
    (remains.NAMED_NAMESPACES / f"hosts-of-{os.getpid()}").touch()
def another_program(scene):
    Path("/dev/shm/pardemo-soak-test-other").touch()
def namespace(scene):
    if not os.fork():
        try:
            keeper.unshare(0x40000000)
        except OSError:
            os._exit(0)
        time.sleep(600)
    time.sleep(0.2)
def wrong(scene):
    raise Wrong("not what was due")
def raises(scene):
    raise ZeroDivisionError("no luck")
def silent(scene):
    os._exit(3)
def hangs(scene):
    time.sleep(600)
def skipped(scene):
    raise Skipped("no rights")
def waits(scene):
    scene.begin()
    time.sleep(600)
def loses(scene):
    (scene.folder / "work").write_text("half")
def looks(scene):
    scene.keeps((scene.folder / "work").read_text() == "whole", "the work")
def over_at_once(scene):
    scene.begin()
    return "done before its signal"
def misses(scene):
    raise NotReached("the fault came too late")
def misses_and_leaves(scene):
    tempfile.mkdtemp(prefix="left-")
    raise NotReached("the fault came too late")
def interrupted(scene):
    try:
        waits(scene)
    except KeyboardInterrupt:
        return "interrupted"
def deaf(scene):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    scene.begin()
    time.sleep(2)
    raise NotReached("the work was over")
def right(scene):
    return f"right {scene.chance.random()}"

open_ = []
adopt_orphans()
remains.GONE_WITHIN_S = sockets.CLOSED_WITHIN_S = 1.0
from pardemo.soak import stage as module
module.GONE_WITHIN_S = module.NOTICED_WITHIN_S = 1.0
root = Path(sys.argv[1])
remains.NAMED_NAMESPACES = root / "netns"
remains.NAMED_NAMESPACES.mkdir()
load("world")
plays = [orphan, daemon, file, shared, listener, connection, abstract, file_of_a_socket, orphan_that_listens,
         closes_what_it_opened, named_namespace, namespace, another_program, wrong, raises, silent, hangs, skipped,
         misses, misses_and_leaves, right]
kinds = {f.__name__: Kind(f.__name__, f, ("",), {}, 0.0, None, 1) for f in plays}
kinds["killed"] = Kind("killed", waits, ("",), {"": signal.SIGKILL}, 0.2, None, 1)
for play in (interrupted, waits, over_at_once, deaf):
    within_s = 60.0 if play is over_at_once else 0.2
    kinds[play.__name__] = Kind(play.__name__, play, ("",), {"": signal.SIGINT}, within_s, None, 1)
kinds["loses"] = Kind("loses", loses, ("",), {}, 0.0, looks, 1)
stage = Stage(root, 1, kinds)
for label in [*kinds, "again"]:
    name = "right" if label == "again" else label
    limit_s = 1.0 if name == "hangs" else 60.0
    print(json.dumps([label, dataclasses.asdict(stage.play(name, 7, limit_s))]), flush=True)
for left in Path("/dev/shm").glob("pardemo-soak-test-*"):
    left.unlink()
print(json.dumps(["below", [p.pid for p in remains.descendants()]]))
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """How scenes ended that leave things behind on purpose."""
    root = tmp_path_factory.mktemp("stage")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PLAYED), root], capture_output=True, text=True,
                          timeout=300, env=None)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(map(json.loads, done.stdout.splitlines()))


def ending(played, kind):
    return Ending(**{name: tuple(value) if isinstance(value, list) else value for name, value in played[kind].items()})


def counts(played, kind):
    """Of what counts how much, but for what every scene adds to."""
    counted = ending(played, kind).counts()
    return {name: count for name, count in counted.items() if count and name not in ("injected", "survived")}


@pytest.mark.nightly
def test_what_is_left_behind_is_noticed_and_ended(played):
    for kind in ("orphan", "daemon"):
        assert len(ending(played, kind).orphans) == 1, kind
        assert ending(played, kind).failed
    assert "sleep 600" in ending(played, "orphan").orphans[0]
    assert [line[:20] for line in ending(played, "file").folders] == ["temporary file left-"]
    assert ending(played, "shared").folders[0].startswith("shared memory pardemo-soak-test-")
    assert played["below"] == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "due", "told"),
    [
        ("orphan", {"orphans": 1}, "process .*sleep 600"),
        ("file", {"leaked_folders": 1}, "temporary file left-"),
        ("shared", {"leaked_folders": 1}, "shared memory"),
        ("listener", {"leaked_sockets": 1}, r"TCP listener on port \d+"),
        ("connection", {"leaked_sockets": 2}, r"TCP connection (\d+) to (\d+); .*TCP connection \2 to \1"),
        ("abstract", {"leaked_sockets": 1}, "abstract unix socket @pardemo-soak-test-"),
        ("file_of_a_socket", {"leaked_sockets": 1}, "unix socket s-"),
        ("orphan_that_listens", {"orphans": 1, "leaked_sockets": 1}, r"TCP listener on port \d+ of process"),
        ("named_namespace", {"leaked_namespaces": 1}, r"network namespace hosts-of-\d+"),
        ("wrong", {"wrong": 1}, "not what was due"),
        ("loses", {"lost_work": 1}, "lost: the work"),
        ("hangs", {"hangs": 1}, "not over within its limit"),
    ],
)
def test_each_counter_counts_what_it_is_named_after(played, kind, due, told):
    assert counts(played, kind) == due | {"failed": 1}
    assert re.search(told, ending(played, kind).reasons), ending(played, kind).reasons
    assert ending(played, kind).injected


@pytest.mark.nightly
def test_a_namespace_that_a_process_keeps_is_counted(played):
    if not ending(played, "namespace").orphans:
        pytest.skip("this machine allows no network namespaces")
    assert counts(played, "namespace") == {"orphans": 1, "leaked_namespaces": 1, "failed": 1}


@pytest.mark.nightly
def test_a_scene_that_ends_before_its_signal_is_not_counted_as_survived(played):
    why = {
        "over_at_once": "the scene was over before its signal",
        "misses": "the fault came too late",
        "waits": "its signal came before the work or after it",  # nobody awaited it
    }
    for kind, reason in why.items():
        assert ending(played, kind).not_reached == reason
        assert ending(played, kind).counts() == dict.fromkeys(COUNTED, 0) | {"not_reached": 1}
    assert counts(played, "misses_and_leaves") == {"not_reached": 1, "failed": 1, "leaked_folders": 1}
    assert not ending(played, "misses_and_leaves").injected


@pytest.mark.nightly
def test_work_that_goes_on_after_its_signal_to_its_end_is_wrong(played):
    assert counts(played, "deaf") == {"wrong": 1, "failed": 1}
    assert re.search(r"^the work went on for \d s after its signal", ending(played, "deaf").wrong)


@pytest.mark.nightly
def test_what_is_wrong_is_told(played):
    assert ending(played, "wrong").wrong == "not what was due"
    assert ending(played, "raises").wrong == "ZeroDivisionError: no luck"
    assert ending(played, "silent").wrong.startswith("the scene's process ended: exit code 0") is False
    assert "exit code 3" in ending(played, "silent").wrong
    hang = ending(played, "hangs")
    assert hang.hang
    assert "in hangs" in hang.told, "where it was"
    assert hang.reasons == "it was not over within its limit"
    assert all(ending(played, kind).failed for kind in ("wrong", "raises", "silent", "loses", "hangs"))


@pytest.mark.nightly
def test_what_is_right_survives(played):
    for kind in ("right", "killed", "interrupted", "closes_what_it_opened", "another_program"):
        assert ending(played, kind).survived, ending(played, kind).reasons
    assert played["right"]["told"] == played["again"]["told"], "the same each time that it is played"
    assert ending(played, "skipped").skipped == "no rights"
    assert not ending(played, "skipped").failed
    assert not ending(played, "skipped").survived


KINDS = {"world/a": 1, "world/b": 3, "ranks/c": 1, "layouts/d": 1, "finetune/e": 1}


def test_scenes_are_drawn_from_the_seed():
    first, again, other = (list(islice(schedule.endless(KINDS, seed), 400)) for seed in (1, 1, 2))
    assert first == again != other
    assert {kind for kind, _ in first} == set(KINDS)
    for kind in KINDS:
        numbers = [number for name, number in first if name == kind]
        assert numbers == list(range(len(numbers))), "the cases of a kind are numbered from zero"
    often = sum(kind == "world/b" for kind, _ in first)
    assert often > 2 * sum(kind == "world/a" for kind, _ in first), "by its weight"


@pytest.mark.parametrize(("faults", "layouts"), [(7, 3), (0, 5), (4, 0), (0, 0)])
def test_so_many_faults_and_layouts(faults, layouts):
    drawn = [kind for kind, _ in schedule.counted(KINDS, 1, faults, layouts)]
    assert sum(kind == "layouts/d" for kind in drawn) == layouts
    assert len(drawn) == faults + layouts


def test_another_scene_is_drawn_in_place_of_one_whose_fault_did_not_take_place():
    """Every other scene of one kind misses, and each of another, which is given up."""
    played = []

    def reached():
        kind, number = played[-1]
        return kind != "finetune/e" and (kind != "world/a" or number % 2 == 0)

    took_place = 0
    for scene in schedule.counted(KINDS, 1, 200, 5, reached):
        played.append(scene)
        took_place += reached()
    assert took_place == 205
    of_kind = Counter(kind for kind, _ in played)
    assert of_kind["finetune/e"] == schedule.MISSES, "a kind that is never reached is given up"
    assert of_kind["world/a"] > 2 * schedule.MISSES, "one that is reached now and then is not"
    assert of_kind["layouts/d"] == 5


def test_kinds_that_are_never_reached_come_to_an_end():
    drawn = list(schedule.counted(KINDS, 1, 10, 10, lambda: False))
    assert Counter(kind for kind, _ in drawn) == dict.fromkeys(KINDS, schedule.MISSES)


def test_one_kind_or_one_group_is_chosen():
    assert schedule.chosen("world", KINDS) == ["world/a", "world/b"]
    assert schedule.chosen("world/b", KINDS) == ["world/b"]
    with pytest.raises(ValueError, match=r"--only.*'world/z'"):
        schedule.chosen("world/z", KINDS)


class Fake:
    """A player whose scenes end as they are told to."""

    kinds = KINDS
    missing = {"runner": "the group runner needs nbformat"}  # noqa: RUF012
    bad: tuple = ()
    missed: tuple = ()

    def __init__(self, groups, seed):
        self.groups = groups

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def play(self, kind, number):
        if kind in self.bad:
            return Ending(kind, number, "a way", wrong="two\nlines", orphans=("process 7: sleep",), folders=("x", "y"))
        if kind in self.missed:
            return Ending(kind, number, not_reached="it was quicker")
        if kind == "finetune/e":
            return Ending(kind, number, skipped="no room")
        return Ending(kind, number, told="fine", seconds=0.5)


def test_the_command_counts_and_says_how_to_play_a_failure_again(monkeypatch, capsys):
    monkeypatch.setattr(player, "Player", Fake)
    assert cli.main(["soak", "--faults", "30", "--layouts", "5", "--seed", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(COUNTED) | {"seconds", "seed", "kinds", "failures", "not_played", "why_not_reached"} == set(told)
    assert told["injected"] == told["survived"] == 35 - told["skipped"]
    assert told["kinds"]["layouts/d"]["injected"] == 5
    assert told["not_played"] == {"the group runner needs nbformat": ["runner"], "no room": ["finetune/e"]}
    monkeypatch.setattr(Fake, "bad", ("world/a",))
    assert cli.main(["soak", "--only", "world/a", "--case", "17", "--seed", "3", "--json"]) == 1
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    due = {"injected": 1, "failed": 1, "wrong": 1, "orphans": 1, "leaked_folders": 2}
    assert {name: told[name] for name in COUNTED} == dict.fromkeys(COUNTED, 0) | due
    assert told["failures"][0]["again"] == "pardemo soak --only world/a --case 17 --seed 3"
    assert says(printed.err, "FAILED", "world/a", "17", "7")
    assert cli.main(["soak", "--faults", "9"]) == 1
    printed = capsys.readouterr().out
    assert "orphans" in printed
    assert "skipped finetune/e: no room" in printed or "finetune/e" not in printed
    assert cli.main(["soak", "--faults", "0"]) == 1, "no scene at all is no success"


def test_the_command_counts_apart_what_was_not_reached(monkeypatch, capsys):
    monkeypatch.setattr(player, "Player", Fake)
    monkeypatch.setattr(Fake, "missed", ("world/b",))
    assert cli.main(["soak", "--only", "world", "--faults", "20", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["injected"], told["survived"], told["not_reached"]) == (20, 20, schedule.MISSES)
    assert told["why_not_reached"] == {"it was quicker": ["world/b"]}
    assert cli.main(["soak", "--only", "world/b", "--faults", "3"]) == 1, "none took place"
    lines = capsys.readouterr().out.splitlines()
    assert says(lines, "0", "3", "10", "reached")
    assert says(lines, "world/b")
    assert f"0 injected, 0 survived, {schedule.MISSES} not reached, 0 failed, " in lines[-2]
    assert "0 lost work, 0 hangs, 0 orphans, 0 leaked sockets, 0 leaked namespaces, 0 leaked folders" in lines[-2]
    assert max(map(len, lines[:2])) < 100, "the table fits a terminal"
    assert cli.main(["soak", "--only", "world/b", "--case", "3"]) == 1, "nor has this one"


def test_it_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr("pardemo.soak.tally.EVERY_S", 0.0)
    tally = Tally(1, sys.stdout)
    for wrong in ("", "bad", ""):
        tally.note(Ending("world/a", 0, wrong=wrong))
    assert capsys.readouterr().out.splitlines()[-1] == "     0 s: 3 injected, 2 survived, 0 not reached, 1 failed"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--minutes", "0"], "--minutes must be a number above 0, not 0"),
        (["--minutes", "nan"], "--minutes must be a number above 0, not nan"),
        (["--minutes", "1", "--faults", "3"], "--faults and --layouts the number of scenes: give one of them"),
        (["--faults", "-1"], "--faults must be 0 or more, not -1"),
        (["--case", "1"], "--case needs --only, which says of which kind"),
        (["--only", "world", "--case", "1"], "--case needs one kind, as world/"),
        (["--only", "warp"], "--only: no kind 'warp'; there are world, ranks, layouts, cluster"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, told):
    assert cli.main(["soak", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_what_was_asked_for_and_is_not_among_the_kinds_is_refused():
    with pytest.raises(ValueError, match=r"--layouts.*5.*world/a"):
        list(schedule.counted({"world/a": 1}, 1, 5, 5))
    with pytest.raises(ValueError, match=r"--faults.*5"):
        list(schedule.counted({"layouts/d": 1}, 1, 5, 0))


def test_what_a_skipped_scene_leaves_is_a_failure():
    assert Ending("cluster/ends", 0, skipped="no rights", orphans=("process 7",)).failed
    assert not Ending("cluster/ends", 0, skipped="no rights").failed


def mended_of(text):
    """Kind, case and seed of what the page names, outside of its table, with what was done about it."""
    words = " ".join((text.partition(long_run.BEGIN)[0] + text.partition(long_run.END)[2]).split())
    named = re.findall(r"`(\w+/[\w -]+)`, seed (\d+), cases? ([\d, and]+)", words)
    return {(kind, int(number), int(seed)) for kind, seed, numbers in named for number in re.findall(r"\d+", numbers)}


def test_the_pages_table_is_that_of_the_committed_long_run():
    run = json.loads(long_run.SUMMARY.read_text(encoding="utf-8"))
    text = long_run.PAGE.read_text(encoding="utf-8")
    assert long_run.page(text, run) == text, "run python tests/soak/run.py --page"
    layouts = sum(counts["injected"] for kind, counts in run["kinds"].items() if kind.startswith("layouts/"))
    assert min(layouts, run["injected"] - layouts) >= 1000
    assert {schedule.group_of(kind) for kind in run["kinds"]} == set(GROUPS)
    assert run["survived"] + len(run["failures"]) >= run["injected"]
    done_about_it = mended_of(text)
    failed = [(failure["kind"], failure["case"], run["seed"]) for failure in run["failures"]]
    assert [case for case in failed if case not in done_about_it] == [], "the page does not say what was done about it"


def test_what_the_page_says_to_pass_now_is_played():
    """But for what takes place one time in four: the page names the case that is played in its place."""
    named = mended_of(long_run.PAGE.read_text(encoding="utf-8"))
    played = {(kind, n, seed) for seed, kinds in MENDED.items() for kind, numbers in kinds.items() for n in numbers}
    assert named - {("finetune/ends", 3, 2)} == played


def test_a_failure_that_the_page_does_not_name_is_seen():
    text = "- It is slow.\n- A rank waits (`world/a`, seed 1, cases 3 and\n  14), and (`ranks/b`, seed 2, case 7).\n"
    assert mended_of(f"{long_run.BEGIN}- `world/c`, seed 1, case 9\n{long_run.END}{text}") == {
        ("world/a", 3, 1), ("world/a", 14, 1), ("ranks/b", 7, 2),
    }  # fmt: skip


def test_the_committed_long_run_has_each_counter():
    run = json.loads(long_run.SUMMARY.read_text(encoding="utf-8"))
    assert [name for name in COUNTED if name not in run] == []
    assert all(set(COUNTED) <= set(counts) for counts in run["kinds"].values())
    assert {f"{group}/{kind}" for group, kinds in CASES.items() for kind in kinds} <= set(run["kinds"])
