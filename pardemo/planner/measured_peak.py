"""The same step for real: its peak as torch's allocator counts it, on CPU ranks or on a GPU.

On the CPU each of the profiler's memory events brings the allocator's own count of what is allocated in the process;
on CUDA ``torch.cuda.max_memory_allocated`` says it.
"""

import contextlib
import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pardemo import compat, extras

with extras.needed_by(__name__):
    import peft  # noqa: F401, what engines take from it on demand: ranks are forked with this module loaded

import torch
from torch import nn
from torch.distributed import ProcessGroup, Work
from torch.profiler import ProfilerActivity, profile, record_function

from pardemo.planner import engines
from pardemo.planner.dryrun import STEPS
from pardemo.planner.job import RankJob

_COLLECTIVES = (
    "allreduce",
    "allgather",
    "_allgather_base",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
)
MARK = "pardemo: the step that counts"


def measure(job: RankJob) -> int:
    """On each of ``job.ranks`` ranks: the largest number of bytes allocated during the job's second step."""
    return peak(functools.partial(_run, job))


def peak(run: Callable[[Callable[[str], contextlib.AbstractContextManager]], None]) -> int:
    """The largest number of bytes allocated while ``run(mark)`` is within ``mark(MARK)``, beyond those before it."""
    if torch.cuda.is_available():
        return _on_cuda(run)
    gc.collect()
    with _all_threads_counted(), _one_at_a_time(), _silent():
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with profiler:
            run(record_function)
    allocations, window = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    allocations.sort()
    _, total, first = allocations[0]
    return max(total for at, total, _ in allocations if window[0] <= at <= window[1]) - (total - first)


def _allocations(nodes) -> tuple[list[tuple[int, int, int]], tuple[int, int]]:
    """(time, bytes allocated in the process after it, its own) of each allocation; when the step began and ended."""
    allocations, window, todo = [], (0, 0), list(nodes)
    while todo:
        node = todo.pop()
        fields = node.extra_fields
        if hasattr(fields, "total_allocated"):
            allocations.append((node.start_time_ns, fields.total_allocated, fields.alloc_size))
        elif type(fields).__name__ == "_ExtraFields_TorchOp" and fields.name == MARK:
            window = (node.start_time_ns, node.end_time_ns)
        todo += node.children
    return allocations, window


def batch(job: RankJob, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers [b, s], and labels of which the job's share counts, from each sample's second token on."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(1, job.config.vocab_size, (job.batch, job.sequence), generator=draws)
    labels = torch.full_like(ids, -100)
    labels[:, 1 : 1 + job.labelled // job.batch] = 1
    return ids.to(device), labels.to(device)


def _run(job: RankJob, mark) -> None:
    torch.manual_seed(0)
    module = engines.outline(job)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fill(engines.materialize(module, device))
    running = engines.start(job, module)
    ids, labels = batch(job, device)
    for step in range(STEPS):
        with mark(MARK) if step == STEPS - 1 else contextlib.nullcontext():
            engines.one_step(job, running, ids, labels, no_phase)
    running.close()


@torch.no_grad()
def fill(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.uniform_(-0.02, 0.02)
    for buffer in module.buffers():
        buffer.zero_()


def _on_cuda(run: Callable) -> int:
    @contextlib.contextmanager
    def window(name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())

    peaks: list[int] = []
    run(window)
    return peaks[0]


@contextlib.contextmanager
def no_phase(name: str) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Each collective ends before anything else happens: how long gloo keeps a buffer would be up to chance."""

    def patient(collective, group: ProcessGroup, *args: object, **kwargs: object) -> Work:
        work = collective(group, *args, **kwargs)
        work.wait()
        return work

    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            waits = functools.partialmethod(functools.partial(patient, getattr(ProcessGroup, name)))
            stack.enter_context(compat.replaced(ProcessGroup, name, waits))
        yield


@contextlib.contextmanager
def _all_threads_counted() -> Iterator[None]:
    """Torch's count of allocated bytes takes in what gloo's threads free; without this flag, profiled threads alone."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The profiler's library writes a line at every start and stop, past Python, whatever its log level."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
