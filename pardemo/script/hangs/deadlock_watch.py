"""Ends a run whose ranks are deadlocked."""

import contextlib
import re
import threading
import time
from pathlib import Path

import psutil

from pardemo.deadline import Deadline
from pardemo.script.hangs import journal
from pardemo.script.hangs.call_table import deadlocked_ranks
from pardemo.world import World

#: Seconds for which nothing may happen on ranks that wait for one another, before they are given up.
STALLED_S = 3.0
_TURN_S = 0.5
#: Of a core's time, what a rank may take that waits.
_IDLE = 0.02
#: Modules of this package that call torch in place of a script and wait for nothing themselves.
AROUND_TORCH = (
    "pardemo.compat", "pardemo.script.record.recorder", "pardemo.script.runtime.stand_ins",
    "pardemo.script.runtime.steps", "pardemo.script.runtime.without_gpu",
)  # fmt: skip
#: The module that notes when a collective is over, and so waits for it.
WAITS = "pardemo.script.runtime.collectives"


def _paths(*modules: str) -> str:
    """Makes a pattern that the modules' paths match."""
    return "|".join(re.escape(f"/{module.replace('.', '/')}.py") for module in modules)


_AROUND_TORCH = re.compile(_paths(*AROUND_TORCH))
#: Where the innermost frame of a rank's main thread is while it waits in a collective: torch's, or what notes its end.
_IN_A_WAIT = re.compile(r"/torch/(distributed|autograd)/|/torch/_ops\.py|/torch/_classes\.py|" + _paths(WAITS))


class DeadlockWatch:
    """Ends a World's run whose ranks are deadlocked, without waiting for its time limit.

    Three things have to be true, all of them for three seconds. Time does not count for which a thread of these ranks
    waits for a core: it may hold the bytes that the others wait for. By the logs, some ranks wait in calls that are
    over only when a rank comes that has ended, is in another call of the same group, or is itself one of those that
    wait (:func:`deadlocked_ranks`). These ranks' processes sleep, and take no time of a core. And the
    innermost frame of each one's main thread is one in which torch waits. So a rank that computes, reads a file, or
    sleeps while an exchange that it has begun goes on, is none of them; nor is one whose bytes pass a slow link.

    Args:
        world: whose ranks are watched while the block runs. journals: the folder of their logs.
    """

    def __init__(self, world: World, journals: str):
        self._world, self._journals = world, journals
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._sizes: dict[str, int] = {}
        #: when the block ended: until then ranks have waited; the machine's monotonic clock
        self.until_s = 0.0

    def __enter__(self) -> "DeadlockWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.until_s = time.monotonic()
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        stuck: list[int] = []
        since, used_s = Deadline(STALLED_S, ()), dict[int, float]()
        while not self._over.wait(_TURN_S):
            if self._moved():
                stuck = []
                continue
            if not stuck:
                stuck, pids = deadlocked_ranks(journal.read_logs(self._journals)), self._world.pids
                since = Deadline(STALLED_S, [pids[rank] for rank in stuck if rank < len(pids)])
                used_s = self._asleep(stuck)
                continue
            now_s, allowed = self._asleep(stuck), _IDLE * since.clock_s + 0.02
            if any(rank not in now_s or now_s[rank] - used_s.get(rank, 0.0) > allowed for rank in stuck):
                stuck = []
            elif not since.left_s() and self._in_a_wait(stuck):
                self._world.give_up()
                return

    def _moved(self) -> bool:
        """Whether a rank has logged anything since the last call."""
        before = self._sizes
        self._sizes = {file.name: file.stat().st_size for file in Path(self._journals).glob("rank*")}
        return self._sizes != before

    def _asleep(self, ranks: list[int]) -> dict[int, float]:
        """Returns, of ranks whose processes sleep, the seconds of a core that they and their children have taken."""
        pids, used = self._world.pids, {}
        for rank in ranks:
            with contextlib.suppress(psutil.Error, IndexError):
                process = psutil.Process(pids[rank])
                if process.status() == psutil.STATUS_SLEEPING:
                    processes = [process, *process.children(recursive=True)]
                    used[rank] = sum(sum(running.cpu_times()[:2]) for running in processes)
        return used

    def _in_a_wait(self, ranks: list[int]) -> bool:
        stacks = self._world.stacks()
        return all(is_waiting(stacks.get(rank, "")) for rank in ranks)


def is_waiting(stack: str) -> bool:
    """Whether the main thread of a stack, which stands last, is where torch waits for other ranks."""
    files = re.findall(r'File "([^"]+)"', stack.rpartition("most recent call first")[2])
    innermost = next((file for file in files if not _AROUND_TORCH.search(file)), "")
    return bool(_IN_A_WAIT.search(innermost))
