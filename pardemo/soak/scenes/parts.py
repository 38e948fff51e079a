"""What scenes of several groups share: work for ranks, the right error, and that a World works afterwards."""

import contextlib
import gc
import io
import os
import pkgutil
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from pardemo import RankError, World
from pardemo.collectives import ring_all_reduce
from pardemo.deadline import Deadline
from pardemo.soak.layouts.run import first_line
from pardemo.soak.ranks.run import state_after
from pardemo.soak.scene import NotReached, Scene, Skipped, Wrong
from pardemo.world import nursery

#: A time limit that a scene's fault runs into, and one that nothing should reach.
SHORT_S, LONG_S = 3.0, 120.0


def compute(
    steps: int, elements: int, who: int, when: int, do: Callable[[], object] | None = None, touched: Path | None = None
) -> float:
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


def interrupted(scene: Scene, start: Callable[[], World], work: Callable[[World], object]) -> str:
    """Ctrl-C comes at any moment, while Worlds start, ``work`` and end; then a new one works, and nothing else runs."""
    try:
        scene.begin()
        for _ in range(200):
            with start() as world:
                work(world)
        raise Wrong("the interrupt was not noticed")
    except KeyboardInterrupt:
        world = None  # type: ignore[assignment]  # what holds the ranks of before
    nothing_below()
    with start() as world:
        works(world, [])
    nothing_below()
    return "interrupted"


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


def works(world: World, pids: list[int]) -> None:
    """Raises :class:`Wrong` where the World's former ranks still run, or new ones do not compute."""
    if fault := state_after(world, pids):
        raise Wrong(fault)


def nothing_below() -> None:
    """Raises :class:`Wrong` where something of this scene's still runs, but for the processes that ranks start from."""
    gc.collect()  # a World whose making was interrupted ends its ranks when nobody knows it any more
    limit = Deadline(10.0, [os.getpid()])
    while left := _below():
        if not limit.left_s():
            raise Wrong(f"still running: {', '.join(left)}")
        time.sleep(0.02)


def _below() -> list[str]:
    nurseries = {handle.pid for handle in nursery.living()}
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in nurseries and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {' '.join(process.cmdline())[:60]}")
    return left


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


def signal_rank(world: World, rank: int, number: int) -> None:
    """Sends a signal to a rank's process."""
    os.kill(world.pids[rank], number)


class Halt:
    """A fault that is to bring ranks to a halt, which a limit alone does not show: it ends whatever goes on, too.

    ``touched``: a file for :func:`compute` to touch before each step.
    """

    def __init__(self, folder: Path, do: Callable[[], object]):
        self.touched, self._do, self._at_s = folder / "touched", do, float("inf")

    def __call__(self) -> None:
        self._do()
        self._at_s = time.time()

    def check(self) -> None:
        """Raises :class:`Wrong` where ranks never worked, or worked a second after the fault."""
        last_s = self.touched.stat().st_mtime if self.touched.exists() else 0.0
        if not 0 < last_s < self._at_s + 1:
            raise Wrong(f"the last step begins {last_s - self._at_s:.2f} s after the fault")


def draw_ranks(scene: Scene) -> tuple[int, int, int]:
    """A number of ranks, the rank to blame, and the step at which it fails."""
    ranks = scene.chance.choice((2, 2, 3, 4))
    return ranks, scene.chance.randrange(ranks), scene.chance.randrange(12)


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """Within the block ``folder`` is a disk of so many bytes, in memory, which this scene's processes alone see.

    Raises:
        Skipped: this machine does not allow it.
    """
    folder.mkdir(exist_ok=True)
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Skipped(f"a small disk cannot be mounted here: {done.stderr.strip() or 'no rights'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def called(*arguments: object) -> tuple[int, str]:
    """The exit status of ``pardemo ARGUMENTS``, called in this process, and what it wrote to stderr."""
    main = pkgutil.resolve_name("pardemo.cli:main")  # it stands above this room: by its name, as a shell has it
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    return status, errors.getvalue()


def one_line(told: str) -> str:
    """The last line of an error; raises :class:`Wrong` where a traceback stands above it."""
    if "Traceback (most recent call last)" in told:
        raise Wrong(f"a traceback: {told[-800:]}")
    lines = told.strip().splitlines()
    return lines[-1] if lines else ""
