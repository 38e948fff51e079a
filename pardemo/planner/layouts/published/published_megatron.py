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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pardemo.planner import hardware
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout, recomputation
from pardemo.planner.layouts.job.machines import Machine
from pardemo.planner.layouts.job.stacks import MEGATRON
from pardemo.planner.layouts.model import configurations, sizes
from pardemo.planner.layouts.model.shape import Experts, Mamba, Shape
from pardemo.planner.layouts.published.cells import Cells
from pardemo.planner.layouts.published.runs import PublishedRun

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
    **{theirs: replace(configurations.of(sizes.find(ours)), name=ours) for theirs, ours in _BUILT_IN.items()},
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
    """What a row leaves open: :class:`~pardemo.planner.layouts.job.job.Job` says what the fields are."""

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
