"""World: real ranks, their answers, and everything that can go wrong with them."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import says

from pardemo import RankDied, RankError, RankFailed, RankTimeout, World, deadline, project
from pardemo.collectives import ring_all_reduce
from pardemo.collectives.links import bytes_of, link_of
from pardemo.data_parallel import BucketedDataParallel
from pardemo.world import rank_processes
from pardemo.world.errors import Failure
from pardemo.world.rank_processes import Ranks


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


def test_threads_and_environment_are_those_of_now(monkeypatch):
    monkeypatch.setenv("PARDEMO_LATER", "set after the first World")
    with World(1, threads=2, env={"PARDEMO_TEST": "yes"}) as world:
        told = world.run(lambda: (torch.get_num_threads(), os.environ["PARDEMO_TEST"], os.environ["PARDEMO_LATER"]))
    assert told == [(2, "yes", "set after the first World")]


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


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (65, ValueError), (True, ValueError),
                                             (2.0, ValueError), ("4", ValueError), (None, ValueError)])  # fmt: skip
def test_impossible_sizes_are_refused(size, error):
    with pytest.raises(error, match="World size must be"):
        World(size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threads": 0}, ValueError, "threads must be a whole number from 1"),
        ({"backend": "mpi"}, ValueError, "backend must be 'gloo', 'nccl' or None, not 'mpi'"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be above 0, not 0"),
        ({"env": {"A": 1}}, TypeError, "env holds texts, not 'A': 1"),
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


def test_what_all_ranks_say_alike_is_told_once():
    def fail():
        if dist.get_rank() == 2:
            raise KeyError("another")
        raise ValueError("the same")

    with World(5) as world:
        with pytest.raises(RankFailed) as caught:
            world.run(fail)
        assert world.run(rank_sum) == [10.0] * 5
    text = str(caught.value)
    assert {r: f.type for r, f in caught.value.failures.items()} == dict.fromkeys(range(5), "ValueError") | {
        2: "KeyError"
    }
    assert "in fail" in text, "the rank's own traceback"
    assert says(text, "0", "1", "3", "4", "ValueError", "2", "KeyError", "'another'")
    assert text.count("Traceback") == 2, "one of each"
    assert says(text, "---", "ranks", "0", "1", "3", "4", "---")
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


class OnlyOnARank:
    """Unpickles in a rank only."""

    def __reduce__(self):
        return (_refuse_outside_ranks, ())


def _refuse_outside_ranks():
    if not dist.is_initialized():
        raise RuntimeError("only on a rank")
    return OnlyOnARank()


def raise_what_cannot_be_pickled():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__("odd one")
            self.lock = threading.Lock()

    raise Odd(1, 2)


def raise_what_has_no_text():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    raise Mute


ODD_CALLS = [
    (raise_what_cannot_be_pickled, RankFailed, "Odd: odd one"),
    (raise_what_has_no_text, RankFailed, "Mute"),
    (lambda: sys.exit(3), RankFailed, "SystemExit: exit status 3"),
    (lambda: threading.Lock(), RankFailed, "rank 0: TypeError: .*lock"),
    (lambda: OnlyOnARank(), RankFailed, "rank 0: TypeError: .*RuntimeError"),
    (lambda: os.kill(os.getpid(), 35), RankDied, "killed by signal 35"),
    (lambda: (sys.stdout.close(), print("x")), RankFailed, "closed file"),
]


def test_odd_errors_results_and_ends_are_told_and_the_next_call_works(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path, as notebooks like to append
    with World(1, preload=["sched"]) as world:
        for call, error, told in ODD_CALLS:
            with pytest.raises(error, match=told):
                world.run(call)
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
    monkeypatch.setattr(rank_processes, "POLL_S", 0.0)
    (works, its_end), (died, closed) = Pipe(), Pipe()
    closed.close()
    ranks = Ranks.__new__(Ranks)
    ranks.size, ranks.controls, ranks.printers, ranks.hosts, ranks.pids = 2, [works, died], [], None, [2**30, 2**30 + 1]
    ranks.fork_server = SimpleNamespace(wait_exit=lambda pid, within_s: -signal.SIGKILL)
    with works, its_end, died, pytest.raises(RankDied, match=r"1.*SIGKILL"):
        ranks.collect(timeout_s=1000.0)
    assert rank_processes.GRACE_S <= clock.monotonic() < rank_processes.GRACE_S + 1


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
            assert "pardemo/world" not in stack, "the reader's frames, not ours"
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


def test_a_time_out_says_in_its_first_line_who_waits_for_whom():
    """Rank 1 gets from rank 0 what rank 0 would have to get from rank 2."""

    def train():
        model = BucketedDataParallel(torch.nn.Linear(2, 2))
        for step in range(3):
            if dist.get_rank() == 2 and step == 2:
                time.sleep(60)
            model(torch.ones(1, 2)).sum().backward()

    exchange = r"all_reduce \(sum\) of bucket 0 of forward pass 3 of data parallel 0"
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

    told = r"^rank 0: ConnectionError: data parallel 0: .*rank 1 .*in all_reduce \(sum\) of bucket 0 of forward pass 3"
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


def test_scripts_need_no_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from pardemo import World\nwith World(2) as w:\n    print(w.run(lambda: 5))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[5, 5]\n"


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_nccl_without_gpus_is_refused_at_once_in_our_words():
    told = "backend 'nccl' needs a GPU for each of 2 ranks, and 0 are here; 'gloo' needs none"
    with pytest.raises(ValueError, match=f"^{told}$"):
        World(2, backend="nccl")


def test_a_very_long_line_is_no_burden(world_of, capfd):
    begin = time.process_time()
    world_of(1).run(lambda: print("x" * (16 << 20)))
    assert time.process_time() - begin < 5, "of this process, which reads it in pieces"
    assert len(capfd.readouterr().out) == (16 << 20) + len("[0] \n")
