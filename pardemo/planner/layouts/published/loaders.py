"""Reads published tables of training runs: Megatron-Bridge's, nanotron's, Megatron-DeepSpeed's, LLM Foundry's.

A row of ``megatron_bridge*.csv`` is a run in one precision or two. What the table leaves open stands in the
repository's ``scripts/performance/configs`` at the tag of the release (v0.2.0 for 25.11, v0.3.0 and v0.3.1 for 26.02
and 26.02.01, v0.4.0 for 26.04, v0.5.0 for 26.06). ``megatron_bridge_recipes.csv`` has of it how tokens are sent to
experts, whether CUDA graphs start kernels, whether another micro-batch runs beside the exchange, how many layers'
activations are offloaded under FSDP, and which modules are recomputed. (Those of 25.09 stand in ``run_script.py`` at
v0.1.0rc4. 25.11's GPT-OSS names modules, but nothing at v0.2.0 turns their recomputation on.) From release 26.02 on
DeepSeek-V3's recipe has a layer of multi-token prediction (``mtp_num_layers`` is 1); before, the table says whether a
row has. The sizes of Nemotron 3 Nano are those of its configuration on Hugging Face; those of Nemotron 3 Super are not
here, so that its rows cannot be read.
"""

import csv
import functools
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pardemo.planner import hardware
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout, recomputation
from pardemo.planner.layouts.machines import Link, Machine
from pardemo.planner.layouts.programs import FOUNDRY, NANOTRON, PROGRAMS, Program, find_program
from pardemo.planner.layouts.published import runs
from pardemo.planner.layouts.published.runs import TRUTH, Cells, PublishedRun, rows
from pardemo.planner.layouts.shape import Experts, Mamba, Shape, gpt
from pardemo.planner.layouts.tuning import FULL, Tuning
from pardemo.planner.profile import GpuProfile

RECIPES = Path(__file__).with_name("megatron_bridge_recipes.csv")
_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
#: Of LoRA's recipes (``llama3_llm_finetune.py``): rank 16 beside ``linear_qkv``, which is Transformers' qkv_proj.
LORA = Tuning(16, ("qkv_proj",), dropout=0.0)
RACK = 64  # GPUs of an NVL72 that a training uses; the rest stand in for those that fail
#: Gbit/s of network for each GPU: ConnectX-7 of DGX H100 and B200 and of GB200, ConnectX-8 of B300 and GB300.
ADAPTER = {"H100": 400, "B200": 400, "GB200": 400, "B300": 800, "GB300": 800}
#: The table's names, and ours: built-in models, and one whose sizes stand here.
MODELS = {
    **{label: replace(configurations.shape_of_config(configurations.find_configuration(model)), name=model)
       for label, model in _TABLES["built_in"].items()},
    "Nemotron_3_Nano": Shape(
        52, 2688, 32, 2, 1856, 131072, gated=False, head_dim=128, experts=Experts(128, 6, 1856, 3712),
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", linear_mixer=Mamba(64, 64, 128, 8),
        name="nemotron-3-nano-30b-a3b",
    ),
}  # fmt: skip


def nvidia_program(release: str) -> Program:
    """Returns Megatron-core with the constants of a release, as NVIDIA's recipes run it.

    Their grad_reduce_in_fp32 is false. Their cross_entropy_fusion_impl is TransformerEngine's, which writes the
    gradient where the logits are (transformer_engine/pytorch/triton/cross_entropy.py at v2.9).
    """
    return find_program(f"megatron-core@{release}").but(gradient_bytes=2, logit_bytes=2.0)


def megatron_bridge(row: Cells) -> Iterator[PublishedRun]:
    """Yields the runs of a row of Megatron-Bridge's: a second value in parentheses is another run's."""
    yield _run(row, 0)
    if any("(" in row.text(name) for name in ("Tokens / sec / GPU", "Precision")):
        yield _run(row, 1)


def _run(row: Cells, number: int) -> PublishedRun:
    values = Cells(
        {name: _value(row.text(name), number if name != "Model" else 0) for name in _COLUMNS["Megatron-Bridge's"][1:]}
    )
    release, named = _heading(row.text("headings"))
    words = (values.text("Model") or named[0]).split(" (")[0]
    model = Cells({"Model": words}).one_of("Model", MODELS)
    if "w/ MTP" in row.text("Model") or (words == "DeepSeekV3" and release.startswith("26.")):
        model = replace(model, mtp_layers=1)
    gpu = (values.text("System") or named[1]).removeprefix("DGX-")
    gpus = values.integer("#-GPUs")
    host_gpus = min(RACK if gpu.startswith("G") else 8, gpus)
    precision = (
        values.one_of("Precision", _TABLES["precisions"]) if values.has("Precision") else ("fp8", _SECOND[gpu])[number]
    )
    degrees = {name.lower(): _degree(values, name) for name in ("TP", "PP", "CP", "EP")}
    dp = gpus // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    micro, batch = values.integer("MBS"), values.integer("GBS")
    fsdp = values.text("FSDP") not in ("", "0", "n/a")
    recipe = recipes().get((release, words, gpu), {})  # what is not said is as the program usually does it
    shared = "zero3" if fsdp else "zero1" if dp * degrees["cp"] > 1 else "none"
    layout = Layout(
        **degrees,  # type: ignore[arg-type]
        dp=dp, micro_batch=micro, accumulation=max(1, batch // dp // micro), chunks=_degree(values, "VP"),
        sharding=shared, sequence_parallel=degrees["tp"] > 1,
        offloaded_layers=int(recipe.get("offload", 0)) if fsdp else 0, **recomputation(recipe.get("recompute", "none")),
    )  # fmt: skip
    wrong = ""
    if layout.ep > layout.tp * layout.replicas:
        wrong = f"says EP {layout.ep} among {layout.tp * layout.replicas} ranks"
    job = Job(
        model, _machine(gpu, gpus, host_gpus, ADAPTER[gpu] * host_gpus), nvidia_program(release),
        values.integer("Sequence Length"), precision=precision, dispatch=recipe.get("dispatch", ""),
        graphs=recipe["graphs"] == "1" if recipe else None, overlap=recipe.get("overlap") == "1",
        dropless="tokendrop" not in row.text("Model"), tuning=LORA if "> LoRA " in row.text("headings") else FULL,
    )  # fmt: skip
    tokens = values.number("Tokens / sec / GPU")
    return _published(f"Megatron-Bridge, {release}", job, layout, tokens=tokens, batch=batch, wrong=wrong)


def _machine(gpu: str, gpus: int, host_gpus: int, gigabits: float) -> Machine:
    """Returns GPUs on hosts; ``gigabits`` a second go through a host's adapters together."""
    return Machine(hardware.gpu(gpu), gpus, host_gpus, gigabits * 1e9 / 8)


def _published(
    source: str, job: Job, layout: Layout, *, tokens: float = 0.0, seconds: float | None = None,
    peak: float | None = None, batch: int = 0, wrong: str = "",
) -> PublishedRun:  # fmt: skip
    """Makes the run of a row from what the tables have in common.

    Args:
        tokens: of a GPU and second, 0 where it ended otherwise; or seconds. batch: samples of a step, as the row says;
            it is wrong where the layout has others.
    """
    seconds = layout.batch * job.sequence / tokens / job.machine.gpus if tokens else seconds
    if batch and batch != layout.batch and not wrong:
        wrong = f"says {batch} samples a step, but has {layout.batch}"
    return PublishedRun(job, layout, seconds, peak, "ok" if seconds else "failed", source, wrong)


_SECOND = {"H100": "fp8", "B200": "mxfp8", "GB200": "mxfp8"}


def _value(text: str, number: int) -> str:
    """``4 (8)`` is 4, and 8 as the second number; what has no second value is the same in both."""
    if match := re.fullmatch(r"(\S+) \((\S+)\)", text.strip()):
        return match[number + 1]
    return text


def _degree(values: Cells, name: str) -> int:
    return 1 if values.text(name) in ("", "n/a") else values.integer(name)


def _heading(text: str) -> tuple[str, tuple[str, str]]:
    """Reads the release from a heading, and the model or the system, whichever has no column."""
    release = re.search(r"> ([\d.]+) NeMo", text)
    last = text.rsplit("> ", 1)[-1]
    model, system = last.removeprefix("Model: "), last.removeprefix("System: ")
    if release is None or model == system:
        raise ValueError(f"headings is {text!r}; right would be … > 26.02 NeMo Container > … > Model: LLAMA3_70B")
    return release[1], (model, system)


@functools.cache
def recipes() -> dict[tuple[str, str, str], dict[str, str]]:
    """Returns the recipes by release, model and GPU."""
    with RECIPES.open(encoding="utf-8", newline="") as file:
        return {(row["release"], row["model"], row["gpu"]): row for row in csv.DictReader(file)}


EFA = 3200  # Gbit/s of AWS p5: a host's 32 adapters
ROCE = 1600  # LLM-Foundry's A100 hosts, in its tables' headings


def nanotron(row: Cells) -> Iterator[PublishedRun]:
    """Yields a run of the Ultra-Scale Playbook's benchmarks: fp32 gradients, no recomputation, sequence parallel."""
    layout = Layout(
        tp=row.integer("tp"), pp=row.integer("pp"), dp=row.integer("dp"),
        sharding=row.one_of("zero", {"0": "none", "1": "zero1"}), micro_batch=row.integer("mbs"),
        accumulation=row.integer("grad_acc"), sequence_parallel=True,
    )  # fmt: skip
    ended = row.one_of("status", {"ok": "ok", "crashed or oom": "failed"})
    tokens = row.number("tokens_per_s_per_gpu", 0) if row.has("tokens_per_s_per_gpu") and ended == "ok" else 0.0
    shape = Shape(*row.one_of("model", _TABLES["nanotron"]), name=row.text("model"))  # type: ignore[misc]
    job = Job(shape, _machine("H100", row.integer("nodes") * 8, 8, EFA), NANOTRON, 4096)
    peak = row.number("memory_gb") * 2**30 if row.has("memory_gb") and tokens else None
    yield _published("nanotron", job, layout, tokens=tokens, peak=peak, batch=row.integer("gbs"))


def megatron_deepspeed(row: Cells) -> Iterator[PublishedRun]:
    """Yields the run of a row of vTrain's: GPT, everything recomputed, attention unfused."""
    layers, hidden, heads = (row.integer(name) for name in ("# layers", "hidden size", "attention heads"))
    sequence, micro, dp = (row.integer(name) for name in ("sequence length", "micro batch", "data parallelism"))
    layout = Layout(
        tp=row.integer("tensor parallelism"), pp=row.integer("pipeline parallelism"), dp=dp, micro_batch=micro,
        accumulation=row.integer("global batch", micro * dp) // micro // dp, recompute="full",
    )  # fmt: skip
    shape = gpt(layers, hidden, heads, 51200, sequence, f"GPT {layers} × {hidden}")
    machine = _machine("A100-80GB", row.integer("# GPUs"), 8, 4 * 200)
    job = Job(shape, machine, PROGRAMS["megatron-deepspeed"], sequence, fused=False)
    yield _published("Megatron-DeepSpeed", job, layout, seconds=row.number("iteration time (ms)") / 1e3)


def llm_foundry(row: Cells) -> Iterator[PublishedRun]:
    """Yields the run of a row of MosaicML's: MPT with FSDP."""
    sequence, gpus = row.integer("SeqLen (T)"), row.integer("# GPUs")
    layout = Layout(
        dp=gpus, sharding=row.one_of("Sharding Strategy", {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2"}),
        micro_batch=row.integer("MicroBatchSize"), accumulation=row.integer("GradAccum"),
        recompute="full" if row.one_of("Activation Checkpointing", TRUTH) else "none",
    )  # fmt: skip
    a100s = {f"a100_{size}gb": (f"A100-{size}GB", ROCE) for size in (80, 40)}
    gpu, between = row.one_of("GPU", {"h100_80gb": ("H100", EFA)} | a100s)
    sizes, name = row.one_of("Model", _TABLES["mpt"]), f"MPT {row.text('Model')}"
    shape = gpt(*sizes, 50368, sequence, name)  # type: ignore[call-arg]
    precision = "fp8" if "FP8" in row.text("section") else "bf16"
    job = Job(shape, _machine(gpu, gpus, 8, between), FOUNDRY, sequence, precision=precision)
    yield _published("LLM-Foundry", job, layout, tokens=row.number("Throughput (T/s/GPU)"))


_COLUMNS: dict[str, list[str]] = _TABLES["columns"]
_READERS: dict[str, Callable[[Cells], Iterator[PublishedRun]]] = {
    "nanotron's": nanotron, "Megatron-DeepSpeed's": megatron_deepspeed, "LLM-Foundry's": llm_foundry,
    "Megatron-Bridge's": megatron_bridge,
}  # fmt: skip


def _table(header: list[str]) -> str | None:
    """Returns the name of the table whose own columns a header has, at least half of them."""
    shares = {}
    for name, columns in _COLUMNS.items():
        alone = set(columns) - set(runs.NEEDED) - set(runs.OPTIONAL)
        shares[name] = len(alone & set(header)) / len(alone)
    nearest = max(shares, key=shares.__getitem__)
    return nearest if shares[nearest] >= 0.5 else None


def knows(path: Path) -> bool:
    """Returns whether a file's header is a published table's, even where some of its columns are missing.

    Raises:
        ValueError: the file is not UTF-8 text.
    """
    return _table(rows(path)[0]) is not None


def read(path: Path, left_out: list[str] | None = None) -> list[PublishedRun]:
    """Reads the runs of one of the published files, by its header; ``left_out`` as in :func:`.runs.read`.

    Raises:
        ValueError: its columns are those of none; one is missing; a cell is wrong, whose line and column are named.
    """
    header, lines = rows(path)
    name = _table(header)
    if name is None:
        raise ValueError(f"{path.name}: its columns are those of none of the published tables")
    if missing := [column for column in _COLUMNS[name] if column not in header]:
        raise ValueError(f"{path.name} is {name} table but has no column {', '.join(missing)}")
    return runs.read_each(path, lines, lambda row: _READERS[name](Cells(row)), left_out)


def load(path: Path, measured: GpuProfile | None = None, left_out: list[str] | None = None) -> list[PublishedRun]:
    """Reads the runs of a file: a published table's, or anybody's in the columns of :mod:`.runs`.

    ``measured`` takes the place of the GPU that has its name, between hosts only where that was measured as well;
    ``left_out`` as in :func:`.runs.read`.

    Raises:
        ValueError: it is neither; what is missing is named.
    """
    if not knows(path):
        return runs.read(path, measured, left_out)
    published = read(path, left_out)
    for index, run in enumerate(published):
        cluster = run.job.machine
        if measured and cluster.gpu.name == measured.gpu.name:
            link = measured.measured_link or Link(path.name, cluster.between)
            cluster = measured.on_hosts(cluster.gpus, cluster.host_gpus, link)
            published[index] = replace(run, job=replace(run.job, machine=cluster))
    return published
