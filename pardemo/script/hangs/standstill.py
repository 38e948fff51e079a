"""Detects deadlocked ranks and reports the call at which their sequences of collectives first differ.

It reads the ranks' logs alone (:mod:`pardemo.script.hangs.journal`), and so works on a run that hung, was ended or
died, and on one that still runs.
"""

import contextlib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import psutil

from pardemo.deadline import Deadline
from pardemo.script.hangs import journal
from pardemo.script.hangs.journal import Log, LoggedCall, RaisedError
from pardemo.script.words import at_line, shortened
from pardemo.tables import text_table
from pardemo.world import World
from pardemo.world.errors import STOPPED, ranks_by_value, ranks_text

#: Collectives whose tensors have as many elements on all ranks; of the others each rank may have its own. A root that
#: scatters or gathers has all parts, and the others have theirs.
EVEN = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce")


@dataclass(frozen=True)
class BlockedCall:
    """A rank's wait of ``since_s`` seconds for other ranks, which have not begun its call or are in another one."""

    rank: int
    call: LoggedCall
    waits_for: tuple[int, ...]
    since_s: float


@dataclass(frozen=True)
class Mismatch:
    """The first call that differs between ranks: for each rank its own, or None if it has none there."""

    number: int
    ranks: tuple[int, ...]
    calls: dict[int, LoggedCall | None]

    @property
    def differ(self) -> bool:
        """Whether ranks that have come to it do different things, or give tensors that do not fit."""
        return len({_agreement_key(call) for call in self.calls.values() if call is not None}) > 1


def deadlocked_ranks(logs: Mapping[int, Log]) -> list[int]:
    """Finds ranks that can never go on, on the assumption that each waits in its open calls.

    Such a rank waits for one that has ended, that is in another call of the same group, or that can never go on either.
    Ranks that compute are none of these: whoever waits for them alone is not stuck.
    """
    return sorted(CallTable(logs).stuck())


class CallTable:
    """Aligns the calls of all ranks, group by group."""

    def __init__(self, logs: Mapping[int, Log]):
        self.logs = logs
        self.groups: dict[tuple[str, tuple[int, ...]], dict[int, list[LoggedCall]]] = defaultdict(dict)
        for rank, log in logs.items():
            for call in log.calls:
                self.groups[call.group, call.ranks].setdefault(rank, []).append(call)

    def waits(self, at_s: float) -> list[BlockedCall]:
        """Returns each rank's first call that other ranks have not begun, or in whose place they are in another."""
        made = []
        for rank, log in sorted(self.logs.items()):
            for call in log.waiting:
                if absent := self.absent(rank, call):
                    until_s = at_s if call.end_s is None else call.end_s
                    made.append(BlockedCall(rank, call, tuple(absent), max(until_s - call.begin_s, 0.0)))
                    break
        return made

    def ended(self) -> set[int]:
        return {rank for rank, log in self.logs.items() if log.ended}

    def absent(self, rank: int, call: LoggedCall) -> list[int]:
        """Returns the ranks that a call waits for: they have not begun it, or do something else instead."""
        of_ranks = self.groups[call.group, call.ranks]
        if call.ranks[0] < 0:  # a message of any rank
            return [other for other in self.logs if other != rank]
        needed = call.shape if call.kind == "new_group" else call.ranks  # a group is made by its own ranks
        absent = [other for other in needed if other != rank and len(of_ranks.get(other, ())) <= call.number]
        if absent or call.message:
            return absent
        before = [self._differ(of_ranks, number, False) for number in range(call.number + 1)]
        parts = next((number for number, differ in enumerate(before) if differ), None)
        if parts is None:
            return []
        key = _agreement_key(of_ranks[rank][parts])
        return [other for other in needed if other in of_ranks and _agreement_key(of_ranks[other][parts]) != key]

    def stuck(self) -> set[int]:
        """Returns the ranks all of whose open calls wait for ranks that will never begin them."""
        never = self.ended()
        stuck = {rank for rank, log in self.logs.items() if log.waiting and not log.ended}
        while True:
            left = {rank for rank in stuck if self._never(rank, stuck | never)}
            if left == stuck:
                return stuck
            stuck = left

    def _never(self, rank: int, gone: set[int]) -> bool:
        """Whether every open call of a rank needs one of the ranks that are gone."""
        calls = [call for call in self.logs[rank].waiting if not self._taken(rank, call)]
        absent = [self.absent(rank, call) for call in calls]
        if any(call.ranks[0] < 0 and not set(some) <= gone for call, some in zip(calls, absent, strict=True)):
            return False
        return bool(calls) and all(set(some) & gone for some in absent)

    def _taken(self, rank: int, call: LoggedCall) -> bool:
        """Whether the other end has taken a message; its own rank sees that only if it waits for it."""
        if not call.message:
            return False
        number, of_ranks = call.number, self.groups[call.group, call.ranks]
        return any(
            other != rank and len(calls) > number and calls[number].state == "over" for other, calls in of_ranks.items()
        )

    def first(self, loosely: bool) -> Mismatch | None:
        """Returns the earliest call in which the ranks of a group differ, or which some of them have not begun.

        ``loosely``: also where the calls fit and the places do not: another line, module, or step.
        """
        candidates: list[tuple[float, Mismatch]] = []
        for (_, ranks), of_ranks in self.groups.items():
            number = self._parts(of_ranks, loosely)
            if number is None:
                continue
            calls = {
                rank: of_ranks[rank][number] if len(of_ranks.get(rank, ())) > number else None
                for rank in sorted({*of_ranks, *ranks} & self.logs.keys())
            }
            begun = min(call.begin_s for call in calls.values() if call)
            candidates.append((begun, Mismatch(number, ranks, calls)))
        return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None

    def _parts(self, of_ranks: dict[int, list[LoggedCall]], loosely: bool) -> int | None:
        most = max(len(calls) for calls in of_ranks.values())
        for number in range(most):
            if self._differ(of_ranks, number, loosely):
                return number
            for rank, calls in of_ranks.items():
                if len(calls) > number and calls[number].state != "over" and self.absent(rank, calls[number]):
                    return number
        return None

    def _differ(self, of_ranks: dict[int, list[LoggedCall]], number: int, loosely: bool) -> bool:
        """Whether ranks that have come to a call do different things there."""
        calls = {rank: calls_of_rank[number] for rank, calls_of_rank in of_ranks.items() if len(calls_of_rank) > number}
        if len({_agreement_key(call) for call in calls.values()}) > 1:
            return True
        if not loosely or any(call.message for call in calls.values()):
            return False
        if len({call.step for call in calls.values()}) > 1:
            return True
        # another place: a parting only where one rank is where the other is at another time. Ranks that call from
        # lines of their own, as the two branches of a condition, do so each time.
        places = {rank: {_line_and_module(call) for call in calls_of_rank} for rank, calls_of_rank in of_ranks.items()}
        return any(
            _line_and_module(call) != _line_and_module(other)
            and (_line_and_module(call) in places[b] or _line_and_module(other) in places[a])
            for a, call in calls.items()
            for b, other in calls.items()
        )


def _agreement_key(call: LoggedCall) -> tuple:
    """Returns what a call must have in common with those of the other ranks."""
    if call.message:
        return "message", call.nbytes
    if call.kind == "all-gather":  # sizes of what each gives
        return call.kind, call.nbytes, call.dtype, prod(call.shape)
    if call.kind == "new_group":
        return call.kind, call.shape
    return (call.kind, call.nbytes, call.dtype) if call.kind in EVEN else (call.kind,)


def _line_and_module(call: LoggedCall) -> tuple[str, str]:
    return call.line, call.module


#: Characters of an exception's text that one line has room for.
LONGEST = 200


@dataclass
class Standstill:
    """A report on ranks whose calls differ or that wait.

    Args:
        first: the first call at which they part; None where all of them do the same as far as they have come.
        waits: who waits for whom. stuck: ranks that can never go on.
        does: of each rank, in words, where it is. raised: exceptions that one rank went on after, and others had not.
    """

    first: Mismatch | None
    waits: list[BlockedCall]
    stuck: list[int]
    does: dict[int, str]
    raised: dict[int, RaisedError] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Says in one line where the ranks' calls differ, and who waits for whom since when."""
        raised = [
            f"rank {rank} went on after {shortened(error.text, LONGEST)}{at_line(error.line)}"
            for rank, error in self.raised.items()
        ]
        return "; ".join(filter(None, [self.parted, self.waited, *raised]))

    @property
    def parted(self) -> str:
        """Says at which call the ranks first differ, with each rank's line there."""
        if self.first is None:
            return ""
        there = {rank: call for rank, call in self.first.calls.items() if call}
        steps = len({call.step for call in there.values()}) > 1  # then they are not in the same one
        calls = {
            rank: call_text(call) + (f", in step {call.step + 1}" if steps else "") for rank, call in there.items()
        }
        texts = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by_value(calls).items()]
        absent = ranks_by_value({rank: self.does[rank] for rank in self.first.calls if rank not in there})
        for text, ranks in absent.items():
            texts.append(f"{ranks_text(ranks)} {'do' if ranks[1:] else 'does'} not come: {_plural(text, ranks)}")
        return f"the ranks part in call {self.first.number + 1} of their group: " + "; ".join(texts)

    @property
    def waited(self) -> str:
        """Says who has waited for whom, and for how long."""
        by_others: dict[tuple[int, ...], list[BlockedCall]] = defaultdict(list)
        for wait in self.waits:
            by_others[wait.waits_for].append(wait)
        texts = []
        for others, some in by_others.items():
            has = "has" if len(some) == 1 else "have"
            waiting, awaited = ranks_text([wait.rank for wait in some]), ranks_text(list(others))
            texts.append(f"{waiting} {has} waited for {awaited} for {max(wait.since_s for wait in some):.1f} s")
        return ", ".join(texts)

    @property
    def details(self) -> str:
        """Makes a table for a terminal; ranks that do the same share a row, with the longest wait of them."""
        by_row: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank in sorted(self.does):
            by_row[self._row(rank)].append(rank)
        since_s = {wait.rank: wait.since_s for wait in self.waits}
        first = [f"call {self.first.number + 1} of {ranks_text(list(self.first.ranks))}"] if self.first else []
        table = [("ranks", *first, "now", "waits for", "since")]
        for row, ranks in by_row.items():
            since = [since_s[rank] for rank in ranks if rank in since_s]
            table.append((ranks_text(ranks).split(" ", 1)[1], *row, f"{max(since):.1f} s" if since else "–"))
        return text_table(table)

    @property
    def whereabouts(self) -> str:
        """Says what each rank does; those that do the same share a clause."""
        parts = []
        for text, ranks in ranks_by_value(self.does).items():
            who, does = ranks_text(ranks), _plural(text, ranks).partition(" ")[2]
            parts.append(f"the script has ended on {who}" if text.startswith("its ") else f"{who} {does}")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Returns the report for JSON."""
        made = asdict(self) | {"line": self.line, "now": {str(rank): text for rank, text in self.does.items()}}
        made["raised"] = {str(rank): error for rank, error in made["raised"].items()}
        if made["first"] is not None:
            made["first"]["calls"] = {str(rank): call for rank, call in made["first"]["calls"].items()}
        return {name: value for name, value in made.items() if name != "does"}

    def _row(self, rank: int) -> tuple[str, ...]:
        waits = [wait for wait in self.waits if wait.rank == rank][:1]
        cells = []
        if self.first is not None:
            call = self.first.calls.get(rank)
            inside = f" ({call.module})" if call and call.module else ""
            cells = [f"{_named_call(call)}{_tensor_text(call)}{at_line(call.line)}{inside}" if call else "–"]
        here = bool(waits) and self.first is not None and waits[0].call is self.first.calls.get(rank)
        here = here and self.does[rank].startswith("it is in ")
        cells.append("is in it" if here else shortened(self.does[rank].removeprefix("it "), 90))
        cells.append(", ".join(map(str, waits[0].waits_for)) if waits else "–")
        return tuple(cells)


def standstill_of(
    logs: Mapping[int, Log],
    at_s: float,
    lines: Mapping[int, str] | None = None,
    deaths: Mapping[int, str] | None = None,
) -> Standstill:
    """Reads from the logs which ranks differ or wait.

    Args:
        at_s: when, on the machine's monotonic clock: until then ranks have waited.
        lines: of ranks the lines where they are, as far as somebody asked them; of a stopped one that it is stopped.
        deaths: of ranks whose processes have ended without a word, how.
    """
    logs = dict(logs)
    for rank, how in (deaths or {}).items():
        logs[rank] = replace(logs.get(rank, Log()), ended="died", why=RaisedError(at_s, how, ""))
    book = CallTable(logs)
    stuck = sorted(book.stuck())
    does = {rank: _activity(log, (lines or {}).get(rank, "")) for rank, log in sorted(logs.items())}
    return Standstill(book.first(bool(stuck or deaths)), book.waits(at_s), stuck, does, _passed_exceptions(logs))


def call_text(call: LoggedCall) -> str:
    """Describes a call: its kind, group, tensors and line."""
    size = f", {call.nbytes:,} bytes"
    if call.message or call.kind == "new_group":
        text = f"{_named_call(call)}{size * call.message}{at_line(call.line)}"
    else:
        text = f"{_named_call(call)} of {ranks_text(list(call.ranks))}{size}, at {call.line or 'no line'}"
    return text + (f" ({call.module})" if call.module else "")


def _passed_exceptions(logs: Mapping[int, Log]) -> dict[int, RaisedError]:
    """Returns the last exception that a rank went on after, where not all ranks had it."""
    errors = {}
    for rank, log in logs.items():
        others = [
            {(error.text, error.line) for error in other.raised} for number, other in logs.items() if number != rank
        ]
        for error in log.raised:
            ended_it = log.why is not None and error.text == log.why.text
            if not ended_it and not all((error.text, error.line) in some for some in others):
                errors[rank] = error
    return errors


def _activity(log: Log, line: str) -> str:
    """Says where a rank is, as a clause that follows its name."""
    if log.why is not None:
        if log.ended == "died":
            return f"it died: {log.why.text}"
        return f"it raised {shortened(log.why.text, LONGEST)}{at_line(log.why.line)}"
    if log.ended:
        return "it has done the steps asked for" if log.ended == "enough" else "its script has ended"
    stopped = line == STOPPED
    waiting = [call for call in log.waiting if stopped or line in ("", call.line)]
    if waiting:
        return f"it is {f'{STOPPED} ' if stopped else ''}in {call_text(waiting[0])}"
    last = f", after {call_text(log.calls[-1])}" if log.calls else ", before any collective"
    return f"it is {line if stopped else f'at {line}' if line else 'at a line that is not known'}{last}"


def _named_call(call: LoggedCall) -> str:
    if call.kind == "send":
        return f"send {call.number + 1} to rank {call.ranks[1]}"
    if call.kind == "receive":
        return f"receive {call.number + 1} from " + (f"rank {call.ranks[0]}" if call.ranks[0] >= 0 else "any rank")
    if call.kind == "new_group":
        return f"new_group of {ranks_text(list(call.shape))}"
    return f"{call.kind} {call.number + 1}"


def _plural(text: str, ranks: Sequence[int]) -> str:
    """Puts a clause into the plural: ``it is …``, ``they are …``."""
    plural = {"it is ": "they are ", "it has ": "they have ", "its script has ": "their scripts have ", "it ": "they "}
    of_one = next((start for start in plural if text.startswith(start)), "") if len(ranks) > 1 else ""
    return plural.get(of_one, "") + text.removeprefix(of_one)


def _tensor_text(call: LoggedCall) -> str:
    """Describes a call's tensor by dtype and shape, as ``, float32 [8, 16]``; "" where it has none."""
    return f", {call.dtype} {list(call.shape)}" if call.dtype and call.shape else ""


#: Seconds for which nothing may happen on ranks that wait for one another, before they are given up.
STALLED_S = 3.0
_TURN_S = 0.5
#: Of a core's time, what a rank may take that waits.
_IDLE = 0.02
#: Modules of this package that call torch in place of a script and wait for nothing themselves.
AROUND_TORCH = (
    "pardemo.compat", "pardemo.script.record.recorder", "pardemo.script.runtime.stand_ins",
    "pardemo.script.runtime.steps", "pardemo.script.runtime.without_gpu",
)  # fmt: skip
#: The module that notes when a collective is over, and so waits for it.
WAITS = "pardemo.script.runtime.collectives"


def _paths(*modules: str) -> str:
    """Makes a pattern that the modules' paths match."""
    return "|".join(re.escape(f"/{module.replace('.', '/')}.py") for module in modules)


_AROUND_TORCH = re.compile(_paths(*AROUND_TORCH))
#: Where the innermost frame of a rank's main thread is while it waits in a collective: torch's, or what notes its end.
_IN_A_WAIT = re.compile(r"/torch/(distributed|autograd)/|/torch/_ops\.py|/torch/_classes\.py|" + _paths(WAITS))


class DeadlockWatch:
    """Ends a World's run whose ranks are deadlocked, without waiting for its time limit.

    Three things have to be true, all of them for three seconds. Time does not count for which a thread of these ranks
    waits for a core: it may hold the bytes that the others wait for. By the logs, some ranks wait in calls that are
    over only when a rank comes that has ended, is in another call of the same group, or is itself one of those that
    wait (:func:`deadlocked_ranks`). These ranks' processes sleep, and take no time of a core. And the
    innermost frame of each one's main thread is one in which torch waits. So a rank that computes, reads a file, or
    sleeps while an exchange that it has begun goes on, is none of them; nor is one whose bytes pass a slow link.

    Args:
        world: whose ranks are watched while the block runs. journals: the folder of their logs.
    """

    def __init__(self, world: World, journals: str):
        self._world, self._journals = world, journals
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._sizes: dict[str, int] = {}
        #: when the block ended: until then ranks have waited; the machine's monotonic clock
        self.until_s = 0.0

    def __enter__(self) -> "DeadlockWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.until_s = time.monotonic()
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        stuck: list[int] = []
        since, used_s = Deadline(STALLED_S, ()), dict[int, float]()
        while not self._over.wait(_TURN_S):
            if self._moved():
                stuck = []
                continue
            if not stuck:
                stuck, pids = deadlocked_ranks(journal.read_logs(self._journals)), self._world.pids
                since = Deadline(STALLED_S, [pids[rank] for rank in stuck if rank < len(pids)])
                used_s = self._asleep(stuck)
                continue
            now_s, allowed = self._asleep(stuck), _IDLE * since.clock_s + 0.02
            if any(rank not in now_s or now_s[rank] - used_s.get(rank, 0.0) > allowed for rank in stuck):
                stuck = []
            elif not since.left_s() and self._in_a_wait(stuck):
                self._world.give_up()
                return

    def _moved(self) -> bool:
        """Whether a rank has logged anything since the last call."""
        before = self._sizes
        self._sizes = {file.name: file.stat().st_size for file in Path(self._journals).glob("rank*")}
        return self._sizes != before

    def _asleep(self, ranks: list[int]) -> dict[int, float]:
        """Of ranks whose processes sleep, seconds of a core that they and their children have taken."""
        pids, used = self._world.pids, {}
        for rank in ranks:
            with contextlib.suppress(psutil.Error, IndexError):
                process = psutil.Process(pids[rank])
                if process.status() == psutil.STATUS_SLEEPING:
                    processes = [process, *process.children(recursive=True)]
                    used[rank] = sum(sum(running.cpu_times()[:2]) for running in processes)
        return used

    def _in_a_wait(self, ranks: list[int]) -> bool:
        stacks = self._world.stacks()
        return all(is_waiting(stacks.get(rank, "")) for rank in ranks)


def is_waiting(stack: str) -> bool:
    """Whether the main thread of a stack, which stands last, is where torch waits for other ranks."""
    files = re.findall(r'File "([^"]+)"', stack.rpartition("most recent call first")[2])
    innermost = next((file for file in files if not _AROUND_TORCH.search(file)), "")
    return bool(_IN_A_WAIT.search(innermost))
