"""What the formulas of each parallelism say beside what was sent."""

from pardemo.measure.expected.cut import by_terms
from pardemo.measure.expected.replicas import ddp
from pardemo.measure.expected.rows import SMALL
from pardemo.measure.expected.sharded import deepspeed, fsdp1, fsdp2
from pardemo.measure.parallelism import Parallelism
from pardemo.measure.summary import Finding, Summary

__all__ = ["SMALL", "by_terms", "of"]


def of(measured: Summary, parallelism: Parallelism) -> list[Finding]:
    """Gives the rows of a parallelism what was expected of them; what differs, and what would send less, is found.

    Of models that are cut over ranks, :func:`by_terms` does the same, for all groups together.
    """
    kind = parallelism.kind
    if kind == "DDP":
        return ddp(measured, parallelism)
    if kind in ("FSDP2", "HSDP"):
        return fsdp2(measured, parallelism)
    if kind == "FSDP1":
        return fsdp1(measured, parallelism)
    if kind.startswith("DeepSpeed"):
        return deepspeed(measured, parallelism)
    return []
