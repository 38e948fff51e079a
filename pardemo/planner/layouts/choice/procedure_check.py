"""The rule of :mod:`~pardemo.planner.layouts.choice.procedure` against the search, on the jobs of a table."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pardemo.planner import hardware
from pardemo.planner.layouts.choice.procedure import Candidate, choose
from pardemo.planner.layouts.choice.search import PlannedLayout, search
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.machines import Machine
from pardemo.planner.layouts.job.stacks import stack
from pardemo.planner.layouts.model.configurations import of
from pardemo.planner.layouts.model.sizes import find
from pardemo.planner.layouts.price.step import step

TABLE = Path(__file__).with_name("thirty_jobs.csv")


@dataclass(frozen=True)
class Compared:
    """A job with the rule's layout and the search's best one; None where nothing fits.

    Args:
        name: model, GPUs and network. seconds: a step's time with the rule's layout, by the planner.
    """

    name: str
    job: Job
    batch: int
    chosen: Candidate | None
    seconds: float
    best: PlannedLayout | None

    @property
    def ratio(self) -> float:
        """The time of a step with the rule's layout over that with the search's best."""
        return self.seconds / self.best.seconds if self.best is not None else float("nan")


def job_of(
    model: str, gpu: str, gpus: int, network: float, sequence: int = 4096, program: str = "megatron-core"
) -> Job:
    """A job on nodes of up to eight GPUs. ``network``: GB/s of a node's network cards together.

    Raises:
        ValueError: a model, GPU or program that is not known.
    """
    machine = Machine(hardware.gpu(gpu), gpus, min(8, gpus), network * 1e9)
    return Job(of(find(model)), machine, stack(program), sequence)


def jobs(program: str = "megatron-core") -> Iterator[tuple[str, Job, int]]:
    """The thirty jobs: name (model, GPUs, thousands of tokens a sample, network), job, samples of a step."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gpus, network = int(row["gpus"]), float(row["between_gb_per_s"])
            sequence = int(row["sequence"])
            name = f"{row['model']}, {gpus:,} {row['gpu']}, {sequence // 1024}k"
            name += f", {network:g} GB/s" if gpus > 8 else ""
            yield name, job_of(row["model"], row["gpu"], gpus, network, sequence, program), int(row["batch"])


def compare(program: str = "megatron-core") -> list[Compared]:
    """The rule and the search on each of the thirty jobs."""
    rows = []
    for name, job, batch in jobs(program):
        chosen = choose(job, batch)
        best = next(iter(search(job, batch, 1).best), None)
        seconds = step(job, chosen.layout).seconds if chosen is not None else float("nan")
        rows.append(Compared(name, job, batch, chosen, seconds, best))
    return rows
