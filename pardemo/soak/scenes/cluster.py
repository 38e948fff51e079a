"""Faults of a cluster: a link that becomes slow, goes away, comes back; a keeper that dies; what is left of hosts.

The hosts are network namespaces. Where those are not allowed, the scenes are skipped and say why.
"""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

from pardemo import Cluster, RankDied, RankError, RankFailed, RankTimeout, World
from pardemo.soak.scene import Scene, Skipped, Wrong, scene
from pardemo.soak.scenes import ports
from pardemo.soak.scenes.parts import (
    LONG_S,
    Halt,
    compute,
    computed,
    ends_in,
    interrupted,
    meanwhile,
    nothing_below,
    works,
)

RATE = "800 Mbit/s"
ELEMENTS = 50_000  # 0.2 MB a step: two milliseconds of the link
ENDLESS = 10**9
LIMIT_S = 6.0
#: A process that enters a rank's host, says so, and then switches its network card as the lines of its input say.
SWITCH = """
import sys
from pyroute2 import IPRoute
from pardemo.cluster import keeper
keeper.enter(int(sys.argv[1]), sys.argv[2] == "True")
with IPRoute() as route:
    index = route.link_lookup(ifname=keeper.ADAPTER)[0]
    print(flush=True)
    for line in sys.stdin:
        route.link("set", index=index, state=line.strip())
        print(flush=True)
"""


def _cluster(scene: Scene) -> Cluster:
    return Cluster(2, scene.chance.choice((1, 2)), between=RATE, tier="namespaces")


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
        hosts = world._ranks.hosts if world._ranks else None
        if hosts is None:
            raise Wrong("the World has no hosts")
        place = hosts.place(rank)
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-c", SWITCH, str(place.pid), str(place.user)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._answer()

    def __enter__(self) -> "Switch":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(LONG_S)

    def turn(self, state: str) -> None:
        """Switches the card ``"down"`` or ``"up"``."""
        assert self._process.stdin is not None
        print(state, file=self._process.stdin, flush=True)
        self._answer()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise Wrong("the network card of the host cannot be switched")


@scene("cluster/link away", ("for good", "for a while"), weight=2)
def _link_away(scene: Scene) -> str:
    """A host's network card goes down in the middle of a run, which ends at its limit; or it comes back in time."""
    cluster = _cluster(scene)
    with _world(cluster) as world:
        world.run(compute, 1, 1, 0, 0, timeout_s=LONG_S)
        pids, steps = world.pids, 100
        with Switch(world, scene.chance.randrange(cluster.size)) as switch:
            if scene.way == "for good":
                halt = Halt(scene.folder, partial(switch.turn, "down"))
                run = partial(world.run, compute, ENDLESS, ELEMENTS, 0, 0, touched=halt.touched, timeout_s=LIMIT_S)
                with meanwhile(halt, scene.chance.random()):
                    told = ends_in((RankTimeout, RankFailed), "did not finish within|closed|reset|lost", run)
                halt.check()
            else:
                pause_s = 0.2 + 0.8 * scene.chance.random()

                def away() -> None:
                    switch.turn("down")
                    time.sleep(pause_s)
                    switch.turn("up")

                with meanwhile(away, scene.chance.random() / 4) as over:
                    while not over.is_set():
                        results = world.run(compute, steps, ELEMENTS, 0, 0, timeout_s=LONG_S)
                        scene.expect(results == computed(cluster.size, steps), f"the sums are {results}")
                told = "went on"
        works(world, pids if scene.way == "for good" else [])
    nothing_below()
    return told


@scene("cluster/slow link")
def _slow_link(scene: Scene) -> str:
    """A host's network card becomes slower in the middle of a run, and itself again: the sums stay right."""
    cluster, steps = _cluster(scene), 60
    with _world(cluster) as world:
        world.run(compute, 1, 1, 0, 0, timeout_s=LONG_S)
        host = scene.chance.randrange(2)

        def slower() -> None:
            world.limit(host, scene.chance.choice(("40 Mbit/s", "100 Mbit/s")))
            time.sleep(scene.chance.random())
            world.limit(host, None)

        with meanwhile(slower, scene.chance.random() / 4) as over:
            while not over.is_set():
                results = world.run(compute, steps, ELEMENTS, 0, 0, timeout_s=LONG_S)
                scene.expect(results == computed(cluster.size, steps), f"the sums are {results}")
        works(world, [])
    nothing_below()
    return "right"


@scene("cluster/ends", ("rank", "keeper"))
def _ends(scene: Scene) -> str:
    """A rank of a host is killed, or the process that keeps the hosts: an error, then other hosts and ranks."""
    cluster = _cluster(scene)
    with _world(cluster) as world:
        world.run(compute, 1, 1, 0, 0, timeout_s=LONG_S)
        pids = world.pids
        hosts = world._ranks.hosts if world._ranks else None
        assert hosts is not None
        who = scene.chance.randrange(cluster.size)
        target = pids[who] if scene.way == "rank" else hosts.keeper_pid
        run = partial(world.run, compute, ENDLESS, ELEMENTS, 0, 0, timeout_s=LONG_S)
        with meanwhile(partial(os.kill, target, signal.SIGKILL), scene.chance.random()):
            if scene.way == "rank":
                told = ends_in(RankDied, rf"^rank {who} died: killed by SIGKILL", run)
            else:
                told = ends_in(RankError, "keeps the hosts and their network has ended: killed by SIGKILL", run)
        works(world, pids)
    nothing_below()
    return told


@scene("cluster/closed port")
def _closed_port(scene: Scene) -> str:
    """A rank's port on the hosts' network has a listener that was closed: an error on the rank before it."""
    cluster = _cluster(scene)
    return ports.refused(scene, _world(cluster), ports.close_ports, scene.chance.randrange(cluster.size))


SIGNALS = {"SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL}


@scene("cluster/interrupted", SIGNALS, SIGNALS, within_s=2.0)
def _interrupted(scene: Scene) -> str:
    """The process that made the hosts is interrupted or killed at any moment: no namespace, link or keeper is left."""
    start = partial(_world, _cluster(scene))
    return interrupted(scene, start, lambda world: world.run(compute, 20, 1000, 0, 0, timeout_s=LONG_S))
