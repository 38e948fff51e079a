"""The book's one answer to "which layout first?": of all that fit, the one that adds least to the products' time.

What fits is the planner's memory. What a layout adds is a sum of these terms, each a chapter's formula:

=============================  ==============================  ================================================
recomputed layers              1/3                             a second forward pass (*Megatron's attention* and *ZeRO-R*)
tensor parallel                (t − 1) · F / (4.5 · h · B)     sums inside the host, none hidden (*Megatron's attention*)
pipeline                       (p − 1) / (m · v)               the bubble (*Pipeline parallelism*), and the stages' messages
ZeRO-3; HSDP inside its hosts  x = F / (B · T) − 1             gathers of each micro-batch (*ZeRO's traffic*)
ZeRO-2                         (1 + 1/m)/3 · (x + 1) − ⅔       gradients, beside the backward passes (*ZeRO's traffic*)
replicas, ZeRO-1; HSDP across  ⅔ · x / m                       once a step, beside the last backward pass
=============================  ==============================  ================================================

Where x or a line is below 0, it hides, and adds nothing.

F: operations/s of the products, half of the data sheet's; B: bytes/s of the link that a ring over the ranks passes, a
host's adapters together between hosts; T: tokens of a micro-batch over t; m: micro-batches; v: chunks; h: hidden size.
It is right about the kind of layout, and leaves single per cents to :mod:`pardemo.planner.layouts.search`, which times
every layout and has constants for launches, latencies and memory.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pardemo.planner.layouts.against import room
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.memory import memory
from pardemo.planner.layouts.step import idle_stages
from pardemo.planner.layouts.work import Job

RATE = 0.5  # of the data sheet's operations: whole trainings reach up to 0.43, with all their waiting (*Hybrid parallelism*)
ACROSS = 0.5  # of the data sheet's rate of links between hosts: what gathers over many hosts reach (*Which layout?*)
RECOMPUTED = 1 / 3  # of the products' time: forward is one of three passes
NEAR = 0.03  # of the products' time: layouts that are so close are taken by how simple they are
MOST_SAMPLES, MOST_CHUNKS = 16, 4


@dataclass(frozen=True)
class Candidate:
    """A layout with what it takes and what it adds.

    Args:
        adds: shares of the products' time by what adds them: recomputation, tensor parallel, pipeline, data parallel.
        nbytes: of the fullest GPU.
    """

    layout: Layout
    adds: dict[str, float]
    nbytes: float

    @property
    def added(self) -> float:
        return sum(self.adds.values())

    @property
    def kind(self) -> str:
        """In the field's words: replicas, ZeRO-1, ZeRO-3, HSDP, and what is cut."""
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

    Of those that add at most :data:`NEAR` more than the least, the one with the fewest cuts, then with the least
    traffic: the formulas let hide what a network may not.

    Raises:
        ValueError: the model has experts (this is for dense ones), ``batch`` is below 1, or nothing divides it.
    """
    fitting = candidates(job, batch)
    return taken_of(fitting) if fitting else None


def taken_of(fitting: Sequence[Candidate]) -> Candidate:
    """Of layouts that fit, the one that the rule takes."""
    least = min(one.added for one in fitting)
    return min((one for one in fitting if one.added <= least + NEAR), key=_settings)


def candidates(job: Job, batch: int) -> list[Candidate]:
    """Every layout by powers of two that fits, with what it adds; the one that adds least first.

    Raises:
        ValueError: as :func:`choose`.
    """
    if job.shape.experts is not None:
        raise ValueError(f"this rule is for dense models, and {job.shape.name or 'this one'} has experts: use search")
    if batch < 1:
        raise ValueError(f"a step must have at least 1 sample, not {batch!r}")
    there, fitting, tried = room(job), [], 0
    for ways in _ways(job, batch):
        for layout in ways:  # of ZeRO-3's the largest micro-batch that fits: each one is gathered for
            if not job.stack.runs(layout) or idle_stages(job, layout):
                continue
            tried += 1
            nbytes = memory(job, layout).peak_bytes
            if nbytes <= there:
                fitting.append(Candidate(layout, adds(job, layout), nbytes))
                break
    if not tried:
        raise ValueError(f"no cut by powers of two divides {batch} samples over {job.machine.gpus} GPUs")
    return sorted(fitting, key=lambda one: one.added)


def adds(job: Job, layout: Layout) -> dict[str, float]:
    """What a layout adds to the time of the products, as shares of it."""
    machine, t, m = job.machine, layout.tp, layout.accumulation
    tokens = layout.micro_batch * job.sequence / t
    shares = {
        "recomputation": RECOMPUTED if layout.recompute == "full" else 0.0,
        "tensor parallel": (t - 1) * rate(job) / (4.5 * job.shape.hidden * machine.gpu.link_bytes_per_s),
        "pipeline": (layout.pp - 1) / (m * layout.chunks) + _messages(job, layout),
        "data parallel": 0.0,
    }
    if layout.dp == 1:
        return shares
    per_token = rate(job) / link(job, layout.dp * t) / tokens  # F / (B · T)
    once = 2 / 3 * max(0.0, per_token - 1) / m
    if layout.sharding == "zero2":
        shares["data parallel"] = max(0.0, (1 + 1 / m) / 3 * per_token - 2 / 3)
    elif layout.sharding != "zero3":
        shares["data parallel"] = once
    elif layout.shard_group:
        inside = rate(job) / link(job, layout.shard_group * t) / tokens
        shares["data parallel"] = once + max(0.0, inside - 1)
    else:
        shares["data parallel"] = max(0.0, per_token - 1)
    return shares


def rate(job: Job) -> float:
    """Operations/s that products are taken to reach."""
    return RATE * job.machine.gpu.flops


def link(job: Job, ranks: int) -> float:
    """Bytes/s at which a ring over ``ranks`` neighbours passes on: it leaves a host once, with all its adapters."""
    machine = job.machine
    inside = machine.gpu.link_bytes_per_s
    return inside if machine.inside(ranks) else min(inside, ACROSS * machine.between)


def _messages(job: Job, layout: Layout) -> float:
    """What a stage's messages add, none hidden: of each micro-batch v activations there and v gradients back."""
    if layout.pp == 1:
        return 0.0
    machine, shape = job.machine, job.shape
    here = max(1, machine.host_gpus // layout.tp) if not machine.inside(layout.gpus) else 1  # that share the adapters
    of_a_token = layout.chunks * 4 * shape.hidden * here / link(job, layout.gpus)
    return of_a_token / (6 * shape.params / (rate(job) * layout.tp * layout.pp))


def _ways(job: Job, batch: int) -> Iterator[list[Layout]]:
    """Layouts by powers of two; those of one list differ in their micro-batch alone, the largest first."""
    machine, shape = job.machine, job.shape
    for tp, pp in itertools.product(_powers(machine.host_gpus), _powers(shape.layers)):
        if machine.gpus % (tp * pp) or shape.heads % tp:
            continue
        dp = machine.gpus // (tp * pp)
        if batch % dp:
            continue
        for sharding, group in _shardings(job, tp, pp, dp):
            share = batch // dp
            micros = (
                [n for n in range(min(share, MOST_SAMPLES), 0, -1) if share % n == 0] if sharding == "zero3" else [1]
            )
            for recompute in ("none", "full"):
                base = Layout(
                    tp=tp, pp=pp, dp=dp, sequence_parallel=tp > 1, sharding=sharding, shard_group=group,
                    recompute=recompute,
                )  # fmt: skip
                for chunks in _chunks(shape.layers, pp, share):
                    yield [base.but(micro_batch=n, accumulation=share // n, chunks=chunks) for n in micros]


def _shardings(job: Job, tp: int, pp: int, dp: int) -> list[tuple[str, int]]:
    if dp == 1:
        return [("none", 0)]
    ways = [("none", 0), ("zero1", 0)]
    if pp == 1:
        ways += [("zero2", 0), ("zero3", 0)]
        inside = job.machine.host_gpus // tp
        if 1 < inside < dp and dp % inside == 0:
            ways.append(("zero3", inside))
    return ways


def _chunks(layers: int, pp: int, micro_batches: int) -> list[int]:
    """Chunks of a stage: one, or an interleaved schedule's, which divide its layers."""
    if pp == 1 or micro_batches % pp:
        return [1]
    return [v for v in range(1, MOST_CHUNKS + 1) if -(-layers // pp) % v == 0]


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


def _settings(one: Candidate) -> tuple[int, int, int, float]:
    """Cuts of the model, chunks, how much goes between hosts; then what is added."""
    layout = one.layout
    traffic = ("none", "zero1", "zero2", "hsdp", "zero3").index("hsdp" if layout.shard_group else layout.sharding)
    return (layout.tp > 1) + (layout.pp > 1), layout.chunks, traffic, one.added
