"""Limits that stop work: beside hogs on its only core a process is slow, and not stopped; what hangs is."""

import contextlib
import os
import re
import subprocess
import sys
import time

import pytest

from pardemo import RankFailed, RankTimeout, World, deadline, measure
from pardemo.book.run.cell_limit import CellLimit
from pardemo.deadline import MOST, Deadline, ended_within
from pardemo.world import fork_server, rank_processes

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat") or not hasattr(os, "sched_setaffinity"),
    reason="Linux counts how long a process waits for a core",
)
CORE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
HOGS = 4
ENDLESS = "while True: pass"
#: So much time of a core, which beside the hogs takes five times as long and more, and a limit between the two.
COMPUTED_S, LIMIT_S = 0.5, 1.5
COMPUTES = f"import time\nwhile time.process_time() < {COMPUTED_S}: pass"


def pinned(code, **options):
    """A process whose only core is the hogs'."""
    text = f"import os; os.sched_setaffinity(0, {{{CORE}}})\n{code}"
    return subprocess.Popen([sys.executable, "-S", "-c", text], **options)


@contextlib.contextmanager
def processes(*codes):
    started = []
    try:
        for code in codes:
            started.append(pinned(code))  # noqa: PERF401 (so that what was started can be ended)
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture
def hogs():
    with processes(*[ENDLESS] * HOGS):
        yield


def to_this_core():
    os.sched_setaffinity(0, {CORE})


def computes(seconds):
    to_this_core()
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return "computed"


@pytest.mark.nightly
def test_what_is_kept_from_its_core_ends_within_the_limit_of_its_own_time(hogs):
    with processes(COMPUTES) as (process,):
        assert ended_within(process, LIMIT_S)
        assert process.returncode == 0


def test_what_sleeps_or_computes_for_ever_is_over_at_its_limit(hogs):
    with processes("import time; time.sleep(600)", ENDLESS) as (asleep, endless):
        assert not ended_within(asleep, 1.0)
        limit = Deadline(1.0, [endless.pid])
        while left_s := limit.left_s():
            time.sleep(left_s)
        assert 1 < limit.waited_s < MOST
        assert re.fullmatch(r"1 s \(the machine was busy: on the clock it took \d+ s\)", str(limit))


@pytest.mark.nightly
def test_a_process_below_that_waits_for_a_core_counts(hogs):
    """As a data loader's worker does, for which its rank sleeps."""
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-S', '-c', {COMPUTES!r}]))"
    with processes(code) as (process,):
        assert ended_within(process, LIMIT_S)
        assert process.returncode == 0


def counted(monkeypatch, *looks):
    """A limit of 10 s under this clock and these counters: a time, each thread's seconds on a core and of waiting."""
    now = [0.0]
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    limit = Deadline(10.0, [1])
    for at_s, *threads in looks:
        now[0] = at_s
        seen = {str(n): (round(ran * 1e9), round(waited * 1e9)) for n, (ran, waited) in enumerate(threads)}
        monkeypatch.setattr(deadline, "_tasks", lambda pids, seen=seen: seen)
        left_s = limit.left_s()
    return left_s, limit


@pytest.mark.parametrize(
    ("threads", "waited_s"),
    [
        ([(0, 0)], 0.0),  # sleeps
        ([(9, 0)], 0.0),  # computes
        ([(1, 8)], 8.0),
        ([(1, 3)], 3.0),  # and sleeps
        ([(4.5, 4.5)] * 2, 4.5),  # two on one core
        ([(1, 8), (9, 0)], 8.0),  # the other has a core of its own
        ([(1, 3.5), (1, 3.5)], 7.0),  # they take turns, as ranks that wait for one another
    ],
    ids=str,
)
def test_how_long_threads_waited(monkeypatch, threads, waited_s):
    """Nine seconds after the first look, at which the threads had waited for long already."""
    earlier = [(100, 1000) for _ in threads]
    later = [(100 + ran, 1000 + waited) for ran, waited in threads]
    left_s, limit = counted(monkeypatch, (1.0, *earlier), (10.0, *later))
    assert limit.waited_s == pytest.approx(waited_s)
    assert (left_s == 0) == (waited_s == 0), "which is when the limit would have been over"


def test_a_limit_is_put_off_a_number_of_times_at_most(monkeypatch):
    looks = [(1.0, (0, 0)), *((10.0 * n, (0.1 * n, 9.9 * n)) for n in range(1, 40))]
    ends = [at_s for n, (at_s, _) in enumerate(looks, 1) if counted(monkeypatch, *looks[:n])[0] == 0]
    assert ends[0] == MOST * 10.0


def test_without_the_kernels_counters_a_limit_is_the_clocks(hogs, monkeypatch):
    monkeypatch.setattr(deadline, "_tasks", lambda pids: {})
    with processes(ENDLESS) as (process,):
        assert not ended_within(process, 1.0)


@pytest.fixture(scope="module")
def world():
    with World(2) as made:
        made.run(to_this_core)
        yield made


def test_ranks_that_are_kept_from_their_core_finish(hogs, world):
    assert world.run(computes, COMPUTED_S, timeout_s=LIMIT_S) == ["computed"] * 2


def late_failure():
    import torch.distributed as dist

    if dist.get_rank() == 0:
        raise ValueError("at once")
    computes(COMPUTED_S)
    raise KeyError("late")


@pytest.mark.nightly
def test_a_rank_that_is_kept_from_its_core_has_its_grace_time(hogs):
    with World(2) as world:
        world.run(to_this_core)
        with pytest.raises(RankFailed) as caught:
            world.run(late_failure)
    assert sorted(caught.value.failures) == [0, 1]


def test_ranks_that_sleep_or_compute_for_ever_end_at_their_limit(hogs):
    with World(2) as world:
        world.run(to_this_core)
        with pytest.raises(RankTimeout, match=r"0.*1.*finish.*1"):
            world.run(time.sleep, 600, timeout_s=1)
        world.run(to_this_core)
        told = r"^ranks 0, 1 did not finish within 1 s: .*\n\(the machine was busy: on the clock it took \d+ s\)\n"
        with pytest.raises(RankTimeout, match=told) as caught:
            world.run(computes, 600, timeout_s=1)
        assert caught.value.timeout_s == 1


def test_a_process_that_ranks_start_from_has_its_time_to_load(hogs, world, tmp_path, monkeypatch):
    (tmp_path / "computes_when_loaded.py").write_text(f"import os; os.sched_setaffinity(0, {{{CORE}}})\n{COMPUTES}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_server, "START_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(rank_processes, "START_TIMEOUT_S", LIMIT_S)
    with World(1, preload=["computes_when_loaded"]) as late:
        assert late.run(int) == [0]


@pytest.mark.nightly
def test_a_cell_whose_kernel_is_kept_from_its_core_goes_on(hogs):
    with processes(COMPUTES, ENDLESS) as (computing, endless), CellLimit(LIMIT_S, [computing]) as limit:
        limit.begins(1)
        assert computing.wait() == 0
        limit.ends()
        assert endless.poll() is None


def test_a_cell_that_does_not_end_has_its_kernel_ended(hogs):
    told = r"^cell 3 did not end within 1 s \(the machine was busy: on the clock it took \d+ s\)"
    with processes(ENDLESS) as (endless,):
        limit = CellLimit(1.0, [endless])
        limit.__enter__()
        limit.begins(3)
        endless.wait()
        with pytest.raises(TimeoutError, match=told):
            limit.__exit__()


@pytest.mark.nightly
def test_ranks_of_a_script_that_are_kept_from_their_core_are_measured(hogs, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(f"""
import os, time, torch, torch.distributed as dist
os.sched_setaffinity(0, {{{CORE}}})
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
until = time.process_time() + 2.0
while time.process_time() < until:
    pass
for _ in range(6):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
""")
    assert measure.script("slow.py", ranks=2, folder=tmp_path, steps=2, timeout_s=6.0).steps == 2
