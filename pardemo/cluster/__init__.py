"""A cluster on one machine: real ranks, on hosts that are connected by links with a real limit.

>>> from pardemo import Cluster, World
>>> two_hosts = Cluster(hosts=2, ranks_per_host=4, between="200 Mbit/s")
>>> with World(8, cluster=two_hosts) as world:          # doctest: +SKIP
...     world.run(my_function)

The kernel keeps the limits, on each connection that ranks open, whoever opens it: our rings, gloo, any framework on
``torch.distributed``. See :mod:`pardemo.cluster.pacer` for how, and for what it cannot do.
"""

from pardemo.cluster.cluster import MAX_RANKS, Cluster

__all__ = ["MAX_RANKS", "Cluster"]
