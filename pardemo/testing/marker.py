"""Reads the arguments of ``@pytest.mark.ranks``, and refuses tests that it cannot be on."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pardemo import argument_checks
from pardemo.cluster import MAX_RANKS, Cluster

OPTIONS = ("cluster", "between", "inside", "timeout")


@dataclass(frozen=True)
class RankSetup:
    """The ranks that a test runs on, their cluster if there is one, and the time limit in seconds."""

    size: int
    cluster: Cluster | None
    timeout_s: float

    @property
    def id(self) -> str:
        """Name of the set-up in the test's name: ``2ranks``, ``2x2``."""
        if self.cluster is not None:
            return f"{self.cluster.hosts}x{self.cluster.ranks_per_host}"
        return f"{self.size}rank{'s' * (self.size > 1)}"


def rank_setups(arguments: Sequence[Any], options: Mapping[str, Any], timeout_s: float) -> list[RankSetup]:
    """Returns the set-ups that a marker with these arguments asks for; ``timeout_s`` is used if it names none.

    Raises:
        ValueError: one line that says what is wrong and what would be right.
    """
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ValueError(f"ranks has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}")
    limit = argument_checks.time_limit(options.get("timeout", timeout_s), "timeout")
    for size in arguments:
        argument_checks.whole_number(size, "a number of ranks, as in ranks(2, 4),", most=MAX_RANKS)
        if list(arguments).count(size) > 1:
            raise ValueError(f"ranks names {size} twice")
    cluster = _cluster(options)
    if cluster is None:
        if not arguments:
            raise ValueError("ranks names no number of ranks: ranks(2), ranks(2, 4) or ranks(cluster='2x2')")
        return [RankSetup(size, None, limit) for size in arguments]
    if wrong := [size for size in arguments if size != cluster.size]:
        parts = f"{cluster.hosts} × {cluster.ranks_per_host} = {cluster.size}"
        raise ValueError(f"{wrong[0]} ranks do not fit a cluster of {parts}: leave the number out")
    if cluster.size > MAX_RANKS:
        raise ValueError(f"the cluster has {cluster.size} ranks; {MAX_RANKS} is the limit")
    return [RankSetup(cluster.size, cluster, limit)]


def unfit(function: Callable) -> str | None:
    """Says in one line why a test function cannot run on ranks; None if it can."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "ranks run plain functions, and this is an async one: write def, and asyncio.run(…) within it"
    if inspect.isgeneratorfunction(function):
        return "ranks run plain functions, and this one yields: a test with yield is none to pytest either"
    if getattr(function, "is_hypothesis_test", False):
        return (
            "under @given each rank would draw other examples: use @pytest.mark.parametrize, or keep @given without "
            "the marker and run a function on a World within the test"
        )
    return None


def _cluster(options: Mapping[str, Any]) -> Cluster | None:
    cluster, links = options.get("cluster"), {name: options[name] for name in ("between", "inside") if name in options}
    if cluster is None or isinstance(cluster, Cluster):
        if links:
            limited = "of a Cluster: give it to the Cluster itself" if cluster else "of a cluster, and there is none"
            raise ValueError(f"{next(iter(links))} is a limit {limited}")
        return cluster
    shape = re.fullmatch(r"(\d+)x(\d+)", cluster) if isinstance(cluster, str) else None
    if shape is None:
        raise ValueError(f"cluster is a pardemo.Cluster, or hosts x ranks on each as in '2x4', not {cluster!r}")
    return Cluster(int(shape[1]), int(shape[2]), **links)
