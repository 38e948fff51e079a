"""Times, for *Overlap*, what ranks do together."""

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist


def rounds_s(rounds: int, run: Callable[..., object], *arguments: object) -> list[float]:
    """On each rank of the default group: seconds of ``run(*arguments)`` in rounds that all ranks begin together.

    The first one may make connections and allocate memory: ask for one more where nothing has done that before.
    """
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        run(*arguments)
        seconds.append(time.perf_counter() - begin)
    return seconds


def quickest_s(of_ranks: Sequence[Sequence[float]]) -> float:
    """Returns the shortest of the ranks' :func:`rounds_s`; a round is as long as its slowest rank took.

    Other programs on the machine make a round longer, and none makes it shorter.
    """
    return min(max(of_round) for of_round in zip(*of_ranks, strict=True))
