"""Finds out whether the kernel paces loopback, how fast loopback is, and which ports are free."""

import functools
import random
import socket
import sys
import threading
import time

from pardemo.cluster.units import bandwidth_text

#: ``SO_MAX_PACING_RATE``, bytes a second; Python has no name for it.
PACING = 47
SURE_BYTES_PER_S = 125e6  # 1 Gbit/s, which every machine's loopback carries: nothing is measured for less
_PROBE_BYTES = 128 << 20


@functools.cache
def paces() -> bool:
    """Whether the kernel takes a limit for a TCP connection: Linux since 4.13, without any privilege."""
    if sys.platform != "linux":
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, PACING, 1_000_000)
            return probe.getsockopt(socket.SOL_SOCKET, PACING) == 1_000_000
        except OSError:
            return False


@functools.cache
def measured_rate() -> float:
    """Bytes a second that one connection over loopback carries here, measured once per process."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        piece = memoryview(bytearray(1 << 20))
        thread = threading.Thread(target=_send, args=(sender, piece), daemon=True)
        begin, received = time.perf_counter(), 0
        thread.start()
        with receiver:
            while received < _PROBE_BYTES:
                received += receiver.recv_into(piece) or _PROBE_BYTES
        return received / (time.perf_counter() - begin)


def _send(sender: socket.socket, piece: memoryview) -> None:
    for _ in range(_PROBE_BYTES // len(piece)):
        sender.sendall(piece)


def refuse_above_measured(rate: float, name: str) -> None:
    """Raises ValueError where loopback cannot carry so many bytes a second: such a link would not be what it says."""
    if rate > SURE_BYTES_PER_S and rate > measured_rate():
        there = bandwidth_text(measured_rate())
        raise ValueError(
            f"{name}: {bandwidth_text(rate)} is more than loopback carries here, {there} on one connection"
        )


def free_port() -> int:
    """A port that nobody listens at, for a program that will.

    It is below those that the kernel gives away by itself (from 32,768 on): until the program listens there, anybody's
    connection might have been given one of these.

    Raises:
        OSError: none was free in a hundred tries, or no socket can be opened.
    """
    chance = random.SystemRandom()  # a script's own random numbers stay where they are
    tries = 100
    while True:
        port = chance.randrange(10_000, 32_000)
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            tries -= 1
            if not tries:
                raise
