"""The table of ways to run a fine-tune, from the model of :mod:`pardemo.planner.layouts`: in a second, without torch.

``pardemo plan`` asks it; ``pardemo plan --dry-run`` runs the engine of the row that it recommends beside it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pardemo.planner.job import RankJob
from pardemo.planner.layouts.job import engines
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.job.machines import Machine
from pardemo.planner.layouts.model import configurations
from pardemo.planner.layouts.model.shape import Shape
from pardemo.planner.layouts.model.tuning import Tuning
from pardemo.planner.layouts.price.memory import memory
from pardemo.planner.layouts.price.predicted import PredictedStep
from pardemo.planner.layouts.price.step import step
from pardemo.planner.table import OFFLOADED, Hardware, Plan, PlanRow, Request

MOST_EXPONENT = 9  # 512 times the GPUs that hold one copy of the model
TOKENS = 64  # sequences are rounded to multiples of
#: Tokens of a sample from which cutting it between GPUs is worth a word.
LONG = 16_384


def plan(request: Request) -> Plan:
    """All rows.

    Raises:
        ValueError: the model is none that is known, or its LoRA goes to modules that are not.
    """
    shape = configurations.of(request.job.config)
    rows = [
        row(request, shape, engine, again, offload, batch)
        for engine in request.engines
        if engine == "zero-0" or request.dp > 1
        for again in request.checkpointing
        for offload in request.offloads
        if offload in OFFLOADED[engine]
        for batch in request.micro_batches
    ]
    return Plan(request, rows)


def machine_of(cluster: Hardware) -> Machine:
    """GPUs as the step model sees them."""
    share = 1.0 if cluster.gpu.measured else Machine.link_share
    return Machine(cluster.gpu, cluster.gpus, cluster.gpus // cluster.hosts, cluster.between, link_share=share)


def tuning_of(job: RankJob) -> Tuning:
    """What the job trains. Logits are made for all tokens, but where the model makes them at labels alone."""
    labels = job.labels if getattr(job.config, "loss_head", "full") == "labels" else 1.0
    more: dict[str, Any] = {
        "base": job.base,
        "optimizer": job.optimizer,
        "labels": labels,
        "fused_loss": job.fused_loss,
    }
    if job.adapter is None:
        return Tuning(**more)
    adapter = job.adapter
    return Tuning(adapter.rank, tuple(adapter.target), adapter.dropout, embeddings=job.embeddings, **more)


def fine_tune(request: Request, shape: Shape, engine: str, again: bool, offload: str, batch: int) -> tuple[Job, Layout]:
    """One row's job and its layout."""
    job = request.job.but(engine=engine, ranks=request.dp, batch=batch, checkpointing=again)
    return tuned(job, request.cluster, max(1, request.share // batch), offload, request.tp, request.pp, shape)


def tuned(
    job: RankJob,
    cluster: Hardware,
    accumulation: int,
    offload: str = "none",
    tp: int = 1,
    pp: int = 1,
    shape: Shape | None = None,
) -> tuple[Job, Layout]:
    """A rank's job in steps of ``accumulation`` micro-batches, as memory and time are reckoned, and its layout.

    Args:
        offload: as DeepSpeed's: ``none``, ``optimizer`` or ``optimizer+parameters``.
        tp, pp: tensor-parallel ranks and pipeline stages of each of the job's ranks. shape: of its model, if known.

    Raises:
        ValueError: the model is none that is known.
    """
    return engines.fine_tune(
        shape or configurations.of(job.config), machine_of(cluster), tuning_of(job), job.engine, job.ranks, job.batch,
        job.sequence, checkpointing=job.checkpointing, accumulation=accumulation, offload=offload, tp=tp, pp=pp,
        bucket=job.zero.get("reduce_bucket_size", engines.BUCKET), overlaps=job.zero.get("overlap_comm"),
    )  # fmt: skip


def step_of(job: RankJob, cluster: Hardware, accumulation: int, offload: str = "none") -> PredictedStep:
    """Seconds and sent bytes of a rank's step of ``accumulation`` micro-batches, on ``job.ranks`` GPUs of the cluster.

    Raises:
        ValueError: the model is none that is known, or its LoRA goes to modules that are not.
    """
    return step(*tuned(job, cluster, accumulation, offload))


def row(request: Request, shape: Shape, engine: str, again: bool, offload: str, batch: int) -> PlanRow:
    """One row of the table."""
    job, layout = fine_tune(request, shape, engine, again, offload, batch)
    held, time = memory(job, layout), step(job, layout)
    cluster, hours = request.cluster, request.steps * time.seconds / 3600
    money = None if cluster.price is None else hours * cluster.gpus * cluster.price
    return PlanRow(
        engine, offload, again, batch, layout.accumulation, held, time, held.peak_bytes <= cluster.room,
        time.tokens_per_s, hours, money,
    )  # fmt: skip


def longest_sequence(request: Request, best: PlanRow) -> int:
    """Tokens of the longest sample that fits as the row is run, in steps of 64; at most the model's context."""
    shape = configurations.of(request.job.config)
    job, layout = fine_tune(request, shape, best.engine, best.checkpointing, best.offload, best.batch)
    context = getattr(request.job.config, "max_position_embeddings", None) or 1 << 20
    fits = _fits(request, lambda steps: (replace(job, sequence=TOKENS * steps), layout))
    if context < 2 * TOKENS:
        return context if memory(replace(job, sequence=context), layout).peak_bytes <= request.cluster.room else 0
    return TOKENS * largest(fits, context // TOKENS)


def largest_batch(request: Request, best: PlanRow) -> int:
    """Samples of the largest micro-batch that fits as the row is run."""
    shape = configurations.of(request.job.config)
    job, layout = fine_tune(request, shape, best.engine, best.checkpointing, best.offload, best.batch)
    return largest(_fits(request, lambda batch: (job, layout.but(micro_batch=batch))), 4096)


def fewest_gpus(request: Request) -> int | None:
    """The smallest power of two of such GPUs on which the job fits, sample by sample; None if there is none.

    Stage 3 with checkpointing takes the least without offload.
    """
    unit = request.tp * request.pp
    for exponent in range(MOST_EXPONENT + 1):
        if least_bytes(request, unit << exponent) <= request.cluster.room:
            return unit << exponent
    return None


def least_bytes(request: Request, gpus: int) -> float:
    """Peak of micro-batches of one sample on so many GPUs, under stage 3 with checkpointing."""
    dp = max(1, gpus // (request.tp * request.pp))
    engine = "zero-3" if dp > 1 else "zero-0"
    job, layout = fine_tune(request, configurations.of(request.job.config), engine, True, "none", 1)
    return memory(job, layout.but(dp=dp, accumulation=max(1, request.samples_per_step // dp))).peak_bytes


def smallest_cluster(request: Request) -> str:
    """What to say where nothing fits: the smallest cluster that works, or what was asked for that keeps it from it."""
    count, name = fewest_gpus(request), request.cluster.gpu.name
    if count is None:
        most = request.tp * request.pp << MOST_EXPONENT
        others = [*_with_fused_loss(request, None), "use tensor parallelism (--tp), or a GPU with more memory"]
        return f"not even {most} × {name} hold it: {'; or '.join([*others, *_cut_sequences(request)])}"
    if count <= request.cluster.gpus:
        return (
            "these GPUs hold it with checkpointing and micro-batches of 1" + (", ZeRO 3" if request.dp > 1 else "")
            + ": leave out --batch, --checkpointing and --zero"
        )  # fmt: skip
    told = f"the smallest cluster that works is {count} × {name} with ZeRO 3, checkpointing and micro-batches of 1"
    return "; or ".join([told, *_with_fused_loss(request, count), *_cut_sequences(request)])


def _with_fused_loss(request: Request, count: int | None) -> list[str]:
    """Whether fewer GPUs hold it if logits are never there in whole; ``count``: how many hold it so."""
    if request.job.fused_loss:
        return []
    fewer = fewest_gpus(replace(request, job=request.job.but(fused_loss=True)))
    if fewer is None or (count is not None and fewer >= count):
        return []
    return [f"--fused-loss, which makes logits piece by piece: then {fewer} × {request.cluster.gpu.name} hold it"]


def _cut_sequences(request: Request) -> list[str]:
    """Where sequences are long, that another procedure cuts them."""
    return ["--search, which also cuts sequences between GPUs (CP)"] if request.job.sequence >= LONG else []


def _fits(request: Request, of: Callable[[int], tuple[Job, Layout]]) -> Callable[[int], bool]:
    return lambda size: memory(*of(size)).peak_bytes <= request.cluster.room


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest of 1 to ``most`` that fits, 0 where 1 does not; what fits, fits smaller, too."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
