"""A run is watched, and given up as soon as its ranks can never go on; a rank that computes is never taken for one."""

import contextlib
import re
import threading
import time
from pathlib import Path

import psutil

from pardemo.deadline import Deadline
from pardemo.measure import journal, parting
from pardemo.world import World

#: Seconds for which nothing may happen on ranks that wait for one another, before they are given up.
STALLED_S = 3.0
_TURN_S = 0.5
#: Of a core's time, what a rank may take that waits.
_IDLE = 0.02
#: Where the innermost frame of a rank's main thread is while it waits in a collective: torch's, or what notes its end.
_WAITS = re.compile(r"/torch/(distributed|autograd)/|/torch/_ops\.py|/torch/_classes\.py|/pardemo/measure/calls\.py")
#: What stands around calls of torch here, and waits for nothing itself.
_AROUND = re.compile(r"/pardemo/(measure/(stand_ins|without_gpu|steps)|prove/record/recorder|compat)\.py")


class Watch:
    """Gives up a World's run whose ranks can never go on, rather than wait for its limit.

    Three things have to be true, all of them for three seconds. Time does not count for which a thread of these ranks
    waits for a core: it may hold the bytes that the others wait for. By the logs, some ranks wait in calls that are
    over only when a rank comes that has ended, is in another call of the same group, or is itself one of those that
    wait (:func:`pardemo.measure.parting.stuck`). These ranks' processes sleep, and take no time of a core. And the
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

    def __enter__(self) -> "Watch":
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
                stuck = parting.stuck(journal.read(self._journals))
                since, used_s = Deadline(STALLED_S, self._pids(stuck)), self._used(stuck)
                continue
            now_s, asleep = self._used(stuck), self._asleep(stuck)
            allowed = _IDLE * since.clock_s + 0.02
            if not asleep or now_s.keys() != used_s.keys() or any(now_s[r] - used_s[r] > allowed for r in stuck):
                stuck = []
            elif not since.left_s() and self._in_a_wait(stuck):
                self._world.give_up()
                return

    def _moved(self) -> bool:
        """Whether a rank has written since this was asked."""
        before = self._sizes
        self._sizes = {file.name: file.stat().st_size for file in Path(self._journals).glob("rank*")}
        return self._sizes != before

    def _used(self, ranks: list[int]) -> dict[int, float]:
        """Seconds of a core that ranks and their children have taken; without those whose processes have ended."""
        pids, used = self._world.pids, {}
        for rank in ranks:
            with contextlib.suppress(psutil.Error, IndexError):
                process = psutil.Process(pids[rank])
                own = [process, *process.children(recursive=True)]
                used[rank] = sum(sum(one.cpu_times()[:2]) for one in own)
        return used

    def _pids(self, ranks: list[int]) -> list[int]:
        pids = self._world.pids
        return [pids[rank] for rank in ranks if rank < len(pids)]

    def _asleep(self, ranks: list[int]) -> bool:
        pids = self._world.pids
        try:
            return all(psutil.Process(pids[rank]).status() == psutil.STATUS_SLEEPING for rank in ranks)
        except (psutil.Error, IndexError):
            return False

    def _in_a_wait(self, ranks: list[int]) -> bool:
        stacks = self._world.stacks()
        return all(waits(stacks.get(rank, "")) for rank in ranks)


def waits(stack: str) -> bool:
    """Whether the main thread of a stack, which stands last, is where torch waits for other ranks."""
    files = re.findall(r'File "([^"]+)"', stack.rpartition("most recent call first")[2])
    innermost = next((file for file in files if not _AROUND.search(file)), "")
    return bool(_WAITS.search(innermost))
