"""From dry runs to GPUs: any micro-batch from two runs, offload, tensor and pipeline parallelism, the allocator.

Every tensor of a step has a size that is affine in the micro-batch, and the same operations run whatever it is. So two
timelines of the same length give that of any other batch, moment by moment, and its peak.
"""

import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from pardemo.doctor import available_cores
from pardemo.planner.allocator import reserved_bytes
from pardemo.planner.dryrun import dry_run
from pardemo.planner.footprint import LINES, Footprint, is_cut
from pardemo.planner.job import Job
from pardemo.rank import end_with_parent

OFFLOADS = ("none", "optimizer", "optimizer+parameters")
#: Taken from the GPU before the first tensor: CUDA's context and libraries. An assumption, not measured here.
CONTEXT_BYTES = 0.6e9


@dataclass(frozen=True)
class Estimate:
    """One GPU's peak, line by line, in bytes; ``lines`` has the footprint's, then the allocator's and CUDA's own."""

    lines: dict[str, float]
    phase: str

    @property
    def peak_bytes(self) -> float:
        return sum(self.lines.values())


LOW, HIGH = 2, 4  # a single sample is stored like several turned round, and saves copies


class Curve:
    """The footprint of a job at any micro-batch, from dry runs at two; others are run where the two do not match."""

    def __init__(self, job: Job):
        self.job = job
        self.low, self.high = map(run, self.needs(job))
        self.affine = self.low.timeline.shape == self.high.timeline.shape

    @staticmethod
    def needs(job: Job) -> list[Job]:
        """The dry runs that a curve is made of."""
        return [job.but(batch=LOW), job.but(batch=HIGH)]

    def estimate(self, batch: int, offload: str = "none", tp: int = 1, pp: int = 1, in_flight: int = 1) -> Estimate:
        """The peak with ``batch`` samples. ``in_flight``: micro-batches whose activations a pipeline stage holds."""
        if offload not in OFFLOADS:
            raise ValueError(f"offload must be one of {', '.join(OFFLOADS)}, not {offload!r}")
        base = self.low if self.affine else run(self.job.but(batch=batch))
        line = base.timeline.astype(float)
        if self.affine:
            line = line + (batch - LOW) / (HIGH - LOW) * (self.high.timeline - self.low.timeline)
        factors = np.ones(len(LINES))
        for kind in ("parameters", "frozen parameters", "gradients", "optimizer states", "gathered parameters"):
            factors[LINES.index(kind)] = 1 / (tp * pp)
        factors[LINES.index("activations")] = tp_share(base, tp) * in_flight / pp
        factors[LINES.index("temporaries")] = tp_share(base, tp)
        factors[LINES.index("logits")] = 1 / tp
        line = line * factors
        phase_of = _phases(base)
        if offload != "none":
            line, phase_of = _offloaded(line, phase_of, offload)
        top = int(line.sum(1).argmax())
        lines = dict(zip(LINES, line[top].tolist(), strict=True))
        overhead = reserved_bytes(base) / max(1, base.peak_bytes) - 1
        lines["allocator"] = overhead * sum(lines.values())
        lines["CUDA context"] = CONTEXT_BYTES
        return Estimate(lines, phase_of[top])

    def largest_batch(self, room: float, limit: int = 4096, **how) -> int:
        """The most samples whose peak stays within ``room`` bytes; 0 where one does not."""
        low, high = 0, 1
        while high <= limit and self.estimate(high, **how).peak_bytes <= room:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.estimate(middle, **how).peak_bytes <= room else (low, middle)
        return low


_DONE: dict[str, Footprint] = {}


def run(job: Job) -> Footprint:
    """A dry run, or the same one made before in this process."""
    key = _described(job)
    if key not in _DONE:
        _DONE[key] = dry_run(job)
    return _DONE[key]


def prepare(jobs: Iterable[Job], progress: Callable[[str], None] = lambda text: None) -> None:
    """Makes dry runs side by side, one on each core, for :func:`run` to find; a few seconds go into starting."""
    missing = {key: job for job in jobs if (key := _described(job)) not in _DONE}
    cores = available_cores()
    if cores < 2 or len(missing) < 2:
        return
    context = multiprocessing.get_context("spawn")  # no thread of this process's can be in the way
    with ProcessPoolExecutor(min(cores, len(missing)), context, initializer=_alone) as pool:
        for done, (key, found) in enumerate(zip(missing, pool.map(dry_run, missing.values()), strict=True), start=1):
            _DONE[key] = found
            progress(f"{done} of {len(missing)} dry runs")


def _alone() -> None:
    end_with_parent()  # the pool's own processes would wait for a killed kernel's next task for ever
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


def _described(job: Job) -> str:
    rest = {name: getattr(job, name) for name in job.__dataclass_fields__ if name != "config"}
    return f"{job.config.to_json_string()} {rest}"


def tp_share(found: Footprint, tp: int) -> float:
    """Of the activations, what a tensor-parallel rank keeps: heads and MLP are cut, the residual stream is not."""
    if tp == 1:
        return 1.0
    cut = whole = 0
    for life in found.lives:
        if life.kind == "activations" and life.origin == "model" and life.phase in ("forward", "backward"):
            cut, whole = cut + is_cut(life.module) * life.nbytes, whole + life.nbytes
    return (whole - cut + cut / tp) / max(1, whole)


def _phases(found: Footprint) -> list[str]:
    names = ["between"] * len(found.timeline)
    for (name, begin), end in zip(found.phases, [p for _, p in found.phases[1:]] + [len(names)], strict=True):
        names[begin:end] = [name] * (end - begin)
    return names


def _offloaded(line: np.ndarray, phases: list[str], offload: str) -> tuple[np.ndarray, list[str]]:
    """States move to the host, and the update with them: what the GPU holds in forward and backward remains."""
    keep = np.array([name in ("forward", "backward") for name in phases])
    line = line[keep].copy()
    line[:, LINES.index("optimizer states")] = 0
    if offload == "optimizer+parameters":
        line[:, LINES.index("parameters")] = 0
        line[:, LINES.index("frozen parameters")] = 0
    return line, [name for name, kept in zip(phases, keep, strict=True) if kept]
