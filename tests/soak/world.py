"""Faults of a World: ranks that die, stop or stand still, interrupts, a refused connection, a clock that jumps."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

import psutil
import torch
import torch.distributed as dist

from pardemo import RankDied, RankError, RankFailed, RankTimeout, World
from pardemo.collectives import ring_all_reduce
from pardemo.deadline import MOST
from soak.case import Case, fault
from soak.common import (
    ENDLESS,
    LONG_S,
    SHORT_S,
    compute,
    draw_ranks,
    ends_in,
    goes_on,
    interrupted,
    meanwhile,
    refused,
    working,
)  # fmt: skip

STEPS = 12
ELEMENTS = (1, 1000, 300_000)  # 1.2 MB: a message of several segments


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def throw() -> None:
    raise RuntimeError("on purpose")


def _end(status: int) -> None:
    os._exit(status)


def _exit() -> None:
    sys.exit(3)


ENDS: dict[str, tuple[Callable[[], None], type[RankError], str]] = {
    "SIGKILL": (kill, RankDied, r"^rank {who} died: killed by SIGKILL"),
    "exception": (throw, RankFailed, r"^rank {who}: RuntimeError: on purpose"),
    "os._exit(3)": (partial(_end, 3), RankDied, r"^rank {who} died: exit code 3"),
    "os._exit(0)": (partial(_end, 0), RankDied, r"^rank {who} died: exit code 0"),
    "sys.exit(3)": (_exit, RankFailed, r"^rank {who}: SystemExit: exit status 3"),
}


@fault("world/ends", ENDS, weight=3)
def _ends(case: Case) -> str:
    """A rank ends in the middle of its work, in each of the ways in which a process can."""
    ranks, who, when = draw_ranks(case)
    do, error, says = ENDS[case.way]
    with working(World(ranks)) as world:
        run = partial(world.run, compute, STEPS, case.rng.choice(ELEMENTS), who, when, do, timeout_s=LONG_S)
        return ends_in(error, says.format(who=who), run)


@fault("world/killed", ("rank", "fork server"), weight=2)
def _killed(case: Case) -> str:
    """From outside, at any moment: a rank, or the process that ranks are forked from and that keeps account of them."""
    ranks, who, _ = draw_ranks(case)
    with working(World(ranks)) as world:
        target = world.pids[who] if case.way == "rank" else psutil.Process(world.pids[0]).ppid()
        run = partial(world.run, compute, ENDLESS, case.rng.choice(ELEMENTS), timeout_s=LONG_S)
        says = rf"^rank {who} died: killed by SIGKILL" if case.way == "rank" else r"^rank.* died"
        with meanwhile(lambda: os.kill(target, signal.SIGKILL), case.rng.random()):
            return ends_in(RankDied, says, run)


@fault("world/stopped", ("for good", "for a while"), weight=2)
def _stopped(case: Case) -> str:
    """A rank is stopped by SIGSTOP: the run ends at its limit, or, where the rank goes on in time, in its result."""
    ranks, who, _ = draw_ranks(case)
    for_good = case.way == "for good"
    with working(World(ranks), restarts=for_good) as world:
        pid, pause_s = world.pids[who], case.rng.random()

        def stop() -> None:
            os.kill(pid, signal.SIGSTOP)
            if not for_good:
                time.sleep(pause_s)
                os.kill(pid, signal.SIGCONT)

        if not for_good:
            return goes_on(case, world, stop, case.rng.random() / 2, 2000, 100)
        run = partial(world.run, compute, ENDLESS, 1000, timeout_s=SHORT_S)
        with meanwhile(stop, pause_s):
            return ends_in(RankTimeout, rf"did not finish within.*\brank {who} is stopped by a signal", run)


def sleep() -> None:
    time.sleep(3600)


def _spin() -> None:
    while True:
        pass


def _leave_out(who: int, when: int) -> None:
    """On every rank: sums over all ranks, of which rank ``who`` leaves one out."""
    for step in range(STEPS + 1):
        if dist.get_rank() != who or step != when:
            ring_all_reduce(torch.ones(100))


@fault("world/hang", ("sleeps", "computes", "leaves a collective out"), weight=2)
def _hang(case: Case) -> str:
    """A rank does not come to a collective. The run ends at its limit, and names who waits or who is missing."""
    ranks, who, when = draw_ranks(case)
    with working(World(ranks)) as world:
        begin = time.monotonic()
        if case.way == "leaves a collective out":
            run = partial(world.run, _leave_out, who, when, timeout_s=SHORT_S)
            told = ends_in((RankTimeout, RankFailed), r"did not finish within|has returned|closed", run)
        else:
            do = {"sleeps": sleep, "computes": _spin}[case.way]
            run = partial(world.run, compute, STEPS, 1000, who, when, do, timeout_s=SHORT_S)
            told = ends_in(RankTimeout, rf"did not finish within.*\brank {who} is in {do.__name__}\b", run)
        _check_limit(case, begin)
    return told


def _check_limit(case: Case, begin: float, least_s: float = 0.0) -> None:
    took_s = time.monotonic() - begin
    case.expect(least_s <= took_s < MOST * SHORT_S + 30, f"a limit of {SHORT_S:g} s ended after {took_s:.1f} s")


@fault("world/interrupted", ("SIGINT",), signals={"SIGINT": signal.SIGINT}, within_s=1.5, weight=4)
def _interrupted(case: Case) -> str:
    """Ctrl-C at any moment: while ranks start, work, fail or end. Then a new World works, and nothing else runs."""

    def work(world: World) -> None:
        for _ in range(case.rng.choice((1, 3, 30))):
            world.run(compute, 10, 100)

    return interrupted(case, partial(World, case.rng.choice((1, 2, 3))), work)


PARENT_ENDS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}


@fault("world/parent ends", PARENT_ENDS, signals=PARENT_ENDS, within_s=1.5, weight=2)
def _parent_ends(case: Case) -> None:
    """The notebook's process is killed at any moment: while ranks start, work, fail or end."""
    ranks = case.rng.choice((1, 2, 3))
    case.begin()
    while True:
        with World(ranks) as world:
            for _ in range(case.rng.choice((1, 3, 30))):
                world.run(compute, 10, 100)


def _refuse_connections(who: int, when: int) -> None:
    """On rank ``who``, from the connection of that number on, as if nobody listened any more."""
    if dist.get_rank() != who:
        return
    real, seen = socket.create_connection, [0]

    def create_connection(address: tuple[str, int], *more: object, **options: object) -> socket.socket:
        seen[0] += 1
        if seen[0] > when:
            raise ConnectionRefusedError(111, os.strerror(111))
        return real(address, *more, **options)  # type: ignore[arg-type]

    socket.create_connection = create_connection  # type: ignore[assignment]


def close_ports(who: int, when: int) -> None:
    """On the rank behind ``who``, from the port of that number on: the one that it announces has a listener that was
    closed, so that the kernel refuses rank ``who``; on its own port it waits in vain."""
    if dist.get_rank() != (who + 1) % dist.get_world_size():
        return
    real, seen = socket.socket.getsockname, [0]

    def getsockname(listener: socket.socket) -> tuple[str, int]:
        address = real(listener)
        seen[0] += 1
        if seen[0] <= when:
            return address
        with socket.socket(listener.family) as other:
            other.bind((address[0], 0))
            other.listen()
            return real(other)

    socket.socket.getsockname = getsockname  # type: ignore[method-assign, assignment]


@fault("world/refused port")
def _refused_port(case: Case) -> str:
    """A neighbour's port refuses a connection: an error on that rank, and none waits for it until its limit."""
    ranks, who, _ = draw_ranks(case)
    return refused(case, World(ranks), _refuse_connections, who)


@fault("world/closed port")
def _closed_port(case: Case) -> str:
    """The same, and it is the kernel that refuses: the port's listener was closed."""
    ranks, who, _ = draw_ranks(case)
    return refused(case, World(ranks), close_ports, who)


class Jumps:
    """``time.time`` in this process jumps back and forth by up to so many seconds, each time that it is asked."""

    def __init__(self, by_s: float):
        self._by_s, self._real, self._asked = by_s, time.time, 0

    def __enter__(self) -> None:
        time.time = self  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        time.time = self._real

    def __call__(self) -> float:
        self._asked += 1
        return self._real() + self._by_s * (-1) ** self._asked


def _sleep_while_the_clock_jumps(by_s: float) -> None:
    with Jumps(by_s * (1 + dist.get_rank())):
        compute(STEPS, 1000, 0, 1, sleep)


@fault("world/clock jumps")
def _clock_jumps(case: Case) -> str:
    """The clock jumps by an hour, here and on the ranks, of which one sleeps: its limit ends the run, not the clock."""
    ranks, _, _ = draw_ranks(case)
    by_s = 3600 * case.rng.choice((-1, 1))
    with working(World(ranks)) as world, Jumps(by_s):
        begin = time.monotonic()
        run = partial(world.run, _sleep_while_the_clock_jumps, by_s, timeout_s=SHORT_S)
        told = ends_in(RankTimeout, "did not finish within", run)
        _check_limit(case, begin, SHORT_S)
    return told
