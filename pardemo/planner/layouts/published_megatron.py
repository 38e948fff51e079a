"""NVIDIA's table of Megatron-core's trainings: ``megatron_bridge.csv``, each row in one or two precisions.

What the table leaves open stands in the repository's ``scripts/performance/configs`` at the tag of the release (v0.2.0
for 25.11, v0.3.0 and v0.3.1 for 26.02 and 26.02.01). ``megatron_bridge_recipes.csv`` has of it how tokens are sent to
experts, whether CUDA graphs start kernels, whether another micro-batch runs beside the exchange, and how many layers'
activations are offloaded under FSDP. What a recipe recomputes is not in it. The models' sizes are those of their
configurations on Hugging Face.
"""

import csv
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pardemo.planner import hardware
from pardemo.planner.layouts.cells import Cells
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.runs import PublishedRun
from pardemo.planner.layouts.shape import COLUMNS, ROWS, Experts, Mamba, Product, Shape
from pardemo.planner.layouts.stacks import MEGATRON
from pardemo.planner.layouts.work import Job

RECIPES = Path(__file__).with_name("megatron_bridge_recipes.csv")
PROGRAM = MEGATRON.but(gradient=2)  # the recipes' grad_reduce_in_fp32 is false
RACK = 64  # GPUs of an NVL72 that a training uses; the rest stand in for those that fail
#: Gbit/s of network for each GPU: ConnectX-7 of DGX H100 and B200 and of GB200, ConnectX-8 of B300 and GB300.
ADAPTER = {"H100": 400, "B200": 400, "GB200": 400, "B300": 800, "GB300": 800}
#: The second one is in parentheses: "different quantization granularities" (the table's footnote for 25.09).
PRECISIONS = {
    "BF16": "bf16", "FP8": "fp8", "FP8-CS": "fp8", "FP8-MX": "mxfp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "": "fp8",
}  # fmt: skip


def _latent(hidden: int, heads: int) -> tuple[Product, ...]:
    """DeepSeek-V3's attention, which is Kimi K2's too."""
    return (
        Product(hidden, 1536), Product(1536, heads * 192, COLUMNS), Product(hidden, 576),
        Product(512, heads * 256, COLUMNS), Product(heads * 128, hidden, ROWS),
    )  # fmt: skip


_DEEPSEEK = Shape(
    61, 7168, 128, 128, 18432, 129280, head=192, value=128, experts=Experts(256, 8, 2048, 2048, 3),
    attention=_latent(7168, 128), name="DeepSeek-V3",
)  # fmt: skip
_KIMI = Shape(
    61, 7168, 64, 64, 18432, 163840, head=192, value=128, experts=Experts(384, 8, 2048, 2048, 1),
    attention=_latent(7168, 64), name="Kimi K2",
)  # fmt: skip
_NANO = Shape(
    52, 2688, 32, 2, 1856, 131072, gated=False, head=128, experts=Experts(128, 6, 1856, 3712),
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", mamba=Mamba(64, 64, 128, 8),
    name="Nemotron 3 Nano 30B-A3B",
)  # fmt: skip
MODELS = {
    "LLAMA3_8B": Shape(32, 4096, 32, 8, 14336, 128256, name="Llama 3 8B"),
    "LLAMA3_70B": Shape(80, 8192, 64, 8, 28672, 128256, name="Llama 3 70B"),
    "LLAMA3.1_405B": Shape(126, 16384, 128, 8, 53248, 128256, name="Llama 3.1 405B"),
    "DeepSeekV3": _DEEPSEEK,
    "Kimi_K2": _KIMI,
    "GPT OSS 120B": Shape(
        36, 2880, 64, 8, 2880, 201088, head=64, experts=Experts(128, 4, 2880, biased=True), window=128, windowed=18,
        name="GPT-OSS 120B",
    ),
    "Qwen3_30B_a3B": Shape(
        48, 2048, 32, 4, 6144, 151936, head=128, experts=Experts(128, 8, 768), name="Qwen3 30B-A3B",
    ),
    "Qwen3_235B_a22B": Shape(
        94, 4096, 64, 4, 12288, 151936, head=128, experts=Experts(128, 8, 1536), name="Qwen3 235B-A22B",
    ),
    "Nemotron_3_Nano": _NANO,
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
    if "w/ MTP" in row.text("Model") or (model is _DEEPSEEK and release.startswith("26.")):
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
        sequence_parallel=degrees["tp"] > 1, offload=recipe.offload if fsdp else 0,
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
    """What a row leaves open: :class:`~pardemo.planner.layouts.work.Job` says what the fields are."""

    dispatch: str = ""
    graphs: bool | None = None
    overlap: bool = False
    offload: int = 0


LATEST = Recipe()  # what is not said is as the program usually does it


@functools.cache
def recipes() -> dict[tuple[str, str, str], Recipe]:
    """The recipes by release, model and GPU."""
    with RECIPES.open(encoding="utf-8", newline="") as file:
        return {
            (row["release"], row["model"], row["gpu"]): Recipe(
                row["dispatch"], row["graphs"] == "1", row["overlap"] == "1", int(row["offload"])
            )
            for row in csv.DictReader(file)
        }
