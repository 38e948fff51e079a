"""Counts bytes per link: from each rank to each other one, and over each host's network card."""

import psutil
import torch.distributed as dist

from pardemo.cluster import Cluster, namespaces
from pardemo.meters.wire import WireMeter


class LinkMeter:
    """Counts what every rank sends to every other while the block runs. Collective, over all ranks.

    >>> with LinkMeter(cluster) as links:                   # doctest: +SKIP
    ...     ring_all_reduce(tensor)
    >>> links.matrix[0][1], links.hosts[0]                  # doctest: +SKIP

    Args:
        cluster: which ranks live on one host; each on its own when None.

    Attributes (after the block, the same on all ranks): ``matrix[a][b]``, bytes that rank a sent to rank b;
    ``hosts[h]``, bytes that host h's ranks sent to, and received from, other hosts; ``adapters[h]``, the same as host
    h's card counted it, with headers and with packets that were sent twice, where the hosts are network namespaces;
    else None.
    """

    def __init__(self, cluster: Cluster | None = None):
        self._wire = WireMeter(evidence="wire")
        self._cluster = cluster
        self.matrix: list[list[int]] = []
        self.hosts: list[tuple[int, int]] = []
        self.adapters: list[tuple[int, int]] | None = None

    def __enter__(self) -> "LinkMeter":
        self._adapter = _adapter()
        self._wire.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._wire.__exit__(*error)
        if any(error):
            return
        size = dist.get_world_size()
        bytes_by_rank = self._wire.by_rank()
        row = [bytes_by_rank.get(other, (0, 0))[0] for other in range(size)]
        now = _adapter()
        counted = None
        if self._adapter is not None and now is not None:
            counted = (now[0] - self._adapter[0], now[1] - self._adapter[1])
        tables: list = [None] * size
        dist.all_gather_object(tables, (row, counted))
        cluster = self._cluster or Cluster(hosts=size)
        self.matrix = [row for row, _ in tables]
        self.hosts = [self._of_host(cluster, host) for host in range(cluster.hosts)]
        counted_by_host = [tables[cluster.ranks_of(host)[0]][1] for host in range(cluster.hosts)]
        self.adapters = None if None in counted_by_host else counted_by_host

    def _of_host(self, cluster: Cluster, host: int) -> tuple[int, int]:
        inside = cluster.ranks_of(host)
        outside = [rank for rank in range(cluster.size) if rank not in inside]
        sent = sum(self.matrix[a][b] for a in inside for b in outside)
        return sent, sum(self.matrix[a][b] for a in outside for b in inside)


def _adapter() -> tuple[int, int] | None:
    """Bytes that this host's network card has sent and received; None where it has none of its own."""
    entries = psutil.net_if_addrs().get(namespaces.ADAPTER, [])  # a machine's own network card may have that name, too
    if not any(entry.address.startswith(namespaces.NETWORK) for entry in entries):
        return None
    counted = psutil.net_io_counters(pernic=True)[namespaces.ADAPTER]
    return counted.bytes_sent, counted.bytes_recv
