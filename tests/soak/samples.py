"""Cases that leave something behind, or end as they should not, on purpose: what the fork server has to notice.

``python tests/soak/samples.py`` prints each one's result as JSON; tests/test_soak.py reads it.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[up]) for up in (1, 2)]

from soak import fork_server, leftovers
from soak.case import Case, Kind, Lost, NotReached, Skipped

kept = []  # sockets that stay open until the process ends
INT, KILL = {"": signal.SIGINT}, {"": signal.SIGKILL}


def orphan(case: Case) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        subprocess.Popen(["sleep", "600"], pass_fds=[server.fileno()], start_new_session=True)
    os._exit(3)


def files(case: Case) -> None:
    tempfile.mkdtemp(prefix="left-")
    Path(f"/dev/shm/soak-sample-{os.getpid()}").touch()
    Path("/dev/shm/soak-sample-of-another").touch()
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(tempfile.mktemp(prefix="s-"))


def sockets(case: Case) -> None:
    kept.append(socket.create_server(("127.0.0.1", 0)))
    kept.append(socket.create_connection(kept[0].getsockname()))
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].bind(f"\0soak-sample-{os.getpid()}")


def hangs(case: Case) -> None:
    time.sleep(600)


def waits(case: Case) -> None:
    case.begin()
    time.sleep(600)


def deaf(case: Case) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    case.begin()
    time.sleep(2)
    raise NotReached("the work was over")


def lost(case: Case) -> None:
    raise Lost("the work")


def skipped(case: Case) -> None:
    raise Skipped("no rights")


def right(case: Case) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        return f"right {case.rng.random()}"


SIGNALS = {waits: KILL, deaf: INT}
THEN = {waits: lost}
SAMPLES = (orphan, files, sockets, hangs, waits, deaf, skipped, right)


def main() -> None:
    """Runs each sample, with short times to be gone; the last one twice."""
    leftovers.GONE_WITHIN_S = leftovers.CLOSED_WITHIN_S = fork_server.NOTICED_WITHIN_S = 1.0
    fork_server.load(())
    kinds = {
        run.__name__: Kind(run.__name__, run, signals=SIGNALS.get(run, {}), within_s=0.1, then=THEN.get(run))
        for run in SAMPLES
    }
    with fork_server.ForkServer(kinds, 1) as server:
        results = [server.run(name, 7, 3.0 if name == "hangs" else 60.0) for name in (*kinds, "right")]
    for path in Path("/dev/shm").glob("soak-sample-*"):
        path.unlink()
    below = [str(process) for process in leftovers.running()]
    print(json.dumps({"results": [dataclasses.asdict(result) for result in results], "below": below}))


if __name__ == "__main__":
    main()
