"""Logs each rank's collectives to a file as they begin and end, so that the log outlives the rank.

A rank appends lines to a file of its own; whoever wants to know what the ranks did reads the files of all of them, also
while they run, and also after one has died. A line is written with one call, so that threads need no lock.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pardemo import project

#: Exceptions that a rank went on after, of which that many are kept: a script may raise one for each sample.
MOST_EXCEPTIONS = 20
COLUMNS = (
    "rank", "call", "kind", "group", "ranks", "number", "shape", "dtype", "bytes", "line", "module", "phase", "step",
    "begin_s", "end_s", "state",
)  # fmt: skip


class Journal:
    """Writes a rank's log.

    Args:
        path: of the file, which is appended to.
    """

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._exceptions = 0

    def begins(self, call: int, *values: Any) -> None:
        """Logs that call number ``call`` of this rank begins; ``values`` are those of :data:`BEGINS`."""
        self._write(json.dumps(["begins", call, *values]))

    def over(self, call: int, at_s: float) -> None:
        """Logs that the call's exchange is over."""
        self._write(f'["over",{call},{at_s:.6f}]')

    def failed(self, call: int, at_s: float) -> None:
        """Logs that the call or its exchange raised an error."""
        self._write(f'["failed",{call},{at_s:.6f}]')

    def raised(self, text: str, line: str) -> None:
        """Logs that an exception left a forward or a backward pass; later entries show whether the script went on."""
        self._exceptions += 1
        if self._exceptions <= MOST_EXCEPTIONS:
            self._write(json.dumps(["raised", time.monotonic(), text, line]))

    def ends(self, how: str, text: str = "", line: str = "") -> None:
        """Logs how the script ended: by ``enough`` steps, at its ``end``, or because it ``raised``."""
        self._write(json.dumps(["ends", time.monotonic(), how, text, line]))

    def close(self) -> None:
        """Closes the log: exchanges that end later are not logged."""
        os.close(self._file)
        self._file = -1

    def _write(self, line: str) -> None:
        try:  # costs less than contextlib.suppress, and a step may have thousands of these
            os.write(self._file, (line + "\n").encode())
        except OSError:
            pass


@dataclass
class LoggedCall:
    """A call that was logged.

    Args:
        kind: as a paper names it; also ``new_group``, whose ``shape`` are its ranks.
        ranks: of the group, in order; of a message its sender, −1 where it may be any, and its receiver.
        number: in its group, counted from 0. group: its name: several may have the same ranks.
        nbytes: of the whole array. dtype: the elements', without ``torch.``.
        shape: of the tensor that this rank gives, or gets where it gives none; the sizes of several.
        line, module, phase: where the script was. step: how many steps of the optimizer were over.
        begin_s, end_s: the machine's monotonic clock; not over: None. failed: it raised.
    """

    kind: str
    ranks: tuple[int, ...]
    number: int
    group: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    line: str
    module: str
    phase: str
    step: int
    begin_s: float
    end_s: float | None = None
    failed: bool = False

    @property
    def group_key(self) -> tuple[str, tuple[int, ...]]:
        """Identifies the call's group among those of all ranks: its name and its ranks."""
        return self.group, self.ranks

    @property
    def key(self) -> tuple[str, tuple[int, ...], int]:
        """Identifies the collective among those of all ranks: its group's name and ranks, and its number there."""
        return self.group, self.ranks, self.number

    @property
    def message(self) -> bool:
        """Whether it is a message from one rank to another, and no collective."""
        return self.kind in ("send", "receive")

    @property
    def state(self) -> str:
        """``over``, ``failed``, or ``waits``."""
        return "failed" if self.failed else "waits" if self.end_s is None else "over"


#: Fields of a call that are known as it begins.
BEGINS = tuple(column.name for column in fields(LoggedCall) if column.name not in ("end_s", "failed"))


@dataclass(frozen=True)
class RaisedError:
    """An exception, the line of the script that it came from, and when."""

    at_s: float
    text: str
    line: str


@dataclass
class Log:
    """The log of one rank: its calls in order; ``ended``: how its script ended, empty where it has not.

    ``raised``: exceptions that left a forward or a backward pass. ``why``: the exception that ended the script.
    """

    calls: list[LoggedCall] = field(default_factory=list)
    raised: list[RaisedError] = field(default_factory=list)
    ended: str = ""
    why: RaisedError | None = None

    @property
    def waiting(self) -> list[LoggedCall]:
        """Calls that are not over, those that failed among them."""
        return [call for call in self.calls if call.state != "over"]


def read_logs(folder: str | os.PathLike[str]) -> dict[int, Log]:
    """Reads the logs in a folder, files ``rank0``, ``rank1`` …

    A line that was not written to its end is left out.
    """
    return {int(file.name[4:]): _read_log(file) for file in sorted(Path(folder).glob("rank*"))}


def write_csv(logs: Mapping[int, Log], path: Path) -> None:
    """Writes a table of all calls in the order in which they began; seconds count from the first.

    Where there was none there is no table.
    """
    rows = [(call, rank, number) for rank, log in logs.items() for number, call in enumerate(log.calls)]
    rows.sort(key=lambda row: (row[0].begin_s, row[1:]))
    if rows:
        zero_s = rows[0][0].begin_s
        project.write_csv(path, COLUMNS, [
            (
                rank, number, call.kind, call.group, " ".join(map(str, call.ranks)), call.number,
                " ".join(map(str, call.shape)), call.dtype, call.nbytes, call.line, call.module, call.phase,
                call.step, f"{call.begin_s - zero_s:.6f}",
                f"{call.end_s - zero_s:.6f}" if call.end_s else "", call.state,
            )
            for call, rank, number in rows
        ])  # fmt: skip


def _read_log(file: Path) -> Log:
    log = Log()
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        event, *values = json.loads(line)
        if event == "begins":
            call = LoggedCall(*values[1:])
            call.ranks, call.shape = tuple(call.ranks), tuple(call.shape)
            log.calls.append(call)
        elif event in ("over", "failed"):
            call = log.calls[values[0]]
            call.end_s, call.failed = values[1], call.failed or event == "failed"
        elif event == "raised":
            log.raised.append(RaisedError(*values))
        else:
            log.ended = values[1]
            log.why = RaisedError(values[0], values[2], values[3]) if values[1] == "raised" else None
    return log


def headline(error: BaseException) -> str:
    """An exception's type and message, on one line."""
    return project.one_line(f"{type(error).__name__}: {error}").rstrip(":")
