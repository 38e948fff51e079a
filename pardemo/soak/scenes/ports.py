"""Ports that refuse a connection, on the ranks of a World or of a cluster."""

import os
import socket
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from pardemo import RankFailed, World
from pardemo.collectives import ring_all_reduce
from pardemo.soak.scene import Scene
from pardemo.soak.scenes.parts import LONG_S, compute, ends_in, nothing_below, works


def refuse_connections(who: int, when: int) -> None:
    """On rank ``who``, from the connection of that number on, as if nobody listened any more."""
    if dist.get_rank() != who:
        return
    real, seen = socket.create_connection, [0]

    def refused(address: tuple[str, int], *more: object, **options: object) -> socket.socket:
        seen[0] += 1
        if seen[0] > when:
            raise ConnectionRefusedError(111, os.strerror(111))
        return real(address, *more, **options)  # type: ignore[arg-type]

    socket.create_connection = refused  # type: ignore[assignment]


def close_ports(who: int, when: int) -> None:
    """On the rank behind ``who``, from the port of that number on: the one that it announces has a listener that was
    closed, so that the kernel refuses rank ``who``; on its own port it waits in vain."""
    if dist.get_rank() != (who + 1) % dist.get_world_size():
        return
    real, seen = socket.socket.getsockname, [0]

    def closed(listener: socket.socket) -> tuple[str, int]:
        address = real(listener)
        seen[0] += 1
        if seen[0] <= when:
            return address
        with socket.socket(listener.family) as other:
            other.bind((address[0], 0))
            other.listen()
            return real(other)

    socket.socket.getsockname = closed  # type: ignore[method-assign, assignment]


def links_refused(refuse: Callable[[int, int], None], who: int, when: int) -> None:
    """On every rank: groups, each with its own connections, until rank ``who`` finds its neighbour's port shut."""
    refuse(who, when)
    for _ in range(when + 2):
        ring_all_reduce(torch.ones(1000), dist.new_group())


def refused(scene: Scene, world: World, refuse: Callable[[int, int], None], who: int) -> str:
    """An error on the rank whose neighbour's port is shut, and none waits for it until its limit; then all is well."""
    with world:
        world.run(compute, 1, 1, 0, 0, timeout_s=LONG_S)
        pids = world.pids
        run = partial(world.run, links_refused, refuse, who, scene.chance.randrange(3), timeout_s=LONG_S)
        told = ends_in(RankFailed, "cannot send to rank . of the group: .*[Rr]efused", run)
        works(world, pids)
    nothing_below()
    return told
