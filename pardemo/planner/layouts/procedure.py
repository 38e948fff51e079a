"""The book's one answer to "which layout first?": of the layouts that fit, the one that adds least to the time of its
matrix multiplications.

A layout fits if the planner's memory leaves 8 % of a GPU free. What it adds is a sum of these terms, each the formula
of a chapter:

=============================  =================================  ==============================================
recomputed layers              1/3                                a second forward pass (*Sequence parallelism*)
tensor parallel                (t − 1) · F / (4.5 · h · B)        all-reduces in a node, none hidden (*Megatron's
                                                                  attention*)
pipeline                       (p − 1) / (m · v)                  the bubble (*Pipeline parallelism*)
its messages                   ⅔ · h · p · v · F / (Ψ · B)        an activation and a gradient from each stage to the
                                                                  next and the last, none hidden; between nodes B is
                                                                  one GPU's share of its node's network cards
ZeRO-3; HSDP inside its nodes  (κ − 1)/3 + (2κ − 2)/3             gathers beside each forward pass, gathers and
                                                                  gradients beside each backward pass (*ZeRO's
                                                                  traffic*)
ZeRO-2                         (κ − 2)/3 + κ / (3m)               gradients beside each backward pass; a gather once
                                                                  a step, after the update
ZeRO-1                         (κ − 2)/(3m) + κ / (3m)            gradients beside the last backward pass, that gather
replicas; HSDP across          (2κ − 2)/(3m)                      all-reduces beside the last backward pass
=============================  =================================  ==============================================

κ = F / (B · T) is a gather's time over a forward pass's. A bracket below 0 is traffic that hides and adds nothing, one
bracket for each pass, since passes cannot lend each other time. With recomputation the backward pass is half as long
again: 2 becomes 3 there. An all-reduce over d ranks counts as 2κ, for (d − 1)/d is taken as 1.

F: operations/s of the matrix multiplications, B: bytes/s of the slowest link that a ring over the ranks passes, between
nodes of all network cards of a node together; both as reached (:mod:`pardemo.planner.rates`). T: tokens of a
micro-batch, divided by t. m: micro-batches. v: chunks. h: hidden size. Gradients travel in 2 bytes.

The rule's layout is nearly as fast as the best one that :mod:`pardemo.planner.layouts.search` finds, but often another,
since several kinds are about equally fast. The search times every layout, with constants for launches, latencies and
memory.
"""

import csv
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pardemo.planner import hardware, rates
from pardemo.planner.divisors import divisors, powers_of_two
from pardemo.planner.layouts.configurations import find_configuration, shape_of_config
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.programs import find_program
from pardemo.planner.layouts.search import PlannedLayout, chunks_of, search, shardings
from pardemo.planner.layouts.step import idle_stages, predict_step

RECOMPUTED = 1 / 3  # of the multiplications' time: forward is one of three passes
SIMPLEST_WITHIN = 0.03  # of the multiplications' time: of layouts that are so close the simplest is taken
MOST_SAMPLES, MOST_CHUNKS = 16, 4


@dataclass(frozen=True)
class Candidate:
    """A layout with the memory that it takes and the time that it adds.

    Args:
        adds: part (recomputation, tensor parallel, pipeline, data parallel) -> share of the multiplications' time.
        nbytes: memory of the fullest GPU.
    """

    layout: Layout
    adds: dict[str, float]
    nbytes: float

    @property
    def added(self) -> float:
        """Share of the multiplications' time that all parts add."""
        return sum(self.adds.values())

    @property
    def kind(self) -> str:
        """The layout in the field's words: replicas, ZeRO-1, ZeRO-2, ZeRO-3 or HSDP, after TP and PP if there are."""
        layout = self.layout
        names = {
            "none": "replicas",
            "zero1": "ZeRO-1",
            "zero2": "ZeRO-2",
            "zero3": "HSDP" if layout.shard_group else "ZeRO-3",
        }
        cuts = [f"{name} {n}" for name, n in (("TP", layout.tp), ("PP", layout.pp)) if n > 1]
        return ", ".join([*cuts, names[layout.sharding]] if layout.dp > 1 or not cuts else cuts)


def choose(job: Job, batch: int) -> Candidate | None:
    """The layout to try first for a dense model, ``batch`` samples a step; None where nothing fits.

    Of the layouts that add at most :data:`SIMPLEST_WITHIN` more than the least, the rule takes the one with the fewest
    kinds of cuts (tensor ranks, stages), then the fewest chunks, then the least sharding, since a network may not hide
    what the formulas hide.

    Raises:
        ValueError: the model has experts (the rule is for dense models), ``batch`` is below 1, or nothing divides it.
    """
    fitting = candidates(job, batch)
    return taken_of(fitting) if fitting else None


def taken_of(fitting: Sequence[Candidate]) -> Candidate:
    """The layout that the rule takes, of those that fit."""
    least = min(candidate.added for candidate in fitting)
    return min((candidate for candidate in fitting if candidate.added <= least + SIMPLEST_WITHIN), key=_settings)


def candidates(job: Job, batch: int) -> list[Candidate]:
    """Every layout of powers of two that fits, with what it adds; the one that adds least comes first.

    Raises:
        ValueError: as :func:`choose`.
    """
    if job.shape.experts is not None:
        raise ValueError(f"this rule is for dense models, and {job.shape.name or 'this one'} has experts: use search")
    if batch < 1:
        raise ValueError(f"a step must have at least 1 sample, not {batch!r}")
    most_bytes, fitting, tried = job.machine.usable_bytes, [], 0
    for ways in _ways(job, batch):
        for layout in ways:  # ZeRO-3 gathers for each micro-batch, so it takes the largest one that fits
            if not job.program.can_run(layout) or idle_stages(job, layout):
                continue
            tried += 1
            nbytes = predict_memory(job, layout).peak_bytes
            if nbytes <= most_bytes:
                fitting.append(Candidate(layout, adds(job, layout), nbytes))
                break
    if not tried:
        raise ValueError(f"no cut by powers of two divides {batch} samples over {job.machine.gpus} GPUs")
    return sorted(fitting, key=lambda candidate: candidate.added)


def adds(job: Job, layout: Layout) -> dict[str, float]:
    """Returns what a layout adds to the time of the matrix multiplications, as shares of that time."""
    machine, t, m = job.machine, layout.tp, layout.accumulation
    tokens = layout.micro_batch * job.sequence / t
    recomputed = RECOMPUTED if layout.recompute == "full" else 0.0
    shares = {
        "recomputation": recomputed,
        "tensor parallel": (t - 1) * rate(job) / (4.5 * job.shape.hidden * rates.inside(machine.gpu)),
        "pipeline": (layout.pp - 1) / (m * layout.chunks) + _messages(job, layout),
        "data parallel": 0.0,
    }
    if layout.dp == 1:
        return shares
    forward, backward = 1 / 3, 2 / 3 + recomputed
    gather = rate(job) / link(job, layout.dp * t) / tokens / 3  # of all parameters, or a reduce-scatter of gradients
    if layout.sharding == "zero2":
        waits = _beside(gather, backward) + gather / m
    elif layout.sharding == "zero1":
        waits = (_beside(gather, backward) + gather) / m
    elif layout.sharding != "zero3":
        waits = _beside(2 * gather, backward) / m
    elif layout.shard_group:
        in_node = rate(job) / link(job, layout.shard_group * t) / tokens / 3
        waits = _beside(2 * gather, backward) / m + _beside(in_node, forward) + _beside(2 * in_node, backward)
    else:
        waits = _beside(gather, forward) + _beside(2 * gather, backward)
    return shares | {"data parallel": waits}


def _beside(traffic: float, computing: float) -> float:
    """Returns what traffic beside a pass adds: by how much it takes longer than the pass."""
    return max(0.0, traffic - computing)


def rate(job: Job) -> float:
    """F: operations/s that matrix multiplications reach in a step."""
    return job.machine.matrix_flops


def link(job: Job, ranks: int) -> float:
    """B: bytes/s of a ring over ``ranks`` neighbours, which leaves each node once, over all of its network cards."""
    machine = job.machine
    in_node = rates.inside(machine.gpu)
    return in_node if machine.inside(ranks) else min(in_node, rates.between(machine.between))


def _messages(job: Job, layout: Layout) -> float:
    """Returns what a stage's messages add, none hidden: v activations and v gradients for each micro-batch."""
    if layout.pp == 1:
        return 0.0
    machine, shape = job.machine, job.shape
    senders = 1  # ranks of a node that share its network cards
    if not machine.inside(layout.gpus):
        senders = max(1, machine.host_gpus // layout.tp)
    of_a_token = layout.chunks * 4 * shape.hidden * senders / link(job, layout.gpus)
    return of_a_token / (6 * shape.params / (rate(job) * layout.tp * layout.pp))


def _ways(job: Job, batch: int) -> Iterator[list[Layout]]:
    """Layouts of powers of two; those of one list differ in their micro-batch alone, the largest first."""
    machine, shape = job.machine, job.shape
    for tp, pp in itertools.product(powers_of_two(machine.host_gpus), powers_of_two(shape.layers)):
        dp = machine.gpus // (tp * pp)
        if machine.gpus % (tp * pp) or shape.heads % tp or batch % dp:
            continue
        share = batch // dp
        ways = [way for way in shardings(dp, machine.host_gpus // tp) if pp == 1 or way[0] in ("none", "zero1")]
        for (sharding, group), recompute in itertools.product(ways, ("none", "full")):
            base = Layout(
                tp=tp, pp=pp, dp=dp, sequence_parallel=tp > 1, sharding=sharding, shard_group=group,
                recompute=recompute,
            )  # fmt: skip
            micros = reversed(divisors(share, MOST_SAMPLES)) if sharding == "zero3" else [1]
            sizes = [(n, share // n) for n in micros]
            for chunks in chunks_of(shape.layers, pp, share, MOST_CHUNKS):
                yield [base.but(micro_batch=n, accumulation=m, chunks=chunks) for n, m in sizes]


def _settings(candidate: Candidate) -> tuple[int, int, int, float]:
    """Orders layouts by their settings: kinds of cuts, chunks, how much is sharded; then by what they add."""
    layout = candidate.layout
    sharding = ("none", "zero1", "zero2", "hsdp", "zero3").index("hsdp" if layout.shard_group else layout.sharding)
    return (layout.tp > 1) + (layout.pp > 1), layout.chunks, sharding, candidate.added


TABLE = Path(__file__).with_name("thirty_jobs.csv")


@dataclass(frozen=True)
class Compared:
    """A job with the rule's layout and the search's best one; None where nothing fits.

    Args:
        name: model, GPUs and network. seconds: a step's time with the rule's layout, by the planner.
    """

    name: str
    job: Job
    batch: int
    chosen: Candidate | None
    seconds: float
    best: PlannedLayout | None

    @property
    def ratio(self) -> float:
        """The time of a step with the rule's layout over that with the search's best."""
        return self.seconds / self.best.seconds if self.best is not None else float("nan")


def job_of(
    model: str, gpu: str, gpus: int, network: float, sequence: int = 4096, program: str = "megatron-core"
) -> Job:
    """A job on nodes of up to eight GPUs. ``network``: GB/s of a node's network cards together.

    Raises:
        ValueError: a model, GPU or program that is not known.
    """
    machine = Machine(hardware.gpu(gpu), gpus, min(8, gpus), network * 1e9)
    return Job(shape_of_config(find_configuration(model)), machine, find_program(program), sequence)


def jobs(program: str = "megatron-core") -> Iterator[tuple[str, Job, int]]:
    """The thirty jobs: name (model, GPUs, thousands of tokens a sample, network), job, samples of a step."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gpus, network = int(row["gpus"]), float(row["between_gb_per_s"])
            sequence = int(row["sequence"])
            name = f"{row['model']}, {gpus:,} {row['gpu']}, {sequence // 1024}k"
            name += f", {network:g} GB/s" if gpus > 8 else ""
            yield name, job_of(row["model"], row["gpu"], gpus, network, sequence, program), int(row["batch"])


def compare(program: str = "megatron-core") -> list[Compared]:
    """The rule and the search on each of the thirty jobs."""
    rows = []
    for name, job, batch in jobs(program):
        chosen = choose(job, batch)
        best = next(iter(search(job, batch, 1).best), None)
        seconds = predict_step(job, chosen.layout).seconds if chosen is not None else float("nan")
        rows.append(Compared(name, job, batch, chosen, seconds, best))
    return rows
