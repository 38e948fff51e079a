"""NVIDIA's table of Megatron-core's trainings: ``megatron_bridge.csv``, each row in one or two precisions.

What the table leaves open stands in the repository's ``scripts/performance/configs`` at the tag of the release (v0.2.0
for 25.11, v0.3.0 and v0.3.1 for 26.02 and 26.02.01). ``megatron_bridge_recipes.csv`` has of it how tokens are sent to
experts, whether CUDA graphs start kernels, whether another micro-batch runs beside the exchange, how many layers'
activations are offloaded under FSDP, and which modules are recomputed. (Those of 25.09 stand in ``run_script.py`` at
v0.1.0rc4. 25.11's GPT-OSS names modules, but nothing at v0.2.0 turns their recomputation on.) From release 26.02 on
DeepSeek-V3's recipe has a layer of multi-token prediction (``mtp_num_layers`` is 1); before, the table says whether a
row has. The sizes of Nemotron 3 Nano are those of its configuration on Hugging Face.
"""

import csv
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pardemo.planner import hardware
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout, recomputation
from pardemo.planner.layouts.machines import Machine, machine
from pardemo.planner.layouts.published import runs
from pardemo.planner.layouts.published.runs import TRUTH, Cells, PublishedRun, rows
from pardemo.planner.layouts.shape import Experts, Mamba, Shape
from pardemo.planner.layouts.stacks import FOUNDRY, MEGATRON, MEGATRON_DEEPSPEED, NANOTRON
from pardemo.planner.profile import GpuProfile

RECIPES = Path(__file__).with_name("megatron_bridge_recipes.csv")
#: The recipes' grad_reduce_in_fp32 is false. Their cross_entropy_fusion_impl is TransformerEngine's, which writes the
#: gradient where the logits are (transformer_engine/pytorch/triton/cross_entropy.py at v2.9).
PROGRAM = MEGATRON.but(gradient=2, logits=2.0)
RACK = 64  # GPUs of an NVL72 that a training uses; the rest stand in for those that fail
#: Gbit/s of network for each GPU: ConnectX-7 of DGX H100 and B200 and of GB200, ConnectX-8 of B300 and GB300.
ADAPTER = {"H100": 400, "B200": 400, "GB200": 400, "B300": 800, "GB300": 800}
#: The second one is in parentheses: "different quantization granularities" (the table's footnote for 25.09).
PRECISIONS = {
    "BF16": "bf16", "FP8": "fp8", "FP8-CS": "fp8", "FP8-MX": "mxfp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "": "fp8",
}  # fmt: skip


#: The table's names, and ours: built-in models, and one whose sizes stand here.
_BUILT_IN = {
    "LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": "llama3.1-405b", "DeepSeekV3": "deepseek-v3",
    "Kimi_K2": "kimi-k2", "GPT OSS 120B": "gpt-oss-120b", "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
}  # fmt: skip
MODELS = {
    **{theirs: replace(configurations.of(configurations.find(ours)), name=ours) for theirs, ours in _BUILT_IN.items()},
    "Nemotron_3_Nano": Shape(
        52, 2688, 32, 2, 1856, 131072, gated=False, head=128, experts=Experts(128, 6, 1856, 3712),
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", mamba=Mamba(64, 64, 128, 8),
        name="nemotron-3-nano-30b-a3b",
    ),
}  # fmt: skip


def megatron_bridge(row: Cells) -> Iterator[PublishedRun]:
    """The runs of a row: where cells have a second value in parentheses, it is another run's."""
    yield _run(row, 0)
    if any("(" in row.text(name) for name in ("Tokens / sec / GPU", "Precision")):
        yield _run(row, 1)


def _run(row: Cells, place: int) -> PublishedRun:
    values = Cells({name: _value(row.text(name), place if name != "Model" else 0) for name in COLUMNS_READ})
    release, named = _heading(row.text("headings"))
    words = (values.text("Model") or named[0]).split(" (")[0]
    model = Cells({"Model": words}).one_of("Model", MODELS)
    if "w/ MTP" in row.text("Model") or (words == "DeepSeekV3" and release.startswith("26.")):
        model = replace(model, mtp=1)
    gpu = (values.text("System") or named[1]).removeprefix("DGX-")
    gpus, each = values.whole("#-GPUs"), RACK if gpu.startswith("G") else 8
    machine = Machine(hardware.gpu(gpu), gpus, min(each, gpus), min(each, gpus) * ADAPTER[gpu] * 1e9 / 8)
    precision = values.one_of("Precision", PRECISIONS) if values.has("Precision") else ("fp8", _SECOND[gpu])[place]
    degrees = {name.lower(): _degree(values, name) for name in ("TP", "PP", "CP", "EP")}
    dp = gpus // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    micro, batch = values.whole("MBS"), values.whole("GBS")
    fsdp = values.text("FSDP") not in ("", "0", "n/a")
    recipe = recipes().get((release, words, gpu), LATEST)
    shared = "zero3" if fsdp else "zero1" if dp * degrees["cp"] > 1 else "none"
    layout = Layout(
        tp=degrees["tp"], pp=degrees["pp"], cp=degrees["cp"], ep=degrees["ep"], dp=dp, micro_batch=micro,
        accumulation=max(1, batch // dp // micro), chunks=_degree(values, "VP"), sharding=shared,
        sequence_parallel=degrees["tp"] > 1, offload=recipe.offload if fsdp else 0, **recomputation(recipe.recompute),
    )  # fmt: skip
    sequence, tokens = values.whole("Sequence Length"), values.number("Tokens / sec / GPU")
    job = Job(
        model, machine, PROGRAM, sequence, precision=precision, dispatch=recipe.dispatch, graphs=recipe.graphs,
        dropless="tokendrop" not in row.text("Model"), overlap=recipe.overlap,
    )  # fmt: skip
    wrong = "" if layout.batch == batch else f"says {batch} samples a step, but has {layout.batch}"
    if layout.ep > layout.tp * layout.replicas:
        wrong = f"says EP {layout.ep} among {layout.tp * layout.replicas} ranks"
    seconds = layout.batch * sequence / tokens / gpus
    return PublishedRun(job, layout, seconds, None, "ok", f"Megatron-Bridge, {release}", wrong)


COLUMNS_READ = (
    "System", "#-GPUs", "Precision", "GBS", "MBS", "Sequence Length", "TP", "PP", "CP", "VP", "EP",
    "Tokens / sec / GPU", "FSDP", "Model",
)  # fmt: skip
_SECOND = {"H100": "fp8", "B200": "mxfp8", "GB200": "mxfp8"}


def _value(text: str, place: int) -> str:
    """``4 (8)`` is 4, and 8 in the second place; what has no second value is the same in both."""
    if found := re.fullmatch(r"(\S+) \((\S+)\)", text.strip()):
        return found[place + 1]
    return text


def _degree(values: Cells, name: str) -> int:
    return 1 if values.text(name) in ("", "n/a") else values.whole(name)


def _heading(text: str) -> tuple[str, tuple[str, str]]:
    """The release, and the model or the system that the heading says: the other one has a column."""
    release = re.search(r"> ([\d.]+) NeMo", text)
    last = text.rsplit("> ", 1)[-1]
    model, system = last.removeprefix("Model: "), last.removeprefix("System: ")
    if release is None or model == system:
        raise ValueError(f"headings is {text!r}; right would be … > 26.02 NeMo Container > … > Model: LLAMA3_70B")
    return release[1], (model, system)


@dataclass(frozen=True)
class Recipe:
    """What a row leaves open: :class:`~pardemo.planner.layouts.job.Job` says what the fields are."""

    dispatch: str = ""
    graphs: bool | None = None
    overlap: bool = False
    offload: int = 0
    recompute: str = "none"


LATEST = Recipe()  # what is not said is as the program usually does it


@functools.cache
def recipes() -> dict[tuple[str, str, str], Recipe]:
    """The recipes by release, model and GPU."""
    with RECIPES.open(encoding="utf-8", newline="") as file:
        return {
            (row["release"], row["model"], row["gpu"]): Recipe(
                row["dispatch"],
                row["graphs"] == "1",
                row["overlap"] == "1",
                int(row["offload"]),
                row["recompute"],
            )
            for row in csv.DictReader(file)
        }


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
