"""Reads what a job under torchrun printed, and compares two states."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

_EVENT = re.compile(r"^host (\d+), rank (\d+) of (\d+), process (\d+): (\w+) (\d+) ([\d.]+)$", re.M)
#: Of torchrun's lines those that say what happened; the beginning with its date is cut off.
_AGENT = re.compile(r"^\S+ \S+ \S+ \S*torch/distributed/elastic/\S+\] (?:\[default\] )?(.*)$", re.M)


class Event(NamedTuple):
    """An event of a rank, as the rank printed it: it was started or has loaded its libraries, before a step; has
    trained one, or is about to kill itself (``start``, ``load``, ``step``, ``kill``)."""

    host: int
    rank: int
    ranks: int
    process: int
    what: str
    step: int
    at_s: float


def events_of(printed: str) -> list[Event]:
    """The ranks' own lines of what a job printed, in the order of their times.

    Raises:
        ValueError: there is none.
    """
    rows = [Event(*map(int, who), event, int(step), float(at)) for *who, event, step, at in _EVENT.findall(printed)]
    if not rows:
        raise ValueError(f"no rank said anything: {printed[-500:]}")
    return sorted(rows, key=lambda event: event.at_s)


def agents_lines(printed: str) -> list[str]:
    """Returns what torchrun's agent said of failures and restarts, without dates and folders."""
    lines = (re.sub(r"(?<= )/\S*/", "", " ".join(line.split())) for line in _AGENT.findall(printed))
    return [line for line in lines if line]


class Restart(NamedTuple):
    """Ranks that were started anew, and the seconds without training before their first step was done.

    Attributes:
        repeated: steps that are trained a second time. agents_s: from the end of training until the last rank is
            started. python_s: until the last one has loaded its libraries. ranks_s: until the first step is done.
    """

    repeated: int
    agents_s: float
    python_s: float
    ranks_s: float

    @property
    def seconds(self) -> float:
        return self.agents_s + self.python_s + self.ranks_s


def restarts_of(events: Sequence[Event]) -> list[Restart]:
    """The restarts of a job: between two steps, or a kill and a step, ranks were started.

    Args:
        events: in the order of their times.
    """
    restarts, done, ended_s, started_s, loaded_s = [], -1, None, None, 0.0
    for event in events:
        if event.what == "start":
            started_s = event.at_s
        elif event.what == "load":
            loaded_s = event.at_s
        else:
            if event.what == "step" and started_s is not None and ended_s is not None:
                repeated = done + 1 - event.step
                parts = started_s - ended_s, loaded_s - started_s, event.at_s - loaded_s
                restarts.append(Restart(repeated, *parts))
            done = max(done, event.step) if event.what == "step" else done
            ended_s, started_s = event.at_s, None
    return restarts


def largest_difference(first: Any, other: Any) -> float:
    """The largest difference between numbers at the same place of two trees of dictionaries and tensors.

    Raises:
        ValueError: one of them has a name that the other one has not.
    """
    if isinstance(first, Mapping):
        if set(first) != set(other):
            raise ValueError(f"only one of them has {', '.join(map(str, sorted(set(first) ^ set(other))))}")
        return max((largest_difference(value, other[name]) for name, value in first.items()), default=0.0)
    return float((torch.as_tensor(first).double() - torch.as_tensor(other).double()).abs().max())
