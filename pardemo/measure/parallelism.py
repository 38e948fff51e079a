"""One parallelism of a script: what it is, over which ranks, and what decides over its traffic."""

from dataclasses import dataclass, field
from typing import Any


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
    ranks: tuple[int, ...]
    wraps: tuple[str, ...]
    unit_bytes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
