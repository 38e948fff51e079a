"""Ring and parameter-server collectives over real processes.

To read first: :mod:`pardemo.collectives.plain`, the same ring by ``torch.distributed``'s send and receive.

A ring all-reduce is two laps (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms"): in
the reduce-scatter lap every rank passes partial sums on and ends with one finished chunk, in the
all-gather lap the finished chunks go round once more. Each rank sends, and receives, 2(N−1)/N of the
tensor, all of it to one successor. On rank r of N, of a tensor of S elements (chunk = ceil(S / N))::

                                takes      leaves                         a rank sends
    ring_all_reduce             [S]        [S], the sum, in place         2(N−1)/N · S
    ring_reduce_scatter         [S]        [chunk], chunk r of the sum    (N−1)/N · S
    ring_all_gather             [chunk]    [S], every rank's chunk        (N−1)/N · S
    ring_broadcast              [S]        [S], the source's, in place    S, and the last one nothing
    parameter_server_all_reduce [S]        [S], the sum, in place         S, and the server (N−1) · S

CPU tensors travel over the group's own links (:mod:`pardemo.collectives.links`), CUDA tensors by the backend's own
collectives. All functions are collective: every rank of ``group`` has to call them, in one order, and from one thread
at a time. Before data moves the ranks compare the operation, the tensors and ``label``, a caller's words for whose turn
it is (``bucket 3``). ``link``: an engine's own links in place of the group's.
"""

from pardemo.collectives.functional import (
    hierarchical_all_reduce,
    parameter_server_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from pardemo.collectives.ring import chunk_numel

__all__ = [
    "chunk_numel",
    "hierarchical_all_reduce",
    "parameter_server_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_broadcast",
    "ring_reduce_scatter",
]
