"""Measures the peak of a real step by torch's allocator, on CPU ranks or on a GPU; has small models for it.

On the CPU each of the profiler's memory events brings the allocator's own count of what is allocated in the process;
on CUDA ``torch.cuda.max_memory_allocated`` says it.
"""

import contextlib
import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, Work
from torch.profiler import ProfilerActivity, profile, record_function

from pardemo import compat, extras
from pardemo.baichuan2 import Baichuan2Config
from pardemo.formulas import memory
from pardemo.planner.dry_run import engines
from pardemo.planner.dry_run.footprint import Footprint
from pardemo.planner.dry_run.runner import STEPS, dry_run
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.tuning import FULL, Tuning

with extras.needed_by(__name__):
    import peft  # noqa: F401, what engines take from it on demand: ranks are forked with this module loaded
    from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config


_COLLECTIVES = (
    "allreduce", "allgather", "_allgather_base", "broadcast", "reduce", "reduce_scatter", "_reduce_scatter_base",
)  # fmt: skip
MARK = "pardemo: the step that counts"


def measure(job: RankJob) -> int:
    """On each of ``job.ranks`` ranks: the largest number of bytes allocated during the job's second step."""
    return measure_peak_bytes(functools.partial(_run, job))


def measure_peak_bytes(run: Callable[[Callable[[str], contextlib.AbstractContextManager]], None]) -> int:
    """Returns the most bytes allocated while ``run(mark)`` is within ``mark(MARK)``, beyond those before it."""
    if torch.cuda.is_available():
        return _on_cuda(run)
    gc.collect()
    with _all_threads_counted(), _one_at_a_time(), _silent():
        profiler: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with profiler:
            run(record_function)
    allocations, window = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    allocations.sort()
    _, total, size = allocations[0]
    return max(total for at, total, _ in allocations if window[0] <= at <= window[1]) - (total - size)


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


def random_batch(job: RankJob, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token numbers [b, s] and labels; the job's share of them counts, from each sample's second token on."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(1, job.config.vocab_size, (job.batch, job.sequence), generator=draws)
    labels = torch.full_like(ids, -100)
    labels[:, 1 : 1 + job.labelled // job.batch] = 1
    return ids.to(device), labels.to(device)


def _run(job: RankJob, mark) -> None:
    torch.manual_seed(0)
    module = engines.outline(job)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fill_uniformly(engines.materialize(module, device))
    running = engines.start(job, module)
    ids, labels = random_batch(job, device)
    for step in range(STEPS):
        with mark(MARK) if step == STEPS - 1 else contextlib.nullcontext():
            engines.one_step(job, running, ids, labels, contextlib.nullcontext)
    running.close()


@torch.no_grad()
def fill_uniformly(module: nn.Module) -> None:
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


_SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4
}  # fmt: skip
#: DeepSpeed's buckets and thresholds in proportion to a small model; its own are made for thousands of times more.
BUCKETS = {
    "reduce_bucket_size": 1 << 20,
    "allgather_bucket_size": 1 << 20,
    "stage3_prefetch_bucket_size": 1 << 18,
    "stage3_max_live_parameters": 1 << 20,
    "stage3_max_reuse_distance": 1 << 20,
    "stage3_param_persistence_threshold": 1000,
}
TARGETS = {"baichuan2": ("W_pack",), "llama": ("q_proj", "v_proj"), "qwen2": ("q_proj", "v_proj")}


def example_config(name: str) -> PreTrainedConfig:
    """Returns the configuration of a four-layer model of the architecture."""
    if name == "baichuan2":
        return Baichuan2Config(**_SIZES)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[name](**_SIZES, num_key_value_heads=2)


def example_job(
    name: str, engine: str, ranks: int, lora: bool, checkpointing: bool, prefetching: bool = True
) -> RankJob:
    """Returns a job of 4 × 128 tokens, a quarter of them labels, as this machine's CPU would run it.

    Args:
        prefetching: of DeepSpeed's stage 3. It gathers what it prefetches in the order of a Python set, which differs
            between ranks and runs, and with it, in some jobs, the peak: the dry run gives that of one order.
    """
    zero = BUCKETS if engine.startswith("zero") else {}
    if not prefetching:
        if engine != "zero-3":
            raise ValueError(f"only DeepSpeed's stage 3 prefetches, not {engine}")
        zero = BUCKETS | {"stage3_prefetch_bucket_size": 0}
    return RankJob(
        example_config(name), batch=4, sequence=128, tuning=Tuning(8, TARGETS[name]) if lora else FULL,
        checkpointing=checkpointing, engine=engine, ranks=ranks, labels=0.25, zero=zero, on_gpu=False,
    )  # fmt: skip


def compare_peaks(world, jobs: Sequence[RankJob]) -> list[dict]:
    """Runs and plans each job; returns bytes, and the errors of the plan and of other people's rules."""
    rows = []
    for job in jobs:
        planned = dry_run(job)
        real = max(world.run(measure, job, timeout_s=200))
        rules = {name: nbytes / real - 1 for name, nbytes in published_estimates(planned).items()}
        rows.append({"measured": real, "planned": planned.peak_bytes, "error": planned.peak_bytes / real - 1, **rules})
    return rows


def published_estimates(footprint: Footprint) -> dict[str, float]:
    """Returns what DeepSpeed's estimators and accelerate's rule predict; they count frozen parameters as trained."""
    params, ranks, stage = footprint.params, footprint.job.ranks, footprint.job.stage
    rules: dict[str, float] = {"accelerate estimate-memory": memory.accelerate_estimate(params, 2)}
    if stage in (1, 2):  # there is none for stage 1
        rules["DeepSpeed's estimator"] = memory.deepspeed_zero2_estimate(params, ranks)
    elif stage == 3 or footprint.job.engine == "fsdp2":
        largest = max(count for count, _ in footprint.sizes.values())
        rules["DeepSpeed's estimator"] = memory.deepspeed_zero3_estimate(params, ranks, largest)
    return rules
