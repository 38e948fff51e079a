"""Computes bytes and seconds of collectives. ``nbytes`` is the whole tensor's size S, ``ranks`` is N.

Sources: Patarasuk & Yuan 2009 (ring all-reduce, its lower bound 2(N−1)/N·S); Li et al. 2014 (parameter
server); nccl-tests' PERFORMANCE.md (algbw and busbw).
"""

from collections.abc import Callable
from typing import NamedTuple

from pardemo.formulas import check_ranks


class Traffic(NamedTuple):
    """Bytes that one rank sends and receives."""

    sent: float
    received: float


def _check(nbytes: float, ranks: int) -> None:
    check_ranks(ranks)
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


METHODS = ("ring", "torch", "parameter server")


def all_reduce_steps(method: str, ranks: int) -> int:
    """Messages that follow one upon the other: 2(N−1) on a ring (torch's gloo is one, too), 2 with a server."""
    _check(0, ranks)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    if ranks == 1:
        return 0
    return 2 if method == "parameter server" else 2 * (ranks - 1)


def cluster_seconds(method: str, nbytes: float, ranks: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """One all-reduce on a cluster where every rank has a link of its own (full duplex) at ``bytes_per_s``.

    Ring: 2(N−1)/N·S/B + 2(N−1)·latency. Server: its link carries (N−1)·S in and then (N−1)·S out.
    """
    on_busiest_link = 2 * (ranks - 1) * nbytes if method == "parameter server" else ring_all_reduce(nbytes, ranks).sent
    return on_busiest_link / bytes_per_s + all_reduce_steps(method, ranks) * latency_s


def shared_host_seconds(
    method: str, nbytes: float, ranks: int, host_bytes_per_s: float, message_s: float = 0.0
) -> float:
    """One all-reduce when all ranks share one machine: *all* ranks' bytes go through the same cores and memory.

    2(N−1)·S over the host's rate, whichever the method, plus the dependent messages at ``message_s`` each; both
    are measured on this host.
    """
    return 2 * (ranks - 1) * nbytes / host_bytes_per_s + all_reduce_steps(method, ranks) * message_s


def bus_bandwidth(collective: str, nbytes: float, ranks: int, seconds: float) -> float:
    """busbw of nccl-tests: size over time (algbw) times 2(N−1)/N (all_reduce) or (N−1)/N (the halves), bytes/s.

    It compares with the link's rate whatever N is. ``nbytes`` is the whole array.
    """
    _check(nbytes, ranks)
    factors = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    if collective not in factors:
        raise ValueError(f"collective must be one of {', '.join(factors)}, not {collective!r}")
    return nbytes / seconds * factors[collective] * (ranks - 1) / ranks


def _one_way(nbytes: float, ranks: int, root: bool) -> Traffic:
    return Traffic(nbytes if root and ranks > 1 else 0, 0 if root or ranks == 1 else nbytes)


def _to_root(nbytes: float, ranks: int, root: bool) -> Traffic:
    """A shard from every other rank to the root: the largest argument is the whole on the root, a shard elsewhere."""
    return Traffic(0, nbytes * (ranks - 1) / ranks) if root else Traffic(nbytes, 0)


#: Bytes of torch's collectives by operator name: (whole array, N, is this the root) -> Traffic. Used where no
#: kernel counts (``WireMeter`` with evidence ``count``): what a bandwidth-optimal algorithm moves.
BYTES_OF_COLLECTIVE: dict[str, Callable[[float, int, bool], Traffic]] = {
    **dict.fromkeys(
        ("allreduce", "allreduce_coalesced", "all_reduce", "all_reduce_coalesced"),
        lambda nbytes, ranks, root: ring_all_reduce(nbytes, ranks),
    ),
    **dict.fromkeys(
        ("reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
         "allgather", "allgather_base", "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
         "allgather_into_tensor_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
        lambda nbytes, ranks, root: ring_half(nbytes, ranks),
    ),
    "broadcast": _one_way,
    "reduce": lambda nbytes, ranks, root: _one_way(nbytes, ranks, not root),
    "gather": _to_root,
    "scatter": lambda nbytes, ranks, root: Traffic(*_to_root(nbytes, ranks, root)[::-1]),
    **dict.fromkeys(("barrier", "wait_tensor"), lambda nbytes, ranks, root: Traffic(0, 0)),
    "send": lambda nbytes, ranks, root: Traffic(nbytes, 0),
    "recv": lambda nbytes, ranks, root: Traffic(0, nbytes),
}  # fmt: skip


def gloo_sent(collective: str, nbytes: float, ranks: int, distance: int = 0) -> float:
    """Bytes that a rank sends by gloo's own algorithm, which is not everywhere the one that sends the least.

    gloo's reduce-scatter is an all-reduce underneath, its broadcast doubles the ranks that have it in each step, its
    reduce is a reduce-scatter whose shares go to the root. ``distance``: of the rank, counted from the root on. Source:
    gloo's broadcast.h and reduce.cc; the kernel counts the same (tests/test_measure.py).
    """
    _check(nbytes, ranks)
    if ranks == 1 or collective in ("barrier", "receive"):
        return 0.0
    if collective == "send":
        return nbytes
    if collective == "broadcast":
        steps = range((ranks - 1).bit_length())
        return nbytes * sum(distance < 2**i and distance + 2**i < ranks for i in steps)
    half = ring_half(nbytes, ranks).sent
    if collective in ("all_reduce", "reduce_scatter"):
        return 2 * half
    if collective == "reduce":
        return half + (nbytes / ranks if distance else 0)
    if collective == "gather":
        return nbytes if distance else 0.0
    if collective == "scatter":
        return 0.0 if distance else half
    return half


def zero_step(params: int, world_size: int, stage: int, micro_batches: int = 1, element_bytes: int = 2) -> float:
    """Bytes that a rank sends, and receives, in one optimizer step under a ZeRO stage, on a ring (1910.02054, 7).

    Stages 0 and 1 reduce the sum of all micro-batches once: 2Ψ. Stage 2 reduces each one's gradients, since it keeps
    none of them whole: (m + 1)Ψ. Stage 3 gathers the parameters twice and reduces, for each: 3mΨ. All times (N−1)/N,
    which the paper drops.
    """
    if micro_batches < 1:
        raise ValueError(f"a step has at least one micro-batch, not {micro_batches}")
    rounds = {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}
    if stage not in rounds:
        raise ValueError(f"a ZeRO stage is 0, 1, 2 or 3, not {stage!r}")
    return rounds[stage] * ring_half(params * element_bytes, world_size).sent


def hierarchical_all_reduce(tensor_bytes: float, hosts: int, per_host: int) -> tuple[float, float]:
    """Bytes that a rank sends inside its host, and to other hosts: 2(G−1)/G·S and 2(H−1)/H·S/G.

    A host's adapter sends G times the second, 2(H−1)/H·S; one ring over all ranks sends 2(GH−1)/(GH)·S over it.
    """
    if hosts < 1 or per_host < 1:
        raise ValueError(f"hosts and ranks on each are at least 1, not {hosts} and {per_host}")
    inside = 2 * (per_host - 1) / per_host * tensor_bytes
    return inside, 2 * (hosts - 1) / hosts * tensor_bytes / per_host
