"""What ends with a World, with its process, or with an interrupt: ranks, what they started, folders, open files."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import gone
from test_world import rank_sum

from pardemo import RankDied, RankError, RankFailed, World
from pardemo.world import fork_server
from pardemo.world.rank_processes import Ranks


def test_a_fork_of_the_notebooks_process_does_not_end_the_ranks():
    with World(1) as world:
        world.run(rank_sum)
        child = os.fork()
        if child == 0:
            world._finalizer()
            os._exit(0)
        os.waitpid(child, 0)
        assert world.run(rank_sum) == [0.0]


@pytest.mark.parametrize(
    "interrupt",
    [lambda: os.kill(os.getpid(), signal.SIGINT), lambda: signal.raise_signal(signal.SIGINT)],
    ids=["to the process", "to another thread"],
)
def test_an_interrupt_stops_the_work_and_leaves_the_world_usable(interrupt, request):
    # a shell that starts the tests in the background has them ignore interrupts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with World(2) as world:
        world.run(rank_sum)
        pids = world.pids
        threading.Timer(0.5, interrupt).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            world.run(lambda: time.sleep(600))
        assert time.monotonic() - begin < 120
        assert gone(pids)
        assert world.run(rank_sum) == [1.0, 1.0]


def test_what_a_rank_started_ends_with_it():
    def start_a_child():
        return subprocess.Popen(["sleep", "600"]).pid

    with World(2) as world:
        children = world.run(start_a_child)
        ranks = world.pids
    assert gone([*children, *ranks])


def start_what_leaves_the_session():
    """A child in a session of its own, and a daemon, whose parent has ended: neither is in the rank's process group."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    daemon = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"
    shown = subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE, check=True)
    return child.pid, int(shown.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
def test_what_left_the_session_ends_with_its_rank_and_not_before():
    with World(1) as world, World(1) as other:
        ((child, daemon),) = world.run(start_what_leaves_the_session)
        with pytest.raises(RankDied):
            other.run(lambda: os._exit(3))  # the fork server clears up after another rank
        assert psutil.pid_exists(child)
        until = time.monotonic() + 120
        while psutil.Process(daemon).status() != psutil.STATUS_SLEEPING:  # on a loaded machine it may not have begun to
            assert time.monotonic() < until, "a daemon of a rank that runs is its own business"
            time.sleep(0.05)
        ranks = world.pids
    assert gone([child, daemon, *ranks])


def test_a_forgotten_world_ends_its_ranks():
    world = World(2)
    world.run(rank_sum)
    pids = world.pids
    del world
    assert gone(pids)


PARENT = """
import os, sys, time
from pardemo import World
world = World(2)
def start():
    import subprocess
    return subprocess.Popen(["sleep", "600"]).pid
pids = world.pids + world.run(start)
print(*pids, world._ranks.store, flush=True)
{then}
"""


def parent_that(then, start=PARENT):
    """A process with a World of two ranks, each of which has started a child; the four pids and the ranks' folder."""
    parent = subprocess.Popen(
        [sys.executable, "-c", start.format(then=then)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    *words, store = parent.stdout.readline().split()
    parent.stdout.close()
    assert len(words) == 4
    return parent, [int(word) for word in words], os.path.dirname(store)


KILLED = "os.kill(os.getpid(), 9)"
LEAVES_THE_SESSION = PARENT.replace('["sleep", "600"]', '["sleep", "600"], start_new_session=True')


@pytest.mark.parametrize(
    ("then", "start"),
    [
        (KILLED, PARENT),
        pytest.param(
            KILLED, LEAVES_THE_SESSION, marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux has subreapers")
        ),
        ("world.run(time.sleep, 600)", PARENT),
        ("os._exit(0)", PARENT),
        ("raise RuntimeError", PARENT),
        ("sys.exit()", PARENT),
    ],
    ids=["SIGKILL", "SIGKILL, other sessions", "SIGKILL while ranks are busy", "os._exit", "an exception", "sys.exit"],
)
def test_nothing_is_left_running_when_the_parent_ends(then, start):
    parent, pids, folder = parent_that(then, start)
    if "sleep" in then:
        time.sleep(0.3)
        parent.kill()
    parent.wait(120)
    assert gone(pids)
    until = time.monotonic() + 120
    while os.path.exists(folder) and time.monotonic() < until:
        time.sleep(0.02)
    assert not os.path.exists(folder), "the temporary folder is gone, too"


def test_a_fork_of_the_parent_does_not_keep_the_ranks_alive():
    parent, pids, _ = parent_that(f"os.fork() or time.sleep(600); {KILLED}")
    parent.wait(120)
    try:
        assert gone(pids)
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if parent.args[-1] in (process.info["cmdline"] or []):
                process.kill()


def test_a_killed_process_that_ranks_start_from_leaves_no_folder():
    """It cannot remove its folder; whoever asks for the next such process does."""
    with World(2, preload=["colorsys"]) as world:
        killed = world._ranks.fork_server
        assert os.path.isdir(killed.folder)
        os.kill(killed.pid, signal.SIGKILL)
        assert gone(world.pids)
        with pytest.raises(RankDied):
            world.run(rank_sum)
        assert world.run(rank_sum) == [1.0, 1.0]
        assert world._ranks.fork_server is not killed
        assert not os.path.exists(killed.folder)


LATE = """
import os, time
from pardemo.termination import end_with_parent
read, write = os.pipe()
if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.01)
        end_with_parent(parent)
        os.write(1, b"it lives on")
    os._exit(0)
os.close(write)
os.read(read, 1)  # until both are gone, with the pipe's other end
"""


def test_what_was_forked_by_a_process_that_was_killed_at_once_ends_too():
    """The kernel tells nobody of a death that was before it was asked to."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_process_that_cannot_be_started_leaves_no_folder(monkeypatch, tmp_path):
    def full(theirs, settings):
        assert os.path.isdir(settings["folder"])
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(fork_server._handles)
    with pytest.raises(OSError, match="Too many open files"):
        fork_server.ForkServer((), fork_server.RANK, full)
    assert list(tmp_path.iterdir()) == []
    assert set(fork_server._handles) == before, "nothing to close when Python ends"


def test_a_fork_server_begins_from_the_one_that_has_loaded_most_of_it(monkeypatch):
    """And never from one that has called a function there, or has loaded what the new one must not have."""
    preloads = [(), ("a",), ("a", "b"), ("a", "b", "m:call"), ("a", "z")]
    servers = {(fork_server.RANK, loaded): SimpleNamespace(alive=True, loaded=loaded) for loaded in preloads}
    monkeypatch.setattr(fork_server, "_servers", servers)
    assert fork_server._largest_part(("a", "b", "c", "m:call")).loaded == ("a", "b")
    servers[fork_server.RANK, ("a", "b")].alive = False
    assert fork_server._largest_part(("a", "b", "c", "m:call")).loaded == ("a",)
    monkeypatch.setattr(fork_server, "_servers", {})
    assert fork_server._largest_part(("a",)) is None


def test_closing_from_another_thread_ends_the_run():
    world = World(2)
    world.run(rank_sum)
    threading.Timer(0.5, world.close).start()
    begin = time.monotonic()
    with pytest.raises(RankError, match="closed while it ran"):
        world.run(time.sleep, 600)
    assert time.monotonic() - begin < 120


class _ClosesWhenSent:
    """Closes a World while it is pickled: between the first line of a run and its ranks."""

    def __init__(self, world):
        self.world = world

    def __reduce__(self):
        self.world.close()
        return int, ()


def test_a_world_that_is_closed_as_a_run_begins_starts_no_ranks(monkeypatch):
    world, generations = World(2), []
    monkeypatch.setattr("pardemo.world.world.Ranks", lambda *given: generations.append(given))
    with pytest.raises(RankError, match="closed"):
        world.run(print, _ClosesWhenSent(world))
    assert not generations
    assert not world.pids


def test_a_world_that_is_closed_while_its_ranks_start_ends_them(monkeypatch):
    world, made = World(2), []
    with pytest.raises(RankFailed):
        world.run(lambda: 1 / 0)

    def ranks(*given):
        closing = threading.Thread(target=world.close)
        closing.start()
        closing.join(60)
        made.append(Ranks(*given))
        return made[0]

    monkeypatch.setattr("pardemo.world.world.Ranks", ranks)
    with pytest.raises(RankError, match="closed while it ran"):
        world.run(rank_sum)
    assert made
    assert not world.pids
    assert gone(made[0].pids)


CLOSED_AT_THE_END = """
from pardemo import World
class Holder:
    def __init__(self):
        self.world = World(2)
    def __del__(self):
        self.world.close()
holder = Holder()
print(*holder.world.run(int), *holder.world.pids)
"""


def test_a_world_that_is_closed_when_python_ends_prints_nothing():
    done = subprocess.run([sys.executable, "-c", CLOSED_AT_THE_END], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert gone([int(pid) for pid in done.stdout.split()[2:]])


@pytest.mark.parametrize("answer", ["server", "ready", "pid"])
def test_an_interrupt_while_forking_spoils_no_other_world(world_of, monkeypatch, answer):
    """Whatever it interrupts: another fork server's start, its loading, the ranks'."""
    read, before = fork_server.ForkServer._read, world_of(2).pids
    world_of(2).run(os.getpid)

    def interrupted(self, wanted, timeout_s):
        found = read(self, wanted, timeout_s)
        if answer in found:
            raise KeyboardInterrupt
        return found

    # Of modules that no other test preloads: else that process is there already, and nothing is left to interrupt.
    modules = {"server": "plistlib", "ready": "shelve", "pid": "stringprep"}
    monkeypatch.setattr(fork_server.ForkServer, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        World(2, preload=[modules[answer]])
    monkeypatch.undo()
    with World(2, preload=[modules[answer]]) as world:
        assert world.run(os.getpid) == world.pids
    assert world_of(2).run(os.getpid) == before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux lists a process's open files")
def test_too_many_open_files_leave_none_open():
    """However many may be opened before the limit: a rank's channels are seven, so all places of two ranks are met."""
    import resource

    def open_files():
        return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with World(2, preload=["colorsys"]) as world:
        world.run(rank_sum)
        for spare in range(15):
            before = open_files()
            numbers = (number for number in itertools.count() if number not in before)
            limit = next(itertools.islice(numbers, spare, None))  # so many lower ones are free
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                with pytest.raises(RankError, match="Too"):
                    World(4, preload=["colorsys"])
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert open_files() == before, f"with room for {spare}"
        assert world.run(rank_sum) == [1.0, 1.0]


def test_more_open_files_than_select_can_hold():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1400:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1400), hard))
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with World(2, preload=["calendar"]) as world:
            assert world.run(rank_sum) == [1.0, 1.0]
    finally:
        for fd in kept:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
