"""Computes how often a job fails, how often to save it, and what failures leave of its time.

Failures come at random with one rate, whatever the machine did before, so that the time to the next one is exponential.
A job trains ``interval`` seconds, is held up for ``save`` seconds by a save, and so on; after a failure it takes
``restart`` seconds until it trains again, from the last save on. Seconds everywhere.

Sources: Young 1974 (Communications of the ACM 17(9), 530: the interval); Daly 2006 (Future Generation Computer Systems
22(3), 303: the expected time of a job, and his higher-order interval); Wang et al. 2023 (Gemini, SOSP 23: copies in the
memory of other hosts).
"""

import math
from typing import NamedTuple

from pardemo.formulas import check_seconds
from pardemo.formulas.memory import shard_of


def between_failures(of_one: float, parts: int) -> float:
    """The mean time between failures of a job that stops when any of its ``parts`` does.

    Raises:
        ValueError: a time that is not above 0, or fewer than one part.
    """
    _check_positive(of_one)
    if parts < 1:
        raise ValueError(f"a job has one part or more, not {parts}")
    return of_one / parts


def young_interval(save: float, between: float) -> float:
    """Young's interval, √(2·save·between): with it, saves and repeated work cost the same.

    Raises:
        ValueError: a time that is not above 0.
    """
    _check_positive(save, between)
    return math.sqrt(2 * save * between)


def goodput(interval: float, save: float, between: float, restart: float = 0.0) -> float:
    """The share of a job's time that is training which counts, on average over many failures.

    A stretch of training and its save survives with the probability q = e^(−(interval + save)/between). So q/(1 − q)
    stretches are saved between a restart and the next failure, which takes ``between + restart`` seconds.

    Daly also lets restarts fail; for restarts that are short beside ``between`` it is the same.

    Raises:
        ValueError: an interval or a mean time that is not above 0, or a negative time.
    """
    _check_positive(interval, between)
    check_seconds(save, restart)
    return interval / math.expm1((interval + save) / between) / (between + restart)


class Lost(NamedTuple):
    """Shares of a job's time that are lost, to a first approximation; :attr:`all` is their sum."""

    saves: float
    repeated: float
    restarts: float

    @property
    def all(self) -> float:
        return sum(self)


def lost_shares(interval: float, save: float, between: float, restart: float = 0.0) -> Lost:
    """Young's reckoning: a save in each interval, half an interval repeated after each failure, and a restart.

    Raises:
        ValueError: an interval or a mean time that is not above 0, or a negative time.
    """
    _check_positive(interval, between)
    check_seconds(save, restart)
    return Lost(save / interval, interval / 2 / between, restart / between)


def saved_bytes(params: float, parameter: float = 2, optimizer: float = 12) -> float:
    """Bytes of a checkpoint: parameters and optimizer states, without gradients, which the next step makes anew.

    Args:
        parameter, optimizer: bytes of each parameter, and of what the optimizer keeps for it (mixed precision: 2, 12).

    Raises:
        ValueError: a negative number.
    """
    if min(params, parameter, optimizer) < 0:
        raise ValueError(f"numbers of parameters and bytes are 0 or more, not {min(params, parameter, optimizer)}")
    return params * (parameter + optimizer)


class Read(NamedTuple):
    """Rows ``begin`` to ``end`` of a tensor, without the last one, that lie in the shard of one of its old ranks."""

    shard: int
    begin: int
    end: int


def resharded(rows: int, before: int, now: int, rank: int) -> list[Read]:
    """Lists what ``rank`` of ``now`` ranks reads of a tensor of ``rows`` rows that ``before`` ranks saved in shards.

    Raises:
        ValueError: as :func:`pardemo.formulas.memory.shard_of`.
    """
    begin, end = shard_of(rows, now, rank)
    reads = []
    for shard in range(before):
        low, high = shard_of(rows, before, shard)
        if max(low, begin) < min(high, end):
            reads.append(Read(shard, max(low, begin), min(high, end)))
    return reads


def pairs_that_lose(hosts: int, placement: str = "ring") -> float:
    """Two of ``hosts`` hosts die together, any two alike: the probability that a state is gone with its only copy.

    Args:
        placement: ``"ring"``, where each host keeps the state of the one before it; or ``"pairs"``, where hosts keep
            each other's.

    Raises:
        ValueError: fewer than two hosts, an odd number of them for pairs, or another placement.
    """
    if hosts < 2:
        raise ValueError(f"a copy needs another host: 2 hosts or more, not {hosts}")
    if placement == "ring":
        return min(1.0, 2 / (hosts - 1))
    if placement == "pairs":
        if hosts % 2:
            raise ValueError(f"pairs need an even number of hosts, not {hosts}")
        return 1 / (hosts - 1)
    raise ValueError(f"a placement is ring or pairs, not {placement!r}")


def _check_positive(*seconds: float) -> None:
    if any(not time > 0 for time in seconds):
        raise ValueError(f"this time is above 0 s, not {min(seconds)}")
