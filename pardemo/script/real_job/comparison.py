"""Compares the files of a job with its rehearsal: calls, waits, memory, logged steps and the machine's rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pardemo.script.hangs.standstill import Standstill
from pardemo.script.job_files.reading import read_job
from pardemo.script.job_files.records import JobRankRecord, JobRecords
from pardemo.script.real_job import machine_profile, waiting
from pardemo.script.real_job.memory import MemoryComparison, compare_memory
from pardemo.script.real_job.mismatches import CallCount, JobMismatches, find_mismatches
from pardemo.script.real_job.rehearsal import Rehearsal, read_rehearsal
from pardemo.script.real_job.waiting import Waits

#: Files that have calls, by what they are called in reports.
RECORDER, TRACE = "flight recorder", "trace"


@dataclass
class JobComparison:
    """The result of comparing a job with its rehearsal.

    Args:
        sizes: whether bytes and dtypes were compared, too.
        mismatches, waits: by kind of file, :data:`RECORDER` or :data:`TRACE`.
        standstill: who waits for whom, where a flight recorder has calls that are not over.
        logged: medians and extremes of a log's steps.
        rates, product_flops: what the machine reaches by the traces, in bytes/s and FLOP/s.
    """

    rehearsal: Rehearsal
    job: JobRecords
    sizes: bool
    mismatches: Mapping[str, JobMismatches]
    waits: Mapping[str, Waits]
    standstill: Standstill | None
    memory: MemoryComparison | None
    logged: dict[str, float | None]
    rates: list[machine_profile.LinkRate]
    product_flops: float | None

    @property
    def differs(self) -> bool:
        """Whether a rank of the job calls something else than was rehearsed, or waits in a call."""
        return self.standstill is not None or any(result.differing for result in self.mismatches.values())

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison for JSON: bytes and seconds of the files, ranks as keys in text."""
        return {
            "parts": self.differs, "same_size": self.sizes, "rehearsed_ranks": self.rehearsal.ranks,
            "files": {
                RECORDER: sorted(self.job.recorders), TRACE: sorted(self.job.traces),
                "memory snapshot": sorted(self.job.memory), "logged steps": len(self.job.steps),
                "refused": self.job.refused,
            },
            "partings": {name: _mismatches_json(result) for name, result in self.mismatches.items()},
            "time": {str(rank): _timing_json(record) for rank, record in self.job.traces.items() if record.timing},
            "waits": {name: waits.as_json() for name, waits in self.waits.items()},
            "standstill": self.standstill and self.standstill.as_json(),
            "memory": self.memory and vars(self.memory) | {
                "kinds": [{"kind": kind, "planned": planned, "job": job} for kind, planned, job in self.memory.kinds]
            },
            "logged": self.logged,
            "machine": {"rates": [vars(rate) for rate in self.rates], "product_flops": self.product_flops},
        }  # fmt: skip


def compare_job(folder: Path, paths: Sequence[str], sizes: bool) -> JobComparison:
    """Compares a job's files with the rehearsal in a folder.

    Raises:
        ValueError: the folder is no rehearsal, a file is not there, or none could be read.
    """
    rehearsal, job = read_rehearsal(folder), read_job(paths)
    if not (job.recorders or job.traces or job.memory or job.steps):
        raise ValueError("; ".join(job.refused) or "there is no file to compare")
    files = {name: records for name, records in ((RECORDER, job.recorders), (TRACE, job.traces)) if records}
    mismatches = {name: find_mismatches(records, rehearsal, sizes, name == RECORDER) for name, records in files.items()}
    waits = {name: waited for name, records in files.items() if (waited := waiting.find_waits(records))}
    rates, _ = machine_profile.link_rates(job.traces, machine_profile.host_gpus(job.traces))
    return JobComparison(
        rehearsal, job, sizes, mismatches, waits, waiting.find_standstill(job.recorders),
        compare_memory(job, rehearsal, sizes), _logged(job), rates, machine_profile.product_rate(job.traces),
    )  # fmt: skip


def _logged(job: JobRecords) -> dict[str, float | None]:
    """Summarises the logged steps by medians and extremes: None for what no line has, {} without a log."""
    logged = {name: [value for step in job.steps if (value := getattr(step, name)) is not None] for name in (
        "step_s", "loss", "memory_bytes", "tflops", "tokens_per_s")}  # fmt: skip
    middle = {name: median(values) if values else None for name, values in logged.items()}
    return {
        "steps": len({step.step for step in job.steps}), "step_s": middle["step_s"],
        "slowest_s": max(logged["step_s"], default=None), "memory_bytes": max(logged["memory_bytes"], default=None),
        "tflops": middle["tflops"], "tokens_per_s": middle["tokens_per_s"],
        "first_loss": next(iter(logged["loss"]), None), "last_loss": next(reversed(logged["loss"]), None),
    } if job.steps else {}  # fmt: skip


def _mismatches_json(mismatches: JobMismatches) -> dict[str, Any]:
    def rows(traffic: Mapping[tuple[str, str, str], CallCount]) -> list[dict[str, Any]]:
        return [
            {"kind": kind, "role": role, "line": line} | vars(calls) | {"ranks": sorted(calls.ranks)}
            for (kind, role, line), calls in traffic.items()
        ]

    return {
        "compared": mismatches.compared, "calls": mismatches.calls, "calls_of_unknown_groups": mismatches.unknown,
        "first": {str(rank): mismatch.as_json() for rank, mismatch in mismatches.first.items()},
        "not_predicted": rows(mismatches.more), "left_out": rows(mismatches.fewer),
    }  # fmt: skip


def _timing_json(record: JobRankRecord) -> dict[str, Any]:
    made = {name: value for name, value in vars(record.timing).items() if name not in ("products", "copies", "of_none")}
    rows = record.exposed_by().items()
    return made | {"exposed_by": [{"kind": kind, "line": line, "seconds": seconds} for (kind, line), seconds in rows]}
