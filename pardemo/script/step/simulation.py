"""Simulates a step of all ranks from its recorded operations and collectives, given the time of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pardemo.meters.timeline import Span, covered_s
from pardemo.script.runtime.collectives import Call
from pardemo.script.step.operations import Operation, RecordedCollective
from pardemo.script.step.summary import Times

#: What all ranks of a collective have in common: group, ranks, its number among them.
Key = tuple[str, tuple[int, ...], int]
#: By rank its operations and exchanges, and all its calls.
Programs = Mapping[int, tuple[Sequence[Operation | RecordedCollective], Sequence[Call]]]
CommunicationTime = Callable[[Call], float | None]
ComputeTime = Callable[[int, Operation], float]


@dataclass
class CollectiveInFlight:
    """A collective in computed time: when each rank was ready, which one it follows on its connection, when it ends."""

    call: Call
    ready: dict[int, float] = field(default_factory=dict)
    before: list["CollectiveInFlight"] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float | None = None


@dataclass
class _Rank:
    """A rank's clocks in seconds: its processor's, its GPU's, when each operation ended, what it waited for."""

    rank: int
    program: Sequence[Operation | RecordedCollective]
    calls: Sequence[Call]
    at: int = 0
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    ended: list[float] = field(default_factory=list)
    collectives: list[CollectiveInFlight] = field(default_factory=list)
    last: dict[tuple, CollectiveInFlight] = field(default_factory=dict)
    stands: list[CollectiveInFlight] = field(default_factory=list)
    busy_s: float = 0.0
    bytes_s: float = 0.0
    late_s: float = 0.0

    def awaited(self, event: Operation | RecordedCollective) -> list[CollectiveInFlight]:
        """Returns the collectives that are over before an event begins."""
        return [*(self.collectives[number] for number in event.after), *self.stands]


class _Simulation:
    """Simulates all ranks together; arguments as of :func:`simulate_step`."""

    def __init__(self, programs: Programs, compute_s: ComputeTime, launch_s: float, communicate_s: CommunicationTime):
        self.ranks = [_Rank(rank, program, calls) for rank, (program, calls) in sorted(programs.items())]
        self._collectives: dict[Key, CollectiveInFlight] = {}
        self._compute_s, self._launch_s, self._communicate_s = compute_s, launch_s, communicate_s

    def run(self) -> None:
        """Advances every rank as far as it can go, until none can go further."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while rank.at < len(rank.program) and self._advance(rank):
                    rank.at, moved = rank.at + 1, True

    def _advance(self, rank: _Rank) -> bool:
        """Simulates a rank's next event; False where it has to wait for another rank."""
        event = rank.program[rank.at]
        awaited = rank.awaited(event)
        if any(self.end_s(collective) is None for collective in awaited):
            return False
        if isinstance(event, RecordedCollective):
            self._begin(rank, event, awaited)
        else:
            self._compute(rank, event, awaited)
        return True

    def _compute(self, rank: _Rank, event: Operation, awaited: list[CollectiveInFlight]) -> None:
        rank.stands = []
        rank.cpu_s += self._launch_s
        begin = max(rank.gpu_s, rank.cpu_s)
        for collective in sorted(awaited, key=lambda call: call.end_s or 0.0):
            until = max(begin, collective.end_s or 0.0)
            late = min(max(collective.begin_s - begin, 0.0), until - begin)
            rank.late_s, rank.bytes_s = rank.late_s + late, rank.bytes_s + until - begin - late
            begin = until
        seconds = self._compute_s(rank.rank, event)
        rank.busy_s += seconds
        rank.gpu_s = begin + seconds
        rank.ended.append(rank.gpu_s)
        if event.read:
            rank.cpu_s = rank.gpu_s

    def _begin(self, rank: _Rank, event: RecordedCollective, awaited: list[CollectiveInFlight]) -> None:
        call = rank.calls[event.call]
        if self._communicate_s(call) is None:
            rank.collectives.append(CollectiveInFlight(call, end_s=0.0))
            return
        collective = self._collectives.setdefault(call.key, CollectiveInFlight(call))
        rank.cpu_s += self._launch_s
        sends = rank.ended[event.operations - 1] if event.operations else 0.0
        collective.ready[rank.rank] = max([rank.cpu_s, sends, *(earlier.end_s or 0.0 for earlier in awaited)])
        line = (call.group, call.ranks, call.kind in ("send", "receive"))
        if line in rank.last and not any(rank.last[line] is earlier for earlier in collective.before):
            collective.before.append(rank.last[line])
        rank.last[line] = collective
        rank.collectives.append(collective)
        if event.waits:
            rank.stands.append(collective)

    def end_s(self, collective: CollectiveInFlight) -> float | None:
        """Returns when a collective ends; None as long as not all its ranks have begun it."""
        if collective.end_s is None:
            before = [self.end_s(earlier) for earlier in collective.before]
            if not set(collective.call.ranks) <= set(collective.ready) or None in before:
                return None
            begin_s = collective.begin_s = max(collective.ready.values())
            collective.end_s = max([begin_s, *(end for end in before if end)]) + self.communicate_s(collective)
        return collective.end_s

    def communicate_s(self, collective: CollectiveInFlight) -> float:
        """Returns the seconds of a collective."""
        return self._communicate_s(collective.call) or 0.0

    def times(self, rank: _Rank) -> Times:
        """Returns the seconds of a rank's step by kind."""
        ends = [self.end_s(collective) or 0.0 for collective in rank.collectives]
        step = max([rank.gpu_s, rank.cpu_s, *ends])
        begins = [end - self.communicate_s(collective) for collective, end in zip(rank.collectives, ends, strict=True)]
        spans = [Span(rank.rank, "", "", begin, end) for begin, end in zip(begins, ends, strict=True)]
        exposed, late = rank.bytes_s + max(0.0, step - max(rank.gpu_s, rank.cpu_s)), rank.late_s
        hidden = max(covered_s(spans) - exposed, 0.0)
        return Times(rank.rank, step, rank.busy_s, exposed, hidden, late, max(step - rank.busy_s - exposed - late, 0.0))


def simulate_step(
    programs: Programs, compute_s: ComputeTime, launch_s: float, communicate_s: CommunicationTime
) -> list[Times]:
    """Predicts each rank's step.

    A rank's GPU does its operations in their order, each when the processor has launched it and the collectives are
    over whose results it uses. A collective begins on all its ranks together, when the last one has what it sends;
    those of one group follow one another. The processor does not wait, but where the script reads a result.

    Args:
        programs: by rank its operations and exchanges, and all its calls.
        compute_s: of an operation on a rank. launch_s: the processor's, of an operation.
        communicate_s: of a collective; None of one that later steps do not have.

    Raises:
        ValueError: the step does not come to its end: ranks wait for one another for ever.
    """
    simulation = _Simulation(programs, compute_s, launch_s, communicate_s)
    simulation.run()
    for rank in simulation.ranks:
        if rank.at < len(rank.program):
            event = rank.program[rank.at]
            awaited = rank.awaited(event)
            calls = [collective.call for collective in awaited if collective.end_s is None]
            by_kind = {kind: {c.site.line: 0 for c in calls if c.kind == kind} for kind in {c.kind: 0 for c in calls}}
            lines_text = "; ".join(f"{kind} at {', '.join(lines)}" for kind, lines in by_kind.items())
            raise ValueError(f"rank {rank.rank} waits for ever for {lines_text}")
    return [simulation.times(rank) for rank in simulation.ranks]
