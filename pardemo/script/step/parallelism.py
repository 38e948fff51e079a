"""Describes a parallelism of a script: its kind, its ranks, and what determines its traffic."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pardemo.script.step.shapes import ExpectedTraffic, Ranks

MEGATRON = "Megatron-core"
ACTIVATIONS, THEIR_GRADIENTS = "activations, to the next stage", "gradients of activations, to the stage before"
PARAMETERS = "parameters of a bucket, gathered"
TIED = "gradients of the embedding, which the first and the last stage both have"


class ParallelismOptions:
    """Properties of a parallelism that determine its traffic; each kind has its own beside these."""

    #: groups of ranks that hold the same shards
    replicas: tuple[Ranks, ...] = ()
    #: the library that cuts a model; empty where another parallelism is meant
    by: str = ""
    #: of the median step, as formulas predict it; none of parallelisms that have a rule of their own
    traffic: Sequence[ExpectedTraffic] = ()


@dataclass(frozen=True)
class DdpOptions(ParallelismOptions):
    """Properties of DDP that determine its traffic.

    Args:
        buckets: each bucket's parameters. rows_used: of each embedding the rows whose gradients are not zero, of how
            many. unused: parameters that had no gradient in the last step.
    """

    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    buckets: list[list[str]] = field(default_factory=list)
    rows_used: dict[str, tuple[int, int]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SeveralModels(ParallelismOptions):
    """The number of models under DDP over the same ranks."""

    models: int


@dataclass(frozen=True)
class Fsdp2Options(ParallelismOptions):
    """Properties of FSDP2 that determine its traffic.

    Args:
        gradient_bytes: of each unit, as they are reduced. reshard_after_forward: of each unit.
        replicas: groups of ranks that hold the same shards. gathered_in: dtypes. shapes: of parameters.
        runs: how often the median step runs each unit in its forward.
    """

    gradient_bytes: dict[str, int] = field(default_factory=dict)
    reshard_after_forward: dict[str, bool] = field(default_factory=dict)
    replicas: tuple[Ranks, ...] = ()
    gathered_in: list[str] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    runs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fsdp1Options(ParallelismOptions):
    """Properties of FSDP1 that determine its traffic. ``gradient_bytes``: of each unit, as they are reduced."""

    sharding_strategy: str
    gradient_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ZeroOptions(ParallelismOptions):
    """Properties of DeepSpeed's engine that determine its traffic. ``stage``: of ZeRO, 0 for none."""

    micro_batches: int
    stage: int


@dataclass(frozen=True)
class CutOptions(ParallelismOptions):
    """A model, a batch or a sequence that is cut over a group of ranks, and what they send for it.

    Args:
        by: the library that cuts it. gradients_unsummed: whether gradients were still partial sums after the step.
        traffic: of the median step, as formulas predict it.
    """

    by: str = ""
    gradients_unsummed: bool | None = None
    traffic: Sequence[ExpectedTraffic] = ()


class Boundary(NamedTuple):
    """The boundary behind a stage: who sends activations to whom, and of each step their bytes and elements."""

    sender: int
    receiver: int
    outputs: dict[int, list[int]]


@dataclass(frozen=True)
class PipelineOptions(CutOptions):
    """A pipeline, and what it sends. ``boundaries``: behind this rank's stages, until their traffic is known."""

    boundaries: tuple[Boundary, ...] = ()


@dataclass(frozen=True)
class Parallelism:
    """One parallelism of a script, over one group of ranks.

    Args:
        kind: ``DDP``, ``FSDP2``, ``HSDP``, ``FSDP1``, ``DeepSpeed ZeRO-3``, ``TP``, ``PP`` …
        ranks: of the group that this rank is in.
        wraps: what it holds: names of modules, or of stages.
        unit_bytes: of each wrapped unit, bytes as they are gathered or summed on a rank.
        options: what decides over its traffic.
    """

    kind: str
    ranks: Ranks
    wraps: tuple[str, ...]
    unit_bytes: dict[str, int] = field(default_factory=dict)
    options: ParallelismOptions = CutOptions()

    def as_json(self) -> dict[str, Any]:
        """Returns the parallelism for JSON, without the bytes of its units."""

        def known(thing: object) -> dict[str, Any]:
            return {name: value for name, value in vars(thing).items() if value is not None}

        options = {name: value for name, value in known(self.options).items() if name not in ("traffic", "boundaries")}
        if self.options.traffic:
            options["terms"] = [known(traffic) for traffic in self.options.traffic]
        return {"kind": self.kind, "ranks": self.ranks, "wraps": self.wraps, "options": options}
