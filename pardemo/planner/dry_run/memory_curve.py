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

from pardemo.planner.dry_run.allocator import reserved_bytes
from pardemo.planner.dry_run.footprint import DATA_PARALLEL_MOST, LINES, Footprint, shares_on_gpu, timeline
from pardemo.planner.dry_run.runner import dry_run
from pardemo.planner.estimate import BUILT_SHARDED, CONTEXT_BYTES, NCCL_BYTES, Memory
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.layout import Layout
from pardemo.termination import end_with_parent

LOW, HIGH = 2, 4  # a single sample is stored like several turned round, and saves copies
NEGLIGIBLE = 0.01  # of a peak


class Curve:
    """Computes a job's footprint in any micro-batch from two dry runs; makes others where these have other events.

    Args:
        scales: whether it is for any micro-batch. Otherwise one dry run is made, for the job's own alone.
    """

    def __init__(self, job: RankJob, scales: bool = True):
        self.job = job
        self.low = run(job.but(batch=LOW) if scales else job)
        self._slope: np.ndarray | None = None if scales else np.zeros(len(self.low.changes))
        self._shares: dict[tuple, np.ndarray] = {}
        if scales:
            high = run(job.but(batch=HIGH))
            if np.array_equal(self.low.changes[:, 0], high.changes[:, 0]):
                self._slope = (high.changes[:, 1] - self.low.changes[:, 1]) / (HIGH - LOW)

    def estimate(self, layout: Layout, room: float = math.inf) -> Memory:
        """Estimates the peak of a GPU.

        Args:
            layout: gives the micro-batch, how many a step has, tensor-parallel ranks, pipeline stages and the states on
                the host; the job says the rest. Two micro-batches stand for any more: from the second on, gradients of
                the ones before are there.
            room: the GPU's bytes: where they get scarce the allocator gives free segments back, and keeps less.
        """
        base, nbytes = self.events(layout)
        storages, first = base.changes[:, 0], base.first_event
        line = timeline(base.line_of[storages], nbytes, first)
        top = int(line.sum(1).argmax())
        lines = dict(zip(LINES, line[top].tolist(), strict=True))
        nccl = NCCL_BYTES * sum(size > 1 for size in (self.job.ranks, layout.tp, layout.pp))
        left = room - CONTEXT_BYTES - nccl
        lines["allocator"] = _reserved(storages, nbytes, first, left) - sum(lines.values())
        lines["CUDA context"] = CONTEXT_BYTES
        if nccl:
            lines["NCCL"] = nccl
        building = None
        if self.job.engine in BUILT_SHARDED:
            building = base.building_bytes / (layout.tp * layout.pp) + CONTEXT_BYTES
        return Memory(lines, _phases(base)[top], building)

    def events(self, layout: Layout) -> tuple[Footprint, np.ndarray]:
        """Returns a dry run and the change in a GPU's bytes at each event; ``layout`` as of :meth:`estimate`."""
        low, batch, asked = self.low, layout.micro_batch, min(layout.accumulation, 2)
        gradient_bytes = 2 * low.trained_params * (asked != low.job.accumulation)  # gradients that are kept, or are not
        if self._slope is None or gradient_bytes > NEGLIGIBLE * low.peak_bytes:
            base = run(self.job.but(batch=batch, accumulation=asked))
            nbytes = base.changes[:, 1].astype(float)
        else:
            base, nbytes = low, low.changes[:, 1] + (batch - low.job.batch) * self._slope
        return base, nbytes * self._parts(base, layout)[base.changes[:, 0]]

    def _parts(self, base: Footprint, layout: Layout) -> np.ndarray:
        """Returns the part of each storage that is on a rank: the same for all micro-batches of a dry run."""
        if base is not self.low:
            return shares_on_gpu(base, self.job.ranks, layout)
        key = (layout.tp, layout.pp, min(layout.pp, layout.accumulation), layout.host_states)
        if key not in self._shares:
            self._shares[key] = shares_on_gpu(base, self.job.ranks, layout)
        return self._shares[key]


def _reserved(storages: np.ndarray, nbytes: np.ndarray, first: int, room: float = math.inf) -> int:
    """Returns the bytes that the allocator reserves in the step that begins at event ``first``."""
    before = np.bincount(storages[:first], nbytes[:first])
    alive = [(int(storage), before[storage]) for storage in np.unique(storages[:first]) if before[storage] >= 1]
    return reserved_bytes(alive, zip(storages[first:].tolist(), nbytes[first:].tolist(), strict=True), room)


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
