"""Hosts as network namespaces: a process that makes them, connects them, limits their adapters, and keeps them alive.

``python -m pardemo.cluster.keeper`` is started by a World. It makes a namespace that is the switch (a bridge), and for
each host a child with a namespace of its own; a veth pair leads from each host to the switch, and a token bucket (tbf)
at both of its ends lets through what the adapter carries, each way. As root, or as anybody in a user namespace of its
own. Ranks enter by ``setns`` (:func:`enter`).

Nothing has a name on the machine: namespaces, links and limits are gone with the last process in them, and the keeper
and its children end with the World's process, whatever ends that.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG = 1
ADAPTER = "eth0"  # of a host, seen from inside
#: Bytes of a packet: of 9,000 less than a hundredth are headers.
MTU = 9000
QUEUE_BYTES = 64 << 20  # of an adapter: TCP's windows fit, so nothing is dropped
MOST_HOSTS = 250
POLL_S = 0.5


def address(host: int) -> str:
    """A host's address on the emulated network."""
    return f"10.77.0.{host + 1}"


def main() -> int:
    """Makes the hosts that the first argument describes, says ``{"hosts": [pid, …]}``, and waits for its end."""
    settings, parent = json.loads(sys.argv[1]), os.getppid()
    try:
        _own_namespaces(settings["user"])
        pids = _build(settings["hosts"], settings["rate"])
    except OSError as error:
        print(json.dumps({"error": f"{error.strerror or error}"}), flush=True)
        return 1
    print(json.dumps({"hosts": pids}), flush=True)
    while os.getppid() == parent:  # the World closes the line, or is gone; a fork of it may still hold the other end
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            break
    return 0


def enter(pid: int, user: bool) -> None:
    """Moves this process, which has one thread, into the namespaces of a host that ``pid`` keeps.

    Raises:
        OSError: the kernel does not allow it, or the keeper is gone.
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


def _build(hosts: int, rate: float | None) -> list[int]:
    from pyroute2 import IPRoute

    with IPRoute() as switch:
        _up(switch, "lo")
        switch.link("add", ifname="switch", kind="bridge")
        _up(switch, "switch")
        bridge = switch.link_lookup(ifname="switch")[0]
        pids = []
        for host in range(hosts):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                _keep_host(host, rate, theirs)
            theirs.close()
            _expect(ours)  # it has its namespace
            port = f"port{host}"
            switch.link("add", ifname=port, kind="veth", peer={"ifname": ADAPTER, "net_ns_fd": f"/proc/{pid}/ns/net"})
            index = switch.link_lookup(ifname=port)[0]
            switch.link("set", index=index, mtu=MTU, master=bridge, state="up")
            _limit(switch, index, rate)
            ours.send(b"1")
            _expect(ours)  # it has configured its end
            pids.append(pid)
        return pids


def _keep_host(host: int, rate: float | None, line: socket.socket) -> None:
    """A host's keeper: its own network namespace, the adapter's inner end, then nothing until the end."""
    _end_with_parent()
    status = 1
    with suppress(OSError):
        from pyroute2 import IPRoute

        _unshare(CLONE_NEWNET)
        line.send(b"1")
        _expect(line)
        with IPRoute() as own:
            _up(own, "lo")
            index = own.link_lookup(ifname=ADAPTER)[0]
            own.addr("add", index=index, address=address(host), prefixlen=16)
            own.link("set", index=index, mtu=MTU, state="up")
            _limit(own, index, rate)
        line.send(b"1")
        status = 0
    if status == 0:
        signal.pause()
    os._exit(status)


def _limit(route, index: int, rate: float | None) -> None:
    if rate is not None:
        burst = max(2 * MTU, int(rate / 1000))  # a millisecond's bytes: the kernel's timer is finer
        route.tc("add", "tbf", index, 0x10000, rate=int(rate), burst=burst, limit=QUEUE_BYTES)


def _up(route, name: str) -> None:
    route.link("set", index=route.link_lookup(ifname=name)[0], state="up")


def _expect(line: socket.socket) -> None:
    if not line.recv(1):
        raise OSError("a host's namespace could not be made")


def _own_namespaces(user: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    _unshare((CLONE_NEWUSER if user else 0) | CLONE_NEWNET)
    if user:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
