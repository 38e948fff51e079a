"""Adds latency between hosts: our own links hold a message back before they send it.

A link of pardemo's (rings, a pipeline's messages) asks :func:`towards` when it is made. Messages that follow one upon
the other do not add up: each is held back from its own beginning. gloo's connections are not delayed.
"""

from typing import NamedTuple


class _Between(NamedTuple):
    seconds: float
    ranks_per_host: int


_kept = _Between(0.0, 1)


def delay_messages(seconds: float, ranks_per_host: int) -> None:
    """On a rank, before its first link: from now on messages to other hosts take ``seconds`` longer, one way."""
    global _kept
    _kept = _Between(seconds, ranks_per_host)


def towards(sender: int, receiver: int) -> float:
    """Seconds that a message between two ranks (of the whole World) is held back."""
    apart = sender // _kept.ranks_per_host != receiver // _kept.ranks_per_host
    return _kept.seconds if apart else 0.0
