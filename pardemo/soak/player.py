"""The command's handle on the stage: starts it, asks it for scenes, ends it. Loads no torch."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any, cast

from pardemo.deadline import ended_within
from pardemo.soak.tally import Ending
from pardemo.world.nursery import QUIET

END_TIMEOUT_S = 20.0


class Player:
    """Plays scenes in a process of its own; a context manager, at whose end nothing of it is left.

    Args:
        groups: of scenes, whose libraries are loaded. seed: what scenes are drawn from.

    Attributes: ``kinds``: the weight of each kind by name; ``missing``: of a group that cannot be played for want of an
    extra, a line that names it.

    Raises:
        ValueError: the process ended; with the last line that it said.
    """

    def __init__(self, groups: Sequence[str], seed: int):
        self._root = tempfile.mkdtemp(prefix="pardemo-soak-")
        self._errors: IO[str] = tempfile.TemporaryFile("w+")
        settings = {"groups": list(groups), "seed": seed, "root": self._root}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pardemo.soak.stage", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True,
            env={**os.environ, **QUIET, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path},
        )  # fmt: skip
        self._questions, self._answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        try:
            first = self._answer()
            self.kinds: dict[str, int] = first["kinds"]
            self.missing: dict[str, str] = first["missing"]
        except BaseException:  # an interrupt, too
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process that plays."""
        return self._process.pid

    def play(self, kind: str, number: int) -> Ending:
        """Plays a scene and returns how it ended."""
        with contextlib.suppress(BrokenPipeError):  # the answer says so
            print(json.dumps({"kind": kind, "number": number}), file=self._questions, flush=True)
        answer = self._answer()
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in answer.items()}
        return Ending(**fields)

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            ended_within(self._process, END_TIMEOUT_S)
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["without a word"])[-1]
            raise ValueError(f"the process that plays the scenes has ended (status {self._process.returncode}): {last}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process and all below it: it sees that its input has ended, also within a scene."""
        with contextlib.suppress(OSError):
            self._questions.close()
        if not ended_within(self._process, END_TIMEOUT_S):
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._errors.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
