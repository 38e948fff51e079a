"""Describes GPUs on hosts for the time model: rates that programs reach, links with a start-up time."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from pardemo import argument_checks
from pardemo.planner.estimate import FULLEST, RESERVE
from pardemo.planner.hardware import LINKS, USUAL_LINK, Gpu
from pardemo.planner.rates import LINK_SHARE, matrix

MEMORY_SHARE = 0.85  # of the datasheet's bandwidth, by operations element by element
#: Of a matrix product's rate, what FlashAttention-2 reaches, both passes together. Its paper (arXiv 2307.08691, figures
#: 4 to 6): 110 to 230 TFLOP/s on an A100, 335 in the forward pass on an H100.
ATTENTION = 0.62


class Link(NamedTuple):
    """The link between hosts: words that say which one it is, and bytes/s of a host's adapters together, one way.

    The rate is the data sheet's, of which a part is reached, or what was reached (``measured``).
    """

    words: str
    bytes_per_s: float
    measured: bool = False


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind on hosts.

    Args:
        gpu: the kind, from :mod:`pardemo.planner.hardware`.
        gpus: GPUs of all hosts together.
        host_gpus: GPUs of a host.
        between: bytes/s of a host's adapters together, one way.
        latency_within, latency_between: seconds before a collective's first byte is there, for each doubling of ranks,
            or before a message's.
        link_share: share of a link's rate that large messages reach.
        link: the link that ``between`` was computed from, for readers; None where somebody gave the rate alone.
    """

    gpu: Gpu
    gpus: int = 8
    host_gpus: int = 8
    between: float = LINKS[USUAL_LINK]
    latency_within: float = 50e-6
    latency_between: float = 250e-6
    link_share: float = LINK_SHARE
    link: Link | None = field(default=None, compare=False)

    def __post_init__(self):
        for name in ("gpus", "host_gpus"):
            argument_checks.whole_number(getattr(self, name), name)
        if self.between <= 0:
            raise ValueError(f"between hosts there must be more than 0 bytes/s, not {self.between!r}")
        if not 0 < self.link_share <= 1:
            raise ValueError(f"of a link's rate more than 0 and at most 1 is reached, not {self.link_share!r}")

    @property
    def matrix_flops(self) -> float:
        """Operations/s of large matrix multiplications, in a step and not alone."""
        return matrix(self.gpu)

    @property
    def attention_flops(self) -> float:
        return self.matrix_flops * ATTENTION

    @property
    def memory_bytes_per_s(self) -> float:
        return self.gpu.memory_bytes_per_s * (1.0 if self.gpu.measured else MEMORY_SHARE)

    @property
    def hosts(self) -> int:
        return math.ceil(self.gpus / self.host_gpus)

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes/s of a host's adapters, by their data sheet or as measured."""
        return self.between if self.link is None else self.link.bytes_per_s

    @property
    def most_bytes(self) -> float:
        """Bytes up to which a job fits a GPU: no run is known that took more."""
        return self.gpu.memory_bytes * FULLEST

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU that a plan fills at most where it can choose."""
        return self.gpu.memory_bytes * (1 - RESERVE)

    def inside(self, ranks: int, stride: int = 1) -> bool:
        """Returns whether a group of so many ranks, every ``stride``-th, is on one host."""
        return ranks * stride <= self.host_gpus

    def rate(self, ranks: int, stride: int = 1) -> float:
        """Bytes/s of each rank of such a group to the next, all groups of that kind sending at once.

        A ring takes its ranks host by host and leaves each host once. It has a host's adapters for itself, or shares
        them with the rings of its neighbours, of which there are ``stride``.
        """
        if self.inside(ranks, stride):
            return self.gpu.link_bytes_per_s * self.link_share
        return min(self.gpu.link_bytes_per_s, self.between / min(stride, self.host_gpus)) * self.link_share

    def latency(self, ranks: int, stride: int = 1) -> float:
        """Seconds of a collective of no bytes."""
        return self._start(ranks, stride) * math.log2(ranks)

    def _start(self, ranks: int, stride: int) -> float:
        return self.latency_within if self.inside(ranks, stride) else self.latency_between

    def gather(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-gather that leaves ``nbytes`` on each rank, or of a reduce-scatter that begins with them.

        Thakur et al. 2005, ring algorithm: (n − 1)/n of the bytes pass each rank. None do of one rank, here and below.
        """
        return self.latency(ranks, stride) + nbytes * (ranks - 1) / ranks / self.rate(ranks, stride)

    def ring(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds in which each rank's part of ``nbytes`` goes round to all, by one message after the other."""
        return (ranks - 1) * (self._start(ranks, stride) + nbytes / ranks / self.rate(ranks, stride))

    def all_reduce(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds: a reduce-scatter, then an all-gather."""
        return self.latency(ranks, stride) + 2 * nbytes * (ranks - 1) / ranks / self.rate(ranks, stride)

    def all_to_all(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds in which each rank sends ``nbytes`` in equal parts to all, its own among them.

        Most of what leaves a host goes through its adapters, which its GPUs share.
        """
        if self.inside(ranks, stride):
            return self.gather(nbytes, ranks, stride)
        on_host = max(1, min(ranks, self.host_gpus // stride))
        slow = nbytes * (ranks - on_host) / ranks * self.host_gpus / self.between / self.link_share
        return self.latency(ranks, stride) + slow

    def dispatch(self, nbytes: float, ranks: int, stride: int, chosen: int) -> float:
        """Seconds in which a fused kernel sends tokens to ``chosen`` experts of ``ranks`` ranks: ``nbytes`` of a rank,
        a token once for each of its experts.

        To each other host a token goes once, whatever it has there, and on from there to each rank that has one of its
        experts, beside what is still on its way (DeepEP's kernels, deepseek-ai/DeepEP).
        """
        if ranks == 1:
            return 0.0
        hosts = max(1, ranks * stride // self.host_gpus)
        once = nbytes * distinct(chosen, ranks) / chosen * (ranks - 1) / ranks
        seconds = once / self.rate(min(ranks, max(2, self.host_gpus // stride)), stride if hosts == 1 else 1)
        if hosts > 1:
            across = nbytes * distinct(chosen, hosts) / chosen * (hosts - 1) / hosts
            seconds = max(seconds, across * self.host_gpus / self.between / self.link_share)
        return self._start(ranks, stride) + seconds

    def crossings(self, ranks: int, stride: int) -> int:
        """Steps of a row of so many ranks, every ``stride``-th, that go to another host."""
        return min(ranks, math.ceil(ranks * stride / self.host_gpus)) - 1

    def send(self, nbytes: float, stride: int, leaves: bool | None = None) -> float:
        """Seconds of a message to the rank ``stride`` further on, its neighbours sending to theirs.

        ``leaves``: whether that one is on another host (None: whether it would be for the first rank of a host). The
        ``stride`` ranks of a host that send to another one share its adapters.
        """
        if leaves is None:
            leaves = not self.inside(2, stride)
        if not leaves:
            return self.latency_within + nbytes / self.gpu.link_bytes_per_s / self.link_share
        rate = min(self.gpu.link_bytes_per_s, self.between / min(stride, self.host_gpus))
        return self.latency_between + nbytes / rate / self.link_share


def distinct(chosen: int, places: int) -> float:
    """Returns the expected number of different places among ``chosen`` random ones of ``places``."""
    return places * (1 - (1 - 1 / places) ** chosen)
