"""Published tables as :class:`Run` rows: what each column means there, and which rows contradict themselves."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pardemo.planner import hardware
from pardemo.planner.layouts import runs
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine, machine
from pardemo.planner.layouts.runs import Run
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.stacks import FOUNDRY, MEGATRON_DEEPSPEED, NANOTRON
from pardemo.planner.layouts.work import Job
from pardemo.planner.profile import Profile

#: nanotron's models: its scripts/scaling_benchmarks.py.
_NANOTRON = {
    "1.34B": Shape(16, 2048, 32, 32, 8192, 131072, tied=True, name="1.34B"),
    "3.57B": Shape(28, 3072, 32, 32, 8192, 131072, tied=True, name="3.57B"),
    "8.86B": Shape(32, 4096, 32, 32, 14336, 131072, name="8.86B"),
    "80B": Shape(80, 8192, 64, 64, 28672, 131072, name="80B"),
}
#: MosaicML's MPT: layers, width, heads; MLPs of four times the width without a gate, 50,368 words, learned positions.
_MPT = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
EFA_BYTES_PER_S = 3200e9 / 8  # AWS p5: a host's 32 adapters
ROCE_BYTES_PER_S = 1600e9 / 8  # LLM-Foundry's A100 hosts, in its table's heading


def read(path: Path) -> list[Run]:
    """The runs of one of the published files, by its header.

    Raises:
        ValueError: its columns are those of none.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    header = set(rows[0]) if rows else set()
    for needed, convert in _CONVERTERS.items():
        if needed in header:
            return [run for row in rows for run in convert(row)]
    raise ValueError(f"{path.name}: its columns are those of none of the published tables")


def nanotron(row: dict[str, str]) -> Iterator[Run]:
    """The Ultra-Scale Playbook's benchmarks: fp32 gradients, no recomputation, sequence parallel."""
    values = {name: int(row[name]) for name in ("nodes", "dp", "pp", "tp", "zero", "mbs", "grad_acc", "gbs")}
    layout = Layout(
        tp=values["tp"], pp=values["pp"], dp=values["dp"], sharding="zero1" if values["zero"] else "none",
        micro_batch=values["mbs"], accumulation=values["grad_acc"], sequence_parallel=True,
    )  # fmt: skip
    where = Machine(hardware.gpu("H100"), values["nodes"] * 8, 8, EFA_BYTES_PER_S)
    job = Job(_NANOTRON[row["model"]], where, NANOTRON, 4096)
    ok = row["status"] == "ok" and float(row["tokens_per_s_per_gpu"] or 0) > 0
    seconds = layout.batch * 4096 / float(row["tokens_per_s_per_gpu"]) / where.gpus if ok else None
    memory = float(row["memory_gb"]) * 2**30 if row["memory_gb"] and ok else None
    wrong = "" if layout.batch == values["gbs"] else f"says {values['gbs']} samples a step, but has {layout.batch}"
    yield Run(job, layout, seconds, memory, "ok" if ok else "failed", "nanotron", wrong)


def megatron_deepspeed(row: dict[str, str]) -> Iterator[Run]:
    """vTrain's measurements: GPT, everything recomputed, attention unfused."""
    get = lambda name: int(row[name])  # noqa: E731
    hidden = get("hidden size")
    layout = Layout(
        tp=get("tensor parallelism"), pp=get("pipeline parallelism"), dp=get("data parallelism"),
        micro_batch=get("micro batch"), recompute="full",
        accumulation=get("global batch") // get("micro batch") // get("data parallelism"),
    )  # fmt: skip
    shape = Shape(
        get("# layers"), hidden, get("attention heads"), get("attention heads"), 4 * hidden, 51200, gated=False,
        tied=True, positions=get("sequence length"), name=f"GPT {get('# layers')} × {hidden}",
    )  # fmt: skip
    where = Machine(hardware.gpu("A100-80GB"), get("# GPUs"), 8, 4 * 200e9 / 8)
    job = Job(shape, where, MEGATRON_DEEPSPEED, get("sequence length"), fused=False)
    yield Run(job, layout, float(row["iteration time (ms)"]) / 1e3, None, "ok", "Megatron-DeepSpeed")


def llm_foundry(row: dict[str, str]) -> Iterator[Run]:
    """MosaicML's tables: MPT with FSDP."""
    layers, hidden, heads = _MPT[row["Model"]]
    sequence, gpus = int(row["SeqLen (T)"]), int(row["# GPUs"])
    h100 = row["GPU"].startswith("h100")
    shape = Shape(layers, hidden, heads, heads, 4 * hidden, 50368, gated=False, tied=True, positions=sequence,
                  name=f"MPT {row['Model']}")  # fmt: skip
    layout = Layout(
        dp=gpus, sharding="zero3" if row["Sharding Strategy"] == "FULL_SHARD" else "zero2",
        micro_batch=int(row["MicroBatchSize"]), accumulation=int(row["GradAccum"]),
        recompute="full" if row["Activation Checkpointing"] == "True" else "none",
    )  # fmt: skip
    between = EFA_BYTES_PER_S if h100 else ROCE_BYTES_PER_S
    where = Machine(hardware.gpu("H100" if h100 else "A100-80GB"), gpus, 8, between)
    job = Job(shape, where, FOUNDRY, sequence, fp8="FP8" in row["section"])
    tokens = layout.batch * sequence
    yield Run(job, layout, tokens / float(row["Throughput (T/s/GPU)"]) / gpus, None, "ok", "LLM-Foundry")


_CONVERTERS = {"mfu_percent": nanotron, "tensor parallelism": megatron_deepspeed, "Sharding Strategy": llm_foundry}


def knows(path: Path) -> bool:
    """Whether a file's header is a published table's."""
    with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
        header = set(next(csv.reader(file), ()))
    return any(needed in header for needed in _CONVERTERS)


def load(path: Path, own: Profile | None = None) -> list[Run]:
    """The runs of a file: a published table's, or anybody's in the columns of :mod:`.runs`.

    ``own`` takes the place of the GPU that has its name.

    Raises:
        ValueError: it is neither; what is missing is named.
    """
    if not knows(path):
        return runs.read(path, own)
    return [_on(run, own) if own and run.job.machine.gpu.name == own.gpu.name else run for run in read(path)]


def _on(run: Run, own: Profile) -> Run:
    """The run on a machine that was measured; between hosts it is the table's, unless that was measured as well."""
    there = run.job.machine
    here = machine(own, there.gpus, there.host_gpus, None if own.between else there.between)
    return replace(run, job=replace(run.job, machine=here))
