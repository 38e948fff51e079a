"""Which of this machine's addresses another one can reach."""

import socket


def address_towards(host: str) -> str:
    """This machine's address on the route to ``host``. Opens a datagram socket, sends nothing."""
    family, kind, proto, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(where)
        return probe.getsockname()[0]
