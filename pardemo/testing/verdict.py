"""Makes one outcome of a test from the outcomes on its ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pardemo.extras import needed_by
from pardemo.project import first_line
from pardemo.testing.messages import NotPassed, Record
from pardemo.world.errors import LOST, RankDied, RankFailed, exit_text, ranks_by_value, ranks_text

with needed_by("pardemo.testing"):
    import pytest

_DID = {"skipped": "skipped", "xfailed": "failed as pytest.xfail expects"}
#: Exceptions of pytest's own, which are not pickled.
_PYTESTS: dict[str, type[BaseException]] = {"Failed": pytest.fail.Exception, "Exit": pytest.exit.Exception}


@dataclass
class Verdict:
    """The outcome of a test.

    Attributes:
        error: what to raise in the main process; exception: the rank's own, pickled, to raise in its place.
        text: what pytest is to show; None for what it makes of ``error`` itself.
    """

    error: BaseException
    exception: bytes | None = None
    text: Any = None


def judge(records: Mapping[int, Record], error: RankFailed, size: int) -> Verdict:
    """Returns the outcome of a test that did not pass on the ranks of ``records``; ``error`` knows which were ended."""
    failed = {rank: record for rank, record in records.items() if record.outcome == "failed"}
    if failed:
        return _failure(failed, records, error, size)
    outcomes = {record.outcome for record in records.values()}
    if len(records) < size or len(outcomes) > 1:
        how = (
            "a test skips on all ranks or on none" if "skipped" in outcomes else "pytest.xfail is for all ranks or none"
        )
        line = f"the ranks disagree: {'; '.join(_states(records, error, size))}. Decide it alike: {how}"
        return Verdict(pytest.fail.Exception(line, pytrace=False))
    first = records[0]
    reasons = "; ".join(dict.fromkeys(record.message for record in records.values()))
    if first.outcome == "xfailed":
        return Verdict(pytest.xfail.Exception(reasons))
    return Verdict(pytest.skip.Exception(reasons), text=(*first.location, f"Skipped: {reasons}"))


def of_death(error: RankDied) -> str:
    """Says which ranks died, and how the others failed after that."""
    lines = ["; ".join(f"rank {rank} died: {exit_text(code)}" for rank, code in sorted(error.deaths.items()))]
    for rank, failure in sorted(error.failures.items()):
        if isinstance(failure.exception, NotPassed):
            lines.append(f"rank {rank} then {_ended(failure.exception.record, None)}")
    return "\n".join(lines)


def _failure(failed: Mapping[int, Record], records: Mapping[int, Record], error: RankFailed, size: int) -> Verdict:
    """The frames of the rank that failed first, then of those that failed elsewhere, then the state of all ranks."""
    # a rank that has lost its connection lost it to one that failed before
    order = sorted(failed, key=lambda rank: (failed[rank].type in LOST, rank))
    first, *others = ranks_by_value({rank: (failed[rank].location, failed[rank].type) for rank in order}).values()
    record = failed[first[0]]
    text = record.text
    for ranks in others:
        text.addsection(f"{ranks_text(ranks)} failed elsewhere", str(failed[ranks[0]].text))
    if size > 1:
        text.addsection(f"{size} ranks", "\n".join(_states(records, error, size, first[0])))
        if text.reprcrash is not None:
            same = [rank for rank in first if failed[rank].message == record.message]
            text.reprcrash.message = f"{ranks_text(same)}: {text.reprcrash.message}"
    error_of = _PYTESTS.get(record.type) if record.exception is None else None
    raised = error_of(record.message) if error_of else RuntimeError(f"{record.type}: {record.message}")
    return Verdict(raised, record.exception, text)


def _states(records: Mapping[int, Record], error: RankFailed, size: int, above: int | None = None) -> list[str]:
    """A line for all ranks that ended alike; ``above``: the rank whose failure is shown above."""
    states = {}
    for rank in range(size):
        if rank in records:
            state = _ended(records[rank], None if above is None else records[above])
        elif rank in error.stopped:
            where = error.doing.get(rank, "").removeprefix("is ")
            state = "did not finish" + (f": {where}" if where else "")
        else:
            state = "passed"
        states[rank] = state
    return [f"{ranks_text(ranks)} {state}" for state, ranks in ranks_by_value(states).items()]


def _ended(record: Record, above: Record | None) -> str:
    if record.outcome != "failed":
        return f"{_DID[record.outcome]}, {record.message!r}"
    if above is not None and (record.location, record.type) == (above.location, above.type):
        same = record.message == above.message
        return "failed as above" if same else f"failed there too: {first_line(record.message)}"
    return f"failed: {first_line(f'{record.type}: {record.message}')}"
