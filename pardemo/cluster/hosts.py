"""Starts the supervisor of a World's hosts where namespaces are allowed, gives it limits, and ends it."""

import contextlib
import json
import os
import select
import subprocess
import sys
from typing import NamedTuple, TextIO, cast

from pardemo.cluster import Cluster, namespaces
from pardemo.deadline import Deadline, ended_within

START_TIMEOUT_S = 20.0  # the supervisor makes 250 hosts in a few seconds
LIMIT_TIMEOUT_S = 20.0  # and changes a limit in milliseconds


class Place(NamedTuple):
    """A rank's place: the process that keeps its host's namespace, and whether a user namespace comes first."""

    pid: int
    user: bool


class Hosts:
    """A cluster's hosts as network namespaces.

    Raises:
        OSError: namespaces are not allowed here, or cannot be connected; says why.
    """

    def __init__(self, cluster: Cluster):
        self._cluster, errors = cluster, []
        # root makes them at once; where it may not (a container), and for everybody else, in a user namespace
        for user in (False, True) if os.geteuid() == 0 else (True,):
            try:
                self._start(user)
                return
            except OSError as error:
                errors.append(str(error))
        raise OSError(errors[-1])

    def _start(self, user: bool) -> None:
        if self._cluster.hosts > namespaces.MOST_HOSTS:
            raise OSError(f"more than {namespaces.MOST_HOSTS} hosts")
        settings = {"hosts": self._cluster.hosts, "rate": self._cluster.between_rate, "user": user}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pardemo.cluster.namespaces", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._questions, self._answers, self._errors = (cast(TextIO, pipe) for pipe in pipes)
        try:
            self.pids, self.user = self._answer(START_TIMEOUT_S)["hosts"], user
        except BaseException:  # an interrupt, too
            self.close()
            raise

    def _answer(self, timeout_s: float) -> dict:
        """The supervisor's next line; OSError where it reports an error, has ended, or is too late (it is killed)."""
        waiting = select.poll()
        waiting.register(self._answers, select.POLLIN)
        deadline = Deadline(timeout_s, [self._process.pid])
        while not waiting.poll((left_s := deadline.left_s()) * 1000):
            if left_s:
                continue
            self._process.kill()  # what it would say later is no answer to the next question
            raise OSError(f"the supervisor of the hosts did not answer within {deadline}")
        line = self._answers.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "the supervisor of the hosts ended at once"

    @property
    def ended(self) -> int | None:
        """None while the supervisor runs; else its exit code. The links between the hosts go with it."""
        return self._process.poll()

    def place(self, rank: int) -> Place:
        """Returns a rank's place."""
        return Place(self.pids[self._cluster.host_of(rank)], self.user)

    def limit(self, host: int, rate: float | None) -> None:
        """Another limit for a host's network card, from now on.

        Raises:
            OSError: the supervisor is gone or does not answer, or the kernel refuses; says why.
        """
        try:
            print(json.dumps({"host": host, "rate": rate}), file=self._questions, flush=True)
        except BrokenPipeError:
            raise OSError("the supervisor of the hosts has ended") from None
        self._answer(LIMIT_TIMEOUT_S)

    def close(self) -> None:
        """Ends the supervisor; the namespaces are gone when the ranks are."""
        process = self._process
        with contextlib.suppress(OSError):
            self._questions.close()
        if not ended_within(process, 2.0):
            process.kill()
            process.wait()
        self._answers.close()
        self._errors.close()
