"""Why ranks stand still: the first call at which they part, each rank's line there, who waits for whom, since when.

All of it is read off the ranks' logs (:mod:`pardemo.measure.journal`), so that it can be told of a run that hung, was
ended, or died, and of one that still runs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pardemo.measure.journal import Log, Logged, Raised
from pardemo.measure.parting import Book, First, Wait
from pardemo.tables import text_table
from pardemo.world.errors import STOPPED, ranks_text

#: Characters of an exception's text that one line has room for.
LONGEST = 200


@dataclass
class Standstill:
    """What is told of ranks that part or wait.

    Args:
        first: the first call at which they part; None where all of them do the same as far as they have come.
        waits: who waits for whom. stuck: ranks that can never go on.
        does: of each rank, in words, where it is. raised: exceptions that one rank went on after, and others had not.
    """

    first: First | None
    waits: list[Wait]
    stuck: list[int]
    does: dict[int, str]
    raised: dict[int, Raised] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """One line: where the ranks part, who waits for whom and since when."""
        parts = [self.parted] if self.first else []
        parts += [self.waited] if self.waits else []
        parts += [f"rank {rank} went on after {_cut(one.text)}{_at(one.line)}" for rank, one in self.raised.items()]
        return "; ".join(parts)

    @property
    def parted(self) -> str:
        """Of it the first part: the first call at which they part, and each rank's line there."""
        if self.first is None:
            return ""
        steps = len({call.step for call in self.first.calls.values() if call}) > 1  # then they are not in the same one
        does = {
            rank: f"{named(call)}{f', in step {call.step + 1}' if steps else ''}"
            if call else f"does not come: {self.does[rank]}" for rank, call in self.first.calls.items()
        }  # fmt: skip
        calls = {rank: text for rank, text in does.items() if self.first.calls[rank]}
        absent = {rank: text for rank, text in does.items() if not self.first.calls[rank]}
        told = [f"{ranks_text(ranks)}: {text}" for text, ranks in _alike(calls).items()]
        told += [f"{ranks_text(ranks)} {_plural(text, ranks)}" for text, ranks in _alike(absent).items()]
        return f"the ranks part in call {self.first.number + 1} of their group: " + "; ".join(told)

    @property
    def waited(self) -> str:
        """Of it the second part: who has waited for whom, and for how long."""
        by_others: dict[tuple[int, ...], list[Wait]] = defaultdict(list)
        for one in self.waits:
            by_others[one.waits_for].append(one)
        texts = []
        for others, some in by_others.items():
            has = "has" if len(some) == 1 else "have"
            waiting, awaited = ranks_text([one.rank for one in some]), ranks_text(list(others))
            texts.append(f"{waiting} {has} waited for {awaited} for {max(one.since_s for one in some):.1f} s")
        return ", ".join(texts)

    @property
    def details(self) -> str:
        """A table for a terminal: ranks that do the same share a row, with the seconds of that which waits longest."""
        by_row: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank in sorted(self.does):
            by_row[self._row(rank)].append(rank)
        since_s = {one.rank: one.since_s for one in self.waits}
        first = [f"call {self.first.number + 1} of {ranks_text(list(self.first.ranks))}"] if self.first else []
        table = [("ranks", *first, "now", "waits for", "since")]
        for row, ranks in by_row.items():
            since = [since_s[rank] for rank in ranks if rank in since_s]
            table.append((ranks_text(ranks).split(" ", 1)[1], *row, f"{max(since):.1f} s" if since else "–"))
        return text_table(table)

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        first = None
        if self.first is not None:
            calls = {str(rank): asdict(call) if call else None for rank, call in self.first.calls.items()}
            first = {"number": self.first.number, "ranks": list(self.first.ranks), "calls": calls}
        waits = [asdict(one) | {"waits_for": list(one.waits_for)} for one in self.waits]
        raised = {str(rank): asdict(one) for rank, one in self.raised.items()}
        return {"line": self.line, "first": first, "waits": waits, "stuck": self.stuck,
                "now": {str(rank): text for rank, text in self.does.items()}, "raised": raised}  # fmt: skip

    def _row(self, rank: int) -> tuple[str, ...]:
        own = [one for one in self.waits if one.rank == rank][:1]
        cells = []
        if self.first is not None:
            call = self.first.calls.get(rank)
            inside = f" ({call.module})" if call and call.module else ""
            cells = [f"{_what(call)}{_tensor(call)}{_at(call.line)}{inside}" if call else "–"]
        here = bool(own) and self.first is not None and own[0].call is self.first.calls.get(rank)
        here = here and self.does[rank].startswith("it is in ")
        cells.append("is in it" if here else _cut(self.does[rank].removeprefix("it "), 90))
        cells.append(", ".join(map(str, own[0].waits_for)) if own else "–")
        return tuple(cells)


def told(
    logs: Mapping[int, Log],
    at_s: float,
    lines: Mapping[int, str] | None = None,
    deaths: Mapping[int, str] | None = None,
) -> Standstill:
    """What the logs say of ranks that part or wait.

    Args:
        at_s: when, on the machine's monotonic clock: until then ranks have waited.
        lines: of ranks the lines where they are, as far as somebody asked them; of a stopped one that it is stopped.
        deaths: of ranks whose processes have ended without a word, how.
    """
    logs = dict(logs)
    for rank, how in (deaths or {}).items():
        logs[rank] = replace(logs.get(rank, Log()), ended="died", why=Raised(at_s, how, ""))
    book = Book(logs)
    stuck = sorted(book.stuck())
    does = {rank: _does(log, (lines or {}).get(rank, "")) for rank, log in sorted(logs.items())}
    return Standstill(book.first(bool(stuck or deaths)), book.waits(at_s), stuck, does, _own_exceptions(logs))


def named(call: Logged) -> str:
    """A call in words: what, in which group, how much, from which line."""
    if call.message or call.kind == "new_group":
        size = f", {call.nbytes:,} bytes" if call.message else ""
        return f"{_what(call)}{size}{_at(call.line)}" + (f" ({call.module})" if call.module else "")
    place = call.line or "no line"
    return f"{_what(call)} of {ranks_text(list(call.ranks))}, {call.nbytes:,} bytes, at {place}" + (
        f" ({call.module})" if call.module else ""
    )


def _own_exceptions(logs: Mapping[int, Log]) -> dict[int, Raised]:
    """The last exception that a rank went on after, where not all ranks have had it."""
    own = {}
    for rank, log in logs.items():
        passed = [one for one in log.raised if log.why is None or one.text != log.why.text]
        others = [{(one.text, one.line) for one in other.raised} for number, other in logs.items() if number != rank]
        passed = [one for one in passed if not all((one.text, one.line) in some for some in others)]
        if passed:
            own[rank] = passed[-1]
    return own


def _does(log: Log, line: str) -> str:
    """Where a rank is, in words that go on after its name."""
    if log.why is not None:
        if log.ended == "died":
            return f"it died: {log.why.text}"
        return f"it raised {_cut(log.why.text)}{_at(log.why.line)}"
    if log.ended:
        return "it has done the steps asked for" if log.ended == "enough" else "its script has ended"
    stopped = line == STOPPED
    waiting = [call for call in log.waiting if stopped or line in ("", call.line)]
    if waiting:
        return f"it is {f'{STOPPED} ' if stopped else ''}in {named(waiting[0])}"
    last = f", after {named(log.calls[-1])}" if log.calls else ", before any collective"
    return f"it is {line if stopped else f'at {line}' if line else 'at a line that is not known'}{last}"


def _what(call: Logged) -> str:
    if call.kind == "send":
        return f"send {call.number + 1} to rank {call.ranks[1]}"
    if call.kind == "receive":
        return f"receive {call.number + 1} from " + (f"rank {call.ranks[0]}" if call.ranks[0] >= 0 else "any rank")
    if call.kind == "new_group":
        return f"new_group of {ranks_text(list(call.shape))}"
    return f"{call.kind} {call.number + 1}"


def _alike(texts: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return ranks


def _plural(text: str, ranks: Sequence[int]) -> str:
    """``does not come: it is …`` of several ranks."""
    if len(ranks) == 1:
        return text
    does, _, rest = text.partition(": ")
    plural = {"it is ": "they are ", "it has ": "they have ", "its script has ": "their scripts have ", "it ": "they "}
    for one, many in plural.items():
        if rest.startswith(one):
            rest = many + rest.removeprefix(one)
            break
    return f"{does.replace('does', 'do')}: {rest}"


def _tensor(call: Logged) -> str:
    """Its dtype and shape, where a call has them: ``, float32 [8, 16]``."""
    return f", {call.dtype} {list(call.shape)}" if call.dtype and call.shape else ""


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"


def _at(line: str) -> str:
    return f", at {line}" if line else ""
