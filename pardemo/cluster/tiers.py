"""Finds the better way of limiting links that works on this machine."""

import functools
from typing import NamedTuple

from pardemo.cluster import Cluster, loopback
from pardemo.cluster.hosts import Hosts

#: What would give network namespaces where they are not allowed.
BETTER = (
    "for hosts as network namespaces run as root, or allow user namespaces: "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), --cap-add NET_ADMIN (a container)"
)


class Tier(NamedTuple):
    """A way to limit links.

    Attributes: ``name``, for ``Cluster(tier=…)``; ``evidence``, for claims about seconds over such links, empty where
    nothing limits them; ``missing``: why it is not the better way, and what would give that; empty for the best.
    """

    name: str
    evidence: str
    missing: str


@functools.cache
def best_tier() -> Tier:
    """The better way that works here: namespaces, pacing, or none."""
    return probe()


def probe() -> Tier:
    """:func:`best_tier`, tried anew."""
    try:
        Hosts(Cluster(hosts=1, between="1 Mbit/s")).close()
        return Tier("namespaces", "host links", "")
    except OSError as error:
        better = f"no network namespaces ({error}); {BETTER}"
    if loopback.paces():
        return Tier("pacing", "paced links", better)
    return Tier("none", "", f"links cannot be limited: the kernel does not pace loopback, and {better}")
