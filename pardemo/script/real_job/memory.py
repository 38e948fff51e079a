"""Compares a job's peak memory with the plan, kind by kind."""

from collections import Counter
from dataclasses import dataclass

from pardemo.script.job_files.records import JobRecords, MemoryRecord
from pardemo.script.real_job.rehearsal import Rehearsal

#: Files of libraries, and the kind of memory that they allocate. It counts for a block whose frames have no line of the
#: rehearsal; what has neither is ``other``.
_BY_FILE = {
    "adam.py": "optimizer states", "adamw.py": "optimizer states", "optimizer.py": "optimizer states",
    "_fsdp_collectives.py": "gathered", "_fsdp_param.py": "gathered", "reducer.cpp": "communication buffers",
    "distributed_c10d.py": "communication buffers", "param_and_grad_buffer.py": "communication buffers",
}  # fmt: skip
OTHER = "other"


@dataclass(frozen=True)
class MemoryComparison:
    """The peak memory of the rank that holds most, beside a plan.

    ``plan``: what it is compared with, in words; "" where there is no plan of the job's size. ``kinds``: each kind with
    its planned bytes (None without a plan) and the job's; what exceeds the plan most comes first.
    """

    rank: int
    peak_bytes: int
    plan: str
    kinds: list[tuple[str, int | None, int]]


def compare_memory(job: JobRecords, rehearsal: Rehearsal, sizes: bool) -> MemoryComparison | None:
    """Compares the largest snapshot with the plan at full size, or with the rehearsal's memory where sizes are equal.

    Returns None where the job's files have no snapshot.
    """
    if not job.memory:
        return None
    fullest = max(job.memory.values(), key=lambda memory: memory.peak_bytes)
    kinds = _by_kind(fullest, rehearsal)
    planned, plan = rehearsal.memory, "the rehearsal, of the same size"
    if not sizes:
        planned, plan = rehearsal.planned, f"the plan of {rehearsal.planned_model}" if rehearsal.planned else ""
    order = sorted({*kinds, *planned}, key=lambda kind: planned.get(kind, 0) - kinds[kind])
    rows = [(kind, planned.get(kind, 0) if plan else None, kinds[kind]) for kind in order]
    return MemoryComparison(fullest.rank, fullest.peak_bytes, plan, rows)


def _by_kind(memory: MemoryRecord, rehearsal: Rehearsal) -> Counter[str]:
    """Sums a job's bytes by kind: the kind in the file, or else that of the innermost frame with a known one."""
    kinds = Counter(memory.by_kind)
    for frames, nbytes in memory.by_frames.items():
        explained = (rehearsal.kind_of_line.get(line) or _BY_FILE.get(line.rpartition(":")[0]) for line in frames)
        kinds[next(filter(None, explained), OTHER)] += nbytes
    return kinds
