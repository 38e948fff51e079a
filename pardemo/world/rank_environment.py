"""Describes what a process has to take over to become a rank of a World or of another launcher's job."""

from collections.abc import Sequence
from dataclasses import dataclass

from pardemo.cluster import Cluster
from pardemo.cluster.hosts import Place


@dataclass(frozen=True)
class RankEnvironment:
    """Environment, threads, process group and links of one rank; sent to the process that becomes it.

    Attributes:
        store: path of a file store, or None to meet as the environment says (torchrun).
        backend: None for nccl where each of the host's ranks can have a GPU, gloo elsewhere.
        timeout_s: time limit of the process group.
        gone: variables that the parent had when the fork server began, and has no more.
        cluster: limits for the links, kept with the help of ``table``, a file that the ranks share.
        host: the emulated host that the process goes to.
        latency: arguments of :func:`pardemo.cluster.latency.delay_messages`.
    """

    rank: int
    size: int
    store: str | None
    backend: str | None
    threads: int
    env: dict[str, str]
    path: list[str]
    cwd: str
    timeout_s: float
    gone: Sequence[str] = ()
    cluster: Cluster | None = None
    table: str = ""
    host: Place | None = None
    latency: tuple[float, int] | None = None
