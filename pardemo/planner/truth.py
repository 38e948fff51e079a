"""The same step for real: its peak as torch's allocator counts it, on CPU ranks or on a GPU.

On the CPU the allocator's ``[memory]`` events in the profiler are summed in the order of time, from before the model was
built; on CUDA ``torch.cuda.max_memory_allocated`` says it.
"""

import contextlib
import gc
import time
from collections.abc import Iterator

import torch
from torch.distributed import Work
from torch.profiler import ProfilerActivity, profile, record_function

from pardemo.planner import engines
from pardemo.planner.dryrun import STEPS
from pardemo.planner.job import Job

MARK = "pardemo: the step that counts"


def measure(job: Job) -> int:
    """On each of ``job.ranks`` ranks: the largest number of bytes allocated during the job's second step."""
    if torch.cuda.is_available():
        return _on_cuda(job)
    gc.collect()
    with _gloo_lets_go_first(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _run(job, record_function)
    events = profiler.profiler.kineto_results.events()
    window = next(e for e in events if e.name() == MARK)
    first, last = window.start_ns(), window.start_ns() + window.duration_ns()
    total = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        if first <= event.start_ns() <= last:
            peak = max(peak, total)
    return peak


def batch(job: Job, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers [b, s], and labels of which the job's share counts, at the ends of the samples."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(1, job.config.vocab_size, (job.batch, job.sequence), generator=draws)
    labels, tokens = ids.clone(), job.batch * (job.sequence - 1)
    flat = torch.full((tokens,), -100)
    keep = max(1, round(job.labels * tokens))
    flat[:keep] = 1
    labels[:, 1:] = flat.view(job.batch, -1)
    labels[:, 0] = -100
    return ids.to(device), labels.to(device)


def _run(job: Job, mark) -> None:
    torch.manual_seed(0)
    module = engines.outline(job)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module.to_empty(device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.02, 0.02)
        for buffer in module.buffers():
            buffer.zero_()
    running = engines.start(job, module)
    ids, labels = batch(job, device)
    for step in range(STEPS):
        with mark(MARK) if step == STEPS - 1 else contextlib.nullcontext():
            engines.one_step(job, running, ids, labels, _no_phase)
    running.close()


def _on_cuda(job: Job) -> int:
    @contextlib.contextmanager
    def window(name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated())

    found: list[int] = []
    _run(job, window)
    return found[0]


@contextlib.contextmanager
def _no_phase(name: str) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _gloo_lets_go_first() -> Iterator[None]:
    """Gloo's threads hold what they send; the profiler sees what is freed on the thread that it runs on alone.

    After each wait gloo's thread gets a moment to let go, so that the last reference is ours and the end is seen.
    """
    wait = Work.wait

    def patient(work: Work, *args: object) -> object:
        done = wait(work, *args)
        time.sleep(0.001)
        return done

    Work.wait = patient
    try:
        yield
    finally:
        Work.wait = wait
