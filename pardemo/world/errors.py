"""The exceptions of a World, each naming the rank."""

import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """One exception on one rank, as text: it crosses the process boundary even where the exception cannot."""

    type: str
    message: str
    traceback: str
    exception: BaseException | None = None

    @property
    def headline(self) -> str:
        return f"{self.type}: {self.message}".strip().rstrip(":")


class RankError(RuntimeError):
    """Base of everything a World reports about its ranks. They can be sent to other processes, with all they say."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[RankError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RankError:
    """An error as it was, without the arguments that its text was made of."""
    made = kind.__new__(kind, *args)
    made.__dict__.update(attributes)
    return made


#: Begins what stands in place of the stack of a process that does not run, and so cannot say where it is.
STOPPED = "stopped by a signal"
#: Of a rank that lost the connection to one that failed before it.
LOST = {"ConnectionError", "ConnectionResetError", "BrokenPipeError", "DistNetworkError"}


class RankFailed(RankError):
    """The function raised on one or more ranks.

    ``failures`` maps rank to :class:`Failure`; ``stopped`` are ranks that were still waiting for
    the failed ones (usually inside a collective) and were ended. The text tells causes first: a
    rank that lost its connection lost it to one that failed before; what several ranks say alike it
    tells once. ``first`` is the rank and the failure that it begins with; ``doing`` says of ranks in ``stopped``
    what they waited for, or where they were, and ``stacks`` have it in full.
    """

    def __init__(
        self,
        failures: Mapping[int, Failure],
        stopped: list[int] | None = None,
        waits: Mapping[int, list[str]] | None = None,
        stacks: Mapping[int, str] | None = None,
    ):
        self.failures = dict(failures)
        self.stopped = list(stopped or [])
        self.stacks = dict(stacks or {})
        self.doing = {rank: _doing((waits or {}).get(rank), stack) for rank, stack in (stacks or {}).items()}
        ordered = sorted(self.failures.items(), key=lambda item: (_cause_order(item[1]), item[0]))
        self.first = ordered[0]
        headlines = _alike(ordered, "headline").items()
        lines = ["; ".join(f"{ranks_text(ranks)}: {headline}" for headline, ranks in headlines)]
        if self.stopped:
            lines.append(f"({ranks_text(self.stopped)} did not finish within the grace time after that and ended)")
        for traceback, ranks in _alike(ordered, "traceback").items():
            lines += ["", f"--- {ranks_text(ranks)} ---", traceback.rstrip()]
        super().__init__("\n".join(lines))


def _cause_order(failure: "Failure") -> int:
    """Sort key: 0 for an error of the rank's own, 1 for a refused connection, 2 for a lost connection."""
    return 1 if failure.type == "ConnectionRefusedError" else 2 * (failure.type in LOST)


class RankDied(RankError):
    """One or more rank processes ended without a word.

    ``deaths`` maps rank to its exit code (negative: the signal that killed it). ``failures`` holds
    what the surviving ranks reported, usually a lost connection.
    """

    def __init__(self, deaths: Mapping[int, int | None], failures: Mapping[int, Failure] | None = None):
        self.deaths = dict(deaths)
        self.failures = dict(failures or {})
        lines = ["; ".join(f"rank {rank} died: {exit_text(code)}" for rank, code in sorted(self.deaths.items()))]
        then = _alike(sorted(self.failures.items()), "headline")
        lines += [f"then {ranks_text(ranks)}: {headline}" for headline, ranks in then.items()]
        super().__init__("\n".join(lines))


class RankTimeout(RankError):
    """The time limit passed; ``stacks`` maps each unfinished rank to where it was.

    The first line says who waits for whom, as far as pardemo's own exchanges know it (``waits``); of the others, where
    they are. ``finished``: ranks that had answered. ``busy``: of a limit that was put off since the ranks waited for a
    core, why and for how long (:class:`pardemo.deadline.Deadline`).
    """

    def __init__(
        self,
        timeout_s: float,
        stacks: Mapping[int, str],
        finished: list[int],
        waits: Mapping[int, list[str]] | None = None,
        busy: str = "",
    ):
        self.timeout_s, self.busy = timeout_s, busy
        self.stacks, self.waits, self.finished = dict(stacks), dict(waits or {}), list(finished)
        text = f"{ranks_text(sorted(self.stacks))} did not finish within {timeout_s:g} s"
        if finished:
            text += f" ({ranks_text(finished)} did)"
        doing = {rank: _doing(self.waits.get(rank), stack) for rank, stack in sorted(self.stacks.items())}
        if reasons := "; ".join(f"rank {rank} {reason}" for rank, reason in doing.items() if reason):
            text += f": {reasons}"
        if busy:
            text += f"\n({busy})"
        for rank, stack in sorted(self.stacks.items()):
            text += f"\n\n--- rank {rank} was here ---\n{stack.strip() or '(no Python stack: it did not answer)'}"
        super().__init__(text)


def _alike(failures: Iterable[tuple[int, Failure]], part: str) -> dict[str, list[int]]:
    """Each different ``headline`` or ``traceback``, in the order of the failures, and the ranks that have it."""
    return ranks_by_value({rank: getattr(failure, part) for rank, failure in failures})


def _doing(waits: list[str] | None, stack: str) -> str:
    if stack.startswith(STOPPED):
        return f"is {stack}"
    if waits:
        return "waits for " + ", and for ".join(waits)
    main = stack.rpartition("most recent call first")[2]  # of a stack's threads the main one is the last
    for path, line, function in re.findall(r'File "(.+)", line (\d+) in (.+)', main):
        if not re.search(r"/(site|dist)-packages/|/lib(64)?/python3", path):
            return f"is in {function} ({os.path.basename(path)}, line {line})"
    return ""


def ranks_by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    """The ranks that have the same value, by it, in the order of the first of each."""
    ranks: dict[T, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_text(ranks: list[int]) -> str:
    """``rank 2``, ``ranks 0, 1, 3``, or ``ranks 0–62, 64`` where three and more follow one another."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def exit_text(code: int | None) -> str:
    """An exit code in words; negative codes are signals, as in :mod:`subprocess`."""
    if code is None:
        return "its exit code is unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have no name
        name = f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
