"""The command: which cases, on which Worlds, and what became of them."""

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import psutil
import torch
import torch.distributed as dist

from pardemo import RankDied, RankError, RankFailed, RankTimeout, World

from . import case as cases
from .case import KINDS, Case
from .faults import FAULTS, FaultCase, draw_fault
from .summary import Outcome, Summary
from .training import train_and_compare, verdict

LAYOUT_LIMIT_S = 120.0  # a layout takes a tenth of a second; on a machine that does much else, seconds
GONE_WITHIN_S = 10.0
#: What an engine may refuse instead of doing it right: what its message has to name, and where that is in place.
REFUSALS: dict[str, Callable[[Case], bool]] = {
    "re-?entrant": lambda case: case.checkpointing == "reentrant" and bool(case.engine),
    "use stage 1": lambda case: case.tied and case.pp > 1 and case.engine in ("zero2", "zero3"),
    "clip by the norm of its own": lambda case: case.is_zero and case.chunks > 1 and case.clip is not None,
}


class Worlds:
    """A warm World of each size, for all cases."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __getitem__(self, size: int) -> World:
        if size not in self._worlds:
            self._worlds[size] = World(size)
        return self._worlds[size]

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._worlds.values():
            world.close()


def run_layout(worlds: Worlds, case: Case) -> Outcome:
    """Trains a case on ranks: passed where it is what one process gets, refused as :data:`REFUSALS` allow it."""
    try:
        found = worlds[case.ranks].run(train_and_compare, case, timeout_s=LAYOUT_LIMIT_S)
    except RankError as error:
        told = _first_line(error)
        may = any(applies(case) and re.search(names, told) for names, applies in REFUSALS.items())
        return Outcome(case, "refused" if may else "failed", told)
    wrong = verdict(found)
    return Outcome(case, "failed" if wrong else "passed", wrong or "", max(one.worst for one in found))


def run_fault(worlds: Worlds, case: FaultCase, limit_s: float) -> Outcome:
    """Runs a fault; refused where it ends in the error that names it, and the World works again."""
    world, found = worlds[case.ranks], FAULTS[case.kind]
    world.run(_sum_of_ranks)  # starts the ranks, if the case before ended them
    pids, begin = world.pids, time.monotonic()
    try:
        results = world.run(found.run, case, timeout_s=limit_s)
        status, told = "failed", f"no error, but a result: {results}"
    except (RankFailed, RankDied) as error:
        told = _first_line(error)
        status = "refused" if found.expected(case).search(told) else "failed"
    except RankTimeout as error:
        told = _first_line(error)
        status = "timed out" if found.may_time_out else "failed"
    took_s = time.monotonic() - begin
    after = _state_after(world, case.ranks, pids if status != "failed" or world.pids != pids else [])
    if took_s > limit_s + GONE_WITHIN_S:
        after = f"it took {took_s:.0f} s, the limit is {limit_s:g} s"
    return Outcome(case, "failed" if after else status, "; ".join(filter(None, (told, after))))


def _state_after(world: World, ranks: int, pids: Sequence[int]) -> str:
    """What is wrong with a World after a fault: processes that stay, or no right sum."""
    until = time.monotonic() + GONE_WITHIN_S
    while any(map(_alive, pids)):
        if time.monotonic() > until:
            return f"processes {[pid for pid in pids if _alive(pid)]} are left"
        time.sleep(0.02)
    try:
        sums = world.run(_sum_of_ranks, timeout_s=LAYOUT_LIMIT_S)
    except RankError as error:
        return f"then the World fails: {_first_line(error)}"
    return "" if sums == [ranks * (ranks - 1) // 2] * ranks else f"then the World sums to {sums}"


def _sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _first_line(error: RankError) -> str:
    """What a reader sees first; of a rank's own error of several lines, as torch has them, all."""
    if isinstance(error, RankFailed):
        rank, failure = error.first
        return f"rank {rank}: {' '.join(failure.headline.split())}"
    return str(error).strip().splitlines()[0]


def layouts(number: int, seed: int) -> Iterator[Case]:
    """So many cases: the kinds by turns, those with a larger weight more often."""
    turns = [kind for round_ in range(max(cases.WEIGHTS.values())) for kind in KINDS if cases.WEIGHTS[kind] > round_]
    yield from _by_turns(turns, number, lambda kind, k: cases.draw(kind, k, seed))


def faults(number: int, seed: int, folder: str) -> Iterator[FaultCase]:
    """So many faults, the kinds by turns."""
    yield from _by_turns(list(FAULTS), number, lambda kind, k: draw_fault(kind, k, seed, folder))


def _by_turns(turns: list[str], number: int, draw) -> Iterator:
    numbers = {kind: count() for kind in turns}
    for place in range(number):
        kind = turns[place % len(turns)]
        yield draw(kind, next(numbers[kind]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--layouts", type=int, default=0, metavar="N", help="so many layouts")
    parser.add_argument("--faults", type=int, default=0, metavar="N", help="so many faults")
    parser.add_argument("--seed", type=int, default=1, help="cases are drawn from it")
    parser.add_argument("--only", metavar="KIND", help=f"layouts: {', '.join(KINDS)}; faults: {', '.join(FAULTS)}")
    parser.add_argument("--case", type=int, metavar="N", help="that case of --only, alone")
    parser.add_argument("--limit", type=float, default=20.0, metavar="S", help="seconds that a fault may take (20)")
    told = parser.parse_args(arguments)
    if told.only is not None and told.only not in (*KINDS, *FAULTS):
        parser.error(f"--only: no kind {told.only!r}; there are {', '.join((*KINDS, *FAULTS))}")
    if told.case is not None and told.only is None:
        parser.error("--case needs --only, which says of which kind")
    summary = Summary(told.seed)
    with Worlds() as worlds, tempfile.TemporaryDirectory() as folder:
        for case in _chosen(told, folder):
            is_layout = isinstance(case, Case)
            summary.note(run_layout(worlds, case) if is_layout else run_fault(worlds, case, told.limit))
    summary.show()
    return 1 if summary.failed or not summary.outcomes else 0


def _chosen(told: argparse.Namespace, folder: str) -> Iterator[Case | FaultCase]:
    if told.only is None:
        yield from layouts(told.layouts, told.seed)
        yield from faults(told.faults, told.seed, folder)
        return
    is_layout = told.only in KINDS
    numbers = range(told.layouts if is_layout else told.faults) if told.case is None else (told.case,)
    for number in numbers:
        yield (
            cases.draw(told.only, number, told.seed) if is_layout else draw_fault(told.only, number, told.seed, folder)
        )
