"""Sets time limits to work, and puts them off while it waits for a core: beside other work it is slow, not stuck."""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence

#: The first look at the processes; a shorter limit is the clock's. The kernel counts a wait for a core when it ends,
#: so a limit is prolonged by this much at least.
STEP_S = 0.25
#: How many times its limit some work may take on the clock, however busy the machine is.
MOST = 20


class Deadline:
    """The end of a time limit for some processes and their descendants, which starts now.

    It is put off by the time for which they wait for a core: a process that sleeps, or hangs in a collective, uses up
    its limit by the clock; one that computes gets the limit of time on a core, however many others share that core.
    Linux counts these waits (``/proc/PID/task/TID/schedstat``); elsewhere the limit is the clock's.

    Args:
        limit_s: the limit, in seconds. pids: the processes; one that has ended does no harm.
    """

    def __init__(self, limit_s: float, pids: Sequence[int]):
        self.limit_s = limit_s
        #: Seconds for which the processes could have gone on, had there been a core for them.
        self.waited_s = 0.0
        self._pids = pids
        self._began = self._looked = time.monotonic()
        self._look_at = self._began + min(STEP_S, limit_s)
        self._tasks: dict[str, tuple[int, int]] | None = None

    def left_s(self) -> float:
        """Seconds after which this has to be asked again; 0 where the limit is over."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look(now)
            end = self._began + min(self.limit_s + self.waited_s, MOST * self.limit_s)
            if now < end:
                self._look_at = max(now + STEP_S, min(now + self.limit_s / 50, end))
        return max(0.0, self._look_at - now)

    @property
    def clock_s(self) -> float:
        """Seconds since it began, by the clock."""
        return time.monotonic() - self._began

    @property
    def busy(self) -> str:
        """The reason why a limit was put off for long; nothing of another one."""
        if self.waited_s < max(STEP_S, self.limit_s / 10):
            return ""
        return f"the machine was busy: on the clock it took {self.clock_s:.0f} s"

    def __str__(self) -> str:
        return f"{self.limit_s:g} s" + (f" ({self.busy})" if self.busy else "")

    def _look(self, now: float) -> None:
        """Adds the part of the time since the last look for which the work stood still for want of a core."""
        before, self._tasks = self._tasks, _tasks(self._pids)
        elapsed_s, self._looked = now - self._looked, now
        if before is None:  # ranks may have waited before this limit began
            return
        ran, waited = [0.0], [0.0]
        for task, counts in self._tasks.items():
            for seconds, count, earlier in zip((ran, waited), counts, before.get(task, (0, 0)), strict=True):
                seconds.append(max(0, count - earlier) / 1e9)
        runnable_s = sum(ran) + sum(waited)
        # tasks that take turns, as ranks do that wait for one another, are together runnable all the time, and together
        # stand still for the part of it that waiting has; one beside others that have a core waits as long as it says
        shared_s = min(runnable_s, elapsed_s) * sum(waited) / runnable_s if runnable_s else 0.0
        # a wait that had not ended at the last look counts now, and so may be longer than what has passed since
        self.waited_s = min(now - self._began, self.waited_s + max(shared_s, *waited))


def ended_within(process: subprocess.Popen, limit_s: float) -> bool:
    """Whether a child ends within a limit; waits for it until then."""
    deadline = Deadline(limit_s, [process.pid])
    while left_s := deadline.left_s():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(left_s)
            return True
    return process.poll() is not None


def _tasks(pids: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Nanoseconds on a core, and of waiting for one, of each thread of the processes and of all their descendants."""
    times, left = {}, [str(pid) for pid in pids]
    while left:
        folder = f"/proc/{left.pop()}/task"
        with contextlib.suppress(OSError):  # it has ended, or there is no /proc
            for task in os.listdir(folder):
                with contextlib.suppress(OSError):
                    with open(f"{folder}/{task}/schedstat") as stream:
                        ran, waited, _ = stream.read().split()
                    times[task] = int(ran), int(waited)
                    with open(f"{folder}/{task}/children") as stream:
                        left += stream.read().split()
    return times
