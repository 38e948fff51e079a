"""Makes a dry run: a training step at full size, of the real model in the real engine, without the memory.

>>> from pardemo.planner.job import RankJob                                # doctest: +SKIP
>>> footprint = dry_run(RankJob(Baichuan2Config.b13(), batch=8, engine="zero-2", ranks=8))   # doctest: +SKIP
>>> footprint.peak_bytes, footprint.peak_module, footprint.lines          # doctest: +SKIP
"""

import contextlib
import gc
import time
from collections.abc import Iterator

import torch

from pardemo.planner.dry_run import engines, fake
from pardemo.planner.dry_run.footprint import Footprint, classify
from pardemo.planner.dry_run.storage_recorder import StorageRecorder
from pardemo.planner.job import RankJob

STEPS = 2  # the first makes optimizer states, and DeepSpeed's stage 3 learns the order of the layers


def dry_run(job: RankJob) -> Footprint:
    """Returns bytes and floating-point operations of the job's second step on rank 0. One torch thread is enough.

    Raises:
        ValueError: the model or LoRA's target is not what it should be.
        RuntimeError: this process belongs to a process group.
    """
    begin = time.perf_counter()
    with _only_new_garbage():
        footprint = _footprint(job)
        gc.collect()  # an engine is a circle of references
    footprint.seconds = time.perf_counter() - begin
    return footprint


@contextlib.contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Within the block Python's collector of circles is on, and leaves alone what was there before: to look at all of
    torch takes it 0.2 s."""
    was_on, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.enable()
    if not frozen:  # else it is somebody else's, and cannot be told from ours afterwards
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        (gc.enable if was_on else gc.disable)()


def _footprint(job: RankJob) -> Footprint:
    module = engines.outline(job)
    sizes = {name: (p.numel(), p.requires_grad) for name, p in module.named_parameters()}
    with fake.world(job), StorageRecorder(fake.Answers(job)) as recorder:
        recorder.watch(module)
        engines.materialize(module, "cpu")
        with fake.no_moves():
            running = engines.start(job, module)
        recorder.end_of_building()
        ids = torch.zeros(job.batch, job.sequence, dtype=torch.int64)
        labels = torch.zeros_like(ids)
        if running.make_states is not None:
            with recorder.phase("step"):  # which makes them on a real rank
                running.make_states()
        for _ in range(STEPS if running.make_states is None else 1):
            recorder.begin_step(running.module)
            engines.one_step(job, running, ids, labels, recorder.phase)
        classify(recorder, running, job)
        footprint = Footprint.of(job, recorder, sizes)
        running.close()
        del running, module, ids, labels
    return footprint
