"""Published tables as :class:`PublishedRun` rows: what each column means, and which rows contradict themselves."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pardemo.planner import hardware
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.job.machines import Machine, machine
from pardemo.planner.layouts.job.stacks import FOUNDRY, MEGATRON_DEEPSPEED, NANOTRON
from pardemo.planner.layouts.model.shape import Shape
from pardemo.planner.layouts.published import runs
from pardemo.planner.layouts.published.cells import TRUTH, Cells, rows
from pardemo.planner.layouts.published.published_megatron import COLUMNS_READ, megatron_bridge
from pardemo.planner.layouts.published.runs import PublishedRun
from pardemo.planner.profile import GpuProfile

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


def nanotron(row: Cells) -> Iterator[PublishedRun]:
    """The Ultra-Scale Playbook's benchmarks: fp32 gradients, no recomputation, sequence parallel."""
    layout = Layout(
        tp=row.whole("tp"), pp=row.whole("pp"), dp=row.whole("dp"),
        sharding=row.one_of("zero", {"0": "none", "1": "zero1"}), micro_batch=row.whole("mbs"),
        accumulation=row.whole("grad_acc"), sequence_parallel=True,
    )  # fmt: skip
    cluster = Machine(hardware.gpu("H100"), row.whole("nodes") * 8, 8, EFA_BYTES_PER_S)
    job = Job(row.one_of("model", _NANOTRON), cluster, NANOTRON, 4096)
    ended = row.one_of("status", {"ok": "ok", "crashed or oom": "failed"})
    tokens = row.number("tokens_per_s_per_gpu", 0) if row.has("tokens_per_s_per_gpu") else 0
    ok = ended == "ok" and tokens > 0
    seconds = layout.batch * 4096 / tokens / cluster.gpus if ok else None
    memory = row.number("memory_gb") * 2**30 if row.has("memory_gb") and ok else None
    stated_batch = row.whole("gbs")
    wrong = "" if layout.batch == stated_batch else f"says {stated_batch} samples a step, but has {layout.batch}"
    yield PublishedRun(job, layout, seconds, memory, "ok" if ok else "failed", "nanotron", wrong)


def megatron_deepspeed(row: Cells) -> Iterator[PublishedRun]:
    """vTrain's measurements: GPT, everything recomputed, attention unfused."""
    layers, hidden, heads = (row.whole(name) for name in ("# layers", "hidden size", "attention heads"))
    sequence, micro, dp = (row.whole(name) for name in ("sequence length", "micro batch", "data parallelism"))
    layout = Layout(
        tp=row.whole("tensor parallelism"), pp=row.whole("pipeline parallelism"), dp=dp, micro_batch=micro,
        accumulation=row.whole("global batch", micro * dp) // micro // dp, recompute="full",
    )  # fmt: skip
    shape = Shape(
        layers, hidden, heads, heads, 4 * hidden, 51200, gated=False, tied=True, positions=sequence,
        name=f"GPT {layers} × {hidden}",
    )  # fmt: skip
    cluster = Machine(hardware.gpu("A100-80GB"), row.whole("# GPUs"), 8, 4 * 200e9 / 8)
    job = Job(shape, cluster, MEGATRON_DEEPSPEED, sequence, fused=False)
    yield PublishedRun(job, layout, row.number("iteration time (ms)") / 1e3, None, "ok", "Megatron-DeepSpeed")


def llm_foundry(row: Cells) -> Iterator[PublishedRun]:
    """MosaicML's tables: MPT with FSDP."""
    layers, hidden, heads = row.one_of("Model", _MPT)
    sequence, gpus = row.whole("SeqLen (T)"), row.whole("# GPUs")
    shape = Shape(layers, hidden, heads, heads, 4 * hidden, 50368, gated=False, tied=True, positions=sequence,
                  name=f"MPT {row.text('Model')}")  # fmt: skip
    layout = Layout(
        dp=gpus, sharding=row.one_of("Sharding Strategy", {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2"}),
        micro_batch=row.whole("MicroBatchSize"), accumulation=row.whole("GradAccum"),
        recompute="full" if row.one_of("Activation Checkpointing", TRUTH) else "none",
    )  # fmt: skip
    links = {"h100_80gb": ("H100", EFA_BYTES_PER_S), "a100_80gb": ("A100-80GB", ROCE_BYTES_PER_S)}
    gpu, between = row.one_of("GPU", links)
    cluster = Machine(hardware.gpu(gpu), gpus, 8, between)
    job = Job(shape, cluster, FOUNDRY, sequence, precision="fp8" if "FP8" in row.text("section") else "bf16")
    tokens = layout.batch * sequence
    yield PublishedRun(job, layout, tokens / row.number("Throughput (T/s/GPU)") / gpus, None, "ok", "LLM-Foundry")


@dataclass(frozen=True)
class _Table:
    """A published table: the columns that a row's runs are made of, and how. Others may stand beside them."""

    name: str
    columns: tuple[str, ...]
    runs: Callable[[Cells], Iterator[PublishedRun]]

    def share(self, header: list[str]) -> float:
        """The share of this table's own columns (those that no other file has) that the header has."""
        own = set(self.columns) - set(runs.NEEDED) - set(runs.OPTIONAL)
        return len(own & set(header)) / len(own)


_TABLES = (
    _Table(
        "nanotron's",
        ("model", "nodes", "dp", "pp", "tp", "zero", "mbs", "grad_acc", "gbs", "tokens_per_s_per_gpu", "memory_gb",
         "status"),
        nanotron,
    ),
    _Table(
        "Megatron-DeepSpeed's",
        ("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
         "tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)"),
        megatron_deepspeed,
    ),
    _Table(
        "LLM-Foundry's",
        ("section", "Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "GradAccum", "Throughput (T/s/GPU)",
         "Sharding Strategy", "Activation Checkpointing"),
        llm_foundry,
    ),
    _Table("Megatron-Bridge's", ("headings", *COLUMNS_READ), megatron_bridge),
)  # fmt: skip


def _table(header: list[str]) -> _Table | None:
    """The table that a header is meant to be: at least half of the table's own columns are there. None without one."""
    nearest = max(_TABLES, key=lambda table: table.share(header))
    return nearest if nearest.share(header) >= 0.5 else None


def knows(path: Path) -> bool:
    """Whether a file's header is a published table's, even where some of its columns are missing.

    Raises:
        ValueError: the file is not UTF-8 text.
    """
    return _table(rows(path)[0]) is not None


def read(path: Path, left_out: list[str] | None = None) -> list[PublishedRun]:
    """The runs of one of the published files, by its header; ``left_out`` as in :func:`.runs.read`.

    Raises:
        ValueError: its columns are those of none; one is missing; a cell is wrong, whose line and column are named.
    """
    header, lines = rows(path)
    table = _table(header)
    if table is None:
        raise ValueError(f"{path.name}: its columns are those of none of the published tables")
    if missing := [name for name in table.columns if name not in header]:
        raise ValueError(f"{path.name} is {table.name} table but has no column {', '.join(missing)}")
    return runs.each(path, lines, lambda row: table.runs(Cells(row)), left_out)


def load(path: Path, own: GpuProfile | None = None, left_out: list[str] | None = None) -> list[PublishedRun]:
    """The runs of a file: a published table's, or anybody's in the columns of :mod:`.runs`.

    ``own`` takes the place of the GPU that has its name; ``left_out`` as in :func:`.runs.read`.

    Raises:
        ValueError: it is neither; what is missing is named.
    """
    if not knows(path):
        return runs.read(path, own, left_out)
    found = read(path, left_out)
    return [_on(run, own) if own and run.job.machine.gpu.name == own.gpu.name else run for run in found]


def _on(run: PublishedRun, own: GpuProfile) -> PublishedRun:
    """The run on a machine that was measured; between hosts it is the table's, unless that was measured as well."""
    published = run.job.machine
    measured = machine(own, published.gpus, published.host_gpus, None if own.between else published.between)
    return replace(run, job=replace(run.job, machine=measured))
