"""Faults of a cluster: a link that becomes slow, goes away, comes back; a supervisor that dies; what is left of hosts.

The hosts are network namespaces. Where those are not allowed, the cases are skipped and say why.
"""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from pardemo import Cluster, RankDied, RankError, RankFailed, RankTimeout, World
from soak.case import Case, Skipped, Wrong, fault
from soak.common import ENDLESS, LONG_S, compute, ends_in, goes_on, interrupted, meanwhile, refused, working
from soak.world import close_ports

RATE = "800 Mbit/s"
ELEMENTS = 50_000  # 0.2 MB a step: two milliseconds of the link
LIMIT_S = 6.0
#: A process that enters a rank's host, says so, and then switches its network card as the lines of its input say.
SWITCH = """
import sys
from pyroute2 import IPRoute
from pardemo.cluster import namespaces
namespaces.enter(int(sys.argv[1]), sys.argv[2] == "True")
with IPRoute() as route:
    index = route.link_lookup(ifname=namespaces.ADAPTER)[0]
    print(flush=True)
    for line in sys.stdin:
        route.link("set", index=index, state=line.strip())
        print(flush=True)
"""


def _cluster(case: Case) -> Cluster:
    return Cluster(2, case.rng.choice((1, 2)), between=RATE, tier="namespaces")


def _world(cluster: Cluster) -> World:
    try:
        return World(cluster.size, cluster=cluster)
    except ValueError as error:
        if not re.search("Operation not permitted|Permission denied|Function not implemented", str(error)):
            raise
        raise Skipped(str(error)) from None


class Switch:
    """The network card of a host, to be switched off and on from outside, while ranks use it."""

    def __init__(self, world: World, rank: int):
        place, path = world._ranks.hosts.place(rank), os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-c", SWITCH, str(place.pid), str(place.user)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._answer()

    def __enter__(self) -> "Switch":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(LONG_S)

    def turn(self, state: str) -> None:
        """Switches the card ``"down"`` or ``"up"``."""
        print(state, file=self._process.stdin, flush=True)
        self._answer()

    def _answer(self) -> None:
        if not self._process.stdout.readline():
            raise Wrong("the network card of the host cannot be switched")


@fault("cluster/link away", ("for good", "for a while"), weight=2)
def _link_away(case: Case) -> str:
    """A host's network card goes down in the middle of a run, which ends at its limit; or it comes back in time."""
    cluster, for_good = _cluster(case), case.way == "for good"
    with (
        working(_world(cluster), restarts=for_good) as world,
        Switch(world, case.rng.randrange(cluster.size)) as switch,
    ):
        pause_s, down_at = 0.2 + 0.8 * case.rng.random(), [float("inf")]

        def away() -> None:
            switch.turn("down")
            down_at[0] = time.time()
            if not for_good:
                time.sleep(pause_s)
                switch.turn("up")

        if not for_good:
            return goes_on(case, world, away, case.rng.random() / 4, 100, ELEMENTS)
        touched = Path("touched")
        run = partial(world.run, compute, ENDLESS, ELEMENTS, touched=touched.absolute(), timeout_s=LIMIT_S)
        with meanwhile(away, pause_s):
            told = ends_in((RankTimeout, RankFailed), "did not finish within|closed|reset|lost", run)
        # the limit would end ranks that go on, too
        last_s = touched.stat().st_mtime
        case.expect(last_s < down_at[0] + 1, f"the last step begins {last_s - down_at[0]:.2f} s after the fault")
    return told


@fault("cluster/slow link")
def _slow_link(case: Case) -> str:
    """A host's network card becomes slower in the middle of a run, and itself again: the sums stay right."""
    with working(_world(_cluster(case)), restarts=False) as world:
        host = case.rng.randrange(2)

        def slower() -> None:
            world.limit(host, case.rng.choice(("40 Mbit/s", "100 Mbit/s")))
            time.sleep(case.rng.random())
            world.limit(host, None)

        return goes_on(case, world, slower, case.rng.random() / 4, 60, ELEMENTS)


@fault("cluster/ends", ("rank", "supervisor"))
def _ends(case: Case) -> str:
    """A rank of a host is killed, or the process that keeps the hosts: an error, then other hosts and ranks."""
    cluster = _cluster(case)
    with working(_world(cluster)) as world:
        who = case.rng.randrange(cluster.size)
        target, error, says = world.pids[who], RankDied, rf"^rank {who} died: killed by SIGKILL"
        if case.way == "supervisor":
            target, error = world._ranks.hosts._process.pid, RankError
            says = "supervisor of the hosts and their network has ended: killed by SIGKILL"
        run = partial(world.run, compute, ENDLESS, ELEMENTS, timeout_s=LONG_S)
        with meanwhile(partial(os.kill, target, signal.SIGKILL), case.rng.random()):
            return ends_in(error, says, run)


@fault("cluster/closed port")
def _closed_port(case: Case) -> str:
    """A rank's port on the hosts' network has a listener that was closed: an error on the rank before it."""
    cluster = _cluster(case)
    return refused(case, _world(cluster), close_ports, case.rng.randrange(cluster.size))


SIGNALS = {"SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL}


@fault("cluster/interrupted", SIGNALS, signals=SIGNALS)
def _interrupted(case: Case) -> str:
    """The process that made the hosts is interrupted or killed at any moment: no namespace, link or process is left."""
    start = partial(_world, _cluster(case))
    return interrupted(case, start, lambda world: world.run(compute, 20, 1000, timeout_s=LONG_S))
