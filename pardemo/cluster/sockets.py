"""Reads the sockets that other code has opened, and finds the address that another machine can reach."""

import contextlib
import socket
import threading
from collections.abc import Iterator

_alone = threading.Lock()


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """The descriptor as a socket, within the block; its flags are not touched, and it is not closed.

    Python makes a socket of its own non-blocking where there is a default timeout, so there is none meanwhile. To write
    the flag back afterwards would be wrong: its owner may have changed it in between. gloo does, for each connection
    that it has just opened; left blocking, its one thread waits in it, and all ranks hang.

    Raises:
        OSError: it is closed, or no socket.
    """
    with _alone:
        timeout = socket.getdefaulttimeout()
        if timeout is not None:
            socket.setdefaulttimeout(None)
        try:
            connection = socket.socket(fileno=fd)
        finally:
            if timeout is not None:
                socket.setdefaulttimeout(timeout)
    try:
        yield connection
    finally:
        connection.detach()


def address_towards(host: str) -> str:
    """This machine's address on the route to ``host``. Opens a datagram socket, sends nothing."""
    family, kind, proto, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(where)
        return probe.getsockname()[0]
