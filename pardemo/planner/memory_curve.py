"""Estimates a job's peak memory at any micro-batch from two dry runs, in this process or one beside it."""

import functools
import logging
import math
import multiprocessing
import os
import signal
import warnings
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np

from pardemo.planner.allocator import reserved_bytes
from pardemo.planner.dryrun import dry_run
from pardemo.planner.estimate import BUILT_SHARDED, CONTEXT_BYTES, NCCL_BYTES, OFFLOADS, Memory
from pardemo.planner.footprint import DATA_PARALLEL_MOST, LINES, Footprint, shares_on_gpu, timeline
from pardemo.planner.job import RankJob
from pardemo.termination import end_with_parent

LOW, HIGH = 2, 4  # a single sample is stored like several turned round, and saves copies
NEGLIGIBLE = 0.01  # of a peak


class Curve:
    """Computes a job's footprint at any micro-batch from two dry runs; runs others where these have other events."""

    def __init__(self, job: RankJob):
        self.job = job
        self.low = run(job.but(batch=LOW))
        self._slope: np.ndarray | None = None
        self._shares: dict[tuple, np.ndarray] = {}
        high = run(job.but(batch=HIGH))
        if np.array_equal(self.low.changes[:, 0], high.changes[:, 0]):
            self._slope = (high.changes[:, 1] - self.low.changes[:, 1]) / (HIGH - LOW)

    @classmethod
    def at_one(cls, job: RankJob) -> "Curve":
        """Makes a curve of one dry run, which holds for the job's own micro-batch alone."""
        curve = cls.__new__(cls)
        curve.job, curve.low, curve._shares = job, run(job), {}
        curve._slope = np.zeros(len(curve.low.changes))
        return curve

    def estimate(
        self,
        batch: int,
        offload: str = "none",
        tp: int = 1,
        pp: int = 1,
        in_flight: int = 1,
        accumulation: int | None = None,
        room: float = math.inf,
    ) -> Memory:
        """Estimates the peak of a GPU with ``batch`` samples.

        Args:
            in_flight: micro-batches whose activations a pipeline stage holds.
            accumulation: micro-batches of a step, the job's own by default. Two stand for any more: from the second
                on, gradients of the ones before are there.
            room: the GPU's bytes: where they get scarce the allocator gives free segments back, and keeps less.
        """
        if offload not in OFFLOADS:
            raise ValueError(f"offload must be one of {', '.join(OFFLOADS)}, not {offload!r}")
        base, nbytes = self.events(batch, offload, tp, pp, in_flight, accumulation)
        who, first = base.changes[:, 0], base.first_event
        line = timeline(base.line_of[who], nbytes, first)
        top = int(line.sum(1).argmax())
        lines = dict(zip(LINES, line[top].tolist(), strict=True))
        nccl = NCCL_BYTES * sum(size > 1 for size in (self.job.ranks, tp, pp))
        left = room - CONTEXT_BYTES - nccl
        lines["allocator"] = _reserved(who, nbytes, first, left) - sum(lines.values())
        lines["CUDA context"] = CONTEXT_BYTES
        if nccl:
            lines["NCCL"] = nccl
        building = base.building_bytes / (tp * pp) + CONTEXT_BYTES if self.job.engine in BUILT_SHARDED else None
        return Memory(lines, _phases(base)[top], building)

    def events(
        self,
        batch: int,
        offload: str = "none",
        tp: int = 1,
        pp: int = 1,
        in_flight: int = 1,
        accumulation: int | None = None,
    ) -> tuple[Footprint, np.ndarray]:
        """Returns a dry run and the change in a GPU's bytes at each of its events; arguments as of :meth:`estimate`."""
        low, asked = self.low, min(accumulation or self.job.accumulation, 2)
        gradient_bytes = 2 * low.trained_params * (asked != low.job.accumulation)  # gradients that are kept, or are not
        if self._slope is None or gradient_bytes > NEGLIGIBLE * low.peak_bytes:
            base = run(self.job.but(batch=batch, accumulation=asked))
            nbytes = base.changes[:, 1].astype(float)
        else:
            base, nbytes = low, low.changes[:, 1] + (batch - low.job.batch) * self._slope
        return base, nbytes * self._parts(base, tp, pp, in_flight, offload)[base.changes[:, 0]]

    def _parts(self, base: Footprint, tp: int, pp: int, in_flight: int, offload: str) -> np.ndarray:
        """Returns the part of each storage that is on a rank: the same for all micro-batches of a dry run."""
        how = (tp, pp, in_flight, offload)
        if base is not self.low:
            return shares_on_gpu(base, self.job.ranks, *how)
        if how not in self._shares:
            self._shares[how] = shares_on_gpu(base, self.job.ranks, *how)
        return self._shares[how]


def _reserved(who: np.ndarray, nbytes: np.ndarray, first: int, room: float = math.inf) -> int:
    """Returns the bytes that the allocator reserves in the step that begins at event ``first``."""
    before = np.bincount(who[:first], nbytes[:first])
    alive = [(int(storage), before[storage]) for storage in np.unique(who[:first]) if before[storage] >= 1]
    return reserved_bytes(alive, zip(who[first:].tolist(), nbytes[first:].tolist(), strict=True), room)


_DONE: dict[str, Footprint] = {}
_AHEAD: dict[str, Future[Footprint]] = {}


def run(job: RankJob) -> Footprint:
    """Makes a dry run, once for equal jobs, with at most :data:`DATA_PARALLEL_MOST` ranks."""
    job = _bounded(job)
    key = job.described
    if key in _AHEAD and not (ahead := _AHEAD.pop(key)).cancel():  # else it has not begun, and is made here
        _DONE[key] = ahead.result()
    if key not in _DONE:
        _DONE[key] = dry_run(job)
    return _DONE[key]


def begin(job: RankJob) -> None:
    """Starts a dry run in a process of its own while this one goes on: one after the other, in the order of the calls.

    :func:`run` waits for the result of one that has begun.
    """
    job = _bounded(job)
    if job.described not in _DONE.keys() | _AHEAD.keys():
        _AHEAD[job.described] = worker().submit(run, job)


@functools.cache
def worker() -> ProcessPoolExecutor:
    """Starts the process that makes dry runs beside this one, one after the other."""
    context = multiprocessing.get_context("spawn")  # no thread of this process's can be in the way
    return ProcessPoolExecutor(1, context, initializer=prepare_worker, initargs=(os.getpid(),))


def prepare_worker(parent: int) -> None:
    """Has a worker end with its parent, since it would wait for ever for the next task of a killed kernel."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to all of a kernel's processes, and is the page's
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


def _bounded(job: RankJob) -> RankJob:
    return job.but(ranks=min(job.ranks, DATA_PARALLEL_MOST))


def _phases(footprint: Footprint) -> list[str]:
    names = ["between"] * len(footprint.timeline)
    for (name, begin), end in zip(footprint.phases, [p for _, p in footprint.phases[1:]] + [len(names)], strict=True):
        names[begin:end] = [name] * (end - begin)
    return names
