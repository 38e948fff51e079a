"""Runs the page's jobs, whose ranks are killed, and hosts that die alone, and reads what they leave."""

import contextlib
import math
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pardemo.project import one_line
from pardemo.world import World
from pardemo.world.errors import RankDied, RankError

#: What a rank keeps from one call of a function to the next, as the memory of its host would.
KEPT: dict[str, Any] = {}
MEET_S = 30.0  # that hosts wait for one another
LIMIT_S = 120.0  # of a call on ranks: none of this page's takes longer, or it hangs


class Clock:
    """A pace that does not drift: each wait ends when all waits together say so, however long the work between took."""

    def __init__(self) -> None:
        self._until = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleeps until ``seconds`` after the end of the last wait; not at all where that is over."""
        self._until += seconds
        time.sleep(max(0.0, self._until - time.monotonic()))


def die_after(seconds: float) -> None:
    """This process is killed by SIGKILL after so many seconds, wherever it is then."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def failure_times(mean_s: float, count: int, seed: int) -> list[float]:
    """Seconds until each of ``count`` failures, exponential, in random order.

    One is drawn from each of ``count`` equal parts of the distribution: so few failures have its mean and its shape.
    """
    draw = random.Random(seed)
    times = [-mean_s * math.log(1 - (part + draw.random()) / count) for part in range(count)]
    draw.shuffle(times)
    return times


class Outcome(NamedTuple):
    """The times and failures of a job that was killed again and again.

    Attributes:
        saved: steps that the last save has. seconds: in all. training_s: from each begin of the job to its end.
        failures: how often it was killed.
    """

    saved: int
    seconds: float
    training_s: float
    failures: int

    @property
    def restart_s(self) -> float:
        """From a failure until the job begins again, on average."""
        return (self.seconds - self.training_s) / self.failures


def killed_again_and_again(
    job: Callable[..., None], folder: Path, every: int, failures: Sequence[float], ranks: int
) -> Outcome:
    """Runs ``job(folder, every, dies_s, victim)`` on ranks, and again after each failure, until all have happened.

    A first failure, which is not counted, comes at once: so each one that is counted has a restart before it.

    Args:
        failures: seconds until the job kills itself, each time that it runs. ranks: of which each in turn is killed.

    Raises:
        RankError: the job ended otherwise than by its failure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with World(ranks, timeout_s=LIMIT_S) as world:
        for number, dies_s in enumerate([0.0, *failures]):
            if number == 1:
                begin = time.monotonic()
            try:
                world.run(job, folder, every, dies_s, number % ranks)
            except RankDied:
                continue
            raise RankError("the job ended, and was not killed")
        seconds = time.monotonic() - begin
    state = folder / "state"
    saved = int(state.read_text(encoding="utf-8")) if state.exists() else 0
    return Outcome(saved, seconds, sum(failures), len(failures))


def side_by_side(runs: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Returns each function's result, by its key; they run at the same time, each in a thread of its own."""
    with ThreadPoolExecutor(max(1, len(runs))) as threads:
        begun = {key: threads.submit(run) for key, run in runs.items()}
        return {key: future.result() for key, future in begun.items()}


@contextlib.contextmanager
def killing_at(nbytes: int) -> Iterator[None]:
    """Within the block the kernel ends this process, by SIGXFSZ, when it writes a file beyond ``nbytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; by default it ends a process
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # and leaves no core
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def killed_at(nbytes: int, write: Callable[..., Any], *arguments: Any) -> str:
    """Calls ``write(*arguments)`` in a process that the kernel kills when a file of its grows beyond ``nbytes``.

    Returns:
        How the process ended: ``"killed by SIGXFSZ"``, or ``"done"`` where it wrote no file that large.
    """

    def limited() -> None:
        with killing_at(nbytes):
            write(*arguments)

    with World(1, timeout_s=LIMIT_S) as world:
        try:
            world.run(limited)
        except RankDied as died:
            return f"killed by {signal.Signals(-(died.deaths[0] or 0)).name}"
        return "done"


def read_or_error(path: Path) -> str:
    """The step of a checkpoint, or in one line what torch says of the file."""
    try:
        return f"step {torch.load(path, weights_only=True)['step']}"
    except (RuntimeError, EOFError, OSError) as error:
        text = one_line(error)
        return f"{type(error).__name__}: {text[:90]}{'…' if len(text) > 90 else ''}"


class Hosts:
    """Hosts of one job that die alone: each is a rank of its own, and what it keeps is lost with it alone.

    They meet through a store in this process (:func:`meet`), as the agents of torchrun and of torchft do.
    """

    def __init__(self, count: int):
        self._worlds = [World(1, timeout_s=LIMIT_S) for _ in range(count)]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._worlds:
            world.close()

    @property
    def port(self) -> int:
        """The store's port."""
        return int(self._store.port)

    def run(self, function: Callable[..., Any], *arguments: Any, only: Sequence[int] | None = None) -> dict[int, Any]:
        """Calls ``function(host, port, *arguments)`` on each host at once; what it returned, or the RankDied.

        Args:
            only: the hosts to ask; all where there is none. One that has died is there again, with an empty memory.

        Raises:
            RankError: other than that a host died.
        """

        def ask(host: int) -> Any:
            try:
                return self._worlds[host].run(function, host, self.port, *arguments)[0]
            except RankDied as died:
                return died

        chosen = range(len(self._worlds)) if only is None else only
        return side_by_side({host: lambda host=host: ask(host) for host in chosen})


def meet(port: int, name: str, rank: int, size: int) -> dist.ProcessGroupGloo:
    """On a host: a group of ``size`` hosts that meet under ``name``; a collective of it raises where a host is gone.

    Raises:
        RuntimeError: not all of them came in time.
    """
    limit = timedelta(seconds=MEET_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, limit)
