"""A step's operations and collectives played again in reckoned time: on each rank a processor that launches, a GPU that
computes, and links; what waits for what is as it was recorded."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pardemo.measure.calls import Call
from pardemo.measure.summary import Times
from pardemo.measure.work import Exchange, Operation
from pardemo.meters.timeline import Span, covered_s

#: What all ranks of a collective have in common: group, ranks, its number among them.
Key = tuple[str, tuple[int, ...], int]


@dataclass
class Flight:
    """A collective: when each rank was ready for it, which one was before it on the same connection, when it ends."""

    call: Call
    ready: dict[int, float] = field(default_factory=dict)
    before: list["Flight"] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float | None = None


@dataclass
class _Rank:
    """One rank's clocks, in seconds: its processor's, its GPU's; when each operation ended; what it waited for."""

    rank: int
    program: Sequence[Operation | Exchange]
    calls: Sequence[Call]
    at: int = 0
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    ended: list[float] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    last: dict[tuple, Flight] = field(default_factory=dict)
    stands: list[Flight] = field(default_factory=list)
    busy_s: float = 0.0
    bytes_s: float = 0.0
    late_s: float = 0.0


def replay(
    programs: Mapping[int, tuple[Sequence[Operation | Exchange], Sequence[Call]]],
    compute_s: Callable[[int, Operation], float],
    launch_s: float,
    exchange_s: Callable[[Call], float | None],
) -> list[Times]:
    """Each rank's reckoned step.

    A rank's GPU does its operations in their order, each when the processor has launched it and the collectives are
    over whose results it uses. A collective begins on all its ranks together, when the last one has what it sends;
    those of one group follow one another. The processor does not wait, but where the script reads a result.

    Args:
        programs: by rank its operations and exchanges, and all its calls.
        compute_s: of an operation on a rank. launch_s: the processor's, of an operation. exchange_s: of a collective;
            None of one that later steps do not have.

    Raises:
        ValueError: the step does not come to its end: ranks wait for one another for ever.
    """
    ranks = [_Rank(rank, program, calls) for rank, (program, calls) in sorted(programs.items())]
    flights: dict[Key, Flight] = {}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            begun = rank.at
            while rank.at < len(rank.program) and _next(rank, flights, compute_s, launch_s, exchange_s):
                rank.at += 1
            moved = moved or rank.at != begun
    stuck = [rank for rank in ranks if rank.at < len(rank.program)]
    if stuck:
        raise ValueError(f"rank {stuck[0].rank} waits for ever for {_told(stuck[0])}")
    return [_times(rank, exchange_s) for rank in ranks]


def _next(
    rank: _Rank,
    flights: dict[Key, Flight],
    compute_s: Callable[[int, Operation], float],
    launch_s: float,
    exchange_s: Callable[[Call], float | None],
) -> bool:
    """Plays a rank's next event; False where it has to wait for another rank."""
    event = rank.program[rank.at]
    awaited = [rank.flights[number] for number in event.after]
    if isinstance(event, Exchange):
        return _begin(rank, event, awaited, flights, launch_s, exchange_s)
    awaited += rank.stands
    if any(_end(flight, exchange_s) is None for flight in awaited):
        return False
    rank.stands = []
    rank.cpu_s += launch_s
    begin = max(rank.gpu_s, rank.cpu_s)
    for flight in sorted(awaited, key=lambda one: one.end_s or 0.0):
        until = max(begin, flight.end_s or 0.0)
        late = min(max(flight.begin_s - begin, 0.0), until - begin)
        rank.late_s, rank.bytes_s = rank.late_s + late, rank.bytes_s + until - begin - late
        begin = until
    seconds = compute_s(rank.rank, event)
    rank.busy_s += seconds
    rank.gpu_s = begin + seconds
    rank.ended.append(rank.gpu_s)
    if event.read:
        rank.cpu_s = rank.gpu_s
    return True


def _begin(
    rank: _Rank,
    event: Exchange,
    awaited: list[Flight],
    flights: dict[Key, Flight],
    launch_s: float,
    exchange_s: Callable[[Call], float | None],
) -> bool:
    if any(_end(flight, exchange_s) is None for flight in [*awaited, *rank.stands]):
        return False
    call = rank.calls[event.call]
    if exchange_s(call) is None:
        rank.flights.append(Flight(call, end_s=0.0))
        return True
    flight = flights.setdefault((call.group, call.ranks, call.number), Flight(call))
    rank.cpu_s += launch_s
    sends = rank.ended[event.operations - 1] if event.operations else 0.0
    earlier = [flight.end_s or 0.0 for flight in [*awaited, *rank.stands]]
    flight.ready[rank.rank] = max([rank.cpu_s, sends, *earlier])
    line = (call.group, call.ranks, call.kind in ("send", "receive"))
    if line in rank.last and not any(rank.last[line] is one for one in flight.before):
        flight.before.append(rank.last[line])
    rank.last[line] = flight
    rank.flights.append(flight)
    if event.waits:
        rank.stands.append(flight)
    return True


def _end(flight: Flight, exchange_s: Callable[[Call], float | None]) -> float | None:
    """When a collective is over; None as long as not all its ranks have begun it."""
    if flight.end_s is None:
        if not set(flight.call.ranks) <= set(flight.ready):
            return None
        if any(_end(before, exchange_s) is None for before in flight.before):
            return None
        flight.begin_s = max(flight.ready.values())
        flight.end_s = max([flight.begin_s, *(before.end_s or 0.0 for before in flight.before)])
        flight.end_s += exchange_s(flight.call) or 0.0
    return flight.end_s


def _times(rank: _Rank, exchange_s: Callable[[Call], float | None]) -> Times:
    ends = [_end(flight, exchange_s) or 0.0 for flight in rank.flights]
    step = max([rank.gpu_s, rank.cpu_s, *ends])
    flights = [
        Span(rank.rank, "", "", end - (exchange_s(f.call) or 0.0), end)
        for f, end in zip(rank.flights, ends, strict=True)
    ]
    tail = max(0.0, step - max(rank.gpu_s, rank.cpu_s))
    exposed, late = rank.bytes_s + tail, rank.late_s
    hidden = max(covered_s(flights) - exposed, 0.0)
    return Times(rank.rank, step, rank.busy_s, exposed, hidden, late, max(step - rank.busy_s - exposed - late, 0.0))


def _told(rank: _Rank) -> str:
    event = rank.program[rank.at]
    awaited = [rank.flights[number] for number in event.after] + rank.stands
    by_group: dict[str, list[str]] = defaultdict(list)
    for flight in awaited:
        if flight.end_s is None:
            by_group[flight.call.kind].append(flight.call.place.line)
    return "; ".join(f"{kind} at {', '.join(dict.fromkeys(lines))}" for kind, lines in by_group.items())
