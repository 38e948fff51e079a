"""Bytes and seconds of collectives. ``nbytes`` is the whole tensor's size S, ``ranks`` is N.

Sources: Patarasuk & Yuan 2009 (ring all-reduce, its lower bound 2(N−1)/N·S); Li et al. 2014 (parameter
server); nccl-tests' PERFORMANCE.md (algbw and busbw).
"""

from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes that one rank sends and receives."""

    sent: float
    received: float


def _check(nbytes: float, ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {ranks}")
    if nbytes < 0:
        raise ValueError(f"a tensor cannot have {nbytes} bytes")


def ring_half(nbytes: float, ranks: int) -> Traffic:
    """Ring reduce-scatter, or all-gather, of a whole of ``nbytes``: (N−1)/N·S each way."""
    _check(nbytes, ranks)
    share = (ranks - 1) * nbytes / ranks
    return Traffic(share, share)


def ring_all_reduce(nbytes: float, ranks: int) -> Traffic:
    """Two laps: 2(N−1)/N·S each way, on every rank."""
    half = ring_half(nbytes, ranks)
    return Traffic(2 * half.sent, 2 * half.received)


def parameter_server(nbytes: float, ranks: int) -> Traffic:
    """The server, itself one of the N ranks: (N−1)·S received and (N−1)·S sent."""
    _check(nbytes, ranks)
    return Traffic((ranks - 1) * nbytes, (ranks - 1) * nbytes)


def parameter_worker(nbytes: float, ranks: int) -> Traffic:
    """A worker: its gradients to the server, the sum back."""
    _check(nbytes, ranks)
    return Traffic(nbytes, nbytes) if ranks > 1 else Traffic(0, 0)


def total_bytes(method: str, nbytes: float, ranks: int) -> float:
    """All bytes that all ranks send in one all-reduce. Equal for both methods: 2(N−1)·S; only the balance differs."""
    if method not in ("ring", "parameter server"):
        raise ValueError(f"method must be 'ring' or 'parameter server', not {method!r}")
    _check(nbytes, ranks)
    return 2 * (ranks - 1) * nbytes


def cluster_seconds(method: str, nbytes: float, ranks: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """One all-reduce on a cluster where every rank has a link of its own (full duplex) at ``bytes_per_s``.

    Ring: 2(N−1)/N·S/B + 2(N−1)·latency. Server: its link carries (N−1)·S in and then (N−1)·S out.
    """
    _check(nbytes, ranks)
    if method == "ring":
        return ring_all_reduce(nbytes, ranks).sent / bytes_per_s + 2 * (ranks - 1) * latency_s
    if method == "parameter server":
        return 2 * (ranks - 1) * nbytes / bytes_per_s + 2 * latency_s
    raise ValueError(f"method must be 'ring' or 'parameter server', not {method!r}")


def shared_host_seconds(
    method: str, nbytes: float, ranks: int, host_bytes_per_s: float, message_s: float = 0.0
) -> float:
    """One all-reduce when all ranks share one machine: *all* ranks' bytes go through the same cores and memory.

    total bytes / host rate + messages · time per message, where ``host_bytes_per_s`` and ``message_s`` are
    measured on this host with as many ranks. A ring has 2(N−1) dependent steps, a server 2.
    """
    steps = 2 * (ranks - 1) if method == "ring" else 2 * min(1, ranks - 1)
    return total_bytes(method, nbytes, ranks) / host_bytes_per_s + steps * message_s


def algorithm_bandwidth(nbytes: float, seconds: float) -> float:
    """algbw: size over time, bytes/s."""
    return nbytes / seconds


def bus_bandwidth(collective: str, nbytes: float, ranks: int, seconds: float) -> float:
    """busbw of nccl-tests: algbw times 2(N−1)/N (all_reduce) or (N−1)/N (reduce_scatter, all_gather), bytes/s.

    It compares with the link's rate whatever N is. ``nbytes`` is the whole array.
    """
    _check(nbytes, ranks)
    factors = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    if collective not in factors:
        raise ValueError(f"collective must be one of {', '.join(factors)}, not {collective!r}")
    return algorithm_bandwidth(nbytes, seconds) * factors[collective] * (ranks - 1) / ranks


def _twice_half(nbytes: float, ranks: int, root: bool) -> Traffic:
    return ring_all_reduce(nbytes, ranks)


def _half(nbytes: float, ranks: int, root: bool) -> Traffic:
    return ring_half(nbytes, ranks)


def _one_way(nbytes: float, ranks: int, root: bool) -> Traffic:
    return Traffic(nbytes if root and ranks > 1 else 0, 0 if root or ranks == 1 else nbytes)


#: Bytes of torch's collectives by operator name: (whole array, N, is this the root) -> Traffic. Used where no
#: kernel counts (``WireMeter`` with evidence ``count``): what a bandwidth-optimal algorithm moves.
BYTES_OF_COLLECTIVE = {
    "allreduce": _twice_half,
    "allreduce_coalesced": _twice_half,
    "all_reduce": _twice_half,
    "all_reduce_coalesced": _twice_half,
    "reduce_scatter": _half,
    "reduce_scatter_base": _half,
    "reduce_scatter_tensor": _half,
    "reduce_scatter_tensor_coalesced": _half,
    "allgather": _half,
    "allgather_base": _half,
    "all_gather_into_tensor": _half,
    "all_gather_into_tensor_coalesced": _half,
    "allgather_into_tensor_coalesced": _half,
    "alltoall_base": _half,
    "broadcast": _one_way,
    "send": lambda nbytes, ranks, root: Traffic(nbytes, 0),
    "recv": lambda nbytes, ranks, root: Traffic(0, nbytes),
}
