"""What a job under torchrun printed, and a host that is killed and comes back."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pardemo.book.chapters.host_fails.measured import Hosts
from pardemo.world.errors import RankDied

_EVENT = re.compile(r"^rank (\d+), process (\d+): (\w+) (\d+) ([\d.]+)$", re.M)
#: Of torchrun's lines those that say what happened; the beginning with its date is cut off.
_AGENT = re.compile(r"^\S+ \S+ \S+ \S*torch/distributed/elastic/\S+\] (?:\[default\] )?(.*)$", re.M)


class Event(NamedTuple):
    """What a rank said of itself: it began at a step, trained one, or is about to kill itself."""

    rank: int
    process: int
    what: str
    step: int
    at_s: float


def events_of(printed: str) -> list[Event]:
    """The ranks' own lines of what a job printed, in the order of their times.

    Raises:
        ValueError: there is none.
    """
    rows = [Event(int(r), int(p), what, int(step), float(at)) for r, p, what, step, at in _EVENT.findall(printed)]
    if not rows:
        raise ValueError(f"no rank said anything: {printed[-500:]}")
    return sorted(rows, key=lambda event: event.at_s)


def agents_lines(printed: str) -> list[str]:
    """What torchrun's agent said of failures and restarts, without dates and folders."""
    lines = (re.sub(r"(?<= )/\S*/", "", " ".join(line.split())) for line in _AGENT.findall(printed))
    return [line for line in lines if line]


def standing_s(events: Sequence[Event]) -> float:
    """Seconds from the kill to the end of the first step after it.

    Raises:
        ValueError: nobody was killed, or no step came after it.
    """
    killed = [event.at_s for event in events if event.what == "kill"]
    after = [event.at_s for event in events if event.what == "step" and killed and event.at_s > killed[-1]]
    if not after:
        raise ValueError("no step came after a kill")
    return after[0] - killed[-1]


def largest_difference(one: Any, other: Any) -> float:
    """The largest difference between numbers at the same place of two trees of dictionaries and tensors.

    Raises:
        ValueError: one of them has a name that the other one has not.
    """
    if isinstance(one, Mapping):
        if set(one) != set(other):
            raise ValueError(f"only one of them has {', '.join(map(str, sorted(set(one) ^ set(other))))}")
        return max((largest_difference(value, other[name]) for name, value in one.items()), default=0.0)
    return float((torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs().max())


def killed_then_back(hosts: Hosts, function: Callable[..., Any], steps: int, dies_at: int, away_s: float = 0.0) -> Any:
    """Host 1 runs ``function`` until it is killed, is away, is started again, and is invited by the next number.

    Args:
        dies_at: the step in which it kills itself. away_s: seconds until there is a host in its place.

    Returns:
        What the function returned when it was back.

    Raises:
        RuntimeError: it was not killed, or was killed again.
    """
    if not isinstance(hosts.run(function, steps, 1, dies_at, only=[1])[1], RankDied):
        raise RuntimeError("host 1 was not killed")
    time.sleep(away_s)
    hosts.say("number", "2")
    back = hosts.run(function, steps, 2, only=[1])[1]
    if isinstance(back, RankDied):
        raise RuntimeError(f"host 1 was killed again: {back}")
    return back
