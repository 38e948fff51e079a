"""Describes a cluster: hosts, their ranks, and limits of their links."""

from dataclasses import dataclass

from pardemo import argument_checks
from pardemo.cluster.units import bandwidth_text, bytes_per_second, seconds

MAX_RANKS = 64  # of a World


@dataclass(frozen=True)
class Cluster:
    """Hosts, the ranks on each, and what their links carry.

    Args:
        hosts: how many, from 1 on. ranks_per_host: how many ranks live on each.
        between: what a host's network card carries, each way, as ``"200 Mbit/s"`` or ``"25 MB/s"``; its ranks share it.
        inside: what a rank's own link to the others of its host carries, each way. None: what the machine carries.
        tier: ``"namespaces"``, ``"pacing"``, or None for the better one that works here. ``"none"``: no limit is kept,
            for notebooks that go on where nothing can limit a link (:func:`pardemo.cluster.tiers.best_tier`).
        latency: one way between hosts, as ``"2 ms"``, in the messages of pardemo's own links (rings, pipelines); the
            connections of other libraries have none.

    Raises:
        ValueError: a number of hosts or ranks below 1; a bandwidth that is no amount of bits or bytes a second, not
            above zero; a latency that is no time. (What loopback can carry is measured where a World starts.)
    """

    hosts: int
    ranks_per_host: int = 1
    between: str | None = None
    inside: str | None = None
    tier: str | None = None
    latency: str | None = None

    def __post_init__(self):
        for name in ("hosts", "ranks_per_host"):
            argument_checks.whole_number(getattr(self, name), f"Cluster: {name}")
        if self.tier not in (None, "namespaces", "pacing", "none"):
            raise ValueError(f"Cluster: tier is 'namespaces', 'pacing', 'none' or None, not {self.tier!r}")
        if self.latency is not None:
            seconds(self.latency, "Cluster: latency")
        for name in ("between", "inside"):
            if getattr(self, name) is not None:
                bytes_per_second(getattr(self, name), f"Cluster: {name}")

    def __str__(self) -> str:
        parts = [f"{self.hosts} node{'s' * (self.hosts > 1)} of {self.ranks_per_host}"]
        limits = {"between": self.between_rate, "inside": self.inside_rate}
        parts += [f"{bandwidth_text(rate)} {name}" for name, rate in limits.items() if rate]
        parts += [f"{self.latency} between"] * (self.latency is not None)
        return ", ".join(parts)

    @property
    def size(self) -> int:
        """Ranks on all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def between_rate(self) -> float | None:
        """Bytes a second of a host's network card, each way; None where nothing limits it."""
        return None if self.between is None else bytes_per_second(self.between)

    @property
    def inside_rate(self) -> float | None:
        """Bytes a second of a rank's link inside its host, each way; None where nothing limits it."""
        return None if self.inside is None else bytes_per_second(self.inside)

    @property
    def latency_s(self) -> float:
        """Seconds that a message between hosts takes longer, one way."""
        return 0.0 if self.latency is None else seconds(self.latency)

    def host_of(self, rank: int) -> int:
        """The host of a rank: neighbours by number live together, as launchers place them."""
        return rank // self.ranks_per_host

    def ranks_of(self, host: int) -> list[int]:
        """The ranks of a host."""
        return list(range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host))
