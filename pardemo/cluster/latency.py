"""Adds latency between hosts: our own links hold a message back before they send it.

A link of pardemo's (rings, a pipeline's messages) asks :func:`towards` when it is made. Messages that follow one upon
the other do not add up: each is held back from its own beginning. gloo's connections are not delayed.
"""

import re
from typing import NamedTuple

_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_FORM = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(us|µs|ms|s)\s*", re.ASCII)
MOST_S = 1.0


class _Between(NamedTuple):
    seconds: float
    ranks_per_host: int


_kept = _Between(0.0, 1)


def seconds(text: str, what: str = "latency") -> float:
    """``"2 ms"`` -> 0.002.

    Raises:
        ValueError: no number, no unit or an unknown one, not above zero or more than a second; ``what`` begins the
            message.
    """
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < value <= MOST_S:
        raise ValueError(f"{what} is a time above 0 s and of at most {MOST_S:g} s as '2 ms' or '500 us', not {text!r}")
    return value


def delay_messages(seconds: float, ranks_per_host: int) -> None:
    """On a rank, before its first link: from now on messages to other hosts take ``seconds`` longer, one way."""
    global _kept
    _kept = _Between(seconds, ranks_per_host)


def towards(sender: int, receiver: int) -> float:
    """Seconds that a message between two ranks (of the whole World) is held back."""
    apart = sender // _kept.ranks_per_host != receiver // _kept.ranks_per_host
    return _kept.seconds if apart else 0.0
