"""A rank's fault on a World: what became of it, and whether the World works afterwards."""

import time
from collections.abc import Sequence

import psutil
import torch
import torch.distributed as dist

from pardemo import RankDied, RankError, RankFailed, RankTimeout, World
from pardemo.deadline import MOST, Deadline
from pardemo.soak.layouts.run import LAYOUT_LIMIT_S, Outcome, Worlds, first_line
from pardemo.soak.ranks.fault import FaultCase
from pardemo.soak.ranks.faults import FAULTS

GONE_WITHIN_S = 10.0


def run_fault(worlds: Worlds, case: FaultCase, limit_s: float) -> Outcome:
    """Runs a fault; refused where it ends in the error that names it, and the World works again."""
    world, fault = worlds[case.ranks], FAULTS[case.kind]
    world.run(sum_of_ranks)  # starts the ranks, if the case before ended them
    pids, begin = world.pids, time.monotonic()
    try:
        results = world.run(fault.run, case, timeout_s=limit_s)
        status, told = "failed", f"no error, but a result: {results}"
    except (RankFailed, RankDied) as error:
        told = first_line(error)
        status = "refused" if fault.is_told(case, told) else "failed"
    except RankTimeout as error:
        told = first_line(error)
        status = "timed out" if fault.may_end_at_limit(case, told, error.stacks.get(case.who, "")) else "failed"
    took_s = time.monotonic() - begin
    after = state_after(world, pids if status != "failed" or world.pids != pids else [])
    if took_s > MOST * limit_s + GONE_WITHIN_S:  # a busy machine puts the limit off
        after = f"it took {took_s:.0f} s, the limit is {limit_s:g} s"
    return Outcome("failed" if after else status, "; ".join(filter(None, (told, after))))


def state_after(world: World, pids: Sequence[int]) -> str:
    """What is wrong with a World after a fault: processes that stay, or no right sum. Empty where nothing is."""
    limit = Deadline(GONE_WITHIN_S, pids)
    while any(map(is_alive, pids)):
        if not limit.left_s():
            return f"processes {[pid for pid in pids if is_alive(pid)]} are left"
        time.sleep(0.02)
    try:
        sums = world.run(sum_of_ranks, timeout_s=LAYOUT_LIMIT_S)
    except RankError as error:
        return f"then the World fails: {first_line(error)}"
    expected = [world.size * (world.size - 1) // 2] * world.size
    return "" if sums == expected else f"then the World sums to {sums}"


def sum_of_ranks() -> int:
    """On every rank: the sum of all ranks' numbers."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
