"""Reads what ``--pace`` and ``--cluster`` ask for."""

import re
from dataclasses import dataclass

from pardemo.cluster import Cluster
from pardemo.cluster.units import bytes_per_second, seconds
from pardemo.planner.hardware import LINKS, gpu, link


@dataclass(frozen=True)
class PaceSettings:
    """Settings of ``--pace``: ``layer_s``, the time of a layer's forward, or 0 and the name of a ``gpu``.

    ``cluster``: of the run; a GPU's links limit no rank of this machine. ``between``, ``inside``: bytes/s of a GPU's.
    """

    layer_s: float
    gpu: str
    cluster: Cluster | None
    between: float | None = None
    inside: float | None = None


def read_pace(text: str, cluster: str | None, between: str | None, inside: str | None) -> PaceSettings:
    """Reads what ``--pace`` asks for from the command's options.

    Raises:
        ValueError: neither a time nor a GPU that the planner knows; a cluster or a rate that is none.
    """
    if re.match(r"\s*[0-9.]+\s*(us|µs|ms|s)\s*$", text):
        limited = None if cluster is None else cluster_of(cluster, between, inside)
        return PaceSettings(seconds(text, "--pace"), "", limited)
    try:
        name = gpu(text).name
    except ValueError as error:
        raise ValueError(f"--pace is what a layer takes, as 20ms, or a GPU: {error}") from None
    if cluster is None:
        if between is not None:
            raise ValueError("--between is the rate between nodes: say how many, as --cluster 2x8")
        return PaceSettings(0.0, name, None, None, _rate(inside))
    return PaceSettings(0.0, name, cluster_of(cluster, None, None), _rate(between), _rate(inside))


def cluster_of(cluster: str, between: str | None, inside: str | None) -> Cluster:
    """Makes the cluster of ``2x4`` and its rates.

    Raises:
        ValueError: it is not nodes × ranks, or a rate is none.
    """
    hosts, x, host_ranks = cluster.lower().replace("×", "x").partition("x")
    if not (hosts.isdigit() and x and host_ranks.isdigit()):
        raise ValueError(f"--cluster is nodes × ranks on each, as 2x2, not {cluster!r}")
    return Cluster(int(hosts), int(host_ranks), between=between, inside=inside)


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    return link(text) if text in LINKS else bytes_per_second(text)
