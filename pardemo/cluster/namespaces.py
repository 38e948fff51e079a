"""Supervises hosts that are network namespaces: makes and connects them, limits their cards, keeps them alive.

``python -m pardemo.cluster.namespaces`` is started by a World. It makes a namespace that is the switch (a bridge), and
for each host a child with a namespace of its own; a veth pair leads from each host to the switch, and a token bucket
(tbf) at both of its ends lets through what the card carries, each way. As root, or as anybody in a user namespace of
its own. Ranks enter by ``setns`` (:func:`enter`).

Nothing has a name on the machine: namespaces, links and limits are gone with the last process in them, and the
supervisor and its children end with the World's process, whatever ends that.
"""

import ctypes
import json
import os
import select
import socket
import struct
import sys
from contextlib import suppress

from pardemo.termination import end_with_parent

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
ADAPTER = "eth0"  # of a host, seen from inside
NETWORK = "10.77."  # that the hosts share; two octets more for each
MTU, SMALL_MTU = 9000, 1500  # bytes of a packet: of 9,000 less than a hundredth are headers
SLOW = 5e6  # bytes a second; below, what a network card lets through at once is to be small, too
QUEUE_BYTES = 64 << 20  # of an adapter: TCP's windows fit, so nothing is dropped
#: A host's TCP. It begins at full speed also after a pause, as between two steps. And it hands the card little at a
#: time: else what another connection has to say, an acknowledgement or "I am ready", waits behind a whole message.
TCP = {"tcp_slow_start_after_idle": "0", "tcp_limit_output_bytes": "18000"}
MOST_HOSTS = 250
POLL_S = 0.5


def address(host: int) -> str:
    """A host's address on the emulated network."""
    return f"{NETWORK}0.{host + 1}"


def packet_bytes(rate: float | None) -> int:
    """The largest packet of a network card with that limit."""
    return SMALL_MTU if rate is not None and rate < SLOW else MTU


def main() -> int:
    """Makes the hosts that the first argument describes, says ``{"hosts": [pid, …]}``, and waits for its end."""
    settings, parent = json.loads(sys.argv[1]), os.getppid()
    try:
        _own_namespaces(settings["user"])
        hosts = _build(settings["hosts"], settings["rate"])
    except Exception as error:  # pyroute2's errors, a kernel without bridge or tbf, are not OSErrors
        print(json.dumps({"error": f"{getattr(error, 'strerror', None) or error}"}), flush=True)
        return 1
    print(json.dumps({"hosts": list(hosts)}), flush=True)
    while os.getppid() == parent:  # the World closes the line, or is gone; a fork of it may still hold the other end
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            asked = sys.stdin.readline()
            if not asked:
                break
            print(json.dumps(_change(list(hosts.values()), **json.loads(asked))), flush=True)
    return 0


def enter(pid: int, user: bool) -> None:
    """Moves this process, which has one thread, into the namespaces of a host that ``pid`` keeps.

    Raises:
        OSError: the kernel does not allow it, or the supervisor is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = [("user", CLONE_NEWUSER)] * user + [("net", CLONE_NEWNET)]
    files = [(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), kind) for name, kind in kinds]
    try:
        for file, kind in files:
            if libc.setns(file, kind):
                number = ctypes.get_errno()
                raise OSError(number, f"cannot enter the host's network: {os.strerror(number)}")
    finally:
        for file, _ in files:
            os.close(file)


def _build(hosts: int, rate: float | None) -> dict[int, socket.socket]:
    """Makes and connects the hosts: the pid of the process that keeps each one, and the socket to it."""
    from pyroute2 import IPRoute

    with IPRoute() as switch:
        _up(switch, "lo")
        switch.link("add", ifname="switch", kind="bridge")
        _up(switch, "switch")
        bridge = switch.link_lookup(ifname="switch")[0]
        lines, supervisor = {}, os.getpid()
        for host in range(hosts):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                _keep_host(host, rate, theirs, supervisor)
            theirs.close()
            _expect(ours)  # it has its namespace
            port = f"port{host}"
            switch.link("add", ifname=port, kind="veth", peer={"ifname": ADAPTER, "net_ns_fd": f"/proc/{pid}/ns/net"})
            index = switch.link_lookup(ifname=port)[0]
            switch.link("set", index=index, mtu=packet_bytes(rate), master=bridge, state="up")
            _limit(switch, index, rate)
            ours.send(b"1")
            _expect(ours)  # it has configured its end
            lines[pid] = ours
        return lines


def _change(lines: list[socket.socket], host: int, rate: float | None) -> dict:
    """Another limit for a host's network card, at both of its ends."""
    from pyroute2 import IPRoute

    try:
        with IPRoute() as switch:
            _limit(switch, switch.link_lookup(ifname=f"port{host}")[0], rate)
        lines[host].send(struct.pack("d", rate or 0.0))
        _expect(lines[host])
        return {}
    except Exception as error:
        return {"error": f"{getattr(error, 'strerror', None) or error}"}


def _keep_host(host: int, rate: float | None, line: socket.socket, supervisor: int) -> None:
    """Keeps a host alive: makes its network namespace, configures the card's inner end, and waits for new limits."""
    end_with_parent(supervisor)
    status = 1
    with suppress(Exception):  # pyroute2's errors are not all OSErrors; a child of a fork ends here, whatever happens
        from pyroute2 import IPRoute

        unshare(CLONE_NEWNET)
        line.send(b"1")
        _expect(line)
        with IPRoute() as network:
            _up(network, "lo")
            index = network.link_lookup(ifname=ADAPTER)[0]
            for name, value in TCP.items():
                with suppress(OSError):  # where containers may not
                    _write(f"/proc/sys/net/ipv4/{name}", value)
            network.addr("add", index=index, address=address(host), prefixlen=16)
            network.link("set", index=index, mtu=packet_bytes(rate), state="up")
            _limit(network, index, rate)
            line.send(b"1")
            while message := line.recv(8):  # until the supervisor is gone, which ends this process, too
                _limit(network, index, struct.unpack("d", message)[0] or None)
                line.send(b"1")
        status = 0
    os._exit(status)


def _limit(route, index: int, rate: float | None) -> None:
    """What a network card sends, limited, in the place of an earlier limit."""
    if rate is not None:
        # a millisecond's bytes, since the kernel's timer is finer; what is smaller than a packet would let none through
        packet = route.get_links(index)[0].get("mtu")
        burst = max(packet + 500, int(rate / 1000))
        route.tc("replace", "tbf", index, 0x10000, rate=int(rate), burst=burst, limit=QUEUE_BYTES)
    elif any(discipline.get("handle") == 0x10000 for discipline in route.get_qdiscs(index=index)):
        route.tc("del", "tbf", index, 0x10000)


def _up(route, name: str) -> None:
    route.link("set", index=route.link_lookup(ifname=name)[0], state="up")


def _expect(line: socket.socket) -> None:
    if not line.recv(1):
        raise OSError("a host's namespace could not be made")


def _own_namespaces(user: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    unshare((CLONE_NEWUSER if user else 0) | CLONE_NEWNET)
    if user:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")


def unshare(flags: int) -> None:
    """Moves this process into new namespaces (``CLONE_…``); OSError where the kernel does not allow it."""
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
