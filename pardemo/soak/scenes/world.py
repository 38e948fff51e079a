"""Faults of a World: ranks that die, stop or stand still, interrupts, a refused connection, a clock that jumps."""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from pardemo import RankDied, RankError, RankFailed, RankTimeout, World
from pardemo.collectives import ring_all_reduce
from pardemo.deadline import MOST
from pardemo.soak.scene import Scene, scene
from pardemo.soak.scenes import ports
from pardemo.soak.scenes.parts import (
    LONG_S,
    SHORT_S,
    compute,
    computed,
    draw_ranks,
    ends_in,
    interrupted,
    meanwhile,
    nothing_below,
    signal_rank,
    works,
)

STEPS = 12
#: Steps that no scene comes to the end of.
ENDLESS = 10**9
ELEMENTS = (1, 1000, 300_000)  # 1.2 MB: a message of several segments


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise RuntimeError("on purpose")


def _end(status: int) -> None:
    os._exit(status)


def _exit() -> None:
    sys.exit(3)


ENDS: dict[str, tuple[Callable[[], None], type, str]] = {
    "SIGKILL": (_kill, RankDied, r"^rank {who} died: killed by SIGKILL"),
    "exception": (_raise, RankFailed, r"^rank {who}: RuntimeError: on purpose"),
    "os._exit(3)": (partial(_end, 3), RankDied, r"^rank {who} died: exit code 3"),
    "os._exit(0)": (partial(_end, 0), RankDied, r"^rank {who} died: exit code 0"),
    "sys.exit(3)": (_exit, RankFailed, r"^rank {who}: SystemExit: exit status 3"),
}


@scene("world/ends", ENDS, weight=3)
def _ends(scene: Scene) -> str:
    """A rank ends in the middle of its work, in each of the ways in which a process can."""
    ranks, who, when = draw_ranks(scene)
    do, error, says = ENDS[scene.way]
    with World(ranks) as world:
        world.run(compute, 1, 1, 0, 0)
        pids = world.pids
        run = partial(world.run, compute, STEPS, scene.chance.choice(ELEMENTS), who, when, do, timeout_s=LONG_S)
        told = ends_in(error, says.format(who=who), run)
        works(world, pids)
    nothing_below()
    return told


@scene("world/killed", ("rank", "nursery"), weight=2)
def _killed(scene: Scene) -> str:
    """From outside, at any moment: a rank, or the process that ranks are forked from and that keeps account of them."""
    ranks, who, _ = draw_ranks(scene)
    with World(ranks) as world:
        world.run(compute, 1, 1, 0, 0)
        pids = world.pids
        target = pids[who] if scene.way == "rank" else psutil.Process(pids[0]).ppid()
        run = partial(world.run, compute, ENDLESS, scene.chance.choice(ELEMENTS), 0, 0, timeout_s=LONG_S)
        says = rf"^rank {who} died: killed by SIGKILL" if scene.way == "rank" else r"^rank.* died"
        with meanwhile(lambda: os.kill(target, signal.SIGKILL), scene.chance.random()):
            told = ends_in(RankDied, says, run)
        works(world, pids)
    nothing_below()
    return told


@scene("world/stopped", ("for good", "for a while"), weight=2)
def _stopped(scene: Scene) -> str:
    """A rank is stopped by SIGSTOP: the run ends at its limit, or, where the rank goes on in time, in its result."""
    ranks, who, _ = draw_ranks(scene)
    steps = 2000
    with World(ranks) as world:
        world.run(compute, 1, 1, 0, 0)
        pids = world.pids
        if scene.way == "for good":
            run = partial(world.run, compute, ENDLESS, 1000, 0, 0, timeout_s=SHORT_S)
            with meanwhile(lambda: signal_rank(world, who, signal.SIGSTOP), scene.chance.random()):
                told = ends_in(RankTimeout, rf"did not finish within.*\brank {who} is stopped by a signal", run)
            works(world, pids)
        else:
            pause_s = scene.chance.random()

            def pause() -> None:
                os.kill(pids[who], signal.SIGSTOP)
                time.sleep(pause_s)
                os.kill(pids[who], signal.SIGCONT)

            with meanwhile(pause, scene.chance.random() / 2) as over:
                while not over.is_set():
                    results = world.run(compute, steps, 100, 0, 0, timeout_s=LONG_S)
                    right = results == computed(ranks, steps)
                    scene.expect(right, f"with a pause of {pause_s:.2f} s the sums are {results}")
            told = "went on"
    nothing_below()
    return told


def _sleep() -> None:
    time.sleep(3600)


def _spin() -> None:
    while True:
        pass


@scene("world/hang", ("sleeps", "computes", "leaves a collective out"), weight=2)
def _hang(scene: Scene) -> str:
    """A rank does not come to a collective. The run ends at its limit, and names who waits or who is missing."""
    ranks, who, when = draw_ranks(scene)
    with World(ranks) as world:
        begin = time.monotonic()
        if scene.way == "leaves a collective out":
            run = partial(world.run, _leave_out, who, when, timeout_s=SHORT_S)
            told = ends_in((RankTimeout, RankFailed), r"did not finish within|has returned|closed", run)
        else:
            do = {"sleeps": _sleep, "computes": _spin}[scene.way]
            run = partial(world.run, compute, STEPS, 1000, who, when, do, timeout_s=SHORT_S)
            where = {"sleeps": "_sleep", "computes": "_spin"}[scene.way]
            told = ends_in(RankTimeout, rf"did not finish within.*\brank {who} is in {where}\b", run)
        took_s = time.monotonic() - begin
        scene.expect(took_s < MOST * SHORT_S + 30, f"a limit of {SHORT_S:g} s ended after {took_s:.0f} s")
        works(world, [])
    nothing_below()
    return told


def _leave_out(who: int, when: int) -> None:
    """On every rank: sums over all ranks, of which rank ``who`` leaves one out."""
    import torch
    import torch.distributed as dist

    for step in range(STEPS + 1):
        if dist.get_rank() != who or step != when:
            ring_all_reduce(torch.ones(100))


@scene("world/interrupted", ("SIGINT",), {"SIGINT": signal.SIGINT}, within_s=1.5, weight=4)
def _interrupted(scene: Scene) -> str:
    """Ctrl-C at any moment: while ranks start, work, fail or end. Then a new World works, and nothing else runs."""

    def work(world: World) -> None:
        for _ in range(scene.chance.choice((1, 3, 30))):
            world.run(compute, 10, 100, 0, 0)

    return interrupted(scene, partial(World, scene.chance.choice((1, 2, 3))), work)


PARENT_ENDS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}


@scene("world/parent ends", PARENT_ENDS, PARENT_ENDS, within_s=1.5, weight=2)
def _parent_ends(scene: Scene) -> None:
    """The notebook's process is killed at any moment: while ranks start, work, fail or end."""
    ranks = scene.chance.choice((1, 2, 3))
    scene.begin()
    while True:
        with World(ranks) as world:
            for _ in range(scene.chance.choice((1, 3, 30))):
                world.run(compute, 10, 100, 0, 0)


@scene("world/refused port")
def _refused_port(scene: Scene) -> str:
    """A neighbour's port refuses a connection: an error on that rank, and none waits for it until its limit."""
    ranks, who, _ = draw_ranks(scene)
    return ports.refused(scene, World(ranks), ports.refuse_connections, who)


@scene("world/closed port")
def _closed_port(scene: Scene) -> str:
    """The same, and it is the kernel that refuses: the port's listener was closed."""
    ranks, who, _ = draw_ranks(scene)
    return ports.refused(scene, World(ranks), ports.close_ports, who)


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


def _compute_while_the_clock_jumps(by_s: float, steps: int, sleeps: bool) -> float:
    import torch.distributed as dist

    with Jumps(by_s * (1 + dist.get_rank())):
        return compute(steps, 1000, 0, 1, _sleep if sleeps else None)


@scene("world/clock jumps", ("result", "limit"))
def _clock_jumps(scene: Scene) -> str:
    """The clock jumps by an hour, here and on the ranks: results stay right, and a limit neither earlier nor later."""
    ranks, _, _ = draw_ranks(scene)
    by_s = 3600 * scene.chance.choice((-1, 1))
    with World(ranks) as world:
        if scene.way == "result":
            with Jumps(by_s):
                results = world.run(_compute_while_the_clock_jumps, by_s, STEPS, False, timeout_s=LONG_S)
            scene.expect(results == computed(ranks, STEPS), f"the sums are {results}")
            told = "right"
        else:
            begin = time.monotonic()
            with Jumps(by_s):
                run = partial(world.run, _compute_while_the_clock_jumps, by_s, STEPS, True, timeout_s=SHORT_S)
                told = ends_in(RankTimeout, "did not finish within", run)
            took_s = time.monotonic() - begin
            scene.expect(
                SHORT_S <= took_s < MOST * SHORT_S + 30, f"a limit of {SHORT_S:g} s ended after {took_s:.1f} s"
            )
        works(world, [])
    nothing_below()
    return told


@scene("world/no descriptors left")
def _no_descriptors_left(scene: Scene) -> str:
    """Too few files may be open for another World: it is refused, and what was opened for it is closed again."""
    import resource

    with World(2) as world:
        world.run(compute, 1, 1, 0, 0)
        before = _open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 1 + scene.chance.randrange(12), hard))
        try:
            told = ends_in(RankError, "Too many open files", partial(World, scene.chance.choice((4, 8))))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        more = _open_files() - before
        scene.expect(not more, f"left open: {[os.readlink(f'/proc/self/fd/{fd}') for fd in more]} ({told})")
        works(world, [])
    nothing_below()
    return told


def _open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").exists()}
