"""What cases of several groups share: work for ranks, the error that is due, a fault meanwhile, a small disk."""

import contextlib
import gc
import io
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from pardemo import RankError, RankFailed, World, project
from pardemo.collectives import ring_all_reduce
from pardemo.deadline import Deadline
from pardemo.world import fork_server
from soak.case import Case, NotReached, Skipped, Wrong
from soak.leftovers import running

#: A time limit that a case's fault runs into; and one that is later than the case's own, so that a run which only its
#: limit would end is a hang.
SHORT_S, LONG_S = 3.0, 600.0
GONE_WITHIN_S = 10.0
#: Steps that no case comes to the end of.
ENDLESS = 10**9


def compute(
    steps: int = 1, elements: int = 1, who: int = 0, when: int = 0, do: Callable[[], object] | None = None,
    touched: Path | None = None,
) -> float:  # fmt: skip
    """On every rank: so many sums over all ranks, by our ring and by gloo in turn; the sum of what came out.

    Rank ``who`` calls ``do`` before step ``when``. Rank 0 touches a file before each step, if there is one.
    """
    total, rank = 0.0, dist.get_rank()
    for step in range(steps):
        if do is not None and rank == who and step == when:
            do()
        if touched is not None and rank == 0:
            touched.touch()
        values = torch.full((elements,), float(rank + step))
        (dist.all_reduce if step % 2 else ring_all_reduce)(values)
        total += values.double().mean().item()  # exact: all are the same whole number
    return total


def computed(ranks: int, steps: int) -> list[float]:
    """What :func:`compute` has to return on each rank."""
    return [float(sum(ranks * (ranks - 1) / 2 + ranks * step for step in range(steps)))] * ranks


def draw_ranks(case: Case) -> tuple[int, int, int]:
    """A number of ranks, the rank to blame, and the step at which it fails."""
    ranks = case.rng.choice((2, 2, 3, 4))
    return ranks, case.rng.randrange(ranks), case.rng.randrange(12)


@contextlib.contextmanager
def working(world: World, restarts: bool = True) -> Iterator[World]:
    """A World whose ranks have started; after the block it computes, with other ranks where ``restarts``.

    Raises:
        Wrong: a former rank still runs, or the World does not compute.
    """
    with world:
        world.run(compute, timeout_s=LONG_S)
        before = world.pids if restarts else []
        yield world
        works(world, before)


def works(world: World, gone: Collection[int] = ()) -> None:
    """Raises :class:`Wrong` where processes that should be gone still run, or the World does not compute."""
    limit = Deadline(GONE_WITHIN_S, list(gone))
    while left := [pid for pid in gone if _runs(pid)]:
        if not limit.left_s():
            raise Wrong(f"ranks of before still run: processes {left}")
        time.sleep(0.02)
    try:
        sums = world.run(compute, timeout_s=LONG_S)
    except RankError as error:
        raise Wrong(f"afterwards the World fails: {first_line(error)}") from None
    if sums != computed(world.size, 1):
        raise Wrong(f"afterwards the World sums to {sums}")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def nothing_runs() -> None:
    """Raises :class:`Wrong` where something of this case still runs, but for the processes that ranks start from."""
    gc.collect()  # a World whose making was interrupted ends its ranks when nobody knows it any more
    limit = Deadline(GONE_WITHIN_S, [os.getpid()])
    while left := running({handle.pid for handle in fork_server.running()}):
        if not limit.left_s():
            raise Wrong(f"still running: {', '.join(map(str, left))}")
        time.sleep(0.02)


def first_line(error: RankError) -> str:
    """What a reader sees first; of a rank's own error of several lines, as torch has them, all in one."""
    if isinstance(error, RankFailed):
        rank, failure = error.first
        return f"rank {rank}: {project.one_line(failure.headline)}"
    return project.first_line(error)


def ends_in(error: type[RankError] | tuple[type[RankError], ...], says: str, run: Callable[[], object]) -> str:
    """Calls ``run``, which has to raise this error with a first line that matches; returns that line."""
    try:
        result = run()
    except RankError as raised:
        line = first_line(raised)
        if isinstance(raised, error) and re.search(says, line):
            return line
        raise Wrong(f"{type(raised).__name__} where another error was due ({says}): {line}") from None
    raise Wrong(f"no error, but a result: {str(result)[:200]}")


@contextlib.contextmanager
def meanwhile(do: Callable[[], object], after_s: float) -> Iterator[threading.Event]:
    """Within the block another thread calls ``do`` after so long; the event that it gives is set when that is over.

    Raises:
        Wrong: ``do`` has raised. NotReached: it was not called before the block was over, as it should be.
    """
    errors: list[Exception] = []
    happened = threading.Event()

    def later() -> None:
        try:
            do()
        except Exception as error:
            errors.append(error)
        finally:
            happened.set()

    timer = threading.Timer(after_s, later)
    timer.daemon = True
    timer.start()
    try:
        yield happened
    finally:
        timer.cancel()
        timer.join(LONG_S)
    if errors:
        raise Wrong(f"the fault did not happen: {type(errors[0]).__name__}: {errors[0]}")
    if not happened.is_set():
        raise NotReached("the work was over before the fault")


def goes_on(case: Case, world: World, do: Callable[[], object], after_s: float, steps: int, elements: int) -> str:
    """Ranks compute while ``do`` disturbs them and until it is over: their sums stay right."""
    with meanwhile(do, after_s) as over:
        while not over.is_set():
            results = world.run(compute, steps, elements, timeout_s=LONG_S)
            case.expect(results == computed(world.size, steps), f"the sums are {results}")
    return "went on"


def interrupted(case: Case, start: Callable[[], World], work: Callable[[World], object]) -> str:
    """Ctrl-C comes at any moment, while Worlds start, ``work`` and end; then a new one works, and nothing else runs."""
    try:
        case.begin()
        for _ in range(200):
            with start() as world:
                work(world)
        raise Wrong("the interrupt was not noticed")
    except KeyboardInterrupt:
        world = None  # type: ignore[assignment]  # what holds the ranks of before
    nothing_runs()
    with start() as world:
        works(world)
    return "interrupted"


def refused(case: Case, world: World, refuse: Callable[[int, int], None], who: int) -> str:
    """Rank ``who`` finds its neighbour's port shut: an error on it, and none waits until the limit."""
    with working(world):
        when = case.rng.randrange(3)
        run = lambda: world.run(_links, refuse, who, when, timeout_s=LONG_S)  # noqa: E731
        return ends_in(RankFailed, "cannot send to rank . of the group: .*[Rr]efused", run)


def _links(refuse: Callable[[int, int], None], who: int, when: int) -> None:
    """On every rank: groups, each with its own connections, until rank ``who`` finds its neighbour's port shut."""
    refuse(who, when)
    for _ in range(when + 2):
        ring_all_reduce(torch.ones(1000), dist.new_group())


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """Within the block ``folder`` is a disk of so many bytes, in memory, which this case's processes alone see.

    Raises:
        Skipped: this machine does not allow it.
    """
    folder.mkdir(exist_ok=True)
    tmpfs = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    for command in (["mount", "--make-rprivate", "/"], tmpfs):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Skipped(f"a small disk cannot be mounted here: {done.stderr.strip() or 'no rights'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def damaged(case: Case, path: Path) -> int:
    """Cuts a file off, changes a bit of it, makes it longer or removes it, as the case's way says; at which byte."""
    whole = path.read_bytes()
    place = case.rng.randrange(max(1, len(whole)))
    if case.way == "truncated":
        path.write_bytes(whole[:place] if whole else b"x")
    elif case.way == "changed":
        bit = bytes([whole[place] ^ 1 << case.rng.randrange(8)]) if whole else b"x"
        path.write_bytes(whole[:place] + bit + whole[place + 1 :])
    elif case.way == "longer":
        path.write_bytes(whole + bytes(case.rng.randrange(1, 100)))
    elif case.way == "missing":
        path.unlink()
    return place


def called(*arguments: object) -> tuple[int, str]:
    """The exit status of ``pardemo ARGUMENTS``, called in this process, and what it wrote to stderr."""
    from pardemo import cli

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    return status, errors.getvalue()


def one_line(told: str) -> str:
    """The last line of an error; raises :class:`Wrong` where a traceback stands above it."""
    if "Traceback (most recent call last)" in told:
        raise Wrong(f"a traceback: {told[-800:]}")
    lines = told.strip().splitlines()
    return lines[-1] if lines else ""
