"""From where on a technique pays, for two GPUs of today: formulas, numbers, and where each was measured."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from pardemo.book.contents import CHAPTERS, notebook_of
from pardemo.formulas import failures, memory, pipeline
from pardemo.planner import hardware, rates
from pardemo.planner.estimate import RESERVE
from pardemo.planner.hardware import Gpu
from pardemo.planner.layouts.configurations import shape_of
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.procedure import adds
from pardemo.planner.layouts.procedure import link as rate_of_ring
from pardemo.planner.layouts.programs import find_program
from pardemo.planner.layouts.shape import Shape

_GPU_NAMES = ("H100", "B200")
_NODE = 8  # GPUs of a node
_NETWORK = hardware.link("infiniband-8x400g")  # of a node: NVIDIA's DGX H100 and DGX B200 datasheets
RESERVED = 1 - RESERVE  # of the memory
_BETWEEN_S = 54 * 24 * 3600 / 419  # between two failures of 16,384 GPUs: 2407.21783, 3.3.4
_ALPHA = 5e-6  # seconds of a message between nodes
_SHARE = 0.1  # what a technique may add to the matrix multiplications' time
_TENSOR, _STAGES, _CHUNKS, _WIDTH, _VOCABULARY = 8, 8, 4, 8192, 128_256


@dataclass(frozen=True)
class Threshold:
    """One line of the table.

    Args:
        question: when what happens. formula: in the book's letters. values: GPU -> the number, with its unit.
        chapter: that measured it.
    """

    question: str
    formula: str
    values: Mapping[str, str]
    chapter: str


class Table:
    """The thresholds, for a page: each with a link to the chapter that measured it."""

    def __init__(self, rows: list[Threshold]):
        self.rows = rows

    def __repr__(self) -> str:
        return "\n".join(
            f"{row.question}: {row.formula}; {', '.join(f'{name} {text}' for name, text in row.values.items())}"
            for row in self.rows
        )

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{head}</th>" for head in ("from where on, and which chapter says why", *_GPU_NAMES))
        lines = "".join(f"<tr><td>{_named(row)}</td>{_cells(row)}</tr>" for row in self.rows)
        return f"<table><tr>{heads}</tr>{lines}</table>"


def _named(row: Threshold) -> str:
    """Question, formula and chapter below each other: three columns in all, which a phone has room for."""
    chapter = f'<a href="{notebook_of(row.chapter)}.ipynb">{html.escape(CHAPTERS[row.chapter])}</a>'
    return f"{html.escape(row.question)}<br><small>{html.escape(row.formula)} ({chapter})</small>"


def _cells(row: Threshold) -> str:
    return "".join(f"<td>{html.escape(text)}</td>" for text in row.values.values())


def thresholds() -> Table:
    """All of them, for :data:`_GPU_NAMES`, eight GPUs a node with a network card of 400 Gbit/s each."""
    gpus = [hardware.gpu(name) for name in _GPU_NAMES]
    share = f"{100 * _SHARE:.0f} %"

    def row(question: str, formula: str, value, unit: str, chapter: str, short=_two_digits) -> Threshold:
        return Threshold(question, formula, {gpu.name: f"{short(value(gpu))} {unit}".strip() for gpu in gpus}, chapter)

    return Table(
        [
            row("One GPU holds a model's states in Adam's step up to", "Ψ = 0.92 · memory / 20",
                lambda g: states(g, 1, 0) / 1e9, "billion", "zero_memory", _tenths),
            row("ZeRO-1 on one node holds them up to", "Ψ = 0.92 · memory / (4 + 18/8)",
                lambda g: states(g, _NODE, 1) / 1e9, "billion", "zero_memory", _tenths),
            row("ZeRO-3 on one node holds them up to", "Ψ = 0.92 · memory / (18/8)",
                lambda g: states(g, _NODE, 3) / 1e9, "billion", "zero_memory", _tenths),
            row("LoRA on one GPU holds a frozen model up to", "Ψ = 0.92 · memory / 2",
                lambda g: RESERVED * g.memory_bytes / 2e9, "billion", "baichuan2_finetune"),
            row("ZeRO-3's gathers hide inside a node from", "T = F / B", lambda g: gathered(g, _NODE), "tokens",
                "zero_communication"),
            row("ZeRO-3's gathers hide between nodes from", "T = F / B", lambda g: gathered(g, 2 * _NODE), "tokens",
                "zero_communication"),
            row("… with gradients in fp32, in the backward pass, from", "T = 3/2 · F / B",
                lambda g: 1.5 * gathered(g, 2 * _NODE), "tokens", "zero_communication"),
            row("… of a model whose tokens use 3.3 of 30.5 billion parameters, from", "T = 30.5/3.3 · F / B",
                lambda g: 30.5 / 3.3 * gathered(g, 2 * _NODE), "tokens", "which_layout"),
            row("Experts on the GPUs of a node compute, forward, for as long as they exchange from",
                "inner width = ⅔ · 7/8 · F / B", exchanged, "features", "experts"),
            row("An all-reduce of gradients hides inside a node from", "T = (N−1)/N · F / B",
                lambda g: (_NODE - 1) / _NODE * gathered(g, _NODE), "tokens", "data_parallel"),
            row("… between two nodes, which reach 0.8 of their cards' rate, from", "T = (H−1)/H · F / B",
                lambda g: rate(g) / (2 * rates.LINK_SHARE * _NETWORK), "tokens", "cluster"),
            row("HSDP of Llama 3 8B sends fewer bytes between many nodes than a pipeline with a stage on each, from",
                "tokens of a whole step = Ψ/h", lambda g: few_tokens(shape_of("llama3-8b")) / 1e6, "million",
                "zero_communication", _tenths),
            row("A ring hides keys and values (kv/a = 1/8) between nodes from", "tokens of a rank = 2 · kv/a · F/B",
                lambda g: 2 / 8 * gathered(g, 2 * _NODE), "tokens", "long_sequences"),
            row("FP8 gains more than converting costs from", "T and a matrix's sides = 5 · F / memory's bandwidth",
                lambda g: 5 * rate(g) / g.memory_bytes_per_s, "", "fewer_bits"),
            row(f"Muon's multiplications, shared by all GPUs, add at most 1 % at h = {_WIDTH:,} from",
                "tokens of a whole step = 500 · h", lambda g: 500 * _WIDTH / 1e6, "million", "optimizers"),
            row(f"Tensor parallelism over {_TENSOR} GPUs adds at h = {_WIDTH:,}", "(t − 1) · F / (4.5 · h · B)",
                lambda g: 100 * tensor(g), "%", "megatron_attention"),
            row(f"… and at most {share} from", "h = (t − 1) · F / (0.45 · B)", wide, "features",
                "megatron_attention"),
            row(f"A pipeline of {_STAGES} stages waits at most {share} of the time from", "m = 9 · (p − 1)",
                lambda g: pipeline.micro_batches_for(_STAGES, _SHARE), "micro-batches", "pipeline_parallel"),
            row(f"… with {_CHUNKS} chunks a rank, from", "m = 9 · (p − 1) / v",
                lambda g: pipeline.micro_batches_for(_STAGES, _SHARE, _CHUNKS), "micro-batches", "pipeline_parallel"),
            row("An all-reduce between 16 nodes waits mostly for latency up to", "S = H · α · B, α = 5 µs",
                lambda g: 16 * _ALPHA * rate_of_ring(_job(g, 16 * _NODE, 1), 16 * _NODE) / 1e6, "MB", "data_parallel"),
            row(f"At h = {_WIDTH:,} causal attention costs as much as the linear layers from", "s = 12 · h",
                lambda g: 12 * _WIDTH, "tokens", "long_sequences"),
            row(f"Logits of {_VOCABULARY:,} entries take {share} of the memory from", "T = 0.1 · memory / (8 · V)",
                lambda g: _SHARE * g.memory_bytes / 8 / _VOCABULARY, "tokens", "vocabulary"),
            row("To offload a block's activations beats to recompute them from", "h + s/6 = 17/24 · F / B of PCIe",
                lambda g: offloaded(g) / 2, "", "zero_r"),
            row("… and costs no time from", "h + s/6 = 17/12 · F / B of PCIe", offloaded, "", "zero_r"),
            row("1,024 GPUs whose saves take a minute save every", "w = √(2 · δ · μ), by Llama 3's failures",
                lambda g: failures.young_interval(60, _BETWEEN_S * 16_384 / 1024) / 60, "minutes", "host_fails"),
            row("Restarts of ten minutes cost 1 % of the time from", "N = 0.01 · one GPU's μ / ρ",
                lambda g: restarts(600), "GPUs", "host_fails"),
        ]
    )  # fmt: skip


def rate(gpu: Gpu) -> float:
    """F: operations/s that the rule takes a GPU to reach."""
    return rates.matrix(gpu)


def states(gpu: Gpu, ranks: int, stage: int) -> float:
    """Ψ: the largest model whose states a GPU holds in Adam's step beside nothing else, with what has to be free."""
    return RESERVED * gpu.memory_bytes / memory.most_in_step(ranks, stage)


def few_tokens(shape: Shape) -> float:
    """Tokens of a whole step below which a pipeline with a stage on each node sends less over a node's cards than HSDP.

    A stage sends an activation and a gradient for each token, 4h bytes; HSDP an all-reduce of bf16 gradients, 4Ψ bytes.
    """
    return shape.params / shape.hidden


def restarts(seconds: float, share: float = 0.01) -> float:
    """GPUs from which on restarts that take so long cost this share of the time, by Llama 3's failures."""
    return share * _BETWEEN_S * 16_384 / seconds


def gathered(gpu: Gpu, ranks: int) -> float:
    """T: tokens of a micro-batch on a GPU from which on ZeRO-3's gathers over so many GPUs hide."""
    return rate(gpu) / rate_of_ring(_job(gpu, ranks, 1), ranks)


def tensor(gpu: Gpu, width: float = _WIDTH) -> float:
    """The time that :data:`_TENSOR` ranks' all-reduces add, as a share of the matrix multiplications' time."""
    return (_TENSOR - 1) * rate(gpu) / (4.5 * width * rates.inside(gpu))


def wide(gpu: Gpu) -> float:
    """h: from where on tensor parallelism over :data:`_TENSOR` ranks adds at most :data:`_SHARE`."""
    return tensor(gpu, 1) / _SHARE


def exchanged(gpu: Gpu) -> float:
    """Inner width from where on a node's experts compute, forward, for as long as their two exchanges take.

    A row costs 6·h·width operations, and 4·h bytes if its expert is on another GPU.
    """
    return 2 / 3 * (_NODE - 1) / _NODE * gathered(gpu, _NODE)


def offloaded(gpu: Gpu) -> float:
    """h + s/6: from where on the 34·b·s·h bytes of a block's activations travel while its forward pass computes.

    Its forward pass takes 24·h² operations a token, and 4·s·h for attention.
    """
    return 17 / 12 * rate(gpu) / hardware.host_bytes_per_s(gpu)


def answers_of_the_rule() -> dict[str, bool]:
    """Whether the rule's answers change at those of the thresholds that it has, and not a token earlier.

    GPU and line of the table -> whether both agree.
    """
    agreed = {}
    for name in _GPU_NAMES:
        gpu = hardware.gpu(name)
        for ranks, where in ((_NODE, "inside"), (2 * _NODE, "between nodes")):
            tokens = ceil(gathered(gpu, ranks))
            hidden = adds(_job(gpu, ranks, tokens), _zero3(ranks))["data parallel"] == 0
            waits = adds(_job(gpu, ranks, tokens - 1), _zero3(ranks))["data parallel"] > 0
            agreed[f"{name}, {where}"] = hidden and waits
        job = _job(gpu, _NODE, 4096)
        of_rule = adds(job, Layout(tp=_TENSOR, sequence_parallel=True))["tensor parallel"]
        agreed[f"{name}, tensor parallel"] = abs(of_rule / tensor(gpu, job.shape.hidden) - 1) < 1e-9
    return agreed


def _zero3(ranks: int) -> Layout:
    return Layout(dp=ranks, sharding="zero3")


def _job(gpu: Gpu, gpus: int, tokens: int) -> Job:
    """Llama 3 8B with one sample of so many tokens a GPU."""
    return Job(shape_of("llama3-8b"), Machine(gpu, gpus, _NODE, _NETWORK), find_program("megatron-core"), tokens)


def _two_digits(value: float) -> str:
    """Two digits and more: nobody plans by the third."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value < 10 else f"{value:.0f}"


def _tenths(value: float) -> str:
    """As the chapters print billions and millions."""
    return f"{value:,.1f}"
