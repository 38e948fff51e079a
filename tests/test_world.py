"""World: real ranks, their answers, and everything that can go wrong with them."""

import errno
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import gone, says

from pardemo import RankDied, RankError, RankFailed, RankTimeout, World, deadline, project
from pardemo.collectives import ring_all_reduce
from pardemo.collectives.links import bytes_of, link_of
from pardemo.data_parallel import BucketedDataParallel
from pardemo.world import generation, nursery
from pardemo.world.errors import Failure
from pardemo.world.generation import Ranks
from pardemo.world.nursery import Forked


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def rank_sum():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_the_order_of_the_ranks(world_of, size):
    assert world_of(size).run(rank_and_size) == [(rank, size) for rank in range(size)]


def test_closures_arguments_and_classes_travel(world_of):
    factor = 3

    class Thing:
        def __init__(self, value):
            self.value = value

    def times(x, *, plus):
        return Thing(factor * x.value + plus + dist.get_rank())

    assert [t.value for t in world_of(2).run(times, Thing(5), plus=1)] == [16, 17]


def test_tensors_come_back(world_of):
    results = world_of(2).run(lambda: torch.full((3,), float(dist.get_rank()), dtype=torch.bfloat16))
    assert torch.equal(results[1], torch.ones(3, dtype=torch.bfloat16))


DTYPES = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.uint16, torch.uint32,
    torch.uint64, torch.int16, torch.bool, torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_go_and_come_back(world_of, dtype):
    """torch itself pickles some of these, and cannot read them."""

    def there_and_back(whole, part):
        return [whole, part, part.contiguous(), torch.nn.Parameter(whole, requires_grad=False), whole[:0]]

    whole = torch.arange(12).reshape(3, 4).to(torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    part = whole[:, 1::2]  # strided
    for found in world_of(2).run(there_and_back, whole, part):
        assert [one.dtype for one in found] == [dtype] * 5
        assert (found[0].shape, found[1].stride()) == (whole.shape, part.stride())
        assert isinstance(found[3], torch.nn.Parameter)
        for one, sent in zip(found, (whole, part, part, whole, whole[:0]), strict=True):
            assert bytes_of(one.detach().contiguous()) == bytes_of(sent.contiguous())


def test_lazy_conjugates_and_negatives_come_back(world_of):
    z = torch.tensor([1 + 2j, 3 - 1j])
    for conjugate, negative in world_of(2).run(lambda: (z.conj(), z.conj().imag)):
        assert conjugate.tolist() == [1 - 2j, 3 + 1j]
        assert negative.tolist() == [-2, 1]


def test_a_world_that_is_closed_beside_a_limit_has_no_limit_to_set():
    """close() of another thread takes the ranks away between two looks at them."""
    limited = []

    class Closing(World):
        cluster = SimpleNamespace(hosts=2, tier=None)
        _ranks = property(lambda self: looked_at.pop() if looked_at else None)

    looked_at = [SimpleNamespace(limit=lambda *of: limited.append(of), hosts=None, pids=[1])]
    world = Closing.__new__(Closing)
    world.limit(1, "1 MB/s")
    assert limited == [(1, 1e6)]
    world.limit(1, "1 MB/s")
    assert len(limited) == 1
    assert (world.tier, world.pids) == (None, [])


def test_a_reply_larger_than_a_pipe(world_of):
    assert [len(r) for r in world_of(2).run(lambda: b"x" * (8 << 20))] == [8 << 20] * 2


def test_ranks_are_processes_with_one_thread_and_different_seeds(world_of):
    facts = world_of(2).run(lambda: (os.getpid(), torch.get_num_threads(), torch.rand(1).item()))
    assert len({os.getpid(), *(f[0] for f in facts)}) == 3
    assert [f[1] for f in facts] == [1, 1]
    assert facts[0][2] != facts[1][2]


def test_the_ranks_stay_between_runs(world_of):
    assert world_of(2).run(os.getpid) == world_of(2).run(os.getpid) == world_of(2).pids


def test_prints_arrive_marked_with_their_rank(world_of, capfd):
    def talk():
        print("hello\nfrom", dist.get_rank())
        os.write(1, b"without an end")
        print("careful", file=sys.stderr)

    world_of(2).run(talk)
    printed = capfd.readouterr()
    for rank in range(2):
        assert f"[{rank}] hello\n" in printed.out
        assert f"[{rank}] from {rank}\n" in printed.out
        assert f"[{rank}] without an end\n" in printed.out
        assert f"[{rank}] careful\n" in printed.err


def test_threads_and_environment_can_be_set():
    with World(1, threads=2, env={"PARDEMO_TEST": "yes"}) as world:
        assert world.run(lambda: (torch.get_num_threads(), os.environ["PARDEMO_TEST"])) == [(2, "yes")]


def test_preloaded_modules_are_there_from_the_start():
    with World(1, preload=["mimetypes:init", "wave"]) as world:
        assert world.run(lambda: ("wave" in sys.modules, sys.modules["mimetypes"].inited)) == [(True, True)]


def test_two_worlds_at_once(world_of):
    results = {}

    def use(name):
        with World(2) as world:
            results[name] = [world.run(rank_sum)[0] for _ in range(5)]

    threads = [threading.Thread(target=use, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [1.0] * 5 for k in range(3)}


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (65, ValueError), (True, TypeError),
                                             (2.0, TypeError), ("4", TypeError), (None, TypeError)])  # fmt: skip
def test_impossible_sizes_are_refused(size, error):
    with pytest.raises(error, match="World size must be"):
        World(size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threads": 0}, ValueError, "threads must be from 1"),
        ({"backend": "mpi"}, ValueError, "backend must be 'gloo', 'nccl' or None, not 'mpi'"),
        ({"preload": "json"}, TypeError, r"write \['json'\]"),
        ({"preload": ["no_such_module_at_all"]}, ValueError, "cannot preload 'no_such_module_at_all'"),
    ],
)
def test_impossible_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        World(1, **options)


def test_what_cannot_be_pickled_is_said_before_anything_runs(world_of):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="uses_lock"):
        world_of(2).run(_uses(lock))
    with pytest.raises(TypeError, match="cannot send"):
        world_of(2).run(print, lock)
    with pytest.raises(TypeError, match=r"function.*3"):
        world_of(2).run(3)
    assert world_of(2).run(rank_sum) == [1.0, 1.0]


def _uses(lock):
    def uses_lock():
        return lock

    return uses_lock


def test_a_time_limit_must_be_positive(world_of):
    with pytest.raises(ValueError, match=r"timeout_s.*0"):
        world_of(2).run(rank_sum, timeout_s=0)


def test_a_closed_world_says_so():
    world = World(1)
    world.close()
    world.close()
    with pytest.raises(RankError, match="closed"):
        world.run(rank_sum)


def test_a_world_serves_one_run_at_a_time(world_of):
    world = world_of(2)
    busy = threading.Thread(target=world.run, args=(lambda: time.sleep(0.5),))
    busy.start()
    time.sleep(0.2)
    with pytest.raises(RankError, match="busy"):
        world.run(rank_sum)
    busy.join()


# ---------------------------------------------------------------- faults


def test_different_exceptions_are_all_shown():
    def fail():
        raise (KeyError, ValueError, ZeroDivisionError)[dist.get_rank()](f"reason {dist.get_rank()}")

    with World(3) as world:
        with pytest.raises(RankFailed) as caught:
            world.run(fail)
        assert {r: f.type for r, f in caught.value.failures.items()} == {
            0: "KeyError",
            1: "ValueError",
            2: "ZeroDivisionError",
        }
        text = str(caught.value)
        assert all(f"reason {rank}" in text for rank in range(3))
        assert "in fail" in text, "the rank's own traceback"
        assert world.run(rank_sum) == [3.0] * 3


def test_what_all_ranks_say_alike_is_told_once():
    def fail():
        if dist.get_rank() == 2:
            raise KeyError("another")
        raise ValueError("the same")

    with World(5) as world, pytest.raises(RankFailed) as caught:
        world.run(fail)
    text = str(caught.value)
    assert says(text, "0", "1", "3", "4", "ValueError", "2", "KeyError", "'another'")
    assert text.count("Traceback") == 2, "one of each"
    assert says(text, "---", "ranks", "0", "1", "3", "4", "---")
    assert sorted(caught.value.failures) == [0, 1, 2, 3, 4]
    assert caught.value.first[0] == 0


def test_a_failure_of_a_large_world_is_one_line_and_one_traceback():
    same = Failure("ValueError", "a long reason", "Traceback\n  in fail\n")
    error = RankFailed(dict.fromkeys(range(64), same))
    assert str(error) == "ranks 0–63: ValueError: a long reason\n\n--- ranks 0–63 ---\nTraceback\n  in fail"
    lost = Failure("ConnectionError", "closed", "elsewhere")
    told = str(RankFailed({**dict.fromkeys(range(8), lost), 5: same}, stopped=[8, 9, 10]))
    assert told.startswith("rank 5: ValueError: a long reason; ranks 0–4, 6, 7: ConnectionError: closed\n(ranks 8–10 ")
    assert says(str(RankDied({3: 1}, {0: lost, 1: lost, 2: lost})), "0–2", "ConnectionError")
    refused = Failure("ConnectionRefusedError", "nobody listens", "elsewhere")
    assert RankFailed({0: lost, 1: refused}).first == (1, refused), "who was let in no more lost nobody"


def test_a_rank_that_fails_frees_the_ones_that_wait_for_it():
    def fail_on_one():
        if dist.get_rank() == 1:
            raise ValueError("boo")
        dist.barrier()

    with World(3) as world:
        begin = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1: ValueError: boo") as caught:
            world.run(fail_on_one, timeout_s=240)
        assert time.monotonic() - begin < 120
        assert caught.value.stopped == [0, 2]
        assert "ranks 0, 2" in str(caught.value)
        assert world.run(rank_sum) == [3.0] * 3


def test_an_exception_that_cannot_be_pickled_still_arrives():
    def fail():
        class Odd(Exception):
            def __init__(self, a, b):
                super().__init__("odd one")
                self.lock = threading.Lock()

        raise Odd(1, 2)

    with World(1) as world, pytest.raises(RankFailed, match="Odd: odd one"):
        world.run(fail)


def test_sys_exit_is_a_failure_too():
    with World(1) as world, pytest.raises(RankFailed, match="SystemExit: exit status 3"):
        world.run(lambda: sys.exit(3))


def test_a_result_that_cannot_be_pickled_names_the_rank_and_type():
    def lock_on_one():
        return threading.Lock() if dist.get_rank() == 1 else None

    with World(2) as world:
        with pytest.raises(RankFailed, match=r"1.*TypeError"):
            world.run(lock_on_one)
        assert world.run(rank_sum) == [1.0, 1.0]


class OnlyOnARank:
    """Unpickles in a rank only."""

    def __reduce__(self):
        return (_refuse_outside_ranks, ())


def _refuse_outside_ranks():
    if not dist.is_initialized():
        raise RuntimeError("only on a rank")
    return OnlyOnARank()


def test_a_result_that_cannot_be_read_here_is_told():
    with World(1) as world:
        with pytest.raises(RankFailed, match=r"0.*TypeError.*RuntimeError"):
            world.run(OnlyOnARank)
        assert world.run(rank_sum) == [0.0]


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
    ("end", "told"),
    [
        (lambda: os._exit(7), "rank 1 died: exit code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 died: killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "rank 1 died: killed by SIGSEGV"),
    ],
)
def test_a_dead_rank_is_named_with_its_signal(end, told):
    def die_on_one():
        if dist.get_rank() == 1:
            end()
        dist.barrier()

    with World(3) as world:
        with pytest.raises(RankDied, match=told) as caught:
            world.run(die_on_one, timeout_s=240)
        assert list(caught.value.deaths) == [1]
        assert world.run(rank_sum) == [3.0] * 3


def test_a_death_starts_the_grace_time_of_ranks_that_wait_for_nobody(monkeypatch):
    """Nothing else ends them before the time limit. Each look at this clock takes a tenth of its seconds."""
    looks = itertools.count()
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: next(looks) / 10})
    monkeypatch.setattr(deadline, "time", clock)
    monkeypatch.setattr(generation, "POLL_S", 0.0)
    (works, its_end), (died, closed) = Pipe(), Pipe()
    closed.close()
    ranks = Ranks.__new__(Ranks)
    ranks.size, ranks.controls, ranks.printers, ranks.hosts, ranks.pids = 2, [works, died], [], None, [2**30, 2**30 + 1]
    ranks.nursery = SimpleNamespace(wait_exit=lambda pid, within_s: -signal.SIGKILL)
    with works, its_end, died, pytest.raises(RankDied, match=r"1.*SIGKILL"):
        ranks.collect(timeout_s=1000.0)
    assert generation.GRACE_S <= clock.monotonic() < generation.GRACE_S + 1


def test_a_hang_ends_at_the_time_limit_with_stacks():
    def only_rank_0_enters_the_barrier():
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            time.sleep(60)

    with World(2) as world:
        with pytest.raises(RankTimeout) as caught:
            world.run(only_rank_0_enters_the_barrier, timeout_s=1)
        assert says(str(caught.value), "finish", "1")
        assert sorted(caught.value.stacks) == [0, 1]
        for stack in caught.value.stacks.values():
            assert "only_rank_0_enters_the_barrier" in stack
            assert "pardemo/nursery" not in stack, "the reader's frames, not ours"
        assert world.run(rank_sum) == [1.0, 1.0]


def test_a_rank_that_is_stopped_is_told():
    def barriers():
        while True:
            dist.barrier()

    with World(2) as world:
        world.run(rank_sum)
        pid = world.pids[1]
        timer = threading.Timer(0.5, lambda: os.kill(pid, signal.SIGSTOP))
        timer.start()
        told = r"rank 0 is in barriers .*; rank 1 is stopped by a signal"
        with pytest.raises(RankTimeout, match=told):
            world.run(barriers, timeout_s=2)
        timer.join()
        assert world.run(rank_sum) == [1.0, 1.0]


def test_a_run_that_is_given_up_ends_as_at_its_limit():
    def sleeps_here():
        time.sleep(600)

    with World(2) as world:
        world.give_up()
        assert world.run(rank_sum) == [1.0, 1.0], "nothing ran that could be given up"
        seen = []
        threading.Timer(
            1.0, lambda: (seen.append(world.stacks()), seen.append(world.stacks()), world.give_up())
        ).start()
        with pytest.raises(RankTimeout, match=r"ranks 0, 1 did not finish within [12](\.\d)? s") as caught:
            world.run(sleeps_here)
        for stacks in (*seen, caught.value.stacks):
            assert sorted(stacks) == [0, 1]
            assert all(stack.count("in sleeps_here") == 1 for stack in stacks.values()), "each time the newest alone"
        assert world.stacks() == {}
        assert world.run(rank_sum) == [1.0, 1.0]


def test_ranks_that_finished_are_told_apart_from_those_that_hang():
    with World(2) as world, pytest.raises(RankTimeout, match=r"1.*1.*rank.*0"):
        world.run(lambda: time.sleep(60 * dist.get_rank()), timeout_s=1)


def test_a_time_out_says_in_its_first_line_who_waits_for_whom():
    """Rank 1 gets from rank 0 what rank 0 would have to get from rank 2."""

    def train():
        model = BucketedDataParallel(torch.nn.Linear(2, 2))
        for step in range(3):
            if dist.get_rank() == 2 and step == 2:
                time.sleep(60)
            model(torch.ones(1, 2)).sum().backward()

    exchange = r"all_reduce \(sum\) of bucket 0, backward 3 of data parallel 0"
    first = rf"^ranks 0–2 did not finish within 5 s: rank 0 waits for rank 2: {exchange}; rank 1 waits for rank 0: "
    with World(3) as world:
        world.run(dist.barrier)
        with pytest.raises(
            RankTimeout, match=first + rf"{exchange}; rank 2 is in train \(test_world.py, line \d+\)\n"
        ) as e:
            world.run(train, timeout_s=5)
        assert "\x02" not in str(e.value)
        assert world.run(rank_sum) == [3.0] * 3


def test_a_rank_with_fewer_batches_that_has_returned_is_named_at_once():
    def train():
        model = BucketedDataParallel(torch.nn.Linear(2, 2))
        for _ in range(3 - dist.get_rank()):
            model(torch.ones(1, 2)).sum().backward()

    told = r"^rank 0: ConnectionError: data parallel 0: .*rank 1 .*in all_reduce \(sum\) of bucket 0, backward 3"
    with World(2) as world, pytest.raises(RankFailed, match=told):
        world.run(train)


def test_a_wait_that_has_ended_is_not_told():
    def late_then_stuck():
        ring_all_reduce(torch.ones(2))  # makes the links
        if dist.get_rank():
            time.sleep(1.5)  # rank 0 has noted that it waits
        ring_all_reduce(torch.ones(2))
        if dist.get_rank() == 0:
            dist.barrier()

    told = (
        r"^rank 0 did not finish within 4 s \(rank 1 did\): rank 0 is in late_then_stuck \(test_world.py, line \d+\)\n"
    )
    with World(2) as world:
        world.run(dist.barrier)
        with pytest.raises(RankTimeout, match=told):
            world.run(late_then_stuck, timeout_s=4)


def test_a_rank_that_nobody_listens_to_says_so():
    """More than the kernel keeps for a neighbour that is busy elsewhere."""

    def send_much():
        link = link_of(dist.group.WORLD, "parcels")
        if dist.get_rank() == 0:
            data = torch.zeros(32 << 20, dtype=torch.uint8)
            link.wait_sent(link.send(bytes_of(data)))

    told = r"^rank 0 did not finish within 4 s \(rank 1 did\): rank 0 waits for rank 1 to take its part: parcels\n"
    with World(2) as world:
        world.run(dist.barrier)
        with pytest.raises(RankTimeout, match=told):
            world.run(send_much, timeout_s=4)


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
            other.run(lambda: os._exit(3))  # the nursery clears up after another rank
        assert psutil.pid_exists(child)
        until = time.monotonic() + 120
        while psutil.Process(daemon).status() != psutil.STATUS_SLEEPING:  # on a loaded machine it may not have begun to
            assert time.monotonic() < until, "a daemon of a rank that runs is its own business"
            time.sleep(0.05)
        ranks = world.pids
    assert gone([child, daemon, *ranks])


def test_closing_ends_all_ranks():
    with World(4) as world:
        world.run(rank_sum)
        pids = world.pids
    assert gone(pids)


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


@pytest.mark.parametrize(
    "then",
    ["os.kill(os.getpid(), 9)", "world.run(time.sleep, 600)", "os._exit(0)", "raise RuntimeError", "sys.exit()"],
    ids=["SIGKILL", "SIGKILL while ranks are busy", "os._exit", "an exception", "sys.exit"],
)
def test_nothing_is_left_running_when_the_parent_ends(then):
    script = textwrap.dedent(PARENT).format(then=then)
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    *words, store = parent.stdout.readline().split()
    pids = [int(word) for word in words]
    assert len(pids) == 4
    if "sleep" in then:
        time.sleep(0.3)
        parent.kill()
    parent.wait(120)
    parent.stdout.close()
    assert gone(pids)
    until = time.monotonic() + 120
    while os.path.exists(os.path.dirname(store)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not os.path.exists(os.path.dirname(store)), "the temporary folder is gone, too"


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
def test_a_killed_parent_leaves_nothing_that_left_the_session():
    script = textwrap.dedent(PARENT).format(then="os.kill(os.getpid(), 9)")
    script = script.replace('["sleep", "600"]', '["sleep", "600"], start_new_session=True')
    parent = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120)
    *pids, _ = parent.stdout.split()
    assert len(pids) == 4
    assert gone([int(pid) for pid in pids])


def test_a_killed_nursery_takes_its_ranks_along_and_is_replaced():
    with World(2, preload=["sndhdr" if sys.version_info < (3, 13) else "wave"]) as world:
        world.run(rank_sum)
        pids = world.pids
        nursery = psutil.Process(pids[0]).ppid()
        os.kill(nursery, signal.SIGKILL)
        assert gone(pids)
        with pytest.raises(RankDied):
            world.run(rank_sum)
        assert world.run(rank_sum) == [1.0, 1.0]


def test_a_killed_process_that_ranks_start_from_leaves_no_folder():
    """It cannot remove its folder; whoever asks for the next such process does."""
    with World(2, preload=["colorsys"]) as world:
        killed = world._ranks.nursery
        assert os.path.isdir(killed.folder)
        os.kill(killed.pid, signal.SIGKILL)
        assert gone(world.pids)
        with pytest.raises(RankDied):
            world.run(rank_sum)
        assert world.run(rank_sum) == [1.0, 1.0]
        assert world._ranks.nursery is not killed
        assert not os.path.exists(killed.folder)


LATE = """
import os, time
from pardemo.world.nursery_process import end_with
read, write = os.pipe()
if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.01)
        end_with(parent)
        os.write(1, b"it lives on")
    os._exit(0)
os.close(write)
os.read(read, 1)  # until both are gone, with the pipe's other end
"""


def test_what_was_forked_by_a_process_that_was_killed_at_once_ends_too():
    """The kernel tells nobody of a death that was before it was asked to."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LAST_WORLD = """
import os, signal
from pardemo import World
with World(2) as world:
    nursery = world._ranks.nursery
    print(nursery.folder, flush=True)
    os.kill(nursery.pid, signal.SIGKILL)
"""


def test_python_ends_without_the_folder_of_a_process_that_was_killed(tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}  # torch makes it among temporary files otherwise
    done = subprocess.run([sys.executable, "-c", LAST_WORLD], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **cache, "TMPDIR": str(folder)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert os.path.dirname(done.stdout.strip()) == str(folder)
    assert list(folder.iterdir()) == []
    alive = [process.pid for process in psutil.process_iter(["cmdline"]) if str(folder) in str(process.info["cmdline"])]
    assert gone(alive, 10), "its ranks, which may not have asked yet to end with it"


def test_a_process_that_cannot_be_started_leaves_no_folder(monkeypatch, tmp_path):
    def full(theirs, settings):
        assert os.path.isdir(settings["folder"])
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(nursery._handles)
    with pytest.raises(OSError, match="Too many open files"):
        nursery.Nursery((), nursery.RANK, full)
    assert list(tmp_path.iterdir()) == []
    assert set(nursery._handles) == before, "nothing to close when Python ends"


def test_scripts_need_no_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from pardemo import World\nwith World(2) as w:\n    print(w.run(lambda: 5))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[5, 5]\n"


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
    monkeypatch.setattr("pardemo.world.Ranks", lambda *given: generations.append(given))
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

    monkeypatch.setattr("pardemo.world.Ranks", ranks)
    with pytest.raises(RankError, match="closed while it ran"):
        world.run(rank_sum)
    assert made
    assert not world.pids
    assert gone(made[0].pids)


def test_closing_while_a_run_ends_lets_go_of_everything(monkeypatch):
    world = World(2)
    ranks, collect = world._ranks, world._ranks.collect

    def collect_and_be_closed(timeout_s):
        results = collect(timeout_s)
        threading.Thread(target=world.close).start()
        while not world._closed:
            time.sleep(0.01)
        return results

    ranks.await_start()
    monkeypatch.setattr(ranks, "collect", collect_and_be_closed)
    assert world.run(rank_sum) == [1.0, 1.0], "the results were there before"
    assert not world.pids
    assert ranks.ended, "its files are closed, its store removed"
    assert gone(ranks.pids)


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


def test_a_world_that_is_closed_after_the_process_its_ranks_come_from_does_not_wait():
    script = "import atexit\natexit.register(lambda: holder.world.close())\n"
    script += CLOSED_AT_THE_END.replace("__del__", "not_deleted") + "import time; begin = time.monotonic()\n"
    script += "atexit.register(lambda: [one.close() for one in __import__('pardemo').world.nursery._handles])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="pidfds are Linux's")
def test_a_forked_process_that_the_kernel_gives_no_descriptor_for_is_refused_cleanly(monkeypatch):
    def full(pid):
        raise OSError(errno.EMFILE, "Too many open files")

    unraised = []
    monkeypatch.setattr(os, "pidfd_open", full)
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    with pytest.raises(OSError, match="Too many open files"):
        Forked(os.getpid())
    gc.collect()
    assert not unraised


def test_a_fork_of_the_parent_does_not_keep_the_ranks_alive():
    script = textwrap.dedent(PARENT).format(then="os.fork() or time.sleep(600); os.kill(os.getpid(), 9)")
    command = [sys.executable, "-c", script]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    *words, _ = parent.stdout.readline().split()
    parent.wait(120)
    parent.stdout.close()
    try:
        assert gone([int(word) for word in words])
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if script in (process.info["cmdline"] or []):
                process.kill()


@pytest.mark.parametrize("answer", ["nursery", "ready", "pid"])
def test_an_interrupt_while_forking_spoils_no_other_world(world_of, monkeypatch, answer):
    """Whatever it interrupts: another nursery's start, its loading, the ranks'."""
    from pardemo.world import nursery

    read, before = nursery.Nursery._read, world_of(2).pids
    world_of(2).run(os.getpid)

    def interrupted(self, wanted, timeout_s):
        found = read(self, wanted, timeout_s)
        if answer in found:
            raise KeyboardInterrupt
        return found

    # Of modules that no other test preloads: else that process is there already, and nothing is left to interrupt.
    modules = {"nursery": "plistlib", "ready": "shelve", "pid": "stringprep"}
    monkeypatch.setattr(nursery.Nursery, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        World(2, preload=[modules[answer]])
    monkeypatch.undo()
    with World(2, preload=[modules[answer]]) as world:
        assert world.run(os.getpid) == world.pids
    assert world_of(2).run(os.getpid) == before


def test_the_environment_is_the_one_of_now(monkeypatch):
    monkeypatch.setenv("PARDEMO_LATER", "set after the first World")
    with World(1) as world:
        assert world.run(os.environ.get, "PARDEMO_LATER") == ["set after the first World"]


def test_what_a_preloaded_module_prints_goes_to_the_error_stream(tmp_path):
    """DeepSpeed says which accelerator it has taken: somebody's program may print JSON."""
    (tmp_path / "loud.py").write_text("print('which accelerator')")
    program = "from pardemo import World\nwith World(1, preload=['loud']) as world:\n    print(world.run(max, 1, 2)[0])"
    paths = os.pathsep.join((str(tmp_path), str(project.root())))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, "which accelerator" in done.stderr) == ("2\n", True)


def test_a_module_that_cannot_be_preloaded_is_told_every_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot preload 'no_such_module'"):
            World(1, preload=["no_such_module"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_nccl_without_gpus_is_refused_at_once_in_our_words():
    told = "backend 'nccl' needs a GPU for each of 2 ranks, and 0 are here; 'gloo' needs none"
    with pytest.raises(ValueError, match=f"^{told}$"):
        World(2, backend="nccl")


def test_odd_paths_signals_and_exceptions(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path, as notebooks like to append

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def mute():
        raise Mute

    with World(1, preload=["sched"]) as world:
        with pytest.raises(RankFailed, match="Mute"):
            world.run(mute)
        with pytest.raises(RankDied, match="killed by signal 35"):
            world.run(lambda: os.kill(os.getpid(), 35))
        with pytest.raises(RankFailed, match="closed file"):
            world.run(lambda: (sys.stdout.close(), print("x")))
        assert world.run(rank_sum) == [0.0]


def test_a_very_long_line_is_no_burden(world_of, capfd):
    begin = time.process_time()
    world_of(1).run(lambda: print("x" * (16 << 20)))
    assert time.process_time() - begin < 5, "of this process, which reads it in pieces"
    assert len(capfd.readouterr().out) == (16 << 20) + len("[0] \n")


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


@pytest.mark.parametrize(
    ("options", "error"),
    [({"timeout_s": -1}, ValueError), ({"timeout_s": 0}, ValueError), ({"env": {"A": 1}}, TypeError)],
)
def test_more_impossible_options(options, error):
    with pytest.raises(error):
        World(1, **options)
