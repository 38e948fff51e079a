"""The dry run: a whole training step at full size, of the real model in the real engine, without the memory.

>>> from pardemo.planner import Job, dry_run                              # doctest: +SKIP
>>> found = dry_run(Job(Baichuan2Config.b13(), batch=8, engine="zero-2", ranks=8))   # doctest: +SKIP
>>> found.peak_bytes, found.peak_module, found.lines                      # doctest: +SKIP
"""

import gc
import time

import torch

from pardemo.planner import engines, fake
from pardemo.planner.footprint import Footprint, classify
from pardemo.planner.job import Job
from pardemo.planner.records import Recorder

STEPS = 2  # the first makes optimizer states, and DeepSpeed's stage 3 learns the order of the layers


def dry_run(job: Job) -> Footprint:
    """Bytes and floating-point operations of the job's second step on rank 0. One torch thread does.

    Raises:
        ValueError: the model or LoRA's target is not what it should be.
        RuntimeError: this process belongs to a process group.
    """
    begin = time.perf_counter()
    module = engines.outline(job)
    sizes = {name: (p.numel(), p.requires_grad) for name, p in module.named_parameters()}
    with fake.world(job), Recorder() as recorder, fake.Values(job):
        recorder.watch(module)
        engines.materialize(module, "cpu")
        with fake.no_moves():
            running = engines.start(job, module)
        recorder.end_of_building()
        ids = torch.zeros(job.batch, job.sequence, dtype=torch.int64)
        labels = torch.zeros_like(ids)
        if running.make_states is not None:
            running.make_states()
        for _ in range(STEPS if running.make_states is None else 1):
            recorder.begin_step(running.module)
            engines.one_step(job, running, ids, labels, recorder.phase)
        classify(recorder, running, job)
        found = Footprint.of(job, recorder, sizes)
        running.close()
        del running, module, ids, labels
    gc.collect()  # an engine is a circle of references
    found.seconds = time.perf_counter() - begin
    return found
