"""Reports on ranks that wait or part: at which call, at which line of the script, who waits for whom.

It reads the ranks' logs alone (:mod:`pardemo.script.hangs.journal`), and so works on a run that hung, was ended or
died, and on one that still runs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pardemo.script.hangs.call_table import BlockedCall, CallTable, Mismatch
from pardemo.script.hangs.journal import Log, LoggedCall, RaisedError
from pardemo.script.words import at_line, shortened
from pardemo.tables import text_table
from pardemo.world.errors import STOPPED, ranks_by_value, ranks_text

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
        called = {rank: call for rank, call in self.first.calls.items() if call}
        steps = len({call.step for call in called.values()}) > 1  # then they are not in the same one
        calls = {
            rank: call_text(call) + (f", in step {call.step + 1}" if steps else "") for rank, call in called.items()
        }
        texts = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by_value(calls).items()]
        absent = ranks_by_value({rank: self.does[rank] for rank in self.first.calls if rank not in called})
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
        for others, waits in by_others.items():
            has = "has" if len(waits) == 1 else "have"
            waiting, awaited = ranks_text([wait.rank for wait in waits]), ranks_text(list(others))
            texts.append(f"{waiting} {has} waited for {awaited} for {max(wait.since_s for wait in waits):.1f} s")
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
            names, does = ranks_text(ranks), _plural(text, ranks).partition(" ")[2]
            parts.append(f"the script has ended on {names}" if text.startswith("its ") else f"{names} {does}")
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
        in_the_first = bool(waits) and self.first is not None and waits[0].call is self.first.calls.get(rank)
        in_the_first = in_the_first and self.does[rank].startswith("it is in ")
        cells.append("is in it" if in_the_first else shortened(self.does[rank].removeprefix("it "), 90))
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
    table = CallTable(logs)
    stuck = sorted(table.deadlocked())
    does = {rank: _activity(log, (lines or {}).get(rank, "")) for rank, log in sorted(logs.items())}
    return Standstill(table.first(bool(stuck or deaths)), table.waits(at_s), stuck, does, _passed_exceptions(logs))


def call_text(call: LoggedCall) -> str:
    """Describes a call: its kind, group, tensors and line; −1 bytes are not known."""
    size = f", {call.nbytes:,} bytes" if call.nbytes >= 0 else ""
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
            if not ended_it and not all((error.text, error.line) in errors_there for errors_there in others):
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
